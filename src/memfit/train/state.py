"""What a run depends on besides its data: parameters, buffers, optimizer state, gradient scaling, generators; taken and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from memfit.step.precision import Scaling
from memfit.step.process_generators import generators, set_generators
from memfit.values.plan import Plan


class Trained(Protocol):
    """What a snapshot is taken of: the user's own model and optimizer."""

    @property
    def model(self) -> torch.nn.Module:
        """Being trained."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Of that model."""

    @property
    def plan(self) -> Plan:
        """That is followed."""

    @property
    def scaling(self) -> Scaling | None:
        """Of the gradients; None where they are not scaled."""


def further_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that `state_dict` leaves out: a forward pass may still have changed them."""
    there = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in there}


def set_buffers(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `further_buffers`."""
    for path, saved in buffers.items():
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        there = getattr(module, name)
        if isinstance(there, torch.Tensor) and (there.shape, there.dtype) == (saved.shape, saved.dtype):
            there.copy_(saved)  # in place: others may look at the same tensor
        else:
            setattr(module, name, saved.to(there.device if isinstance(there, torch.Tensor) else "cpu"))


def set_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put saved state back; learning rates and other settings stay those of the optimizer as it is now."""
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    # torch adopts tensors that need no conversion; these come fresh from the file, so nothing else holds them.
    optimizer.load_state_dict(saved)
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
    # torch casts state to the parameter's type; what was saved in another (8-bit state, float32 beside bfloat16) goes
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


__all__ = ["Trained", "further_buffers", "generators", "set_buffers", "set_generators", "set_optimizer"]
