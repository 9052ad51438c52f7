"""Scaled dot-product attention as PyTorch runs it on a GPU: which of its four kernels, and what that kernel saves for backward.

PyTorch asks its kernels in order and takes the first that can run the call. The order and the conditions are those of `select_sdp_backend` in PyTorch 2.11
to 2.13 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp); what each kernel returns is told by torch's own meta kernels, so no size is computed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor
from torch.backends import cuda as switches

from memfit.hardware.machine import Capability

aten = torch.ops.aten

HALF: Final = (torch.float16, torch.bfloat16)
LARGEST_FLASH_HEAD: Final = 256
LARGEST_CUDNN_HEAD: Final = 128
DROPOUT_IN_SIXTEENTHS: Final = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"  # 2.11 gave cuDNN any
MASK_ALIGNMENT: Final = 16  # the memory-efficient kernel wants rows of the mask to be a multiple of this


def is_seed(func: Any, made: Tensor) -> bool:
    """Whether this result of an operation is where its random numbers began, which the memory-efficient kernel keeps on the CPU (fake tensors do not)."""
    return func is aten._scaled_dot_product_efficient_attention.default and made.dtype == torch.int64


class Kernel(StrEnum):
    """An attention kernel, by the name that `torch.nn.attention.SDPBackend` gives it."""

    FLASH = "flash"
    EFFICIENT = "memory-efficient"
    CUDNN = "cuDNN"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of `scaled_dot_product_attention`, under its own names."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def trained(self) -> bool:
        """Whether backward will come here."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))

    @property
    def same_heads(self) -> bool:
        """Whether keys and values have as many heads as queries."""
        return self.query.shape[-3] == self.key.shape[-3] == self.value.shape[-3]


def chosen(call: Call, capability: Capability) -> Kernel:
    """The kernel that PyTorch takes for a call on a GPU of this compute capability.

    Queries, keys and values are of shape (batch, heads, tokens, head size); others are left to the math kernel, as PyTorch does.
    """
    able = {Kernel.FLASH: _flash, Kernel.EFFICIENT: _efficient, Kernel.CUDNN: _cudnn}
    order = [Kernel.FLASH, Kernel.EFFICIENT]
    if capability[0] in (9, 10):  # Hopper and data-centre Blackwell, with the cuDNN of CUDA wheels since 2.11
        order.insert(0, Kernel.CUDNN)
    fits = all(t.dim() == 4 and t.numel() for t in (call.query, call.key, call.value)) and _last_is_dense(call)
    return next((kernel for kernel in order if fits and able[kernel](call, capability)), Kernel.MATH)


def _last_is_dense(call: Call) -> bool:
    if call.attn_mask is not None and call.attn_mask.stride(-1) != 1:  # a bias that was permuted (T5's)
        return False
    return all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (call.query, call.key, call.value))


def _low_precision(call: Call, capability: Capability) -> bool:
    return call.query.dtype in (HALF if capability[0] >= 8 else (torch.float16,))


def _flash(call: Call, capability: Capability) -> bool:
    size = call.query.shape[-1]
    if not switches.flash_sdp_enabled() or call.attn_mask is not None or not (8, 0) <= capability <= (12, 1):
        return False
    if not size == call.key.shape[-1] == call.value.shape[-1] or size > LARGEST_FLASH_HEAD:
        return False
    if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
        return False
    if not (call.same_heads or call.enable_gqa):
        return False
    small_chip = (8, 6) <= capability <= (8, 9) or capability in ((12, 0), (12, 1))
    if call.trained and small_chip and size > 192 and not (size > 224 and not call.dropout_p):
        return False
    return _low_precision(call, capability)


