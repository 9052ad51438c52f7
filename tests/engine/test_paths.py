"""Forwards that take another path from step to step: inside the budget on every one of them, with the numbers of plain PyTorch."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit.planner.solver import Solver
from memfit.planner.timeline import Timeline
from memfit.planning import planning_of
from memfit.values.trace import Trace
from models import paths
from models.paths import Block, Blocks, SelfConditioned, loss_of, sample, seeded
from sweeps import at_night

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES_ONLY = {"Cropped"}  # the same operations in other sizes: within the budget, but not predicted to the byte
NIGHT = {
    "Cropped",
    "Exchanged",
    "SelfConditioned",
    "LeftOutByNumpy",
    "Quantised",
    "Augmented",
    "LeftOutInside",
    "LeftOutByPython",
    "OneOfTwo",
}  # alike to the others
RARE = {
    "LeftOutByNumpy": 40,
    "LeftOutInside": 60,
}  # steps until the longest path has been taken; of the others 10 are enough
SLACK = 512  # numbers that kernels wrap into tensors; plans keep as much free


@functools.cache
def planned(build: Any, **named: Any) -> memfit.Plan:
    seeded(0)
    fixed = {"micro_batches": 1, **named}
    return memfit.plan(build(), sample(), loss_of, 1 << 50, small.adamw, fixed=fixed)


def trace_of(plan: memfit.Plan) -> Trace:
    planning = planning_of(plan)
    assert planning is not None
    return planning.solver(plan.choices.micro_batches).trace


def train(plan: memfit.Plan, build: Any, steps: int = 10, *, learns: bool = True) -> list[int]:
    """Peaks of steps under a plan, each as in plain PyTorch: losses and parameters are compared."""
    seeded(0)
    model = build()
    seeded(0)
    reference = build()
    engine = memfit.apply(plan, model, loss_of, small.adamw)
    if not learns:
        engine.learner = None
    optimizer = small.adamw(reference.parameters())
    peaks = []
    for step in range(steps):
        seeded(100 + step)
        record = engine.step(sample(), meter=True)
        seeded(100 + step)
        loss = loss_of(reference, sample())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not learns or record.divergences == ()
        assert record.loss == loss.item()
        assert record.peak_bytes is not None
        peaks.append(record.peak_bytes)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    return peaks


@pytest.mark.alternate(0)
@pytest.mark.parametrize("name", at_night(paths.PROGRAMS, NIGHT))
def test_no_path_is_above_the_budget_and_numbers_are_those_of_plain_pytorch(name: str) -> None:
    build: Any = paths.PROGRAMS[name]
    plain = planned(build)
    smallest = memfit.smallest_budget(plain)
    for budget in (plain.prediction.plain_peak_bytes * 6 // 10, smallest):
        plan = memfit.replan(plain, max(budget, smallest))
        peaks = train(plan, build, RARE.get(name, 10))
        assert max(peaks) <= plan.budget_bytes
        assert plan.script.recomputations > 0
        if name not in SIZES_ONLY:
            assert plan.prediction.peak_bytes - SLACK <= max(peaks) <= plan.prediction.peak_bytes + SLACK


def test_blocks_that_chance_leaves_out_are_planned_one_by_one() -> None:
    plain = planned(paths.LeftOutByTorch)
    trace = trace_of(plain)
    assert trace.source == "fake"
    # At the upper end of the range nothing is left out, at the lower end everything.
    assert sum(call.module.count(".") == 1 for call in trace.calls) == 5
    assert not any(call.module.startswith("blocks") for call in min(trace.paths, key=lambda p: len(p.calls)).calls)
    plan = memfit.replan(plain, memfit.smallest_budget(plain))
    assert {call.module for call in plan.script.calls} == {f"blocks.{n}" for n in range(5)} | {"head"} & {
        call.module for call in plan.script.calls
    }
    assert any("paths were seen in 8 forwards" in note for note in plan.notes)
    assert any("within calls of modules" in note for note in plan.notes)


def test_a_plan_of_calls_is_saved_and_read(tmp_path: Any) -> None:
    plain = planned(paths.LeftOutByTorch)
    plan = memfit.replan(plain, memfit.smallest_budget(plain))
    plan.save(tmp_path / "plan.json")
    loaded = memfit.Plan.load(tmp_path / "plan.json")
    assert loaded.script == plan.script
    assert max(train(loaded, paths.LeftOutByTorch, 4)) <= plan.budget_bytes
    trace = trace_of(plain)
    trace.save(tmp_path / "trace.json.gz")
    assert Trace.load(tmp_path / "trace.json.gz") == trace


def test_a_second_run_with_gradients_is_followed_too() -> None:
    def build() -> nn.Module:
        return SelfConditioned(gradients=True)

    plain = planned(build)
    plan = memfit.replan(plain, memfit.smallest_budget(plain))
    assert max(train(plan, build)) <= plan.budget_bytes


@pytest.mark.slow
def test_micro_batches_may_take_other_paths_than_each_other() -> None:
    plain = planned(paths.LeftOutByTorch, micro_batches=2)
    plan = memfit.replan(plain, memfit.smallest_budget(plain))
    seeded(0)
    engine = memfit.apply(plan, paths.LeftOutByTorch(), loss_of, small.adamw)
    for step in range(8):
        seeded(step)
        record = engine.step(sample(), meter=True)
        assert record.divergences == ()
        assert record.peak_bytes is not None
        assert record.peak_bytes <= plan.budget_bytes


def test_planning_draws_from_no_generator() -> None:
    seeded(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]  # noqa: NPY002
    model = paths.LeftOutByPython()
    after_building = random.getstate()
    memfit.plan(model, sample(), loss_of, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    assert random.getstate() == after_building == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index,union-attr]  # noqa: NPY002


class Unforeseen(Blocks):
    """Takes a path that no draw shows: a block that is swapped for another one in training."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = Block()
        self.unforeseen = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand([]) >= 0.3:
                x = torch.tanh(block(x)) if self.unforeseen else block(x)
        y: Tensor = self.head(x)
        return y


