"""What a dispatch mode adds to an operation on this computer: the unit in which the engine's own time is predicted.

The engine is Python beside every operation that it follows or runs again, as such a mode is, so on a faster processor, or under a faster Python, it takes
less in the same proportion. How many times more than a mode that does nothing it takes is measured by `bench/overhead`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS: Final = 12
WIDTH: Final = 16  # so small that only what lies around the kernels counts
ROUNDS: Final = 15


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


def mode_seconds(clock: Callable[[], float]) -> float:
    """Seconds that a dispatch mode which does nothing adds to one operation of a forward; the least of some rounds. Draws no random numbers.

    Args:
        clock: seconds, as operations are timed.
    """
    layers = [layer for _ in range(LAYERS) for layer in (nn.LayerNorm(WIDTH), _linear(), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.ones(WIDTH, WIDTH)

    def forward() -> float:
        begin = clock()
        model(x)
        return clock() - begin

    with torch.enable_grad():
        forward()  # the first one sets the libraries up
        plain, under = [], []
        for _ in range(ROUNDS):
            plain.append(forward())
            with HandsOn() as mode:
                under.append(forward())
    added = max(0.0, min(under) - min(plain))
    return float(added / mode.operations)


def _linear() -> nn.Module:
    """Of ones: making random weights would draw from the user's generator."""
    layer: nn.Module = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1.0 / WIDTH)
    return layer
