"""One row: a plain step under some arrangement of others, or a step under a plan; peak by the allocator, seconds by the clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu.setting import Setting, adamw
from torch import nn

import memfit
from memfit import batches
from memfit.meter import metered
from memfit.step.program import StepProgram, state_tensors


def room_below(setting: Setting) -> str | None:
    """The budget for the tier below: a GPU's host as much as it takes; a disk has to be asked for."""
    return None if setting.device.type == "cuda" else "1GiB"


def planned_row(setting: Setting, made: memfit.Plan, model: nn.Module, sample: Any) -> dict[str, Any]:
    """Peak and seconds of a step under a plan of this process."""
    setting.fresh()
    engine = memfit.apply(made, model)
    engine.step(sample)
    engine.step(sample)
    record = engine.step(sample, meter=True)
    row = {
        "budget_bytes": made.budget_bytes,
        "predicted_bytes": made.prediction.peak_bytes,
        "predicted_seconds": made.prediction.step_seconds,
        "allocated_bytes": record.peak_bytes,
        "divergences": list(record.divergences),
        "seconds": setting.timed(partial(engine.step, sample), 5),
        "streamed": made.choices.streamed,
        "state_place": made.choices.state_place,
    }
    if engine.stream is not None:
        engine.stream.close()  # the model is whole again for the next plan
    return row


def whole_step(program: StepProgram, sample: Any) -> Callable[[], None]:
    """Forward, backward, update and clearing of gradients, as the engine's own baseline does them."""

    def step() -> None:
        program.forward_backward(sample)
        program.update()
        program.clear()

    return step


def plainly(model: nn.Module, loss_fn: Any, batch: Any) -> Callable[[], float]:
    """A step of plain PyTorch with AdamW, which gives its loss."""
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)

    def step() -> float:
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measured_step(
    setting: Setting,
    step: Callable[[], object],
    model: nn.Module,
    sample: Any,
    optimizer: torch.optim.Optimizer,
    repeats: int = 5,
) -> dict[str, Any]:
    """Peak, reserve and seconds of a step of plain PyTorch, once the optimizer's state is there."""
    step()
    step()
    setting.fresh()
    present = [*model.parameters(), *model.buffers(), *batches.leaves(sample), *state_tensors(optimizer)]
    with metered(present, setting.device) as reading:
        step()
    return {
        "allocated_bytes": reading.peak_bytes,
        "reserved_bytes": reading.reserved_bytes,
        "seconds": setting.timed(step, repeats),
    }


def plain_row(
    setting: Setting, model: nn.Module, sample: Any, arrange: Any, repeats: int = 5, make: Any = None
) -> dict[str, Any]:
    """Peak and seconds of a plain step under some arrangement of others, with AdamW or what `make` makes; seconds of the update alone for the latter."""
    optimizer = (make or adamw)(model.parameters())

    def step() -> None:
        with arrange():
            loss = model(**sample).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    row = measured_step(setting, step, model, sample, optimizer, repeats)
    if make is not None:
        model(**sample).loss.backward()
        row["update_seconds"] = setting.timed(optimizer.step, repeats)
    return row