@pytest.mark.parametrize("learns", [pytest.param(True, marks=pytest.mark.slow), False])
def test_what_a_path_has_in_common_with_those_that_were_seen_is_followed(*, learns: bool) -> None:
    """Operations between the calls are not planned, so others there change nothing in the calls; that forward is longer is noticed all the same."""
    plain = planned(Unforeseen)
    plan = memfit.replan(plain, memfit.smallest_budget(plain))

    def build() -> nn.Module:
        model = Unforeseen()
        model.unforeseen = True
        return model

    with pytest.warns(UserWarning, match="the longest path that is known has ended"):
        peaks = train(plan, build, 6, learns=learns)
    assert max(peaks) < plan.prediction.plain_peak_bytes


class Overwriting(Blocks):
    """On some paths the input of a block, which its recomputation reads, is written after it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        y = self.blocks[1](x)
        if torch.rand([]) < 0.5:
            x.mul_(2.0)
        z: Tensor = self.head(self.blocks[2](y + x.detach()))
        return z


def test_a_write_into_what_a_call_keeps_does_not_change_gradients() -> None:
    """LayerNorm saves its input, so torch refuses the write too: the block's first operation must not save what is written."""
    plain = planned(overwriting_free_blocks)
    plan = memfit.replan(plain, memfit.smallest_budget(plain))
    train(plan, overwriting_free_blocks, 8)


class Free(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.down(functional_gelu(self.up(x.detach() * 1.5))))
        return y


def overwriting_free_blocks() -> nn.Module:
    model = Overwriting()
    model.blocks = nn.ModuleList(Free() for _ in range(3))
    return model


def functional_gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x)


@pytest.mark.parametrize(
    "draws", [range(15), pytest.param(range(15, 60), marks=pytest.mark.slow)], ids=["15 draws", "45 more draws"]
)
def test_the_smallest_budget_has_a_plan_whatever_operations_cost(draws: range) -> None:
    """The plan that needs least on all paths may be no use on the first one, where the search weighs plans against each other."""
    trace = planning_of(planned(overwriting_free_blocks)).solver(1).trace
    for draw in map(Random, draws):
        factors = [draw.choice([0.1, 1.0, 1.0, 1.0, 10.0]) for _ in range(997)]
        solver = Solver(Timeline(shaken(replace(trace, paths=tuple(shaken(p, factors) for p in trace.paths)), factors)))
        assert solver.fitting(solver.needed(solver.least())) is not None


def shaken(trace: Trace, factors: Sequence[float]) -> Trace:
    """With other seconds of its operations."""
    operations = (replace(o, seconds=o.seconds * factors[n % len(factors)]) for n, o in enumerate(trace.operations))
    return replace(trace, operations=tuple(operations))
