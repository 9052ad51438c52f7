"""Indices out of range are refused before a GPU's kernel meets them.

A few samples of a batch may hold indices into the whole batch (negative examples, the edges of a graph), and labels that are masked to see how a loss counts
may be looked up in a table. On a CPU the operation raises and the look goes on another way; on a GPU its kernel asserts, after which the process can use that
GPU for nothing any more. So what runs there on other values than the user's is looked at first, which waits for the GPU at each such operation.

The CTC loss does not look whether its targets are classes, on any device: of a masked one it reads memory that is not its own, which may end the process.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch._ops import OpOverload

from memfit.dispatch import DispatchMode

ASSERTING: Final = {"cuda"}  # kinds of devices whose kernels assert
_TABLES: Final = frozenset({"aten::embedding", "aten::_embedding_bag", "aten::_embedding_bag_forward_only"})
_CLASSES: Final = frozenset({"aten::nll_loss_forward", "aten::nll_loss2d_forward"})


_UNCHECKED: Final = frozenset({"aten::_ctc_loss", "aten::_cudnn_ctc_loss"})  # by their kernels for a CPU, too


def indices_checked(device: torch.device) -> AbstractContextManager[object]:
    """Inside, an operation on this device whose indices are out of range raises IndexError and does not run."""
    return _InBounds() if device.type in ASSERTING else _InBounds(_UNCHECKED)


class _InBounds(DispatchMode):
    """Looks at the indices of each operation before it runs.

    Args:
        only: names of the operations that are looked at; None for all.
    """

    def __init__(self, only: Container[str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._only = only

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if self._only is None or name in self._only:
            for index, least, size in _indices(func, args, kwargs):
                asserts = index.device.type in ASSERTING or name in _UNCHECKED
                if asserts and bool(((index < least) | (index >= size)).any()):
                    raise IndexError(f"{name}: an index is out of bounds for a dimension with size {size}")
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
    elif name in _UNCHECKED:
        yield _that_count(given["targets"], given["target_lengths"]), 0, given["log_probs"].shape[-1]
    elif isinstance(given.get("indices"), (list, tuple)):
        yield from _in_brackets(given["self"], given["indices"])
    elif isinstance(given.get("index"), torch.Tensor) and isinstance(given.get("self"), torch.Tensor):
        into: torch.Tensor = given["self"]
        if "dim" not in given:  # `take` and `put_` count through all of it, from its end, too
            yield given["index"], -into.numel(), into.numel()
        elif given["index"].numel():
            yield given["index"], 0, into.shape[given["dim"]] if into.dim() else 1


def _that_count(targets: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """The targets of a CTC loss without padding; either one row for each sample, or those of all samples one after the other."""
    if targets.dim() == 1:
        return targets
    places = torch.arange(targets.shape[1], device=targets.device)
    return targets[places < torch.as_tensor(lengths, device=targets.device)[:, None]]


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
