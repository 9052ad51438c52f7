"""Whether a forward makes so much that its step will not fit in the budget, though it runs the operations of its plan: asked while it runs.

Where values decide sizes, a plan is for those that captures have seen. What forward makes is noted here as it is made; whenever it has grown by what was
free, the peak for these sizes is worked out, and the forward can be ended before more is held than planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch._ops import OpOverload

from memfit import dispatch
from memfit.units import format_bytes

_NOTHING: Final[tuple[tuple[int, int], ...]] = ()


class PathSizes(Protocol):
    """What is known of the sizes on one path under a plan (`memfit.planner.known_sizes`).

    Attributes:
        operations: names of those of forward.
        watched: of forward operations, the outputs whose sizes change: (output, storage).
        least_free: bytes that the plan leaves free in the sizes that take most.
    """

    operations: tuple[str, ...]
    watched: Mapping[int, tuple[tuple[int, int], ...]]
    least_free: int

    def base_bytes(self, storage: int) -> int:
        """Its size in the draw that takes most."""
        ...

    def weight(self, storage: int) -> float:
        """How many bytes more a step may take for each byte that this storage is larger."""
        ...

    def free_bytes(self, made: Mapping[int, int]) -> int:
        """What is left of the budget in a step of these sizes; negative where it takes more."""
        ...


class SizeWatch:
    """Of one forward.

    Args:
        paths: all that forward may take, as far as is known.
        only: the forward is followed by operation, so it is on the one path there is.

    Attributes:
        outgrown: sizes were told that will not fit.
    """

    def __init__(self, paths: Sequence[PathSizes], *, only: bool) -> None:
        self.outgrown = False
        self._paths = [_OnPath(path) for path in paths]
        self._only = only
        self._index = 0
        self._lost = False

    def watches(self, index: int) -> bool:
        """Whether the size of something that this operation makes matters, on the one path there is."""
        return index in self._paths[0].sizes.watched

    def watched_between(self, first: int, end: int) -> bool:
        """Whether `watches` is true of any operation from the first up to, not including, the end."""
        return any(first <= index < end for index in self._paths[0].sizes.watched)

    def ran(self, func: OpOverload, result: Any, index: int | None = None) -> str | None:
        """An operation of forward has run.

        Args:
            func: the operation.
            result: of it.
            index: of it in forward, where that is known.

        Returns:
            Why the step will not fit; None where it will.
        """
        at = self._index if index is None else index
        self._index = at + 1
        if self._lost:
            return None
        if not self._only:
            name = str(func)
            before = self._paths
            self._paths = [path for path in before if path.runs(at, name)]
            if not self._paths:
                self._lost, self._paths = True, before[:1]
                return f"operation {at} is {name}, as on no path that is known"
        return self._told([path.made(at, result) for path in self._paths])

    def ended(self) -> str | None:
        """Forward has run; why the step will not fit, None where it will."""
        if self._lost:
            return None
        ended = [path for path in self._paths if self._only or len(path.sizes.operations) == self._index]
        return self._told([path.looked_at() for path in ended])

    def _told(self, why: Sequence[str | None]) -> str | None:
        """Why it will not fit on any of the paths that it may be on."""
        self.outgrown = bool(why) and all(each is not None for each in why)
        return why[0] if self.outgrown else None


class _OnPath:
    """A forward, as long as it may be on this path."""

    def __init__(self, sizes: PathSizes) -> None:
        self.sizes = sizes
        self._free = sizes.least_free
        self._grown = 0.0  # since the peak was worked out last
        self._made: dict[int, int] = {}

    def runs(self, index: int, name: str) -> bool:
        """Whether this operation comes here on this path."""
        return index < len(self.sizes.operations) and self.sizes.operations[index] == name

    def made(self, index: int, result: Any) -> str | None:
        """Why the step will not fit, with what this operation has made; None where it will."""
        watched = self.sizes.watched.get(index, _NOTHING)
        if not watched:
            return None
        results = (result,) if isinstance(result, torch.Tensor) else tuple(dispatch.tensors_in(result))
        for output, storage in watched:
            if output < len(results) and dispatch.has_storage(results[output]):
                size = results[output].untyped_storage().nbytes()
                self._made[storage] = size
                self._grown += max(0, size - self.sizes.base_bytes(storage)) * self.sizes.weight(storage)
        return self.looked_at()

    def looked_at(self) -> str | None:
        """As `made`, with what was made so far."""
        if self._grown <= max(0, self._free):
            return None
        self._grown, self._free = 0.0, self.sizes.free_bytes(self._made)
        if self._free >= 0:
            return None
        return f"values have decided on larger sizes than are known, with which it takes {format_bytes(-self._free)} more than the budget"
