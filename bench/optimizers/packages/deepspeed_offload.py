"""DeepSpeed ZeRO-Offload: state and update on the host, by its own kernel (CPUAdam); and that kernel alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from optimizers.packages import DECAY, RATES, Setting

from memfit import batches

NAME = "DeepSpeed"
PACKAGE, INSTALL = "deepspeed", "deepspeed==0.19.8"

# One process that finds itself.
ALONE = {
    "DS_ACCELERATOR": "cpu",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29531",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_SIZE": "1",
}


def obstacle() -> str | None:
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    return f"it builds its kernel with {' and '.join(missing)}, not found here" if missing else None


def settings() -> list[Setting]:
    return [
        Setting("DeepSpeed CPUAdam", "AdamW", _cpu_adam),
        Setting(
            "DeepSpeed ZeRO-Offload",
            "AdamW",
            None,
            steps=_steps,
            note="stage 2 in one process, fp32; below a CPU lies no host, so what it would move is there twice",
        ),
    ]


def _cpu_adam(parameters: Any) -> torch.optim.Optimizer:
    os.environ.update(ALONE)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: torch.optim.Optimizer = DeepSpeedCPUAdam(list(parameters), lr=RATES["AdamW"], weight_decay=DECAY)
    return made


def _steps(model: torch.nn.Module, sample: Any, loss_fn: Any) -> Callable[[], object]:
    os.environ.update(ALONE)
    import deepspeed

    bucket = sum(p.numel() for p in model.parameters())  # its default of 500 million elements is for larger models
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": RATES["AdamW"], "weight_decay": DECAY}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
            },
        },
    )
    return partial(_step, engine, sample, loss_fn)


def _step(engine: Any, sample: Any, loss_fn: Any) -> None:
    engine.backward(batches.loss_of(engine, sample, loss_fn))
    engine.step()
