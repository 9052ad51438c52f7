"""One file for each package whose optimizers keep less state, found by being there.

    NAME, PACKAGE, INSTALL    as for the rivals in `rivals`
    obstacle()                why it does not run on this machine, in words; None where it does
    settings()                a list of `Setting`

Each setting is asked in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from memfit.optimizers.lion import Lion

Make = Callable[[Any], torch.optim.Optimizer]
Steps = Callable[[torch.nn.Module, Any, Any], Callable[[], object]]

DECAY: Final = 0.01
RATES: Final[Mapping[str, float]] = {"AdamW": 1e-3, "Lion": 1e-4, "SGD": 0.1}
REFERENCES: Final[Mapping[str, Make]] = {
    "AdamW": partial(torch.optim.AdamW, lr=RATES["AdamW"], weight_decay=DECAY, fused=True),
    "Lion": partial(Lion, lr=RATES["Lion"], weight_decay=DECAY),
    "SGD": partial(torch.optim.SGD, lr=RATES["SGD"], weight_decay=DECAY, momentum=0.9, fused=True),
}
"""The same optimizer in 32 bits, by family: what errors, seconds and losses are measured against."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One optimizer, with the hyper-parameters of its family's reference.

    Attributes:
        label: what the page calls it.
        family: a key of `REFERENCES`.
        make: makes the optimizer from parameters; None where only whole steps can be asked for.
        base: the optimizer that memfit plans with, where its plan covers the setting.
        fixed: the choices with which it then plans.
        steps: `steps(model, sample, loss_fn)` gives what takes one whole step; None for forward, backward and `make`'s step.
        note: what the page says about it.
    """

    label: str
    family: str
    make: Make | None
    base: Make | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    steps: Steps | None = None
    note: str = ""
