"""Copies between a device and the memory tier below it, beside the computing: a GPU and pinned host memory, main memory and a disk.

All that a step swaps lies in one *arena*, allocated before the run, so that no room runs out in the middle of a step and nothing is allocated for a copy.
Each direction is one queue: a stream on a GPU, a thread on a CPU (`pwrite` and `pread` let the interpreter go on). When a copy begins and when it is waited
for is the script's business (`saved`); here nothing is decided.

The disk is read and written, not mapped: what a mapping holds in memory is up to the kernel, and a page that cannot be written back ends the process with a
signal where a write raises an error.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import torch

from memfit.errors import EngineError
from memfit.units import format_bytes

Storage = torch.UntypedStorage


def swap_folder() -> Path:
    """Where the file lies that a CPU swaps to: MEMFIT_SWAP_DIR, TMPDIR, or /var/tmp, which unlike /tmp is nowhere kept in memory."""
    for named in (os.environ.get("MEMFIT_SWAP_DIR"), os.environ.get("TMPDIR"), "/var/tmp"):  # noqa: S108 - a file without a name
        if named and Path(named).is_dir():
            return Path(named)
    return Path(tempfile.gettempdir())


class Copy(ABC):
    """A copy on its way. The arena holds its storage until it is done, whoever lets go of it."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Come back when its storage may be read, or let go.

        Raises:
            EngineError: the copy failed.
        """


class Arena(ABC):
    """Room on the lower tier, and what copies into and out of it.

    Attributes:
        bytes: how many.
        device_type: where the storages lie that it takes.
    """

    bytes: int
    device_type: str

    @abstractmethod
    def copy_down(self, storage: Storage, offset: int) -> Copy:
        """Begin to copy a storage to a place; it must not be written until that is done."""

    @abstractmethod
    def copy_up(self, storage: Storage, offset: int) -> Copy:
        """Begin to fill a storage from a place; it must not be touched until that is done."""

    @abstractmethod
    def settle(self) -> None:
        """Come back when no copy is on its way; failures of copies nobody waited for do not matter any more."""

    @abstractmethod
    def close(self) -> None:
        """Settle, and give the room back."""


# -- main memory and a disk --------------------------------------------------------------------------------------------------


class _DiskCopy(Copy):
    __slots__ = ("_done", "_failure", "move", "offset", "storage")

    def __init__(self, storage: Storage, offset: int, move: _Move) -> None:
        self.storage: Storage | None = storage
        self.offset = offset
        self.move = move
        self._done = threading.Event()
        self._failure: OSError | None = None

    def run(self, file: int) -> None:
        """In the thread of its direction."""
        storage = self.storage
        assert storage is not None
        try:
            self.move(
                file, memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())), self.offset
            )
        except OSError as error:
            self._failure = error
        # Where the engine still holds it, it goes at the moment of the plan, not whenever the disk is done.
        del storage
        self.storage = None
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._failure is not None:
            raise _failed(self._failure)


_Move = Callable[[int, memoryview, int], None]


def _failed(error: OSError) -> EngineError:
    if error.errno == errno.ENOSPC:
        return EngineError(
            "the disk is full, and what was swapped to it could not be written: the step was not taken; make room, or set MEMFIT_SWAP_DIR to another disk"
        )
    return EngineError(
        f"what was swapped to disk could not be copied ({error.strerror or error}): the step was not taken; set MEMFIT_SWAP_DIR to another disk"
    )


def _write(file: int, memory: memoryview, offset: int) -> None:
    while memory:
        written = os.pwrite(file, memory, offset)
        memory, offset = memory[written:], offset + written


def _read(file: int, memory: memoryview, offset: int) -> None:
    while memory:
        read = os.preadv(file, [memory], offset)
        if not read:
            raise OSError(errno.EIO, "the swap file has become shorter")
        memory, offset = memory[read:], offset + read


def _serve(file: int, queue: SimpleQueue[_DiskCopy | None]) -> None:
    while (copy := queue.get()) is not None:
        copy.run(file)
        del copy  # the queue may stay empty for long, and a storage must not wait for it


def _shut(file: int, queues: list[SimpleQueue[_DiskCopy | None]], threads: list[threading.Thread]) -> None:
    for queue in queues:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # a collection may run anywhere
            thread.join()
    os.close(file)


class DiskArena(Arena):
    """A file without a name, so that nobody can delete or cut it and nothing is left behind, and one thread for each direction.

    Raises:
        EngineError: there is no room for it.
    """

    def __init__(self, size: int, folder: Path | None = None) -> None:
        folder = folder or swap_folder()
        self.bytes, self.device_type = size, "cpu"
        try:
            file, name = tempfile.mkstemp(prefix="memfit-swap-", dir=folder)
        except OSError as error:
            raise EngineError(
                f"the plan swaps to disk, and no file can be made in {folder} ({error.strerror}): set MEMFIT_SWAP_DIR to a folder that can be written"
            ) from error
        Path(name).unlink()
        try:
            os.posix_fallocate(file, 0, max(size, 1))
        except OSError as error:
            free = os.fstatvfs(file)
            os.close(file)
            raise EngineError(
                f"the plan swaps {format_bytes(size)} to disk, and {folder} has {format_bytes(free.f_bavail * free.f_frsize)} free ({error.strerror}): make "
                "room, set MEMFIT_SWAP_DIR to another disk, or plan with a smaller host_budget"
            ) from error
        self._down: SimpleQueue[_DiskCopy | None] = SimpleQueue()
        self._up: SimpleQueue[_DiskCopy | None] = SimpleQueue()
        self._last: list[_DiskCopy | None] = [None, None]
        queues = [self._down, self._up]
        threads = [
            threading.Thread(target=_serve, args=(file, queue), name=f"memfit swap {way}", daemon=True)
            for queue, way in zip(queues, ("down", "up"), strict=True)
        ]
        for thread in threads:
            thread.start()
        self._file = file
        self._finalizer = weakref.finalize(self, _shut, file, queues, threads)

    def copy_down(self, storage: Storage, offset: int) -> Copy:
        """Put it into the queue down."""
        copy = self._last[0] = _DiskCopy(storage, offset, _write)
        self._down.put(copy)
        return copy

    def copy_up(self, storage: Storage, offset: int) -> Copy:
        """Put it into the queue up."""
        copy = self._last[1] = _DiskCopy(storage, offset, _read)
        self._up.put(copy)
        return copy

    def settle(self) -> None:
        """Wait for the end of both queues."""
        for direction, last in enumerate(self._last):
            if last is not None:
                last._done.wait()  # each direction is a queue: the last one is done last
                self._last[direction] = None

    def close(self) -> None:
        """End the threads and close the file, which is gone then."""
        self._finalizer()


# -- a GPU and the host ------------------------------------------------------------------------------------------------------


class _HostCopy(Copy):
    __slots__ = ("_arena", "_done", "storage")

    def __init__(self, arena: HostArena, storage: Storage, done: torch.cuda.Event) -> None:
        self.storage: Storage | None = storage
        self._arena = weakref.ref(arena)
        self._done = done

    def wait(self) -> None:
        # The host does not wait, the stream that computes does: what is let go now is used again in the order of that stream.
        torch.cuda.current_stream(self._device()).wait_event(self._done)
        arena = self._arena()
        if arena is not None:
            arena.forget(self)
        self.storage = None

    def _device(self) -> torch.device:
        assert self.storage is not None, "a copy is waited for once"
        return self.storage.device


class HostArena(Arena):
    """Pinned memory of the host, one buffer, with one stream for each direction.

    Raises:
        EngineError: the host has no such room.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes, self.device_type = size, "cuda"
        try:
            self._buffer = torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise EngineError(
                f"the plan swaps {format_bytes(size)} to the host, which cannot pin as much ({str(error).splitlines()[0]}): plan with a smaller host_budget"
            ) from error
        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)
        self._going: dict[int, _HostCopy] = {}

    def _copy(self, storage: Storage, offset: int, stream: torch.cuda.Stream, *, down: bool) -> Copy:
        size = storage.nbytes()
        place = self._buffer[offset : offset + size]
        seen = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))
        # After what computed the storage or, where it is fresh, after what used its memory before.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.cuda.Event()
        with torch.cuda.stream(stream), torch.no_grad():
            (place if down else seen).copy_(seen if down else place, non_blocking=True)
            done.record(stream)
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
        """Its stream has been told to wait; nothing needs to hold its storage any more."""
        self._going.pop(id(copy), None)

    def settle(self) -> None:
        """Wait for both streams."""
        self._down.synchronize()
        self._up.synchronize()
        self._going.clear()

    def close(self) -> None:
        """Let go of the buffer."""
        self.settle()
        self._buffer = torch.empty(0, dtype=torch.uint8)


