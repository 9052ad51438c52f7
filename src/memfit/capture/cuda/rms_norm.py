"""RMS norm as a GPU runs it: one kernel, which saves its input and one number a row, where a CPU runs five operations.

torch has the operation, `_fused_rms_norm`, but on anything else than a GPU it comes apart before autograd sees it. So it is an operation of memfit's own
here, with the same results.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

NAME: Final = "memfit::cuda_rms_norm"

torch.library.define(NAME, "(Tensor input, Tensor? weight, int dimensions) -> (Tensor, Tensor)")
torch.library.define(
    f"{NAME}_backward", "(Tensor gradient, Tensor input, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)"
)


def _forward(input: Tensor, _weight: Tensor | None, dimensions: int) -> tuple[Tensor, Tensor]:  # noqa: A002
    rows = (*input.shape[: input.dim() - dimensions], *[1] * dimensions)
    made = torch.empty_like(input, memory_format=torch.contiguous_format)
    return made, input.new_empty(rows, dtype=torch.float32)


def _backward(_gradient: Tensor, input: Tensor, _rstd: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: A002
    d_weight = input.new_empty(0) if weight is None else torch.empty_like(weight)
    return torch.empty_like(input, memory_format=torch.contiguous_format), d_weight


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given, weight, _ = inputs
    ctx.save_for_backward(given, output[1], *(() if weight is None else (weight,)))
    ctx.mark_non_differentiable(output[1])


def _differentiated(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    given, rstd, *weight = ctx.saved_tensors
    d_input, d_weight = torch.ops.memfit.cuda_rms_norm_backward(gradient, given, rstd, weight[0] if weight else None)
    return d_input, d_weight if weight else None, None


torch.library.register_fake(NAME, _forward)
torch.library.register_fake(f"{NAME}_backward", _backward)
torch.library.register_autograd(NAME, _differentiated, setup_context=_keep)


def rms_norm(given: Tensor, shape: Any, weight: Tensor | None) -> Tensor | None:
    """The result of the fused kernel; None where PyTorch does not take it, as weight and input are of different types."""
    if weight is not None and weight.dtype is not given.dtype:
        return None
    made: Tensor = torch.ops.memfit.cuda_rms_norm(given, weight, len(shape))[0]
    return made
