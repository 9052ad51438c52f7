"""State of an optimizer, put back as it was saved."""

from __future__ import annotations

from typing import Any

import torch


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
    # back as it was.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in saved["state"].items():
        there = optimizer.state.get(parameters[index], {})
        for name, value in state.items():
            now = there.get(name)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(now, torch.Tensor)
                and now.dtype != value.dtype
                and now.shape == value.shape
            ):
                there[name] = value.to(now.device)
