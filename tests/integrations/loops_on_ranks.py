"""What a rank does in the tests of Lightning, Fabric and Accelerate on several ranks."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import memfit
from integrations.trainer_ranks import whole

ROWS, WIDTH = 16, 32


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def loader(devices: int = 2, rank: int | None = None) -> Any:
    """Of 8 batches, of which each of two ranks takes 4; for one device of 4 that are twice as large.

    Args:
        devices: 1 or 2.
        rank: whose rows it deals out itself, in their order; else Lightning deals them out to two ranks, shuffled.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * ROWS, WIDTH, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs.roll(1, 0))
    sampler: Any = None
    if rank is not None:
        sampler = torch.utils.data.DistributedSampler(data, devices, rank, shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=ROWS * 2 // devices, sampler=sampler)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Run:
    """Of Lightning's Trainer.

    Attributes:
        settings: of the Trainer.
        fixed: of FitToMemory; None for Lightning alone.
        optimizer: by name.
        begin, save: checkpoints.
        devices: of the Trainer.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] | None = None
    optimizer: str = "sgd"
    begin: str | None = None
    save: str | None = None
    devices: int = 2


@dataclass(frozen=True)
class Told:
    """Of a run, on one rank.

    Attributes:
        losses: of the batches.
        rates: learning rates at their ends.
        evaluated: the last loss of validation.
        weights: of the checkpoint, or of the module where none was saved.
        predicted, peaks: of this rank, and of its steps.
    """

    losses: list[float]
    rates: list[float]
    evaluated: float
    weights: list[torch.Tensor]
    predicted: int
    peaks: list[int]


def by_lightning(rank: int, runs: list[Run]) -> list[Told]:
    """What happens in each."""
    warnings.simplefilter("ignore")
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "GROUP_RANK": "0"}
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, optimizer: str) -> None:
            super().__init__()
            self.net = built()
            self.optimizer = optimizer
            self.losses: list[float] = []
            self.rates: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_fn(self.net, batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("evaluated", loss_fn(self.net, batch))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            if self.optimizer == "sgd":
                made: Any = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            else:
                made = torch.optim.AdamW(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
            return [made], [{"scheduler": schedule, "interval": "step"}]

    found = []
    for run in runs:
        module = Module(run.optimizer)
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        fitted = None if run.fixed is None else memfit.lightning.FitToMemory(1 << 40, meter=True, fixed=run.fixed)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=run.devices,
            strategy="ddp" if run.devices > 1 else "auto",
            callbacks=[fitted] if fitted else [],
            **quiet,
            **{"max_epochs": 1, **run.settings},
        )
        data = loader(run.devices, None if run.settings.get("use_distributed_sampler", True) else rank)
        trainer.fit(module, data, data, ckpt_path=run.begin)
        predicted, peaks = 0, []
        if fitted is not None:
            assert fitted.engine is not None
            assert not any(record.divergences for record in fitted.engine.records)
            figures = fitted.plan.prediction
            predicted = figures.ranks[rank].peak_bytes if figures.ranks else figures.peak_bytes
            peaks = [record.peak_bytes or 0 for record in fitted.engine.records]
        weights = whole(module)
        if run.save is not None:
            trainer.save_checkpoint(run.save)
            saved = torch.load(run.save, weights_only=True)["state_dict"]
            weights = [saved[name] for name, _ in module.named_parameters()]
        evaluated = float(trainer.callback_metrics["evaluated"])
        found.append(Told(module.losses, module.rates, evaluated, weights, predicted, peaks))
    return found


def in_loops_of_ones_own(rank: int, way: str) -> tuple[list[float], list[float], str]:
    """Losses of a whole epoch in the group that Fabric has made, in that of Accelerate, and what is said of `fabric=`."""
    del rank
    warnings.simplefilter("ignore")
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    import accelerate
    import lightning

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def trained(batches: Any) -> list[float]:
        engine = memfit.fit(built(), next(iter(batches)), loss_fn, 1 << 40, sgd, devices=2, fixed={"sharding": way})
        return [engine.step(tuple(batch)).loss for batch in batches]

    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    said = ""
    try:
        memfit.fit(built(), next(iter(loader())), loss_fn, 1 << 40, sgd, fabric=fabric)
    except memfit.InputError as error:
        said = str(error)
    by_fabric = trained(fabric.setup_dataloaders(loader()))
    accelerator = accelerate.Accelerator(cpu=True)
    return by_fabric, trained(accelerator.prepare(loader())), said


def alone() -> list[float]:
    """Plain PyTorch, on batches of both ranks together."""
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = loader().dataset.tensors
    losses = []
    for batch in zip(inputs.split(2 * ROWS), targets.split(2 * ROWS), strict=True):
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
