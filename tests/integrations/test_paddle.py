"""Wrap an optimizer, name checkpoints, minimise: the same numbers as plain PyTorch, the bytes as predicted."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import batches
from memfit.integrations.paddle import Loss, RecomputeOptimizer
from memfit.meter import metered
from models import build_gpt
from small import rows

pytestmark = pytest.mark.usefixtures("one_thread")


def gpt() -> Any:
    return build_gpt(layers=4, hidden=32, heads=2, batch=4, tokens=32, vocab=64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Mlp(nn.Module):
    """The example of the articles: two layers, cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(32, 10)
        self.pred = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pred(torch.relu(self.fc_1(x)))


def test_three_steps_are_as_plain_ones_and_hold_what_was_predicted() -> None:
    model, sample, loss_fn = gpt()
    plain = deepcopy(model)
    optimizer = RecomputeOptimizer(sgd(model))
    optimizer._set_checkpoints(["blocks.*"])
    reference = sgd(plain)
    losses, expected = [], []
    for _ in range(3):
        losses.append(optimizer.minimize(Loss(model, sample, loss_fn)).loss)
        loss = loss_fn(plain, sample)
        loss.backward()
        reference.step()
        reference.zero_grad()
        expected.append(loss.item())
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert optimizer.plan is not None
    assert optimizer.plan.script.recomputations > 0
    engine = optimizer._engine
    assert engine is not None
    record = engine.step(sample, meter=True)
    assert record.peak_bytes == pytest.approx(optimizer.plan.prediction.peak_bytes, rel=0.01)
    assert optimizer.plan.prediction.peak_bytes < optimizer.plan.prediction.plain_peak_bytes


def test_modules_may_be_named_by_themselves() -> None:
    model = Mlp()
    batch = (torch.rand(16, 32), torch.randint(0, 10, (16,)))
    optimizer = RecomputeOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    optimizer._set_checkpoints([model.fc_1, model.pred])
    before = [p.clone() for p in model.parameters()]
    optimizer.minimize(Loss(model, batch, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])))
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_backward_and_update_may_be_called_one_by_one() -> None:
    model, sample, loss_fn = gpt()
    plain = deepcopy(model)
    optimizer = RecomputeOptimizer(sgd(model))
    optimizer._set_checkpoints(["blocks.*"])
    reference = sgd(plain)
    for _ in range(2):
        gradients = optimizer.backward(Loss(model, sample, loss_fn))
        for _, gradient in gradients:
            gradient.clamp_(-0.01, 0.01)
        optimizer.apply_gradients(gradients)
        loss_fn(plain, sample).backward()
        for p in plain.parameters():
            p.grad.clamp_(-0.01, 0.01)
        reference.step()
        reference.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_less_is_held_than_by_a_plain_step() -> None:
    model, sample, loss_fn = gpt()
    optimizer = RecomputeOptimizer(sgd(model))
    optimizer._set_checkpoints(["blocks.*"])
    optimizer.minimize(Loss(model, sample, loss_fn))

    def peak(step: Any) -> int:
        held = [*model.parameters(), *(t for s in optimizer.inner.state.values() for t in s.values()), sample]
        with metered(batches.leaves(held), torch.device("cpu")) as reading:
            step()
        return reading.peak_bytes

    with_checkpoints = peak(lambda: optimizer.backward(Loss(model, sample, loss_fn)))
    optimizer.inner.zero_grad()
    assert with_checkpoints < peak(lambda: loss_fn(model, sample).backward())


def test_what_cannot_be_meant_is_said() -> None:
    model, batch = Mlp(), rows(4)
    optimizer = RecomputeOptimizer(sgd(model))
    loss = Loss(model, batch, lambda m, b: m(b[0]).pow(2).mean())
    with pytest.raises(memfit.InputError, match="no checkpoints are set"):
        optimizer.minimize(loss)
    with pytest.raises(memfit.InputError, match="a list of modules or of their paths"):
        optimizer._set_checkpoints("fc_1")
    with pytest.raises(memfit.InputError, match="name the module that makes it"):
        optimizer._set_checkpoints([torch.zeros(1)])  # type: ignore[list-item]
    optimizer._set_checkpoints([nn.Linear(2, 2)])
    with pytest.raises(memfit.InputError, match="that the model does not hold"):
        optimizer.minimize(loss)
    optimizer._set_checkpoints(["fc_7"])
    with pytest.raises(memfit.InputError, match="matches no module that runs in forward"):
        optimizer.minimize(loss)
    with pytest.raises(memfit.InputError, match="it has been computed"):
        optimizer.minimize(torch.zeros(()))  # type: ignore[arg-type]
    with pytest.raises(memfit.InputError, match="wraps an optimizer of torch"):
        RecomputeOptimizer(model)  # type: ignore[arg-type]
    with pytest.raises(memfit.InputError, match="host_budget"):
        optimizer._enable_offload()
    with pytest.raises(memfit.InputError, match="load into the optimizer"):
        optimizer.load({})
