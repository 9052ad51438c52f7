"""A plan for one trace, replayed: what runs again, what that takes in bytes and in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.planner.timeline import Evaluation, Recomputations


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan for one trace.

    Attributes:
        recomputations: what is recomputed or loaded back, and when.
        evaluation: what the timeline says of it.
        dropped: storages rebuilt; transients: storages held for recomputation only.
        window: how many cells are rebuilt together (0: all).
    """

    recomputations: Recomputations
    evaluation: Evaluation
    dropped: frozenset[int] = frozenset()
    transients: frozenset[int] = frozenset()
    window: int = 0

    @property
    def seconds(self) -> float:
        """Extra seconds of one micro-batch."""
        return self.evaluation.extra_seconds

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.evaluation.peak_bytes

    @property
    def runs(self) -> int:
        """How many recipes run again, each counted as often as it does."""
        return sum(map(len, self.recomputations.values()))

    @property
    def repeats(self) -> int:
        """How often the same recipe runs again, on average, and at least 1: a step of local search takes the longer the more copies there are."""
        return max(1, self.runs // max(1, len({r for runs in self.recomputations.values() for r in runs})))
