"""What a rank does in the tests of Lightning, Fabric and Accelerate on several ranks."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import nn

import memfit

ROWS, WIDTH = 16, 32


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def loader() -> Any:
    """Of 8 batches of all ranks: each takes 4."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * ROWS, WIDTH, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs.roll(1, 0))
    return torch.utils.data.DataLoader(data, batch_size=ROWS)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


Told = tuple[list[float], list[torch.Tensor], int, list[int]]


def by_lightning(rank: int, fits: list[dict[str, Any] | None]) -> list[Told]:
    """Losses of this rank, parameters, its predicted peak and the measured ones; under Lightning alone where there is nothing to fit with."""
    warnings.simplefilter("ignore")
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = built()
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_fn(self.net, batch)
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    found = []
    for named in fits:
        module = Module()
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        fitted = None if named is None else memfit.lightning.FitToMemory(1 << 40, meter=True, **named)
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            callbacks=[fitted] if fitted else [],
            gradient_clip_val=0.5,
            **quiet,
        )
        trainer.fit(module, loader())
        predicted, peaks = 0, []
        if fitted is not None:
            assert fitted.engine is not None
            predicted = fitted.plan.prediction.ranks[rank].peak_bytes
            peaks = [record.peak_bytes or 0 for record in fitted.engine.records[1:]]
        found.append((module.losses, [p.detach().clone() for p in module.parameters()], predicted, peaks))
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
