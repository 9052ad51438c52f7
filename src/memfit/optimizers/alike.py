"""Optimizers like an existing one, over other parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn

from memfit.errors import InputError
from memfit.optimizers.chunked import ChunkedOptimizer

# Their wrappers pass everything on to the optimizer inside.
_PASSED_ON_BY: Final = frozenset(["accelerate", "lightning", "pytorch_lightning"])


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside what `accelerator.prepare` or Fabric has put around it; any other as it is."""
    inner = getattr(optimizer, "optimizer", None)
    passed_on = type(optimizer).__module__.partition(".")[0] in _PASSED_ON_BY
    return unwrapped(inner) if passed_on and isinstance(inner, torch.optim.Optimizer) else optimizer


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
    optimizer = unwrapped(optimizer)
    if "param_groups" not in vars(optimizer):  # a copy would change those of the optimizer inside
        raise InputError(
            f"the optimizer ({type(optimizer).__name__}) takes its parameters from another one inside it, and a plan is made for one alone: give that one"
        )
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
