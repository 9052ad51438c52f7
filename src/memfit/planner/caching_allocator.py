"""What PyTorch's caching allocator reserves on a GPU for a step: its free blocks count on the card, though no tensor is in them.

The allocator takes segments from CUDA and cuts them into blocks: what is at most 1 MiB shares segments of 2 MiB, what is below 10 MiB segments of 20 MiB,
and what is larger has a segment of its own, rounded up to 2 MiB. A request takes the smallest free block that is large enough; what is left of it is split
off, and neighbours that are free are joined again. Segments are kept. Rules and sizes: PyTorch's `CUDACachingAllocator`, with its default settings.

This replays those rules over the births and deaths of a trace; no second memory model, as which bytes live when is the timeline's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from memfit.planner.repeatable_calls import RepeatableCalls, lives_again
from memfit.planner.timeline import Recomputations, Timeline
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
        most_allocated_bytes: of blocks at the same time. A block may be up to 1 MiB larger than what was asked for.
    """

    def __init__(self) -> None:
        self.reserved_bytes = self.most_allocated_bytes = self._allocated_bytes = 0
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
        self._allocated_bytes += wanted
        self.most_allocated_bytes = max(self.most_allocated_bytes, self._allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back, and join it with free neighbours."""
        size, segment, offset = block
        self._allocated_bytes -= size
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


@dataclass(frozen=True, slots=True)
class _Life:
    """A copy of a storage: its number, the slots from the first to the last at which it is alive."""

    storage: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class AllocatorBytes:
    """What the allocator counts in a step.

    Attributes:
        reserved: taken from CUDA (`torch.cuda.memory_reserved`).
        allocated: of blocks that tensors have, at most (`torch.cuda.max_memory_allocated`).
    """

    reserved: int
    allocated: int


def allocator_bytes(timeline: Timeline, recomputations: Recomputations, steps: int = 2) -> AllocatorBytes:
    """What the allocator counts after some steps under a plan.

    Args:
        timeline: of the trace.
        recomputations: of the plan; empty for the plain step.
        steps: how many are run. In the first the optimizer's state is made after backward, where activations were.
    """
    trace = timeline.trace
    expanded = timeline.expand(recomputations)
    slots = len(expanded.totals)
    at = [int(slot) for slot in expanded.slot_of_event]
    again = set(map(int, expanded.storages))
    lives = [
        _Life(s, at[max(storage.birth, 0)], at[timeline.last_end[s]])
        for s, storage in enumerate(trace.storages)
        if s not in again
    ]
    copies = zip(expanded.storages, expanded.births, expanded.ends, strict=True)
    lives += [_Life(int(s), int(birth) + 1, int(end)) for s, birth, end in copies]
    workspaces = {at[e]: trace.operations[op].workspace_bytes for e, op in enumerate(trace.events) if op >= 0}
    workspaces |= {
        int(slot): timeline.recipes.recipes[int(recipe)].peak_bytes
        for slot, recipe in zip(expanded.slots, expanded.recipes, strict=True)
    }
    calls = timeline.recipes.calls
    made_again = {
        int(slot): calls[int(recipe)]
        for slot, recipe in zip(expanded.slots, expanded.recipes, strict=True)
        if int(recipe) in calls
    }
    phases = [trace.operations[op].phase if op >= 0 else Phase.BACKWARD for op in trace.events]
    update = next((at[e] for e, phase in enumerate(phases) if phase is Phase.OPTIMIZER), slots - 1)
    made_at = {Category.OPTIMIZER_STATE: update, Category.GRADIENT: at[trace.forward_events]}
    born: dict[int, list[_Life]] = defaultdict(list)
    dying: dict[int, list[_Life]] = defaultdict(list)
    lasting: dict[int, list[_Life]] = defaultdict(
        list
    )  # what is there before the step, by when the first step makes it
    for life in lives:
        storage = trace.storages[life.storage]
        if storage.birth == BEFORE_STEP and life.last >= slots - 1:
            lasting[made_at.get(storage.category, 0)].append(life)
        else:
            born[life.first].append(life)
            dying[life.last].append(life)
    allocator = CachingAllocator()
    held: dict[_Life, Block] = {}
    for step in range(steps):
        for slot in range(slots):
            for life in (*(lasting[slot] if step == 0 else ()), *born[slot]):
                if size := trace.storages[life.storage].bytes:
                    held[life] = allocator.allocate(size)
            if slot in made_again:
                _make_again(allocator, trace, made_again[slot])
            elif workspace := workspaces.get(slot, 0):
                allocator.free(allocator.allocate(workspace))
            for life in dying[slot]:
                if life in held:
                    allocator.free(held.pop(life))
    return AllocatorBytes(allocator.reserved_bytes, allocator.most_allocated_bytes)


def _make_again(allocator: CachingAllocator, trace: Trace, calls: RepeatableCalls) -> None:
    """What calls allocate and free while they are made again, each storage by itself; what backward reads of it is allocated anew afterwards."""
    held: dict[int, Block] = {}
    born = (s for s, storage in enumerate(trace.storages) if storage.birth >= calls.begin)
    comes, goes = lives_again(trace, born, calls.last, calls.saves)
    for event in range(calls.begin, calls.last + 1):
        for s in comes[event]:
            if trace.storages[s].bytes:
                held[s] = allocator.allocate(trace.storages[s].bytes)
        code = trace.events[event]
        if code >= 0 and (workspace := trace.operations[code].workspace_bytes):
            allocator.free(allocator.allocate(workspace))
        for s in goes[event]:
            if s in held:
                allocator.free(held.pop(s))
    for block in held.values():
        allocator.free(block)
