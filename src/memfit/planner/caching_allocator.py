"""What PyTorch's caching allocator reserves on a GPU for a step: its free blocks count on the card, though no tensor is in them.

The allocator takes segments from CUDA and cuts them into blocks: what is at most 1 MiB shares segments of 2 MiB, what is below 10 MiB segments of 20 MiB,
and what is larger has a segment of its own, rounded up to 2 MiB. A request takes the smallest free block that is large enough; what is left of it is split
off, and neighbours that are free are joined again. Segments are kept. Rules and sizes: PyTorch's `CUDACachingAllocator`, with its default settings.

This replays those rules over the births and deaths of a trace; no second memory model, as which bytes live when is the timeline's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from memfit.values.trace import BEFORE_STEP, Category, Phase, Trace

MIB: Final = 1 << 20
ROUNDING: Final = 512
LARGEST_SMALL: Final = MIB
SMALL_SEGMENT: Final = 2 * MIB
LEAST_OWN: Final = 10 * MIB
SHARED_SEGMENT: Final = 20 * MIB
SEGMENT_ROUNDING: Final = 2 * MIB

Block = tuple[int, int, int]
"""Bytes, segment and offset; free blocks are ordered so."""


class CachingAllocator:
    """Segments, and the blocks in them.

    Attributes:
        reserved_bytes: of all segments. They are never given back.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._pools: tuple[list[Block], list[Block]] = ([], [])  # free blocks of large and of small segments
        self._small: list[bool] = []  # by segment
        self._blocks: list[dict[int, tuple[int, bool]]] = []  # by segment: offset -> bytes, free
        self._begins: list[dict[int, int]] = []  # by segment: end -> offset of the block that ends there

    def allocate(self, size: int) -> Block:
        """A block of at least so many bytes."""
        wanted = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        small = wanted <= LARGEST_SMALL
        pool = self._pools[small]
        position = bisect_left(pool, (wanted, -1, -1))
        have, segment, offset = pool.pop(position) if position < len(pool) else self._segment(wanted, small=small)
        left = have - wanted
        if left >= ROUNDING if small else left > LARGEST_SMALL:
            self._put((left, segment, offset + wanted), free=True)
        else:
            wanted = have
        block = (wanted, segment, offset)
        self._put(block, free=False)
        return block

    def free(self, block: Block) -> None:
        """Give a block back, and join it with free neighbours."""
        size, segment, offset = block
        blocks = self._blocks[segment]
        after, before = blocks.get(offset + size), self._begins[segment].get(offset)
        if after is not None and after[1]:
            self._take((after[0], segment, offset + size))
            size += after[0]
        if before is not None and blocks[before][1]:
            joined = blocks[before][0]
            self._take((joined, segment, before))
            del blocks[offset]
            offset, size = before, size + joined
        self._put((size, segment, offset), free=True)

    def _segment(self, wanted: int, *, small: bool) -> Block:
        if small:
            size = SMALL_SEGMENT
        elif wanted < LEAST_OWN:
            size = SHARED_SEGMENT
        else:
            size = -(-wanted // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        self.reserved_bytes += size
        self._small.append(small)
        self._blocks.append({})
        self._begins.append({})
        return size, len(self._small) - 1, 0

    def _put(self, block: Block, *, free: bool) -> None:
        size, segment, offset = block
        self._blocks[segment][offset] = (size, free)
        self._begins[segment][offset + size] = offset
        if free:
            insort(self._pools[self._small[segment]], block)

    def _take(self, block: Block) -> None:
        """Out of the free ones, for another that has its place."""
        size, segment, offset = block
        pool = self._pools[self._small[segment]]
        del pool[bisect_left(pool, block)]
        del self._blocks[segment][offset]
        self._begins[segment].pop(offset + size, None)


def reserved_bytes(trace: Trace, ends: Mapping[int, int], steps: int = 2) -> int:
    """Bytes that the allocator has taken from CUDA after some steps in which nothing is dropped.

    Args:
        trace: the step; its workspaces count.
        ends: by storage, the last event at which it is alive (`Timeline.plain_end`).
        steps: how many are run. In the first the optimizer's state is made after backward, where activations were.
    """
    allocator = CachingAllocator()
    events = len(trace.events)
    phases = [trace.operations[e].phase if e >= 0 else Phase.BACKWARD for e in trace.events]
    update = next((i for i, phase in enumerate(phases) if phase is Phase.OPTIMIZER), events)
    late = {Category.OPTIMIZER_STATE: update, Category.GRADIENT: trace.forward_events}
    born: dict[int, list[int]] = defaultdict(list)
    dying: dict[int, list[int]] = defaultdict(list)
    lasting: dict[int, list[int]] = defaultdict(list)  # what is there before the step, by when the first step makes it
    for number, storage in enumerate(trace.storages):
        if storage.birth == BEFORE_STEP and ends[number] >= events:
            lasting[late.get(storage.category, 0)].append(number)
            continue
        born[max(storage.birth, 0)].append(number)
        dying[min(ends[number], events)].append(number)
    held: dict[int, Block] = {}
    for step in range(steps):
        for event in range(events + 1):
            for number in (*(lasting[event] if step == 0 else ()), *born[event]):
                if trace.storages[number].bytes:
                    held[number] = allocator.allocate(trace.storages[number].bytes)
            code = trace.events[event] if event < events else -1
            workspace = trace.operations[code].workspace_bytes if code >= 0 else 0
            if workspace:
                allocator.free(allocator.allocate(workspace))
            for number in dying[event]:
                if number in held:
                    allocator.free(held.pop(number))
    return allocator.reserved_bytes
