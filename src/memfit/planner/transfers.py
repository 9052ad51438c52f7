"""Transfers of a step besides activation offloading: offloaded optimizer state and streamed layers.

Worked out from the trace's seconds and the link's, in the order in which `memfit.streaming` does things: its worker does one job after the other, and the
computation waits for a layer that is not there yet. Printed before the first step; `memfit.streaming.overlap` says afterwards what a step really took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.hardware.machine import Link
from memfit.values.bundle import StreamedLayer
from memfit.values.trace import Phase, Trace


@dataclass(frozen=True, slots=True)
class Transfers:
    """Seconds of the transfers of one optimizer step.

    Attributes:
        seconds: in which the link is busy, both directions added up.
        waited_seconds: of these, in which computing waits.
    """

    seconds: float
    waited_seconds: float


def state_transfers(state_bytes: int, link: Link) -> Transfers:
    """State is copied to the device for the update and back, chunk by chunk; nothing overlaps with it."""
    seconds = link.in_seconds(state_bytes) + link.out_seconds(state_bytes)
    return Transfers(seconds, seconds)


def layer_transfers(trace: Trace, layers: Sequence[StreamedLayer], link: Link, *, clips: bool) -> Transfers:
    """What a streamed step moves.

    Args:
        trace: of the streamed step, as captured.
        layers: its blocks in the order of forward, and after them what is in no block.
        link: to the tier that they are offloaded to.
        clips: gradients wait on the lower tier until the global norm is known, so every layer is loaded once more.
    """
    blocks, rest = layers[:-1], layers[-1]
    twice, backward = block_seconds(trace, [block.path for block in blocks])
    forward = [seconds / 2 for seconds in twice]  # the other half runs again in backward
    backward = [again + seconds for again, seconds in zip(forward, backward, strict=True)]
    queue = _Queue(link)
    last = len(blocks) - 1
    # Forward: a layer computes while the next one is read. The head's part of forward and backward lies between the last layer and its backward.
    arrives = {0: queue.read(blocks[0].weight_bytes)}
    for number in range(len(blocks)):
        queue.wait(arrives[number])
        if number < last:
            arrives[number + 1] = queue.read(blocks[number + 1].weight_bytes)
        queue.compute(forward[number])
    queue.compute(_between(trace, forward, backward))
    # Backward: the two last layers are there still. Behind a layer's backward its predecessor's update is done, then the one before that is read.
    for number in range(last, -1, -1):
        if number < last - 1:
            queue.wait(arrives[number])
        queue.compute(backward[number])
        block = blocks[number]
        if clips:
            queue.write(block.gradient_bytes)
        else:
            queue.read(block.state_bytes)
            queue.write(block.state_bytes + block.weight_bytes)
        if number >= 2:
            arrives[number - 2] = queue.read(blocks[number - 2].weight_bytes)
    if clips:
        for block in blocks:
            queue.read(block.weight_bytes + block.gradient_bytes + block.state_bytes)
            queue.write(block.state_bytes + block.weight_bytes)
    queue.read(rest.state_bytes)
    queue.write(rest.state_bytes)
    queue.wait(queue.free)
    return Transfers(queue.busy, queue.waited)


class _Queue:
    """One worker beside the computation: its clock, and the computation's."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.now = self.free = self.busy = self.waited = 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def read(self, size_bytes: int) -> float:
        return self._job(self.link.in_seconds(size_bytes) if size_bytes else 0.0)

    def write(self, size_bytes: int) -> float:
        return self._job(self.link.out_seconds(size_bytes) if size_bytes else 0.0)

    def _job(self, seconds: float) -> float:
        """When a job given now will be done."""
        self.free = max(self.free, self.now) + seconds
        self.busy += seconds
        return self.free

    def wait(self, until: float) -> None:
        self.waited += max(0.0, until - self.now)
        self.now = max(self.now, until)


def block_seconds(trace: Trace, paths: Sequence[str]) -> tuple[list[float], list[float]]:
    """Seconds of the operations of each block, of forward and of backward; in a streamed step what runs again counts to forward."""
    number_of = {path: number for number, path in enumerate(paths)}
    cuts = sorted({path.count(".") + 1 for path in paths})
    forward, backward = [0.0] * len(paths), [0.0] * len(paths)
    for event in trace.events:
        if event < 0 or trace.operations[event].phase is Phase.OPTIMIZER:
            continue
        operation = trace.operations[event]
        names = operation.module.split(".")
        for cut in cuts:
            number = number_of.get(".".join(names[:cut]))
            if number is not None:
                (forward if operation.phase is Phase.FORWARD else backward)[number] += operation.seconds
                break
    return forward, backward


def _between(trace: Trace, forward: Sequence[float], backward: Sequence[float]) -> float:
    """Computing that belongs to no block; most of it is the loss head's."""
    computing = (
        trace.operations[e].seconds for e in trace.events if e >= 0 and trace.operations[e].phase is not Phase.OPTIMIZER
    )
    return max(0.0, sum(computing) - sum(forward) - sum(backward))
