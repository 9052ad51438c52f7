"""Lightning's Trainer and Fabric under a budget: the same losses, the peak as predicted, and what cannot stand beside a plan refused."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit import rehearsal
from memfit.errors import BatchError, InfeasibleError, InputError, SplitError
from memfit.planning import planning_of
from memfit.units import format_bytes

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

WIDTH = 64
ROWS = 256

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Lightning 2.6 asks torch for what is called otherwise since.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    # Lightning would have more workers for a loader whose data is in memory, and says so where a loader has few batches.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))))


class Module(lightning.LightningModule):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.net[:6](x)
        self.log("middle", hidden.mean())  # a copy, in the middle of the forward
        return ((self.net[6:](hidden) - y) ** 2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(count: int = 4 * ROWS) -> torch.utils.data.Dataset[Any]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(count, WIDTH, generator=generator) for _ in range(2))
    return torch.utils.data.TensorDataset(x, y)


def trained(module: Any, *callbacks: Any, data: Any = None, **named: Any) -> Any:
    """The trainer, after an epoch of four batches."""
    torch.manual_seed(1)
    settings = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **named,
    }
    trainer = lightning.Trainer(callbacks=list(callbacks), **settings)
    loader = torch.utils.data.DataLoader(rows(), batch_size=ROWS, shuffle=True)
    trainer.fit(module, loader if data is None else data)
    return trainer


def plain_peak(**named: Any) -> int:
    fitted = memfit.lightning.FitToMemory(1 << 40)
    trained(Module(), fitted, **named)
    return fitted.plan.prediction.plain_peak_bytes


# --------------------------------------------------------------------------------------------------------- same results


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 1.0},
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3},  # the last step has one batch, the one before it no state yet
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_losses_are_lightnings_own_to_the_bit_and_the_peak_is_predicted(settings: dict[str, Any]) -> None:
    plainly, inside = Module(), Module()
    plain_trainer = trained(plainly, **settings)
    budget = plain_peak(**settings) * 75 // 100
    accumulated = settings.get("accumulate_grad_batches", 1)
    fitted = memfit.lightning.FitToMemory(budget, fixed={"micro_batches": accumulated}, meter=True)
    trainer = trained(inside, fitted, **settings)

    assert not fitted.plan.script.plain
    assert inside.losses == plainly.losses
    assert all(map(torch.equal, inside.parameters(), plainly.parameters()))
    assert trainer.logged_metrics == plain_trainer.logged_metrics
    records = fitted.engine.records
    assert [record.micro_batches for record in records] == {1: [1] * 4, 2: [2, 2], 3: [3, 1]}[accumulated]
    # The last batch of a step runs beside the gradients of those before; the optimizer's state is there from the second step on.
    full = [record for record in records[1:] if record.micro_batches == accumulated]
    predicted = fitted.plan.prediction.peak_bytes
    assert full or accumulated == 3
    assert all(record.peak_bytes == pytest.approx(predicted, rel=0.01) for record in full)
    rehearsal = fitted.engine.rehearsal
    assert rehearsal.measured_peak_bytes == pytest.approx(predicted, rel=0.01)
    assert max(record.peak_bytes for record in records) <= budget
    assert not any(record.divergences for record in records)
    assert not any("training_step" in vars(each) for each in (inside, trainer.strategy))


class AtOnceOrInTurn(lightning.LightningModule):  # type: ignore[name-defined]
    """Runs both parts of a batch at once where they are of one length, else one after the other; keeps a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()[:-1]
        self.mean = torchmetrics.MeanMetric()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = batch["first"], batch["second"]
        runs = [torch.cat([first, second])] if first.shape == second.shape else [first, second]
        loss = torch.stack([self.net(each).square().mean() for each in runs]).mean()
        self.mean(loss.detach())
        self.log("mean", self.mean)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_a_path_that_comes_in_training_is_planned_for_after_its_first_step_and_metrics_are_as_ever() -> None:
    torch.manual_seed(0)
    whole = torch.randn(8, 16, WIDTH)
    data: Any = [
        {"first": whole, "second": whole[:, :length]}  # as a collator that pads each to its own length makes them
        for length in (16, 14, 14, 12)
    ]
    settings = {"data": torch.utils.data.DataLoader(data, batch_size=None), "use_distributed_sampler": False}
    sample = data[0]
    plainly, inside = AtOnceOrInTurn(), AtOnceOrInTurn()
    plain_trainer = trained(plainly, **settings)
    fixed = {"micro_batches": 1}
    measured = memfit.lightning.FitToMemory("1GiB", sample=sample, fixed=fixed)
    trained(AtOnceOrInTurn(), measured, **settings)
    budget = measured.plan.prediction.plain_peak_bytes * 7 // 10
    fitted = memfit.lightning.FitToMemory(budget, sample=sample, fixed=fixed, meter=True)
    with pytest.warns(UserWarning, match="operation 0 is"):
        trainer = trained(inside, fitted, **settings)

    assert inside.losses == plainly.losses
    assert all(map(torch.equal, inside.parameters(), plainly.parameters()))
    assert trainer.logged_metrics == plain_trainer.logged_metrics
    records = fitted.engine.records
    assert [bool(record.divergences) for record in records] == [False, True, False, False]
    assert all((record.peak_bytes or 0) <= budget for record in records if not record.divergences)


