"""A lower memory tier as regions of bytes, which are written and read whole: streamed layers are offloaded to it.

For a GPU the tier is pinned host memory, for the CPU a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from memfit.storage.files import STREAMED_LAYERS, DiskFile
from memfit.storage.pinned import PinnedMemory
from memfit.storage.raw_bytes import flat, memory_of


class Tier(Protocol):
    """Regions of bytes, identified by their offset."""

    def reserve(self, size_bytes: int) -> int:
        """Reserve space for one region; returns its offset.

        Raises:
            InfeasibleError: the tier does not have the space.
        """

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy a dense tensor's bytes to the tier, from `offset` on.

        Raises:
            EngineError: writing failed.
        """

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill a dense tensor with the bytes from `offset` on.

        Raises:
            EngineError: reading failed.
        """

    def close(self) -> None:
        """Free all regions."""


class DiskTier:
    """Regions of a file.

    Args:
        folder: on the disk to use; None for the one that is set.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._file = DiskFile(STREAMED_LAYERS, folder)

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self._file.folder

    def reserve(self, size_bytes: int) -> int:
        """Reserve space for one region, allocated on the disk now."""
        return self._file.reserve(size_bytes)

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy a dense tensor's bytes to the file."""
        on_host = source if source.device.type == "cpu" else flat(source).cpu()
        self._file.write(memory_of(on_host), offset)

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill a dense tensor from the file."""
        on_host = into if into.device.type == "cpu" else torch.empty_like(flat(into), device="cpu")
        self._file.read(memory_of(on_host), offset)
        if on_host is not into:
            flat(into).copy_(on_host)

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()


class HostTier:
    """Regions of page-locked host memory below a GPU. Copies are put on the current stream, which the caller chooses and waits for.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = PinnedMemory(device, "streamed layers", "name a folder on a disk (lower_tier=)")
        self._regions: dict[int, torch.Tensor] = {}

    def reserve(self, size_bytes: int) -> int:
        """Reserve space for one region."""
        offset = self._memory.size_bytes
        self._regions[offset] = self._memory.block(size_bytes)
        return offset

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy a dense tensor's bytes to the host."""
        self._at(offset, source).copy_(flat(source), non_blocking=True)

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill a dense tensor from the host."""
        flat(into).copy_(self._at(offset, into), non_blocking=True)

    def _at(self, offset: int, tensor: torch.Tensor) -> torch.Tensor:
        start = max(s for s in self._regions if s <= offset)
        return self._regions[start][offset - start :][: tensor.numel() * tensor.element_size()]

    def close(self) -> None:
        """Unlock and free the memory."""
        self._regions.clear()
        self._memory.close()


class NoTier:
    """A tier for a step on fake tensors, which have no contents to be written or read."""

    def reserve(self, size_bytes: int) -> int:  # noqa: ARG002 - a Tier
        """Any offset is as good as another."""
        return 0

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Nothing is kept."""

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Nothing is there."""

    def close(self) -> None:
        """Nothing to free."""


def nearest_tier(device: torch.device, folder: str | Path | None = None) -> Tier:
    """The nearest lower tier of a device: host memory for a GPU, a file for the CPU or where a folder is named."""
    return HostTier(device) if device.type == "cuda" and folder is None else DiskTier(folder)
