"""What CUDA's kernels and libraries allocate beside their results: cuBLAS's workspaces, and what some backward kernels add up in.

Sources: PyTorch 2.13's `CUDAContext` (workspaces), flash attention's backward (an fp32 gradient of the queries, rounded), the memory-efficient kernel's
(`delta`), and the sorted backward of embeddings. Workspaces of cuDNN's convolutions depend on its choice of algorithm and are not known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch

from memfit.capture.calls import CallSpec
from memfit.hardware.machine import Capability

MIB: Final = 1 << 20
LARGE_WORKSPACE_BYTES: Final = 32 * MIB  # Hopper and later
SMALL_WORKSPACE_BYTES: Final = 8 * MIB + 128 * 1024  # two of 4 MiB and eight of 16 KiB
# A workspace belongs to a handle, and a handle to a thread: forward runs in the caller's, backward in autograd's own.
HANDLES: Final = 2

_PRODUCTS: Final = frozenset(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm")
)
EMBEDDING_ROWS: Final = 3072  # up to here a kernel without sorting serves
EMBEDDING_PART: Final = 10  # rows that one partial sum has


def has_products(names: Iterable[str]) -> bool:
    """Whether a step that runs these operations calls cuBLAS."""
    return not _PRODUCTS.isdisjoint(names)


def take_workspaces(device: torch.device) -> None:
    """Run a product forward and backward on a GPU that is here, so that the handles of both threads have taken the workspaces they keep."""
    with torch.enable_grad():
        one = torch.ones((1, 1), device=device, requires_grad=True)
        # A product is not the first thing that autograd's thread runs: PyTorch warns of one that finds no CUDA context.
        torch.autograd.grad((one @ one).exp(), one, torch.ones_like(one))


def library_bytes(names: Iterable[str], capability: Capability) -> int:
    """Bytes of cuBLAS's workspaces in a step that runs these operations."""
    if not has_products(names):
        return 0
    return HANDLES * (LARGE_WORKSPACE_BYTES if capability[0] >= 9 else SMALL_WORKSPACE_BYTES)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward(call: CallSpec) -> int:
    batch, heads, tokens, size = call.tensors[1].shape
    wide = _up(size, 32) if size <= 192 else 256
    rows = batch * heads * _up(tokens, 128)
    return 4 * rows * (wide + 1)


def _efficient_backward(call: CallSpec) -> int:
    query = call.tensors[1]
    batch, heads, tokens, size = query.shape
    rows = batch * heads * tokens
    # delta, and where products are of fp32 also gradient x output, of which delta is the sum
    return 4 * rows * (1 + (size if query.dtype.itemsize == 4 else 0))


def _embedding_backward(call: CallSpec) -> int:
    gradient, indices = call.tensors[:2]
    number, width = math.prod(indices.shape), gradient.shape[-1]
    if number <= EMBEDDING_ROWS:
        return 0
    segments = min(number, int(call.args[2]))
    sums = number // EMBEDDING_PART + segments
    return 4 * sums * width + 8 * (6 * number + sums)


_WORKSPACES: Final[Mapping[str, Callable[[CallSpec], int]]] = {
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
    "aten.embedding_dense_backward.default": _embedding_backward,
}


def workspace_bytes(call: CallSpec) -> int:
    """Bytes that the call's CUDA kernel allocates and frees before it returns; 0 where none are known."""
    known = _WORKSPACES.get(str(call.func))
    return 0 if known is None else known(call)
