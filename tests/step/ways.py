"""Plans for a step that is run in one given way, and what it takes and gives: the same questions for every technique of this folder, and for the zoo."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import memfit
from memfit import batches
from memfit.step.arranging import arranged
from memfit.techniques.autocast.precision import FORMATS
from memfit.techniques.choices import Choices
from memfit.techniques.chunked_loss.head import chunked_head
from memfit.techniques.freezing.freeze import freeze


def planned(
    way: Choices, model: nn.Module, sample: Any, loss_fn: Any, optimizer: Any, budget: int = 1 << 50, **named: Any
) -> memfit.Plan:
    """A plan in which only this way is weighed."""
    names = ("precision", "state_format", "state_place", "update", "loss_chunks", "streamed")
    fixed = {**{name: getattr(way, name) for name in names}, **named.pop("fixed", {})}
    return memfit.plan(model, sample, loss_fn, budget, optimizer, fixed=fixed, **named)


def peak_of(plan: memfit.Plan, model: nn.Module, sample: Any, loss_fn: Any, *, seed: int = 7) -> int:
    """Measured bytes of the third step, when all state is there; the model is trained meanwhile."""
    engine = memfit.apply(plan, model, loss_fn)
    for meter in (False, False, True):
        torch.manual_seed(seed)
        record = engine.step(sample, meter=meter)
        assert record.divergences == ()
    assert record.peak_bytes is not None
    return record.peak_bytes


def run(plan: memfit.Plan, build: Callable[[], Any], steps: int = 4) -> memfit.Engine:
    """An engine that has trained a new model for a few steps."""
    model, sample, loss_fn = build()
    engine = memfit.apply(plan, model, loss_fn)
    torch.manual_seed(3)
    for _ in range(steps):
        engine.step(sample)
    return engine


def trained(plan: memfit.Plan, build: Callable[[], Any], steps: int = 4) -> tuple[list[float], nn.Module]:
    """Losses and the model after a few steps from a new model."""
    engine = run(plan, build, steps)
    return [record.loss for record in engine.records], engine.model


def plainly(way: Choices, build: Callable[[], Any], optimizer: Any, steps: int = 4) -> tuple[list[float], nn.Module]:
    """The same from a loop of plain PyTorch, with what changes numbers done as it would be there: parts frozen, torch's autocast, the 8-bit optimizer.

    What only moves bytes (state on the disk, updates inside backward, streamed layers) is left out: it changes no number. A loss head in chunks is none of
    PyTorch's, so it is memfit's own here, without an engine.
    """
    model, sample, loss_fn = build()
    freeze(model, way.frozen)
    stepper = arranged(
        optimizer(p for p in model.parameters() if p.requires_grad), Choices(state_format=way.state_format), model
    )
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        precise = nullcontext() if way.precision == "full" else torch.autocast("cpu", FORMATS[way.precision])
        with precise, chunked_head(model, way.loss_chunks):
            loss = batches.loss_of(model, sample, loss_fn)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(float(loss))
    return losses, model
