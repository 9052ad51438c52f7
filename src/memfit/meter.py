"""Measure how many bytes a block of code holds: the true peak of a step.

On the CPU every block the tensor allocator hands out or takes back is seen, through the profiler's memory events; torch has no counter like
`torch.cuda.max_memory_allocated` there. On CUDA the allocator's own counters are read. Nothing is estimated.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType, _RecordFunctionFast

from memfit import dispatch
from memfit.garbage import uncollected

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # libkineto greets on stderr at every session otherwise


@dataclass(slots=True)
class MeterReading:
    """What a metered stretch held.

    Attributes:
        base_bytes: storages that were there before (those the caller named).
        peak_bytes: largest number of bytes held at once, base included.
        reserved_bytes: on CUDA, the allocator's reserve at its largest; on the CPU the same as `peak_bytes`.
        seconds: wall time of the stretch, the meter's own cost included.
        changes: on the CPU, the size of each allocation (positive) and release (negative), in order; releases of what was named as present too.
    """

    base_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    seconds: float = 0.0
    changes: list[int] = field(default_factory=list)
    _stretches: _Stretches | None = None

    def leave_thread(self) -> None:
        """Called in the block where its work moves to another thread, since the profiler sees one thread. The other one calls `enter_thread`."""
        if self._stretches is not None:
            self._stretches.end()

    def enter_thread(self) -> None:
        """Called in the thread in which the block goes on."""
        if self._stretches is not None:
            self._stretches.begin()


class _Stretches:
    """Profiler sessions one after the other, perhaps in several threads, of which only one does anything at a time.

    Args:
        watched: what was named as present; a release is marked where one of these has died.
    """

    def __init__(self, watched: Sequence[weakref.ref[torch.UntypedStorage]]) -> None:
        self._watched = watched
        self._session: AbstractContextManager[Any] | None = None
        self._profile: Any = None
        self.allocations: list[tuple[int, int, int]] = []  # time in ns, address, bytes (negative for a release)
        self.releases: list[tuple[int, int]] = []  # time in ns, bytes, of what was named as present

    def begin(self) -> None:
        self._session = profiled()
        self._profile = self._session.__enter__()

    def end(self) -> None:
        if self._session is None:
            return
        self._session.__exit__(None, None, None)
        self._session = None
        self.allocations += _allocations(self._profile)
        # To look through all events takes a tenth of a reading.
        if any(reference() is None for reference in self._watched):
            self.releases += _releases(self._profile)
        self._profile = None


@contextmanager
def metered(present: Iterable[torch.Tensor] = (), device: torch.device | None = None) -> Iterator[MeterReading]:
    """Meter the block.

    Args:
        present: tensors that are there before the block and count (parameters, optimizer state, the batch).
        device: what to meter; the CPU when None.
    """
    reading = MeterReading()
    where = device or torch.device("cpu")
    storages = dispatch.storages_of(t for t in present if t.device.type == where.type)
    reading.base_bytes = sum(s.nbytes() for s in storages.values())
    # The profiler does not see the release of tensors made before it. Only weak references are kept, so that the block can free them.
    watched = [weakref.ref(s, partial(_mark_release, s.nbytes())) for s in storages.values()]
    del present, storages
    start = time.perf_counter()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        before = torch.cuda.memory_allocated(where)
        torch.cuda.reset_peak_memory_stats(where)
        try:
            yield reading
        finally:
            torch.cuda.synchronize(where)
            reading.peak_bytes = torch.cuda.max_memory_allocated(where)
            reading.reserved_bytes = torch.cuda.max_memory_reserved(where)
            reading.base_bytes = before
            reading.seconds = time.perf_counter() - start
    else:
        stretches = reading._stretches = _Stretches(watched)  # noqa: SLF001 - its own
        with uncollected(), _collectives_let_go():
            stretches.begin()
            try:
                yield reading
            finally:
                stretches.end()
                reading._stretches = None  # noqa: SLF001
                changes = _changes(stretches.allocations) + stretches.releases
                reading.changes = [size for _, size in sorted(changes, key=_when)]
                reading.peak_bytes = reading.base_bytes + max(0, max(itertools.accumulate(reading.changes), default=0))
                reading.reserved_bytes = reading.peak_bytes
                reading.seconds = time.perf_counter() - start


_LET_GO_SECONDS: Final = 1e-4


@contextmanager
def _collectives_let_go() -> Iterator[None]:
    """After each collective that was waited for, give gloo's own thread the time to let go of its tensors.

    It tells that a collective is over before it drops its references, and what is dropped there last is released unseen: the profiler sees this thread.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    waits = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **named: Any) -> Any:
        found = waits(work, *args, **named)
        time.sleep(_LET_GO_SECONDS)
        return found

    dist.Work.wait = wait  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = waits  # type: ignore[method-assign]


def workspace_of(changes: Iterable[int]) -> int:
    """Most bytes allocated at once beyond those that remain, from the allocations and releases of one run."""
    total = peak = 0
    for change in changes:
        total += change
        peak = max(peak, total)
    return max(0, peak - max(0, total))


_RELEASE: Final = "memfit released "


def _mark_release(size: int, _: object) -> None:
    with _RecordFunctionFast(f"{_RELEASE}{size}"):
        pass


def _releases(profile: Any) -> list[tuple[int, int]]:
    """(time in ns, bytes) of each marked release."""
    names = ((e.start_ns(), e.name()) for e in profile.profiler.kineto_results.events())
    return [(when, -int(name.removeprefix(_RELEASE))) for when, name in names if name.startswith(_RELEASE)]


def _when(change: tuple[int, int]) -> int:
    return change[0]


@contextmanager
def profiled() -> Iterator[Any]:
    """A profiler session that keeps memory events; yields the profile, whose results are there after the block."""
    with _silent():
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        profile.__enter__()
    try:
        yield profile
    finally:
        with _silent():
            profile.__exit__(None, None, None)


@contextmanager
def _silent() -> Iterator[None]:
    """Where kineto warns about absent accelerators. What runs under the profiler may warn: it is a step of the user's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _allocations(profile: Any) -> list[tuple[int, int, int]]:
    """(time in ns, address, bytes) of each allocation and release on the CPU, in order; releases count negative."""
    found = []
    stack = list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        stack.extend(event.children)
    return sorted(found, key=lambda a: a[0])  # stable: equal times keep the order of recording


def _changes(allocations: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(time in ns, bytes) of each allocation and release; releases of blocks from before are left out."""
    live: dict[int, int] = {}
    out: list[tuple[int, int]] = []
    for when, address, size in allocations:
        if size > 0:
            if address in live:  # a thread that is not profiled (a backend's own) has released it
                out.append((when, -live[address]))
            live[address] = size
            out.append((when, size))
        elif address in live:
            out.append((when, -live.pop(address)))
    return out


def spans_and_changes(profile: Any, prefix: str) -> dict[str, list[int]]:
    """For each `record_function` range whose name starts with `prefix`, the last of a name: the allocation changes inside it, in order."""
    events = profile.profiler.kineto_results.events()
    memory = _changes(_allocations(profile))
    spans = sorted((e.start_ns(), e.end_ns(), e.name()) for e in events if e.name().startswith(prefix))
    out: dict[str, list[int]] = {}
    position = 0
    for start, end, name in spans:
        while position < len(memory) and memory[position][0] < start:
            position += 1
        changes: list[int] = []
        out[name] = changes
        while position < len(memory) and memory[position][0] <= end:
            changes.append(memory[position][1])
            position += 1
    return out
