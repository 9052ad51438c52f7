"""What the engine takes once a step is timed on the user's model when it is planned for, and changes nothing there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import small
from memfit.capture import trace_source
from memfit.capture.noting_time import ROUNDS, noting_seconds
from memfit.capture.trace_source import TraceSource
from memfit.planning import planning_of
from memfit.techniques.choices import BASELINE
from models.outcome import plans_between


def test_the_median_of_some_rounds_counts_but_for_the_first() -> None:
    times = iter([0.0, 9.0, *(t for n in range(ROUNDS) for t in (10.0 * n, 10.0 * n + 1.0 + n))])
    assert noting_seconds(small.chain(), small.squared_error, (), lambda: next(times)) == 1.0 + ROUNDS // 2


def test_nothing_of_the_model_is_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    names = [name for name, _ in model.named_buffers()]
    before = {name: (tensor.clone(), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    generator = torch.get_rng_state()
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    noting_seconds(model, small.squared_error, names, iter(range(100)).__next__)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert torch.equal(tensor, before[name][0])
        assert tensor._version == before[name][1]
    assert torch.equal(torch.get_rng_state(), generator)
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == attributes


def test_it_is_in_the_seconds_of_plans_and_not_of_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_source, "noting_seconds", lambda *_: 0.125)
    monkeypatch.setattr(trace_source, "COUNTED", 1.0)
    model, sample = small.chain(), small.rows()
    plain, tight = plans_between(model, sample, small.squared_error, small.adamw, (1.0, 0.0))
    trace = planning_of(plain).solver(1).trace
    assert trace.noted_seconds == 0.125
    assert trace.counted_seconds > 0.0
    more = trace.noted_seconds + trace.counted_seconds
    assert plain.prediction.step_seconds == pytest.approx(plain.prediction.plain_step_seconds + more)
    assert plain.prediction.step_seconds == plain.prediction.bound_seconds
    assert tight.prediction.step_seconds > plain.prediction.step_seconds
    assert plain.gap == 0.0


def test_a_gpu_is_busy_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_source, "noting_seconds", lambda *_: 0.125)
    with torch.device("meta"):
        model, sample = small.chain(), small.rows()
    trace = TraceSource(model, sample, small.squared_error, small.adamw, device="rtx4090").trace_of(BASELINE)
    assert trace.noted_seconds == trace.counted_seconds == 0.0
