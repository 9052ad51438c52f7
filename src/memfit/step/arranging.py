"""The optimizer that the choices require, for capture and engine alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.errors import InputError
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.techniques.choices import Choices
from memfit.techniques.registry import BY_NAME


def arranged(
    optimizer: torch.optim.Optimizer, choices: Choices, model: nn.Module, folder: str | Path | None = None
) -> torch.optim.Optimizer:
    """The optimizer that runs under these choices.

    Args:
        optimizer: as the user's factory made it. What a `ChunkedOptimizer` of the user's own has besides the choices, it keeps.
        choices: whose techniques may offload the state or store it in another format.
        model: tells the parameters' names.
        folder: for state on disk; None for the default (`MEMFIT_OFFLOAD_DIR`).

    Raises:
        InfeasibleError: as for `ChunkedOptimizer`.
        InputError: as for `ChunkedOptimizer`; or the optimizer cannot be used under a technique.
    """
    settings: dict[str, Any] = {}
    for name, setting in choices.techniques:
        reason = BY_NAME[name].why_no_optimizer(optimizer, setting)
        if reason is not None:
            raise InputError(reason)
        settings.update(BY_NAME[name].optimizer_settings(setting))
    if isinstance(optimizer, ChunkedOptimizer):
        have = {"state_format": optimizer.format, "state_place": optimizer.state_place}
        optimizer.rearrange(**{**have, **settings}, folder=folder)
    elif not settings:
        return optimizer
    else:
        optimizer = ChunkedOptimizer(optimizer, **settings, folder=folder)
    optimizer.name(dict(nn.Module.named_parameters(model, remove_duplicate=False)))
    return optimizer
