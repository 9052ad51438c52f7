"""What a run depends on besides its data: parameters, buffers, optimizer state, gradient scaling, generators; taken and put back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from memfit.step.generators import of_process, put_back_in_process
from memfit.techniques.autocast.precision import Scaling
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
