"""Sizes that random numbers decide: a plan fits under every draw that was seen, with room for others, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.errors import InfeasibleError
from memfit.planner.draws import Draws
from memfit.planner.timeline import Timeline
from memfit.planning import Planning
from memfit.values.bundle import TraceBundle
from memfit.values.trace import Trace
from planner.traces import layers


def noisy(count: int = 8) -> Trace:
    """Layers that trade bytes: what one makes more under another draw, its neighbour makes less, but for the last one."""
    trace = layers(count)
    made = [s for s, st in enumerate(trace.storages) if 0 <= st.birth < trace.forward_events and st.bytes > 100]
    draws = []
    for sign in (1, -1):
        sizes = [st.bytes for st in trace.storages]
        for place, s in enumerate(made):
            sizes[s] += sign * (50 if place % 2 else -50)
        sizes[made[-1]] += sign * 30
        draws.append(tuple(sizes))
    first, *others = trace.operations
    return replace(trace, operations=(replace(first, random=True), *others), drawn_bytes=tuple(draws))


def search_of(trace: Trace) -> Planning:
    return Planning(TraceBundle.of(trace))


def peaks_of(trace: Trace, search: Planning, budget: int) -> list[int]:
    """Peaks under each draw, replayed with the sizes of that draw from the start."""
    solution = search.solver(1).fitting(budget - search.extra_bytes - 512)
    assert solution is not None
    tables = ([st.bytes for st in trace.storages], *trace.drawn_bytes)
    return [
        Timeline(
            replace(
                trace,
                storages=tuple(replace(st, bytes=b) for st, b in zip(trace.storages, table, strict=True)),
                drawn_bytes=(),
            )
        ).peak(solution.recomputations)
        for table in tables
    ]


def budgets(search: Planning) -> list[int]:
    least, plain = search.smallest()[0], search.plain_peak()
    return [round(least + (plain - least) * share) for share in (0.0, 0.2, 0.4, 0.6, 0.8)]


def test_a_plan_fits_under_every_draw_with_as_much_to_spare_as_the_peaks_lie_apart() -> None:
    trace = noisy()
    search = search_of(trace)
    for budget in budgets(search):
        made = search.plan(budget)
        peaks = peaks_of(trace, search, budget)
        assert made.prediction.peak_bytes == max(peaks)
        assert made.prediction.varies_bytes == max(peaks) - min(peaks)
        assert made.prediction.peak_bytes + made.prediction.varies_bytes <= budget
    assert any(search.plan(b).prediction.varies_bytes for b in budgets(search))


def test_more_budget_is_never_slower_and_the_smallest_budget_will_do() -> None:
    search = search_of(noisy())
    seconds = [search.plan(budget).prediction.step_seconds for budget in budgets(search)]
    assert seconds == sorted(seconds, reverse=True)
    with pytest.raises(InfeasibleError) as caught:
        search.plan(search.smallest()[0] - 1)
    assert caught.value.minimum_bytes == search.smallest()[0]


def test_plain_is_taken_where_it_fits_under_every_draw() -> None:
    search = search_of(noisy())
    assert search.plan(search.plain_peak()).script.plain
    solver = search.solver(1)
    assert solver.needed(solver.plain) > solver.plain.peak
    assert not search.plan(solver.plain.peak).script.plain


def test_the_plan_says_what_was_seen_and_what_is_kept_free() -> None:
    search = search_of(noisy())
    note = search.plan(search.smallest()[0]).notes[-1]
    assert "over 3 draws the peak of this plan lay between" in note
    assert "more are kept free" in note


def test_one_draw_needs_no_more_than_its_peak() -> None:
    trace = layers(6)
    draws = Draws(Timeline(trace))
    assert draws.varies({}) == 0
    assert draws.needed({}) == Timeline(trace).plain().peak_bytes
    search = search_of(trace)
    assert search.plan(search.smallest()[0]).prediction.varies_bytes == 0


def test_sizes_seen_under_draws_have_no_place_below_and_are_not_checked() -> None:
    assert noisy().sized_by_values
    assert not layers(6).sized_by_values
