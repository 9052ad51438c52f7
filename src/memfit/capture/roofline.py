"""Seconds of a call on a device that is not here, or of one that cannot be timed: the larger of its arithmetic and its memory traffic (a roofline).

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore architectures", 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memfit.capture.calls import CallSpec, TensorSpec
from memfit.capture.costs import Cost
from memfit.capture.cuda.workspaces import workspace_bytes
from memfit.hardware.machine import Machine


def flops_of(call: CallSpec) -> float:
    """Floating-point operations, by torch's own formulas; 0 for what is not a matrix product."""
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


def estimated_seconds(call: CallSpec, machine: Machine) -> float:
    """Roofline time of a call on a machine."""
    if not call.made_bytes and not call.written:
        return 0.0  # a view
    half = any(s.dtype in (torch.bfloat16, torch.float16) for s in call.tensors)
    moved = call.input_bytes + sum(call.made_bytes)
    return machine.roofline_seconds(flops_of(call), moved, half=half)


def estimated_costs(calls: Mapping[str, CallSpec], machine: Machine, *, workspaces: bool = False) -> dict[str, Cost]:
    """Roofline costs of all calls on a machine that is not here; with the workspaces of CUDA's kernels where asked."""
    return {
        key: Cost(estimated_seconds(call, machine), workspace_bytes(call) if workspaces else 0, measured=False)
        for key, call in calls.items()
    }
