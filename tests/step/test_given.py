"""Loss and optimizer are taken in the forms in which people first write them, or the error says what to write."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import BudgetError, InputError, SplitError
from small import same, state_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning")


class Sharp(torch.optim.SGD):
    """As people write sharpness-aware minimization: the closure may be left out, but for what the code says then."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "sharpness-aware minimization needs a closure"


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


@pytest.mark.parametrize("written", ["adamw", "AdamW", "torch.optim.AdamW", "adamw_torch_fused"])
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


@torch.inference_mode()
def in_inference_mode() -> nn.Module:
    return nn.Linear(8, 4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"loss_fn": "8GiB"}, r"loss_fn='8GiB' is no function: if it is the budget, name it, budget='8GiB'"),
        ({"loss_fn": nn.MSELoss}, r"loss_fn=MSELoss is a class: write loss_fn=nn.MSELoss\(\)"),
        ({"loss_fn": 0.5}, "loss_fn=0.5 is no function: write loss_fn=lambda model, batch"),
        ({"sample": {"x": torch.zeros(2, 8)}, "loss_fn": nn.MSELoss()}, "the loss MSELoss takes .* and the batch is a mapping with x"),
        ({"optimizer": "adamax2"}, "torch.optim has none of this name; did you mean 'Adamax'"),
        ({"optimizer": "paged_adamw_8bit"}, r"write optimizer=\"AdamW\", allow=\[\"8bit\"\]"),
        ({"optimizer": "shampoo"}, "none of this name; any other is given by a function"),
        ({"optimizer": torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(classifier().parameters()))}, r"a schedule \(ConstantLR\): give its optimizer"),
        ({"optimizer": lambda: torch.optim.SGD([], 0.1)}, r"optimizer takes \(\), and it is called with the parameters: write optimizer=lambda parameters"),
        ({"optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1)}, r"asks them for \.parameters, as if they were the model: write optimizer=lambda"),
        ({"optimizer": lambda p: [torch.optim.SGD(p), torch.optim.SGD(p)]}, "optimizer gave a list of 2"),
        ({"model": [classifier(), classifier()]}, "the model is a list of 2, and a step trains one: .* plan each of them on its own"),
        ({"model": in_inference_mode()}, r"the model was built inside torch.inference_mode\(\)"),
        ({"model": nn.Linear}, r"the model is the class Linear: give a module, made by Linear\(\.\.\.\)"),
        ({"model": object.__new__(transformers.Trainer)}, r"call memfit.transformers.fit\(trainer, budget=...\)"),
        ({"model": object.__new__(lightning.Trainer)}, r"callbacks=\[memfit.lightning.FitToMemory\(budget=...\)\]"),
        ({"model": "gpt2"}, "the model is the text 'gpt2': .*memfit estimate FOLDER"),
        ({"model": batch(), "sample": classifier()}, "the model is tuple: .* the arguments are model, sample, loss_fn"),
        ({"sample": (16, 8)}, r"if they are its shape, give torch.zeros\(16, 8\)"),
        ({"sample": None}, "no sample was given"),
        ({"device": "cuda"}, r"a device of torch: move the model there \(model.to\('cuda'\)\)"),
        ({"clip_norm": "1"}, "clip_norm='1': a positive number is needed"),
        ({"budget": 24}, 'budget=24 is 24 bytes, .*write the unit, "24GiB"'),
        ({"budget": 8e9}, r"8000000000.0 is a float: write int\(...\) around it, or 8000000000"),
        ({"loss_fn": lambda m, x, y: loss_fn(m, (x, y))}, r"loss_fn takes \(m, x, y\), and it is called with the model and the whole batch"),
        ({"loss_fn": lambda b: b}, r"loss_fn takes \(b\), and it is called with the model and the whole batch"),
        ({"optimizer": Sharp}, "Sharp calls a closure .* or plan with optimizer=None"),
        ({"budget": 24.0}, r'24.0 is not a whole number of bytes \("24GiB" for gibibytes\)'),
        ({"budget": 0.8}, r'0.8 is not a whole number of bytes \("80%" for this share\)'),
        ({"budget": "24G"}, r"a unit memfit does not read \(24GiB or 24GB\?\)"),
        ({"budget": "-3GiB"}, "budget: '-3GiB' is not a number of bytes, as it is negative"),
        ({"optimizer": [adamw, adamw]}, "optimizer holds 2 optimizers, .* plan each of them on its own"),
        ({"optimizer": lambda p: (adamw(p), 3)}, "optimizer gave a tuple of 2: it has to return one torch.optim.Optimizer"),
        ({"optimizer": lambda p: None}, "optimizer gave None: it has to return one torch.optim.Optimizer"),
        ({"sample": SimpleNamespace(x=torch.zeros(2, 8))}, r"but SimpleNamespace \(of an object that holds tensors, .* vars\(batch\)\)"),
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
    with pytest.raises((InputError, BudgetError), match=sentence):
        memfit.plan(**given_with(arguments))


def given_with(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments that make a plan, but for these."""
    return {
        "model": classifier(),
        "sample": batch(),
        "loss_fn": loss_fn,
        "budget": "1GiB",
        "optimizer": adamw,
        **arguments,
    }


class Distance(nn.Module):
    """A criterion of somebody's own, which nothing tells from a loss function of memfit's form."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()


@pytest.mark.parametrize(
    ("loss", "note"),
    [
        (Distance(), "if yours takes \\(output, target\\), write loss_fn=lambda model, batch: yours"),
        (lambda output, target: output.shape, "if yours takes \\(output, target\\)"),
        (lambda output, target: nn.functional.mse_loss(output, target[0]), "if yours takes \\(output, target\\)"),
        (None, "without a loss_fn memfit calls model\\(\\*batch\\) .* loss_fn=nn.CrossEntropyLoss\\(\\)"),
    ],
)
def test_an_error_of_a_loss_of_another_form_keeps_its_kind_and_says_the_form(loss: Any, note: str) -> None:
    with pytest.raises((TypeError, AttributeError)) as caught:
        memfit.plan(classifier(), batch(), loss, "1GiB", adamw)
    assert re.search(note, " ".join(caught.value.__notes__))


@pytest.mark.parametrize(
    ("sample", "written"),
    [
        (batch()[0], "lambda model, batch: yours(model(batch), batch)"),
        (
            {"pixels": batch()[0], "class": batch()[1]},
            "lambda model, batch: yours(model(batch['pixels']), batch['class'])",
        ),
        (batch(), "lambda model, batch: yours(model(batch[0]), batch[1])"),
    ],
)
def test_the_form_of_a_loss_is_told_as_its_batch_is_taken_apart(sample: Any, written: str) -> None:
    with pytest.raises((TypeError, AttributeError)) as caught:
        memfit.plan(classifier(), sample, lambda output, _: output.square().mean(), "1GiB", adamw)
    assert written in " ".join(caught.value.__notes__)


@pytest.mark.parametrize("function", [memfit.plan, memfit.fit])
@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ({"sample": None}, r"no sample was given: give one batch, .*next\(iter\(loader\)\)"),
        ({"loss_fn": "cross_entropy"}, r"is a name: write loss_fn=nn\.functional\.cross_entropy"),
        ({"model": classifier().requires_grad_(requires_grad=False)}, "no parameter of the model is trained"),
        ({"lower_tier": "/nowhere/at/all", "host_budget": "1GiB"}, "there is no folder .* to offload to"),
    ],
)
def test_first_guesses_lead_to_what_works(function: Any, named: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        function(**given_with(named))


def test_a_trainer_alone_is_told_what_to_call() -> None:
    trainer = object.__new__(transformers.Trainer)
    with pytest.raises(InputError, match=r"call memfit\.transformers\.fit\(trainer, budget=\.\.\.\)"):
        memfit.fit(trainer, budget="1GiB")


def test_a_device_is_a_name() -> None:
    with pytest.raises(InputError, match='device=0 is no name of a GPU: write one, such as device="rtx4090"'):
        memfit.plan(classifier(), batch(), loss_fn, "1GiB", adamw, device=0)  # type: ignore[arg-type]


def test_an_optimizer_of_another_model_is_not_applied() -> None:
    model = classifier()
    plan = memfit.plan(model, batch(), nn.CrossEntropyLoss(), 1 << 50)
    with pytest.raises(InputError, match=r"the optimizer \(SGD\) holds none of the model's parameters"):
        memfit.apply(plan, model, optimizer=torch.optim.SGD(classifier().parameters()))


def test_what_is_planned_again_from_is_named() -> None:
    with pytest.raises(InputError, match="Sequential is nothing to plan again from: give a plan"):
        memfit.smallest_budget(classifier())  # type: ignore[arg-type]
    alone = r"smallest_budget takes one thing, a plan or what memfit.record\(model, sample, ...\) gave"
    with pytest.raises(InputError, match=alone):
        memfit.smallest_budget(classifier(), batch(), loss_fn)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=alone):
        memfit.smallest_budget(classifier(), loss_fn=loss_fn)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="points='4': a whole number"):
        memfit.frontier(classifier(), batch(), nn.CrossEntropyLoss(), points="4")  # type: ignore[arg-type]


