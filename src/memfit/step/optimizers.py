"""Front doors to optimizers with less state: by their own names, from an optimizer made already, and as a plan has it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from memfit.errors import InputError
from memfit.step import elementwise
from memfit.step.chunked import ChunkedOptimizer
from memfit.step.in_backward import why_not_in_backward
from memfit.step.lion import Lion
from memfit.values.choices import Choices

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


# ------------------------------------------------------------------------------------------------------------ as planned


def arranged(
    optimizer: torch.optim.Optimizer, choices: Choices, model: nn.Module, folder: str | Path | None = None
) -> torch.optim.Optimizer:
    """The optimizer as the choices have it; capture and engine both train with what comes out.

    Args:
        optimizer: as the user's factory made it. What a `ChunkedOptimizer` of the user's own has besides the choices, it keeps.
        choices: `state_format`, `state_place` and `update` count.
        model: tells the parameters' names.
        folder: for state that lies on disk; None for the one that is set.

    Raises:
        InfeasibleError: as for `ChunkedOptimizer`.
        InputError: as for `ChunkedOptimizer`; or the optimizer cannot update inside backward.
    """
    reason = why_not_in_backward(optimizer) if choices.update == "in_backward" else None
    if reason is not None:
        raise InputError(reason)
    if isinstance(optimizer, ChunkedOptimizer):
        state_format = optimizer.state_format if choices.state_format == "32bit" else choices.state_format
        state_place = optimizer.state_place if choices.state_place == "device" else choices.state_place
        optimizer.rearrange(state_format, state_place, folder)
    elif (choices.state_format, choices.state_place) == ("32bit", "device"):
        return optimizer
    else:
        optimizer = ChunkedOptimizer(
            optimizer, state_format=choices.state_format, state_place=choices.state_place, folder=folder
        )
    optimizer.name(dict(model.named_parameters(remove_duplicate=False)))
    return optimizer


def alike(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """What makes optimizers like this one over other parameters of the model (stand-ins): the same kind, groups and settings, no state.

    For front doors, whose users have made an optimizer already, as Hugging Face's Trainer does: a plan wants a function.

    Args:
        optimizer: over parameters of the model.
        model: whose trainable parameters tell which is which.

    Raises:
        InputError: the optimizer updates something else than the model's trainable parameters.
    """
    place = {id(p): index for index, p in enumerate(p for p in model.parameters() if p.requires_grad)}
    own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(id(p) not in place for p in own):
        raise InputError(
            "the optimizer updates parameters that are not the model's, so the plan would not count them: make it over the parameters of the model that is "
            "trained"
        )

    def made(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        others = list(parameters)
        groups = [
            {**group, "params": [others[place[id(p)]] for p in group["params"] if id(p) in place]}
            for group in optimizer.param_groups
        ]
        if not isinstance(optimizer, ChunkedOptimizer):
            return _with_groups(optimizer, groups)
        inner = _with_groups(optimizer.inner, groups)
        form, place_of_state = optimizer.state_format, optimizer.state_place
        return ChunkedOptimizer(inner, state_format=form, state_place=place_of_state, in_32bit=optimizer.in_32bit)

    return made


def _with_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    twin = copy.copy(optimizer)
    # A copy goes the way of pickling, which leaves out what a subclass may have besides.
    twin.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name not in twin.__dict__})
    twin.state, twin.param_groups = defaultdict(dict), groups
    return twin


def offered(optimizer: torch.optim.Optimizer) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """What a step with this optimizer could have: field of `Choices` -> values, and field -> why not more (the first reason)."""
    kind = optimizer.kind if isinstance(optimizer, ChunkedOptimizer) else type(optimizer)
    groups = optimizer.param_groups
    reasons = {  # of two places the disk first: what is said of it holds for both
        ("state_format", "8bit"): elementwise.why_no_8bit(kind, groups),
        ("state_place", "disk"): elementwise.why_not_there(kind, groups, "disk"),
        ("state_place", "host"): elementwise.why_not_there(kind, groups, "host"),
        ("update", "in_backward"): why_not_in_backward(optimizer),
    }
    values: dict[str, tuple[str, ...]] = {}
    why_not: dict[str, str] = {}
    for (name, value), reason in reasons.items():
        if reason is None:
            values[name] = (*values.get(name, ()), value)
        else:
            why_not.setdefault(name, reason)
    return values, why_not
