"""What the computer takes beside the kernels: what a dispatch mode adds to an operation, and what a kernel leaves of the caches for what runs after it.

The engine is Python beside every operation that it follows or runs again, as a dispatch mode is, so on a faster processor, or under a faster Python, it takes
less in the same proportion. How many times more than a mode that does nothing it takes is measured by `bench/overhead`.

On a CPU the kernels share the caches with the interpreter, with torch's dispatcher, and with their own code, which are read again after a long one. A mode
takes up to five times as long then. How long the kernel took says more of that than the bytes it went through: a product of a megabyte leaves as little behind
as an addition of thirty, and a server's last cache belongs to others, too (docs/design/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from memfit.capture.reference_work import typical
from memfit.dispatch import DispatchMode
from memfit.values.trace import Operation, Trace

LAYERS: Final = 3  # of each kind
WIDTH: Final = 16  # so small that only what lies around the kernels counts
ROUNDS: Final = 15
COLD_ROUNDS: Final = 6
# Of the products before what a mode adds: some tenths of a millisecond to three milliseconds on one core.
ROWS: Final = (0, 16, 64, 256)
PRODUCT_WIDTH: Final = 768
PRODUCT_ROUNDS: Final = 20
# Bytes that kernels went through before what is timed. Between a core's own caches and what it sees of a server's last one most of the difference is made
# at once, by a few megabytes; from the last on nothing is left.
TOUCHED: Final = (0, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 24, 1 << 25)
# They are others each time, as in a step: the same few megabytes again would stay in the last cache, and the code in there beside them.
OTHER_BYTES: Final = 2 * TOUCHED[-1]
BEFORE: Final = 3  # operations: a small one right after a long one brings back its own code, not that of the next


@dataclass(frozen=True, slots=True)
class HostTime:
    """Seconds beside the kernels.

    Attributes:
        modes: that a dispatch mode which does nothing adds to an operation, after products of as many rows as `ROWS` says.
        products: that these products take.
        operations: that an operation takes longer, without a mode, after a kernel that went through as many bytes as `TOUCHED` says, than after one that
            touched nothing: the code that leads to its kernel is read from memory.
        views: that an operation which only looks at its input in another way takes longer.
        fault: that a page fault takes, as a large block comes from the system.
    """

    modes: tuple[float, ...]
    products: tuple[float, ...]
    operations: tuple[float, ...]
    views: tuple[float, ...]
    fault: float = 0.0

    @classmethod
    def same_after_all(cls, mode: float) -> HostTime:
        """Where kernels leave the host's caches alone."""
        nothing = (0.0,) * len(TOUCHED)
        return cls((mode,) * len(ROWS), tuple(map(float, ROWS)), nothing, nothing)

    @property
    def mode(self) -> float:
        """That a dispatch mode which does nothing adds to an operation, with warm caches."""
        return self.modes[0]

    def factor_after(self, kernel_seconds: float) -> float:
        """How many times longer than with warm caches a mode takes after kernels that took so long."""
        return float(np.interp(kernel_seconds, self.products, self.modes)) / self.mode if self.mode else 1.0

    def emptied_after(self, kernel_seconds: float) -> float:
        """How much of the caches kernels that took so long have emptied, from 0 to 1, as seen by what a mode takes then."""
        most = self.modes[-1] - self.mode
        return (self.factor_after(kernel_seconds) - 1.0) * self.mode / most if most > 0 else 0.0

    def added_after(self, touched_bytes: int, operation: Operation) -> float:
        """Seconds that an operation takes longer after a kernel that went through these bytes."""
        return float(np.interp(touched_bytes, TOUCHED, self.operations if has_kernel(operation) else self.views))


def has_kernel(operation: Operation) -> bool:
    """Whether an operation touches memory; a view does not."""
    return bool(operation.makes or operation.writes)


ELSEWHERE: Final = HostTime.same_after_all(
    9e-6
)  # of a computer that is not here. A GPU's kernels leave the host's caches alone.


def touched_since(trace: Trace) -> list[int]:
    """Of each operation, the bytes that all have gone through since one like it: whether it finds its own code in the caches.

    Before the first of its kind a whole step went by.
    """
    found = []
    every = 0
    last: dict[str, int] = {}  # by name, the bytes by then
    for operation in trace.operations:
        found.append(min(every - last[operation.name], TOUCHED[-1]) if operation.name in last else TOUCHED[-1])
        last[operation.name] = every
        if has_kernel(operation):
            every += sum(trace.storages[s].bytes for s in {*operation.reads, *operation.makes})
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
    kinds = _kinds()
    layers = kinds * LAYERS
    views = [torch.t] * len(layers)
    x = torch.ones(WIDTH, WIDTH, requires_grad=True)
    others = torch.ones(OTHER_BYTES // 4)
    at = 0  # the first of them that was not touched lately
    factor = torch.ones(PRODUCT_WIDTH, PRODUCT_WIDTH)
    rows = torch.ones(ROWS[-1], PRODUCT_WIDTH)

    def go_through(touched_bytes: int) -> None:
        nonlocal at
        if count := touched_bytes // 4:
            at = at if at + count <= len(others) else 0
            others[at : at + count].add_(0.0)
            at += count

    def multiply(count: int) -> None:
        if count:
            torch.mm(rows[:count], factor)

    def forward(through: Sequence[Callable[[Any], Any]], before: Callable[[], None]) -> Iterator[float]:
        """Seconds of each layer."""
        y = x
        for layer in through:
            before()
            begin = clock()
            y = layer(y)
            yield clock() - begin

    def forward_seconds(rounds: int, through: Sequence[Callable[[Any], Any]], before: Callable[[], None]) -> float:
        """Seconds of a forward, of what each layer typically took."""
        taken = [list(forward(through, before)) for _ in range(rounds)]
        return float(sum(map(typical, zip(*taken, strict=True))))

    def added_by_a_mode(rounds: int, before: Callable[[], None]) -> float:
        """To a forward. Each round has one without it, too, so that what wavers for longer is in both."""
        differences = []
        for _ in range(rounds):
            alone = list(forward(kinds, before))
            with HandsOn():
                under = list(forward(kinds, before))
            differences.append([u - a for u, a in zip(under, alone, strict=True)])
        return float(sum(map(median, zip(*differences, strict=True))))

    def after_bytes(through: Sequence[Callable[[Any], Any]]) -> list[float]:
        return [
            forward_seconds(COLD_ROUNDS if each else ROUNDS, through, partial(go_through, each)) for each in TOUCHED
        ]

    def product_seconds(count: int) -> float:
        times = []
        for _ in range(PRODUCT_ROUNDS):
            go_through(TOUCHED[-1])
            begin = clock()
            multiply(count)
            times.append(clock() - begin)
        return typical(times)

    with torch.enable_grad():
        with HandsOn() as mode:
            list(forward(kinds, lambda: None))  # the first one sets the libraries up
        modes = [added_by_a_mode(PRODUCT_ROUNDS if each else LAYERS * ROUNDS, partial(multiply, each)) for each in ROWS]
        small, viewed = after_bytes(layers), after_bytes(views)
    return HostTime(
        _rising(each / mode.operations for each in modes),
        _rising([0.0, *map(product_seconds, ROWS[1:])]),
        _rising((each - small[0]) / (LAYERS * mode.operations) for each in small),
        _rising((each - viewed[0]) / len(views) for each in viewed),
    )


def _rising(seconds: Iterable[float]) -> tuple[float, ...]:
    """What is timed wavers; a larger product takes no less, and after more bytes or a longer product no more of the caches is left."""
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