def test_a_resumed_run_goes_on_as_one_that_was_not_stopped(tmp_path: Any) -> None:
    budget = plain_peak() * 75 // 100
    whole = Module()
    trained(whole, memfit.lightning.FitToMemory(budget), max_epochs=2)
    first = trained(Module(), memfit.lightning.FitToMemory(budget))
    first.save_checkpoint(tmp_path / "one.ckpt")
    # Shuffled anew in each epoch, from a generator that Lightning's checkpoints leave out.
    state = torch.get_rng_state()
    resumed = Module()
    fitted = memfit.lightning.FitToMemory(budget)
    loader = torch.utils.data.DataLoader(rows(), batch_size=ROWS, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[fitted],
    )  # fmt: skip
    torch.set_rng_state(state)
    trainer.fit(resumed, loader, ckpt_path=tmp_path / "one.ckpt", weights_only=False)

    assert [record.step for record in fitted.engine.records] == [5, 6, 7, 8]
    assert resumed.losses == whole.losses[4:]
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))


def test_metrics_know_nothing_of_the_rehearsal() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torchmetrics.SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.seen.update(torch.ones(()))
            return loss

    module = Measured()
    trained(module, memfit.lightning.FitToMemory("1GiB"))

    assert int(module.seen.compute()) == 4


# ------------------------------------------------------------------------------------------------------ divided batches

ORDER_OF_ADDITIONS = 1e-5  # of a loss or a parameter after some steps of SGD, in float32
ROUNDING_OF_BF16 = 2.0**-8  # a gradient of fewer samples is rounded otherwise, in backward


