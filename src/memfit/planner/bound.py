"""The lower bound: extra seconds that no plan within a budget can avoid.

The bound is Lagrangian: for any prices, (cheapest total at these prices) - (price of the budget) is at most the extra seconds of every plan that fits,
because a rebuilt storage is charged only at the moments at which backward reads it, which no plan avoids. It is taken at one moment of the step at a time,
and the largest counts. `offload_bound` has the bound where storages may be offloaded, too.

Sources: Lagrangian relaxation as in Held and Karp 1971; Kelley 1960 for the prices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from memfit.planner.recompute_graph import RecomputeGraph
from memfit.planner.timeline import Evaluation

TANGENTS: Final = 14  # at most so many cuts for one moment
STRETCHES: Final = 12  # of backward, each of which is looked at where it is fullest
HIGHEST_PRICE: Final = 1e3  # in units of the graph's scale of prices
ROUNDING: Final = 1e-9  # where a plan and its bound meet, they are sums of the same numbers in another order


class LowerBound:
    """Bounds of one trace at any budget; a function of the two alone.

    Args:
        graph: of the trace.
        baseline: the step in which nothing is dropped.
    """

    def __init__(self, graph: RecomputeGraph, baseline: Evaluation) -> None:
        self.graph = graph
        self.baseline = baseline
        self._overhead = graph.timeline.following.always
        self._known: dict[int, float] = {}

    def seconds(self, budget_bytes: int) -> float:
        """Extra seconds of one micro-batch that no plan within the budget can avoid."""
        if self.baseline.peak_bytes <= budget_bytes:
            return 0.0
        if budget_bytes not in self._known:
            levels = self.baseline.levels
            # The fullest moments first: what they demand, the others seldom top.
            moments = sorted(self._moments(budget_bytes), key=lambda e: (-int(levels[e]), e))
            self._known[budget_bytes] = self._largest(moments, budget_bytes) + self._overhead
        return self._known[budget_bytes]

    def _moments(self, budget_bytes: int) -> set[int]:
        """The highest moment, and the highest of stretches of backward."""
        levels, trace = self.baseline.levels, self.graph.trace
        first, end = trace.forward_events, trace.pass_events
        stretch = max(1, (end - first) // STRETCHES)
        moments = {self.baseline.peak_event}
        for start in range(first, end, stretch):
            event = start + int(np.argmax(levels[start : min(start + stretch, end)]))
            if levels[event] > budget_bytes:
                moments.add(event)
        return moments

    def _largest(self, moments: list[int], budget_bytes: int) -> float:
        """The largest bound of these moments."""
        best = 0.0
        for moment in moments:
            tangent = self._tangent(moment, budget_bytes)
            best = best_dual(tangent, self.graph.price_scale * HIGHEST_PRICE, best)
        return best

    def _tangent(self, moment: int, budget_bytes: int) -> Callable[[float], tuple[float, float]]:
        """The dual at a price of memory at this moment, and its slope there.

        Whatever backward reads after the moment must be there at it, or be made again after it from what is there at it. So each storage is charged its
        bytes if it is there, its recipe's seconds if it is not, and the rest is a minimum cut.
        """
        graph = self.graph
        floor = int(self.baseline.levels[moment])
        nodes, events, releases = graph.reads.T
        held_by_a_read = np.zeros(len(graph.nodes), dtype=bool)
        held_by_a_read[nodes[(events <= moment) & (moment <= releases)]] = True
        gone = (graph.node_birth <= moment) & (graph.node_death < moment)
        chargeable: Any = np.where(gone & ~held_by_a_read, graph.node_bytes, 0)
        floor -= int(chargeable[graph.node_droppable & (graph.node_baseline_end >= moment)].sum())
        needed = np.zeros(len(graph.nodes), dtype=bool)
        needed[nodes[events > moment]] = True
        network = graph.network(frozenset(graph.node[needed & graph.node_droppable].tolist()))

        def tangent(price: float) -> tuple[float, float]:
            sides, value = network.cut(price * chargeable)
            held = int(chargeable[sides[: len(graph.nodes)] & ~sides[graph.recipe_of_node]].sum())
            return value + price * (floor - budget_bytes), held + floor - budget_bytes

        return tangent


def best_dual(tangent: Callable[[float], tuple[float, float]], high: float, known: float) -> float:
    """The largest value of a concave dual between the prices 0 and `high`, and at least `known`.

    Every cut is a tangent to the dual, so the next price is where the two nearest tangents meet (Kelley 1960 in one dimension).

    Args:
        tangent: the dual at a price, and its slope there.
        high: the highest price.
        known: what is known from elsewhere.
    """
    best = known
    low = 0.0
    low_value, low_slope = tangent(low)
    if low_slope <= 0:
        return best
    high_value, high_slope = tangent(high)
    best = max(best, high_value)
    for _ in range(TANGENTS):
        if high_slope >= 0:
            break
        price = (high_value - low_value + low_slope * low - high_slope * high) / (low_slope - high_slope)
        ceiling = low_value + low_slope * (price - low)
        if not low < price < high or ceiling <= best * 1.0005:
            break
        value, slope = tangent(price)
        best = max(best, value)
        if slope > 0:
            low, low_value, low_slope = price, value, slope
        else:
            high, high_value, high_slope = price, value, slope
    return best
