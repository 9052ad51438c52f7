"""The plans found so far that no other beats in both bytes and seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from memfit.planner.solution import Solution


class Front:
    """Plans by peak, the smallest first; of two that take the same bytes and seconds the one that came first stays.

    Args:
        slowest_seconds: plans slower than this are not remembered.
        plans: to begin with.
    """

    def __init__(self, slowest_seconds: float, plans: Iterable[Solution] = ()) -> None:
        self.slowest_seconds = slowest_seconds
        self._plans: list[Solution] = []
        self._peaks: list[int] = []
        self.update(plans)

    def __iter__(self) -> Iterator[Solution]:
        return iter(self._plans)

    def copy(self) -> Front:
        """Another front with the same plans."""
        return Front(self.slowest_seconds, self)

    def best(self, budget_bytes: int) -> Solution | None:
        """The fastest plan that fits; None where none does."""
        i = bisect_right(self._peaks, budget_bytes)
        return self._plans[i - 1] if i else None

    def smallest(self) -> Solution:
        """The plan with the smallest peak."""
        return self._plans[0]

    def update(self, plans: Iterable[Solution]) -> None:
        """`add` each."""
        for plan in plans:
            self.add(plan)

    def add(self, plan: Solution) -> None:
        """Remember a plan, unless a known one is as good or it is slower than `slowest_seconds`."""
        if plan.seconds > self.slowest_seconds:
            return
        i = bisect_right(self._peaks, plan.peak)
        if i and self._plans[i - 1].seconds <= plan.seconds:
            return
        if i and self._peaks[i - 1] == plan.peak:
            i -= 1
        j = i
        while j < len(self._plans) and self._plans[j].seconds >= plan.seconds:
            j += 1
        self._plans[i:j] = [plan]
        self._peaks[i:j] = [plan.peak]
