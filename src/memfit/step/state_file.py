"""A file that holds optimizer state: read and written piece by piece, never mapped, so that the process holds none of it.

The file has no name from its first moment on: nobody can delete or change it under the run, and nothing is left behind however the run ends. Its space
is taken when it is made, so that a full disk is met before training and not in the middle of an update.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from pathlib import Path

import torch

from memfit.errors import EngineError, InputError
from memfit.units import format_bytes


class StateFile:
    """Space for tensors, by offset.

    Args:
        folder: on which disk; None for the system's folder for temporary files (TMPDIR).
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else Path(tempfile.gettempdir())
        self.bytes = 0
        self._file = -1

    def reserve(self, size_bytes: int) -> int:
        """The offset of so many new bytes; until written they read as zeros.

        Raises:
            InputError: the folder has no room for them, or no file can be made there.
        """
        offset = self.bytes
        try:
            if self._file < 0:
                self._file, name = tempfile.mkstemp(prefix="memfit-state-", dir=self.folder)
                weakref.finalize(self, os.close, self._file)
                Path(name).unlink()
            os.posix_fallocate(self._file, offset, size_bytes)
        except OSError as error:
            raise InputError(
                f"no room for {format_bytes(offset + size_bytes)} of optimizer state in {self.folder} ({error.strerror or error}): make room there, set TMPDIR "
                "to a folder on another disk, or keep the state on the device"
            ) from error
        self.bytes = offset + size_bytes
        return offset

    def read(self, tensor: torch.Tensor, offset: int) -> None:
        """Fill a contiguous tensor in host memory.

        Raises:
            EngineError: the disk failed.
        """
        self._whole(os.preadv, "read", tensor, offset)

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        """Inverse of `read`; raises the same."""
        self._whole(os.pwritev, "write", tensor, offset)

    def _whole(self, move: object, verb: str, tensor: torch.Tensor, offset: int) -> None:
        size = tensor.numel() * tensor.element_size()
        if not size:
            return
        # Through the address: `numpy()` knows no bfloat16, and a dispatch mode need not see this.
        memory = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
        done = 0
        while done < size:
            try:
                moved = move(self._file, [memory[done:]], offset + done)  # type: ignore[operator]
            except OSError as error:
                raise EngineError(
                    f"cannot {verb} the optimizer state in {self.folder} ({error.strerror or error}): see to the disk; where nothing else is said the step was "
                    "not taken, and may be taken again"
                ) from error
            if moved <= 0:
                raise EngineError(
                    f"the file of optimizer state in {self.folder} ends at {offset + done} of {self.bytes} bytes, something cut it short: load the last "
                    "snapshot"
                )
            done += moved
