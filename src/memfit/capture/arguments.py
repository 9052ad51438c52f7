"""The description of a call -> arguments to run it with: tensors of the right shapes and layouts on filled memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from memfit import dispatch
from memfit.capture.calls import CallSpec, StorageSpec, TensorSpec

LARGEST_SHARED_BYTES: Final = 256 << 20  # calls that read more get memory of their own
VALUES: Final = 1 << 15  # different numbers in filled memory; more than a processor learns to foresee

# Backward kernels that read what only their forward kernel can write: an opaque buffer, on whose made-up bytes they crash, or where the random numbers of
# dropout began, which is on the CPU or on the GPU as the kernel likes (fake tensors say on the GPU, and then they crash).
FORWARD_OF: Final = {
    "aten.mkldnn_rnn_layer_backward.default": "aten.mkldnn_rnn_layer.default",
    "aten._cudnn_rnn_backward.default": "aten._cudnn_rnn.default",
    "aten.miopen_rnn_backward.default": "aten.miopen_rnn.default",
    "aten.cudnn_batch_norm_backward.default": "aten.cudnn_batch_norm.default",
    "aten.batch_norm_backward.default": "aten._batch_norm_with_update.default",
    **{
        f"aten._scaled_dot_product_{kernel}_attention_backward.default": f"aten._scaled_dot_product_{kernel}_attention.default"
        for kernel in ("efficient", "flash", "cudnn")
    },
}
GRADIENT_FIRST: Final = ("attention.default", "_batch_norm_with_update.default")
_WRITTEN_BY_FORWARD: Final = frozenset({torch.uint8, torch.int64, torch.uint64})  # buffers of RNNs, seeds of attention


# What they take meanwhile depends on how many places the mask chooses.
_INDEXED_BY_MASKS: Final = frozenset(
    {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::masked_select"}
)
# They copy the whole storage that their input lies in.
_COPYING_STORAGES: Final = frozenset(f"aten::{name}_scatter" for name in ("as_strided", "diagonal", "select", "slice"))


class Filled:
    """Storages of filled memory that calls read in turn: getting fresh memory from the system takes longer than most operations run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def storage(self, place: int, dtype: torch.dtype, count: int) -> torch.UntypedStorage:
        """At least `count` elements, the same ones for the same place."""
        flat = self._flat.get((place, dtype))
        if flat is None or flat.numel() < count:
            flat = self._flat[place, dtype] = _filled(count, dtype, self._device)
        return flat.untyped_storage()


