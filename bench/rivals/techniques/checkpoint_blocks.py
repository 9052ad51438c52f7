"""`torch.utils.checkpoint` around every block: what people reach for first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from memfit import batches
from rivals.arrangement import Arrange, Loss
from rivals.subjects import Built, Subject

NAME = "torch checkpoint, blocks"
PACKAGE = INSTALL = None
NOTE = "Not reentrant, random state preserved, as torch recommends."


def obstacle(subject: Subject) -> str | None:
    return None if subject.blocks else "the model has no blocks"


def settings(subject: Subject) -> list[tuple[str, Arrange]]:
    found = [("every block", _every(1))]
    if len(subject.block_list(subject.build()[0])) > 2:
        found.append(("every second block", _every(2)))
    return found


def checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The same forward, run again in backward."""
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _every(number: int) -> Arrange:
    def arrange(subject: Subject, built: Built) -> Loss:
        for block in subject.block_list(built[0])[::number]:
            block.forward = checkpointed(block.forward)
        return lambda: batches.loss_of(*built)

    return arrange
