"""What a snapshot is taken of."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from memfit.sharding.sharded import ShardedModel
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
    def sharded(self) -> ShardedModel | None:
        """The model as this one of several ranks has it; None on one device."""

    @property
    def scaling(self) -> Scaling | None:
        """Of the gradients; None where they are not scaled."""


class Savable(Trained, Protocol):
    """What can be had as a whole, to be saved or loaded."""

    def gathered(self, *, on_host: bool = False, changed: bool = True) -> AbstractContextManager[torch.nn.Module]:
        """Inside, the model has all its parameters and the optimizer all its state."""
