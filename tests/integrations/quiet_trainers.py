"""What tests of Trainer and of Lightning have in common: their loops on the CPU, which say and save nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import small

QUIET = {
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_pin_memory": False,
}
"""Of `transformers.TrainingArguments`: every loss is in the trainer's log."""


def trained_by_lightning(model: Any, rows: Sequence[Any], samples: int, *callbacks: Any, **named: Any) -> Any:
    """The LightningModule around a model that gives a loss, after Lightning's own loop with AdamW over what needs a gradient; `losses` are those of its calls.

    Args:
        model: called with the entries of a batch.
        rows: data.
        samples: of a batch.
        callbacks: of Lightning's `Trainer`.
        named: further arguments of it.
    """
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return small.adamw(p for p in self.parameters() if p.requires_grad)

    torch.manual_seed(1)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    loop = lightning.Trainer(callbacks=list(callbacks), accelerator="cpu", devices=1, **quiet, **named)
    module = Module()
    loop.fit(module, torch.utils.data.DataLoader(rows, batch_size=samples))  # type: ignore[arg-type]
    return module
