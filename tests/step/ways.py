"""Plans for a step that is run in one given way, and what it takes and gives: the same questions for every technique of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memfit
from memfit.choices import Choices


def planned(
    way: Choices, model: nn.Module, sample: Any, loss_fn: Any, optimizer: Any, budget: int = 1 << 50, **named: Any
) -> memfit.Plan:
    """A plan in which only this way is weighed."""
    names = ("precision", "state_format", "state_place", "update", "loss_chunks", "streamed")
    fixed = {**{name: getattr(way, name) for name in names}, **named.pop("fixed", {})}
    return memfit.plan(model, sample, loss_fn, budget, optimizer, fixed=fixed, **named)


def peak_of(plan: memfit.Plan, model: nn.Module, sample: Any, loss_fn: Any) -> int:
    """Measured bytes of the third step, when all state is there; the model is trained meanwhile."""
    engine = memfit.apply(plan, model, loss_fn)
    for meter in (False, False, True):
        torch.manual_seed(7)
        record = engine.step(sample, meter=meter)
        assert record.departures == ()
    assert record.peak_bytes is not None
    return record.peak_bytes


def trained(plan: memfit.Plan, build: Callable[[], Any], steps: int = 4) -> tuple[list[float], nn.Module]:
    """Losses and the model after a few steps from a new model."""
    model, sample, loss_fn = build()
    engine = memfit.apply(plan, model, loss_fn)
    torch.manual_seed(3)
    return [engine.step(sample).loss for _ in range(steps)], model
