"""What a run depends on besides its data: parameters, buffers, optimizer state, gradient scaling, generators; taken and put back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from memfit.step.generators import of_process, put_back_in_process
from memfit.step.precision import Scaling
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


def generators() -> dict[str, Any]:
    """States of the generators that a model or a dataset may draw from: torch's, Python's and numpy's."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - users' datasets still draw from the global one
    return {
        **of_process(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Inverse of `generators`."""
    put_back_in_process(states)
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002 - as above
