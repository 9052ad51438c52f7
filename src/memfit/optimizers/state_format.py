"""Formats of optimizer state: what a moment is kept as between updates, and how it is packed and unpacked around one. A new format is one subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from memfit.optimizers.elementwise import CODES, Group, Kind, why_no_8bit
from memfit.optimizers.formats import BLOCK, dequantise, quantise
from memfit.optimizers.state_storage import StateTensor


class StateFormat(ABC):
    """How the moments of a parameter are kept.

    Attributes:
        name: for sentences, and to compare two formats by.
        coded: whether what is kept is codes under names of their own, and flat in a `state_dict`; else tensors like the optimizer's own.
    """

    name: ClassVar[str]
    coded: ClassVar[bool] = False

    @abstractmethod
    def why_not(self, kind: Kind, groups: Sequence[Group]) -> str | None:
        """Why such an optimizer cannot have its state in this format; None where it can."""

    @abstractmethod
    def packs(self, parameter: Tensor) -> bool:
        """Whether a parameter's moments are packed; else they are kept as the optimizer has them."""

    @abstractmethod
    def tensors(self, moment: str) -> tuple[StateTensor, ...]:
        """What is kept of a moment."""

    @abstractmethod
    def pack(self, values: Tensor, count: int, kept: Sequence[Tensor], scratch: Tensor) -> None:
        """Write one chunk of a moment.

        Args:
            values: whole blocks, (blocks x BLOCK,); overwritten.
            count: elements that count.
            kept: as `tensors` says, for this chunk; written.
            scratch: like `values`; overwritten.
        """

    @abstractmethod
    def unpack(self, kept: Sequence[Tensor], values: Tensor, scratch: Tensor) -> None:
        """Inverse of `pack`."""

    def write(self, values: Tensor, into: Tensor, scratch: Tensor) -> None:
        """A chunk of the parameter, as computed, into the parameter's own type; `scratch` may be overwritten."""
        del scratch
        into.copy_(values)

    def computed_in(self, dtype: torch.dtype) -> torch.dtype:
        """What the update of a parameter of this type is computed in: 16 bits in 32."""
        return torch.float32 if dtype in {torch.bfloat16, torch.float16} else dtype

    def state(self) -> Mapping[str, Any]:
        """What the format itself keeps from step to step, for a `state_dict`."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        del state


class AsItIs(StateFormat):
    """As the optimizer keeps it, to the bit."""

    name = "32bit"

    def why_not(self, kind: Kind, groups: Sequence[Group]) -> str | None:
        """Any optimizer can."""
        del kind, groups
        return None

    def packs(self, parameter: Tensor) -> bool:
        """None is."""
        del parameter
        return False

    def tensors(self, moment: str) -> tuple[StateTensor, ...]:
        """Never asked."""
        raise NotImplementedError(moment)

    def pack(self, values: Tensor, count: int, kept: Sequence[Tensor], scratch: Tensor) -> None:
        """Never asked."""
        raise NotImplementedError

    def unpack(self, kept: Sequence[Tensor], values: Tensor, scratch: Tensor) -> None:
        """Never asked."""
        raise NotImplementedError


class EightBit(StateFormat):
    """A code for each element and a scale for each block (`formats`)."""

    name = "8bit"
    coded = True

    def why_not(self, kind: Kind, groups: Sequence[Group]) -> str | None:
        """Made for some optimizers."""
        return why_no_8bit(kind, groups)

    def packs(self, parameter: Tensor) -> bool:
        """Of a block at least."""
        return parameter.is_floating_point() and parameter.numel() >= BLOCK

    def tensors(self, moment: str) -> tuple[StateTensor, ...]:
        """Codes and scales."""
        return StateTensor(f"{moment}_codes", CODES[moment]), StateTensor(f"{moment}_scales", torch.float32, BLOCK)

    def pack(self, values: Tensor, count: int, kept: Sequence[Tensor], scratch: Tensor) -> None:
        """`formats.quantise`."""
        codes, scales = kept
        quantise(values, count, codes, scales, scratch)

    def unpack(self, kept: Sequence[Tensor], values: Tensor, scratch: Tensor) -> None:
        """`formats.dequantise`."""
        codes, scales = kept
        dequantise(codes, scales, values, scratch)


NAMED: Final[Mapping[str, type[StateFormat]]] = {"32bit": AsItIs, "8bit": EightBit}


def format_of(given: str | StateFormat) -> StateFormat:
    """The format itself, or the one of this name."""
    return given if isinstance(given, StateFormat) else NAMED[given]()
