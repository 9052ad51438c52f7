"""Seconds of what a step moves by itself: what hides behind computing, what does not, and that the two add up."""

from __future__ import annotations

import pytest

from memfit.hardware.machine import Link
from memfit.planner.transfers import block_seconds, layer_transfers, state_transfers
from memfit.values.bundle import StreamedLayer
from memfit.values.trace import Trace
from planner.traces import Writer

LAYERS = 4
SIZE = 1000


def streamed(seconds: float) -> Trace:
    """Layers that take as long in forward as in backward, where their forward comes once more; and a head of one second."""
    w = Writer()
    x = w.before(8)
    for number in range(LAYERS):
        x = w.one((x,), 8, seconds=seconds, module=f"blocks.{number}.linear")
    x = w.one((x,), 8, seconds=0.5, module="head")
    for number in reversed(range(LAYERS)):
        x = w.one((x,), 8, seconds=seconds, module=f"blocks.{number}.linear")
    w.backward()
    x = w.one((x,), 8, seconds=0.5, module="head")
    for number in reversed(range(LAYERS)):
        x = w.one((x,), 8, seconds=seconds, module=f"blocks.{number}")
    w.update()
    w.run((x,), seconds=0.1)
    return w.trace()


def layers(state: int = 2 * SIZE) -> tuple[StreamedLayer, ...]:
    blocks = [StreamedLayer(f"blocks.{number}", SIZE, SIZE, state) for number in range(LAYERS)]
    return (*blocks, StreamedLayer("", 0, 0, state))


def test_what_computes_is_told_by_block_and_phase() -> None:
    paths = [layer.path for layer in layers()[:-1]]
    assert block_seconds(streamed(3.0), paths) == ([6.0] * LAYERS, [3.0] * LAYERS)


def test_state_below_comes_and_goes_while_nothing_computes() -> None:
    moved = state_transfers(4000, Link("disk", 1000.0, 2000.0, 0.5))
    assert moved.seconds == moved.waited_seconds == 4.5 + 2.5


def test_behind_much_computing_only_the_first_layer_and_the_last_update_are_waited_for() -> None:
    link = Link("host", SIZE, SIZE)
    moved = layer_transfers(streamed(1000.0), layers(), link, clips=False)
    reads = LAYERS + (LAYERS - 2) + 2 * LAYERS + 2
    writes = (2 + 1) * LAYERS + 2
    assert moved.seconds == reads + writes
    assert moved.waited_seconds == 1 + (2 + 2 + 1) + 4


def test_where_little_computes_all_the_rest_of_the_copying_is_waited_for() -> None:
    link = Link("disk", SIZE / 100, SIZE / 100)
    moved = layer_transfers(streamed(0.001), layers(), link, clips=False)
    computing = LAYERS * 3 * 0.001 + 1.0
    assert moved.seconds - computing <= moved.waited_seconds <= moved.seconds


def test_clipping_brings_every_layer_once_more() -> None:
    link = Link("host", SIZE, SIZE)
    plain = layer_transfers(streamed(1.0), layers(), link, clips=False)
    clipped = layer_transfers(streamed(1.0), layers(), link, clips=True)
    assert clipped.seconds - plain.seconds == pytest.approx(3 * LAYERS)  # gradients there and back, weights once more
    assert clipped.waited_seconds > plain.waited_seconds
