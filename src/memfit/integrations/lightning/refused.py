"""What a Lightning Trainer may not be set to do beside a budget, each with its reason: refused before anything is planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule

from memfit.errors import InputError
from memfit.integrations.ranks import ranks_here
from memfit.step.given import check_model

# Of Lightning's: what they do by themselves is ZeRO 3, unless told otherwise.
ZERO3: Final = ("FSDPStrategy", "ModelParallelStrategy")
PRECISIONS: Final = ("32-true", "bf16-true", "bf16-mixed")


def refuse(trainer: Any, module: Any) -> None:
    """Refuse settings that are incompatible with a plan.

    Raises:
        InputError: there is one; the message says which, why, and what to do.
    """
    check_model(module)
    if not module.automatic_optimization:
        raise InputError(
            "automatic_optimization=False: in manual optimization training_step runs backward and the update itself, as often as it likes, so there is no "
            "step to plan for: use automatic optimization, or memfit.fit(..., fabric=fabric) in a loop of your own"
        )
    accumulates = trainer.world_size > 1 and trainer.accumulate_grad_batches > 1
    if accumulates and type(module).optimizer_zero_grad is not LightningModule.optimizer_zero_grad:
        raise InputError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} on {trainer.world_size} ranks, and the module has an optimizer_zero_grad of its own: "
            "gradients lie in what is sent to the other ranks and are zeroed there before each step, and the method would free them: leave it out"
        )
    precision = str(trainer.precision)
    if precision not in PRECISIONS:
        raise InputError(
            f"precision={precision!r} is not planned for: scaled gradients, skipped steps, 64 bits and other people's kernels are not in the prediction; there"
            f" is {', '.join(PRECISIONS)}"
        )
    if type(trainer.optimizers[0] if trainer.optimizers else None).__name__ == "_MockOptimizer":
        raise InputError("configure_optimizers returned None, so nothing would be trained: let it return an optimizer")
    if len(trainer.optimizers) != 1 or isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        raise InputError(
            "one optimizer that runs forward and backward once in a step is needed: with several, or one that searches along a line (LBFGS), steps differ"
        )
    if any(type(each).__name__ == "GradientAccumulationScheduler" for each in trainer.callbacks):
        raise InputError(
            "GradientAccumulationScheduler changes in training how many batches a step takes, and the plan is for one number: give accumulate_grad_batches"
        )


def refuse_strategy(trainer: Any) -> None:
    """Refuse strategies that share the step out themselves, or leave it to no process of its own.

    Raises:
        InputError: it is one.
    """
    name, ranks = type(trainer.strategy).__name__, trainer.world_size
    if name == "SingleDeviceStrategy" or (name == "DDPStrategy" and ranks > 1 and ranks_here() == ranks):
        return
    if name == "DDPStrategy":
        raise InputError(
            f"the strategy is DDPStrategy on {ranks} device{'s' if ranks > 1 else ''}: on one device take strategy='auto'; several are as many processes "
            "(devices=2, or torchrun)"
        )
    way = ', FitToMemory(..., fixed={"sharding": "zero3"})' if name in ZERO3 else ""
    raise InputError(
        f"the strategy is {name} on {ranks} device{'s' if ranks > 1 else ''}, which shares the step out itself, so that no plan could choose: take "
        f"strategy='ddp'{way}, by which Lightning starts the ranks and memfit shares the step out (data parallel or ZeRO 1 to 3), or strategy='auto' for one "
        "device"
    )


def why_not_divided(module: Any, output: Any = None) -> str:
    """Why a batch of this module is left whole; "" where it can be divided.

    Args:
        module: that is trained.
        output: of its `training_step`, once there is one.
    """
    if type(module).optimizer_zero_grad is not LightningModule.optimizer_zero_grad:
        return "the module has an optimizer_zero_grad of its own, which runs between a batch's parts and would clear what they have added"
    more = sorted(set(output) - {"loss"}) if isinstance(output, Mapping) else []
    if more:
        return f"training_step returns {', '.join(map(repr, more))} besides the loss, and how that of the parts makes that of the batch is not known"
    return ""
