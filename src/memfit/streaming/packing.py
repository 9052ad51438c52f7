"""The layout of several tensors in one flat buffer, the same on the device and on the lower tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from memfit import dispatch

ALIGNMENT_BYTES: Final = 64  # what torch's own allocator gives on the CPU


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Offsets of tensors in a flat buffer.

    Attributes:
        places: of each tensor its offset in bytes, shape, stride and dtype.
        size_bytes: of the buffer.
    """

    places: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    size_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> PackedLayout:
        """One after the other, in their own order of dimensions where they are dense."""
        places = []
        end = 0
        for tensor in tensors:
            stride = tensor.stride() if dispatch.is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
            places.append((end, tuple(tensor.shape), tuple(stride), tensor.dtype))
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(places), end)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors, in a flat uint8 buffer of at least `size_bytes`."""
        out = []
        for offset, shape, stride, dtype in self.places:
            size = dtype.itemsize
            for n in shape:
                size *= n
            out.append(flat[offset : offset + size].view(dtype).as_strided(shape, stride))
        return out
