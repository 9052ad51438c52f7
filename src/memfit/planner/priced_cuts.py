"""At given prices per byte and moment, the cheapest plan: one minimum cut decides every storage at once.

Keep a storage and pay for the moments it is alive, or drop it and pay the seconds of its recipe, whose inputs then must be there in turn. The boundaries of
the layout are kept. What is asked once is remembered: budgets share their first prices, and neighbouring prices often give one cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from memfit.planner.recompute_graph import RecomputeGraph
from memfit.planner.schedule import recomputations_for
from memfit.planner.solution import Solution
from memfit.planner.window_layouts import WindowLayout

Weights = Mapping[int, float]  # event -> its share of the price


class PricedCuts:
    """Plans of one trace at any prices."""

    def __init__(self, graph: RecomputeGraph) -> None:
        self.graph = graph
        self._at_price: dict[tuple[tuple[int, ...], tuple[tuple[int, float], ...], float], Solution] = {}
        self._decided: dict[tuple[tuple[int, ...], bytes], Solution] = {}
        self._spans: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}

    def solution(self, layout: WindowLayout, dropped: Collection[int], transients: Collection[int]) -> Solution:
        """The plan that drops these storages in this layout, and holds these transients for recomputation; replayed."""
        graph = self.graph
        recomputations = recomputations_for(graph.recipes, dropped, layout.window_of_event, transients)
        evaluation = graph.timeline.evaluate(recomputations)
        return Solution(recomputations, evaluation, frozenset(dropped), frozenset(transients), layout.cells)

    def at_price(self, layout: WindowLayout, weights: Weights, price: float) -> Solution:
        """The plan of the cheapest cut at this price per byte, spread over the events by weight."""
        key = (layout.cuts, tuple(sorted(weights.items())), price)
        if key not in self._at_price:
            self._at_price[key] = self.cut(layout, spread(self.graph.timeline.events + 1, weights, price))
        return self._at_price[key]

    def cut(self, layout: WindowLayout, prices: Any) -> Solution:
        """The plan of the cheapest cut at prices per byte and event."""
        graph = self.graph
        cumulative = np.concatenate([[0.0], np.cumsum(prices)])
        sides, _ = graph.network(graph.droppable).cut(self._keep_prices(layout, cumulative))
        again = sides[graph.recipe_of_node]
        dropped = graph.node_droppable & again
        # A recipe that runs anyway rebuilds all it makes, but what is cheaper kept stays kept: dropped only where the cut ran the recipe for it.
        held = ~graph.node_saved & sides[: len(graph.nodes)] & ~again
        key = layout.cuts, np.packbits([dropped, held]).tobytes()
        if key not in self._decided:
            self._decided[key] = self.solution(
                layout, set(graph.node[dropped].tolist()) - layout.forced, graph.node[held].tolist()
            )
        return self._decided[key]

    def _keep_prices(self, layout: WindowLayout, cumulative: Any) -> Any:
        """What it costs to hold each storage from when it would die until its window is rebuilt; boundaries are held anyway."""
        if layout.cuts not in self._spans:
            self._spans[layout.cuts] = self._held_spans(layout)
        first, until, sizes = self._spans[layout.cuts]
        return np.where(until > first, (cumulative[until] - cumulative[first]) * sizes, 0.0)

    def _held_spans(self, layout: WindowLayout) -> tuple[Any, Any, Any]:
        """For each storage, from which event until before which it would be held, and its bytes."""
        graph = self.graph
        never = graph.timeline.events + 1
        until = np.minimum(window_starts(graph, layout)[layout.window_of(graph.node_by)], graph.node_first_read)
        first = np.minimum(np.maximum(graph.node_death, graph.node_birth) + 1, never)
        return first, until, np.where(np.isin(graph.node, sorted(layout.forced)), 0, graph.node_bytes)


def window_starts(graph: RecomputeGraph, layout: WindowLayout) -> Any:
    """For each window, the first event at which backward asks for something of it; the start of backward where it asks for nothing."""
    never = graph.timeline.events + 1
    events, by = graph.unpacks.T
    starts = np.full(layout.windows, never)
    np.minimum.at(starts, layout.window_of(by), events)
    starts[starts == never] = graph.trace.forward_events
    return starts


def spread(events: int, weights: Weights, price: float) -> Any:
    """A price for each of so many events: the whole of `price`, shared by weight."""
    prices = np.zeros(events)
    total = sum(weights.values())
    for event, weight in weights.items():
        prices[event] += price * weight / total
    return prices
