"""What following a plan costs: parts of forward in which nothing is dropped cost nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from memfit.planner.following import PART, part_bounds
from memfit.planner.timeline import Timeline
from memfit.planning import planning_of
from memfit.values.trace import ModuleCall
from sweeps import each_seed


def call(begin: int, end: int) -> ModuleCall:
    return ModuleCall("m", 0, (begin, end), (begin, end))


def test_small_calls_share_a_part_and_large_ones_are_cut_where_calls_end() -> None:
    small = [call(i, i + 5) for i in range(0, 50, 5)]
    assert part_bounds([call(0, 50), *small], 50) == [0, 15, 30, 50]
    halves = [call(0, 60), call(0, 30), call(0, 15), call(15, 30), call(30, 60), call(30, 31), call(45, 60)]
    assert part_bounds(halves, 60) == [0, 15, 30, 45, 60]
    assert part_bounds([], 40) == [0, 40]
    assert part_bounds([], 0) == [0, 0]


@each_seed(100)
def test_parts_cover_forward_once_and_none_but_a_whole_forward_is_small(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 200)
    calls: list[ModuleCall] = []

    def nest(begin: int, end: int, depth: int) -> None:
        at = begin
        while depth and at < end:
            first = chance.randint(at, end)
            last = chance.randint(first, end)
            calls.append(call(first, last))
            nest(first, last, depth - 1)
            at = last + 1

    nest(0, count, 4)
    bounds = part_bounds(calls, count)
    assert bounds[0] == 0
    assert bounds[-1] == count
    assert len(bounds) == 2 or all(end - begin >= PART for begin, end in zip(bounds, bounds[1:], strict=False))


class Chain(nn.Module):
    """Many small blocks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.usefixtures("one_thread")
def test_a_plan_pays_for_the_parts_it_acts_in_and_no_others() -> None:
    model, batch = Chain(40), torch.randn(64, 16)
    free = memfit.plan(model, batch, lambda m, b: m(b).square().mean(), 1 << 40, fixed={"micro_batches": 1})
    trace = planning_of(free).solver(1).trace
    timeline = Timeline(replace(trace, recomputed_seconds=0.0))  # what is left is following
    following, recipes = timeline.following, timeline.recipes
    runnable = [number for number, recipe in enumerate(recipes.recipes) if recipe.runnable and recipe.operations]
    assert len(following.seconds) > 10
    assert following.seconds_of([]) == 0
    every = following.seconds_of(runnable)
    one = following.seconds_of(runnable[:1])
    assert 0 < one < every / 5
    assert every == pytest.approx(sum(following.seconds), rel=0.2)
    assert timeline.seconds({}) == 0
    event = next(iter(timeline.saves_at))
    for recipe in runnable[:5]:
        assert timeline.seconds({event: (recipe,)}) == pytest.approx(
            timeline.run_seconds(recipe) + following.seconds_of([recipe])
        )