def _alignment(dtype: torch.dtype, capability: Capability) -> int:
    """Elements to which the memory-efficient kernel wants head sizes aligned."""
    half = dtype in HALF
    least = 4 if capability[0] >= 8 else 1
    tensor_cores = capability[0] >= 8 or (capability[0] == 7 and half)
    return max(least, 128 // (16 if half else 32)) if tensor_cores else least


def _efficient(call: Call, capability: Capability) -> bool:
    if not switches.mem_efficient_sdp_enabled() or not (5, 0) <= capability <= (12, 1):
        return False
    if call.query.dtype not in (torch.float16, torch.float32, *((torch.bfloat16,) if capability[0] >= 8 else ())):
        return False
    aligned = _alignment(call.query.dtype, capability)
    size = call.query.shape[-1]
    if size != call.key.shape[-1] or size % aligned or call.value.shape[-1] % aligned:
        return False
    offsets = (t.storage_offset() for t in (call.query, call.key, call.value))
    return call.same_heads and not (capability[0] >= 8 and any(offset % aligned for offset in offsets))


def _cudnn(call: Call, capability: Capability) -> bool:
    del capability
    sizes = (call.query.shape[-1], call.value.shape[-1])
    if not switches.cudnn_sdp_enabled() or torch.are_deterministic_algorithms_enabled():
        return False
    if call.attn_mask is not None and call.attn_mask.requires_grad:
        return False
    if (DROPOUT_IN_SIXTEENTHS and (call.dropout_p * 16) % 1) or call.query.dtype not in HALF:
        return False
    if any(size > LARGEST_CUDNN_HEAD or size % 8 for size in sizes):
        return False
    return call.key.shape[-2] != 1 and (not call.dropout_p or call.query.shape[-2] != 1)


def attended(call: Call, kernel: Kernel) -> Tensor:
    """The result of the call, made by CUDA's own operation on fake tensors; autograd saves what that operation saves."""
    if kernel is Kernel.MATH:
        return _math(call)
    query, key, value, dropout, causal = call.query, call.key, call.value, call.dropout_p, call.is_causal
    scale = call.scale if call.scale is not None else 1 / math.sqrt(query.shape[-1])
    mask = _additive(call.attn_mask, query.dtype)
    saves = call.trained
    if kernel is Kernel.CUDNN:
        made = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, saves, dropout, causal, False, scale=scale
        )
    elif kernel is Kernel.EFFICIENT:
        made = aten._scaled_dot_product_efficient_attention(
            query, key, value, _expanded(mask, call), saves, dropout, causal, scale=scale
        )
    else:
        size = query.shape[-1]
        padded = [_padded(t, 8) for t in (query, key, value)]
        made = aten._scaled_dot_product_flash_attention(*padded, dropout, causal, False, scale=scale)
        return made[0][..., :size] if size % 8 else made[0]  # type: ignore[no-any-return]
    return made[0]  # type: ignore[no-any-return]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask of booleans as one that is added to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask.logical_not(), -math.inf, torch.zeros((), dtype=dtype, device=mask.device))


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _expanded(mask: Tensor | None, call: Call) -> Tensor | None:
    """The mask with aligned rows, as large as the scores; expanding copies nothing."""
    if mask is None:
        return None
    columns = mask.shape[-1]
    padded = _padded(mask, MASK_ALIGNMENT)[..., :columns] if columns > 1 and columns % MASK_ALIGNMENT else mask
    return padded.expand(*call.query.shape[:-1], call.key.shape[-2])


def _math(call: Call) -> Tensor:
    """Attention from single operations, with CUDA's fused dropout."""
    query, key, value = call.query, call.key, call.value
    root = math.sqrt(call.scale if call.scale is not None else 1 / math.sqrt(query.shape[-1]))
    mask: Any = _additive(call.attn_mask, query.dtype)
    if call.is_causal:
        whole = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        mask = _additive(whole.tril(), query.dtype)
    if call.enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(query * root, key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    weights = aten._safe_softmax(scores, -1)
    if call.dropout_p:
        weights = torch.native_dropout(weights, call.dropout_p, True)[0]
    return torch.matmul(weights, value)
