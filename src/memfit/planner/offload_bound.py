"""The lower bound where storages may be offloaded: extra seconds that no plan within a budget can avoid, offloading or not.

An offloaded storage costs nothing as long as its copies overlap with computing; copies back over one link overlap with at most the whole pass and what is
recomputed.
Both are weighed (a Lagrangian of the links, each weighing as much as it is fast), and the best weight counts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

import numpy as np

from memfit.planner.bound import HIGHEST_PRICE, LowerBound, best_dual
from memfit.planner.offload_graph import OffloadGraph
from memfit.planner.recompute_graph import RecomputeGraph
from memfit.planner.timeline import Evaluation

MOMENTS: Final = 4  # the fullest ones are looked at
LINK_PRICES: Final = (0.0, 0.4, 0.8)


class OffloadBound(LowerBound):
    """Bounds of one trace with lower tiers.

    Args:
        graph: of the trace without them.
        baseline: the step in which nothing is dropped.
        offload: which storages may be offloaded.
    """

    def __init__(self, graph: RecomputeGraph, baseline: Evaluation, offload: OffloadGraph) -> None:
        super().__init__(graph, baseline)
        self._offload = offload

    def _largest(self, moments: list[int], budget_bytes: int) -> float:
        best = 0.0
        for moment in moments[:MOMENTS]:
            for price in LINK_PRICES:
                tangent = self._tangent_with_link(moment, budget_bytes, price)
                best = best_dual(tangent, self.graph.price_scale * HIGHEST_PRICE, best)
        return best

    def _tangent_with_link(
        self, moment: int, budget_bytes: int, link_price: float
    ) -> Callable[[float], tuple[float, float]]:
        """The dual at a price of memory at this moment, and its slope there."""
        graph = self._offload
        timeline, trace = graph.timeline, graph.trace
        held = np.array(
            [any(e <= moment <= r for e, r in timeline.unpack_uses.get(s, ())) for s in graph.nodes], dtype=bool
        )
        needed = np.array([any(e > moment for e, _ in timeline.unpack_uses.get(s, ())) for s in graph.nodes])
        gone = (graph.birth <= moment) & (graph.death < moment)
        chargeable = np.where(gone & ~held, graph.size, 0)
        ends = np.array([timeline.plain_end[s] for s in graph.nodes], dtype=np.int64)
        floor = int(self.baseline.levels[moment]) - int(chargeable[graph.is_saved & (ends >= moment)].sum())
        named = frozenset(s for s, wanted in zip(graph.nodes, needed & graph.is_saved, strict=True) if wanted)
        network = graph.network(named, 1.0 - link_price)
        rates = np.array([link.in_bandwidth for link in graph.recipes.tiers])
        up = np.min(graph.up_seconds * (rates / rates.sum())[:, None], axis=0)
        offload = np.where(graph.may_offload, link_price * np.where(graph.may_offload, up, 0.0), inf)
        hidden = link_price * (trace.pass_seconds + sum(timeline.following.seconds))

        def tangent(price: float) -> tuple[float, float]:
            keep = price * chargeable
            sides, value = network.cut(np.minimum(keep, offload))
            there = sides[: len(graph.nodes)] & ~sides[graph.recipe_of_node] & (keep <= offload)
            slope = int(chargeable[there].sum()) + floor - budget_bytes
            return value - hidden + price * (floor - budget_bytes), slope

        return tangent
