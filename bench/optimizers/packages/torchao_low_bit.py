"""torchao: AdamW with state in 8 bits, 4 bits and 8-bit floats, its update compiled by torch.compile."""

from __future__ import annotations

import shutil
from functools import partial

from optimizers.packages import DECAY, RATES, Setting

NAME = "torchao"
PACKAGE, INSTALL = "torchao", "torchao==0.18.0"


def obstacle() -> str | None:
    return None if shutil.which("g++") else "its update is compiled with g++, which is not here"


def settings() -> list[Setting]:
    from torchao import optim

    names = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
    return [
        Setting(f"torchao {name}", "AdamW", partial(getattr(optim, name), lr=RATES["AdamW"], weight_decay=DECAY))
        for name in names
    ]
