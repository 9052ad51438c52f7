"""The peak of a step in sizes that no capture saw, told from what its forward has made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memfit.planner.known_sizes import KnownSizes
from memfit.planner.timeline import Timeline
from memfit.planning import Planning
from memfit.values.bundle import TraceBundle
from memfit.values.trace import Trace
from planner.traces import layers


def in_sizes(trace: Trace, sizes: Any) -> Trace:
    """The same step in other sizes."""
    storages = tuple(replace(s, bytes=int(b)) for s, b in zip(trace.storages, sizes, strict=True))
    return replace(trace, storages=storages, drawn_bytes=())


def rows(trace: Trace, numbers: list[int]) -> list[int]:
    """Sizes of all storages where each layer has so many rows, and each gradient those of its activation; the trace itself has 10 in all layers."""
    forward = [s for s, st in enumerate(trace.storages) if 0 <= st.birth < trace.forward_events]
    backward = [s for s, st in enumerate(trace.storages) if st.birth >= trace.forward_events]
    sizes = [st.bytes for st in trace.storages]
    for place, s in enumerate(forward):
        sizes[s] = sizes[s] * numbers[place % len(numbers)] // 10
    for place, s in enumerate(reversed(backward)):
        sizes[s] = sizes[s] * numbers[place % len(numbers)] // 10
    return sizes


def known(share: float) -> tuple[Trace, KnownSizes, Any, int]:
    """A step in three sizes, and what is known of it under a plan with this share of what planning could free."""
    trace = layers(8)
    draws = tuple(tuple(rows(trace, numbers)) for numbers in ([9, 10], [10, 8]))
    planning = Planning(TraceBundle.of(trace))
    least, plain = planning.smallest()[0], planning.plain_peak()
    solution = planning.solver(1).solve(round(plain - share * (plain - least)) - 512)
    assert solution is not None
    timelines = [Timeline(trace), *(Timeline(in_sizes(trace, sizes)) for sizes in draws)]
    capacity = max(timeline.peak(solution.recomputations) for timeline in timelines)
    return trace, KnownSizes(timelines, solution.recomputations, capacity), solution.recomputations, capacity


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_intervals_say_in_any_sizes_what_the_replay_says(share: float) -> None:
    trace, _, recomputations, _ = known(share)
    intervals = Timeline(trace).intervals(recomputations)
    for numbers in ([10], [20], [7, 31], [1, 2, 3, 4, 50]):
        sizes = np.array(rows(trace, numbers))
        replayed = Timeline(in_sizes(trace, sizes)).expand(recomputations).totals
        # But for what a recipe holds while it runs, which is in no interval.
        differs = np.flatnonzero(intervals.totals(sizes) != replayed)
        assert set(differs) <= set(intervals.runs.tolist())


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_sizes_that_were_captured_leave_what_they_leave(share: float) -> None:
    trace, sizes, _, _ = known(share)
    assert sizes.least_free == 0
    for numbers in ([10], [9, 10], [10, 8]):
        made = rows(trace, numbers)
        assert sizes.free_bytes({s: made[s] for each in sizes.watched.values() for _, s in each}) >= 0


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_larger_sizes_are_told(share: float) -> None:
    trace, sizes, recomputations, capacity = known(share)
    for numbers in ([11], [12, 10], [14, 9]):
        made = rows(trace, numbers)
        free = sizes.free_bytes({s: made[s] for each in sizes.watched.values() for _, s in each})
        really = capacity - Timeline(in_sizes(trace, made)).peak(recomputations)
        assert free <= max(really, 0)
        assert (free < 0) == (really < 0)
