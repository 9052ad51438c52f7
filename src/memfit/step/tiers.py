"""The lower tier: where bytes lie that do not lie on the device, in regions that are written and read whole.

Below a GPU that is host memory, below the CPU a file. The file is read and written with `preadv` and `pwritev`, not mapped: pages of a map count as
the process's own, and with a hard limit on it they would not leave. It loses its name at once, so that nothing stays on disk after a crash.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from memfit.errors import EngineError, InfeasibleError
from memfit.units import format_bytes

_PAGE_BYTES: Final = 4096


class Tier(Protocol):
    """Regions of bytes, named by where they start."""

    def reserve(self, size_bytes: int) -> int:
        """Room for one region; returns its offset.

        Raises:
            InfeasibleError: there is no room.
        """

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy a dense tensor's bytes to the tier, from `offset` on.

        Raises:
            EngineError: the tier would not take them.
        """

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill a dense tensor with the bytes from `offset` on.

        Raises:
            EngineError: they are not there.
        """

    def close(self) -> None:
        """Let everything go."""


class DiskTier:
    """A file without a name.

    Args:
        folder: on the disk to use; the system's folder for temporary files when None.

    Attributes:
        size_bytes: reserved so far.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder if folder is not None else tempfile.gettempdir())
        try:
            self._file, name = tempfile.mkstemp(prefix="memfit-tier-", dir=self.folder)
        except OSError as error:
            raise EngineError(
                f"the lower tier was to be a file in {self.folder}, which cannot be made ({error.strerror}): name a folder that exists and may be written"
            ) from error
        os.unlink(name)  # noqa: PTH108 - mkstemp gives a string
        self.size_bytes = 0

    def reserve(self, size_bytes: int) -> int:
        """Room for one region, taken from the disk now, so that no later write can find it full."""
        offset = self.size_bytes
        size_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        if size_bytes:
            try:
                os.posix_fallocate(self._file, offset, size_bytes)
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}:
                    raise self._failed("reserve", size_bytes, error) from error
                os.ftruncate(self._file, offset)  # what was taken before the disk was full
                free = shutil.disk_usage(self.folder).free
                raise InfeasibleError(
                    f"the lower tier needs {format_bytes(offset + size_bytes)} in {self.folder}, which has {format_bytes(offset + free)} for it: "
                    "free some disk space, or name a folder on a larger disk",
                    budget_bytes=offset + free,
                    minimum_bytes=offset + size_bytes,
                ) from error
        self.size_bytes = offset + size_bytes
        return offset

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy a dense tensor's bytes to the file."""
        rest = _bytes_of(source)
        while len(rest):
            try:
                count = os.pwritev(self._file, [rest], offset)
            except OSError as error:
                raise self._failed("write", len(rest), error) from error
            rest, offset = rest[count:], offset + count

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill a dense tensor from the file."""
        on_host = into if into.device.type == "cpu" else torch.empty_like(_flat(into), device="cpu")
        rest = _bytes_of(on_host)
        while len(rest):
            try:
                count = os.preadv(self._file, [rest], offset)
            except OSError as error:
                raise self._failed("read", len(rest), error) from error
            if not count:
                raise EngineError(
                    f"the lower tier's file in {self.folder} ends {format_bytes(len(rest))} too early: something cut it while it was in use, and what it "
                    "held is lost. Load the last snapshot and start anew"
                )
            rest, offset = rest[count:], offset + count
        if on_host is not into:
            _flat(into).copy_(on_host)

    def _failed(self, what: str, size_bytes: int, error: OSError) -> EngineError:
        return EngineError(
            f"the lower tier could not {what} {format_bytes(size_bytes)} in {self.folder} ({error.strerror}): see to the disk; where nothing else is said the "
            "step was not taken, and may be taken again"
        )

    def close(self) -> None:
        """Give the disk space back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()


class HostTier:
    """Page-locked host memory below a GPU. Copies are put on the current stream, which the caller chooses and waits for.

    Pages are locked where they are: torch's own pinned allocator rounds every block up to a power of two.
    """

    def __init__(self) -> None:
        self._regions: dict[int, torch.Tensor] = {}
        self.size_bytes = 0

    def reserve(self, size_bytes: int) -> int:
        """Room for one region."""
        offset = self.size_bytes
        try:
            region = torch.empty(max(size_bytes, 1), dtype=torch.uint8)
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.numel(), 0)))
        except RuntimeError as error:  # the allocator's, or cudaHostRegister's
            raise InfeasibleError(
                f"the lower tier needs {format_bytes(offset + size_bytes)} of page-locked host memory, of which it got {format_bytes(offset)} ({error}): "
                "free host memory, raise the limit on locked memory (ulimit -l), or use a DiskTier",
                budget_bytes=offset,
                minimum_bytes=offset + size_bytes,
            ) from error
        self._regions[offset] = region
        self.size_bytes = offset + region.numel()
        return offset

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy a dense tensor's bytes to the host."""
        self._at(offset, source).copy_(_flat(source), non_blocking=True)

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill a dense tensor from the host."""
        _flat(into).copy_(self._at(offset, into), non_blocking=True)

    def _at(self, offset: int, tensor: torch.Tensor) -> torch.Tensor:
        start = max(s for s in self._regions if s <= offset)
        return self._regions[start][offset - start :][: tensor.numel() * tensor.element_size()]

    def close(self) -> None:
        """Unlock and free the memory."""
        for region in self._regions.values():
            torch.cuda.cudart().cudaHostUnregister(region.data_ptr())
        self._regions.clear()


class NoTier:
    """For a step on fake tensors: what would be written or read has no contents."""

    def reserve(self, size_bytes: int) -> int:  # noqa: ARG002 - a Tier
        """Any offset is as good as another."""
        return 0

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Nothing is kept."""

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Nothing is there."""

    def close(self) -> None:
        """Nothing to let go."""


def tier_below(device: torch.device, folder: str | Path | None = None) -> Tier:
    """The tier below a device: the host's memory for a GPU, a file for the CPU or where a folder is named."""
    return HostTier() if device.type == "cuda" and folder is None else DiskTier(folder)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, in the order of memory."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> Any:
    flat: Any = _flat(tensor).cpu().numpy()  # no copy where it is on the CPU
    return memoryview(flat)
