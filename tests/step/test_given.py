"""Loss and optimizer are taken in the forms in which people first write them, or the error says what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import InputError
from small import same, state_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2, 8)))


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def planned(optimizer: Any, model: nn.Module | None = None, loss: Any = loss_fn) -> memfit.Plan:
    return memfit.plan(model or classifier(), batch(), loss, "1GiB", optimizer, fixed={"micro_batches": 1})


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_a_criterion_is_the_loss_of_input_and_target(criterion: Any) -> None:
    assert planned(adamw, loss=criterion).prediction.peak_bytes == planned(adamw).prediction.peak_bytes
    model, other = classifier(), classifier()
    engine = memfit.fit(model, batch(), criterion, "1GiB", adamw, fixed={"micro_batches": 1})
    engine.step(batch())
    optimizer = adamw(other.parameters())
    loss_fn(other, batch()).backward()
    optimizer.step()
    assert same(state_of(model), state_of(other))


@pytest.mark.parametrize("written", ["adamw", "AdamW"])
def test_a_name_of_torchs_is_its_optimizer(written: str) -> None:
    assert planned(written).prediction.peak_bytes == planned(adamw).prediction.peak_bytes


def test_a_class_is_its_optimizer() -> None:
    assert planned(torch.optim.SGD).prediction.peak_bytes < planned(adamw).prediction.peak_bytes


def test_an_optimizer_is_planned_for_with_its_groups_and_is_the_one_that_steps() -> None:
    model, other = classifier(), classifier()

    def grouped(of: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": of[0].parameters(), "lr": 0.5}, {"params": of[2].parameters(), "momentum": 0.9}], lr=0.1
        )

    own: Any = grouped(model)
    plain = grouped(other)
    made = planned(own, model)
    assert made.prediction.categories_at_peak.get("optimizer_state", 0) <= 4 * 132
    engine = memfit.fit(model, batch(), loss_fn, "1GiB", own, fixed={"micro_batches": 1})
    assert engine.optimizer is own
    for _ in range(2):
        engine.step(batch())
        loss_fn(other, batch()).backward()
        plain.step()
        plain.zero_grad()
    assert same(state_of(model), state_of(other))
    assert [*map(len, own.state.values())] == [*map(len, plain.state.values())]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"loss_fn": "8GiB"}, r"loss_fn='8GiB' is no function: if it is the budget, name it, budget='8GiB'"),
        ({"loss_fn": nn.MSELoss}, r"loss_fn=MSELoss is a class: write loss_fn=nn.MSELoss\(\)"),
        ({"loss_fn": 0.5}, "loss_fn=0.5 is no function: write loss_fn=lambda model, batch"),
        ({"sample": {"x": torch.zeros(2, 8)}, "loss_fn": nn.MSELoss()}, "the loss MSELoss takes .* and the batch is a mapping with x"),
        ({"optimizer": "adamax2"}, "torch.optim has none of this name; did you mean 'Adamax'"),
        ({"optimizer": [adamw, adamw]}, "optimizer holds 2 optimizers, .* plan each of them on its own"),
        ({"optimizer": lambda p: (adamw(p), 3)}, "optimizer gave a tuple of 2: it has to return one torch.optim.Optimizer"),
        ({"optimizer": 1e-3}, "optimizer=0.001: write optimizer=lambda parameters"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS calls a closure that runs forward and backward again"),
        ({"optimizer": torch.optim.SGD(classifier().parameters())}, r"the optimizer \(SGD\) holds parameters that are not the model's"),
        ({"sample": LOADER}, r"sample is a DataLoader: give one batch of it, .* sample=next\(iter\(loader\)\)"),
        ({"sample": torch.utils.data.TensorDataset(torch.zeros(2, 8))}, "sample is a Dataset: give one batch"),
        ({"loss_fn": lambda m, b: (loss_fn(m, b), loss_fn(m, b))}, "several losses are added up"),
        ({"loss_fn": lambda m, b: {"a": loss_fn(m, b)}}, "several losses are added up"),
    ],
)  # fmt: skip
def test_a_guess_that_cannot_be_meant_is_told_what_to_write(arguments: dict[str, Any], sentence: str) -> None:
    given = {"sample": batch(), "loss_fn": loss_fn, "optimizer": adamw, **arguments}
    with pytest.raises(InputError, match=sentence):
        memfit.plan(classifier(), given["sample"], given["loss_fn"], "1GiB", given["optimizer"])
