"""What the computer takes beside the kernels: what a dispatch mode adds to an operation, and what a kernel leaves of the caches for what runs after it.

The engine is Python beside every operation that it follows or runs again, as a dispatch mode is, so on a faster processor, or under a faster Python, it takes
less in the same proportion. How many times more than a mode that does nothing it takes is measured by `bench/overhead`.

On a CPU the kernels share the caches with the interpreter, with torch's dispatcher, and with their own code. After a kernel that went through a few
megabytes, more than a core's own caches hold, all of that is read again: a mode takes about three times as long then, and a small operation about five times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from memfit.dispatch import DispatchMode
from memfit.values.trace import Operation, Trace

LAYERS: Final = 3  # of each kind
WIDTH: Final = 16  # so small that only what lies around the kernels counts
ROUNDS: Final = 15
COLD_ROUNDS: Final = 6
# Bytes that kernels went through before what is timed. Between a core's own caches and what it sees of a server's last one most of the difference is made
# at once, by a few megabytes; from the last on nothing is left.
TOUCHED: Final = (0, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 24, 1 << 25)
# They are others each time, as in a step: the same few megabytes again would stay in the last cache, and the code in there beside them.
OTHER_BYTES: Final = 2 * TOUCHED[-1]
BEFORE: Final = 3  # a small operation right after a large one brings back its own code, not that of the next


@dataclass(frozen=True, slots=True)
class HostTime:
    """Seconds beside the kernels, after a kernel that went through as many bytes as `TOUCHED` says.

    Attributes:
        modes: that a dispatch mode which does nothing adds to an operation.
        operations: that an operation takes longer, without a mode, than after one that touched nothing: the code that leads to its kernel is read from memory.
        views: that an operation which only looks at its input in another way takes longer.
    """

    modes: tuple[float, ...]
    operations: tuple[float, ...]
    views: tuple[float, ...]

    @classmethod
    def same_after_all(cls, mode: float) -> HostTime:
        """Where kernels leave the host's caches alone."""
        nothing = (0.0,) * len(TOUCHED)
        return cls((mode,) * len(TOUCHED), nothing, nothing)

    @property
    def mode(self) -> float:
        """That a dispatch mode which does nothing adds to an operation, with warm caches."""
        return self.modes[0]

    def factor_after(self, touched_bytes: int) -> float:
        """How many times longer than with warm caches a mode takes after a kernel that went through these bytes."""
        return _between(touched_bytes, self.modes) / self.mode if self.mode else 1.0

    def added_after(self, touched_bytes: int, operation: Operation) -> float:
        """Seconds that an operation takes longer after a kernel that went through these bytes."""
        return _between(touched_bytes, self.operations if has_kernel(operation) else self.views)


def _between(touched_bytes: int, seconds: tuple[float, ...]) -> float:
    """Seconds after a kernel of these bytes: a straight line between two that were timed."""
    return float(np.interp(touched_bytes, TOUCHED, seconds))


def has_kernel(operation: Operation) -> bool:
    """Whether an operation touches memory; a view does not."""
    return bool(operation.makes or operation.writes)


ELSEWHERE: Final = HostTime.same_after_all(
    9e-6
)  # of a computer that is not here. A GPU's kernels leave the host's caches alone.


def touched_before(trace: Trace) -> list[tuple[int, int]]:
    """Of each operation, the bytes that the few operations before it went through; and those that all have since one like it.

    The second say whether it finds its own code in the caches. Before the first of its kind a whole step went by.
    """
    found = []
    before: deque[int] = deque(maxlen=BEFORE)
    every = 0
    last: dict[str, int] = {}  # by name, the bytes by then
    for operation in trace.operations:
        found.append(
            (sum(before), min(every - last[operation.name], TOUCHED[-1]) if operation.name in last else TOUCHED[-1])
        )
        last[operation.name] = every
        if has_kernel(operation):
            touched = sum(trace.storages[s].bytes for s in {*operation.reads, *operation.makes})
            before.append(touched)
            every += touched
    return found


class HandsOn(DispatchMode):
    """A mode that does nothing but to hand on.

    Attributes:
        operations: that it has seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **kwargs) if kwargs else func(*args)


def host_time(clock: Callable[[], float]) -> HostTime:
    """Measure it on this computer: medians of some rounds. Draws no random numbers.

    Args:
        clock: seconds, as operations are timed.
    """
    layers = _kinds() * LAYERS
    views = [torch.t] * len(layers)
    x = torch.ones(WIDTH, WIDTH, requires_grad=True)
    others = torch.ones(OTHER_BYTES // 4)
    at = 0  # the first of them that was not touched lately

    def forward(through: Sequence[Callable[[Any], Any]], touched_bytes: int) -> Iterator[float]:
        """Seconds of each layer."""
        nonlocal at
        y, count = x, touched_bytes // 4
        for layer in through:
            if count:
                at = at if at + count <= len(others) else 0
                others[at : at + count].add_(0.0)
                at += count
            begin = clock()
            y = layer(y)
            yield clock() - begin

    def typical(
        through: Sequence[Callable[[Any], Any]], around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> list[float]:
        """Seconds of a forward after each of the sizes, of the medians that each layer took."""
        found = []
        for touched in TOUCHED:
            times = []
            for _ in range(COLD_ROUNDS if touched else ROUNDS):
                with around():
                    times.append(list(forward(through, touched)))
            found.append(float(sum(map(median, zip(*times, strict=True)))))
        return found

    with torch.enable_grad():
        with HandsOn() as mode:
            list(forward(layers, 0))  # the first one sets the libraries up
        alone, under, viewed = typical(layers), typical(layers, HandsOn), typical(views)
    return HostTime(
        _rising((u - a) / mode.operations for u, a in zip(under, alone, strict=True)),
        _rising((each - alone[0]) / mode.operations for each in alone),
        _rising((each - viewed[0]) / len(views) for each in viewed),
    )


def _rising(seconds: Iterable[float]) -> tuple[float, ...]:
    """What is timed wavers, and after more bytes no more of the caches is left."""
    return tuple(accumulate((max(0.0, each) for each in seconds), max))


def _kinds() -> list[Callable[[Any], Any]]:
    """Layers of many kinds, as a model has them: between two of one kind the code of the others runs, which a chain of a few kinds leaves in the caches.

    Of equal weights: making random ones would draw from the user's generator.
    """
    weight = torch.full((WIDTH, WIDTH), 1.0 / WIDTH, requires_grad=True)
    kernel = weight.detach().unsqueeze(-1).requires_grad_()

    def attended(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(0.1 * (x @ x.transpose(-1, -2)), -1) @ x

    return [
        lambda x: functional.layer_norm(x, (WIDTH,)),
        lambda x: functional.linear(x, weight),
        functional.gelu,
        lambda x: functional.conv1d(x[None], kernel)[0],
        lambda x: functional.group_norm(x[None], 4)[0],
        functional.relu,
        attended,
        lambda x: x + x,
        torch.tanh,
        lambda x: torch.cat(x.chunk(2)),
        lambda x: x.t().contiguous(),
        torch.sigmoid,
        lambda x: x.masked_fill(x > 1.0, 0.0),
        functional.silu,
        lambda x: functional.batch_norm(x, None, None, training=True),
        lambda x: x.view(4, -1, WIDTH).permute(1, 0, 2).reshape(WIDTH, WIDTH),
    ]
