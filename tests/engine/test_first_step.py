"""A first forward that builds what later ones find: its step is inside the budget, too, with the numbers of plain PyTorch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
import small
from memfit.planning import planning_of
from memfit.values.trace import Trace

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 48


class Block(nn.Module):
    """A feed-forward block that rotates its input by a table, which its first forward fills: how far is in an attribute, as in rotary-embedding-torch."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(small.WIDTH, 4 * small.WIDTH), nn.Linear(4 * small.WIDTH, small.WIDTH)
        self.register_buffer("table", torch.zeros(TOKENS, small.WIDTH), persistent=False)
        self.filled = 0

    def angles(self, tokens: int) -> Tensor:
        if tokens > self.filled:
            rows = torch.arange(tokens, dtype=torch.float32)[:, None]
            self.table[:tokens] = rows / (1.0 + torch.arange(small.WIDTH, dtype=torch.float32))
            self.filled = tokens
        return self.table[:tokens]

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.angles(x.shape[1]).cos()
        y: Tensor = x + self.down(functional.gelu(self.up(x)))
        return y


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(5)), nn.Linear(small.WIDTH, small.WIDTH))


def sample() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, TOKENS, small.WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


@functools.cache
def planned(micro_batches: int = 1) -> memfit.Plan:
    """A plan in which nothing need be dropped, for a model that has built nothing."""
    fixed = {"micro_batches": micro_batches}
    return memfit.plan(build(), sample(), small.squared_error, 1 << 40, small.adamw, fixed=fixed)


def trace_of(plan: memfit.Plan) -> Trace:
    planning = planning_of(plan)
    assert planning is not None
    return planning.solver(plan.choices.micro_batches).trace


def train(engine: memfit.Engine, reference: nn.Module, steps: int = 3) -> list[int]:
    """Peaks of steps, each compared with plain PyTorch's."""
    optimizer = small.adamw(reference.parameters())
    peaks = []
    for _ in range(steps):
        record = engine.step(sample(), meter=True)
        loss = small.squared_error(reference, sample())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert record.divergences == ()
        assert record.loss == loss.item()
        assert record.peak_bytes is not None
        peaks.append(record.peak_bytes)
    for mine, theirs in zip(engine.model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    return peaks


def test_the_first_step_is_planned_by_itself() -> None:
    plain = planned()
    first = trace_of(plain).first
    assert first is not None
    assert first.forward_operations > trace_of(plain).forward_operations
    smallest = memfit.smallest_budget(plain)
    assert smallest < 0.9 * plain.prediction.plain_peak_bytes
    for budget in (smallest, (smallest + plain.prediction.plain_peak_bytes) // 2):
        plan = memfit.replan(plain, budget)
        assert plan.script.first is not None
        assert plan.script.first.script.recomputations > 0
        assert any("the first step has a plan of its own" in note for note in plan.notes)
        engine = memfit.apply(plan, build(), small.squared_error, small.adamw)
        peaks = train(engine, build())
        assert max(peaks) <= budget
        assert peaks[1] == pytest.approx(plan.prediction.peak_bytes, abs=512)
        assert plan.script.first.before.keys() == {f"{n}.filled" for n in range(5)}


def test_a_model_that_has_built_everything_follows_the_same_plan() -> None:
    plan = memfit.replan(planned(), memfit.smallest_budget(planned()))
    model, reference = build(), build()
    for each in (model, reference):
        each(sample()[0])
    engine = memfit.apply(plan, model, small.squared_error, small.adamw)
    assert max(train(engine, reference)) <= plan.budget_bytes


def test_after_a_rehearsal_the_first_step_is_the_first_again() -> None:
    budget = memfit.smallest_budget(planned())
    model = build()
    engine = memfit.fit(model, sample(), small.squared_error, budget, small.adamw, fixed={"micro_batches": 1})
    assert model[0].filled == 0
    assert max(train(engine, build())) <= budget


def test_a_loop_of_ones_own_has_a_first_step_too() -> None:
    plan = memfit.replan(planned(), memfit.smallest_budget(planned()))
    model, reference = build(), build()
    engine = memfit.apply(plan, model, small.squared_error, small.adamw)
    batch = sample()
    for _ in range(2):
        with engine.forward() as follower:
            loss = small.squared_error(model, batch)
        loss.backward()
        assert follower is not None
        assert follower.divergence is None
        expected = small.squared_error(reference, batch)
        expected.backward()
        assert loss.item() == expected.item()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_a_failed_first_step_is_the_first_again() -> None:
    plan = memfit.replan(planned(), memfit.smallest_budget(planned()))
    failing = [True]

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        loss = small.squared_error(model, batch)
        if failing.pop() if failing else False:
            raise KeyError("once")
        return loss

    model = build()
    engine = memfit.apply(plan, model, loss_of, small.adamw)
    with pytest.raises(KeyError):
        engine.step(sample())
    assert model[0].filled == 0
    assert max(train(engine, build())) <= plan.budget_bytes


def test_micro_batches_after_the_first_follow_the_first_step_too() -> None:
    plain = planned(2)
    plan = memfit.replan(plain, memfit.smallest_budget(plain))
    assert plan.script.first is not None
    engine = memfit.apply(plan, build(), small.squared_error, small.adamw)
    for _ in range(3):
        record = engine.step(sample(), meter=True)
        assert record.divergences == ()
        assert record.peak_bytes is not None
        assert record.peak_bytes <= plan.budget_bytes


def test_plan_and_trace_of_a_first_step_are_saved_and_read(tmp_path: Path) -> None:
    plan = memfit.replan(planned(), memfit.smallest_budget(planned()))
    plan.save(tmp_path / "plan.json")
    assert memfit.Plan.load(tmp_path / "plan.json").script == plan.script
    trace = trace_of(plan)
    trace.save(tmp_path / "trace.json.gz")
    assert Trace.load(tmp_path / "trace.json.gz") == trace


class FreezesItself(nn.Module):
    """Takes its weight out of training in its first forward, as compressive-transformer-pytorch does by `weight.detach_()`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(small.WIDTH, small.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functional.gelu(self.inner(x))
        self.inner.weight.detach_()
        return y + functional.gelu(self.inner(x.detach()))


def test_a_forward_that_freezes_a_part_does_so_in_training_alone_and_has_a_first_step() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(FreezesItself() for _ in range(4)), nn.Linear(small.WIDTH, small.WIDTH))

    model, plain = build(), build()
    fixed = {"micro_batches": 1}
    most = memfit.plan(model, sample(), small.squared_error, 1 << 50, small.adamw, fixed=fixed)
    assert all(parameter.requires_grad for parameter in model.parameters())
    plan = memfit.replan(most, max(memfit.smallest_budget(most), most.prediction.plain_peak_bytes * 3 // 4))
    engine = memfit.apply(plan, model, small.squared_error, small.adamw)
    with pytest.warns(UserWarning, match="4 no longer"):
        records = [engine.step(sample(), meter=True) for _ in range(3)]
    optimizer = small.adamw(plain.parameters())
    for record in records:
        loss = small.squared_error(plain, sample())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert record.loss == loss.item()
    assert not any(record.divergences or record.begun_anew for record in records)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert max(record.peak_bytes or 0 for record in records) <= plan.budget_bytes
