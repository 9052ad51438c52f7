"""Sizes that random numbers decide: what a plan takes under every draw that the capture saw, not only under the first one, for which it was found.

A model that routes by noisy scores, for one, gives its experts other tokens in each step. Plans are searched with the sizes of one draw, and a plan found so
has its peak where that draw happens to be small; so it is replayed under the others as well before it is believed, and gets as many bytes to spare as the
peaks lie apart. With six draws of a size that is about normal, that is nearly four standard deviations above the mean.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from memfit.planner.timeline import Recomputations, Timeline


class Draws:
    """One trace under all draws that its capture saw; the same recipes in each, with other sizes."""

    def __init__(self, timeline: Timeline) -> None:
        self._first = timeline

    @cached_property
    def _timelines(self) -> tuple[Timeline, ...]:
        trace = self._first.trace
        tables = (
            tuple(replace(s, bytes=size) for s, size in zip(trace.storages, sizes, strict=True))
            for sizes in trace.drawn_bytes
        )
        return self._first, *(Timeline(replace(trace, storages=storages)) for storages in tables)

    def peaks(self, recomputations: Recomputations) -> list[int]:
        """Peak bytes of a plan under each draw, the first draw's first."""
        return [timeline.peak(recomputations) for timeline in self._timelines]

    def varies(self, recomputations: Recomputations) -> int:
        """Difference between the largest and the smallest peak of a plan; 0 where no random number decides a size."""
        if not self._first.trace.drawn_bytes:
            return 0
        peaks = self.peaks(recomputations)
        return max(peaks) - min(peaks)

    def largest(self, recomputations: Recomputations) -> Timeline:
        """The draw under which a plan takes most."""
        return max(self._timelines, key=lambda timeline: timeline.peak(recomputations))

    def needed(self, recomputations: Recomputations) -> int:
        """Bytes that a plan needs: its largest peak plus the difference between its peaks."""
        peaks = self.peaks(recomputations)
        return 2 * max(peaks) - min(peaks)
