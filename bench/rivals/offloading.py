"""What the rivals that copy saved tensors to host memory, on a stream of their own, have in common."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from memfit import batches

from .arrangement import Arrange, Loss
from .subjects import Built, Subject


def obstacle(_subject: Subject) -> str | None:
    """There is nothing to copy where the model is on the CPU."""
    return None if torch.accelerator.is_available() else "moves activations off an accelerator; there is none here"


def everything(offloading: Callable[[nn.Module], AbstractContextManager[object]]) -> list[tuple[str, Arrange]]:
    """The one setting: forward and loss run inside what `offloading` makes for the model."""

    def arrange(_subject: Subject, built: Built) -> Loss:
        around = offloading(built[0])

        def loss() -> Tensor:
            with around:
                return batches.loss_of(*built)

        return loss

    return [("everything", arrange)]
