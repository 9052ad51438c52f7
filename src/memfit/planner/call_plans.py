"""Plans that make whole calls of modules again (`repeatable_calls`), beside those that run single operations again.

Which calls: those that give back most bytes for a second come first, of equal ones the earliest in forward, whose activations would lie longest; as many as the
budget takes. Blocks alone are tried, and blocks and the modules right inside them together.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.planner.repeatable_calls import outermost
from memfit.planner.solution import Solution
from memfit.planner.timeline import Recomputations, Timeline


class CallPlans:
    """Plans of one trace by calls.

    Args:
        timeline: of the trace.

    Attributes:
        orders: recipes in the order in which they are taken, one list for each way to choose among them.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._calls = timeline.recipes.calls
        self._known: dict[int, Solution | None] = {}
        self.orders = self._ordered() if self._calls else []

    def fitting(self, budget_bytes: int) -> Solution | None:
        """The fastest that fits; None where none does."""
        if budget_bytes not in self._known:
            found = [plan for order in self.orders if (plan := self._fewest(order, budget_bytes)) is not None]
            self._known[budget_bytes] = min(found, key=lambda plan: plan.seconds, default=None)
        return self._known[budget_bytes]

    def makes(self, plan: Solution) -> bool:
        """Whether a plan makes calls again."""
        return any(recipe in self._calls for runs in plan.recomputations.values() for recipe in runs)

    def _ordered(self) -> list[list[int]]:
        storages = self._timeline.trace.storages
        gain = {
            recipe: sum(storages[s].bytes for s in calls.makes) / self._timeline.run_seconds(recipe)
            for recipe, calls in self._calls.items()
        }
        order = sorted(gain, key=lambda recipe: (-gain[recipe], self._calls[recipe].begin))
        lengths = sorted({len(calls.calls) for calls in self._calls.values()})
        rows = [[r for r in order if len(self._calls[r].calls) == length] for length in lengths]
        # Single calls are blocks and what is right inside them: blocks alone, or of both whatever gives back more.
        outer = frozenset(outermost(sorted(rows[0], key=self._begins), self._operations))
        blocks = [recipe for recipe in rows[0] if recipe in outer]
        return [blocks, *([self._apart(rows[0])] if len(blocks) < len(rows[0]) else []), *rows[1:]]

    def _begins(self, recipe: int) -> tuple[int, int]:
        """Order in which calls began, outer ones first."""
        return self._calls[recipe].begin, -self._calls[recipe].ends_before

    def _operations(self, recipe: int) -> tuple[int, int]:
        return self._calls[recipe].begins_with, self._calls[recipe].ends_before

    def _apart(self, order: Sequence[int]) -> list[int]:
        """Of calls that overlap the one that comes first."""
        taken: list[int] = []
        spans: set[int] = set()
        for recipe in order:
            operations = range(*self._operations(recipe))
            if spans.isdisjoint(operations):
                taken.append(recipe)
                spans.update(operations)
        return taken

    def _fewest(self, order: Sequence[int], budget_bytes: int) -> Solution | None:
        """As few calls of an order as fit."""
        low, high = 1, len(order)
        if self._timeline.peak(self._recomputations(order)) > budget_bytes:
            return None
        while low < high:
            middle = (low + high) // 2
            if self._timeline.peak(self._recomputations(order[:middle])) <= budget_bytes:
                high = middle
            else:
                low = middle + 1
        plan = self.plan(order[:high])
        return plan if plan.peak <= budget_bytes else None

    def plan(self, recipes: Sequence[int]) -> Solution:
        """The plan that makes these calls again, which do not overlap."""
        recomputations = self._recomputations(recipes)
        dropped = frozenset(s for recipe in recipes for s in self._calls[recipe].makes)
        return Solution(recomputations, self._timeline.evaluate(recomputations), dropped)

    def _recomputations(self, recipes: Sequence[int]) -> Recomputations:
        """Each call is made again when backward asks for the first of what it makes."""
        uses = self._timeline.unpack_uses
        out: dict[int, list[int]] = {}
        for recipe in recipes:
            first = min(uses[s][0][0] for s in self._calls[recipe].makes if uses.get(s))
            out.setdefault(first, []).append(recipe)
        return out
