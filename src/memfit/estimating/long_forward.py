"""Forwards of so many operations that recording a step would take minutes to hours: counted on the meta device, where they take seconds.

Models that take their tokens one after the other in Python (a Mamba of transformers without its CUDA kernels) run some operations for each layer and token.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.batches import Batch, LossFunction, map_tensors, what_the_model_gives
from memfit.errors import CaptureError
from memfit.estimating.models import Named
from memfit.units import format_bytes

MOST_OPERATIONS: Final = 30_000  # of a forward; an answer takes minutes then
_SHORT: Final = (4, 8)  # lengths from which is told how many operations a token adds


class _TooManyError(Exception):
    pass


class _Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count > MOST_OPERATIONS:
            raise _TooManyError
        return function(*args, **(kwargs or {}))


def check_operations(
    named: Named, model: nn.Module, batch: int, length: int, least_bytes: int, budget_bytes: int
) -> None:
    """Check that a step can be recorded in reasonable time, where its forward runs on the meta device.

    Args:
        named: makes samples.
        model: as it is trained; one that is not on the meta device is not run.
        batch, length: of the step.
        least_bytes, budget_bytes: of weights, gradients and optimizer state, and what there is; for the message.

    Raises:
        CaptureError: it cannot.
    """
    if not all(parameter.is_meta for parameter in model.parameters()):
        return
    if _operations(model, named.sample(batch, length), named.loss_fn) <= MOST_OPERATIONS:
        return
    shorter = ""
    counts = [_operations(model, named.sample(batch, each), named.loss_fn) for each in _SHORT]
    if counts[0] < counts[1] <= MOST_OPERATIONS:
        more = (MOST_OPERATIONS - counts[1]) * (_SHORT[1] - _SHORT[0]) // (counts[1] - counts[0])
        shorter = f" of {_SHORT[1] + more} tokens at most (--length)"
    raise CaptureError(
        f"forward of {batch} x {length} tokens runs more than {MOST_OPERATIONS:,} operations, which take too long to record (a loop over the tokens in Python, "
        f"as transformers has it for models whose CUDA kernels are not installed): ask for shorter samples{shorter}; weights, gradients and optimizer state "
        f"alone take {format_bytes(least_bytes)} of the {format_bytes(budget_bytes)} there are"
    )


def _operations(model: nn.Module, sample: Batch, loss_fn: LossFunction | None) -> int:
    """Of a forward, and no more than one above the most; 0 where it does not run on the meta device."""
    counting = _Counting()  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad(), counting:
            what_the_model_gives(model, map_tensors(lambda tensor: tensor.to("meta"), sample), loss_fn)
    except _TooManyError:
        return counting.count
    except Exception:  # noqa: BLE001 - of whatever kind; the capture runs it on fake tensors, and tells what is wrong with it
        return 0
    return counting.count
