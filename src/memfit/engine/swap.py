"""Copies between a device and the memory tiers below it, beside the computing: a GPU, pinned host memory and a disk; main memory and a disk.

All that a step swaps to one tier lies in one *arena*, allocated before the run, so that no room runs out in the middle of a step and nothing is
allocated for a copy. Each direction of each arena is one queue: a stream to a GPU's host, a thread to a disk (`pwrite` and `pread` let the interpreter go
on). When a copy begins and when it is waited for is the script's business (`saved`); here nothing is decided.

From a GPU to a disk bytes pass through two small pinned pieces for each direction: while one is written to the disk, the other is filled.

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
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import torch

from memfit.errors import EngineError
from memfit.units import format_bytes
from memfit.values.script import TIERS

Storage = torch.UntypedStorage

STAGE_BYTES: Final = (
    4 << 20
)  # of one piece on its way between a GPU and a disk: long enough for the disk, short enough to be pinned
STAGES_BYTES: Final = 4 * STAGE_BYTES  # of the host, where there is a disk below it: two pieces for each direction


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
    """Room on one lower tier, and what copies into and out of it.

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
    __slots__ = ("_done", "_failure", "carry", "offset", "storage")

    def __init__(self, storage: Storage, offset: int, carry: _Carry) -> None:
        self.storage: Storage | None = storage
        self.offset = offset
        self.carry = carry
        self._done = threading.Event()
        self._failure: Exception | None = None

    def run(self, file: int) -> None:
        """In the thread of its direction."""
        storage = self.storage
        assert storage is not None
        try:
            self.carry(file, storage, self.offset)
        except Exception as error:  # noqa: BLE001 - whatever it is, the thread goes on and who waits is told
            self._failure = error.with_traceback(None)  # its frames hold the storage
        # Where the engine still holds it, it goes at the moment of the plan, not whenever the disk is done.
        del storage
        self.storage = None
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._failure is not None:
            raise _failed(self._failure)


_Carry = Callable[[int, Storage, int], None]


def _failed(error: Exception) -> EngineError:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return EngineError(
            "the disk is full, and what was swapped to it could not be written: the step was not taken; make room, or set MEMFIT_SWAP_DIR to another disk"
        )
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return EngineError(
        f"what was swapped to disk could not be copied ({why}): the step was not taken; set MEMFIT_SWAP_DIR to another disk"
    )


