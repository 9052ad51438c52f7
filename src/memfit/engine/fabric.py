"""An engine whose model, optimizer and backward are Lightning Fabric's: `memfit.fit(..., fabric=fabric)`.

Fabric sets both up, moves them to its device and wraps them; the loss is taken of the wrapped model, backward and update go through Fabric. It is asked for
what it is documented to offer, so nothing of Lightning is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch
from memfit.engine.engine import Engine
from memfit.errors import InputError

# Fabric's loop runs forward and backward of one batch after the other, then the update of all.
FIXED: Final[Mapping[str, Any]] = {"streamed": "", "update": "after"}
_SETTING_UP: Final = ("setup", "backward", "to_device", "strategy", "world_size")


def refuse(fabric: Any, model: nn.Module, allow: Sequence[str], fixed: Mapping[str, Any] | None) -> None:
    """Refuse settings that are incompatible with a plan.

    Raises:
        InputError: there is one; the message says which, why, and what to do.
    """
    if not all(hasattr(fabric, name) for name in _SETTING_UP):
        raise InputError(
            f"fabric={type(fabric).__name__}(...): a lightning.Fabric is needed (pip install 'memfit[lightning]')"
        )
    if type(model).__name__ == "_FabricModule":
        raise InputError(
            "this model has been set up by Fabric already: give the model itself, fit() sets it up with the optimizer the plan is for"
        )
    if fabric.world_size > 1:
        raise InputError(
            f"Fabric's strategy is {type(fabric.strategy).__name__} on {fabric.world_size} devices, and fabric= is for one: after fabric.launch() leave it out "
            f"and call memfit.fit(..., devices={fabric.world_size}) on every rank, in the group that Fabric has made; fabric.setup_dataloaders deals out the "
            "data as ever"
        )
    if type(fabric.strategy).__name__ != "SingleDeviceStrategy":
        raise InputError(
            f"Fabric's strategy is {type(fabric.strategy).__name__}: on one device a plan is for strategy='auto'"
        )
    precision = str(fabric.strategy.precision.precision)
    if precision != "32-true":
        raise InputError(
            f"Fabric's precision is {precision!r}: memfit runs forward and loss in the precision that the plan says, and two would be one inside the other. "
            "Take Fabric(precision='32-true') with fit(..., allow=[\"bf16\"])"
        )
    for name in ("fp16", "in_backward"):
        if name in allow or name in (fixed or {}).values():
            raise InputError(
                f"{name!r} runs backward or the update otherwise than Fabric does: leave it out, or leave fabric= out"
            )
    for name in FIXED:
        if (fixed or {}).get(name, FIXED[name]) != FIXED[name]:
            raise InputError(
                f"fixed={dict(fixed or {})!r}: {name!r} brings an order of its own for backward and update, and with fabric= both are Fabric's"
            )


def set_up(engine: Engine, fabric: Any) -> None:
    """Let Fabric set up the engine's model and optimizer, and step through them from now on."""
    module: Any
    if engine.optimizer is None:
        module = fabric.setup(engine.model)
    else:
        module, engine.optimizer = fabric.setup(engine.model, engine.optimizer)
    own_loss = engine.loss_fn

    def loss_fn(_: nn.Module, batch: Batch) -> torch.Tensor:
        return batches.loss_of(module, batch, own_loss)

    engine.loss_fn = loss_fn
    engine.backward_by = lambda loss, gradient: (
        fabric.backward(loss, gradient) if gradient is not None else fabric.backward(loss)
    )
    engine.fabric_model = module
