"""Where fake kernels give their results another memory layout than the real ones: found when calls are timed, and corrected in the next capture.

Which kernel comes next, and what it takes, depends on the layout; the strides of dimensions of size 1 count too (`suggest_memory_format`), and so do
dtypes (batch norm of 16 bits keeps its statistics in 32, whatever its fake kernel says).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.capture.calls import ResultLayouts, TensorLayout, layout_of

if TYPE_CHECKING:
    from memfit.capture.captured import Captured
    from memfit.capture.costs import Cost


def wrong_layouts(captured: Captured, costs: Mapping[str, Cost]) -> dict[str, ResultLayouts]:
    """Calls of a fake capture whose real kernels give another memory layout, with the real layouts."""
    if captured.trace.source != "fake":
        return {}
    found: dict[str, ResultLayouts] = {}
    for key, call in captured.calls.items():
        real = costs[key].layouts
        if real is not None and len(real) == len(call.layouts) and real != call.layouts:
            found[key] = real
    return found


def laid_out(result: Any, layouts: Iterator[TensorLayout | None]) -> Any:
    """Fake results of an operation with the layouts that its real kernel gives."""
    if isinstance(result, (list, tuple)):
        return type(result)(laid_out(item, layouts) for item in result)
    if not isinstance(result, torch.Tensor):
        return result
    wanted = next(layouts)
    if wanted is None or wanted == layout_of(result) or not isinstance(result, FakeTensor):
        return result
    dtype, strides = wanted
    return torch.empty_strided(tuple(result.shape), strides, dtype=getattr(torch, dtype), device=result.device)