class Divided(Module):
    """Draws nothing, logs what there is to log."""

    def __init__(self) -> None:
        super().__init__()
        torchmetrics = pytest.importorskip("torchmetrics")
        self.net = nn.Sequential(*(layer for layer in network() if not isinstance(layer, nn.Dropout)))
        self.seen = torchmetrics.SumMetric()
        self.hooks: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found = self.net(x)
        loss = ((found - y) ** 2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"mean": found.mean(), "given": loss.item()}, on_epoch=True, batch_size=len(x))
        self.log("largest", found.max(), on_epoch=True, reduce_fx="max")
        self.log("rows", float(len(x)), on_epoch=True, reduce_fx=torch.sum)
        self.seen(torch.tensor(float(len(x))))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def on_after_backward(self) -> None:
        self.hooks.append("backward")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.hooks.append("zero_grad")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def apart(one: nn.Module, other: nn.Module) -> float:
    """Largest relative difference of a parameter."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().norm() / p.detach().norm()) for p, q in pairs)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"gradient_clip_val": 0.05}, ORDER_OF_ADDITIONS),
        ({"accumulate_grad_batches": 2}, ORDER_OF_ADDITIONS),
        ({"precision": "bf16-mixed"}, ROUNDING_OF_BF16),
    ],
    ids=str,
)
def test_a_divided_batch_is_the_whole_one_up_to_the_order_of_additions(
    settings: dict[str, Any], tolerance: float
) -> None:
    accumulated = settings.get("accumulate_grad_batches", 1)
    plainly, inside = Divided(), Divided()
    # The last batch is smaller, and its last part smaller still.
    loaders = [torch.utils.data.DataLoader(rows(4 * ROWS - 101), batch_size=ROWS, shuffle=True) for _ in range(2)]
    plain_trainer = trained(plainly, data=loaders[0], **settings)
    fitted = memfit.lightning.FitToMemory("1GiB", fixed={"micro_batches": 4 * accumulated}, meter=True)
    trainer = trained(inside, fitted, data=loaders[1], **settings)

    assert inside.losses == pytest.approx(plainly.losses, rel=tolerance)
    assert apart(plainly, inside) < tolerance
    told, plainly_told = ({n: float(v) for n, v in each.logged_metrics.items()} for each in (trainer, plain_trainer))
    assert told == pytest.approx(plainly_told, rel=max(tolerance, 1e-4), abs=tolerance)
    assert told["seen"] == told["rows_epoch"] == 4 * ROWS - 101
    assert told["given_epoch"] == pytest.approx(told["loss_epoch"])
    records = fitted.engine.records
    assert [record.micro_batches for record in records] == {1: [4, 4, 4, 3], 2: [8, 7]}[accumulated]
    assert inside.hooks.count("backward") == 15
    assert inside.hooks.count("zero_grad") == plainly.hooks.count("zero_grad") == len(records)
    # The first step has no optimizer state yet; the last one's batch may be smaller.
    predicted = fitted.plan.prediction.peak_bytes
    assert records[1].peak_bytes == pytest.approx(predicted, rel=0.01)
    assert fitted.engine.rehearsal.measured_peak_bytes == pytest.approx(predicted, rel=0.01)
    assert not any(record.divergences for record in records)
    assert "optimizer_zero_grad" not in vars(inside)


class Looking(Divided):
    """Reads a value of its forward, which fake tensors have none of: captured for real."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found = self.net(x)
        return ((found - y) ** 2).mean() * (1.0 if found.mean().item() < 1e6 else 0.5)


def test_a_step_captured_for_real_counts_one_batch_at_a_time_too() -> None:
    fitted = memfit.lightning.FitToMemory("1GiB", fixed={"micro_batches": 4}, meter=True)
    trained(Looking(), fitted, accumulate_grad_batches=2)

    assert fitted.plan.source == "real"
    records = fitted.engine.records
    assert records[1].micro_batches == 4
    assert records[1].peak_bytes == pytest.approx(fitted.plan.prediction.peak_bytes, rel=0.01)


