"""Optimizers like an existing one, over other parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from memfit.errors import InputError
from memfit.optimizers.chunked import ChunkedOptimizer


def alike(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """What makes optimizers like this one over other parameters of the model (placeholders): the same kind, groups and settings, no state.

    For integrations in which the optimizer exists already, as in Hugging Face's Trainer: planning needs a function that makes one.

    Args:
        optimizer: over parameters of the model.
        model: whose trainable parameters tell which is which.

    Raises:
        InputError: the optimizer updates something else than the model's trainable parameters.
    """
    place = {id(p): index for index, p in enumerate(p for p in model.parameters() if p.requires_grad)}
    own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(id(p) not in place for p in own):
        raise InputError(
            "the optimizer updates parameters that are not the model's, so the plan would not count them: make it over the parameters of the model that is "
            "trained"
        )

    def made(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        others = list(parameters)
        groups = [
            {**group, "params": [others[place[id(p)]] for p in group["params"] if id(p) in place]}
            for group in optimizer.param_groups
        ]
        if not isinstance(optimizer, ChunkedOptimizer):
            return _with_groups(optimizer, groups)
        return optimizer.around(_with_groups(optimizer.inner, groups))

    return made


def _with_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    twin = copy.copy(optimizer)
    # A copy goes the way of pickling, which leaves out what a subclass may have besides.
    twin.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name not in twin.__dict__})
    # torch's schedulers put a counting copy of `step` on the optimizer, which would step that one, not its twin.
    if hasattr(twin.__dict__.get("step"), "_wrapped_by_lr_sched"):
        del twin.step
    twin.state, twin.param_groups = defaultdict(dict), groups
    return twin
