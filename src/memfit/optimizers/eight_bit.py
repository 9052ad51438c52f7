"""Optimizers with 8-bit state: by their own names, and made of an optimizer that is there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from memfit.errors import InputError
from memfit.optimizers import elementwise
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.optimizers.lion import Lion

Names = Mapping[str, nn.Parameter]


class AdamW8bit(ChunkedOptimizer):
    """AdamW with 8-bit state: 2.06 bytes a parameter instead of 8. Arguments as for `torch.optim.AdamW`; the rest as for `ChunkedOptimizer`."""

    def __init__(
        self, params: Any, *, in_32bit: Sequence[str] = (), names: Names | None = None, **settings: Any
    ) -> None:
        optimizer = torch.optim.AdamW(params, **{"fused": True, **settings})
        super().__init__(optimizer, state_format="8bit", in_32bit=in_32bit, names=names)


class SGD8bit(ChunkedOptimizer):
    """SGD with 8-bit momentum: 1.03 bytes a parameter instead of 4. Arguments as for `torch.optim.SGD`; the rest as for `ChunkedOptimizer`."""

    def __init__(
        self, params: Any, *, in_32bit: Sequence[str] = (), names: Names | None = None, **settings: Any
    ) -> None:
        optimizer = torch.optim.SGD(params, **{"fused": True, "momentum": 0.9, **settings})
        super().__init__(optimizer, state_format="8bit", in_32bit=in_32bit, names=names)


class Lion8bit(ChunkedOptimizer):
    """Lion with 8-bit momentum: 1.03 bytes a parameter instead of 4. Arguments as for `Lion`; the rest as for `ChunkedOptimizer`."""

    def __init__(
        self, params: Any, *, in_32bit: Sequence[str] = (), names: Names | None = None, **settings: Any
    ) -> None:
        super().__init__(Lion(params, **settings), state_format="8bit", in_32bit=in_32bit, names=names)


def eight_bit(
    optimizer: torch.optim.Optimizer,
    *,
    in_32bit: Sequence[str] = (),
    names: Names | None = None,
    backend: str = "memfit",
) -> torch.optim.Optimizer:
    """The same optimizer with its state in 8 bits: same parameter groups, same settings.

    Args:
        optimizer: AdamW, Adam, SGD with momentum, or `Lion`; not to be used by itself any more.
        in_32bit, names: as for `ChunkedOptimizer`.
        backend: "memfit", or "bitsandbytes" for its kernels (`memfit[bnb]`); in its way: parameters under 4096 elements keep 32 bits.

    Raises:
        InputError: another optimizer, or settings that are not to be had in 8 bits.
    """
    if backend == "memfit":
        return ChunkedOptimizer(optimizer, state_format="8bit", in_32bit=in_32bit, names=names)
    if backend != "bitsandbytes":
        raise InputError(f"backend={backend!r}: there is 'memfit' and 'bitsandbytes'")
    reason = elementwise.why_no_8bit(type(optimizer), optimizer.param_groups)
    if reason is not None:
        raise InputError(f"{reason}. Take another optimizer, or leave its state as it is")
    if in_32bit:
        raise InputError(
            "bitsandbytes keeps exceptions (in_32bit) in a register of the whole process, which outlives the parameters they are of: take backend='memfit'"
        )
    return _of_bitsandbytes(optimizer)


# What bitsandbytes reads of a parameter group, and what it cannot do otherwise.
_READ: Final = frozenset({"params", "lr", "betas", "eps", "weight_decay", "momentum"})
_ONLY: Final[Mapping[str, Any]] = {"maximize": False, "nesterov": False, "dampening": 0}


def _of_bitsandbytes(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    try:
        import bitsandbytes
    except ImportError as error:
        raise InputError("backend='bitsandbytes' needs bitsandbytes: pip install 'memfit[bnb]'") from error
    kinds = {torch.optim.AdamW: "AdamW8bit", torch.optim.Adam: "Adam8bit", torch.optim.SGD: "SGD8bit", Lion: "Lion8bit"}
    groups = []
    for group in optimizer.param_groups:
        for name, value in _ONLY.items():
            if group.get(name, value) != value:
                raise InputError(f"bitsandbytes has no {name}={group[name]!r}: take backend='memfit'")
        groups.append({key: value for key, value in group.items() if key in _READ})
    first = {key: value for key, value in groups[0].items() if key in {"lr", "momentum"}}
    made: torch.optim.Optimizer = getattr(bitsandbytes.optim, kinds[type(optimizer)])(groups, **first)
    return made
