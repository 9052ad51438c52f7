"""The calls of a model's parts in one forward: what they return, what of it is read later, and how a call is taken over.

Shared by the look that finds them (`capture/part_calls.py`) and by the stages that run them (`parallel/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree


class Label(NamedTuple):
    """A tensor that a part returned.

    Attributes:
        call: position of the call.
        leaf: which of the tensors and values that it returned.
    """

    call: int
    leaf: int


class BatchLeaf(NamedTuple):
    """A tensor of the batch.

    Attributes:
        number: its place among all leaves of the batch.
    """

    number: int


Forward = Callable[..., Any]
# What a call may return besides tensors, and a stage may hand on without having run it.
PLAIN: Final = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Of a strided tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """One like it, contiguous as messages are."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class PartCall:
    """One call of a part.

    Attributes:
        path: of the module.
        structure: of what it returns.
        leaves: of what it returns: a `TensorMeta` for each tensor, plain values as they are, and a `Label` for a tensor of an
            earlier call that is returned as it was given.
    """

    path: str
    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PartCalls:
    """One forward and loss, as calls of parts and what runs between them.

    Attributes:
        calls: in order.
        needs: of each call, the tensors of earlier calls that it reads, itself or through what runs between calls; the last entry is what the loss reads.
        outside: likewise, the names of parameters that are read between calls on the way to it.
        read_between: parameters that are read between calls, before the last call.
        refused: for each boundary (before call b, none before the first), why the model cannot be cut there; empty where it can.
        batch: for each leaf of the micro-batch its name, and what it is like where it is a tensor.
        batch_reads: of each call, and in the last entry of the loss, the places of the leaves that it reads, itself or through what runs before it.
        values_read: places of the leaves whose values decide what runs between calls, so that every stage needs them.
        loss_type: of the loss.
        digest: of the operations from which the loss is computed, those inside the parts included (`sharding/same_step.py`).
    """

    calls: tuple[PartCall, ...]
    needs: tuple[frozenset[Label], ...]
    outside: tuple[frozenset[str], ...]
    read_between: frozenset[str]
    refused: tuple[str, ...]
    batch: tuple[tuple[str, TensorMeta | None], ...]
    batch_reads: tuple[frozenset[int], ...]
    values_read: frozenset[int]
    loss_type: torch.dtype
    digest: str

    def leaves_read(self, first: int, end: int, counted: str = "") -> frozenset[int]:
        """Places of the tensors of the batch that a stage of calls [first, end) needs.

        Args:
            first, end: of the stage.
            counted: name of the leaf that tells what a micro-batch counts for; the last stage looks at it.
        """
        read = self.values_read.union(*self.batch_reads[first:end])
        if end == len(self.calls):
            read |= self.batch_reads[end] | {place for place, (name, _) in enumerate(self.batch) if name == counted}
        return frozenset(place for place in read if self.batch[place][1] is not None)

    def hands_on_as(self, other: PartCalls) -> bool:
        """Whether the same parts are called, give the same, read the same of each other, and may be cut at the same places."""

        def told(each: PartCalls) -> tuple[Any, ...]:
            calls = [(call.path, call.structure, call.leaves) for call in each.calls]
            return calls, each.needs, each.outside, each.read_between, each.refused

        return told(self) == told(other)

    def reading_also(self, other: PartCalls) -> PartCalls:
        """For a forward that may run as another one does that hands on the same: with what either reads of the batch."""
        return replace(
            self,
            batch_reads=tuple(own | others for own, others in zip(self.batch_reads, other.batch_reads, strict=True)),
            values_read=self.values_read | other.values_read,
        )

    def crossing(self, boundary: int) -> tuple[Label, ...]:
        """The tensors made before call `boundary` that it or something later reads."""
        read = frozenset[Label]().union(*self.needs[boundary:])
        return tuple(sorted(label for label in read if label.call < boundary))

    def meta(self, label: Label) -> TensorMeta:
        """Of a tensor that crosses."""
        found: TensorMeta = self.calls[label.call].leaves[label.leaf]
        return found

    def crossing_bytes(self, boundary: int) -> int:
        """Of all that crosses."""
        return sum(self.meta(label).bytes for label in self.crossing(boundary))

    def parameters(self, model: nn.Module, first: int, end: int) -> dict[str, nn.Parameter]:
        """The parameters that calls [first, end) use, by name; a tied one under its first name. What no call uses goes with the first."""
        used = self._used(model, first, end)
        if first == 0:
            used |= dict(model.named_parameters()).keys() - self._used(model, 0, len(self.calls))
        return {name: p for name, p in model.named_parameters() if name in used}

    def _used(self, model: nn.Module, first: int, end: int) -> set[str]:
        names = {id(p): name for name, p in model.named_parameters()}
        used = {names[id(p)] for call in self.calls[first:end] for p in model.get_submodule(call.path).parameters()}
        used |= frozenset[str]().union(*self.outside[first:end])
        if end == len(self.calls):
            used |= self.outside[end]
        return used


def parts_at(model: nn.Module, paths: Iterable[str]) -> dict[str, nn.Module]:
    """The modules at these paths, each once, in this order."""
    return {path: model.get_submodule(path) for path in dict.fromkeys(paths)}


@contextmanager
def taken_over(
    parts: Mapping[str, nn.Module], called: Callable[[str, Forward, tuple[Any, ...], Mapping[str, Any]], Any]
) -> Iterator[None]:
    """Inside, a call of one of these modules is a call of `called(path, its own forward, args, kwargs)`; its hooks run as ever.

    Args:
        parts: the modules, by path.
        called: in place of each.
    """

    def instead_of(path: str, own: Forward) -> Forward:
        return lambda *args, **kwargs: called(path, own, args, kwargs)

    before: list[tuple[nn.Module, Any]] = []
    try:
        for path, module in parts.items():
            before.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = instead_of(path, module.forward)
        yield
    finally:
        for module, own in before:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own
