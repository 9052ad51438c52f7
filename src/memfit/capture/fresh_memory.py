"""What it takes to get memory from the system: glibc's malloc gives blocks of 32 MiB and more back as soon as they are freed, and gets them page by page again.

That is so in each step, with memfit and without, and takes several times as long as writing into pages that the process has. But where there is so large a hole
among the process's small blocks, a large one is put there, and keeps its pages: in planning as in training, by what has run before. So what an operation takes
is kept apart from what it takes to get its pages, and in a step it gets them (docs/design/log.md).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Final

import torch

from memfit.step.freed_memory import GIVEN_BACK_BYTES, keep_freed_memory

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

MEASURED_BYTES: Final = 16 << 20
ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class FreshMemory:
    """What memory takes that comes from the system.

    Attributes:
        seconds: of a page fault: what it takes to get the page, besides what is written into it.
        bytes_each: that come with a fault; 0 where none are met.
    """

    seconds: float
    bytes_each: float

    def faults_of(self, sizes: Iterable[int]) -> int:
        """That writing into blocks of these sizes meets, in each step: into large ones."""
        large = sum(size for size in sizes if size >= GIVEN_BACK_BYTES)
        return round(large / self.bytes_each) if self.bytes_each else 0


KEPT: Final = FreshMemory(0.0, 0.0)  # where nothing is given back to the system, or nobody knows when


@cache
def fresh_memory(clock: Callable[[], float]) -> FreshMemory:
    """Measure it on this computer, once for a process.

    Args:
        clock: seconds, as operations are timed.
    """
    if resource is None or not keep_freed_memory():
        return KEPT
    seconds, faults = [], []
    for _ in range(ROUNDS):
        block = mmap.mmap(-1, MEASURED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        numbers = torch.frombuffer(block, dtype=torch.uint8)
        times, met = [clock()], page_faults()
        numbers.fill_(1)
        faults.append(page_faults() - met)
        times.append(clock())
        numbers.fill_(2)
        times.append(clock())
        del numbers  # before its memory
        block.close()
        seconds.append((times[1] - times[0]) - (times[2] - times[1]))
    each = median(faults)
    return FreshMemory(max(0.0, median(seconds)) / each, MEASURED_BYTES / each) if each else KEPT


def page_faults() -> int:
    """That this thread has met so far, each for memory from the system; 0 where nobody counts them."""
    return (
        0
        if resource is None
        else resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_minflt
    )