def test_a_plan_for_a_gpu_is_not_applied_to_a_model_on_the_cpu() -> None:
    plan = memfit.plan(classifier(), batch(), loss_fn, "1GiB", adamw, device="RTX 4090")
    with pytest.raises(
        InputError, match=r"the plan is for rtx4090 \(cuda\) and the model is on cpu, .*model\.to\(\"cuda\"\)"
    ):
        memfit.apply(plan, classifier(), loss_fn)


@pytest.mark.parametrize("call", [{"fixed": {"micro_batches": 4}}, {"loader_batches": 4}])
def test_micro_batches_are_planned_on_the_meta_device_as_with_values(call: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = classifier()
    sample = tuple(each.to("meta") for each in batch())
    made = memfit.plan(model, sample, loss_fn, "1GiB", adamw, **call)
    real = memfit.plan(classifier(), batch(), loss_fn, "1GiB", adamw, **call)
    assert made.choices.micro_batches == 4
    assert (made.prediction.peak_bytes, made.choices.weights) == (real.prediction.peak_bytes, real.choices.weights)


def test_a_loss_that_sees_the_whole_batch_is_noticed_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = classifier()
    sample = tuple(each.to("meta") for each in batch())

    def spread(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        return (output - output.mean(0)).square().mean()

    with pytest.raises(SplitError, match="do not add up"):
        memfit.plan(model, sample, spread, "1GiB", adamw, fixed={"micro_batches": 4})


def test_steps_that_need_closures_and_loaders_are_refused_by_measure_too() -> None:
    with pytest.raises(InputError, match="LBFGS calls a closure"):
        memfit.measure(classifier(), batch(), loss_fn, torch.optim.LBFGS)
    with pytest.raises(InputError, match="sample is a DataLoader"):
        memfit.measure(classifier(), LOADER, loss_fn)
