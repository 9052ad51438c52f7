"""Plans that may offload: the third thing to do with a storage, besides keeping and recomputing it.

An offloaded storage is copied to a lower tier (host memory, a disk) and back. Copying back needs neither inputs nor an operation that may run twice. So
storages that no recipe can rebuild (of large custom operations, of random ones without a generator's state) can be offloaded, too, and where a boundary is
copied back, the window after it can be recomputed from it at no further cost.

Sources: vDNN (Rhu et al. 2016) for offloading activations behind computing; Capuchin (Peng et al. 2020) and POFO (Beaumont et al. 2021) weigh it against
recomputing, storage by storage in order of gain, and on chains. The cut (`offload_cuts`) is ours.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.planner.front import Front
from memfit.planner.offload_search import OffloadBudgetSearch, OffloadProblem, OffloadSmallestSearch
from memfit.planner.recipes import Recipes
from memfit.planner.smallest import SmallestSearch
from memfit.planner.solver import Solver
from memfit.planner.timeline import Timeline
from memfit.units import format_bytes


class OffloadSolver(Solver):
    """Plans for one trace at any budget, with lower tiers to offload to.

    Args:
        timeline: whose recipes know a lower tier, or several.
        without_last_tier: where it is known; made here when None.

    Attributes:
        without_last_tier: of the same step with the last tier taken away; what it finds are plans here, too, as recipes have the same numbers.
        with_nearest_empty: of the same step with nothing on the nearest of several tiers, of which the same is true; None with one tier.
    """

    problem: OffloadProblem

    def __init__(self, timeline: Timeline, without_last_tier: Solver | None = None) -> None:
        super().__init__(timeline)
        link = timeline.recipes.lower_tier
        assert link is not None, "made where there is one"
        self.without_last_tier: Solver = without_last_tier or solver_for(
            Timeline(self.trace, Recipes(self.trace, link.shortened))
        )
        self.with_nearest_empty: Solver | None = None
        if isinstance(self.without_last_tier, OffloadSolver) and link.free_bytes != 0:
            # Room on the nearer tier is taken by what is read soonest, which may leave a search where nothing else is tried.
            emptied = Timeline(self.trace, Recipes(self.trace, replace(link, free_bytes=0)))
            self.with_nearest_empty = OffloadSolver(emptied, self.without_last_tier.without_last_tier)

    def _problem(self) -> OffloadProblem:
        return OffloadProblem(self.timeline)

    def _search(self, budget_bytes: int) -> Front:
        known = self.without_last_tier.found(budget_bytes)
        front = OffloadBudgetSearch(self.problem, budget_bytes, known, self.smallest_search).run()
        if self.with_nearest_empty is not None:  # last, so that the nearer tier is taken where it makes no difference
            front.update(self.with_nearest_empty.found(budget_bytes))
        return front

    def _search_smallest(self) -> SmallestSearch:
        search = OffloadSmallestSearch(self.problem, self.without_last_tier.smallest_search().front).run()
        if self.with_nearest_empty is not None:
            search.front.update(self.with_nearest_empty.smallest_search().front)
        return search


def solver_for(timeline: Timeline) -> Solver:
    """The solver of a trace: one that offloads where anything can be."""
    return (OffloadSolver if timeline.recipes.reloads else Solver)(timeline)


def why_nothing_is_offloaded(recipes: Recipes) -> str | None:
    """Why no storage of a step can be offloaded to the lower tiers that its recipes know; None where one can."""
    link = recipes.lower_tier
    assert link is not None, "called only where there is a lower tier"
    capacities = [tier.free_bytes for tier in recipes.tiers]
    by_value = next((op.name for op in recipes.trace.operations if op.by_values), None)
    if by_value is None and recipes.trace.sized_by_values:
        by_value = "what follows random numbers"
    if by_value is not None:
        return f"the sizes of results of {by_value} depend on values, and space on a lower tier is reserved before the step"
    if not recipes.reloads_of:
        return f"nothing that backward reads takes {format_bytes(link.least_bytes)}, and less is not worth a copy"
    smallest = min(map(recipes.place_bytes, recipes.reloads_of))
    if all(capacity is not None and smallest > capacity for capacity in capacities):
        largest = max(capacity for capacity in capacities if capacity is not None)
        return (
            f"the tensors worth it take {format_bytes(smallest)} or more each, and {format_bytes(largest)} may be used"
        )
    return None
