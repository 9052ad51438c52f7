"""Recomputation in the words of PaddlePaddle's static graphs: wrap an optimizer, name the checkpoints, minimise.

    optimizer = RecomputeOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    optimizer._set_checkpoints(["encoder.layer.*"])
    for batch in loader:
        optimizer.minimize(Loss(model, batch, loss_fn))

In Paddle a loss is a variable of a program that has not run yet, so `minimize` can still add what recomputes. A loss tensor of PyTorch has run, and
all that its backward reads is held already. Hence `Loss`: the loss as it will be computed. Checkpoints are the variables that are kept in Paddle; here they
are modules, whose outputs are kept. The first `minimize` makes the plan (`memfit.recompute`), the engine that follows it is the one of all other plans.

Where this differs: Paddle runs a whole segment again, dead operations included; what is run again here is what backward reads, and that takes.

Source: `paddle.incubate.optimizer.RecomputeOptimizer`, before `fluid.optimizer.RecomputeOptimizer`:
https://www.paddlepaddle.org.cn/documentation/docs/en/api/paddle/incubate/optimizer/RecomputeOptimizer_en.html
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit import api
from memfit.batches import Batch, LossFunction, loss_of
from memfit.engine.engine import Engine
from memfit.errors import InputError
from memfit.optimizers.alike import alike
from memfit.values.plan import Plan
from memfit.values.report import StepRecord


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss that has not been computed yet.

    Attributes:
        model: any module.
        batch: of one optimizer step; the first is the largest that comes.
        loss_fn: `loss_fn(model, batch)`; None means `model(**batch).loss`.
    """

    model: nn.Module
    batch: Batch
    loss_fn: LossFunction | None = None


class RecomputeOptimizer:
    """An optimizer whose `minimize` recomputes between checkpoints.

    Args:
        optimizer: over the parameters of the model that is to be trained.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"RecomputeOptimizer wraps an optimizer of torch, this is {_kind(optimizer)}")
        self.inner = optimizer
        self._checkpoints: tuple[str | nn.Module, ...] = ()
        self._engine: Engine | None = None

    @property
    def plan(self) -> Plan | None:
        """What is followed, with its prediction; None before the first `minimize` or `backward`."""
        return None if self._engine is None else self._engine.plan

    def _set_checkpoints(self, checkpoints: Sequence[str | nn.Module]) -> None:
        """Say whose outputs are kept, from the next `minimize` on.

        The name begins with an underscore because Paddle's does.

        Args:
            checkpoints: modules, or patterns of their paths as for `memfit.recompute(keep=...)`.

        Raises:
            InputError: something else, or nothing.
        """
        if isinstance(checkpoints, str) or not isinstance(checkpoints, Sequence) or not checkpoints:
            raise InputError(
                f'_set_checkpoints({checkpoints!r}): a list of modules or of their paths is needed, such as ["encoder.layer.*"]'
            )
        for each in checkpoints:
            if not isinstance(each, (str, nn.Module)):
                raise InputError(
                    f"a checkpoint is a module or its path, this is {_kind(each)}: a tensor has been computed already: name the module that makes it"
                )
        self._checkpoints = tuple(checkpoints)
        self._engine = None

    def minimize(self, loss: Loss) -> StepRecord:
        """One optimizer step: forward, backward with recomputation, update. Gradients are gone after it.

        Raises:
            InputError: no checkpoints are set; the loss has been computed already; a checkpoint is not in the model.
            BatchError, NonFiniteLossError, EngineError: as for `Engine.step`.
        """
        return self._engine_for(loss).step(loss.batch)

    def backward(self, loss: Loss) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Forward and backward of a step alone; gradients from before are freed first, as a program has none.

        Returns:
            Parameters with their gradients, as Paddle's `params_grads`.

        Raises:
            InputError: as for `minimize`.
        """
        engine = self._engine_for(loss)
        self.inner.zero_grad(set_to_none=True)
        with engine.forward():
            computed = loss_of(loss.model, loss.batch, loss.loss_fn)
        computed.backward()
        return [(p, p.grad) for group in self.inner.param_groups for p in group["params"] if p.grad is not None]

    def apply_gradients(self, params_grads: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """The update of a step alone, from what `backward` gave, perhaps clipped since."""
        for parameter, gradient in params_grads:
            parameter.grad = gradient
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)

    def load(self, _state: Any) -> None:
        """Not in Paddle either: the state is that of the optimizer inside."""
        raise InputError(
            "RecomputeOptimizer has no state of its own: load into the optimizer that it wraps, optimizer.load_state_dict(...)"
        )

    def _enable_offload(self) -> None:
        """Refused. In Paddle this offloads the checkpoints to host memory; here a searched plan decides what is offloaded."""
        raise InputError(
            "checkpoints placed by hand are not offloaded: memfit.fit(model, sample, loss_fn, budget, host_budget=...) chooses what is recomputed and "
            "what is offloaded"
        )

    def _engine_for(self, loss: Loss) -> Engine:
        if not isinstance(loss, Loss):
            how = (
                "it has been computed, so all that its backward reads is held already"
                if isinstance(loss, torch.Tensor)
                else f"this is {_kind(loss)}"
            )
            raise InputError(
                f"minimize needs the loss as it will be computed, Loss(model, batch, loss_fn), as a variable is in Paddle: {how}"
            )
        if not self._checkpoints:
            raise InputError('no checkpoints are set: call _set_checkpoints(["encoder.layer.*"]) before minimize')
        if self._engine is None or self._engine.model is not loss.model:
            made = api.recompute(
                loss.model,
                loss.batch,
                loss.loss_fn,
                alike(self.inner, loss.model),
                keep=[_path(each, loss.model) for each in self._checkpoints],
            )
            self._engine = api.apply(made, loss.model, optimizer=self.inner)
        return self._engine


def _path(checkpoint: str | nn.Module, model: nn.Module) -> str:
    if isinstance(checkpoint, str):
        return checkpoint
    found: str | None = next((path for path, module in model.named_modules() if module is checkpoint), None)
    if not found:
        what = "the model itself" if found == "" else f"a {type(checkpoint).__name__} that the model does not hold"
        raise InputError(f"a checkpoint is {what}: name modules inside the model whose outputs are kept")
    return found


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
