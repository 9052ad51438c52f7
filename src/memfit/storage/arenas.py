"""Copies of storages between a device and lower memory tiers, made while the device computes: main memory and a disk, a GPU and pinned host memory.

All that a step offloads to one tier is in one *arena*, allocated before the run, so that no space runs out in the middle of a step and nothing is
allocated for a copy. Each direction of each arena is one queue: a CUDA stream for host memory, a thread for a disk (reading and writing release the GIL).
The plan decides when a copy begins and when the engine waits for it.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch

from memfit.errors import EngineError
from memfit.storage.files import ACTIVATIONS, Contents, DiskFile
from memfit.storage.pinned import PinnedMemory
from memfit.storage.queues import JobQueue
from memfit.storage.raw_bytes import flat_storage, memory_of_storage

Storage = torch.UntypedStorage


class Copy(ABC):
    """A copy in progress. The arena keeps a reference to its storage until the copy is done."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Return when the storage may be read or freed.

        Raises:
            EngineError: the copy failed.
        """


class Arena(ABC):
    """Space on one lower tier, and what copies into and out of it.

    Attributes:
        bytes: how many.
        device_type: of the storages that it takes.
    """

    bytes: int
    device_type: str

    @abstractmethod
    def copy_down(self, storage: Storage, offset: int) -> Copy:
        """Begin to copy a storage to an offset of the arena; the storage must not be written until the copy is done."""

    @abstractmethod
    def copy_up(self, storage: Storage, offset: int) -> Copy:
        """Begin to fill a storage from an offset of the arena; the storage must not be read or written until the copy is done."""

    @abstractmethod
    def settle(self) -> None:
        """Return when no copy is in progress; failures of copies that nothing waited for are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Settle, and free the space."""


# -- main memory and a disk --------------------------------------------------------------------------------------------------

Carry = Callable[[DiskFile, Storage, int], None]
"""Copies one storage to or from an offset of the file, in the thread of its direction."""


class _DiskCopy(Copy):
    __slots__ = ("_carry", "_done", "_failure", "_file", "_offset", "_storage")

    def __init__(self, file: DiskFile, storage: Storage, offset: int, carry: Carry) -> None:
        self._file = file
        self._storage: Storage | None = storage
        self._offset = offset
        self._carry = carry
        self._done = threading.Event()
        self._failure: Exception | None = None

    def run(self) -> None:
        """In the thread of its direction."""
        storage = self._storage
        assert storage is not None
        try:
            self._carry(self._file, storage, self._offset)
        except Exception as error:  # noqa: BLE001 - kept for whoever waits; the thread goes on
            self._failure = error.with_traceback(None)  # its frames hold the storage
        # The engine still holds the storage, so it is freed at the moment of the plan, not whenever the disk is done.
        del storage
        self._storage = None
        self._done.set()

    def wait_whatever_came(self) -> None:
        """Come back when it is done or has failed."""
        self._done.wait()

    def wait(self) -> None:
        self._done.wait()
        if isinstance(self._failure, EngineError):
            raise EngineError(str(self._failure))
        if self._failure is not None:
            raise EngineError(
                f"{self._file.contents.name} could not be copied ({self._failure}): the step was not taken"
            )


class DiskArena(Arena):
    """A file, and one thread for each direction.

    Args:
        size: in bytes.
        folder: to offload to; None for the default (`MEMFIT_OFFLOAD_DIR`).

    Raises:
        InfeasibleError: the disk does not have the space.
        EngineError: no file can be created in the folder.
    """

    contents: Contents = ACTIVATIONS

    def __init__(self, size: int, folder: str | Path | None = None) -> None:
        self.bytes, self.device_type = size, "cpu"
        self._file = DiskFile(self.contents, folder)
        try:
            self._file.reserve(max(size, 1))
        except BaseException:
            self._file.close()
            raise
        self._down, self._up = JobQueue("memfit offload down"), JobQueue("memfit offload up")
        self._last: list[_DiskCopy | None] = [None, None]

    def copy_down(self, storage: Storage, offset: int) -> Copy:
        """Put it into the queue down."""
        copy = self._last[0] = _DiskCopy(self._file, storage, offset, self._carry_down())
        self._down.put(copy.run)
        return copy

    def copy_up(self, storage: Storage, offset: int) -> Copy:
        """Put it into the queue up."""
        copy = self._last[1] = _DiskCopy(self._file, storage, offset, self._carry_up())
        self._up.put(copy.run)
        return copy

    def _carry_down(self) -> Carry:
        """What is to be done in the thread down, for a copy that begins now."""
        return lambda file, storage, offset: file.write(memory_of_storage(storage), offset)

    def _carry_up(self) -> Carry:
        """The same of the thread up."""
        return lambda file, storage, offset: file.read(memory_of_storage(storage), offset)

    def settle(self) -> None:
        """Wait for the end of both queues."""
        for direction, last in enumerate(self._last):
            if last is not None:
                last.wait_whatever_came()  # each direction is a queue: the last one is done last
                self._last[direction] = None

    def close(self) -> None:
        """End the threads and close the file, which is gone then."""
        self._down.close()
        self._up.close()
        self._file.close()


# -- a GPU and the host ------------------------------------------------------------------------------------------------------


class _HostCopy(Copy):
    __slots__ = ("_arena", "_done", "_storage")

    def __init__(self, arena: HostArena, storage: Storage, done: torch.cuda.Event) -> None:
        self._storage: Storage | None = storage
        self._arena = weakref.ref(arena)
        self._done = done

    def wait(self) -> None:
        # Not the host waits but the computing stream: memory freed now is reused in the order of that stream.
        assert self._storage is not None, "a copy is waited for once"
        torch.cuda.current_stream(self._storage.device).wait_event(self._done)
        arena = self._arena()
        if arena is not None:
            arena.forget(self)
        self._storage = None


class HostArena(Arena):
    """Pinned memory of the host, one block, with one stream for each direction.

    Args:
        size: in bytes.
        device: the GPU.

    Raises:
        InfeasibleError: the host cannot lock as much.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes, self.device_type = size, "cuda"
        self._memory = PinnedMemory(device, ACTIVATIONS.name, ACTIVATIONS.instead)
        self._block = self._memory.block(size)
        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)
        self._going: dict[int, _HostCopy] = {}
        self._places: dict[
            tuple[int, int], torch.Tensor
        ] = {}  # of the block, by offset and size: the same ones in every step
        self._computed = torch.cuda.Event()

    def _copy(self, storage: Storage, offset: int, stream: torch.cuda.Stream, *, down: bool) -> Copy:
        # Some hundred times a step, while the GPU computes what the host has launched: every call here is one that the host does not launch.
        size = storage.nbytes()
        place = self._places.get((offset, size))
        if place is None:
            place = self._places[offset, size] = self._block[offset : offset + size]
        seen = flat_storage(storage)
        # After what computed the storage or, where it is fresh, after what used its memory before.
        computing = torch.cuda.current_stream(self._device)
        self._computed.record(computing)
        stream.wait_event(self._computed)
        done, current = torch.cuda.Event(), torch.cuda.current_device()
        torch.cuda.set_stream(stream)  # makes the stream's device the current one
        try:
            if down:
                place.copy_(seen, non_blocking=True)
            else:
                seen.copy_(place, non_blocking=True)
            done.record(stream)
        finally:
            torch.cuda.set_stream(computing)
            if current != computing.device_index:
                torch.cuda.set_device(current)
        copy = _HostCopy(self, storage, done)
        self._going[id(copy)] = copy
        return copy

    def copy_down(self, storage: Storage, offset: int) -> Copy:
        """On the stream down."""
        return self._copy(storage, offset, self._down, down=True)

    def copy_up(self, storage: Storage, offset: int) -> Copy:
        """On the stream up."""
        return self._copy(storage, offset, self._up, down=False)

    def forget(self, copy: _HostCopy) -> None:
        """Drop the reference to the copy's storage: the computing stream waits for the copy."""
        self._going.pop(id(copy), None)

    def settle(self) -> None:
        """Let the GPU wait for both streams; the host goes on, and what it launches from here on may use the storages."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._down)
        computing.wait_stream(self._up)
        self._going.clear()

    def close(self) -> None:
        """Let go of the block."""
        self._down.synchronize()
        self._up.synchronize()
        self._going.clear()
        self._places.clear()
        self._block = torch.empty(0, dtype=torch.uint8)
        self._memory.close()
