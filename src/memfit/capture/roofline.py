"""Seconds of a call on a device that is not here, or of one that cannot be timed, from its arithmetic and its memory traffic.

What a call does is read off its arguments here; how fast that is, `memfit.hardware.efficiency` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from memfit.capture.calls import CallSpec, TensorSpec
from memfit.capture.costs import Cost
from memfit.capture.cuda.workspaces import workspace_bytes
from memfit.hardware.efficiency import Kind, Work, work_seconds
from memfit.hardware.machine import Machine

HALF: Final = (torch.bfloat16, torch.float16)
_CONVOLUTIONS: Final = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
_BATCH_NORMS: Final = ("batch_norm", "batch_norm_backward")


def flops_of(call: CallSpec) -> float:
    """Floating-point operations, by torch's own formulas; 0 for what is not a matrix product.

    A convolution's backward is two of its forward, or one where a gradient is not wanted: torch's formula leaves groups out. Of grouped products it has none.
    """
    if str(call.func) == "aten.convolution_backward.default":
        result, image, weight = call.tensors[:3]
        places = image if call.args[7] else result  # transposed or not
        return 2.0 * math.prod(places.shape) * math.prod(weight.shape[1:]) * sum(map(bool, call.args[10][:2]))
    if call.func is torch.ops.aten._grouped_mm.default:
        left, right = call.tensors[:2]
        # Where columns are divided into groups, each has one of the matrices.
        of_columns = left.shape[-2:] if len(left.shape) > len(right.shape) else left.shape
        return 2.0 * math.prod(of_columns) * right.shape[-1]
    packet = call.func.overloadpacket
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0

    def meta(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
        if isinstance(value, (list, tuple)):
            return type(value)(meta(v) for v in value)
        return value

    try:
        args, kwargs = tuple(meta(a) for a in call.args), {k: meta(v) for k, v in call.kwargs.items() if k != "device"}
        return float(formula(*args, **kwargs, out_val=call.func(*args, **kwargs)))
    except Exception:  # noqa: BLE001 - a formula that does not know this form counts as none
        return 0.0


def work_of(call: CallSpec) -> Work:
    """What a call computes and moves."""
    name, tensors = str(call.func), call.tensors
    half = any(s.dtype in HALF for s in tensors)
    moved = call.input_bytes + sum(call.made_bytes)
    flops = flops_of(call)
    if not flops:
        # Statistics, or sums over them, come before what they are for, so a batch norm's inputs are read twice.
        again = call.input_bytes if name.split(".")[1].endswith(_BATCH_NORMS) else 0
        return Work(moved_bytes=moved + again, half=half)
    if name in _CONVOLUTIONS:
        return _convolution_work(call, flops, moved, half=half)
    if "attention" in name:
        return Work(Kind.ATTENTION, flops, moved, half)
    matrices = [s for s in tensors if len(s.shape) >= 2]
    depth = matrices[-2].shape[-1] if len(matrices) >= 2 else 1
    return Work(Kind.PRODUCT, flops, moved, half, torch.backends.cuda.matmul.fp32_precision == "tf32", depth=depth)


def _convolution_work(call: CallSpec, flops: float, moved: float, *, half: bool) -> Work:
    backward = str(call.func) == "aten.convolution_backward.default"
    image, weight = call.tensors[backward : backward + 2]
    groups = call.args[9 if backward else 8]
    channels_last = image.stride[1] == 1 and image.shape[1] > 1
    return Work(
        Kind.CONVOLUTION if groups == 1 else Kind.GROUPED,
        flops,
        moved,
        half,
        torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined] # the module becomes an object when torch is imported
        group_channels=min(weight.shape[1], weight.shape[0] // groups),
        converted_bytes=2 * moved if half and not channels_last else 0,
    )


def estimated_seconds(call: CallSpec, machine: Machine) -> float:
    """Seconds of a call on a machine."""
    if not call.made_bytes and not call.written:
        return 0.0  # a view
    return work_seconds(work_of(call), machine)


def estimated_costs(calls: Mapping[str, CallSpec], machine: Machine, *, workspaces: bool = False) -> dict[str, Cost]:
    """Estimated costs of all calls on a machine that is not here; with the workspaces of CUDA's kernels where asked."""
    return {
        key: Cost(estimated_seconds(call, machine), workspace_bytes(call) if workspaces else 0, measured=False)
        for key, call in calls.items()
    }
