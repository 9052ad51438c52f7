"""Do the transfers of layer streaming overlap fully with computation? Derived from the seconds of one step, never from a data sheet.

In forward a layer of P parameters, w bytes each, is read over a link of B bytes/s while another computes 2PT operations for T tokens at F FLOP/s: they
overlap fully where T >= wF/2B. In backward the worker loads the optimizer's state, updates (M seconds a layer), writes both back and reads the next layer,
while a layer runs forward and backward again, 6PT operations. F, B and M are those measured for this model on this machine; computing grows with T.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from memfit.units import format_bytes, format_seconds


@dataclass(slots=True)
class Measured:
    """Seconds of one streamed step.

    Attributes:
        layers: that are streamed.
        forward_seconds, backward_seconds: of each layer, all micro-batches; backward with the forward run again.
        read_seconds: of each reading of a layer's weights.
        behind_seconds: of each layer, of the work that overlaps with backward: loading state, update, writing state and weights (gradients, with clipping).
        waited_seconds: in all, in which the computation waited for weights.
        weight_bytes: of the largest layer.
        parameters: of the largest layer.
        tokens: that went through a layer, all micro-batches.
    """

    layers: int
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    read_seconds: list[float] = field(default_factory=list)
    behind_seconds: list[float] = field(default_factory=list)
    waited_seconds: float = 0.0
    weight_bytes: int = 0
    parameters: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.forward_seconds = self.forward_seconds or [0.0] * self.layers
        self.backward_seconds = self.backward_seconds or [0.0] * self.layers


@contextmanager
def timed(seconds: list[float], index: int) -> Iterator[None]:
    """Add the seconds that the block takes, unless it fails."""
    started = time.perf_counter()
    yield
    seconds[index] += time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Overlap:
    """Whether transfers overlap with computation, and from how many tokens on they would.

    Attributes:
        tokens: that went through a layer in the step measured.
        forward_tokens: from so many on, reading overlaps fully with forward; infinite when nothing computes.
        backward_tokens: from so many on, all transfers and updates of backward overlap fully with it.
        flops: F, per second, from the forward.
        link_bytes_per_second: B.
        update_seconds: M, of a layer: loading state, update, writing state and weights.
        waited_seconds: that the step waited for weights.
    """

    tokens: int
    forward_tokens: float
    backward_tokens: float
    flops: float
    link_bytes_per_second: float
    update_seconds: float
    waited_seconds: float

    @property
    def hides(self) -> bool:
        """Whether all transfers overlapped with computation."""
        return self.tokens >= max(self.forward_tokens, self.backward_tokens)

    def __str__(self) -> str:
        verdict = "transfers overlap fully" if self.hides else "transfers overlap in part"
        return (
            f"{verdict}: {self.tokens} tokens pass each layer in a step; reading weights overlaps fully with forward from {_tokens(self.forward_tokens)} on "
            f"({self.flops / 1e9:.3g} GFLOP/s against {format_bytes(round(self.link_bytes_per_second))}/s), state, update and weights with backward from "
            f"{_tokens(self.backward_tokens)} on ({format_seconds(self.update_seconds)} a layer); the step waited "
            f"{format_seconds(self.waited_seconds)} for weights"
        )


def overlap(measured: Measured) -> Overlap:
    """What one step says about overlap; of a step in which every layer was read."""
    read, behind = _median(measured.read_seconds), _median(measured.behind_seconds)
    forward = _median([s for s in measured.forward_seconds if s])
    backward = _median([s for s in measured.backward_seconds if s])
    return Overlap(
        measured.tokens,
        _needed(measured.tokens, read, forward),
        _needed(measured.tokens, read + behind, backward),
        2 * measured.parameters * measured.tokens / forward if forward else 0.0,
        measured.weight_bytes / read if read else 0.0,
        behind,
        measured.waited_seconds,
    )


def _needed(tokens: int, transfer_seconds: float, compute_seconds: float) -> float:
    if not compute_seconds:
        return math.inf if transfer_seconds else 0.0
    return tokens * transfer_seconds / compute_seconds


def _median(seconds: list[float]) -> float:
    return median(seconds) if seconds else 0.0


def _tokens(count: float) -> str:
    return "no number of tokens" if math.isinf(count) else f"{math.ceil(count)} tokens"
