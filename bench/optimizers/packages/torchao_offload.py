"""torchao CPUOffloadOptimizer: state and update on the host, parameters and gradients copied beside backward."""

from __future__ import annotations

from functools import partial

import torch
from optimizers.packages import DECAY, RATES, Setting

NAME = "torchao CPUOffloadOptimizer"
PACKAGE, INSTALL = "torchao", "torchao==0.18.0"


def obstacle() -> str | None:
    if torch.cuda.is_available() or torch.xpu.is_available():
        return None
    return "it refuses to run without an accelerator (CUDA or XPU); `bench/gpu` asks it"


def settings() -> list[Setting]:
    from torchao.optim import CPUOffloadOptimizer

    make = partial(CPUOffloadOptimizer, optimizer_class=torch.optim.AdamW, lr=RATES["AdamW"], weight_decay=DECAY)
    return [Setting(NAME, "AdamW", make)]
