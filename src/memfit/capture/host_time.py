"""What the computer takes beside the kernels: what a dispatch mode adds to an operation, and what a kernel leaves of the caches for what runs after it.

The engine is Python beside every operation that it follows or runs again, as a dispatch mode is, so on a faster processor, or under a faster Python, it takes
less in the same proportion. How many times more than a mode that does nothing it takes is measured by `bench/overhead`.

On a CPU the kernels share the caches with the interpreter, with torch's dispatcher, and with their own code. After a kernel that went through tens of
megabytes all of that is read from memory again: a mode takes about three times as long then, and a small operation about eight times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.values.trace import Trace

LAYERS: Final = 12
WIDTH: Final = 16  # so small that only what lies around the kernels counts
ROUNDS: Final = 15
COLD_ROUNDS: Final = 4
# A kernel that touches this much leaves nothing else in the caches: what one core sees of a server's last-level cache. Of what touches less, a part stays.
CACHE_BYTES: Final = 32 << 20
BEFORE: Final = 3  # a small operation right after a large one brings back its own code, not that of the next


@dataclass(frozen=True, slots=True)
class HostTime:
    """Seconds beside the kernels.

    Attributes:
        mode: that a dispatch mode which does nothing adds to an operation.
        cold_mode: that it adds where the caches hold nothing of it.
        cold_operation: that an operation takes longer, without a mode, where the caches hold nothing of the code that leads to its kernel.
    """

    mode: float
    cold_mode: float
    cold_operation: float

    def factor_in(self, evicted: float) -> float:
        """How many times longer than with warm caches a mode takes, where a kernel has filled this share of them."""
        return 1.0 + (self.cold_mode / self.mode - 1.0) * evicted if self.mode else 1.0


# Of a computer that is not here. A GPU's kernels leave the host's caches alone.
ELSEWHERE: Final = HostTime(9e-6, 9e-6, 0.0)


def shares_evicted(trace: Trace) -> list[float]:
    """Of each operation, the share of the caches that one of the few operations before it has filled with its own bytes."""
    shares = []
    before: deque[int] = deque(maxlen=BEFORE)
    for operation in trace.operations:
        shares.append(min(1.0, max(before, default=0) / CACHE_BYTES))
        if operation.makes or operation.writes:  # a view touches nothing
            before.append(sum(trace.storages[s].bytes for s in {*operation.reads, *operation.makes}))
    return shares


class HandsOn(TorchDispatchMode):
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
    """Measure it on this computer: the least of some rounds. Draws no random numbers.

    Args:
        clock: seconds, as operations are timed.
    """
    layers = [layer for _ in range(LAYERS) for layer in (nn.LayerNorm(WIDTH), _linear(), nn.GELU())]
    x = torch.ones(WIDTH, WIDTH)
    everything = torch.ones(2 * CACHE_BYTES // 4)

    def forward(*, cold: bool) -> Iterator[float]:
        """Seconds of each layer."""
        y = x
        for layer in layers:
            if cold:
                everything.add_(0.0)
            begin = clock()
            y = layer(y)
            yield clock() - begin

    def least(rounds: int, around: Callable[[], AbstractContextManager[Any]], *, cold: bool) -> float:
        """Seconds of a forward, of the least that each layer took."""
        times = []
        for _ in range(rounds):
            with around():
                times.append(list(forward(cold=cold)))
        return float(sum(map(min, zip(*times, strict=True))))

    with torch.enable_grad():
        with HandsOn() as mode:
            list(forward(cold=False))  # the first one sets the libraries up
        warm, warm_under = (least(ROUNDS, around, cold=False) for around in (nullcontext, HandsOn))
        cold, cold_under = (least(COLD_ROUNDS, around, cold=True) for around in (nullcontext, HandsOn))
    added = max(0.0, warm_under - warm) / mode.operations
    return HostTime(
        added,
        max(added, (cold_under - cold) / mode.operations),
        max(0.0, (cold - warm) / mode.operations),
    )


def _linear() -> nn.Module:
    """Of ones: making random weights would draw from the user's generator."""
    layer: nn.Module = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1.0 / WIDTH)
    return layer
