"""The optimizers that peaks are predicted with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

Factory = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: Final[Mapping[str, Factory]] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "SGD, momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-3),
}
