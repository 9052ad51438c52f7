"""The meter counts what the allocator hands out, to the byte, and nothing that was there before."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from memfit.meter import metered, profiled, spans_and_changes

KIB = 1024


def floats(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float32)


def test_the_peak_is_counted_to_the_byte() -> None:
    with metered() as reading:
        a = floats(1000)
        b = floats(500)
        del a
        c = floats(600)
        del b, c
    assert reading.peak_bytes == 6000
    assert reading.changes == [4000, 2000, -4000, 2400, -2000, -2400]
    assert reading.base_bytes == 0
    assert reading.reserved_bytes == reading.peak_bytes
    assert reading.seconds > 0


def test_what_is_there_before_counts_once_a_storage() -> None:
    weight = floats(100)
    views = [weight, weight[10:], weight.view(10, 10)]
    with metered(views) as reading:
        made = floats(10)
    assert reading.base_bytes == 400
    assert reading.peak_bytes == 440
    del made


def test_releases_of_what_was_there_before_do_not_count() -> None:
    old = floats(100_000)
    with metered() as reading:
        del old
        new = floats(10)
    assert reading.changes == [40]
    assert reading.peak_bytes == 40
    del new


def test_releases_of_what_was_named_as_present_count() -> None:
    named = [floats(100_000), floats(100)]
    with metered(iter([*named])) as reading:
        named[0] = floats(10)  # made while the old one is still there
        new = floats(20)
    assert reading.base_bytes == 400_400
    assert reading.changes == [40, -400_000, 80]
    assert reading.peak_bytes == 400_440
    del new


def test_nothing_made_is_the_base() -> None:
    weight = floats(100)
    with metered([weight]) as reading:
        weight.neg_()
    assert reading.peak_bytes == reading.base_bytes == 400


def test_temporaries_inside_operations_count() -> None:
    hidden = torch.rand(300, 400)
    with metered([hidden]) as reading:
        smooth = torch.nn.functional.pdist(hidden.sin().cos())  # the sine is never seen by name
    assert reading.changes[:2] == [480_000, 480_000]
    assert sum(reading.changes) == smooth.nbytes
    assert reading.peak_bytes >= 3 * 480_000
    del smooth


class Cycle:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.me = self


def test_older_garbage_does_not_count() -> None:
    """A cycle from before that dies in the middle, at the same address, would be taken for a release."""
    gc.disable()
    try:
        Cycle(floats(1 << 20))
    finally:
        gc.enable()
    with metered() as reading:
        kept = [floats(256) for _ in range(2000)]  # enough objects to start a collection
    assert reading.peak_bytes == 2000 * KIB
    assert min(reading.changes) > 0
    del kept


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:  # noqa: FBT001
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with metered():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError), metered():
            _ = 1 / 0
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_second_meter_starts_from_nothing() -> None:
    peaks = []
    for _ in range(3):
        with metered() as reading:
            x = floats(2500)
        peaks.append(reading.peak_bytes)
        del x
    assert peaks == [10_000] * 3


def test_a_backward_on_another_thread_of_autograd_is_seen() -> None:
    w = torch.rand(64, 64, requires_grad=True)
    x = torch.rand(512, 64)
    with metered([w, x]) as reading:
        (x @ w).square().sum().backward()
    product = 512 * 64 * 4
    # x @ w; what square makes of it; in backward, the gradient of the product beside x @ w
    assert reading.peak_bytes >= w.nbytes + x.nbytes + 2 * product
    assert w.grad is not None
    assert sum(reading.changes) == w.grad.nbytes


def test_changes_are_told_apart_by_named_range() -> None:
    kept: list[Any] = []
    with profiled() as profile:
        with torch.profiler.record_function("mine.a"):
            kept.append(floats(10))
        floats(1000)
        with torch.profiler.record_function("mine.b"):
            kept.append(floats(20))
            floats(30)
        with torch.profiler.record_function("other"):
            kept.append(floats(40))
    assert spans_and_changes(profile, "mine.") == {"mine.a": [40], "mine.b": [80, 120, -120]}
