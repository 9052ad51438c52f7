"""Operations on sparse tensors: what they allocate inside, metered while they run in the capture.

Other operations are run again by themselves, on arguments of the same geometry, to know their workspace. What a product of sparse matrices takes depends on
where their elements are, so it is metered where they are the step's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit import dispatch
from memfit.meter import metered, workspace_of

if TYPE_CHECKING:
    from torch._ops import OpOverload


def takes_or_makes_sparse(func: OpOverload, inputs: Iterable[torch.Tensor]) -> bool:
    """Whether an operation on a CPU's real tensors reads a sparse one, or is one that makes such."""
    tensors = list(inputs)
    if any(isinstance(t, FakeTensor) or t.device.type != "cpu" for t in tensors):
        return False
    name = str(func)
    return "sparse" in name or any(dispatch.is_sparse(t) for t in tensors)


def run_metered(run: Callable[[], Any]) -> tuple[Any, int]:
    """What an operation gives, and the most bytes that it held beyond that."""
    with metered() as reading:
        result = run()
    return result, workspace_of(reading.changes)
