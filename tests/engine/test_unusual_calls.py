"""However modules are called, every plan gives plain PyTorch's numbers, in step after step, and holds what it predicts."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from models.calls import PROGRAMS, batch

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4  # stretches in which nothing is dropped begin with the second
PARTS = 12  # budgets between the smallest and that of plain PyTorch


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def plain(model: nn.Module, loss_fn: Any, both: Any, *, halves: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of plain PyTorch."""
    optimizer, losses = sgd(p for p in model.parameters() if p.requires_grad), []
    torch.manual_seed(7)
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=halves):
            loss = loss_fn(model, both)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, list(model.parameters())


def judged(name: str, parts: Iterable[int], precision: str = "full", **asked: Any) -> None:
    torch.manual_seed(0)
    model, loss_fn = PROGRAMS[name]()
    both = batch()
    losses, parameters = plain(copy.deepcopy(model), loss_fn, both, halves=precision == "bf16")
    fixed = {"micro_batches": 1, "precision": precision}
    everything = memfit.plan(copy.deepcopy(model), both, loss_fn, 1 << 50, sgd, fixed=fixed, **asked)
    smallest, largest = memfit.smallest_budget(everything), everything.prediction.peak_bytes
    for part in parts:
        plan = memfit.replan(everything, smallest + (largest - smallest) * part // PARTS)
        trained = copy.deepcopy(model)
        engine = memfit.apply(plan, trained, loss_fn, sgd)
        torch.manual_seed(7)
        records = [engine.step(both, meter=number > 1) for number in range(STEPS)]
        assert not any(record.divergences for record in records), (part, records[-1].divergences)
        assert {record.peak_bytes for record in records[2:]} == {plan.prediction.peak_bytes}, part
        assert [record.loss for record in records] == losses, part
        assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), parameters, strict=True)), part


@pytest.mark.alternate(0)
@pytest.mark.parametrize(
    ("name", "part"), [(name, 0 if number % 2 else PARTS // 2) for number, name in enumerate(PROGRAMS)]
)
def test_a_budget_in_the_middle_or_the_smallest(name: str, part: int) -> None:
    judged(name, (part,))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["full", "bf16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_budget(name: str, precision: str) -> None:
    judged(name, range(PARTS + 1), precision)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_with_activations_offloaded(name: str) -> None:
    judged(name, range(PARTS + 1), host_budget="1GiB")
