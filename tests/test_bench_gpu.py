"""What the bench for a GPU works out without one: overlaps of copies and kernels, what is asked when, and for how long."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    sys.path.insert(0, str(BENCH))
    before = set(sys.modules)
    path = list(sys.path)
    names = ("overlap", "asking", "setting", "alone", "beside", "run")
    yield SimpleNamespace(**{name: importlib.import_module(f"gpu.{name}") for name in names})
    sys.path[:] = [p for p in path if p != str(BENCH)]
    for name in set(sys.modules) - before:
        if str(BENCH) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def event(name: str, start: float, end: float, stream: int = 7, kind: Any = torch._C._autograd.DeviceType.CUDA) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=kind, time_range=span, device_resource_id=stream)


def test_copies_and_the_kernels_of_the_busiest_stream_are_told_apart(gpu: Any) -> None:
    seen = [
        event("gemm", 0, 50),
        event("aten::mm", 0, 90, kind=torch._C._autograd.DeviceType.CPU),
        event("adamw", 10, 20, stream=9),
        event("Memcpy DtoH (Device -> Pinned)", 20, 30, stream=8),
        event("Memcpy HtoD (Pinned -> Device)", 40, 60, stream=9),
        event("Memcpy DtoD (Device -> Device)", 40, 60),
        event("Memset (Device)", 60, 70),
    ]
    kernels, down, up = gpu.overlap.device_spans(seen)
    assert kernels == [(0.0, 50e-6)]
    assert down == [(20e-6, 30e-6)]
    assert up == [(40e-6, 60e-6)]
    assert gpu.overlap.hidden_share(down, kernels) == pytest.approx(1.0)
    assert gpu.overlap.hidden_share(up, kernels) == pytest.approx(0.5)
    assert gpu.overlap.hidden_share([*down, *up], kernels) == pytest.approx(2 / 3)


def test_what_torchs_profiler_gives_can_be_read(gpu: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(8).add_(1)
    events = profile.events()
    assert events
    assert all(hasattr(e, "device_resource_id") and e.time_range.end >= e.time_range.start for e in events)
    assert gpu.overlap.device_spans(events) == ([], [], [])


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda t: (t[0], t[0] + t[1])), max_size=8)


@given(copies=spans, kernels=spans)
def test_the_hidden_share_is_that_of_counting_moments(gpu: Any, copies: Any, kernels: Any) -> None:
    copying = {moment for start, end in copies for moment in range(start, end)}
    computing = {moment for start, end in kernels for moment in range(start, end)}
    expected = len(copying & computing) / len(copying) if copying else None
    assert gpu.overlap.hidden_share(copies, kernels) == (expected if expected is None else pytest.approx(expected))


def asked(gpu: Any, ask: Any, path: Path, seconds: float) -> list[dict[str, Any]]:
    gpu.asking.answer("question", gpu.asking.Question(ask, seconds, 0.0), gpu.setting.Setting(tiny=True), path, seconds)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_question_is_cut_when_its_time_is_over_and_keeps_its_rows(gpu: Any, tmp_path: Path) -> None:
    def ask(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"row": 1}
        while True:
            time.sleep(0.01)

    rows = asked(gpu, ask, tmp_path / "question.jsonl", 0.2)
    assert rows[1] == {"row": 1}
    assert rows[-1] == {"cut_after_seconds": 0.2}
    assert gpu.asking.state_of(tmp_path / "question.jsonl") == "cut"


def test_a_question_that_fails_takes_no_other_along(gpu: Any, tmp_path: Path) -> None:
    def ask(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"row": 1}
        raise ValueError("no")

    assert asked(gpu, ask, tmp_path / "question.jsonl", 30)[-1] == {"failed": "ValueError: no"}
    time.sleep(0.05)  # no alarm is left


def test_what_was_never_asked_comes_first_and_what_is_done_does_not_come_again(gpu: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"cut_after_seconds": 3}\n')
    (tmp_path / "b.jsonl").write_text('{"row": 1}\n{"done": true}\n')
    assert gpu.asking.turns(["a", "b", "c"], tmp_path) == [("c", False), ("a", True)]


def test_all_questions_together_stay_within_two_calls(gpu: Any) -> None:
    questions = gpu.run.QUESTIONS.values()
    assert sum(question.seconds for question in questions) <= 2 * gpu.run.WHOLE_SECONDS < 18 * 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["techniques", "swap", "streaming", "optimizers", "frontier_bert"])
def test_questions_are_answered_on_small_models(gpu: Any, name: str) -> None:
    setting = gpu.setting.Setting(tiny=True)
    if setting.device.type == "cuda":
        pytest.skip("for machines without a GPU; with one, the bench itself is run")
    rows = list(gpu.run.QUESTIONS[name].ask(setting))
    assert rows
    for row in rows:
        assert "failed" not in row or "torchao" in row["optimizer"], row
        assert row.get("equal", True) or not row["must_be_equal"], row
        if "predicted_bytes" in row:
            assert row["predicted_bytes"] == pytest.approx(row["allocated_bytes"], rel=0.005), row
    if name == "swap":
        assert any(row["swapped_bytes"] for row in rows)
