"""What the engine takes once a step: it notes all that a step may change, so that one that fails can be undone, and counts calls of modules."""

from __future__ import annotations

from collections.abc import Callable, Collection
from statistics import median
from typing import Final

import torch
from torch import nn

from memfit.batches import LossFunction
from memfit.step.buffers import BufferCopies
from memfit.step.guard import Guard, Trained, Updated
from memfit.step.modules import has_gradients
from memfit.step.unrestored import Unrestored

ROUNDS: Final = 5


def noting_seconds(
    model: nn.Module, loss_fn: LossFunction | None, changed_buffers: Collection[str], clock: Callable[[], float]
) -> float:
    """What is noted before a step and looked at before its update: the median of some rounds. Nothing is changed.

    Args:
        model, loss_fn: of the step.
        changed_buffers: names of those that forward writes, of which a copy is filled.
        clock: seconds, as operations are timed.
    """
    copies = BufferCopies(model)
    copies.add(tuple(name for name, _ in model.named_buffers() if name in changed_buffers))
    written = list(model.parameters())
    trained, updated = Trained(model), Updated(model, torch.optim.SGD(written) if written else None)
    seconds = []
    for _ in range(ROUNDS + 1):
        begin = clock()
        trained.changes()
        updated.changes(model)
        Guard(model, copies.copies, None, loss_fn)
        Unrestored(model, loss_fn, frozenset(copies.copies))
        has_gradients(model)
        for _ in range(2):  # before the update and after it
            [tensor._version for tensor in written]
        seconds.append(clock() - begin)
    return median(seconds[1:])  # the first one finds out what there is to note
