"""Plans for one trace at any budget: the face of the search.

`solve` and what is made of it are functions of the trace and the budget: every search has a front of its own (`budget_search`), so what was asked before
changes nothing but the time it takes. `together` gives plans for several budgets of which a larger one never gets a slower plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Final

from memfit.garbage import uncollected
from memfit.planner.bound import ROUNDING
from memfit.planner.budget_search import BudgetSearch
from memfit.planner.call_plans import CallPlans
from memfit.planner.draws import Draws
from memfit.planner.front import Front
from memfit.planner.problem import Problem
from memfit.planner.smallest import SmallestSearch
from memfit.planner.solution import Solution
from memfit.planner.timeline import Evaluation, Timeline
from memfit.planner.window_layouts import WindowLayout

DRAWN_ROUNDS: Final = 4  # of planning for less, where other draws, or other ranks, take more than the one planned for


class Solver:
    """Plans for one trace at any budget; what depends on the trace alone is worked out once.

    Attributes:
        plain: the plan in which nothing is dropped.
        draws: the trace under all draws of random numbers that its capture saw.
        branches: where forward takes one of a few paths early on (`branches`) and this one has plans of its own, the solvers of the others. Set by
            `Solvers.of`.
        other_roles: of a sharded step, gives the solvers of the ranks whose steps take other bytes than this one's; all ranks follow one plan. Set by
            `Solvers.of`, and a call, since their traces are captured only once a plan fits this one.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.recipes = timeline.recipes
        self.trace = timeline.trace
        self.draws = Draws(timeline)
        self.problem = self._problem()
        self.plain = self.problem.baseline
        self._fronts: dict[int, Front] = {}
        self._fitting: dict[int, Solution | None] = {}
        self._smallest: SmallestSearch | None = None
        self.branches: tuple[Solver, ...] = ()
        self.other_roles: Callable[[], tuple[Solver, ...]] = tuple

    def _problem(self) -> Problem:
        return Problem(self.timeline)

    # -- what depends on the trace alone -------------------------------------------------------------------------------------

    @cached_property
    def first(self) -> Solver | None:
        """The solver for the first step, where the first forward runs other operations than later ones; None where it does not."""
        return None if self.trace.first is None else Solver(Timeline(self.trace.first))

    @cached_property
    def _others_need(self) -> int:
        """Bytes below which there is no plan for the first step, or for one that takes another path."""
        others = (*self.branches, *(() if self.first is None else (self.first,)))
        return max((other.needed(other.least()) for other in others), default=0)

    @cached_property
    def call_plans(self) -> CallPlans:
        """The plans that make whole calls of modules again."""
        return CallPlans(self.timeline)

    @cached_property
    def _unfollowed(self) -> Problem:
        """The same for an engine that takes no time of its own."""
        return Problem(Timeline(replace(self.trace, dispatch_seconds=0.0, recomputed_seconds=0.0)))

    @property
    def droppable(self) -> frozenset[int]:
        """Storages that backward reads and that can be rebuilt."""
        return self.problem.graph.droppable

    @property
    def nodes(self) -> list[int]:
        """Storages that are decided about."""
        return self.problem.graph.nodes

    def layouts(self) -> list[WindowLayout]:
        """The ways to cut forward into windows that are worth trying."""
        return self.problem.layouts

    def tightest(self, layout: WindowLayout) -> Solution:
        """Everything that can be dropped is, but the boundaries of the windows."""
        return self.problem.tightest_in(layout)

    # -- plans ---------------------------------------------------------------------------------------------------------------

    @uncollected()
    def solve(self, budget_bytes: int) -> Solution | None:
        """The fastest plan found that fits; None when none was found."""
        if self.plain.peak <= budget_bytes:
            return self.plain
        found = (self.found(budget_bytes).best(budget_bytes), self.call_plans.fitting(budget_bytes))
        return min((plan for plan in found if plan is not None), key=lambda plan: plan.seconds, default=None)

    @uncollected()
    def smallest(self) -> Solution:
        """The plan with the smallest peak found."""
        return self.smallest_search().front.smallest()

    @uncollected()
    def bound(self, budget_bytes: int, plan: Solution | None = None) -> float:
        """Extra seconds of one micro-batch that no plan within the budget can avoid.

        For a plan that makes whole calls of modules again, which the engine need not follow, it is the bound for an engine that takes no time of its own.

        Args:
            budget_bytes: what plans have to fit into.
            plan: one that fits: where plan and bound meet they are sums of the same numbers in another order, and the plan's is taken.
        """
        problem = self._unfollowed if plan is not None and self.call_plans.makes(plan) else self.problem
        bound = problem.bound.seconds(budget_bytes)
        met = plan is not None and plan.seconds < bound <= plan.seconds * (1 + ROUNDING)
        return plan.seconds if plan is not None and met else bound

    def found(self, budget_bytes: int) -> Front:
        """Everything that the search for one budget finds."""
        if budget_bytes not in self._fronts:
            self._fronts[budget_bytes] = self._search(budget_bytes)
        return self._fronts[budget_bytes]

    def met(self, budget_bytes: int, less_bytes: int) -> float | None:
        """Extra seconds of the fastest plan within fewer bytes that the search for a budget met; None where there was no such search, or it met none."""
        if self.plain.peak <= less_bytes:
            return self.plain.seconds
        front = self._fronts.get(budget_bytes)
        plan = None if front is None else front.best(less_bytes)
        return None if plan is None else plan.seconds

    def smallest_search(self) -> SmallestSearch:
        """The finished search for the smallest plan."""
        if self._smallest is None:
            self._smallest = self._search_smallest()
        return self._smallest

    def _search(self, budget_bytes: int) -> Front:
        return BudgetSearch(self.problem, budget_bytes, self.smallest_search).run()

    def _search_smallest(self) -> SmallestSearch:
        return SmallestSearch(self.problem).run()

    def within(self, budget_bytes: int) -> Solution:
        """The fastest plan that fits, else the smallest."""
        return self.fitting(budget_bytes) or self.least()

    # -- plans, where random numbers decide sizes, and of ranks that hold other bytes ---------------------------------------

    def needed(self, solution: Solution) -> int:
        """Bytes that a plan needs, on the fullest of several ranks."""
        return max(role.needed_here(there) for role, there in self.by_role(solution))

    def needed_here(self, solution: Solution) -> int:
        """Bytes that it needs on this rank: its peak, more for other draws where random numbers decide sizes, and no fewer than other paths need."""
        own = self.draws.needed(solution.recomputations) if self.draws.several else solution.peak
        return max(own, self._others_need)

    def roles(self) -> tuple[Solver, ...]:
        """This solver, and those of the ranks whose steps take other bytes."""
        return self, *self.other_roles()

    def by_role(self, solution: Solution) -> list[tuple[Solver, Solution]]:
        """A plan of this rank, and what it comes to on those whose steps take other bytes."""
        others = self.other_roles()
        carried = [replace(solution, evaluation=role.timeline.evaluate(solution.recomputations)) for role in others]
        return [(self, solution), *zip(others, carried, strict=True)]

    def fullest(self, solution: Solution) -> tuple[Solver, Solution]:
        """The solver of the rank on which a plan needs most, and what it comes to there."""
        return max(self.by_role(solution), key=lambda each: each[0].needed_here(each[1]))

    def fitting(self, budget_bytes: int) -> Solution | None:
        """`solve`, with what a plan needs on every rank, not only its peak on this one under the first draw, inside the budget."""
        found = self.fitting_here(budget_bytes)
        if found is None or not self.other_roles():
            return found  # where not even this rank fits, the others need not be known
        return self._fitting_all_roles(found, budget_bytes)

    def _fitting_all_roles(self, found: Solution, budget_bytes: int) -> Solution | None:
        """The same for all ranks, by planning for less on this one. What is less than the smallest plan needs is not searched for.

        Args:
            found: what fits this rank.
            budget_bytes: of each.
        """
        if found is not self.plain and self.needed(self.least()) > budget_bytes:
            return None
        target = budget_bytes
        for _ in range(DRAWN_ROUNDS):
            over = self.needed(found) - budget_bytes
            if over <= 0:
                return found
            target -= over
            less = self.fitting_here(target)
            if less is None:
                break
            found = less
        every = sorted(self.smallest_search().front, key=lambda plan: plan.seconds)
        return next((plan for plan in every if self.needed(plan) <= budget_bytes), None)

    def fitting_here(self, budget_bytes: int) -> Solution | None:
        """The same by what a plan needs on this rank alone."""
        if self._others_need > budget_bytes:
            return None
        if not self.draws.several:
            return self.solve(budget_bytes)
        if budget_bytes not in self._fitting:
            self._fitting[budget_bytes] = self._fitting_all_draws(budget_bytes)
        return self._fitting[budget_bytes]

    def together(self, budgets: Iterable[int]) -> dict[int, Solution | None]:
        """`fitting` for several budgets, where each may also have any plan found for another: a larger one never gets a slower plan.

        It depends on the set of budgets, not on their order.
        """
        asked = sorted(set(budgets))
        alone = {budget: self.fitting(budget) for budget in asked}
        known = [plan for budget in asked if budget < self.plain.peak for plan in self.found(budget)]
        ranked = sorted(
            ((self.needed(plan), plan.seconds, n, plan) for n, plan in enumerate(known)), key=lambda r: r[:3]
        )
        out: dict[int, Solution | None] = {}
        best: Solution | None = None
        at = 0
        for budget in asked:
            own = alone[budget]
            if own is not None and (best is None or own.seconds < best.seconds):
                best = own
            while at < len(ranked) and ranked[at][0] <= budget:
                plan = ranked[at][3]
                best = plan if best is None or plan.seconds < best.seconds else best
                at += 1
            out[budget] = best
        return out

    def _fitting_all_draws(self, budget_bytes: int) -> Solution | None:
        known = self.problem.front()
        target = budget_bytes
        for _ in range(DRAWN_ROUNDS):
            if self.plain.peak > target:
                known.update(self.found(target))
            found = known.best(target)
            over = 0 if found is None else self.needed_here(found) - budget_bytes
            if over <= 0:
                break
            target -= over
        # A front keeps no plan that another beats under the first draw, though it may need less under all.
        every = sorted((*known, *self.smallest_search().front), key=lambda plan: plan.seconds)
        fitting = (plan for plan in every if self.needed_here(plan) <= budget_bytes)
        return next(fitting, None)

    def worst(self, solution: Solution) -> tuple[Timeline, Evaluation]:
        """The draw under which a plan takes most, and what it comes to there."""
        if not self.trace.drawn_bytes:
            return self.timeline, solution.evaluation
        timeline = self.draws.largest(solution.recomputations)
        return timeline, timeline.evaluate(solution.recomputations)

    def least(self) -> Solution:
        """`smallest`, by what plans need on every rank."""
        return min(self.smallest_search().front, key=self.needed) if self.other_roles() else self.least_here()

    def least_here(self) -> Solution:
        """The same by what they need on this rank alone."""
        search = self.smallest_search()
        return min(search.front, key=self.needed_here) if self.draws.several else search.front.smallest()
