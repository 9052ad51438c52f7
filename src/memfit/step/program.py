"""The optimizer step memfit trains with: forward, loss, backward, unscaling, clipping, update, in one place.

The same code is captured on fake tensors, metered in plain PyTorch and run under a plan, so that prediction and measurement are of the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from memfit.batches import Batch, LossFunction, loss_of
from memfit.errors import InputError, NonFiniteLossError
from memfit.sharding.sharded import ShardedModel
from memfit.step.device import device_of
from memfit.step.held_tensors import loss_tensors, tensors_within
from memfit.step.loss_value import LossValue
from memfit.step.modules import forget_modules, let_go_of_gradients
from memfit.techniques.autocast.precision import Scaling
from memfit.techniques.choices import BASELINE, Choices, regions
from memfit.techniques.freezing.freeze import unforced
from memfit.techniques.update_in_backward import updating as in_backward

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
LossBy = Callable[[Callable[[], torch.Tensor]], torch.Tensor]


def default_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with torch's defaults, fused: one kernel, no transient copies."""
    return torch.optim.AdamW(parameters, fused=True)


def own_optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The one that has this rank's state: ZeroRedundancyOptimizer steps one of its own."""
    own: torch.optim.Optimizer | None = getattr(optimizer, "optim", optimizer)
    return own


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors an optimizer keeps from step to step, those in containers and objects of its state too (Shampoo's); none before its first step."""
    own = own_optimizer(optimizer)
    assert own is not None
    return tensors_within(own.state.values())


def held_by_optimizer(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its state; what lies in attributes of a user's own class (weights to go back to, the state of optimizers that it steps); and what its hooks hold."""
    own = own_optimizer(optimizer)
    attributes = [] if type(own).__module__.startswith("memfit.") else tensors_within([vars(own)])
    return [*state_tensors(optimizer), *attributes, *(t for hook in hooks_of(own) for t in loss_tensors(hook))]


def hooks_of(optimizer: torch.optim.Optimizer | None) -> list[Callable[..., Any]]:
    """What of the user's runs before and after each update: averages of weights, schedules, counts."""
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = (hook for kind in kinds for hook in getattr(optimizer, kind, {}).values())
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("memfit.")]


@dataclass(slots=True)
class StepProgram:
    """A model with its loss, optimizer and clipping.

    Attributes:
        model: in the mode (train or eval) it is to be trained in.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss; None means `model(**batch).loss`.
        optimizer: None to leave the parameters alone.
        clip_norm: largest global gradient norm; None for no clipping.
        choices: how the step is run, but for its micro-batches, which the caller splits, and what it freezes, which is frozen in the model.
        scaling: of the gradients; needed where `choices` say fp16 and there is an optimizer.
        backward: called with the loss and the gradient it begins with (None for one) in place of the loss's own backward.
        sharded: the model as one of several ranks has it; None on one device.
        loss_by: called with what gives the loss of a micro-batch, in place of calling that; None to call it.
    """

    model: torch.nn.Module
    loss_fn: LossFunction | None
    optimizer: torch.optim.Optimizer | None = None
    clip_norm: float | None = None
    choices: Choices = BASELINE
    scaling: Scaling | None = None
    backward: Callable[[torch.Tensor, torch.Tensor | None], object] = torch.Tensor.backward
    sharded: ShardedModel | None = None
    loss_by: LossBy | None = None

    @contextmanager
    def as_chosen(self) -> Iterator[None]:
        """Forward and loss of one micro-batch run inside: autocast, the loss head in chunks, no gradients forced through what is frozen."""
        with unforced(self.model, self.choices.unforced), regions(self.choices, self.model, device_of(self.model).type):
            yield

    def loss(self, batch: Batch) -> torch.Tensor:
        """The scalar loss of a micro-batch, as `choices` say it is computed."""
        with self.as_chosen():
            forget_modules()
            if self.loss_by is not None:
                return self.loss_by(lambda: loss_of(self.model, batch, self.loss_fn))
            return loss_of(self.model, batch, self.loss_fn)

    def forward_backward(
        self,
        batch: Batch,
        weight: float | None = None,
        around_forward: AbstractContextManager[object] | None = None,
        *,
        check_finite: bool = False,
        after_forward: Callable[[], None] | None = None,
        around_backward: AbstractContextManager[object] | None = None,
        last: bool = True,
        value: LossValue | None = None,
    ) -> torch.Tensor:
        """One micro-batch: loss and gradients, added to what is in `.grad`.

        Args:
            batch: the micro-batch.
            weight: the micro-batch's share of the loss; None means the whole (no extra operation).
            around_forward: entered for forward and loss only.
            check_finite: raise when the loss is NaN or infinite, before any parameter is changed: before backward, or on a GPU that would have to be waited
                for then, after it. Not on one of several ranks, which agree upon it after the last backward.
            after_forward: called between forward and backward.
            around_backward: entered for backward only; of the last micro-batch it is `updating()` where the step updates inside backward.
            last: of the step; in its backward gradients are synchronised with other ranks.
            value: takes the loss.

        Returns:
            The unweighted loss, detached.
        """
        with nullcontext() if self.sharded is None else self.sharded.micro_batch(last=last):
            loss = self._forward_backward(
                batch, weight, around_forward, check_finite, after_forward, around_backward, last, value
            )
        if self.sharded is not None and last:
            self.sharded.collect(agrees=True)
        return loss

    def _forward_backward(
        self,
        batch: Batch,
        weight: float | None,
        around_forward: AbstractContextManager[object] | None,
        check_finite: bool,  # noqa: FBT001 - passed on
        after_forward: Callable[[], None] | None,
        around_backward: AbstractContextManager[object] | None,
        last: bool,  # noqa: FBT001 - as above
        value: LossValue | None,
    ) -> torch.Tensor:
        with nullcontext() if self.sharded is None else self.sharded.forward(last=last):
            with around_forward or nullcontext():
                loss = self.loss(batch)
            if after_forward is not None:
                after_forward()
        value = LossValue() if value is None and check_finite else value
        if value is not None:
            value.take(loss)
        first = value is not None and (value.here or around_backward is not None)  # an update inside it is not undone
        if check_finite and first:
            _check_finite(value)
        scaled = loss if self.scaling is None else self.scaling.scaler.scale(loss)
        with around_backward or nullcontext(), _graph_gone():
            self.backward(scaled, None if weight is None else torch.full_like(scaled.detach(), weight))
        if check_finite and not first:
            _check_finite(value)
        return loss.detach()

    @property
    def updates_in_backward(self) -> bool:
        """Whether parameters are updated inside the backward of the last micro-batch."""
        return self.choices.update == "in_backward" and self.optimizer is not None

    def updating(self, around: in_backward.Around = nullcontext) -> AbstractContextManager[object]:
        """For the backward of the last micro-batch, when the step updates inside it; `around` as for `in_backward.updating`."""
        assert self.optimizer is not None
        return in_backward.updating(self.optimizer, around)

    def update(self) -> bool:
        """Unscale and clip the accumulated gradient once, step the optimizer once.

        After an update inside backward few gradients are left, if any (of what only earlier micro-batches used); the optimizer's hooks run here either way.

        Returns:
            Whether the step was taken; it is skipped where scaled gradients overflowed.
        """
        self.unscale()
        self.clip()
        if self.optimizer is None:
            return True
        if self.scaling is not None and self._has_gradients():
            return self.scaling.step(self.optimizer)
        self.optimizer.step()
        return True

    def unscale(self) -> None:
        """Undo the scaling of the gradients, where there is one."""
        if self.scaling is not None and self.optimizer is not None and self._has_gradients():
            self.scaling.unscale(self.optimizer)

    def clip(self) -> None:
        """Clip the global norm of the gradient."""
        if self.clip_norm is None:
            return
        if self.sharded is not None:
            self.sharded.clip(self.clip_norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.trainable(), self.clip_norm)

    def _has_gradients(self) -> bool:
        # Where every label of a batch is masked there are none, and the scaler takes that for a mistake.
        return any(p.grad is not None for p in self.trainable())

    def clear(self) -> None:
        """Let go of the gradients."""
        if self.sharded is not None:
            self.sharded.clear(accumulates=self.choices.micro_batches > 1)
            return
        let_go_of_gradients(self.model)

    def trainable(self) -> list[torch.nn.Parameter]:
        """Parameters that receive gradients; of a sharded model this rank's."""
        if self.sharded is not None:
            return self.sharded.trainable()
        return [p for p in self.model.parameters() if p.requires_grad]


@contextmanager
def _graph_gone() -> Iterator[None]:
    """What torch says of a graph that was gone through before advises `retain_graph=True`, which no loop means that comes to this."""
    try:
        yield
    except RuntimeError as error:
        if "through the graph a second time" not in str(error):
            raise
        raise InputError(
            "backward came to a part of the graph that is gone: loss_fn returns the loss and leaves backward to memfit, and what the model keeps from "
            "one step to the next (a hidden state) is detached, state = state.detach()"
        ) from error


def _check_finite(loss: LossValue | None) -> None:
    assert loss is not None
    if not math.isfinite(loss.read()):
        raise non_finite(f"the loss is {loss.read()}")


def non_finite(what: str) -> NonFiniteLossError:
    """The error of a step that is not taken.

    Args:
        what: whose loss is what.
    """
    return NonFiniteLossError(
        f"{what}: the step was not taken and parameters and optimizer are as before it. "
        "Look at the batch and the learning rate, or lower the latter"
    )