class Tagging(lightning.LightningModule):  # type: ignore[name-defined]
    """A mean over the tokens that are not masked, of which parts hold different numbers, some none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(batch["ids"]).flatten(0, 1), batch["labels"].flatten())}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_plain_is_the_step_that_lightning_runs_without_a_plan(accumulated: int) -> None:
    settings = {"accumulate_grad_batches": accumulated}
    plain = memfit.lightning.FitToMemory(1 << 40, meter=True, fixed={"micro_batches": accumulated})
    trained(Module(), plain, **settings)
    divided = memfit.lightning.FitToMemory(1 << 40, fixed={"micro_batches": 4 * accumulated})
    trained(Module(), divided, **settings)

    told = divided.plan.prediction
    assert told.plain_peak_bytes == plain.plan.prediction.plain_peak_bytes > told.peak_bytes
    measured = plain.engine.records[-1].peak_bytes
    assert measured == pytest.approx(told.plain_peak_bytes, rel=0.01)
    assert told.plain_with == ("" if accumulated == 1 else f"{accumulated} micro-batches")


def test_parts_count_by_what_the_loss_averages_over() -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 50, (32, 12), generator=generator)
    labels = ids.roll(1, 1)
    for row in range(32):
        labels[row, 11 - row % 11 if row % 8 > 1 else 0 :] = -100  # in each batch of 8, samples in which nothing counts
    data = [{"ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]
    plainly, inside = Tagging(), Tagging()
    trained(plainly, data=torch.utils.data.DataLoader(data, batch_size=8))  # type: ignore[arg-type]
    fitted = memfit.lightning.FitToMemory("1GiB", fixed={"micro_batches": 4})
    trained(inside, fitted, data=torch.utils.data.DataLoader(data, batch_size=8))  # type: ignore[arg-type]

    assert fitted.plan.choices.weights == "tokens:labels"
    assert [record.micro_batches for record in fitted.engine.records] == [3] * 4
    assert inside.losses == pytest.approx(plainly.losses, rel=ORDER_OF_ADDITIONS)
    assert apart(plainly, inside) < ORDER_OF_ADDITIONS


class Telling(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return {"loss": super().training_step(batch, batch_idx), "inputs": batch[0]}


class Clearing(Module):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


class Gradual(lightning.pytorch.callbacks.BaseFinetuning):  # type: ignore[name-defined]
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[:9])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:9], optimizer)


class Half(Module):
    """Trains what is not frozen, and counts its batches in a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.SumMetric()
        self.counts: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.update(1.0)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.counts.append(float(self.seen.compute()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def test_layers_that_are_trained_from_an_epoch_on_are_planned_for_then() -> None:
    plainly, inside = Half(), Half()
    trained(plainly, Gradual(), max_epochs=3)
    first = memfit.lightning.FitToMemory(1 << 40)
    trained(Half(), Gradual(), first)
    budget = first.plan.prediction.plain_peak_bytes * 9 // 10
    fitted = memfit.lightning.FitToMemory(budget, meter=True, fixed={"micro_batches": 1})
    trained(inside, Gradual(), fitted, max_epochs=3)

    assert inside.losses == plainly.losses
    assert inside.counts == plainly.counts
    assert all(map(torch.equal, inside.parameters(), plainly.parameters()))
    assert fitted.engine is not None
    assert len(fitted.engine.records) == 12
    assert not any(record.divergences for record in fitted.engine.records)
    assert max(record.peak_bytes or 0 for record in fitted.engine.records) <= budget


class Predicting(Module):
    """Returns what it has computed, as for metrics at the end of the batch: Lightning holds it to there."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        x, y = batch
        hidden = self.net[:4](x)
        predicted = self.net[4:](hidden)
        return {"loss": ((predicted - y) ** 2).mean(), "hidden": hidden.detach(), "predicted": predicted.detach()}


def test_what_a_step_returns_besides_the_loss_is_held_to_the_end_of_the_batch() -> None:
    budget = memfit.lightning.FitToMemory("256KiB")
    with pytest.raises(InfeasibleError) as needed:
        trained(Predicting(), budget)
    smallest = needed.value.minimum_bytes
    assert smallest is not None
    plainly, inside = Predicting(), Predicting()
    trained(plainly)
    fitted = memfit.lightning.FitToMemory(smallest, meter=True)
    trained(inside, fitted)
    assert inside.losses == plainly.losses
    assert max(record.peak_bytes or 0 for record in fitted.engine.records) <= smallest  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "why"),
    [(Telling, "training_step returns 'inputs' besides the loss"), (Clearing, "an optimizer_zero_grad of its own")],
)
def test_what_keeps_a_batch_whole_is_told(make: Any, why: str) -> None:
    with pytest.raises(SplitError, match=f"cannot be honoured: .*{why}"):
        trained(make(), memfit.lightning.FitToMemory("1GiB", fixed={"micro_batches": 2}))
    with pytest.raises(InfeasibleError, match=f"Batches are left whole: .*{why}") as refused:
        trained(make(), memfit.lightning.FitToMemory("256KiB"))
    assert not any("micro_batches" in remedy.text for remedy in refused.value.remedies)


def test_room_below_is_the_plans_as_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("MEMFIT_OFFLOAD_DIR", str(tmp_path))
    fitted = memfit.lightning.FitToMemory("1GiB", host_budget="64MiB")
    trained(Module(), fitted)
    assert planning_of(fitted.plan).bundle.lower_tier.free_bytes == 64 << 20
    with pytest.raises(InputError, match=r"disk_budget='1GiB' is for the disk below a GPU's host memory"):
        trained(Module(), memfit.lightning.FitToMemory("1GiB", host_budget="64MiB", disk_budget="1GiB"))


def test_parts_that_a_step_cannot_have_are_refused() -> None:
    with pytest.raises(InputError, match="there is any multiple of 2 up to 512"):
        trained(Module(), memfit.lightning.FitToMemory("1GiB", fixed={"micro_batches": 3}), accumulate_grad_batches=2)


class Normed(Divided):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(WIDTH))


def test_what_sees_the_whole_batch_is_not_divided() -> None:
    module = Normed()
    with pytest.raises(SplitError, match="a part of the batch cannot be run alone"):
        trained(module, memfit.lightning.FitToMemory("1GiB", fixed={"micro_batches": 2}))
    with pytest.raises(InfeasibleError) as refused:
        trained(module, memfit.lightning.FitToMemory("256KiB"))
    assert not any("micro_batches" in remedy.text for remedy in refused.value.remedies)


class Skipping(Divided):
    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss


def test_a_part_without_a_loss_is_an_error() -> None:
    with pytest.raises(InputError, match="gave None for a part of a batch"):
        trained(Skipping(), memfit.lightning.FitToMemory("1GiB", fixed={"micro_batches": 2}))


# -------------------------------------------------------------------------------------------------------------- refused


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Searching(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class Untrained(Module):
    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None


class Unnamed(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return {"total": super().training_step(batch, batch_idx)}


class Drawing(Module):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "manual": (Manual, {}, "in manual optimization training_step runs backward and the update itself"),
    "line search": (Searching, {}, "one optimizer that runs forward and backward once"),
    "no optimizer": (Untrained, {}, "configure_optimizers returned None"),
    "no loss": (Unnamed, {}, r"a dictionary without 'loss' \(total\)"),
    "draws itself": (Drawing, {}, "draws its batches itself"),
    "half": (Module, {"precision": "64-true"}, "precision='64-true'"),
}


@pytest.mark.filterwarnings("ignore:.*.dataloader_iter. (step flavor|argument in the)")  # experimental, it says
@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.")
@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_what_a_plan_cannot_stand_beside_is_refused(case: tuple[Callable[[], Any], dict[str, Any], str]) -> None:
    make, settings, why = case

    with pytest.raises(InputError, match=why):
        trained(make(), memfit.lightning.FitToMemory("1GiB"), **settings)


def test_a_changing_number_of_batches_a_step_is_refused() -> None:
    scheduler = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 4: 2})
    with pytest.raises(InputError, match="GradientAccumulationScheduler changes in training"):
        trained(Module(), scheduler, memfit.lightning.FitToMemory("1GiB"))


def test_choices_that_are_lightnings_and_a_plan_before_training_are_refused() -> None:
    with pytest.raises(InputError, match="'precision' is no choice of a plan for Lightning"):
        memfit.lightning.FitToMemory("1GiB", fixed={"precision": "bf16"})
    with pytest.raises(InputError, match="there is no plan before trainer.fit, and .* none after it, so look"):
        _ = memfit.lightning.FitToMemory("1GiB").plan


def test_data_that_cannot_be_looked_through_wants_a_sample_and_larger_batches_are_refused() -> None:
    batches = [(torch.randn(n, WIDTH), torch.randn(n, WIDTH)) for n in (64, 128)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="comes from a DataLoader that cannot be looked through"):
        trained(Module(), memfit.lightning.FitToMemory("1GiB"), data=loader)
    module = Module()
    with pytest.raises(BatchError, match="the plan is for batches up to"):
        trained(module, memfit.lightning.FitToMemory("1GiB", sample=batches[0]), data=loader)
    assert len(module.losses) == 1  # the small one
    assert "training_step" not in vars(module)


@pytest.mark.slow
def test_too_small_a_budget_for_whole_batches_divides_them() -> None:
    fitted = memfit.lightning.FitToMemory(1 << 40)
    trained(Module(), fitted)
    budget = memfit.smallest_budget(fitted.plan) - 1
    divided = memfit.lightning.FitToMemory(budget, meter=True)
    trained(Module(), divided)

    assert divided.plan.choices.micro_batches > 1
    assert max(record.peak_bytes for record in divided.engine.records) <= budget


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [2, 1])
def test_where_nothing_fits_only_what_lightning_users_can_say_is_named_and_it_trains(accumulated: int) -> None:
    settings = {"accumulate_grad_batches": accumulated}
    whole = {"micro_batches": accumulated}

    def attempted(budget: int | str, **named: Any) -> Any:
        fitted = memfit.lightning.FitToMemory(budget, **named)
        trained(Module(), fitted, **settings)
        return fitted

    with pytest.raises(InfeasibleError) as hopeless:
        attempted(1000)
    assert [remedy.kind for remedy in hopeless.value.remedies] == ["budget"]
    assert not any(word in str(hopeless.value) for word in ("allow", "bf16", "8bit", "4bit", "precision"))
    smaller = attempted(hopeless.value.remedies[0].arguments["budget"])
    assert smaller.plan.prediction.peak_bytes <= hopeless.value.minimum_bytes

    with pytest.raises(InfeasibleError) as refused:  # in whole batches
        attempted(budget := hopeless.value.minimum_bytes + 20_000, fixed=whole)
    remedies = refused.value.remedies
    assert {"budget", "micro_batches"} <= {remedy.kind for remedy in remedies}
    for remedy in remedies:
        fitted = attempted(**{"budget": budget, "fixed": whole, **(remedy.arguments or {})})
        assert len(fitted.engine.records) == 4 // accumulated
        assert remedy.text in str(refused.value)


def test_a_failed_repair_names_the_budget_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    known = rehearsal.rehearse

    def more(*given: Any, **named: Any) -> Any:
        found = known(*given, **named)
        return dataclasses.replace(found, measured_peak_bytes=found.measured_peak_bytes + 50_000)

    fitted = memfit.lightning.FitToMemory(1 << 40, fixed={"micro_batches": 1})
    trained(Module(), fitted)
    budget = memfit.smallest_budget(fitted.plan) + 1000
    monkeypatch.setattr(rehearsal, "rehearse", more)
    with pytest.raises(InfeasibleError, match=f"above the budget of {format_bytes(budget)}") as refused:
        trained(Module(), memfit.lightning.FitToMemory(budget, fixed={"micro_batches": 1}))
    assert refused.value.budget_bytes == budget
    (larger,) = refused.value.remedies
    trained(Module(), memfit.lightning.FitToMemory(**{"fixed": {"micro_batches": 1}, **(larger.arguments or {})}))


def test_without_the_extra_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    for name in [
        name for name in sys.modules if name.startswith(("memfit.lightning", "memfit.integrations.lightning"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(
        vars(memfit), "lightning", raising=False
    )  # not delattr, which looks first, and so loads it again

    with pytest.raises(InputError, match=r"pip install 'memfit\[lightning\]'"):
        _ = memfit.lightning


def test_what_a_part_of_a_batch_logs_is_held_as_a_number() -> None:
    """The mean of a squared error lies in the storage of all elements' errors."""
    error = nn.functional.mse_loss(torch.ones(64, requires_grad=True), torch.zeros(64))
    assert error.untyped_storage().nbytes() > error.nbytes
    from memfit.integrations.lightning.logged import Calls

    calls = Calls()
    calls.note("log", "error", error)
    calls.end_part(lightning.LightningModule(), error.detach(), samples=64, share=0.5)
    (held,) = calls._values["error"]
    assert isinstance(held.value, torch.Tensor)
    assert held.value.untyped_storage().nbytes() == held.value.nbytes
