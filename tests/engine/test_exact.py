"""Same numbers, true predictions: every model, from plain down to the smallest budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfit
from memfit import batches
from models import CASES, Case

FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the way from the smallest plan to plain


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def plans_of(case: Case) -> tuple[Any, Any, Any, list[memfit.Plan]]:
    model, sample, loss_fn = case.build()
    plain = memfit.plan(model, sample, loss_fn, 1 << 50, adamw, fixed={"micro_batches": 1})
    search = plain.runtime.search
    largest, smallest = search.plain_peak(), search.smallest()[0]
    plans = []
    for fraction in FRACTIONS:
        budget = round(smallest + (largest - smallest) * fraction)
        made = search.plan(budget)
        assert made.prediction.peak_bytes <= budget
        plans.append(made)
    return model, sample, loss_fn, plans


def gradients(model: torch.nn.Module, sample: Any, loss_fn: Any, engine: Any = None) -> tuple[Any, ...]:
    """Loss, gradients and buffers of one forward and backward; buffers are put back."""
    before = [b.clone() for b in model.buffers()]
    torch.manual_seed(7)
    departure = None
    if engine is None:
        loss = batches.loss_of(model, sample, loss_fn)
    else:
        with engine.forward() as follower:
            loss = batches.loss_of(model, sample, loss_fn)
        departure = follower.departure if follower is not None else None
    loss.backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    after = [b.clone() for b in model.buffers()]
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    return loss.detach().clone(), found, after, departure


def same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


# Known shortfall: where backward scatters into fresh zeros (masked assignment, gathers of a router), some plans are predicted 1 to 3 % too high: one
# storage is booked longer than it lives. Numbers are checked there as everywhere.
TOO_HIGH = {"nonzero_model", "moe_like"}


@pytest.mark.parametrize("case", [c for c in CASES if not c.slow], ids=lambda c: c.name)
def test_every_budget_gives_plain_numbers_and_the_predicted_peak(case: Case) -> None:
    model, sample, loss_fn, plans = plans_of(case)
    gradients(model, sample, loss_fn)  # what a model builds once is built here
    reference = gradients(model, sample, loss_fn)
    # The generator is where the reference run found it in every run, so models that branch on values take the same branch.
    for made in plans:
        engine = memfit.apply(made, model, loss_fn, None)
        loss, found, buffers, departure = gradients(model, sample, loss_fn, engine)
        budget = made.budget_bytes
        assert departure is None, (budget, departure)
        assert torch.equal(loss, reference[0]), budget
        assert all(same(a, b) for a, b in zip(found, reference[1], strict=True)), budget
        assert all(same(a, b) for a, b in zip(buffers, reference[2], strict=True)), budget
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for made in plans:
        model.load_state_dict(state)
        engine = memfit.apply(made, model, loss_fn, adamw)
        torch.manual_seed(7)
        engine.step(sample)
        model.load_state_dict(state)
        torch.manual_seed(7)
        record = engine.step(sample, meter=True)
        predicted = made.prediction.peak_bytes
        assert record.departures == ()
        if case.name in TOO_HIGH and predicted > record.peak_bytes * 1.005:
            pytest.xfail(f"predicted {predicted}, measured {record.peak_bytes}")
        assert record.peak_bytes == pytest.approx(predicted, rel=0.005), made.prediction.peak_operation
        # torch.utils.checkpoint allocates generator states where no dispatcher sees them; `fit` finds out in its rehearsal.
        unseen = 16384 if case.name == "checkpointed" else 0
        assert record.peak_bytes <= made.budget_bytes + unseen, (record.peak_bytes, made.budget_bytes)


@pytest.mark.parametrize("case", [c for c in CASES if c.splits and not c.slow], ids=lambda c: c.name)
def test_micro_batches_add_up_to_the_whole_batch(case: Case) -> None:
    model, sample, loss_fn = case.build()
    for module in model.modules():  # parts draw other dropout masks than the whole; everything else must agree
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(module, torch.nn.RNNBase):
            module.dropout = 0.0
    model.eval() if case.name.startswith(("bert", "t5")) else None
    made = memfit.plan(model, sample, loss_fn, 1 << 50, adamw, fixed={"micro_batches": 3})
    whole = gradients(model, sample, loss_fn)
    engine = memfit.apply(made, model, loss_fn, None)
    parts = engine._parts(made, sample)
    assert len(parts) == 3
    shares = batches.shares(parts, made.choices.weights)
    assert shares is not None
    pieces = [gradients(model, part, loss_fn)[1] for part in parts]
    norm = difference = 0.0
    for index, gradient in enumerate(whole[1]):
        if gradient is None:
            continue
        added = sum(s * p[index].double() for s, p in zip(shares, pieces, strict=True))
        norm += float(gradient.double().pow(2).sum())
        difference += float((gradient.double() - added).pow(2).sum())
    low_precision = "bf16" in case.name or "amp" in case.name
    assert (difference / norm) ** 0.5 < (3e-2 if low_precision else 1e-5)
