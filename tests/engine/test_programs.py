"""Random programs of tensor operations: the same numbers at every budget, and the predicted peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import memfit
from memfit import batches
from models.programs import programs


def numbers(model: torch.nn.Module, sample: Any, loss_fn: Any, engine: Any = None) -> list[torch.Tensor | None]:
    """Loss, gradients and buffers of one forward and backward; buffers are put back."""
    before = [b.clone() for b in model.buffers()]
    torch.manual_seed(3)
    if engine is None:
        loss = batches.loss_of(model, sample, loss_fn)
    else:
        with engine.forward() as follower:
            loss = batches.loss_of(model, sample, loss_fn)
        assert follower is None or follower.departure is None
    loss.backward()
    found = [loss.detach().clone(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
    found += [b.clone() for b in model.buffers()]
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    return found


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_any_program_gives_plain_numbers_at_every_budget(program: Any) -> None:
    model, sample, loss_fn = program
    plain = memfit.plan(model, sample, loss_fn, 1 << 40, None, fixed={"micro_batches": 1})
    search = plain.runtime.search
    largest, smallest = search.plain_peak(), search.smallest()[0]
    reference = numbers(model, sample, loss_fn)
    for share in (0.6, 0.0):
        made = search.plan(round(smallest + (largest - smallest) * share))
        found = numbers(model, sample, loss_fn, memfit.apply(made, model, loss_fn, None))
        for a, b in zip(reference, found, strict=True):
            assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
