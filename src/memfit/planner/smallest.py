"""The search for the plan with the smallest peak."""

from __future__ import annotations

from typing import Final

from memfit.planner.front import Front
from memfit.planner.front_search import MOST_RUNS, FrontSearch
from memfit.planner.local_search import shrink
from memfit.planner.problem import Problem
from memfit.planner.solution import Solution

SHRINK_TRIES: Final = 1500
SHRUNK_LAYOUTS: Final = 3
STEP: Final = 0.002  # a smallest plan smaller by less than this part is not worth another round


class SmallestSearch(FrontSearch):
    """One search.

    Args:
        problem: the trace.
        front: what is known when the search begins; None for what follows from the problem.

    Attributes:
        shrunk: plans whose peak was lowered moment by moment, in the order found.
    """

    def __init__(self, problem: Problem, front: Front | None = None) -> None:
        super().__init__(problem, problem.first_front.copy() if front is None else front)
        self.shrunk: list[Solution] = []

    def run(self) -> SmallestSearch:
        """Search; the smallest plan of the front is the result."""
        if not self.problem.graph.droppable:
            return self  # the baseline is all there is (a streamed step is one)
        starts: list[Solution] = []  # the smallest of each kind
        if not self.problem.is_small:
            self.front.update(tight for tight, _ in self.problem.tightest)
        if self._nothing_is_smaller():
            self.finish()
            return self
        if not self.problem.is_small:
            for around in (False, True):
                tightest = [tight for tight, layout in self.problem.tightest if layout.around is around]
                shrunk = [self.shrink(tight) for tight in sorted(tightest, key=lambda t: t.peak)[:SHRUNK_LAYOUTS]]
                starts += sorted(shrunk, key=lambda s: s.peak)[:1]
        if not self._nothing_is_smaller():
            starts += self._by_chains()
        for start in {id(s): s for s in (*starts, self.front.smallest())}.values():
            self.shrink(start)
        self.finish()
        return self

    def _nothing_is_smaller(self) -> bool:
        """Whether the smallest plan takes what every plan holds at some moment: where the update of many parameters does, most plans do."""
        return self.front.smallest().peak <= self.problem.floor_bytes

    def finish(self) -> None:
        """Of what runs again in the smallest plan, take out what its peak does not need."""
        best = self.front.smallest()
        self.trimmed(best, best.peak)

    def shrink(self, solution: Solution) -> Solution:
        """A plan with its peak lowered as far as single changes do."""
        if solution.runs > MOST_RUNS or solution.peak <= self.problem.floor_bytes:
            return solution
        tries = SHRINK_TRIES // solution.repeats
        self.shrunk.append(
            self.keep(shrink(self.problem.timeline, solution.recomputations, tries, self.problem.floor_bytes))
        )
        return self.shrunk[-1]

    def _by_chains(self) -> list[Solution]:
        """The smallest plan of nested sweeps; none where there is nothing to nest."""
        chain = self.problem.chain
        if chain.length < 3:
            return []
        known, best = self.front.smallest().peak, None
        while True:
            found = [self.keep(recomputations) for recomputations in chain.smallest_schedules(known)]
            found = [s for s in found if s.seconds <= self.front.slowest_seconds]
            best = min([best, *found] if best is not None else found, key=lambda s: s.peak, default=None)
            if best is None or known - best.peak <= STEP * known:
                return [best] if best is not None else []
            known = best.peak
