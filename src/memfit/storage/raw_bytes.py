"""The bytes of tensors and storages, as memory that a file is read into or as flat tensors that a device copies."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor in main memory, in their order there.

    Through the address: `numpy()` knows no bfloat16, and a dispatch mode need not see this.
    """
    size = tensor.numel() * tensor.element_size()
    return _memory(tensor.data_ptr(), size)


def memory_of_storage(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage in main memory."""
    return _memory(storage.data_ptr(), storage.nbytes())


def _memory(address: int, size_bytes: int) -> memoryview:
    if not size_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def flat(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor on any device, in the order of memory: a view."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)


def flat_storage(storage: torch.UntypedStorage) -> Tensor:
    """The bytes of a storage on any device: a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
