"""`torch.autograd.graph.save_on_cpu`: saved tensors wait in host memory. For a model on the CPU nothing is copied, as they are there already."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import save_on_cpu

from memfit import batches
from rivals.arrangement import Arrange, Loss
from rivals.subjects import Built, Subject

NAME = "save_on_cpu"
PACKAGE = INSTALL = None
NOTE = "For a model on the CPU it copies nothing: the row shows what its hooks cost."


def obstacle(_subject: Subject) -> str | None:
    return None


def settings(_subject: Subject) -> list[tuple[str, Arrange]]:
    return [("everything", _arrange)]


def _arrange(_subject: Subject, built: Built) -> Loss:
    def loss() -> Tensor:
        with save_on_cpu():
            return batches.loss_of(*built)

    return loss