def _filled(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    flat = torch.empty(count, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return flat.zero_()
    # Were they all alike, the processor would guess each comparison right: max pooling took a third of its time. To draw all of them would take longer
    # than most operations run. Probabilities, logarithms and roots ask for what is positive and below one.
    some = _values(dtype, device)
    repeated, rest = flat.split([count - count % VALUES, count % VALUES])
    repeated.view(-1, VALUES).copy_(some)
    rest.copy_(some[: len(rest)])
    return flat


@cache
def _values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.rand(VALUES, generator=torch.Generator().manual_seed(0)).mul_(0.5).add_(0.25).to(device, dtype)


def run(call: CallSpec, args: Any, kwargs: Any) -> Any:
    """Run the call's operation."""
    # Gradient mode stays on, as in the step (fused RNNs keep no workspace without it); the inputs ask for none.
    with torch.enable_grad():
        return call.func(*args, **kwargs)


def arguments_of(
    call: CallSpec, calls: Mapping[str, CallSpec], device: torch.device, shared: Filled
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for one run; opaque buffers come from a real run of the forward kernel.

    Args:
        call: what to run.
        calls: all of the step, the forward kernel among them.
        device: where.
        shared: memory to take for arguments that are only read.
    """
    forward_name = FORWARD_OF.get(str(call.func))
    if forward_name is None:
        return build(call, device, shared)
    args, kwargs = build(call, device)
    # Of some the first tensor is the gradient, and the next one is what their forward begins with.
    shape = call.tensors[forward_name.endswith(GRADIENT_FIRST)].shape
    forward = next(c for c in calls.values() if str(c.func) == forward_name and c.tensors[0].shape == shape)
    outputs = run(forward, *build(forward, device))
    opaque = [t for t in dispatch.tensors_in(outputs) if t.dtype in _WRITTEN_BY_FORWARD]
    filled = list(args)
    places = [n for n, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dtype in _WRITTEN_BY_FORWARD]
    # The state of an RNN's dropout is opaque too; it goes into both kernels, and comes first.
    for place, tensor in zip(reversed(places), reversed(opaque), strict=False):
        filled[place] = tensor
    return tuple(filled), kwargs


def _chosen(call: CallSpec) -> int:
    """How many places the mask of a call chooses, where the call is an indexing by one mask; 0 elsewhere."""
    name, specs = call.func._schema.name, call.tensors
    if name not in _INDEXED_BY_MASKS or len(specs) < 2 or specs[1].dtype != torch.bool:
        return 0
    whole, mask = specs[0].shape, specs[1].shape
    each = math.prod(whole[len(mask) :]) if name != "aten::masked_select" else 1
    values = math.prod(specs[2].shape) if len(specs) > 2 else sum(call.made_bytes) // specs[0].dtype.itemsize
    return values // each if each else 0


def _ends_of_groups(call: CallSpec) -> list[int]:
    """Of the groups of a grouped product, where they end: all of one size; none where the call is no such product, or its groups are a dimension."""
    specs = call.tensors
    if call.func is not torch.ops.aten._grouped_mm.default or len(specs) < 3 or specs[2].dtype != torch.int32:
        return []
    left, right, (number, *_) = specs[0].shape, specs[1].shape, specs[2].shape
    divided = left[-2] if len(left) < len(right) else left[-1] if len(left) == len(right) else right[-1]
    return [divided * group // number for group in range(1, number + 1)]


def build(call: CallSpec, device: torch.device, shared: Filled | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for one run: integers zero (any index is valid), numbers between a quarter and three quarters.

    Args:
        call: what to run.
        device: where.
        shared: memory to take for arguments that are only read.
    """
    copying = call.func._schema.name in _COPYING_STORAGES
    if call.written or copying or call.input_bytes > LARGEST_SHARED_BYTES:
        shared = None
    specs = call.tensors
    # A step on a GPU has small tensors on the CPU, too.
    where = {spec.place: device if spec.device == device.type else torch.device("cpu") for spec in specs}
    shared = shared if all(each == device for each in where.values()) else None
    start: dict[int, int] = {}
    for spec in specs:
        position = spec.offset * spec.dtype.itemsize
        start[spec.place] = min(start.get(spec.place, position), position)
    size: dict[int, int] = {}
    kind: dict[int, torch.dtype] = {}
    for spec in specs:
        end = spec.offset * spec.dtype.itemsize - start[spec.place] + spec.extent * spec.dtype.itemsize
        size[spec.place] = max(size.get(spec.place, 0), end)
        kind.setdefault(spec.place, spec.dtype)
    masks = {spec.place for spec in specs if spec.dtype == torch.bool} if _chosen(call) else set()
    ends = _ends_of_groups(call)
    if masks or ends:
        shared = None
    storages: dict[int, torch.UntypedStorage] = {}
    for place, count in size.items():
        dtype = kind[place]
        elements = -(-count // dtype.itemsize)
        storages[place] = (
            shared.storage(place, dtype, elements)
            if shared is not None
            else _filled(elements, dtype, where[place]).untyped_storage()
        )

    for place in masks:
        # Kernels list the places that a mask chooses, which takes more than the mask does: as many as in the step.
        torch.empty(0, dtype=torch.bool, device=where[place]).set_(storages[place])[: _chosen(call)].fill_(True)

    if ends:
        place = specs[2].place
        torch.empty(0, dtype=torch.int32, device=where[place]).set_(storages[place])[: len(ends)] = torch.tensor(ends)

    make = _Arguments(device, where, storages, start)
    return tuple(make.like(a) for a in call.args), {k: make.like(v) for k, v in call.kwargs.items()}


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Makes arguments. No inner function that calls itself: such a one is a cycle, which keeps its storages until Python looks for cycles.

    Attributes:
        device: of the call.
        where: the device of each storage.
        storages: by place.
        start: of each storage in the step, the byte with which that of here begins.
    """

    device: torch.device
    where: Mapping[int, torch.device]
    storages: Mapping[int, torch.UntypedStorage]
    start: Mapping[int, int]

    def like(self, value: Any) -> Any:
        """What a description says, in lists and tuples, too."""
        if isinstance(value, TensorSpec):
            offset = value.offset - self.start[value.place] // value.dtype.itemsize
            made = torch.empty(0, dtype=value.dtype, device=self.where[value.place]).set_(
                self.storages[value.place], offset, value.shape, value.stride
            )
            return made.conj() if value.conjugated else made
        if isinstance(value, StorageSpec):
            there = self.device if value.device == self.device.type else "cpu"
            return torch.UntypedStorage(value.bytes, device=there)
        if isinstance(value, torch.device):
            return value if value.type == "cpu" else self.device
        if isinstance(value, torch.Generator):
            return torch.Generator(self.device)  # the user's own is not to move
        if isinstance(value, (list, tuple)):
            return type(value)(self.like(v) for v in value)
        return value
