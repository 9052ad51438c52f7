"""The searches for the fastest plan within a budget and for the smallest one, where storages may be offloaded.

A few prices of the link are tried with every price of memory, and the replay, which walks through the link's queues (`copying`), says what each plan takes.
The plans found without offloading, or with one tier less, are known from the start, so neither allowing offloading nor a further tier makes a plan slower.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Final

import numpy as np

from memfit.garbage import uncollected
from memfit.planner.budget_search import CLOSE, GLANCES
from memfit.planner.front import Front
from memfit.planner.front_search import FrontSearch
from memfit.planner.offload_bound import OffloadBound
from memfit.planner.offload_cuts import Decision, LinkUse, OffloadCuts
from memfit.planner.offload_graph import OffloadGraph
from memfit.planner.priced_cuts import Weights, spread
from memfit.planner.prices import BISECTIONS, ROUNDS, bracket, with_peak_priced
from memfit.planner.problem import Problem
from memfit.planner.recipes import PREFETCH_DISTANCES
from memfit.planner.smallest import SmallestSearch
from memfit.planner.solution import Solution
from memfit.planner.timeline import Timeline
from memfit.planner.window_layouts import WindowLayout

# Prices of the link, from always waited for to never waited for. What a second of it is worth lies between what products and what cheap operations
# take to run again, byte for byte, and layers that are alike change their mind together: hence steps of two.
LINK_PRICES: Final = (1.0, 0.5, 0.25, 0.12, 0.06, 0.02)
GLANCE: Final = LinkUse(
    LINK_PRICES[1], len(PREFETCH_DISTANCES) // 2
)  # how a layout is looked at before it is taken or left
CLOSELY: Final = 2  # layouts that are looked at at all prices
EVERY_PLAN: Final = 729  # this many divisions into kept, recomputed and offloaded are enumerated


class OffloadProblem(Problem):
    """One trace with lower tiers, to be planned at any budget.

    Attributes:
        offload: what can be decided about each storage.
        offload_cuts: plans at prices of memory and of the link.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self.offload = OffloadGraph(timeline)
        self.offload_cuts = OffloadCuts(self.offload, self.graph)
        self.bound = OffloadBound(self.graph, self.baseline.evaluation, self.offload)
        self.floor_bytes = int(timeline.floor_with_offloading().max())

    @cached_property
    def every_plan(self) -> tuple[Solution, ...]:
        """On small graphs, every way to keep, recompute or offload what backward reads; none on others."""
        graph = self.offload
        saved = np.flatnonzero(graph.is_saved)
        # What can be done about each: keep (0), recompute (1), offload to tier n (2 + n).
        actions = [
            [0]
            + [1] * bool(graph.may_recompute[i])
            + [2 + t for t in graph.tiers if np.isfinite(graph.copy_seconds[t][i])]
            for i in saved.tolist()
        ]
        count = 1
        for each in actions:
            count *= len(each)
            if count > EVERY_PLAN:
                return ()
        none = np.zeros(len(graph.nodes), dtype=bool)
        found: list[Solution] = []
        with uncollected():
            for layout in self.layouts:
                for distance in range(len(PREFETCH_DISTANCES)):
                    for number in range(count):
                        dropped, offloaded, left = none.copy(), none.copy(), number
                        tier_of = np.zeros(len(none), dtype=np.int64)
                        for node, each in zip(saved, actions, strict=True):
                            left, action = divmod(left, len(each))
                            dropped[node], offloaded[node] = each[action] == 1, each[action] >= 2
                            tier_of[node] = max(0, each[action] - 2)
                        decision = Decision(dropped, none, offloaded, tier_of)
                        found.append(self.offload_cuts.planned(layout, distance, decision))
        return tuple(found)


