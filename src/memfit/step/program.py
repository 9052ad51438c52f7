"""The optimizer step memfit trains with: forward, loss, backward, clipping, update, in one place.

The same code is captured on fake tensors, metered plainly and run under a plan, so that a prediction and a measurement speak of the same thing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from memfit.batches import Batch, LossFunction, loss_of
from memfit.choices import PLAIN, Choices
from memfit.errors import NonFiniteLossError

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors an optimizer keeps from step to step; none before its first step."""
    return [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, torch.Tensor)]


@dataclass(slots=True)
class StepProgram:
    """A model with its loss, optimizer and clipping.

    Attributes:
        model: in the mode (train or eval) it is to be trained in.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss; None means `model(**batch).loss`.
        optimizer: None to leave the parameters alone.
        clip_norm: largest global gradient norm; None for no clipping.
        choices: how the step is run, but for its micro-batches, which the caller splits.
    """

    model: torch.nn.Module
    loss_fn: LossFunction | None
    optimizer: torch.optim.Optimizer | None = None
    clip_norm: float | None = None
    choices: Choices = PLAIN

    def forward_backward(
        self,
        batch: Batch,
        weight: float | None = None,
        around_forward: AbstractContextManager[object] | None = None,
        *,
        check_finite: bool = False,
        after_forward: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """One micro-batch: loss and gradients, added to what is in `.grad`.

        Args:
            batch: the micro-batch.
            weight: the micro-batch's share of the loss; None means the whole (no extra operation).
            around_forward: entered for forward and loss only.
            check_finite: raise before backward when the loss is NaN or infinite, so that nothing is changed.
            after_forward: called between forward and backward.

        Returns:
            The unweighted loss, detached.
        """
        with around_forward or nullcontext():
            loss = loss_of(self.model, batch, self.loss_fn)
        if after_forward is not None:
            after_forward()
        if check_finite and not math.isfinite(value := loss.item()):  # .item() allocates nothing
            raise NonFiniteLossError(
                f"the loss is {value}: the step was not taken and parameters and optimizer are as before it. "
                "Look at the batch and the learning rate, or lower the latter"
            )
        if weight is None:
            loss.backward()
        else:
            loss.backward(torch.full_like(loss.detach(), weight))
        return loss.detach()

    def update(self) -> None:
        """Clip the accumulated gradient once, step the optimizer once."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trainable(), self.clip_norm)
        if self.optimizer is not None:
            self.optimizer.step()

    def clear(self) -> None:
        """Let go of the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def trainable(self) -> list[torch.nn.Parameter]:
        """Parameters that receive gradients."""
        return [p for p in self.model.parameters() if p.requires_grad]


def model_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that modules hold as plain attributes, alone or in a list, besides parameters and buffers: there before a step, and counted in it."""
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    found: list[torch.Tensor] = []
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name in {"_parameters", "_buffers", "_modules"}:
                continue
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, torch.Tensor) and id(item) not in known:
                    known.add(id(item))
                    found.append(item)
    return found
