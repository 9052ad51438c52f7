"""What a rank does in the tests of paths that no planning saw: it trains through steps in which its forward, or its loss, takes one for the first time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from defined_costs import defined_costs
from memfit import batches
from memfit.values.report import StepRecord
from models.paths import HIDDEN, Block, LeftOutByTorch, loss_of, sample, seeded
from sharding import steps

STEPS = 4
NEVER = 1 << 30
Case = tuple[
    str, Sequence[int], Sequence[int]
]  # plan as JSON; of each rank the forward from which on the model is longer, and its loss


class Longer(nn.Module):
    """Runs its blocks, and from some forward on the first one once more; its loss may be longer from another one on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(HIDDEN, 10)
        self.forwards, self.longer_from, self.loss_from = 0, NEVER, NEVER
        self.leaves_out = False

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        more = self.blocks[:1] if self.forwards >= self.longer_from else []
        for block in (*(self.blocks[:-1] if self.leaves_out else self.blocks), *more):
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def penalised(model: Any, batch: Any) -> Tensor:
    """The loss, and from some forward on a penalty."""
    x, classes = batch
    logits = model(x)
    loss = loss_of(lambda _: logits, (x, classes))  # type: ignore[arg-type]
    return loss + 0.01 * logits.square().mean().sqrt() if model.forwards >= model.loss_from else loss


def built() -> Longer:
    seeded(0)
    return Longer()


def trained(rank: int, cases: Sequence[Case]) -> list[tuple[list[StepRecord], list[Tensor], str]]:
    """For each case the records of some metered steps, the parameters after them, and what was warned of."""
    found = []
    for data, longer_from, loss_from in cases:
        model = built()
        model.longer_from, model.loss_from = longer_from[rank], loss_from[rank]
        engine = memfit.apply(memfit.Plan.from_json(data), model, penalised, small.adamw)
        assert engine.sharded is not None
        own, records = steps.part_of(sample(), rank, engine.sharded.ranks), []
        with defined_costs(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(STEPS):
                seeded(100 + 10 * step + rank)
                records.append(engine.step(own, meter=True))
        found.append((records, steps.whole(model), "\n".join(str(each.message) for each in caught)))
        engine.sharded.close()
    return found


def left_out(rank: int, data: str) -> tuple[str, str]:
    """What is warned of and raised in a step in which no rank uses one of the blocks."""
    model = built()
    engine = memfit.apply(memfit.Plan.from_json(data), model, penalised, small.adamw)
    own = steps.part_of(sample(), rank, 2)
    engine.step(own)
    model.leaves_out = True
    with defined_costs(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(memfit.EngineError) as raised:
            engine.step(own)
    return "\n".join(str(each.message) for each in caught), str(raised.value)


def drawn(rank: int, data: str) -> list[StepRecord]:
    """Metered steps of a model that leaves blocks out by chance, each rank by numbers of its own."""
    model = LeftOutByTorch()
    engine = memfit.apply(memfit.Plan.from_json(data), model, loss_of, small.adamw)
    own, records = steps.part_of(sample(), rank, 2), []
    for step in range(STEPS):
        seeded(100 + 10 * step + rank)
        records.append(engine.step(own, meter=True))
    return records


def undivided(
    longer_from: Sequence[int], loss_from: Sequence[int], micro_batches: int
) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters of plain PyTorch in one process that runs the ranks' parts, each on its path, and adds their gradients up as they do."""
    model, ranks, losses = built(), len(longer_from), []
    optimizer, parameters = small.adamw(model.parameters()), list(model.parameters())
    for step in range(STEPS):
        total, gradients = 0.0, [torch.zeros_like(p) for p in parameters]
        for rank in range(ranks):
            seeded(100 + 10 * step + rank)
            model.forwards = step * micro_batches
            model.longer_from, model.loss_from = longer_from[rank], loss_from[rank]
            own = steps.part_of(sample(), rank, ranks)
            model.zero_grad()
            for part in batches.split(own, [batches.size(own) // micro_batches] * micro_batches):
                loss = penalised(model, part)
                loss.backward(torch.tensor(1.0 / micro_batches))
                total += loss.item() / micro_batches
            torch._foreach_add_(gradients, [p.grad / ranks for p in parameters if p.grad is not None])
        for gradient, parameter in zip(gradients, parameters, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(total / ranks)
    return losses, [p.detach() for p in parameters]
