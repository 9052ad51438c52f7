"""Ranks of a sharded step that hold other bytes: one plan for all of them, which has to fit the fullest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.errors import InfeasibleError
from memfit.planner.solvers import SLACK_BYTES
from memfit.planner.timeline import Timeline
from memfit.planning import Planning
from memfit.values.bundle import TraceBundle
from memfit.values.plan import Plan
from memfit.values.trace import Trace
from planner.traces import layers

OWN, OTHER = "zero1/3", "zero1/3@1"
MORE = 70  # bytes that the second rank holds beyond the others


def of_rank(setting: str, weight_bytes: int) -> Trace:
    trace = layers(8)
    weight, *others = trace.storages
    return replace(
        trace, choices=trace.choices.but(sharding=setting), storages=(replace(weight, bytes=weight_bytes), *others)
    )


def ranks() -> Planning:
    """Three of them, of which the second one is the fullest and the first one is planned for."""
    own, other = of_rank(OWN, 10), of_rank(OTHER, 10 + MORE)
    bundle = TraceBundle.of(own)
    (candidate,) = bundle.traces
    traces = {candidate: own, candidate.but(sharding=OTHER): other}
    return Planning(replace(bundle, roles=(0, 1, 0), traces=traces))


def test_planning_for_the_smallest_budget_fits_the_fullest_rank_and_a_byte_less_does_not() -> None:
    planning = ranks()
    least, found = planning.smallest()
    alone = Planning(TraceBundle.of(of_rank(OWN, 10))).smallest()[0]
    assert least == alone + MORE
    plan = planning.plan(least)
    assert max(rank.peak_bytes for rank in plan.prediction.ranks) == plan.prediction.peak_bytes <= least - SLACK_BYTES
    assert Plan.from_json(plan.to_json()) == plan
    assert found.solver.needed(found.solution) == plan.prediction.ranks[1].peak_bytes
    with pytest.raises(InfeasibleError) as error:
        planning.plan(least - 1)
    assert error.value.minimum_bytes == least


def test_at_any_budget_every_rank_is_inside_and_the_figures_are_those_of_the_fullest() -> None:
    planning = ranks()
    least, plain = planning.smallest()[0], planning.plain_peak()
    assert plain == Planning(TraceBundle.of(of_rank(OTHER, 10 + MORE))).plain_peak()
    for budget in range(least, plain, max(1, (plain - least) // 4)):
        figures = planning.plan(budget).prediction
        first, second, third = (rank.peak_bytes for rank in figures.ranks)
        assert first == third == second - MORE
        assert second == figures.peak_bytes <= budget
        assert sum(figures.categories_at_peak.values()) == figures.peak_bytes
        assert figures.plain_peak_bytes == Timeline(of_rank(OTHER, 10 + MORE)).peak({})
