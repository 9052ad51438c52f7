"""Indices out of range are refused before a GPU's kernel meets them.

A few samples of a batch may hold indices into the whole batch (negative examples, the edges of a graph), and labels that are masked to see how a loss counts
may be looked up in a table. On a CPU the operation raises and the look goes on another way; on a GPU its kernel asserts, after which the process can use that
GPU for nothing any more. So what runs there on other values than the user's is looked at first, which waits for the GPU at each such operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch._ops import OpOverload

from memfit.dispatch import DispatchMode

ASSERTING: Final = {"cuda"}  # kinds of devices whose kernels assert
_TABLES: Final = frozenset({"aten::embedding", "aten::_embedding_bag", "aten::_embedding_bag_forward_only"})
_CLASSES: Final = frozenset({"aten::nll_loss_forward", "aten::nll_loss2d_forward"})


def indices_checked(device: torch.device) -> AbstractContextManager[object]:
    """Inside, an operation on this device whose indices are out of range raises IndexError and does not run."""
    return _InBounds() if device.type in ASSERTING else nullcontext()


class _InBounds(DispatchMode):
    """Looks at the indices of each operation before it runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, least, size in _indices(func, args, kwargs):
            if index.device.type in ASSERTING and bool(((index < least) | (index >= size)).any()):
                raise IndexError(f"{func._schema.name}: an index is out of bounds for a dimension with size {size}")
        return func(*args, **kwargs)


def _indices(func: OpOverload, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """The integer indices of an operation, with the least value that is allowed and the first that is not."""
    name = func._schema.name
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    if name in _TABLES:
        yield given["indices"], 0, given["weight"].shape[0]
    elif name in _CLASSES:
        target, classes = given["target"], given["self"].shape[0 if given["self"].dim() == 1 else 1]
        yield target[target != given["ignore_index"]], 0, classes
    elif isinstance(given.get("indices"), (list, tuple)):
        yield from _in_brackets(given["self"], given["indices"])
    elif isinstance(given.get("index"), torch.Tensor) and isinstance(given.get("self"), torch.Tensor):
        into: torch.Tensor = given["self"]
        if "dim" not in given:  # `take` and `put_` count through all of it, from its end, too
            yield given["index"], -into.numel(), into.numel()
        elif given["index"].numel():
            yield given["index"], 0, into.shape[given["dim"]] if into.dim() else 1


def _in_brackets(into: torch.Tensor, indices: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Of `x[i, :, j]`; a mask stands for as many dimensions as it has, and torch compares their sizes itself."""
    dim = 0
    for index in indices:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            yield index, -into.shape[dim], into.shape[dim]
            dim += 1
