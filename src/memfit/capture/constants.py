"""Run one operation of a recording: on fake tensors, or for real where nothing that it reads is fake.

The batch stays real in a fake run, and so do constants: what a model computes from these alone is computed, and branches on it are taken as in training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memfit import dispatch
from memfit.capture.extreme_draws import at_the_end
from memfit.capture.isolation import before_unseen
from memfit.capture.known_results import run_fake

if TYPE_CHECKING:
    from torch._ops import OpOverload

# Results of operations that take no tensor (arange, zeros, ...) are made for real in a fake run up to this size.
LARGEST_REAL_CONSTANT_BYTES: Final = 64 << 20


def run_recorded(func: OpOverload, inputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operation gives; `inputs` are the tensors among its arguments."""
    if any(isinstance(t, FakeTensor) for t in inputs):
        return run_fake(func, args, kwargs)
    return at_the_end(func, args, _run_real(func, inputs, args, kwargs))


def _run_real(func: OpOverload, inputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not inputs:
        result = func(*args, **kwargs)
        made = list(dispatch.tensors_in(result))
        if not any(isinstance(t, FakeTensor) for t in made):
            return result
        if sum(t.numel() * t.element_size() for t in made) > LARGEST_REAL_CONSTANT_BYTES:
            return result
        if any(t.device.type == "meta" for t in made):
            return result
    with _disable_current_modes():
        before_unseen(func, args, kwargs)
        return func(*args, **kwargs)
