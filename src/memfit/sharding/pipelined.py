"""What a step needs to know of a model that is divided into stages among ranks, as `ShardedModel` says it of one that every rank runs as a whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.batches import Batch, LossFunction
from memfit.sharding.sharded import ShardedModel

AroundForward = Callable[[int], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Passed:
    """All micro-batches of a step, through all stages and back.

    Attributes:
        loss: of the batch of all ranks.
        micro_batches: of this rank's pipeline.
        waiting: the share of the time in which this rank waited for other stages and for messages.
    """

    loss: float
    micro_batches: int
    waiting: float


class PipelinedModel(ShardedModel):
    """A model of which this rank has a stage."""

    def follow_cleared(self) -> None:
        """Its micro-batches go from rank to rank, which no loop of the user's own does."""

    def gathered(self) -> list[torch.Tensor]:
        """None."""
        return []

    @abstractmethod
    def prepare(self, batch: Batch) -> None:
        """What a step over batches of these shapes needs; before the step, in which nothing of it is to be seen. All ranks have to call it.

        Args:
            batch: this rank's part.

        Raises:
            BatchError: the parts of the ranks of a pipeline cannot be put together; on all ranks.
            InputError: a rank cannot run its stages, or runs other code than others of its pipeline; on all ranks.
        """

    @abstractmethod
    def forward_backward(self, batch: Batch, around: AroundForward) -> Passed:
        """Gradients of the batch of all ranks, of this rank's parameters, and the loss of it; the same on every rank.

        Args:
            batch: this rank's part, for which it was prepared.
            around: of one of this rank's stages, by its position among them, what each forward runs in.

        Raises:
            BatchError: nothing in the batch counts for the loss; on all ranks.
            NonFiniteLossError: on all ranks.
        """

    @abstractmethod
    def loss_of(self, batch: Batch) -> float:
        """The loss of a batch that all ranks have alike, without gradients."""

    def loss_without_gradients(self, loss_fn: LossFunction | None) -> LossFunction | None:
        """Through all stages."""
        del loss_fn
        return lambda _, batch: torch.tensor(self.loss_of(batch))

    def collect(self, *, agrees: bool = False) -> None:
        """Gradients are there, of zeros where there are none."""

    def collect_awaited(self) -> None:
        """No loop of the user's own runs it."""

    def micro_batch(self, *, last: bool) -> Any:
        """Not one by one: they pass through the stages together."""
        raise NotImplementedError("stages run the micro-batches of a step together")
