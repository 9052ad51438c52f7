"""A rehearsal leaves everything as it was."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit import rehearsal
from memfit.errors import InfeasibleError
from memfit.units import format_bytes
from small import adamw, chain, rows, squared_error


class Averaging(nn.Module):
    """Keeps a mean in a buffer that every forward replaces, and draws noise."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return functional.dropout(functional.gelu(self.layer(x)), 0.1)


def engine_of(dtype: torch.dtype = torch.float32) -> tuple[memfit.Engine, Any]:
    sample = tuple(each.to(dtype) for each in rows())
    model = Averaging(sample[0].shape[1]).to(dtype)
    made = memfit.plan(model, sample, squared_error, "1GiB", adamw, fixed={"micro_batches": 1})
    return memfit.apply(made, model, squared_error, adamw), sample


def plain_losses(model: nn.Module, sample: Any, steps: int = 3) -> list[float]:
    """As PyTorch trains without memfit."""
    optimizer = adamw(model.parameters())
    losses = []
    for _ in range(steps):
        loss = squared_error(model, sample)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_buffer_that_forward_replaces_is_as_before() -> None:
    engine, sample = engine_of()
    mean = engine.model.mean
    memfit.api.rehearse(engine, sample)
    assert engine.model.mean is mean
    assert not mean.any()  # type: ignore[operator]


@pytest.mark.parametrize("steps", [0, 2])
def test_training_goes_on_as_without_a_rehearsal(steps: int) -> None:
    torch.manual_seed(0)
    engine, sample = engine_of()
    for _ in range(steps):
        engine.step(sample)
    torch.manual_seed(1)
    assert engine.optimizer is not None
    before = copy.deepcopy((engine.model.state_dict(), engine.optimizer.state_dict()))
    first = engine.step(sample).loss
    engine.model.load_state_dict(before[0])
    engine.optimizer.load_state_dict(before[1])
    if not steps:
        engine.optimizer.state.clear()
    torch.manual_seed(1)
    memfit.api.rehearse(engine, sample)
    assert engine.step(sample).loss == first
    assert engine.steps == len(engine.records) == steps + 2


class Lookahead(torch.optim.SGD):
    """Goes back half of the way every second step (Zhang et al., 2019), with what it needs outside of its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.count = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        self.count += 1
        if self.count % 2:
            return
        with torch.no_grad():
            for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
                parameter.seen = getattr(parameter, "seen", 0) + 1
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


@pytest.mark.parametrize("steps", [0, 3])
def test_what_an_optimizer_notes_besides_its_state_is_as_before(steps: int) -> None:
    torch.manual_seed(0)
    sample, model = rows(), chain(2)
    made = memfit.plan(model, sample, squared_error, "1GiB", Lookahead, fixed={"micro_batches": 1})
    engine = memfit.apply(made, model, squared_error, Lookahead)
    for _ in range(steps):
        engine.step(sample)
    optimizer: Any = engine.optimizer
    before = copy.deepcopy((optimizer.slow, optimizer.count, [vars(p) for p in model.parameters()]))
    memfit.api.rehearse(engine, sample)
    slow, count, noted = before
    assert all(torch.equal(a, b) for a, b in zip(optimizer.slow, slow, strict=True))
    assert (optimizer.count, [vars(p) for p in model.parameters()]) == (count, noted)


def test_tensors_of_inference_mode_among_attributes_are_as_before() -> None:
    engine, sample = engine_of()
    with torch.inference_mode():
        seen = engine.model.seen = torch.ones(3)
    memfit.api.rehearse(engine, sample)
    assert engine.model.seen is seen
    assert seen.sum() == 3


class Remembering(nn.Module):
    """Fills a table at its first forward and says so in an attribute; counts its forwards, and passes a state on to the next one."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("table", torch.zeros(width), persistent=False)
        self.filled = 0
        self.forwards = 0
        self.state: Tensor | None = None
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.filled < x.shape[1]:
            self.table[: x.shape[1]] = torch.linspace(1.0, 2.0, x.shape[1])
            self.filled = x.shape[1]
        self.forwards += 1
        self.seen.append(self.forwards)
        x = functional.gelu(self.layer(x) * self.table / self.forwards)
        if self.state is not None:
            x = x + self.state
        self.state = x.detach().mean(0)
        return x


