"""PyTorch's own optimizers and memfit's Lion, all state in 32 bits on the device."""

from __future__ import annotations

from functools import partial

import torch
from optimizers.packages import DECAY, RATES, REFERENCES, Setting

NAME = "32 bits"
PACKAGE = INSTALL = None


def obstacle() -> str | None:
    return None


def settings() -> list[Setting]:
    foreach = partial(torch.optim.AdamW, lr=RATES["AdamW"], weight_decay=DECAY, foreach=True)
    return [
        Setting("torch AdamW, fused", "AdamW", REFERENCES["AdamW"], base=REFERENCES["AdamW"]),
        Setting("torch AdamW, foreach", "AdamW", foreach, base=foreach),
        Setting("memfit Lion", "Lion", REFERENCES["Lion"], base=REFERENCES["Lion"]),
        Setting("torch SGD with momentum, fused", "SGD", REFERENCES["SGD"], base=REFERENCES["SGD"]),
    ]
