"""The caching allocator's segments and blocks, by its published rules."""

from __future__ import annotations

import random
import re

import pytest

import models
import small
from memfit.capture.trace_source import TraceSource
from memfit.planner import description
from memfit.planner.caching_allocator import MIB, AllocatorBytes, CachingAllocator, allocator_bytes
from memfit.planner.timeline import Timeline
from memfit.planning import planning_of, replan, smallest_budget
from memfit.techniques.choices import BASELINE
from memfit.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (101 * MIB, 102 * MIB),
    ],
)
def test_a_segment_is_of_the_size_that_the_request_asks_for(size: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved_bytes == reserved


def test_what_is_left_of_a_segment_serves_the_next_request() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(5 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(5 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_freed_neighbours_are_joined_again() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    allocator.allocate(18 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_a_block_that_is_only_a_little_too_large_is_not_split() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(12 * MIB)
    allocator.free(block)
    assert allocator.allocate(12 * MIB - 512 * 1024)[0] == 12 * MIB
    allocator.free((12 * MIB, 0, 0))
    assert allocator.most_allocated_bytes == 12 * MIB  # in a block larger than what was asked for
    assert allocator.allocate(8 * MIB)[0] == 8 * MIB


def test_small_and_large_blocks_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(16 * MIB))
    allocator.allocate(1024)
    assert allocator.reserved_bytes == 18 * MIB


def test_blocks_never_overlap_and_all_of_a_segment_comes_back() -> None:
    draw = random.Random(0)
    allocator, held = CachingAllocator(), []
    for _ in range(3000):
        if held and draw.random() < 0.5:
            allocator.free(held.pop(draw.randrange(len(held))))
        else:
            held.append(allocator.allocate(draw.choice((300, 70_000, 3 * MIB, 15 * MIB)) + draw.randrange(5000)))
        spans = sorted((segment, offset, offset + size) for size, segment, offset in held)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(spans, spans[1:], strict=False))
    for block in held:
        allocator.free(block)
    before = allocator.reserved_bytes
    again = [allocator.allocate(15 * MIB) for _ in range(10)]
    assert allocator.reserved_bytes == before
    assert len({block[1:] for block in again}) == 10


@pytest.mark.parametrize("name", ["gpt_dropout", "resnet", "lstm"])
def test_a_step_reserves_no_less_than_its_peak_and_repeats_itself(name: str) -> None:
    model, sample, loss = models.case(name).build()[:3]
    timeline = Timeline(TraceSource(model, sample, loss, small.adamw, device="rtx4090").trace_of(BASELINE))
    found = allocator_bytes(timeline, {}, steps=3)
    assert timeline.plain().peak_bytes <= found.allocated <= found.reserved
    assert found == allocator_bytes(timeline, {}, steps=6)
    assert found.reserved < 1.5 * timeline.plain().peak_bytes + 20 * MIB


def test_a_plan_in_fewer_bytes_reserves_fewer_too_and_says_how_many() -> None:
    model, sample, loss = models.case("gpt_dropout").build()[:3]
    plan = small.plan_at(0.3, model, sample, loss, device="rtx4090", host_budget=0)
    assert plan.script.recomputations
    note = next(note for note in plan.notes if note.startswith("PyTorch's allocator takes about"))
    assert note in plan.explain()
    told, peak = (parse_bytes(size) for size in re.findall(r"[\d.]+ [KMG]iB", note))
    assert peak == pytest.approx(plan.prediction.peak_bytes, rel=0.01)
    assert peak <= told < allocator_bytes(planning_of(plan).solver(1).timeline, {}).reserved


def test_a_plan_says_how_much_its_blocks_are_larger_than_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "allocator_bytes", lambda *_: AllocatorBytes(2 << 30, 1 << 30))
    model, sample, loss = models.case("gpt_dropout").build()[:3]
    plan = small.plan_at(0.3, model, sample, loss, device="rtx4090", host_budget=0)
    peak = plan.prediction.peak_bytes
    more = f"and {format_bytes((1 << 30) - peak)} in blocks larger than their tensors included"
    above = f"; its blocks may be {format_bytes((1 << 30) - plan.budget_bytes)} above the budget"
    assert any(more in note and above in note and "about 2.00 GiB of the card" in note for note in plan.notes)
    assert (plan.prediction.allocated_bytes, plan.prediction.reserved_bytes) == (1 << 30, 2 << 30)


def test_a_plan_leaves_room_for_blocks_that_are_larger_than_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the smallest budgets, which there is no room in."""
    model, sample, loss = models.case("gpt_dropout").build()[:3]
    full = small.plan_at(0.6, model, sample, loss, device="rtx4090", host_budget=0)
    assert full.budget_bytes - 2 * MIB < full.prediction.allocated_bytes <= full.budget_bytes
    monkeypatch.setattr(description, "allocator_bytes", lambda timeline, plan: _larger(timeline.peak(plan)))
    plan = replan(full, full.budget_bytes)
    assert plan.prediction.peak_bytes < full.prediction.peak_bytes
    assert plan.prediction.allocated_bytes == plan.prediction.peak_bytes + 2 * MIB <= plan.budget_bytes
    (room,) = [note for note in plan.notes if "are left free" in note]
    assert parse_bytes(room.rpartition(" in ")[2]) < full.prediction.peak_bytes
    assert not [note for note in full.notes if "are left free" in note]
    tight = replan(full, smallest_budget(full))
    assert tight.prediction.allocated_bytes > tight.budget_bytes


def _larger(peak: int) -> AllocatorBytes:
    return AllocatorBytes(peak * 2, peak + 2 * MIB)
