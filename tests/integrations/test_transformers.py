"""Hugging Face's Trainer under a budget: the same losses, the peak as predicted, and what cannot stand beside a plan refused."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from integrations import trainer_ranks
from integrations.quiet_trainers import QUIET
from integrations.trainer_ranks import SHAPE
from memfit.errors import BatchError, InfeasibleError, InputError
from memfit.integrations.window import batches_of
from memfit.planning import planning_of
from memfit.units import format_bytes

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TOKENS = 16
ORDER_OF_ADDITIONS = 1e-5  # of a parameter after some steps of SGD, in float32; AdamW would make much of little
SGD = {"optim": "sgd", "learning_rate": 0.1}

pytestmark = pytest.mark.usefixtures("one_thread")


Make = Callable[..., Any]


def classifier(dropout: float = 0.1) -> nn.Module:
    """Its loss is the mean over the batch whatever Trainer says of the number of items, though its forward takes any keyword."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SHAPE, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return transformers.BertForSequenceClassification(config)


def language_model() -> nn.Module:
    """Its loss is divided by the number of items."""
    return trainer_ranks.built("language model")


def data_for(model: nn.Module, samples: int = 44, tokens: int = TOKENS) -> list[dict[str, Tensor]]:
    """As `trainer_ranks.rows` makes them."""
    classifies = isinstance(model, transformers.BertForSequenceClassification)
    return trainer_ranks.rows("classifier" if classifies else "language model", samples, tokens)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Make]:
    """Makes a quiet trainer on the CPU."""
    transformers.logging.set_verbosity_error()

    def made(model: nn.Module, data: Any = None, *, kind: Any = transformers.Trainer, **named: Any) -> Any:
        own = {name: named.pop(name) for name in ("eval_dataset", "compute_metrics", "model_init") if name in named}
        arguments = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 8,
            "max_steps": 4,
            "learning_rate": 1e-3,
            **QUIET,
            **named,
        }
        args = transformers.TrainingArguments(**arguments)
        own_data = data if data is not None else data_for(model)
        return kind(None if "model_init" in own else model, args, train_dataset=own_data, **own)

    yield made
    transformers.logging.set_verbosity_warning()


def logged(trained: Any, what: str = "loss") -> list[float]:
    return [entry[what] for entry in trained.state.log_history if "loss" in entry]


PLAIN_PEAKS: dict[str, int] = {}


def plain_peak(trainer: Make, make: Callable[[], nn.Module] = classifier, **settings: Any) -> int:
    """Of the whole batches as the user has them; planned for once."""
    key = f"{make.__name__} {settings}"
    if key not in PLAIN_PEAKS:
        made = memfit.transformers.fit(trainer(make(), **settings), 1 << 40)
        PLAIN_PEAKS[key] = made.plan.prediction.plain_peak_bytes
    return PLAIN_PEAKS[key]


def peaks(fitted: Any) -> list[int]:
    """Measured, from the second step on: the first has no optimizer state yet."""
    return [record.peak_bytes for record in fitted.engine.records[1:]]


def apart(one: nn.Module, other: nn.Module) -> float:
    """Largest relative difference of a parameter."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().norm() / p.detach().norm().clamp_min(1e-3)) for p, q in pairs)


# --------------------------------------------------------------------------------------------------------- same results


def test_in_60_percent_of_the_bytes_losses_are_trainers_own_to_the_bit_and_the_peak_is_predicted(trainer: Make) -> None:
    plainly = trainer(classifier())
    plainly.train()
    budget = plain_peak(trainer) * 6 // 10
    inside = trainer(classifier())
    fitted = memfit.transformers.fit(inside, budget, fixed={"micro_batches": 1}, meter=True)
    inside.train()

    assert not fitted.plan.script.plain
    assert logged(inside) == logged(plainly)
    assert logged(inside, "grad_norm") == logged(plainly, "grad_norm")
    assert all(map(torch.equal, inside.model.parameters(), plainly.model.parameters()))
    assert peaks(fitted) == [pytest.approx(fitted.plan.prediction.peak_bytes, rel=0.01)] * 3
    assert max(peaks(fitted)) <= budget
    assert [record.loss for record in fitted.engine.records] == pytest.approx(logged(plainly))
    assert not any(record.divergences for record in fitted.engine.records)


def test_where_all_fits_nothing_is_set_and_nothing_dropped(trainer: Make) -> None:
    fitting = trainer(classifier(), gradient_accumulation_steps=2)
    fitted = memfit.transformers.fit(fitting, "8GiB")

    assert fitted.plan.script.plain
    assert fitted.notes == ()
    assert (fitting.args.per_device_train_batch_size, fitting.args.gradient_accumulation_steps) == (8, 2)


@pytest.mark.alternate(1)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("make", [language_model, lambda: classifier(dropout=0.0)], ids=["tokens", "means"])
def test_a_divided_batch_counts_as_trainer_counts_the_whole_one(trainer: Make, make: Any, accumulated: int) -> None:
    # An epoch ends in a window of fewer batches, the last of them smaller: 44 samples.
    settings = {**SGD, "max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": accumulated}
    plainly = trainer(make(), **settings)
    plainly.train()
    inside = trainer(make(), **settings)
    parts = 4 * accumulated
    fitted = memfit.transformers.fit(inside, "1GiB", fixed={"micro_batches": parts}, meter=True)
    inside.train()

    assert (inside.args.per_device_train_batch_size, inside.args.gradient_accumulation_steps) == (2, parts)
    assert "equal up to the order of additions" in fitted.notes[0]
    assert logged(inside) == pytest.approx(logged(plainly), rel=1e-5)
    assert logged(inside, "grad_norm") == pytest.approx(logged(plainly, "grad_norm"), rel=1e-4)
    assert apart(plainly.model, inside.model) < ORDER_OF_ADDITIONS
    assert peaks(fitted)[0] == pytest.approx(fitted.plan.prediction.peak_bytes, rel=0.01)
    assert not any(record.divergences for record in fitted.engine.records)


class SummedOverTokens(nn.Module):
    """A mean over what is not masked, of a model that knows nothing of a number of items: Trainer takes the mean of means."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 100))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(input_ids).flatten(0, 1), labels.flatten())}