def test_attributes_that_forward_sets_are_as_before_so_fit_trains_as_plain_pytorch() -> None:
    sample = rows()
    torch.manual_seed(0)
    model = Remembering(sample[0].shape[1])
    reference = copy.deepcopy(model)
    engine = memfit.fit(model, sample, squared_error, "1GiB", adamw, fixed={"micro_batches": 1})
    assert (model.filled, model.forwards, model.state, model.seen) == (0, 0, None, [])
    assert not model.table.any()
    assert [engine.step(sample).loss for _ in range(3)] == plain_losses(reference, sample)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_optimizer_state_of_another_dtype_than_its_parameter_is_as_before() -> None:
    engine, sample = engine_of(torch.bfloat16)
    engine.step(sample)
    assert engine.optimizer is not None
    for kept in engine.optimizer.state.values():
        kept["exp_avg"] = kept["exp_avg"].float()
        kept["exp_avg_sq"] = kept["exp_avg_sq"].float()
    before = {id(p): dict(kept) for p, kept in engine.optimizer.state.items()}
    # torch's own has no such state
    engine.optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    memfit.api.rehearse(engine, sample)
    for parameter, kept in engine.optimizer.state.items():
        for name, value in kept.items():
            assert isinstance(value, Tensor)
            assert value.dtype == before[id(parameter)][name].dtype
            assert torch.equal(value, before[id(parameter)][name])


def test_no_state_stays_in_the_file_of_the_rehearsal() -> None:
    engine, sample = engine_of()
    engine.step(sample)
    memfit.api.rehearse(engine, sample)
    assert "memfit-rehearsal-" not in Path("/proc/self/maps").read_text(encoding="utf-8")


class Warming(nn.Module):
    """Scales by a count of its calls and by what it has seen last; a table is built once, as a buffer that no snapshot holds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.calls, self.last, self.average = 0, [1.0], torch.ones(width)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(0.5, 1.0, x.shape[1]), persistent=False)
        self.calls += 1
        self.last.append(1 / len(self.last))
        self.average.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        out: Tensor = self.layer(x * self.average.clone()) * self.last[-1] * self.table
        return out / self.calls


def test_counters_averages_and_what_is_built_once_are_as_before() -> None:
    sample = rows()
    torch.manual_seed(0)
    plain = Warming(sample[0].shape[1])
    model = copy.deepcopy(plain)
    engine = memfit.fit(model, sample, squared_error, "1GiB", adamw, fixed={"micro_batches": 1})
    assert (model.calls, model.last, model.average.tolist()) == (0, [1.0], [1.0] * sample[0].shape[1])
    assert not hasattr(model, "table")
    assert [engine.step(sample).loss for _ in range(3)] == plain_losses(plain, sample)


# ------------------------------------------------------------------------------------------------------------ repairs

MISSING = 30_000  # bytes that a prediction does not know of


@pytest.fixture
def taking_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rehearsal measures so many bytes more than there were."""
    known = rehearsal.rehearse

    def more(*given: Any, **named: Any) -> Any:
        found = known(*given, **named)
        return dataclasses.replace(found, measured_peak_bytes=found.measured_peak_bytes + MISSING)

    monkeypatch.setattr(rehearsal, "rehearse", more)


def fitted(budget: int | str, **named: Any) -> memfit.Engine:
    return memfit.fit(chain(4), rows(), squared_error, budget, adamw, **{"fixed": {"micro_batches": 1}, **named})


@functools.cache
def smallest() -> int:
    made = memfit.plan(chain(4), rows(), squared_error, "1GiB", adamw, fixed={"micro_batches": 1})
    return memfit.smallest_budget(made)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "taking_more")
def test_a_repair_that_fails_names_the_users_budget_and_one_that_would_do() -> None:
    budget = smallest() + MISSING // 2
    with pytest.raises(InfeasibleError) as refused:
        fitted(budget)
    error = refused.value
    assert error.budget_bytes == budget
    assert f"above the budget of {format_bytes(budget)} and" in str(error)
    larger, *others = error.remedies
    assert larger.text in str(error)
    assert larger.arguments == {"budget": larger.text.partition("=")[2].strip('"')}
    assert larger.saved_bytes == error.minimum_bytes - budget
    engine = fitted(larger.arguments["budget"])
    assert engine.rehearsal is not None
    assert engine.rehearsal.measured_peak_bytes <= error.minimum_bytes
    assert engine.plan.budget_bytes >= error.minimum_bytes
    # Another number of micro-batches than the fixed one is told where it does.
    for other in others:
        assert other.arguments is not None
        fitted(budget, **other.arguments)
    assert others


@pytest.mark.usefixtures("one_thread", "taking_more")
def test_a_plan_that_takes_less_than_the_budget_is_repaired_too() -> None:
    """One for a little less than the budget would be the same plan."""
    plain = memfit.plan(chain(4), rows(), squared_error, "1GiB", adamw, fixed={"micro_batches": 1})
    budget = plain.prediction.peak_bytes + MISSING * 9 // 10
    engine = fitted(budget)
    assert engine.rehearsal is not None
    assert engine.rehearsal.rounds == 2
    assert engine.rehearsal.measured_peak_bytes <= budget
