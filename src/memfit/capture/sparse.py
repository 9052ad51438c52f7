"""Operations on sparse tensors, and on strided nested ones: what they allocate inside, metered while they run in the capture.

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
    return "sparse" in name or "nested" in name or any(dispatch.is_sparse(t) for t in tensors)


def is_sparse_fake(tensor: torch.Tensor) -> bool:
    """Whether it is a sparse tensor without values: what it lies in has no bytes, and what operations on it take depends on values."""
    return isinstance(tensor, FakeTensor) and dispatch.is_sparse(tensor)


def is_taken_over(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether autograd clones a sparse gradient only because a mode holds it, too: in a step without modes it takes over its indices and values."""
    if func is not torch.ops.aten.clone.default or args[0].layout is not torch.sparse_coo:
        return False
    node = torch._C._current_autograd_node()
    whole = args[0]._indices().is_contiguous() and args[0]._values().is_contiguous()
    return whole and node is not None and node.name().endswith("AccumulateGrad")


def alias_of(gradient: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of the same indices and values."""
    parts = gradient._indices(), gradient._values()
    return torch.sparse_coo_tensor(*parts, gradient.shape, is_coalesced=gradient.is_coalesced(), check_invariants=False)


def run_metered(run: Callable[[], Any]) -> tuple[Any, int]:
    """What an operation gives, and the most bytes that it held beyond that."""
    with metered() as reading:
        result = run()
    return result, workspace_of(reading.changes)