def test_parts_are_weighted_by_what_counts_in_them_and_empty_ones_left_out(trainer: Make) -> None:
    data = data_for(SummedOverTokens(), samples=16)
    for row in data[::2]:
        row["labels"] = torch.full_like(row["labels"], -100)  # samples in which nothing counts
    settings = {**SGD, "max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    plainly = trainer(SummedOverTokens(), data, **settings)
    plainly.train()
    inside = trainer(SummedOverTokens(), data, **settings)
    fitted = memfit.transformers.fit(inside, "1GiB", fixed={"micro_batches": 8})
    inside.train()

    assert fitted.plan.choices.weights == "tokens:labels"
    assert logged(inside) == pytest.approx(logged(plainly), rel=1e-5)
    assert apart(plainly.model, inside.model) < ORDER_OF_ADDITIONS


class Shifted(transformers.Trainer):  # type: ignore[name-defined]
    """Adds the gradients at shifted embeddings, in a training_step of its own."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        weight = model.get_input_embeddings().weight
        shift = 0.1 * torch.arange(weight.shape[1]).remainder(2)
        weight.data.add_(shift)
        super().training_step(model, inputs, num_items_in_batch)
        weight.data.sub_(shift)
        return loss


def test_a_training_step_that_takes_several_losses_weighs_each_as_its_micro_batch(trainer: Make) -> None:
    plainly = trainer(classifier(0.0), kind=Shifted, **SGD)
    plainly.train()
    inside = trainer(classifier(0.0), kind=Shifted, **SGD)
    fitted = memfit.transformers.fit(inside, "1GiB", fixed={"micro_batches": 4})
    with pytest.warns(UserWarning, match="training_step takes several losses of a batch.*keeps batches whole"):
        inside.train()

    assert logged(inside) == pytest.approx(logged(plainly), rel=1e-5)
    assert apart(plainly.model, inside.model) < ORDER_OF_ADDITIONS
    assert [record.loss for record in fitted.engine.records] == pytest.approx(logged(plainly), rel=1e-5)


def test_a_trainer_that_has_trained_already_goes_on_under_a_plan_with_the_same_losses(trainer: Make) -> None:
    def goes_on(*, fits: bool) -> list[float]:
        made = trainer(language_model(), max_steps=2)
        made.train()
        if fits:
            memfit.transformers.fit(made, "1GiB", fixed={"micro_batches": 1})
        made.args.max_steps = 4
        made.train()
        return logged(made)

    assert goes_on(fits=True) == goes_on(fits=False)


def test_an_optimizer_that_accelerate_has_prepared_is_planned_for_and_stepped_as_the_one_inside() -> None:
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer's bf16 stays there
    accelerator = accelerate.Accelerator(cpu=True)
    model, again = small.chain(2), small.chain(2)
    own = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _, prepared = accelerator.prepare(model, own)
    engine = memfit.fit(model, small.rows(), small.squared_error, "1GiB", prepared, fixed={"micro_batches": 1})
    assert engine.optimizer is own
    baseline = torch.optim.AdamW(again.parameters(), lr=1e-2)
    for _ in range(3):
        loss = small.squared_error(again, small.rows())
        loss.backward()
        baseline.step()
        baseline.zero_grad()
        assert engine.step(small.rows()).loss == loss.item()


def test_a_wrapper_that_is_not_known_is_refused_and_its_optimizer_left_as_it_was(trainer: Make) -> None:
    class Passing(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.state, self.defaults = inner, inner.state, inner.defaults

        @property
        def param_groups(self) -> Any:
            return self.inner.param_groups

        @param_groups.setter
        def param_groups(self, groups: Any) -> None:
            self.inner.param_groups = groups

    made = trainer(language_model())
    inner = torch.optim.SGD(made.model.parameters(), lr=0.1)
    groups = inner.param_groups
    made.optimizer = Passing(inner)
    with pytest.raises(InputError, match=r"\(Passing\) takes its parameters from another one inside it"):
        memfit.transformers.fit(made, "1GiB")
    assert inner.param_groups is groups


@pytest.mark.slow
def test_too_small_a_budget_for_whole_batches_divides_them(trainer: Make) -> None:
    data = data_for(language_model(), 12, tokens=64)
    settings = {"per_device_train_batch_size": 4, "max_steps": 3}
    whole = memfit.transformers.fit(trainer(language_model(), data, **settings), "1GiB", fixed={"micro_batches": 1})
    budget = memfit.smallest_budget(whole.plan) - 1
    inside = trainer(language_model(), data, **settings)
    fitted = memfit.transformers.fit(inside, budget, meter=True)
    inside.train()

    assert fitted.plan.choices.micro_batches > 1
    assert inside.args.per_device_train_batch_size * inside.args.gradient_accumulation_steps == 4
    assert max(peaks(fitted)) <= budget


def test_a_loss_outside_of_the_model_is_followed_too(trainer: Make) -> None:
    plainly = trainer(classifier(), label_smoothing_factor=0.1)
    plainly.train()
    inside = trainer(classifier(), label_smoothing_factor=0.1)
    budget = plain_peak(trainer, label_smoothing_factor=0.1) * 6 // 10
    fitted = memfit.transformers.fit(inside, budget, fixed={"micro_batches": 1}, meter=True)
    inside.train()

    assert logged(inside) == logged(plainly)
    assert peaks(fitted)[0] == pytest.approx(fitted.plan.prediction.peak_bytes, rel=0.01)
    assert not any(record.divergences for record in fitted.engine.records)


class Distilling(transformers.Trainer):  # type: ignore[misc, name-defined]
    """With the signature that transformers' documentation shows for a loss of one's own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits
        loss = outputs.loss + nn.functional.mse_loss(outputs.logits, wanted)
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_ones_own_may_take_what_else_there_is_as_keywords(trainer: Make) -> None:
    def distilling() -> Any:
        made = trainer(classifier(), kind=Distilling)
        made.teacher = classifier().eval().requires_grad_(requires_grad=False)
        return made

    plainly = distilling()
    plainly.train()
    inside = distilling()
    memfit.transformers.fit(inside, "1GiB", fixed={"micro_batches": 1})
    inside.train()
    assert logged(inside) == logged(plainly)
    assert inside.evaluate(inside.train_dataset)["eval_loss"] == plainly.evaluate(plainly.train_dataset)["eval_loss"]


def test_bf16_is_planned_for_as_accelerate_runs_it(trainer: Make) -> None:
    plainly = trainer(language_model(), bf16=True)
    plainly.train()
    inside = trainer(language_model(), bf16=True)
    budget = plain_peak(trainer, language_model, bf16=True) * 7 // 10
    fitted = memfit.transformers.fit(inside, budget, fixed={"micro_batches": 1}, meter=True)
    inside.train()

    assert logged(inside) == logged(plainly)
    assert peaks(fitted)[0] == pytest.approx(fitted.plan.prediction.peak_bytes, rel=0.01)


def test_a_resumed_run_goes_on_with_the_losses_of_one_that_was_not_stopped(trainer: Make, tmp_path: Path) -> None:
    budget = plain_peak(trainer) * 6 // 10
    settings = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole = trainer(classifier(), output_dir=str(tmp_path / "whole"), **settings)
    memfit.transformers.fit(whole, budget, fixed={"micro_batches": 4})
    whole.train()
    resumed = trainer(classifier(), output_dir=str(tmp_path / "resumed"), **settings)
    fitted = memfit.transformers.fit(resumed, budget, fixed={"micro_batches": 4}, meter=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))

    assert logged(resumed) == logged(whole)  # the first three from the snapshot
    assert [record.step for record in fitted.engine.records] == [4, 5, 6, 7]
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    # The optimizer's state is there from the first resumed step on.
    predicted = fitted.plan.prediction.peak_bytes
    assert [r.peak_bytes for r in fitted.engine.records] == [pytest.approx(predicted, rel=0.01)] * 4


