"""The device that a model's step computes on."""

from __future__ import annotations

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """Device of the first parameter that is on one (other stages' are on the meta device); the CPU for a meta model or one without parameters."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
