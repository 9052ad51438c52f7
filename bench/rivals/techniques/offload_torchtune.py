"""torchtune OffloadActivations: saved tensors are copied to host memory on a stream of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from rivals.arrangement import Arrange
from rivals.offloading import everything, obstacle
from rivals.subjects import Subject

__all__ = ["INSTALL", "NAME", "NOTE", "PACKAGE", "obstacle", "settings"]

NAME = "torchtune OffloadActivations"
PACKAGE, INSTALL = "torchtune", "torchtune==0.6.1"
NOTE = "Needs an accelerator."


def settings(_subject: Subject) -> list[tuple[str, Arrange]]:
    return everything(_offloading)


def _offloading(model: nn.Module) -> AbstractContextManager[object]:
    from torchtune.training._activation_offloading import get_act_offloading_ctx_manager

    return get_act_offloading_ctx_manager(model, enable_activation_offloading=True)