def test_room_below_is_the_plans_as_everywhere(trainer: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_OFFLOAD_DIR", str(tmp_path))
    fitted = memfit.transformers.fit(trainer(classifier()), "1GiB", host_budget="64MiB")
    assert planning_of(fitted.plan).bundle.lower_tier.free_bytes == 64 << 20
    with pytest.raises(InputError, match=r"disk_budget='1GiB' is for the disk below a GPU's host memory"):
        memfit.transformers.fit(trainer(classifier()), "1GiB", host_budget="64MiB", disk_budget="1GiB")


class Failing(transformers.TrainerCallback):  # type: ignore[name-defined]
    """Ends the second step half way, once."""

    failed = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 1 and not self.failed:
            self.failed = True
            raise RuntimeError("half way")


def test_a_step_that_fails_leaves_no_meter_open(trainer: Make) -> None:
    inside = trainer(classifier())
    fitted = memfit.transformers.fit(inside, "1GiB", meter=True)
    inside.add_callback(Failing())
    with pytest.raises(RuntimeError, match="half way"):
        inside.train()

    assert len(fitted.engine.records) == 1
    assert not torch._C._autograd._profiler_enabled()
    assert gc.isenabled()  # held back while a meter runs
    inside.train()
    assert peaks(fitted)[1:] == [pytest.approx(fitted.plan.prediction.peak_bytes, rel=0.01)] * 3


# ------------------------------------------------------------------------------------------------ adapters, 8-bit state


# peft asks models for what transformers calls otherwise since.
OLD_NAME = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(language_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@OLD_NAME
def test_adapters_train_under_a_budget_and_the_frozen_rest_takes_neither_gradients_nor_state(trainer: Make) -> None:
    plainly = trainer(adapted())
    plainly.train()
    every, alone = plain_peak(trainer, language_model), plain_peak(trainer, adapted)
    inside = trainer(adapted())
    fitted = memfit.transformers.fit(inside, alone * 7 // 10, fixed={"micro_batches": 1}, meter=True)
    inside.train()

    assert logged(inside) == logged(plainly)
    assert all(map(torch.equal, inside.model.parameters(), plainly.model.parameters()))
    assert peaks(fitted) == [pytest.approx(fitted.plan.prediction.peak_bytes, rel=0.01)] * 3
    frozen = 4 * sum(p.numel() for p in inside.model.parameters() if not p.requires_grad)
    assert every - alone > 2 * frozen  # the two moments of AdamW


@pytest.mark.alternate(0)
@OLD_NAME
@pytest.mark.parametrize(("make", "accumulated"), [(classifier, 1), (language_model, 2), (adapted, 1)])
def test_plain_is_the_step_that_the_trainer_runs_without_a_plan(trainer: Make, make: Any, accumulated: int) -> None:
    settings = {"gradient_accumulation_steps": accumulated}
    whole = trainer(make(), **settings)
    plain = memfit.transformers.fit(whole, 1 << 40, fixed={"micro_batches": accumulated}, meter=True)
    whole.train()
    divided = memfit.transformers.fit(
        trainer(make(), **settings), 1 << 40, fixed={"micro_batches": 4 * accumulated}
    ).plan

    of_plain, of_divided = plain.plan.prediction, divided.prediction
    assert peaks(plain)[0] == pytest.approx(of_divided.plain_peak_bytes, rel=0.01)
    assert of_divided.plain_peak_bytes == of_plain.plain_peak_bytes > of_divided.peak_bytes
    assert of_divided.plain_step_seconds == of_plain.plain_step_seconds  # operations are timed once
    assert of_divided.plain_with == ("" if accumulated == 1 else f"{accumulated} micro-batches")
    assert f"of the {format_bytes(of_plain.plain_peak_bytes)} that " in divided.explain()


@pytest.mark.slow
def test_8_bit_state_is_given_to_trainer_and_saved_with_it(trainer: Make, tmp_path: Path) -> None:
    inside = trainer(classifier(), save_strategy="steps", save_steps=2)
    fitted = memfit.transformers.fit(
        inside, "1GiB", allow=["8bit"], fixed={"state_format": "8bit", "micro_batches": 1}, meter=True
    )
    inside.train()

    assert isinstance(inside.optimizer.optimizer, memfit.optimizers.chunked.ChunkedOptimizer)
    assert peaks(fitted)[0] == pytest.approx(fitted.plan.prediction.peak_bytes, rel=0.01)
    saved = torch.load(tmp_path / "out" / "checkpoint-4" / "optimizer.pt", weights_only=False)
    assert saved["state"]


# ----------------------------------------------------------------------------------------------------- the sample, data


def ragged(longest: int) -> list[dict[str, list[int]]]:
    rows = []
    for index in range(40):
        length = longest if index == 29 else 4 + index % 7
        rows.append({"input_ids": [5 + index] * length, "attention_mask": [1] * length, "labels": index % 2})
    return rows  # type: ignore[return-value]


class Padding:
    """Pads to the longest of the batch."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        padded = {
            name: torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in rows])
            for name in ("input_ids", "attention_mask")
        }
        return {**padded, "labels": torch.tensor([row["labels"] for row in rows])}


class Padded(transformers.Trainer):  # type: ignore[name-defined]
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, data_collator=Padding(), **named)


def test_the_plan_is_for_the_longest_sample_there_is(trainer: Make) -> None:
    inside = trainer(classifier(), ragged(29), kind=Padded, max_steps=5)
    fitted = memfit.transformers.fit(inside, "1GiB", meter=True)
    inside.train()

    assert "input_ids int64[8, 29]" in fitted.plan.signature
    predicted = fitted.plan.prediction.peak_bytes
    assert max(peaks(fitted)) == pytest.approx(predicted, rel=0.01)  # the step with the long sample
    assert min(peaks(fitted)) < 0.9 * predicted


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [2, 1])
def test_batches_with_and_without_padding_are_followed_inside_the_smallest_budget(
    trainer: Make, micro_batches: int
) -> None:
    """Texts cut off at one length, and shorter ones: BERT makes a mask only where a batch has padding, so its forward takes two paths."""
    data = [
        {"input_ids": [5 + index] * length, "attention_mask": [1] * length, "labels": index % 2}
        for index, length in enumerate([24, 24, 24, 24, 24, 9, 12, 24] * 3)
    ]
    settings = {**SGD, "train_sampling_strategy": "sequential", "per_device_train_batch_size": 4, "max_steps": 6}
    plainly = trainer(classifier(0.0), data, kind=Padded, **settings)
    plainly.train()
    fixed = {"micro_batches": micro_batches}
    with pytest.raises(InfeasibleError) as needed:
        memfit.transformers.fit(trainer(classifier(0.0), data, kind=Padded, **settings), "1KiB", fixed=fixed)
    budget = needed.value.minimum_bytes
    assert budget is not None
    inside = trainer(classifier(0.0), data, kind=Padded, **settings)
    fitted = memfit.transformers.fit(inside, budget, fixed=fixed, meter=True)
    inside.train()

    assert not any(record.divergences for record in fitted.engine.records)
    assert max(record.peak_bytes for record in fitted.engine.records) <= budget
    if micro_batches == 1:
        assert logged(inside) == logged(plainly)
        assert all(map(torch.equal, inside.model.parameters(), plainly.model.parameters()))
    else:
        assert logged(inside) == pytest.approx(logged(plainly), rel=1e-5)
        assert apart(plainly.model, inside.model) < ORDER_OF_ADDITIONS


@pytest.mark.slow
def test_a_sample_with_padding_is_planned_for_without_it_too(trainer: Make) -> None:
    """Of a stream nothing else is known than the batch that was shown."""
    data = [
        {"input_ids": [5] * length, "attention_mask": [1] * length, "labels": 0}
        for length in [24, 24, 9, 24, *[24] * 8]
    ]
    settings = {**SGD, "train_sampling_strategy": "sequential", "per_device_train_batch_size": 4, "max_steps": 3}
    shown: Any = {"sample": Padding()(data[:4]), "fixed": {"micro_batches": 1}}
    with pytest.raises(InfeasibleError) as needed:
        memfit.transformers.fit(trainer(classifier(0.0), data, kind=Padded, **settings), "1KiB", **shown)
    budget = needed.value.minimum_bytes
    assert budget is not None
    inside = trainer(classifier(0.0), data, kind=Padded, **settings)
    fitted: Any = memfit.transformers.fit(inside, budget, **shown, meter=True)
    inside.train()

    assert not any(record.divergences for record in fitted.engine.records)
    assert max(peaks(fitted)) <= budget


def test_only_batches_that_are_likely_to_come_are_planned_for() -> None:
    loader: Any = torch.utils.data.DataLoader(ragged(29), collate_fn=Padding())  # type: ignore[arg-type]
    largest, others = batches_of(loader, 8)
    assert largest["input_ids"].shape == (8, 29)
    assert others.alike is not None
    assert bool(others.alike["attention_mask"].all())
    assert others.padded is not None
    assert others.padded["attention_mask"].sum(1).min() == 4
    # 40 samples of 8 lengths: alone none is padded; eight are never of one length, two often are.
    assert others.of(1) == (others.alike,)
    assert others.of(8) == (others.padded,)
    assert others.of(2) == (others.alike, others.padded)
    # Of a batch that is divided once it is collated, parts of one sample have padding, too.
    assert replace(others, together=8).of(1) == (others.alike, others.padded)
    same: Any = [{"input_ids": [5] * 9, "attention_mask": [1] * 9, "labels": 0}] * 20
    assert batches_of(torch.utils.data.DataLoader(same, collate_fn=Padding()), 4)[1].of(4) == ()


@pytest.mark.parametrize(
    "form",
    [
        lambda ids: (ids, 1),
        lambda ids: [ids, 1],
        lambda ids: ids,
        lambda ids: ids.tolist(),
        lambda ids: {"of": {"ids": ids}, "labels": 1},
        lambda ids: "a" * len(ids),
        lambda ids: [("a", "b"), ["word"] * len(ids)],
    ],
    ids=["tuple", "list", "tensor", "numbers", "nested", "text", "words"],
)
def test_the_longest_sample_is_found_in_whatever_form_the_data_has(form: Any) -> None:
    data = [form(torch.ones(length)) for length in (3, 7, 5, 30, 4, 6)]
    loader: Any = torch.utils.data.DataLoader(data, collate_fn=list)  # type: ignore[arg-type]
    largest, _ = batches_of(loader, 2)
    assert any(str(each) == str(data[3]) for each in largest)


def test_a_long_look_through_the_data_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.integrations.window._PATIENCE_SECONDS", -1.0)
    loader: Any = torch.utils.data.DataLoader([torch.ones(3)] * 4)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="looked through for its longest samples, 0 of 4"):
        batches_of(loader, 2)


class Unfreezing(transformers.TrainerCallback):  # type: ignore[name-defined]
    """The first layer is trained from the third step on."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        model.bert.encoder.layer[0].requires_grad_(state.global_step >= 2)


def unfreezing(trainer: Make) -> Any:
    made = trainer(classifier())
    made.create_optimizer()  # of all parameters
    made.model.bert.encoder.layer[0].requires_grad_(False)
    made.add_callback(Unfreezing())
    return made


@pytest.mark.parametrize("fits", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_a_callback_trains_from_some_step_on_is_planned_for_then(trainer: Make, *, fits: bool) -> None:
    plainly = unfreezing(trainer)
    plainly.train()
    whole = {"micro_batches": 1}
    first = memfit.transformers.fit(unfreezing(trainer), 1 << 40, fixed=whole).plan
    budget = first.prediction.plain_peak_bytes * 9 // 10 if fits else planning_of(first).smallest()[0]
    inside = unfreezing(trainer)
    fitted = memfit.transformers.fit(inside, budget, fixed=whole, meter=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        inside.train()

    assert logged(inside) == logged(plainly)
    assert all(map(torch.equal, inside.model.parameters(), plainly.model.parameters()))
    records = fitted.engine.records
    assert len(records) == 4
    assert any("no plan for them is found" in str(each.message) for each in told) is not fits
    if fits:
        assert not any(record.divergences for record in records)
        assert max(record.peak_bytes for record in records) <= budget


class SizeOfItsOwn(transformers.Trainer):  # type: ignore[name-defined]
    """Its batches have eight samples whatever the arguments say."""

    def get_train_dataloader(self) -> Any:
        loader = torch.utils.data.DataLoader(self.train_dataset, 8, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


def test_batches_of_a_loader_that_takes_no_size_are_left_whole(trainer: Make) -> None:
    inside = trainer(classifier(), kind=SizeOfItsOwn, max_steps=2)
    with pytest.raises(
        InfeasibleError, match="left whole: SizeOfItsOwn.get_train_dataloader makes batches whose size"
    ) as no:
        memfit.transformers.fit(inside, "64KiB")
    budget = no.value.minimum_bytes
    assert budget is not None
    inside = trainer(classifier(), kind=SizeOfItsOwn, max_steps=2)
    fitted = memfit.transformers.fit(inside, budget)
    assert fitted.plan.choices.micro_batches == 1
    inside.train()
    assert len(fitted.engine.records) == 2


class AtOnceOrInTurn(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Runs both parts of a batch at once where they are of one length, else one after the other; keeps metrics."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.kept: dict[str, list[float]] = {}

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        first, second = inputs["chosen"], inputs["rejected"]
        together = first.shape == second.shape
        runs = [torch.cat([first, second])] if together else [first, second]
        loss = torch.cat([model(input_ids=each).logits for each in runs]).square().mean()
        self.kept.setdefault("norm", []).append(loss.item())
        return loss

    def log(self, logs: dict[str, float], *args: Any, **named: Any) -> None:
        means = {name: sum(values) / len(values) for name, values in self.kept.items()}
        self.kept.clear()
        super().log({**logs, **means}, *args, **named)


def padded_each(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Chosen and rejected ones each to their own length."""
    return {key: nn.utils.rnn.pad_sequence([sample[key] for sample in samples], batch_first=True) for key in samples[0]}


@pytest.mark.slow
def test_a_path_that_comes_in_training_is_planned_for_after_its_first_step_and_metrics_are_trainers_own(
    trainer: Make,
) -> None:
    torch.manual_seed(0)
    data = [
        {key: torch.randint(5, 100, (length,)) for key, length in (("chosen", 16), ("rejected", short))}
        for short in (16, 16, 14, 14, 14, 14, 12, 12)
    ]

    def made() -> Any:
        each = trainer(
            classifier(),
            data,
            kind=AtOnceOrInTurn,
            per_device_train_batch_size=2,
            max_steps=4,
            remove_unused_columns=False,
        )
        each.data_collator = padded_each
        each._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)  # type: ignore[arg-type]
        return each

    plain, budget = made(), 470_000
    plain.train()
    inside = made()
    fitted = memfit.transformers.fit(inside, budget, meter=True, fixed={"micro_batches": 1})
    assert fitted.plan.prediction.plain_peak_bytes > 1.3 * budget
    with pytest.warns(UserWarning, match="operation 0 is"):
        inside.train()
    assert logged(inside) == logged(plain)
    assert logged(inside, "norm") == logged(plain, "norm")
    assert [bool(record.divergences) for record in fitted.engine.records] == [False, True, False, False]
    assert max(fitted.engine.records[number].peak_bytes or 0 for number in (2, 3)) <= budget


class Preferring(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Of each pair the first is to score higher; a batch has the first ones of all pairs, then the second ones."""

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        chosen, rejected = model(**inputs).logits[:, 0].chunk(2)
        return -nn.functional.logsigmoid(chosen - rejected).mean()


def pairs(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"input_ids": torch.stack([sample[key] for key in ("chosen", "rejected") for sample in samples])}


def packed(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All samples in one row."""
    return {key: torch.cat([sample[key] for sample in samples])[None] for key in samples[0]}


def trainer_of_pairs(trainer: Make, **named: Any) -> Any:
    tokens = [row["input_ids"] for row in data_for(classifier(), 48)]
    data = [{"chosen": a, "rejected": b} for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    made = trainer(classifier(), data, kind=Preferring, per_device_train_batch_size=4, max_steps=3, **named)
    made.data_collator = pairs
    return made


def trainer_of_packed(trainer: Make, **named: Any) -> Any:
    made = trainer(language_model(), per_device_train_batch_size=4, max_steps=3, **named)
    made.data_collator = packed
    return made


@pytest.mark.alternate(2)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("make", [trainer_of_pairs, trainer_of_packed])
def test_batches_of_more_or_fewer_rows_than_samples_are_planned_for_whole(
    trainer: Make, make: Callable[..., Any], accumulated: int
) -> None:
    settings = {"gradient_accumulation_steps": accumulated, "remove_unused_columns": False}
    plain = make(trainer, **settings)
    plain.train()
    inside = make(trainer, **settings)
    with pytest.raises(
        InfeasibleError, match=r"left whole: the data collator makes \d rows of 4 samples. Lower per_device_train"
    ) as no:
        memfit.transformers.fit(inside, "64KiB")
    assert no.value.minimum_bytes is not None
    inside = make(trainer, **settings)
    fitted = memfit.transformers.fit(inside, no.value.minimum_bytes, meter=True)
    assert fitted.plan.choices.micro_batches == accumulated
    inside.train()
    assert logged(inside) == logged(plain)
    assert apart(inside.model, plain.model) == 0.0
    assert set(peaks(fitted)) == {fitted.plan.prediction.peak_bytes}
    # Given by hand it has as many rows as the collator makes, and nothing else will do.
    step = next(iter(plain.get_train_dataloader()))
    for times, refused in ((accumulated, False), (3, True)):
        sample = {key: torch.cat([value] * times) for key, value in step.items()}
        with pytest.raises(InputError, match="the largest step holds") if refused else nullcontext():
            made = memfit.transformers.fit(make(trainer, **settings), "1GiB", sample=sample)
            assert made.plan.prediction.plain_peak_bytes == fitted.plan.prediction.plain_peak_bytes


def test_a_batch_larger_than_the_sample_is_refused_before_it_runs(trainer: Make) -> None:
    inside = trainer(classifier(), ragged(29), kind=Padded, max_steps=5)
    memfit.transformers.fit(inside, "1GiB", sample=Padding()(ragged(29)[:8]))

    with pytest.raises(BatchError, match="give memfit.transformers.fit a sample of the largest shape"):
        inside.train()


@pytest.mark.parametrize("name", ["optimizer", "freeze", "loss_fn"])
def test_an_argument_that_is_the_trainers_to_say_is_refused_as_that(trainer: Make, name: str) -> None:
    named: Any = {name: "adamw"}
    with pytest.raises(InputError, match=f"{name}: no argument of a plan for Trainer, whose own optimizer"):
        memfit.transformers.fit(trainer(classifier()), "1GiB", **named)


def test_evaluation_goes_on_in_batches_no_larger_than_training_has(trainer: Make) -> None:
    model = classifier()
    inside = trainer(model, eval_dataset=data_for(model, 12), eval_strategy="steps", eval_steps=2)
    fitted = memfit.transformers.fit(inside, "1GiB", fixed={"micro_batches": 2})
    inside.train()
    plainly = trainer(classifier(), eval_dataset=data_for(model, 12), per_device_eval_batch_size=4)
    plainly.model.load_state_dict(inside.model.state_dict())

    assert inside.args.per_device_eval_batch_size == 4
    assert any("per_device_eval_batch_size 8 -> 4" in note for note in fitted.notes)
    assert inside.evaluate()["eval_loss"] == plainly.evaluate()["eval_loss"]


# -------------------------------------------------------------------------------------------------------------- refused


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data_for(language_model()))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "tries batch sizes until one does not run out of memory"),
    "checkpointing": ({"activation_checkpointing": True}, "recomputes every layer whether or not"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha changes the model's forward in train()"),
    "model_init": ({"model_init": language_model}, "model_init makes another model in train()"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_settings_that_a_plan_cannot_stand_beside_are_refused(trainer: Make, case: tuple[Any, str]) -> None:
    settings, why = case

    with pytest.raises(InputError, match=why):
        memfit.transformers.fit(trainer(classifier(), **settings), "1GiB")


def test_processes_without_a_group_are_refused(trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(classifier())
    monkeypatch.setattr(type(made.args), "world_size", 2)

    with pytest.raises(InputError, match="2 processes that are no group of torch.distributed"):
        memfit.transformers.fit(made, "1GiB")


@pytest.mark.parametrize("flag", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_sharded_training_is_refused(trainer: Make, flag: str) -> None:
    made = trainer(classifier())
    setattr(made, flag, True)

    with pytest.raises(InputError, match=r"deepspeed= with ZeRO 0 is .*\"data\"|fsdp= is .*\"zero3\""):
        memfit.transformers.fit(made, "1GiB")


def test_a_model_that_recomputes_by_itself_is_refused(trainer: Make) -> None:
    model = classifier()
    model.activation_checkpointing_enable()  # type: ignore[operator]

    with pytest.raises(InputError, match="activation_checkpointing_disable"):
        memfit.transformers.fit(trainer(model), "1GiB")


def test_fp16_and_what_is_trainers_own_are_refused(trainer: Make) -> None:
    made = trainer(classifier())
    made.args.fp16 = True
    with pytest.raises(InputError, match="take bf16=True"):
        memfit.transformers.fit(made, "1GiB")
    with pytest.raises(InputError, match=r"TrainingArguments\(bf16=True\) is how Trainer is told so"):
        memfit.transformers.fit(trainer(classifier()), "1GiB", allow=["bf16"])
    with pytest.raises(InputError, match="'update' is no choice of a plan for Trainer"):
        memfit.transformers.fit(trainer(classifier()), "1GiB", fixed={"update": "in_backward"})
    with pytest.raises(InputError, match="is divided alike: there is 1, 2, 4, 8"):
        memfit.transformers.fit(trainer(classifier()), "1GiB", fixed={"micro_batches": 3})
    with pytest.raises(InputError, match=r"give a list of them"):
        memfit.transformers.fit(trainer(classifier()), "1GiB", allow="8bit")


def test_what_is_no_trainer_what_is_fitted_already_and_what_changed_since_are_told(trainer: Make) -> None:
    with pytest.raises(InputError, match="this is a str"):
        memfit.transformers.fit("trainer", "1GiB")  # type: ignore[call-overload]
    with pytest.raises(InputError, match="a model alone does not tell its batches"):
        memfit.transformers.fit(classifier(), "1GiB")  # type: ignore[call-overload]
    fitted = trainer(classifier())
    memfit.transformers.fit(fitted, "1GiB")
    with pytest.raises(InputError, match="has been fitted already"):
        memfit.transformers.fit(fitted, "1GiB")
    fitted.args.gradient_accumulation_steps = 3
    with pytest.raises(InputError, match="the arguments say 8 x 3 samples a step, the plan was made for 8 x 1"):
        fitted.train()
    alone = trainer(classifier())
    alone.add_callback(memfit.transformers.FitToMemory("1GiB"))
    with pytest.raises(InputError, match="does not know its trainer"):
        alone.train()


def test_data_of_unknown_size_wants_a_sample_and_a_sample_wants_all_samples(trainer: Make) -> None:
    with pytest.raises(InputError, match="the training data is a stream"):
        memfit.transformers.fit(trainer(language_model(), Stream()), "1GiB")
    few = torch.utils.data.default_collate(data_for(language_model(), 4))
    with pytest.raises(InputError, match="the largest step holds 4 samples, and the arguments say 8"):
        memfit.transformers.fit(trainer(language_model(), Stream()), "1GiB", sample=few)


@pytest.mark.slow
def test_a_budget_too_small_names_the_smallest(trainer: Make) -> None:
    made = trainer(language_model())
    with pytest.raises(InfeasibleError) as caught:
        memfit.transformers.fit(made, "200KiB")

    assert caught.value.minimum_bytes is not None
    fitted = memfit.transformers.fit(trainer(language_model()), caught.value.minimum_bytes)
    assert fitted.plan.prediction.peak_bytes <= caught.value.minimum_bytes
    assert made.args.per_device_train_batch_size == 8  # nothing was set


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
def test_where_nothing_fits_only_arguments_of_this_fit_are_named_and_each_trains(
    trainer: Make, accumulated: int
) -> None:
    def attempted(budget: int | str, **named: Any) -> Any:
        made = trainer(classifier(), gradient_accumulation_steps=accumulated, max_steps=2)
        fitted = memfit.transformers.fit(made, budget, **named)
        made.train()
        return fitted

    with pytest.raises(InfeasibleError) as hopeless:
        attempted(1000)
    assert [remedy.kind for remedy in hopeless.value.remedies] == ["budget"]

    fixed = {"micro_batches": accumulated, "state_format": "32bit"}
    least = hopeless.value.minimum_bytes
    assert least is not None
    budget = least + 20_000
    with pytest.raises(InfeasibleError) as refused:  # in whole batches
        attempted(budget, fixed=fixed)
    remedies = refused.value.remedies
    assert {"budget", "micro_batches", ""} == {remedy.kind for remedy in remedies}
    for remedy in remedies:
        assert remedy.text in str(refused.value)
        assert remedy.arguments is not None
        assert set(remedy.arguments.get("fixed", fixed)) == set(fixed)
        fitted = attempted(**{"budget": budget, "fixed": fixed, **remedy.arguments})
        assert len(fitted.engine.records) == 2


def test_without_the_extra_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [
        name for name in sys.modules if name.startswith(("memfit.transformers", "memfit.integrations.transformers"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(
        vars(memfit), "transformers", raising=False
    )  # not delattr, which looks first, and so loads it again

    with pytest.raises(InputError, match=r"pip install 'memfit\[transformers\]'"):
        _ = memfit.transformers


def test_a_model_alone_gives_an_engine_as_memfit_fit_does() -> None:
    model = language_model()
    batch = torch.utils.data.default_collate(data_for(model, 8))
    engine = memfit.transformers.fit(model, "1GiB", sample=batch, fixed={"micro_batches": 1})

    assert engine.step(batch).loss > 0
