"""What a step under a plan will take in sizes that no capture saw, told from what its forward has made so far.

Where values decide sizes, a step may run the operations of its plan and need more. Every copy that a plan keeps is there from one moment to another, whatever
its size, so the peak for other sizes is a sum over the same intervals. What forward makes is known while it runs; what backward makes is as large as what
it is a gradient of: on each draw that was captured it grew in the same proportion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from memfit.planner.timeline import Recomputations, Timeline
from memfit.values.trace import Category

_OF_A_STEP: Final = frozenset({Category.ACTIVATION, Category.TEMPORARY})


class KnownSizes:
    """One path under a plan, in all sizes that were captured.

    Args:
        timelines: of the same operations, in the sizes of each draw.
        recomputations: the plan on this path.
        capacity_bytes: that its steps have.

    Attributes:
        operations: names of those of forward.
        watched: of forward operations, the outputs whose sizes change: (output, storage).
        least_free: bytes that the plan leaves free in the sizes that take most.
    """

    def __init__(self, timelines: Sequence[Timeline], recomputations: Recomputations, capacity_bytes: int) -> None:
        trace = timelines[0].trace
        self._trace, self._capacity = trace, capacity_bytes
        self._sizes = np.array([[s.bytes for s in t.trace.storages] for t in timelines], dtype=np.int64)
        replays = [timeline.intervals(recomputations) for timeline in timelines]
        self._intervals = replays[0]
        peaks = [int(replay.totals(sizes).max()) for replay, sizes in zip(replays, self._sizes, strict=True)]
        self._fixed = np.max([replay.fixed for replay in replays], axis=0)
        self._base = self._sizes[int(np.argmax(peaks))]
        self.least_free = capacity_bytes - max(peaks)
        forward = list(trace.in_forward())
        self.operations = tuple(operation.name for operation in forward)
        varying = set(np.flatnonzero(np.ptp(self._sizes, axis=0)).tolist())
        self.watched: Mapping[int, tuple[tuple[int, int], ...]] = {
            number: made
            for number, operation in enumerate(forward)
            if (
                made := tuple(
                    (output, operation.makes[place])
                    for output, place in enumerate(operation.outputs)
                    if place >= 0
                    and operation.outputs.index(place) == output
                    and (operation.by_values or operation.makes[place] in varying)
                )
            )
        }

    def base_bytes(self, storage: int) -> int:
        """Its size in the draw that takes most."""
        return int(self._base[storage])

    def weight(self, storage: int) -> float:
        """How many bytes more a step may take for each byte that this storage is larger: it and what backward makes of it."""
        return float(self._weights[storage])

    def free_bytes(self, made: Mapping[int, int]) -> int:
        """What is left of the capacity in a step of these sizes; negative where it takes more.

        Args:
            made: bytes of storages that forward has made; of all others that it makes, those of the draw that takes most are taken.
        """
        sizes = self._base.astype(np.float64)
        known = list(made)
        sizes[known] = [made[s] for s in known]
        most = self._sizes.max(axis=0)
        grown = max((made[s] / most[s] for s in known if most[s]), default=1.0)
        source, ratio = self._follows
        follows = np.flatnonzero(source >= 0)
        sizes[follows] = sizes[source[follows]] * ratio[follows]
        # What was as large in every draw, and is not now: nothing says how much of the rest is larger, too.
        fixed_before = [s for s in known if not np.ptp(self._sizes[:, s]) and made[s] > most[s]]
        if grown > 1.0:
            unknown = self._unknown if not fixed_before else self._of_a_step
            unknown = unknown[~np.isin(unknown, known)]
            sizes[unknown] = np.maximum(sizes[unknown], most[unknown] * grown)
        fixed = self._fixed.copy()
        fixed[self._intervals.runs] = np.ceil(fixed[self._intervals.runs] * max(1.0, grown)).astype(np.int64)
        return int(self._capacity - self._intervals.totals(np.ceil(sizes).astype(np.int64), fixed).max())

    # -- how what backward makes follows from what forward has made ----------------------------------------------------------

    @cached_property
    def _of_a_step(self) -> Any:
        """Storages that a step makes."""
        storages = self._trace.storages
        return np.array(
            [n for n, s in enumerate(storages) if s.birth >= 0 and s.category in _OF_A_STEP], dtype=np.int64
        )

    @cached_property
    def _follows(self) -> tuple[Any, Any]:
        """Of each storage that is not watched, the watched one in proportion to which it grows (-1 where there is none), and the proportion."""
        count = self._sizes.shape[1]
        source, ratio = np.full(count, -1), np.ones(count)
        mine = {s for made in self.watched.values() for _, s in made}
        shapes: dict[tuple[float, ...], int] = {}
        for s in sorted(mine):
            shape = self._shape(s)
            if shape is not None:
                shapes.setdefault(shape, s)
        for s in np.flatnonzero(np.ptp(self._sizes, axis=0)).tolist():
            shape = None if s in mine else self._shape(s)
            if shape in shapes:
                source[s] = shapes[shape]
                ratio[s] = self._sizes[0, s] / self._sizes[0, shapes[shape]]
        return source, ratio

    def _shape(self, storage: int) -> tuple[float, ...] | None:
        """Its sizes in proportion to the first; None where nothing follows from them."""
        sizes = self._sizes[:, storage]
        return tuple((sizes / sizes[0]).round(9).tolist()) if sizes[0] and np.ptp(sizes) else None

    @cached_property
    def _unknown(self) -> Any:
        """Storages that change from draw to draw in proportion to no watched one."""
        watched = {s for made in self.watched.values() for _, s in made}
        varying = set(np.flatnonzero(np.ptp(self._sizes, axis=0)).tolist())
        found = sorted(s for s in varying - watched if self._follows[0][s] < 0)
        return np.array(found, dtype=np.int64)

    @cached_property
    def _weights(self) -> Any:
        weights = np.ones(self._sizes.shape[1])
        source, ratio = self._follows
        follows = np.flatnonzero(source >= 0)
        np.add.at(weights, source[follows], ratio[follows])
        if len(self._unknown) or len(self._sizes) == 1:
            weights += self._sizes.shape[1]  # whatever is larger, all of this has to be looked at
        return weights
