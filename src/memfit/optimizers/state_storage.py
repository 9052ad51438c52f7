"""Where optimizer state is between updates: in flat tensors on the device or in pinned host memory, or in a file; loaded to the device slice by slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit.optimizers.formats import blocks
from memfit.storage.files import OPTIMIZER_STATE, DiskFile
from memfit.storage.pinned import empty_on_host
from memfit.storage.raw_bytes import memory_of


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One flat tensor of a parameter's state.

    Attributes:
        name: of the moment, or of its codes or scales.
        dtype: of its elements.
        per: elements of the parameter for each of its own (a block for scales).
    """

    name: str
    dtype: torch.dtype
    per: int = 1

    def length(self, elements: int) -> int:
        """Its own elements for so many of the parameter; in scales a short block counts."""
        return elements if self.per == 1 else blocks(elements)


@dataclass(frozen=True, slots=True)
class StateSlice:
    """A slice of one flat tensor of state.

    Attributes:
        of, first, last: which.
        there: buffer on the device; the state itself where it is kept on the device.
        staged: buffer in host memory through which a file is read and written; None where there is no file.
    """

    of: StateTensor
    first: int
    last: int
    there: Tensor
    staged: Tensor


class Workspace:
    """Buffers of one chunk, made when first asked for; they go with the update."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, length: int, dtype: torch.dtype, like: Tensor, *, host: bool = False) -> Tensor:
        """A buffer of at least this length beside a parameter, or in pinned host memory."""
        device = torch.device("cpu") if host else like.device
        key = (name, dtype, device)
        found = self._buffers.pop(key, None)
        if found is None or found.numel() < length:
            del found  # it goes before the larger one comes
            found = _empty(like, length, dtype, host=host)
        self._buffers[key] = found
        return found


def _empty(like: Tensor, length: int, dtype: torch.dtype, *, host: bool) -> Tensor:
    # Made from the parameter, so that beside a fake one nothing is allocated.
    return empty_on_host(like, length, dtype) if host else like.new_empty((length,), dtype=dtype)


class StateStorage:
    """The state of an optimizer's parameters in one place.

    Args:
        place: "device", "host" or "disk".
        folder: of the file; the one that is set when None.
    """

    def __init__(self, place: str, folder: str | Path | None = None) -> None:
        self.place = place
        self._folder = folder
        self._file: DiskFile | None = None
        self._offsets: dict[tuple[Tensor, str], int] = {}

    def reserve(self, wanted: Sequence[tuple[Tensor, StateTensor]]) -> None:
        """Reserve space on the disk for state that has none yet; does nothing for other places.

        Raises:
            InfeasibleError: the disk does not have the space.
        """
        if self.place != "disk":
            return
        new = [
            (parameter, part)
            for parameter, part in wanted
            if (parameter, part.name) not in self._offsets and not isinstance(parameter, FakeTensor)
        ]
        if not new:
            return
        if self._file is None:
            self._file = DiskFile(OPTIMIZER_STATE, self._folder)
        sizes = [part.length(parameter.numel()) * part.dtype.itemsize for parameter, part in new]
        offset = self._file.reserve(sum(sizes))
        for (parameter, part), size in zip(new, sizes, strict=True):
            self._offsets[parameter, part.name] = offset
            offset += size

    def made(self, parameter: Tensor, parts: Sequence[StateTensor]) -> dict[str, Any]:
        """New state of a parameter, contents undefined, as the optimizer's `state` is to list it."""
        if self.place == "disk":
            return {}
        host = self.place == "host"
        return {p.name: _empty(parameter, p.length(parameter.numel()), p.dtype, host=host) for p in parts}

    def slices(
        self,
        state: dict[str, Any],
        parameter: Tensor,
        parts: Sequence[StateTensor],
        start: int,
        stop: int,
        chunk: int,
        workspace: Workspace,
    ) -> Iterator[StateSlice]:
        """The slices of these tensors that belong to elements [start, stop) of a parameter; `chunk` is the largest number at a time."""
        for part in parts:
            first, last = start // part.per, part.length(stop)
            if self.place == "device":
                there = staged = state[part.name][first:last]
            else:
                longest = part.length(chunk)
                there = staged = workspace.get(f"{part.name} there", longest, part.dtype, parameter)[: last - first]
                if self.place == "disk" and parameter.is_cuda:
                    staged = workspace.get(f"{part.name} staged", longest, part.dtype, parameter, host=True)
                    staged = staged[: last - first]
            yield StateSlice(part, first, last, there, staged)

    def load(self, state: dict[str, Any], parameter: Tensor, piece: StateSlice) -> None:
        """Load a slice to the device."""
        if self.place == "host":
            piece.there.copy_(state[piece.of.name][piece.first : piece.last], non_blocking=True)
        elif self.place == "disk" and not isinstance(parameter, FakeTensor):
            assert self._file is not None
            self._file.read(memory_of(piece.staged), self._offset(parameter, piece))
            if piece.staged is not piece.there:
                piece.there.copy_(piece.staged)

    def store(self, state: dict[str, Any], parameter: Tensor, piece: StateSlice) -> None:
        """Inverse of `load`."""
        if self.place == "host":
            state[piece.of.name][piece.first : piece.last].copy_(piece.there, non_blocking=True)
        elif self.place == "disk" and not isinstance(parameter, FakeTensor):
            assert self._file is not None
            if piece.staged is not piece.there:
                piece.staged.copy_(piece.there)
            self._file.write(memory_of(piece.staged), self._offset(parameter, piece))

    def _offset(self, parameter: Tensor, piece: StateSlice) -> int:
        return self._offsets[parameter, piece.of.name] + piece.first * piece.of.dtype.itemsize

    def whole(self, state: dict[str, Any], parameter: Tensor, part: StateTensor) -> Tensor:
        """All of a part as a flat tensor in memory: to be read, not written."""
        if self.place != "disk":
            found: Tensor = state[part.name]
            if self.place == "host" and parameter.is_cuda:
                torch.cuda.synchronize(parameter.device)  # its last slices may still be on the way
            return found
        read = torch.empty(part.length(parameter.numel()), dtype=part.dtype)
        assert self._file is not None
        self._file.read(memory_of(read), self._offsets[parameter, part.name])
        return read
