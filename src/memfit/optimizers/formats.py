"""Optimizer state in 8 bits: a code for each element and a scale for each block, a little over one byte instead of four.

Source: FlashOptim (arXiv 2602.23349). A signed moment m is divided by the largest |m| of its block, companded, x -> 2x / (1 + |x|), which spends codes
on small values, and rounded to int8; of a second moment the square root is rounded to uint8. Ours differs in three places. Scales are 32-bit floats
(0.031 bytes a parameter more than 16-bit ones): 16-bit floats end at 6e-8, which gradients of large models reach, and step by 0.05 % or more, so that
a moment that decays by less at each step would never decay. Blocks have 128 elements instead of 32, since these scales take twice the bytes; with 256,
as bitsandbytes has, errors in training are larger than its own (`bench/optimizers`). And the code of a second moment is at least 1, so that no update
divides a first moment that is there by a second one that was rounded away.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 128  # elements that share a scale
SIGNED: Final = torch.int8
UNSIGNED: Final = torch.uint8


def blocks(elements: int) -> int:
    """Blocks that so many elements take; the last one may be short."""
    return -(-elements // BLOCK)


def quantise(values: Tensor, count: int, codes: Tensor, scales: Tensor, scratch: Tensor) -> None:
    """Write `values` as codes and scales; nothing of their size is allocated.

    Args:
        values: whole blocks, (blocks x BLOCK,), of floats; overwritten. What lies behind `count` is ignored.
        count: elements that count.
        codes: (count,), int8 for a signed moment, uint8 for one that is never negative; written.
        scales: (blocks,), float32; written.
        scratch: like `values`; overwritten.
    """
    values[count:].zero_()
    rows = values.view(-1, BLOCK)
    if codes.dtype is SIGNED:
        torch.abs(values, out=scratch)
        scales.copy_(scratch.view(-1, BLOCK).amax(1))
        rows.div_(_divisors(scales, values.dtype))
        torch.abs(values, out=scratch)
        values.div_(scratch.add_(1)).mul_(254).round_()
    else:
        values.sqrt_()
        scales.copy_(rows.amax(1))
        rows.div_(_divisors(scales, values.dtype))
        values.mul_(255).round_().clamp_(min=1)
    codes.copy_(values[:count])


def _divisors(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales as a column to divide by; a block of zeros stays one."""
    return scales.clamp(min=torch.finfo(torch.float32).tiny).to(dtype).unsqueeze(1)


def dequantise(codes: Tensor, scales: Tensor, values: Tensor, scratch: Tensor) -> None:
    """Inverse of `quantise`, up to rounding.

    Args:
        codes: (count,); may be shorter than `values`, which is zero behind it.
        scales, values, scratch: as for `quantise`; `values` is written.
    """
    count = codes.numel()
    values[:count].copy_(codes)
    values[count:].zero_()
    rows = values.view(-1, BLOCK)
    column = scales.to(values.dtype).unsqueeze(1)
    if codes.dtype is SIGNED:
        # The inverse of y = 2x / (1 + |x|) is x = y / (2 - |y|); with y = code / 127 that is code / (254 - |code|).
        torch.abs(values, out=scratch)
        values.div_(scratch.neg_().add_(254))
        rows.mul_(column)
    else:
        rows.mul_(column / 255)
        values.square_()
