"""The search for the fastest plan within one budget: layouts, prices, nested sweeps, local search, until the plan is near the bound.

A search starts only from what depends on the trace, so its result is a function of trace and budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from memfit.planner.front import Front
from memfit.planner.front_search import FrontSearch
from memfit.planner.prices import PriceSearch
from memfit.planner.problem import Problem
from memfit.planner.smallest import SmallestSearch
from memfit.planner.solution import Solution
from memfit.planner.window_layouts import WindowLayout

LAYOUTS: Final = 3  # of each family that are looked at closely
GLANCES: Final = 6  # prices at which a layout is looked at before it is taken or left
CLOSE: Final = 0.001  # a plan this part of a pass above the bound is good enough
FEW_CELLS: Final = 24
# Nested sweeps are looked at when a plan costs more than this part of a pass,
CHAINS_WORTH: Final = 0.15
# and a budget is above the least that windows can do by less than this part of the way to the baseline.
NEAR_TIGHTEST: Final = 0.12


class BudgetSearch(FrontSearch):
    """One search.

    Args:
        problem: the trace.
        budget_bytes: what plans have to fit into.
        smallest: the finished search for the smallest plan; called where nothing else fits well.
    """

    def __init__(self, problem: Problem, budget_bytes: int, smallest: Callable[[], SmallestSearch]) -> None:
        super().__init__(problem, problem.first_front.copy())
        self._budget = budget_bytes
        self._smallest = smallest
        self._prices = PriceSearch(self)

    def run(self) -> Front:
        """Everything found; its best at the budget is the fastest plan."""
        if self._budget < self.problem.floor_bytes:
            self.front.update(self._smallest().front)  # what no plan fits into is not searched
        elif self.problem.is_small:
            self._by_chains()
            if self.front.best(self._budget) is None:
                self.front.update(self._smallest().front)  # it may have shrunk what enumeration and chains give
            self.improve(self._budget, [])
        elif not self._good():
            self._by_layouts()
        return self.front

    def _by_layouts(self) -> None:
        budget = self._budget
        starts: list[Solution] = []  # the fastest of each kind
        promising = self._promising()
        for around in (False, True):
            kind: list[Solution] = []
            for layout in [layout for layout in promising if layout.around is around][:LAYOUTS]:
                kind += self._prices.plans(layout, budget)
                if self._good():
                    return
            starts += sorted(kind, key=lambda s: s.seconds)[:1]
        if self._costly() or len(self.problem.windows.cuts) <= FEW_CELLS:
            starts += self._by_chains()
        if self._costly() and self.worth_shaking(self.front.best(budget), budget):
            smallest = self._smallest()
            self.front.update(smallest.front)
            best = self.front.best(budget)
            narrow = sorted((s for s in smallest.shrunk if s.peak <= budget), key=lambda s: s.seconds)[:1]
            starts += [self.trimmed(s, budget) for s in ([best, *narrow] if best is not None else narrow)]
        self.improve(budget, starts)

    def _promising(self) -> list[WindowLayout]:
        """The layouts in which a plan can fit, the best first: a few prices tell which suit this budget."""
        self.front.update(tight for tight, _ in self.problem.tightest)
        promising: list[tuple[float, int, WindowLayout]] = []
        near: int | None = None
        for tight, layout in self.problem.tightest:
            if tight.peak <= self._budget:
                at_peak = self._prices.at_peak
                fitting, too_large, near = self._prices.bracket(layout, at_peak, self._budget, GLANCES, near)
                promising.append((_between(fitting or tight, too_large, self._budget), layout.cells, layout))
        return [layout for _, _, layout in sorted(promising, key=lambda p: p[:2])]

    def _by_chains(self) -> list[Solution]:
        """The fastest of the nested sweeps that fit, trimmed; none where nothing fits."""
        chain, timeline, budget = self.problem.chain, self.problem.timeline, self._budget
        if chain.length < 3:
            return []
        schedules = chain.schedules(budget, lambda plan: timeline.peak(plan) <= budget)
        fitting = [found for found in map(self.keep, schedules) if found.peak <= budget]
        return [self.trimmed(min(fitting, key=lambda s: (s.seconds, s.peak)), budget)] if fitting else []

    def _costly(self) -> bool:
        """Whether windows suit the budget badly: none fits, or the budget is near the smallest that windows reach and they cost much."""
        best = self.front.best(self._budget)
        tightest = min(tight.peak for tight, layout in self.problem.tightest if not layout.around)
        near = self._budget < tightest + NEAR_TIGHTEST * (self.problem.baseline.peak - tightest)
        return best is None or (near and best.seconds > CHAINS_WORTH * self.problem.trace.pass_seconds)

    def _good(self) -> bool:
        """Whether the fastest plan that fits is so near to the bound that further search is not worthwhile."""
        best = self.front.best(self._budget)
        target = self.problem.bound.seconds(self._budget) + CLOSE * self.problem.trace.pass_seconds
        return best is not None and best.seconds <= target


def _between(fitting: Solution, larger: Solution | None, budget_bytes: int) -> float:
    """Seconds at a budget between two plans, by linear interpolation."""
    if larger is None:
        return fitting.seconds
    share = (larger.seconds - fitting.seconds) * (budget_bytes - fitting.peak) / (larger.peak - fitting.peak)
    return fitting.seconds + share
