"""TRL OffloadActivations: saved tensors are copied to host memory on a stream of their own. There is nothing to copy where the model is on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from memfit import batches
from rivals.arrangement import Arrange, Loss
from rivals.subjects import Built, Subject

NAME = "TRL OffloadActivations"
PACKAGE, INSTALL = "trl", "trl==1.16.0"
NOTE = "Needs an accelerator."


def obstacle(_subject: Subject) -> str | None:
    return None if torch.accelerator.is_available() else "moves activations off an accelerator; there is none here"


def settings(_subject: Subject) -> list[tuple[str, Arrange]]:
    return [("everything", _arrange)]


def _arrange(_subject: Subject, built: Built) -> Loss:
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    around = get_act_offloading_ctx_manager(built[0])

    def loss() -> Tensor:
        with around:
            return batches.loss_of(*built)

    return loss
