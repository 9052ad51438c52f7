"""A model's parameters converted to bf16 in place."""

from __future__ import annotations

import torch
from torch import nn


def trains_any(model: nn.Module) -> bool:
    """Whether there are trained parameters that are bf16 or would be converted to it."""
    beside = _beside_statistics(model)
    return any(
        p.requires_grad and (p.dtype is torch.bfloat16 or (p.dtype is torch.float32 and id(p) not in beside))
        for p in model.parameters()
    )


def convert(model: nn.Module) -> None:
    """Round every fp32 parameter to the nearest in bf16; each stays the same object. Gradients are freed, buffers stay.

    Parameters of layers that keep running statistics (batch norm) stay in fp32 with them: torch's kernels take both in one type, and an average in 16 bits
    would stand still.
    """
    beside = _beside_statistics(model)
    for parameter in model.parameters():
        if parameter.dtype is torch.float32 and id(parameter) not in beside:
            parameter.grad = None
            parameter.data = parameter.data.to(torch.bfloat16)


def _beside_statistics(model: nn.Module) -> set[int]:
    layers = (module for module in model.modules() if hasattr(module, "track_running_stats"))
    return {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
