"""What a kernel was called with: enough to make like arguments later, and a key under which equal calls are counted as one.

A step of BERT-large runs 5,000 operations, of some hundred distinct calls. Fake tensors hold no memory, so a call is described by the geometry of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memfit import dispatch

if TYPE_CHECKING:
    from torch._ops import OpOverload

TensorLayout = tuple[str, tuple[int, ...]]
"""Dtype by name, and strides in elements."""
ResultLayouts = tuple[TensorLayout | None, ...]
"""Of each tensor that an operation returns; None for one that lies in an argument's storage."""


@dataclass(slots=True)
class TensorSpec:
    """What is needed to make a like tensor later.

    Attributes:
        shape, stride, offset: in elements.
        dtype: of the elements.
        storage_bytes: of the whole storage it lies in.
        place: which of the call's distinct storages that is.
        device: type of the device it is on: a step on a GPU has small tensors on the CPU, too.
        conjugated: marked so and not computed yet, which many operations do first, in a copy.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int
    place: int
    device: str = "cpu"
    conjugated: bool = False

    @property
    def extent(self) -> int:
        """Elements from the first to the last, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * abs(s) for n, s in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """What is needed to make a like storage later: cuDNN's recurrent layers read their weights through one.

    Attributes:
        bytes: of all of it.
        device: type of the device it is on.
    """

    bytes: int
    device: str


@dataclass(slots=True)
class CallSpec:
    """One call to time: the operation with its arguments, tensors replaced by `TensorSpec`.

    Attributes:
        func: the operation.
        args, kwargs: as the dispatcher got them, no tensor and no storage among them.
        made_bytes: of the storages it returns, in order.
        layouts: of the tensors it returns.
        written: it writes to one of its arguments.
        metered: what it takes inside was metered where it ran, on the step's own values, and is in the trace.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made_bytes: tuple[int, ...] = ()
    layouts: ResultLayouts = ()
    written: bool = False
    metered: bool = False

    @property
    def tensors(self) -> list[TensorSpec]:
        """Of all tensor arguments, in order."""
        return _specs_in((self.args, self.kwargs))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first tensor argument; empty where there is none."""
        return next((spec.shape for spec in self.tensors), ())

    @property
    def same_layout(self) -> bool:
        """Whether all tensor arguments have one dtype, one shape and the same strides."""
        return len({(spec.dtype, spec.shape, spec.stride) for spec in self.tensors}) == 1

    @property
    def input_bytes(self) -> int:
        """Bytes that the tensor arguments span."""
        spans: dict[int, tuple[int, int]] = {}
        for spec in self.tensors:
            begin = spec.offset * spec.dtype.itemsize
            end = begin + spec.extent * spec.dtype.itemsize
            low, high = spans.get(spec.place, (begin, end))
            spans[spec.place] = (min(low, begin), max(high, end))
        return sum(high - low for low, high in spans.values())


def describe(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    storage_of: Callable[[torch.Tensor], int] = dispatch.storage_key,
) -> tuple[str, CallSpec]:
    """The key of a call, equal for all calls that cost the same (operation, shapes, dtypes, strides), and its description.

    Args:
        func, args, kwargs: the call.
        storage_of: tells tensors of one storage: a kernel may copy an argument that shares its storage with another one.
    """
    places: dict[int, int] = {}

    def spec(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not dispatch.has_storage(value):
                return None
            place = places.setdefault(storage_of(value), len(places))
            return TensorSpec(
                tuple(value.shape),
                tuple(value.stride()),
                int(value.storage_offset()),
                value.dtype,
                value.untyped_storage().nbytes(),
                place,
                value.device.type,
                value.is_conj(),
            )
        if isinstance(value, (list, tuple)):
            return (
                type(value)(spec(item) for item in value) if type(value) in (list, tuple) else [spec(i) for i in value]
            )
        if isinstance(value, torch.UntypedStorage):
            return StorageSpec(value.nbytes(), value.device.type)
        return value

    def name(value: Any) -> str:
        if isinstance(value, TensorSpec):
            # The offset is left out: where in its storage a tensor starts does not change what an operation costs.
            where = "" if value.device == "cpu" else f"{value.device}:"
            where += "conjugated:" if value.conjugated else ""
            return f"{where}{str(value.dtype)[6:]}{list(value.shape)}/{list(value.stride)}@{value.place}"
        if isinstance(value, (list, tuple)):
            return f"({','.join(name(item) for item in value)})"
        if isinstance(value, torch.Generator):
            return "generator"  # whichever it is
        return "f" if isinstance(value, float) else repr(value)

    spec_args = spec(tuple(args))
    spec_kwargs = {k: spec(v) for k, v in kwargs.items()}
    words = [str(func), *(name(a) for a in spec_args), *(f"{k}={name(v)}" for k, v in sorted(spec_kwargs.items()))]
    return " ".join(words), CallSpec(func, spec_args, spec_kwargs)


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """Its dtype by name, and its strides."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.stride())


def _specs_in(tree: Any) -> list[TensorSpec]:
    if isinstance(tree, TensorSpec):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [s for item in tree for s in _specs_in(item)]
    if isinstance(tree, dict):
        return [s for item in tree.values() for s in _specs_in(item)]
    return []
