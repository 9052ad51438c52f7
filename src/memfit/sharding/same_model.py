"""Whether all ranks have one plan and one model: each keeps its own part of its own, so with another one on some rank a mixture would be trained."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import InputError
from memfit.optimizers.chunked import kind_and_groups
from memfit.sharding.agreement import Agreement
from memfit.techniques.sharding import way_of

NUMBERS: Final = 16  # of each parameter, evenly spaced
_SENT: Final = ("data", "zero1")  # ways in which rank 0 sends its parameters to the others


def marked(parts: Iterable[bytes]) -> str:
    """A digest of what is large."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:12]


def bytes_of(tensor: torch.Tensor, most: int | None = None) -> bytes:
    """Of a tensor's elements, at most about so many, evenly spaced; of one without values its shape."""
    shape = f"{tuple(tensor.shape)}{tensor.dtype}".encode()
    if tensor.device.type == "meta" or not tensor.numel():
        return shape
    flat = tensor.detach().reshape(-1)
    some = flat if most is None else flat[:: max(1, flat.numel() // most)]
    return shape + some.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def check_same_model(model: nn.Module, structure: str, setting: str, followed: Mapping[str, Any]) -> None:
    """Check that all ranks of this run have one plan and one model; all of them have to call it.

    Args:
        model: of this rank, not shared out yet.
        structure: digest of it.
        setting: of the choices, as "zero3/4". Where rank 0 sends its parameters to the others, theirs may have other values.
        followed: what of the plan decides which messages a rank sends, and when.

    Raises:
        InputError: they have not; on all ranks.
    """
    sent = way_of(setting)[0] in _SENT
    values = {} if sent else {name: marked([bytes_of(p, NUMBERS)]) for name, p in model.named_parameters()}
    told: list[tuple[str, dict[str, str], dict[str, Any]]] = [("", {}, {})] * dist.get_world_size()
    dist.all_gather_object(told, (structure, values, dict(followed)))
    first, first_values, first_plan = told[0]
    for rank, (*_, plan) in enumerate(told):
        differs = next((name for name in (*first_plan, *plan) if first_plan.get(name) != plan.get(name)), None)
        if differs is not None:
            raise InputError(
                f"the plan of rank {rank} is not that of rank 0 ({differs} is {plan.get(differs)!r} and {first_plan.get(differs)!r}), so they would wait for "
                "each other for ever: plan on one rank, save the plan and load it on all, or call "
                f"memfit.fit(..., devices={len(told)}) on all, which follows rank 0's"
            )
    for rank, (other, other_values, _) in enumerate(told):
        if other != first:
            raise InputError(
                f"the model of rank {rank} is not that of rank 0: it has other modules, shapes, dtypes, frozen parameters or another mode (train/eval). Make "
                "the same model on every rank"
            )
        name = next((name for name, value in other_values.items() if value != first_values[name]), None)
        if name is not None:
            raise InputError(
                f"the parameters of rank {rank} are not those of rank 0 ({name} is the first that differs), and each rank keeps its own part of its own: seed "
                "all ranks alike before the model is made, or load the same weights on all of them"
            )


def check_same_optimizer(optimizer: torch.optim.Optimizer, agreement: Agreement) -> None:
    """Check that all ranks update by one rule; all of them have to call it.

    Args:
        optimizer: of this rank's part.
        agreement: of the ranks.

    Raises:
        InputError: one has another class or another setting; on all ranks.
    """
    settings = {name: repr(value) for name, value in optimizer.defaults.items()}
    kind, _ = kind_and_groups(optimizer)
    kinds, of_ranks = zip(*agreement.of_all((kind.__name__, settings)), strict=True)
    for rank, (own, other) in enumerate(zip(kinds, of_ranks, strict=True)):
        name = next((name for name, value in other.items() if value != of_ranks[0].get(name)), None)
        if own != kinds[0] or name is not None:
            differs = f"{own} and {kinds[0]}" if own != kinds[0] else f"{name} is {other[name]} and {of_ranks[0][name]}"
            raise InputError(
                f"the optimizer of rank {rank} is not that of rank 0 ({differs}), so ranks would update one model by two rules: make the same on every rank"
            )
