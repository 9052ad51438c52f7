"""An optimizer's state of several ranks as checkpoints of one process have it: put together from all ranks' parts, and taken apart again."""

from __future__ import annotations

from typing import Any

import torch

from memfit.sharding.sharded import ShardedModel


def gathers_itself(optimizer: Any) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer, whose module takes a while to import."""
    return hasattr(optimizer, "consolidate_state_dict")


def whole_state(optimizer: torch.optim.Optimizer, sharded: ShardedModel) -> dict[str, Any] | None:
    """The state of all ranks, as an optimizer over whole parameters would have it; on rank 0. All ranks have to call it.

    Args:
        optimizer: this rank's, over its part of the parameters.
        sharded: whose parameters.
    """
    first = sharded.agreement.rank == 0
    if gathers_itself(optimizer):
        gathers: Any = optimizer
        gathers.consolidate_state_dict(to=0)
        return optimizer.state_dict() if first else None
    packed: dict[str, Any] = optimizer.state_dict()
    names = {id(p): name for name, p in sharded.named().items()}
    order = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(order):
        state = dict(packed["state"].get(number, {}))
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape:
                placed: Any = sharded.placed(names[id(parameter)], value)
                whole = placed.full_tensor()  # one after the other
                state[key] = whole.cpu() if first else None
        packed["state"][number] = state
    return packed if first else None


def set_state(optimizer: torch.optim.Optimizer, sharded: ShardedModel, saved: dict[str, Any]) -> None:
    """Give an optimizer this rank's part of a whole state.

    Args:
        optimizer: over this rank's part of the parameters.
        sharded: whose parameters.
        saved: what the `state_dict` of one over whole parameters gave; its tensors are replaced by parts.
    """
    names = {id(p): name for name, p in sharded.named().items()}
    order = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(order):
        name = names[id(parameter)]
        shape = sharded.model.get_parameter(name).shape
        state = dict(saved["state"].get(number, {}))
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape == shape:
                state[key] = sharded.part_of(name, value).clone()
        saved["state"][number] = state
    optimizer.load_state_dict(saved)