class OffloadBudgetSearch(FrontSearch):
    """The search for the fastest plan within one budget.

    Args:
        problem: the trace.
        budget_bytes: what plans have to fit into.
        known: what is found for the budget with a tier less.
        smallest: the finished search for the smallest plan; called where nothing else fits.
    """

    problem: OffloadProblem

    def __init__(
        self, problem: OffloadProblem, budget_bytes: int, known: Front, smallest: Callable[[], SmallestSearch]
    ) -> None:
        super().__init__(problem, problem.front())
        self.front.update(known)
        for solution in problem.every_plan:
            self.remember(solution)
        self._budget = budget_bytes
        self._smallest = smallest

    def run(self) -> Front:
        """Everything found; its best at the budget is the fastest plan."""
        budget, problem = self._budget, self.problem
        if budget < problem.floor_bytes:
            self.front.update(self._smallest().front)  # what no plan fits into is not searched
            return self.front
        best = self.front.best(budget)
        target = problem.bound.seconds(budget) + CLOSE * problem.trace.pass_seconds
        if best is not None and best.seconds <= target:
            return self.front
        promising: list[tuple[float, int, WindowLayout]] = []
        near: list[int] = []
        for number, layout in enumerate(problem.layouts):
            fitting = self._at_prices(layout, GLANCE, GLANCES, near)
            if fitting is not None:
                promising.append((fitting.seconds, number, layout))
        starts: list[Solution] = []
        for _, _, layout in sorted(promising, key=lambda p: p[:2])[:CLOSELY]:
            near = []
            found = [
                self._at_prices(layout, LinkUse(price, distance, keeps_up), BISECTIONS, near)
                for price in LINK_PRICES
                for distance in range(len(PREFETCH_DISTANCES))
                for keeps_up in (False, True)
                if PREFETCH_DISTANCES[distance] or not keeps_up
            ]
            fitting = min((f for f in found if f is not None), key=lambda f: f.seconds, default=None)
            if fitting is not None:
                starts.append(self.trimmed(fitting, budget))
        if self.front.best(budget) is None:
            self.front.update(self._smallest().front)
        self.improve(budget, starts)
        return self.front

    def _at_prices(self, layout: WindowLayout, link: LinkUse, steps: int, near: list[int]) -> Solution | None:
        """The fastest plan that fits found on the way to the lowest price of memory at which plans fit; then the same with a price for what was too full.

        Args:
            layout, link: what the plans have in common.
            steps: of the search for the lowest price.
            near: of each round, where plans began to fit in the searches before: looked at first, and replaced.
        """
        problem = self.problem
        weights: Weights = {problem.baseline.evaluation.peak_event: 1.0}
        best: Solution | None = None

        def plan_at(price: float) -> Solution:
            nonlocal best
            prices = spread(problem.timeline.events + 1, weights, price)
            found = self.remember(problem.offload_cuts.cut(layout, prices, link))
            if found.peak <= self._budget and (best is None or found.seconds < best.seconds):
                best = found
            return found

        for number in range(ROUNDS):
            guess = near[number] if number < len(near) else None
            _, too_large, point = bracket(plan_at, self._budget, problem.graph.price_scale, steps, guess)
            near[number : number + 1] = [point]
            if too_large is None:
                break
            more = with_peak_priced(weights, too_large)
            if more is None:
                break
            weights = more
        return best


class OffloadSmallestSearch(SmallestSearch):
    """The search for the plan with the smallest peak.

    Args:
        problem: the trace.
        known: what the same search finds with a tier less.
    """

    problem: OffloadProblem

    def __init__(self, problem: OffloadProblem, known: Front) -> None:
        super().__init__(problem, problem.front())
        self.front.update(known)
        for solution in problem.every_plan:
            self.remember(solution)

    def run(self) -> OffloadSmallestSearch:
        """Search; the smallest plan of the front is the result."""
        if self._nothing_is_smaller():
            self.finish()
            return self
        graph, cuts = self.problem.offload, self.problem.offload_cuts
        none = np.zeros(len(graph.nodes), dtype=bool)
        size = graph.size.astype(float)
        found: list[Solution] = []
        for layout in self.problem.layouts:
            border = np.isin(graph.nodes, sorted(layout.boundary_storages))
            # [1] Everything is offloaded. [2] Boundaries are offloaded, what is between them is recomputed.
            recomputed = graph.is_saved & graph.may_recompute & ~border
            for wanted in (graph.is_saved | border, border | (graph.is_saved & ~recomputed)):
                offloaded, tier_of = cuts.spread(graph.may_offload & wanted, size)
                decision = Decision(recomputed & ~offloaded, none, offloaded, tier_of)
                found.append(self.remember(cuts.planned(layout, 0, decision)))
        for start in sorted(found, key=lambda f: f.peak)[:2]:
            self.shrink(start)
        self.finish()
        return self
