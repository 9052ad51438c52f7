"""bitsandbytes: 8-bit state with tables of 256 values (Dettmers et al. 2021, arXiv 2110.02861), kernels for the CPU since 0.50."""

from __future__ import annotations

from functools import partial

from optimizers.packages import DECAY, RATES, Setting

NAME = "bitsandbytes"
PACKAGE, INSTALL = "bitsandbytes", "bitsandbytes"


def obstacle() -> str | None:
    return None


def settings() -> list[Setting]:
    from bitsandbytes import optim

    def made(name: str, family: str, **more: float) -> Setting:
        make = partial(getattr(optim, name), lr=RATES[family], weight_decay=DECAY, **more)
        return Setting(f"bitsandbytes {name}", family, make)

    return [made("AdamW8bit", "AdamW"), made("Lion8bit", "Lion"), made("SGD8bit", "SGD", momentum=0.9)]
