"""From a GPU to a disk and back, through small pieces of the host's memory: while one is written to the disk, the other is filled."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from memfit.storage.arenas import Carry, DiskArena, Storage
from memfit.storage.files import ACTIVATIONS_BELOW_HOST, DiskFile
from memfit.storage.pinned import PinnedMemory
from memfit.storage.raw_bytes import flat_storage, memory_of

PIECE_BYTES: Final = 4 << 20  # long enough for the disk, short enough to be pinned
STAGES_BYTES: Final = 4 * PIECE_BYTES  # of the host, where there is a disk below it: two pieces for each direction


class Staging:
    """Two pieces of the host's memory that the bytes of one direction pass through, one thread's own.

    Where the device is the CPU, as in tests, pieces are not pinned and copies into them are synchronous.

    Args:
        device: that the bytes come from or go to.

    Raises:
        InfeasibleError: the host cannot lock as much.
    """

    def __init__(self, device: torch.device) -> None:
        memory = PinnedMemory(device, "copies between a GPU and a disk", "plan without disk_budget")
        self._memory = memory
        self._pieces = [memory.block(PIECE_BYTES) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device

    def now(self) -> torch.cuda.Event | None:
        """An event for `write` and `read`: the copy waits for what the device was given to compute so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            into.copy_(source)
            return None
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            event.record(self._stream)
        return event

    def _begin(self, storage: Storage, after: torch.cuda.Event | None) -> tuple[torch.Tensor, range]:
        if self._stream is not None and after is not None:
            self._stream.wait_event(after)
        return flat_storage(storage), range(0, storage.nbytes(), PIECE_BYTES)

    def write(self, file: DiskFile, storage: Storage, offset: int, after: torch.cuda.Event | None) -> None:
        """Copy from the device to the file; returns when the storage may be freed."""
        seen, starts = self._begin(storage, after)
        filled: list[tuple[torch.Tensor, torch.cuda.Event | None, int]] = []
        for number, start in enumerate((*starts, -1)):
            if start >= 0:
                part = seen[start : start + PIECE_BYTES]
                piece = self._pieces[number % 2][: len(part)]
                filled.append((piece, self._copy(piece, part), offset + start))
            if filled and (len(filled) == 2 or start < 0):
                piece, event, place = filled.pop(0)
                if event is not None:
                    event.synchronize()
                file.write(memory_of(piece), place)

    def read(self, file: DiskFile, storage: Storage, offset: int, after: torch.cuda.Event | None) -> None:
        """Copy from the file to the device; returns when the storage may be read."""
        seen, starts = self._begin(storage, after)
        events: list[torch.cuda.Event | None] = [None, None]
        for number, start in enumerate(starts):
            part = seen[start : start + PIECE_BYTES]
            piece = self._pieces[number % 2][: len(part)]
            used = events[number % 2]
            if used is not None:
                used.synchronize()
            file.read(memory_of(piece), offset + start)
            events[number % 2] = self._copy(part, piece)
        for used in events:
            if used is not None:
                used.synchronize()

    def close(self) -> None:
        """Free the pieces."""
        self._pieces = []
        self._memory.close()


class StagedDiskArena(DiskArena):
    """A disk below a GPU's host: a file whose two threads pass bytes through pieces of pinned memory.

    Args:
        size: in bytes.
        device: the GPU.
        folder: to offload to; None for the default (`MEMFIT_OFFLOAD_DIR`).

    Raises:
        InfeasibleError: the disk does not have the space, or the host cannot lock the pieces.
        EngineError: no file can be created in the folder.
    """

    contents = ACTIVATIONS_BELOW_HOST

    def __init__(self, size: int, device: torch.device, folder: str | Path | None = None) -> None:
        self._staging = Staging(device), Staging(device)
        super().__init__(size, folder)
        self.device_type = device.type

    def _carry_down(self) -> Carry:
        staging = self._staging[0]
        after = staging.now()
        return lambda file, storage, offset: staging.write(file, storage, offset, after)

    def _carry_up(self) -> Carry:
        staging = self._staging[1]
        after = staging.now()
        return lambda file, storage, offset: staging.read(file, storage, offset, after)

    def close(self) -> None:
        """End the threads, close the file and free the pieces."""
        super().close()
        for staging in self._staging:
            staging.close()
