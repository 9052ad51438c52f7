"""A forward that leaves every path its plan knows is ended there, so that the step can be begun anew under a plan that knows its path.

Up to that operation the step was as planned, so it has held no more than predicted; what is kept plain from there on may be above the budget. So nothing of it
runs: the step is undone like one that fails, and looked at from its beginning. That is done only where undoing it puts back all that it has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from memfit.batches import Batch, LossFunction
from memfit.engine.size_watch import PathSizes, SizeWatch
from memfit.step.unrestored import Unrestored
from memfit.values.plan import Plan


class NewPathError(BaseException):
    """Ends a forward at the operation at which it leaves the plan; it never leaves the engine. Models that go on after any `Exception` end all the same."""


class PathWatch:
    """Of one step: ends its forward at a divergence.

    Args:
        model, loss_fn: of the step.
        restored: names of the buffers whose contents are put back when a step is undone.
        sizes: what is known of each path, where values decide sizes.
        several: plans are known for other paths of its shape.

    Attributes:
        left: where and why a forward was ended; None where it was not.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        restored: Iterable[str],
        sizes: Sequence[PathSizes] = (),
        *,
        several: bool = False,
    ) -> None:
        self.left: str | None = None
        self.several = several
        self._sizes = sizes
        self._watched: SizeWatch | None = None
        self._unrestored = Unrestored(model, loss_fn, frozenset(restored))
        self._written = False

    def sizes(self, *, only: bool) -> SizeWatch | None:
        """Told what the next forward makes; None where no values decide sizes.

        Args:
            only: the forward is followed by operation, on the one path there is.
        """
        self._watched = SizeWatch(self._sizes, only=only) if self._sizes else None
        return self._watched

    @property
    def outgrown(self) -> bool:
        """Whether the forward was ended for its sizes, on a path that is known."""
        return self._watched is not None and self._watched.outgrown

    def unplanned_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """An operation of which no plan knows writes into these."""
        self._written = self._written or self._unrestored.writes(tensors)

    def diverged(self, why: str) -> None:
        """A forward differs from the plan here.

        Args:
            why: where and how.

        Raises:
            NewPathError: so that the step can be begun anew; not raised where it has changed what is not put back.
        """
        if not self._written and not self._unrestored.changed():
            self.left = why
            raise NewPathError(why)

    def forward_ended(self) -> None:
        """Forward and loss have run.

        Raises:
            NewPathError: it was ended before, and the model has gone on all the same.
        """
        if self.left is not None:
            raise NewPathError(self.left)


class Learner:
    """Makes plans for what a step does that no plan knows; the base class of what an engine is given."""

    def __call__(self, batch: Batch, known: tuple[Plan, ...]) -> tuple[Plan, ...]:
        """Plans for all paths that are known of a shape by now, the given tuple where the step shows nothing new.

        Args:
            batch: of the step; the model and the generators are as they were when it began.
            known: the plans of its shape, all of which it diverged from.

        Raises:
            CaptureError: the step cannot be captured.
        """
        raise NotImplementedError

    def sizes_of(self, plan: Plan) -> Sequence[PathSizes]:
        """What is known of the sizes on each path under a plan; empty where no values decide any."""
        raise NotImplementedError

    def can_begin_anew(self, plan: Plan) -> bool:
        """Whether a forward, as far as the plan knows, writes into nothing that was there before the step but buffers."""
        raise NotImplementedError
