"""Dropout in pipelines: every rank draws its own numbers though all were seeded alike, what it holds is as predicted, and it is told."""

from __future__ import annotations

import math

import pytest
import torch

import memfit
from pipelining import drawing, running
from sharding import steps

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(ranks: int, setting: str, share: float = 1.0) -> memfit.Plan:
    model, sample, loss_fn = drawing.dropping()
    own = steps.part_of(sample, 0, ranks)
    fixed = {"sharding": setting, "micro_batches": drawing.MICRO_BATCHES}
    plan = memfit.plan(model, own, loss_fn, 1 << 40, steps.sgd, devices=ranks, fixed=fixed)
    return plan if share == 1.0 else memfit.replan(plan, int(share * plan.prediction.peak_bytes))


def judged(ranks: int, plans: list[memfit.Plan]) -> None:
    told = running.together(ranks, drawing.masks, [plan.to_json() for plan in plans])
    for number, plan in enumerate(plans):
        assert plan.pipeline is not None
        assert plan.pipeline.draws
        assert "each rank draws its own" in plan.explain()
        of_ranks = [of_rank[number] for of_rank in told]
        masks = [mask for each in of_ranks for mask in each.masks]
        dropouts = drawing.LAYERS * plan.pipeline.replicas
        assert len(masks) == drawing.STEPS * drawing.MICRO_BATCHES * dropouts
        assert len({mask.numpy().tobytes() for mask in masks}) == len(masks), "of two masks none is the other's"
        kept = torch.cat([mask.flatten() for mask in masks]).double()
        # Within five standard deviations of the mean of as many draws.
        assert abs(float(kept.mean()) - (1 - drawing.DROPPED)) < 5 * math.sqrt(0.25 / kept.numel())
        assert running.as_predicted([each.peak_bytes for each in of_ranks], plan)
        assert all(each.losses == of_ranks[0].losses for each in of_ranks)
        # Ranks that were seeded alike still are, so a loader's shuffles are the same on all of them.
        assert all(torch.equal(each.state, of_ranks[0].state) for each in of_ranks)
        assert not torch.equal(of_ranks[0].state, of_ranks[0].state_before)
        assert all(each.again == each.losses for each in of_ranks), "from the same state the same numbers"


@pytest.mark.slow
def test_stages_that_were_seeded_alike_drop_other_elements() -> None:
    plan = planned(2, "1f1b/2")
    tight = memfit.replan(plan, memfit.smallest_budget(plan))
    assert tight.pipeline is not None
    assert any(script.recomputations for script in tight.pipeline.scripts)
    judged(2, [plan, tight])


@pytest.mark.slow
def test_replicas_that_were_seeded_alike_drop_other_elements() -> None:
    judged(4, [planned(4, "1f1b/2x2")])


def test_a_model_that_draws_nothing_leaves_the_generators_alone() -> None:
    model, sample, loss_fn = running.sequential()
    own = steps.part_of(sample, 0, 2)
    plan = memfit.plan(model, own, loss_fn, 1 << 40, steps.sgd, devices=2, fixed={"sharding": "1f1b/2"})
    assert plan.pipeline is not None
    assert not plan.pipeline.draws
    assert "random numbers" not in plan.explain()
