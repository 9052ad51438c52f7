"""At given prices of memory and of the link, the cheapest plan of keeping, recomputing and offloading.

A storage that is not recomputed costs the cheaper of being kept and of being offloaded, and offloading costs what of its copies is not hidden: seconds on
the link times a *price of the link*. A second of a link costs 0 where computing never waits for it, 1 where it always waits. While a copy is in progress
it still takes memory, which is charged at the moments' prices as if it were kept.

Where there are several tiers, the cut first sees the link to the nearest one. What is wanted there and has no free space is cut once more at the seconds of
the next link: it may go there, or be kept or recomputed after all. On the nearest tier stays what backward reads soonest; what it reads last has the longest
time to come back.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import numpy as np

from memfit.planner.offload_graph import OffloadGraph
from memfit.planner.priced_cuts import window_starts
from memfit.planner.recompute_graph import RecomputeGraph
from memfit.planner.schedule import recomputations_for
from memfit.planner.solution import Solution
from memfit.planner.timeline import Evaluation
from memfit.planner.window_layouts import WindowLayout


class LinkUse(NamedTuple):
    """How the links are to be used in a cut.

    Attributes:
        price: of a second of the link, in seconds.
        distance: which of the prefetch distances copies have.
        keeps_up: what the link cannot carry in time is cut once more, with the next tier's link, or without one.
    """

    price: float
    distance: int
    keeps_up: bool = False


class Decision(NamedTuple):
    """What is done about each node, in columns: recomputed, held for recomputation, offloaded, and to which tier."""

    dropped: Any
    held: Any
    offloaded: Any
    tier: Any


class _Span(NamedTuple):
    """Of each node: from which event, until before which one it would be held; by when it is gone, and from when it is back, when it is offloaded."""

    first: Any
    until: Any
    gone: Any
    back: Any


class OffloadCuts:
    """Plans of one trace at any prices of memory and of its links."""

    def __init__(self, graph: OffloadGraph, recompute: RecomputeGraph) -> None:
        self.graph = graph
        self._recompute = recompute
        self._spans: dict[tuple[tuple[int, ...], int, int], _Span] = {}
        self._decided: dict[tuple[object, ...], Solution] = {}
        self._replayed: dict[
            tuple[tuple[int, ...], ...], Evaluation
        ] = {}  # decisions that differ often come to the same plan

    def cut(self, layout: WindowLayout, prices: Any, link: LinkUse) -> Solution:
        """The plan of the cheapest cut at prices per byte and event and per second of the link.

        Layers that are alike want the same at the same prices: to be offloaded, all of them, more than the link can carry, or none. Hence `LinkUse.keeps_up`.
        """
        graph = self.graph
        tiers, count = len(graph.tiers), len(graph.nodes)
        spans = [self._span(layout, link.distance, tier) for tier in graph.tiers]
        keep, offload = self._costs(spans, prices, link.price)
        tier_of = np.zeros(count, dtype=np.int64)  # the tier that each is cut for
        forced = np.isin(graph.nodes, sorted(layout.forced))
        network = graph.network(frozenset(np.array(graph.nodes, dtype=np.int64)[graph.is_saved].tolist()), 1.0)
        for left in range(tiers, -1, -1):
            cost = offload[tier_of, np.arange(count)]
            sides, _ = network.cut(np.where(forced, 0.0, np.minimum(keep, cost)))
            again = sides[graph.recipe_of_node] & graph.may_recompute & ~forced
            there = (sides[:count] & ~sides[graph.recipe_of_node]) | forced
            wanted = there & (cost < keep)
            offloaded = np.zeros(count, dtype=bool)
            late = np.zeros(count, dtype=bool)
            for tier, span in enumerate(spans):
                here = self._with_capacity(wanted & (tier_of == tier), keep - cost, tier)
                offloaded |= here
                if link.keeps_up:
                    late |= here & ~self._in_time(here, link.distance, tier, span)
            further = (wanted & ~offloaded & (tier_of < tiers - 1)) | late
            if left == 0 or not further.any():
                break
            tier_of = np.where(offloaded & ~late, tier_of, np.minimum(tier_of + 1, tiers))
        held = ~graph.is_saved & there & ~offloaded & ~forced
        return self.planned(layout, link.distance, Decision(graph.is_saved & again, held, offloaded, tier_of))

    def _costs(self, spans: list[_Span], prices: Any, link_price: float) -> tuple[Any, Any]:
        """What keeping each node costs, and offloading it: a row for each tier, the last for none."""
        graph = self.graph
        first, until, _, _ = spans[0]
        cumulative = np.concatenate([[0.0], np.cumsum(prices)])
        keep = np.where(until > first, (cumulative[until] - cumulative[first]) * graph.size, 0.0)
        offload = np.full((len(graph.tiers) + 1, len(graph.nodes)), inf)
        for tier, (_, _, gone, back) in enumerate(spans):
            on_its_way = (cumulative[gone] - cumulative[first] + cumulative[until] - cumulative[back]) * graph.size
            copied = np.isfinite(graph.copy_seconds[tier])
            offload[tier] = np.where(
                copied & (back > gone), link_price * np.where(copied, graph.copy_seconds[tier], 0.0) + on_its_way, inf
            )
        return keep, offload

    def _span(self, layout: WindowLayout, distance: int, tier: int) -> _Span:
        key = layout.cuts, distance, tier
        if key not in self._spans:
            graph, recipes = self.graph, self.graph.recipes
            never = graph.timeline.events + 1
            starts = window_starts(self._recompute, layout)
            until = np.minimum(starts[layout.window_of(graph.asked_by)], graph.first)
            first = np.minimum(np.maximum(graph.death, graph.birth) + 1, never)
            gone, back = first.copy(), until.copy()
            for i, s in enumerate(graph.nodes):
                if reloads := graph.reloads(s, tier):
                    gone[i] = recipes.reloads[reloads[distance]].gone_by + 1
                    back[i] = recipes.begin(reloads[distance], int(min(until[i], graph.trace.pass_events)))
            self._spans[key] = _Span(first, until, np.maximum(gone, first), np.minimum(back, until))
        return self._spans[key]

    def _in_time(self, wanted: Any, distance: int, tier: int, span: _Span) -> Any:
        """Of the storages to offload to a tier, those that its link can carry down before they are to be gone, and up again before they are read."""
        graph, recipes = self.graph, self.graph.recipes
        clock, reloads = recipes.clock, recipes.reloads
        carried = np.zeros(len(wanted), dtype=bool)
        copies = [(reloads[graph.reloads(graph.nodes[i], tier)[distance]], i) for i in np.flatnonzero(wanted).tolist()]
        free = 0.0
        for reload, i in sorted(copies, key=lambda copy: (copy[0].ready, copy[1])):
            done = max(free, clock[reload.ready + 1]) + reload.out_seconds
            if done <= clock[reload.gone_by + 1]:
                free, carried[i] = done, True
        free = 0.0
        for reload, i in sorted(copies, key=lambda copy: (span.back[copy[1]], copy[1])):
            if carried[i]:
                done = max(free, clock[span.back[i]]) + reload.in_seconds
                carried[i] = done <= clock[min(span.until[i], len(clock) - 1)]
                free = done if carried[i] else free
        return carried

    def _with_capacity(self, wanted: Any, gain: Any, tier: int) -> Any:
        """Of the storages to offload to a tier, those that fit there together: on the last tier what gains most for its bytes, else what is read soonest."""
        graph = self.graph
        link = graph.recipes.tiers[tier]
        if link.free_bytes is None:
            return wanted
        chosen = np.flatnonzero(wanted)
        worth = -(gain[chosen] / np.maximum(graph.place[chosen], 1)) if link.below is None else graph.first[chosen]
        order = chosen[np.argsort(worth, kind="stable")]
        out = np.zeros(len(wanted), dtype=bool)
        out[order[np.cumsum(graph.place[order]) <= link.free_bytes]] = True
        return out

    def spread(self, wanted: Any, gain: Any) -> tuple[Any, Any]:
        """Of the storages to offload, those that fit on some tier, and the tier of each."""
        offloaded = np.zeros(len(wanted), dtype=bool)
        tier_of = np.zeros(len(wanted), dtype=np.int64)
        for tier in self.graph.tiers:
            here = self._with_capacity(wanted & ~offloaded & np.isfinite(self.graph.copy_seconds[tier]), gain, tier)
            offloaded |= here
            tier_of[here] = tier
        return offloaded, tier_of

    def planned(self, layout: WindowLayout, distance: int, decision: Decision) -> Solution:
        """The plan that does this about each node, replayed."""
        graph, recipes = self.graph, self.graph.recipes
        dropped, held, offloaded, _ = decision
        tier_of = np.where(offloaded, decision.tier, 0)
        key = layout.cuts, distance, np.packbits([dropped, held, offloaded]).tobytes(), tier_of.tobytes()
        if key not in self._decided:
            node = np.array(graph.nodes, dtype=np.int64)
            recomputations = recomputations_for(
                recipes,
                node[dropped].tolist(),
                layout.window_of_event,
                node[held].tolist(),
                offloaded={
                    s: graph.reloads(s, tier)[distance]
                    for s, tier in zip(node[offloaded].tolist(), tier_of[offloaded].tolist(), strict=True)
                },
            )
            again = {s for runs in recomputations.values() for r in runs for s in recipes.recipes[r].makes}
            plan = tuple((event, *runs) for event, runs in sorted(recomputations.items()))
            if plan not in self._replayed:
                self._replayed[plan] = graph.timeline.evaluate(recomputations)
            self._decided[key] = Solution(recomputations, self._replayed[plan], self._recompute.droppable & again)
        return self._decided[key]
