"""Graphs so small that every plan can be tried: not searched, but enumerated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memfit.planner.front import Front
from memfit.planner.priced_cuts import PricedCuts
from memfit.planner.schedule import recomputations_for
from memfit.planner.solution import Solution
from memfit.planner.window_layouts import WindowLayout

EVERY_PLAN: Final = 4096  # this many plans are enumerated rather than searched


def is_small(cuts: PricedCuts, layouts: Sequence[WindowLayout]) -> bool:
    """Whether every set of dropped storages can be tried in all layouts between boundaries that nothing may cross."""
    return _few(layouts, around=False) << len(cuts.graph.droppable) <= EVERY_PLAN


def try_every_plan(cuts: PricedCuts, layouts: Sequence[WindowLayout], front: Front) -> None:
    """Add to a front every plan that follows the rule of scheduling, each once: of those sets of layouts that are few enough."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for around in (False, True):
        _try_every_plan_in(cuts, [layout for layout in layouts if layout.around is around], front, seen)


def _few(layouts: Sequence[WindowLayout], *, around: bool) -> int:
    return sum(1 for layout in layouts if layout.around is around)


def _try_every_plan_in(
    cuts: PricedCuts, layouts: Sequence[WindowLayout], front: Front, seen: set[tuple[tuple[int, ...], ...]]
) -> None:
    """Every plan in these layouts that is not among those seen; none where they are too many."""
    graph, timeline = cuts.graph, cuts.graph.timeline
    least: dict[frozenset[int], int] = {}  # bytes of any plan that makes these storages again
    droppable = sorted(graph.droppable)
    transients = [s for s in graph.nodes if s not in graph.recipes.saved]
    if len(layouts) << (len(droppable) + len(transients)) > EVERY_PLAN:
        transients = []
    if len(layouts) << len(droppable) > EVERY_PLAN:
        return
    for layout in layouts:
        for number in range(1 << (len(droppable) + len(transients))):
            chosen = {s for i, s in enumerate(droppable + transients) if number >> i & 1}
            dropped, held = chosen & graph.droppable, chosen - graph.droppable
            recomputations = recomputations_for(graph.recipes, dropped, layout.window_of_event, held)
            key = tuple((e, *runs) for e, runs in sorted(recomputations.items()))
            if key in seen:
                continue
            seen.add(key)
            made = frozenset(s for _, *runs in key for run in runs for s in graph.recipes.recipes[run].makes)
            if made not in least:
                least[made] = timeline.least_peak(made)
            # Most plans are slower than one that takes no more than they take at least, and are not replayed.
            known = front.best(least[made])
            if known is None or known.seconds > timeline.seconds(recomputations):
                evaluation = timeline.evaluate(recomputations)
                front.add(Solution(recomputations, evaluation, frozenset(dropped), frozenset(held), layout.cells))
