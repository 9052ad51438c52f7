"""State of an optimizer, put back as it was saved."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def set_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put saved state back; learning rates and other settings stay those of the optimizer as it is now.

    Args:
        optimizer: of the same parameters as the one whose state it is; it adopts tensors that need no conversion, so nothing else may hold them.
        saved: what its `state_dict` gave.
    """
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
    # torch casts state to the parameter's type; what was saved in another (8-bit state, float32 for bfloat16 parameters) goes
    # back as it was. Containers are those that were saved: torch makes a queue of limited length anew without the limit.
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    for key, state in saved["state"].items():
        owner = parameters.get(key, key)  # some keep what is of no parameter beside the states of these, under a name
        values, structure = pytree.tree_flatten_with_path(state)
        made, structure_made = pytree.tree_flatten_with_path(optimizer.state.get(owner))
        present = dict(made)  # by their places: what comes from a file may be in another order
        if {place for place, _ in values} == present.keys():  # else the optimizer keeps it in a form of its own
            back = [_as_saved(value, present[place]) for place, value in values]
            if structure != structure_made or any(
                kept is not present[place] for kept, (place, _) in zip(back, values, strict=True)
            ):
                optimizer.state[owner] = pytree.tree_unflatten(back, structure)


def _as_saved(value: Any, present: Any) -> Any:
    """What torch has put back, in the type in which it was saved."""
    both = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
    cast = both and value.dtype != present.dtype and value.shape == present.shape
    return value.to(present.device) if cast else present
