"""A search with a front of its own: everything it finds is replayed, remembered and may be improved by local search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memfit.planner.front import Front
from memfit.planner.local_search import exchange, shake, trim
from memfit.planner.problem import Problem
from memfit.planner.solution import Solution
from memfit.planner.timeline import Recomputations

FEW_STORAGES: Final = 64  # up to here recomputations are exchanged one for others
TRIM_TRIES: Final = 6000
EXCHANGE_TRIES: Final = 300
SHAKES: Final = 16
# Plans of other kinds are improved too when they are within this part of a pass of the fastest.
OTHER_KINDS: Final = 0.03
FAR: Final = 0.01  # plans this part of a pass above the bound are shaken
MOST_SHAKEN: Final = 1500  # plans of more recomputations take too long to trim again and again
MOST_RUNS: Final = 12000  # plans of more recomputations are left as they are


class FrontSearch:
    """What all searches share.

    Args:
        problem: the trace, and what depends on it alone.
        front: what is known when the search begins; it is added to.
    """

    def __init__(self, problem: Problem, front: Front) -> None:
        self.problem = problem
        self.front = front

    def keep(self, recomputations: Recomputations) -> Solution:
        """Replay a plan, and remember it."""
        problem = self.problem
        again = {s for runs in recomputations.values() for r in runs for s in problem.recipes.recipes[r].makes}
        return self.remember(
            Solution(recomputations, problem.timeline.evaluate(recomputations), problem.graph.droppable & again)
        )

    def remember(self, solution: Solution) -> Solution:
        """Add a plan to the front, if what it offloads fits on its tiers, and parameters are whole where it reads them."""
        timeline = self.problem.timeline
        if timeline.fits_lower_tiers(solution.recomputations) and timeline.recipes.read_what_is_there(
            solution.recomputations
        ):
            self.front.add(solution)
        return solution

    def trimmed(self, solution: Solution, budget_bytes: int) -> Solution:
        """A plan that fits, with recomputation taken out as long as it fits."""
        if solution.runs > MOST_RUNS:
            return solution
        tries = TRIM_TRIES // solution.repeats
        return self.keep(trim(self.problem.timeline, solution.recomputations, budget_bytes, tries))

    def improve(self, budget_bytes: int, starts: Sequence[Solution]) -> None:
        """Local search from the fastest plan and from the fastest of other kinds that come near it: greedy steps end in local optima near their start."""
        best = self.front.best(budget_bytes)
        if best is None:
            return
        timeline = self.problem.timeline
        near = best.seconds + OTHER_KINDS * self.problem.trace.pass_seconds
        for start in {s.seconds: s for s in (*starts, best) if s.seconds <= near}.values():
            trimmed = self.trimmed(start, budget_bytes)
            if len(self.problem.graph.nodes) <= FEW_STORAGES:
                self.keep(exchange(timeline, trimmed.recomputations, budget_bytes, EXCHANGE_TRIES))
            elif self.worth_shaking(trimmed, budget_bytes):
                self.keep(shake(timeline, trimmed.recomputations, budget_bytes, SHAKES))

    def worth_shaking(self, solution: Solution | None, budget_bytes: int) -> bool:
        """Whether a plan is far from the bound, and not so long that searching around it would take too long."""
        if solution is None:
            return True
        far = self.problem.bound.seconds(budget_bytes) + FAR * self.problem.trace.pass_seconds
        return solution.seconds > far and solution.runs <= MOST_SHAKEN
