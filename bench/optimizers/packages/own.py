"""memfit: state in 8 bits, in a file, and updates inside backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from optimizers.packages import DECAY, RATES, REFERENCES, Setting

from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.optimizers.eight_bit import AdamW8bit, Lion8bit, SGD8bit

NAME = "memfit"
PACKAGE = INSTALL = None


def obstacle() -> str | None:
    return None


def settings() -> list[Setting]:
    eight = {"state_format": "8bit"}
    return [
        Setting("**memfit** AdamW8bit", "AdamW", _made(AdamW8bit, "AdamW"), REFERENCES["AdamW"], eight),
        Setting("**memfit** Lion8bit", "Lion", _made(Lion8bit, "Lion"), REFERENCES["Lion"], eight),
        Setting("**memfit** SGD8bit", "SGD", _made(SGD8bit, "SGD"), REFERENCES["SGD"], eight),
        Setting("**memfit** AdamW, state in a file", "AdamW", _on_disk, REFERENCES["AdamW"], {"state_place": "disk"}),
        Setting(
            "**memfit** AdamW8bit, update in backward",
            "AdamW",
            None,
            REFERENCES["AdamW"],
            {**eight, "update": "in_backward"},
            note="its update is AdamW8bit's",
        ),
    ]


def _made(kind: Any, family: str) -> Any:
    return partial(kind, lr=RATES[family], weight_decay=DECAY)


def _on_disk(parameters: Any) -> torch.optim.Optimizer:
    return ChunkedOptimizer(REFERENCES["AdamW"](parameters), state_place="disk")