def _memory(storage: Storage) -> memoryview:
    """The bytes of a storage in main memory."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))


def _bytes_of(storage: Storage) -> torch.Tensor:
    """The bytes of a storage, wherever it lies."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


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

    Attributes:
        budget: what the user gives room here with.

    Raises:
        EngineError: there is no room for it.
    """

    budget = "host_budget"

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
                f"room, set MEMFIT_SWAP_DIR to another disk, or plan with a smaller {self.budget}"
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
        copy = self._last[0] = _DiskCopy(storage, offset, self._carry_down())
        self._down.put(copy)
        return copy

    def copy_up(self, storage: Storage, offset: int) -> Copy:
        """Put it into the queue up."""
        copy = self._last[1] = _DiskCopy(storage, offset, self._carry_up())
        self._up.put(copy)
        return copy

    def _carry_down(self) -> _Carry:
        """What is to be done in the thread down, for a copy that begins now."""
        return lambda file, storage, offset: _write(file, _memory(storage), offset)

    def _carry_up(self) -> _Carry:
        """The same of the thread up."""
        return lambda file, storage, offset: _read(file, _memory(storage), offset)

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
        seen = _bytes_of(storage)
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


# -- a GPU and a disk, through the host --------------------------------------------------------------------------------------


class _Stage:
    """Two pieces of the host's memory that the bytes of one direction pass through, one thread's own.

    Where the device is main memory itself, which is how tests run it, pieces are not pinned and copies into them done at once.
    """

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._pieces = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if pinned else None
        self._device = device

    def now(self) -> torch.cuda.Event | None:
        """For `write` and `read`: what the device was given to compute so far comes before the copy."""
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
        return _bytes_of(storage), range(0, storage.nbytes(), STAGE_BYTES)

    def write(self, file: int, storage: Storage, offset: int, after: torch.cuda.Event | None) -> None:
        """From the device to the file; comes back when the storage may be let go."""
        seen, starts = self._begin(storage, after)
        filled: list[tuple[torch.Tensor, torch.cuda.Event | None, int]] = []
        for number, start in enumerate((*starts, -1)):
            if start >= 0:
                part = seen[start : start + STAGE_BYTES]
                piece = self._pieces[number % 2][: len(part)]
                filled.append((piece, self._copy(piece, part), offset + start))
            if filled and (len(filled) == 2 or start < 0):
                piece, event, place = filled.pop(0)
                if event is not None:
                    event.synchronize()
                _write(file, _memory(piece.untyped_storage())[: len(piece)], place)

    def read(self, file: int, storage: Storage, offset: int, after: torch.cuda.Event | None) -> None:
        """From the file to the device; comes back when the storage may be read."""
        seen, starts = self._begin(storage, after)
        events: list[torch.cuda.Event | None] = [None, None]
        for number, start in enumerate(starts):
            part = seen[start : start + STAGE_BYTES]
            piece = self._pieces[number % 2][: len(part)]
            used = events[number % 2]
            if used is not None:
                used.synchronize()
            _read(file, _memory(piece.untyped_storage())[: len(piece)], offset + start)
            events[number % 2] = self._copy(part, piece)
        for used in events:
            if used is not None:
                used.synchronize()


class StagedDiskArena(DiskArena):
    """A disk below a GPU's host: a file as above, whose two threads pass bytes through pieces of pinned memory.

    Raises:
        EngineError: the disk has no room for it, or the host none for the pieces.
    """

    budget = "disk_budget"

    def __init__(self, size: int, device: torch.device, folder: Path | None = None) -> None:
        try:
            self._stages = _Stage(device), _Stage(device)
        except RuntimeError as error:
            raise EngineError(
                f"the plan swaps to disk through {format_bytes(STAGES_BYTES)} of the host, which cannot pin as much ({str(error).splitlines()[0]}): plan "
                "without disk_budget"
            ) from error
        super().__init__(size, folder)
        self.device_type = device.type

    def _carry_down(self) -> _Carry:
        stage = self._stages[0]
        after = stage.now()
        return lambda file, storage, offset: stage.write(file, storage, offset, after)

    def _carry_up(self) -> _Carry:
        stage = self._stages[1]
        after = stage.now()
        return lambda file, storage, offset: stage.read(file, storage, offset, after)


# -- whose it is -------------------------------------------------------------------------------------------------------------


Makers = Mapping[str, Callable[[int], Arena]]
"""Of each tier by its name, the nearest first: what makes an arena of so many bytes there."""


def tiers_below(device: torch.device) -> Makers:
    """The tiers below a device. All that is below a CPU is its disk, whatever tiers a plan knows that was made for a GPU."""
    if device.type == "cuda":
        return {"host": lambda size: HostArena(size, device), "disk": lambda size: StagedDiskArena(size, device)}
    return dict.fromkeys(TIERS, DiskArena)


class LowerTiers:
    """The arenas of an engine, one on each tier that is used, lent to one followed forward at a time, until its backward is done.

    Args:
        makers: of the tiers below the engine's device.
    """

    def __init__(self, makers: Makers) -> None:
        self._makers = makers
        self.arenas: dict[str, Arena] = {}
        self._borrower: weakref.ref[object] | None = None

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Have room for so many bytes on each tier.

        Raises:
            EngineError: there is none; what was reserved before is still there.
        """
        larger: dict[str, Arena] = {}
        try:
            for tier, size in sizes.items():
                if tier not in self.arenas or self.arenas[tier].bytes < size:
                    larger[tier] = self._makers[tier](size)
        except BaseException:
            for arena in larger.values():
                arena.close()
            raise
        for tier, arena in larger.items():
            if tier in self.arenas:
                self.arenas[tier].close()
            self.arenas[tier] = arena
        if larger:
            self._borrower = None

    def lend(self, borrower: object) -> Mapping[str, Arena] | None:
        """The arenas, until `give_back` or the end of the borrower; None while another one has them."""
        if not self.arenas or (self._borrower is not None and self._borrower() is not None):
            return None
        self._settle()
        tiers = weakref.ref(self)

        def settle(_: object) -> None:
            if (left := tiers()) is not None:
                left._settle()

        self._borrower = weakref.ref(borrower, settle)
        return dict(self.arenas)

    def give_back(self, borrower: object) -> None:
        """What the borrower left there is not needed any more."""
        if self._borrower is not None and self._borrower() is borrower:
            self._borrower = None
            self._settle()

    def _settle(self) -> None:
        for arena in self.arenas.values():
            arena.settle()

    def close(self) -> None:
        """Give the room back."""
        for arena in self.arenas.values():
            arena.close()
        self.arenas.clear()
        self._borrower = None
