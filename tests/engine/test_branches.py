"""Forwards that part early on: each path has a plan of its own, in one budget, and what is followed until they part serves all."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

import memfit
import small
from memfit.hardware.machine import Link
from memfit.planner.description import script_of
from memfit.planning import Planning, planning_of
from memfit.values.script import Script
from models.forked import Forked, Residual, batch_of, loss_of
from sweeps import each_seed

pytestmark = pytest.mark.usefixtures("one_thread")

SLACK = 512  # numbers that kernels wrap into tensors; plans keep as much free


def program(seed: int) -> tuple[Forked, list[int]]:
    """A program, and a batch for it of which each row takes a path."""
    draw = Random(seed)
    paths = draw.choice([2, 2, 2, 3])
    kinds = [n % paths for n in range(2 * paths)] + [draw.randrange(paths) for _ in range(2)]
    draw.shuffle(kinds)
    return Forked(draw, paths), kinds


def losses(engine: memfit.Engine, kinds: list[int], predicted: int) -> list[float]:
    """Of steps with these paths in other orders."""
    found = []
    for step in range(4):
        order = kinds[step:] + kinds[:step]
        torch.manual_seed(step)
        record = engine.step(batch_of(order), meter=True)
        assert record.divergences == record.begun_anew == ()
        assert record.peak_bytes is not None
        assert record.peak_bytes <= predicted
        found.append(record.loss)
    return found


# Three paths, and no branches.
@each_seed((0, 60), 300)
def test_micro_batches_on_any_path_are_inside_the_budget_and_as_plain_pytorch(seed: int) -> None:
    model, kinds = program(seed)
    fixed = {"micro_batches": len(kinds)}
    plan = memfit.plan(model, batch_of(kinds), loss_of, 1 << 50, small.adamw, fixed=fixed)
    assert plan.script.plain
    plain = memfit.apply(plan, program(seed)[0], loss_of, small.adamw)
    expected = losses(plain, kinds, plan.prediction.peak_bytes)
    least = memfit.smallest_budget(plan)
    for budget in (least, (least + plan.prediction.plain_peak_bytes) // 2):
        tight = memfit.replan(plan, budget)
        told = tight.prediction
        assert sum(told.categories_at_peak.values()) == told.peak_bytes
        engine = memfit.apply(tight, program(seed)[0], loss_of, small.adamw)
        assert losses(engine, kinds, tight.prediction.peak_bytes) == expected
        assert max(r.peak_bytes for r in engine.records) + SLACK >= tight.prediction.peak_bytes
        assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), plain.model.parameters(), strict=True))


def plan_for(model: torch.nn.Module, kinds: list[int]) -> memfit.Plan:
    """With nothing dropped."""
    return memfit.plan(model, batch_of(kinds), loss_of, 1 << 50, small.adamw, fixed={"micro_batches": len(kinds)})


class Deep(Forked):
    """Two paths of the same blocks, one of which begins otherwise: most of what they keep can be made again, in whole calls too."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__(Random(0), 2)
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Residual(0.1) for _ in range(blocks))
        self.begins, self.runs = ["sin", "times"], [list(range(blocks)), list(range(blocks - 1))]
        self.wide, self.comes_back, self.in_place = [False, False], [True, False], [False, False]


KINDS = [0, 1, 1, 0]


def followed(plan: memfit.Plan, kinds: list[int], build: Any = Deep) -> tuple[list[float], memfit.Engine]:
    """Losses of three steps under a plan that is saved and read in between."""
    engine = memfit.apply(memfit.Plan.from_json(plan.to_json()), build(), loss_of, small.adamw)
    return losses(engine, kinds, plan.prediction.peak_bytes), engine


def test_each_path_makes_whole_calls_again_and_leaves_unfollowed_what_it_keeps() -> None:
    plain = plan_for(Deep(), KINDS)
    expected, _ = followed(plain, KINDS)
    solver = planning_of(plain).solver(len(KINDS))
    for share in (0.9, 0.94, 0.98):
        (own, *others) = plans = [
            (each, each.call_plans.fitting(round(share * each.plain.peak))) for each in (solver, *solver.branches)
        ]
        script = script_of(*own, others)
        again = [each.repeated_calls for each in (script, *script.branches)]
        assert all(again)
        assert all(each.kept_stretches for each in (script, *script.branches))
        peak = max(plan.peak for _, plan in plans)
        made = replace(plain, script=script, prediction=replace(plain.prediction, peak_bytes=peak))
        found, engine = followed(made, KINDS)
        assert found == expected
        assert max(r.peak_bytes for r in engine.records) + SLACK >= peak
        assert engine.records[-1].recomputations == 2 * sum(calls.operations for each in again for calls in each)
        batch = batch_of([1])
        with engine.forward() as follower:
            loss_of(engine.model, batch)
        assert follower.divergence is None
        assert follower.unfollowed > 0.8 * len(script.branches[0].operations)


@pytest.mark.slow
def test_each_path_is_offloaded() -> None:
    plain = plan_for(Deep(), KINDS)
    expected, _ = followed(plain, KINDS)
    known = planning_of(plain)
    below = Planning(replace(known.bundle, lower_tier=Link("disk", 1e11, 1e11, 0.0, least_bytes=1)), known.source)
    for budget in (below.smallest()[0], known.smallest()[0]):
        plan = below.plan(budget, savings=False)
        assert plan.script.swaps
        assert plan.script.branches[0].swaps
        found, _ = followed(plan, KINDS)
        assert found == expected


def test_a_path_that_planning_has_not_seen_is_kept_from_where_it_parts() -> None:
    plan = memfit.replan(plain := plan_for(Deep(), KINDS), memfit.smallest_budget(plain))

    def build() -> Deep:
        model = Deep()
        model.begins.append("softmax")
        model.runs.append([1, 2])
        for each in (model.wide, model.comes_back, model.in_place):
            each.append(True)
        return model

    batch = batch_of([0, 2, 1, 2])
    engine, reference = (memfit.apply(each, build(), loss_of, small.adamw) for each in (plan, plain))
    engine.learner = None
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="was kept plain from there on"):
        record = engine.step(batch)
    torch.manual_seed(0)
    assert record.loss == reference.step(batch).loss
    assert len(record.divergences) == 2
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), reference.model.parameters(), strict=True))


def test_in_a_loop_of_the_users_own_backward_may_run_twice() -> None:
    plan = memfit.replan(plain := plan_for(Deep(), KINDS), memfit.smallest_budget(plain))
    found = []
    for each in (plan, plain):
        model = Deep()
        engine = memfit.apply(each, model, loss_of, small.adamw)
        gradients = []
        for kind in (0, 1):
            batch = batch_of([kind])
            torch.manual_seed(kind)
            with engine.forward(retain_graph=True) as follower:
                loss = loss_of(model, batch)
            assert follower is None or follower.divergence is None
            loss.backward(retain_graph=True)
            loss.backward()
            gradients += [p.grad.clone() for p in model.parameters()]
        found.append(gradients)
    assert small.same(*found)


def test_a_plan_whose_branches_do_not_part_where_they_say_is_refused() -> None:
    plan = memfit.replan(plain := plan_for(Deep(), KINDS), memfit.smallest_budget(plain))
    for change in ({"decided": 2}, {"decided": 1 << 20}, {"branches": (plan.script,)}, {"released": (0,)}):
        with pytest.raises(ValueError, match=r"two paths begin|are to be freed"):
            Script.from_json(replace(plan.script, **change).to_json())
