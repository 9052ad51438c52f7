"""Lightning's Trainer and Fabric under a budget: the same losses, the peak as predicted, and what cannot stand beside a plan refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.errors import BatchError, InfeasibleError, InputError

lightning = pytest.importorskip("lightning")

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


class Module(lightning.LightningModule):
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
    fitted = memfit.lightning.FitToMemory(budget, meter=True)
    trainer = trained(inside, fitted, **settings)
    accumulated = settings.get("accumulate_grad_batches", 1)

    assert not fitted.plan.script.plain
    assert inside.losses == plainly.losses
    assert all(map(torch.equal, inside.parameters(), plainly.parameters()))
    assert trainer.logged_metrics == plain_trainer.logged_metrics
    records = fitted.engine.records
    assert [record.micro_batches for record in records] == {1: [1] * 4, 2: [2, 2], 3: [3, 1]}[accumulated]
    # The last batch of a step runs beside the gradients of those before; the optimizer's state is there from the second step on.
    full = [record for record in records[1:] if record.micro_batches == accumulated]
    # All batches of a step are in the prediction; of Lightning's, only one is there at a time.
    others = (accumulated - 1) * 2 * ROWS * WIDTH * 4
    predicted = fitted.plan.prediction.peak_bytes - others
    assert all(record.peak_bytes == pytest.approx(predicted, rel=0.01) for record in full)
    assert max(record.peak_bytes for record in records) <= budget
    assert not any(record.departures for record in records)
    assert "training_step" not in vars(inside)


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


# -------------------------------------------------------------------------------------------------------------- refused


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Searching(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class Drawing(Module):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "manual": (Manual, {}, "in manual optimization training_step runs backward and the update itself"),
    "line search": (Searching, {}, "one optimizer that runs forward and backward once"),
    "draws itself": (Drawing, {}, "draws its batches itself"),
    "half": (Module, {"precision": "64-true"}, "precision='64-true'"),
}


@pytest.mark.filterwarnings("ignore:.*.dataloader_iter. (step flavor|argument in the)")  # experimental, it says
@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_what_a_plan_cannot_stand_beside_is_refused(case: tuple[Callable[[], Any], dict[str, Any], str]) -> None:
    make, settings, why = case

    with pytest.raises(InputError, match=why):
        trained(make(), memfit.lightning.FitToMemory("1GiB"), **settings)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # the compiler's own
def test_a_changing_number_of_batches_a_step_and_a_compiled_module_are_refused() -> None:
    scheduler = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 4: 2})
    with pytest.raises(InputError, match="GradientAccumulationScheduler changes in training"):
        trained(Module(), scheduler, memfit.lightning.FitToMemory("1GiB"))
    compiled = Module()
    compiled.net = torch.compile(compiled.net)  # type: ignore[assignment]
    with pytest.raises(InputError, match="a compiled module runs other operations"):
        trained(compiled, memfit.lightning.FitToMemory("1GiB"))


def test_choices_that_are_lightnings_and_a_plan_before_training_are_refused() -> None:
    with pytest.raises(InputError, match="'precision' is for Lightning to say"):
        memfit.lightning.FitToMemory("1GiB", fixed={"precision": "bf16"})
    with pytest.raises(InputError, match="there is no plan before trainer.fit"):
        _ = memfit.lightning.FitToMemory("1GiB").plan


def test_data_that_cannot_be_looked_through_wants_a_sample_and_larger_batches_are_refused() -> None:
    batches = [(torch.randn(n, WIDTH), torch.randn(n, WIDTH)) for n in (64, 128)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="comes from a DataLoader that cannot be looked through"):
        trained(Module(), memfit.lightning.FitToMemory("1GiB"), data=loader)
    module = Module()
    with pytest.raises(BatchError, match="the plan is for 64 samples"):
        trained(module, memfit.lightning.FitToMemory("1GiB", sample=batches[0]), data=loader)
    assert len(module.losses) == 1  # the small one
    assert "training_step" not in vars(module)


@pytest.mark.slow
def test_too_small_a_budget_names_the_smaller_batches_that_fit() -> None:
    fitted = memfit.lightning.FitToMemory(1 << 40)
    trained(Module(), fitted)
    smallest = fitted.plan.runtime.search.smallest()[0]
    module = Module()
    with pytest.raises(InfeasibleError, match=r"DataLoader\(batch_size=128\) and Trainer\(accumulate_grad_batches=2\)"):
        trained(module, memfit.lightning.FitToMemory(smallest - 1))
    loader = torch.utils.data.DataLoader(rows(), batch_size=128, shuffle=True)
    trained(Module(), memfit.lightning.FitToMemory(smallest - 1), data=loader, accumulate_grad_batches=2)


def test_without_the_extra_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    for name in [name for name in sys.modules if name.startswith("memfit.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(
        vars(memfit), "lightning", raising=False
    )  # not delattr, which looks first, and so loads it again

    with pytest.raises(InputError, match=r"pip install 'memfit\[lightning\]'"):
        _ = memfit.lightning
