"""Stochastic rounding to bf16, and the format of optimizer state that rounds so.

A number between two neighbours in bf16 becomes the upper one with the probability that is its distance from the lower one, in units of their distance: its
mean is the number itself (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", arXiv:1502.02551). Rounded to nearest, an update smaller
than half that distance, 1/512 to 1/256 of a weight, is lost every time it comes (Zamirai et al. 2020, "Revisiting BFloat16 Training", arXiv:2010.06192).

bf16 is the upper half of fp32, so sixteen random bits are added to the lower half, which is then cut off: what it carries into the upper half is the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit.optimizers.elementwise import Group, Kind, why_not_in_chunks
from memfit.optimizers.state_format import StateFormat
from memfit.optimizers.state_storage import StateTensor

LOWER_BITS: Final = 16  # of fp32 that bf16 lacks


def round_stochastically(
    values: Tensor, into: Tensor, scratch: Tensor, generator: torch.Generator | None = None
) -> None:
    """Round to bf16 up or down at random, so that the mean is right; nothing is allocated.

    Infinities and NaNs stay. What is beyond the largest bf16 number may become infinite, as it does when rounded to nearest.

    Args:
        values: (n,), float32; unchanged but for the payload of NaNs.
        into: (n,), bfloat16; written.
        scratch: (n,), float32; overwritten.
        generator: of the random bits, on the device of `values`; None for the device's default one.
    """
    # Of NaNs with any payload, some would overflow into other numbers.
    torch.nan_to_num(values, nan=math.nan, posinf=math.inf, neginf=-math.inf, out=values)
    bits = scratch.view(torch.int32)
    bits.random_(0, 1 << LOWER_BITS, generator=generator)
    bits.add_(values.view(torch.int32)).bitwise_and_(-(1 << LOWER_BITS))
    into.copy_(scratch)


class RoundedStochastically(StateFormat):
    """Moments of bf16 parameters in bf16, under their own names; they and the parameters are rounded stochastically.

    The random bits come from generators of its own, one for each device type, so that dropout draws what it draws without. They are seeded as the default
    generator was (`torch.manual_seed`), when first used.
    """

    name = "bf16, rounded stochastically"

    def __init__(self) -> None:
        self._generators: dict[str, torch.Generator] = {}

    def why_not(self, kind: Kind, groups: Sequence[Group]) -> str | None:
        """Updates are computed chunk by chunk."""
        return why_not_in_chunks(kind, groups, f"parameters of {kind.__name__} are not rounded stochastically")

    def packs(self, parameter: Tensor) -> bool:
        """All in bf16, of any size: it is the parameters that want rounding."""
        return parameter.dtype is torch.bfloat16

    def tensors(self, moment: str) -> tuple[StateTensor, ...]:
        """The moment itself."""
        return (StateTensor(moment, torch.bfloat16),)

    def pack(self, values: Tensor, count: int, kept: Sequence[Tensor], scratch: Tensor) -> None:
        """Rounded."""
        self.write(values[:count], kept[0], scratch[:count])

    def unpack(self, kept: Sequence[Tensor], values: Tensor, scratch: Tensor) -> None:
        """Exact: fp32 holds all of bf16."""
        del scratch
        values[: kept[0].numel()].copy_(kept[0])

    def write(self, values: Tensor, into: Tensor, scratch: Tensor) -> None:
        """Rounded."""
        round_stochastically(values, into, scratch, self._generator(values))

    def _generator(self, like: Tensor) -> torch.Generator | None:
        if isinstance(like, FakeTensor):
            return None  # its device need not be here, and nothing is drawn
        kind = like.device.type
        if kind not in self._generators:
            self._generators[kind] = torch.Generator(like.device)
            self._generators[kind].manual_seed(torch.initial_seed())
        return self._generators[kind]

    def state(self) -> Mapping[str, Any]:
        """States of the generators, by device type."""
        return {kind: generator.get_state() for kind, generator in self._generators.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the random bits where these states were; without any, anew."""
        self._generators = {}
        for kind, saved in state.items():
            self._generators[kind] = torch.Generator(kind)
            self._generators[kind].set_state(saved.cpu())