# -- whose it is -------------------------------------------------------------------------------------------------------------


class LowerTier:
    """The arena of an engine, lent to one followed forward at a time, until its backward is done.

    Args:
        device: of the model; what lies below it is the host for a GPU and the disk for a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arena: Arena | None = None
        self._borrower: weakref.ref[object] | None = None

    def reserve(self, size: int) -> None:
        """Have room for so many bytes.

        Raises:
            EngineError: there is none; what was reserved before is still there.
        """
        if size == 0 or (self.arena is not None and self.arena.bytes >= size):
            return
        larger = HostArena(size, self.device) if self.device.type == "cuda" else DiskArena(size)
        self.close()
        self.arena = larger

    def lend(self, borrower: object) -> Arena | None:
        """The arena, until `give_back` or the end of the borrower; None while another one has it."""
        if self.arena is None or (self._borrower is not None and self._borrower() is not None):
            return None
        self.arena.settle()
        arena = weakref.ref(self.arena)

        def settle(_: object) -> None:
            if (left := arena()) is not None:
                left.settle()

        self._borrower = weakref.ref(borrower, settle)
        return self.arena

    def give_back(self, borrower: object) -> None:
        """What the borrower left there is not needed any more."""
        if self._borrower is not None and self._borrower() is borrower:
            self._borrower = None
            if self.arena is not None:
                self.arena.settle()

    def close(self) -> None:
        """Give the room back."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        self._borrower = None
