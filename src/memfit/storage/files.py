"""Unnamed files for everything that is offloaded to disk.

A file is unlinked as soon as it is created, so nobody can delete or change it during the run and nothing is left behind however the run ends. Its space is
allocated when it is reserved, so that a full disk is noticed before training and not in the middle of a step.

Files are read with `preadv` and written with `pwritev`, not mapped: how much of a mapping is in memory is up to the kernel and counts as the process's own,
and a page that cannot be written back ends the process with a signal where a write raises an error.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memfit.errors import EngineError, InfeasibleError
from memfit.storage.folders import free_bytes, offload_folder
from memfit.units import format_bytes

PAGE_BYTES: Final = 4096
_FULL: Final = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds, in words for error messages.

    Attributes:
        name: in the plural.
        instead: what the user could do where the disk has no space for it.
        lasting: whether it is needed from step to step; else each step writes it anew.
    """

    name: str
    instead: str
    lasting: bool = True


ACTIVATIONS: Final = Contents("offloaded activations", "plan with a smaller host_budget", lasting=False)
ACTIVATIONS_BELOW_HOST: Final = Contents("offloaded activations", "plan with a smaller disk_budget", lasting=False)
STREAMED_LAYERS: Final = Contents("streamed layers", "plan without streaming")
OPTIMIZER_STATE: Final = Contents("optimizer states", "keep the state on the device")


class DiskFile:
    """Space on a disk, by offset.

    Args:
        contents: what it is for.
        folder: to create it in; None for the default (`folders.offload_folder`).

    Attributes:
        folder: that it was created in.
        size_bytes: reserved so far.

    Raises:
        EngineError: no file can be created in the folder.
    """

    def __init__(self, contents: Contents, folder: str | Path | None = None) -> None:
        self.contents = contents
        self.folder = offload_folder(folder)
        self.size_bytes = 0
        try:
            self._file, name = tempfile.mkstemp(prefix="memfit-offload-", dir=self.folder)
        except OSError as error:
            raise EngineError(
                f"{contents.name} are written to disk, and no file can be created in {self.folder} ({error.strerror}): set MEMFIT_OFFLOAD_DIR, "
                "or what names it (lower_tier=, nvme_path), to a folder that exists and can be written"
            ) from error
        self._finalizer = weakref.finalize(self, os.close, self._file)
        Path(name).unlink()

    def reserve(self, size_bytes: int) -> int:
        """Allocate bytes on the disk now and return their offset; until written they read as zeros.

        Raises:
            InfeasibleError: the disk does not have the space.
        """
        offset = self.size_bytes
        size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        if size_bytes:
            try:
                os.posix_fallocate(self._file, offset, size_bytes)
            except OSError as error:
                if error.errno not in _FULL:
                    raise self._failed(f"given {format_bytes(size_bytes)} of", error) from error
                os.ftruncate(self._file, offset)  # what was taken before the disk was full
                free = free_bytes(self.folder)
                raise InfeasibleError(
                    f"{self.contents.name} need {format_bytes(offset + size_bytes)} on disk, and {self.folder} has {format_bytes(offset + free)} for them "
                    f"({error.strerror}): free space there, set MEMFIT_OFFLOAD_DIR to a folder on a larger disk, or {self.contents.instead}",
                    budget_bytes=offset + free,
                    minimum_bytes=offset + size_bytes,
                ) from error
        self.size_bytes = offset + size_bytes
        return offset

    def write(self, memory: memoryview, offset: int) -> None:
        """Copy bytes to the file.

        Raises:
            EngineError: the disk failed.
        """
        try:
            write_whole(self._file, memory, offset)
        except OSError as error:
            raise self._failed("written to", error) from error

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill memory from the file.

        Raises:
            EngineError: the disk failed, or the file has been cut.
        """
        try:
            read_whole(self._file, memory, offset)
        except EOFError as error:
            lost = "load the last snapshot and begin anew" if self.contents.lasting else "the step was not taken"
            raise EngineError(
                f"the file of {self.contents.name} in {self.folder} ends before {format_bytes(self.size_bytes)}, something cut it while it was in use: {lost}"
            ) from error
        except OSError as error:
            raise self._failed("read from", error) from error

    def _failed(self, done: str, error: OSError) -> EngineError:
        return EngineError(
            f"{self.contents.name} could not be {done} the disk of {self.folder} ({error.strerror or error}): see to the disk or set "
            "MEMFIT_OFFLOAD_DIR to another; where nothing else is said the step was not taken, and may be taken again"
        )

    def close(self) -> None:
        """Give the disk space back."""
        self._finalizer()


def write_whole(file: int, memory: memoryview, offset: int) -> None:
    """All of these bytes to a file, from an offset on."""
    while memory:
        written = os.pwritev(file, [memory], offset)
        memory, offset = memory[written:], offset + written


def read_whole(file: int, memory: memoryview, offset: int) -> None:
    """As many bytes as there is memory for.

    Raises:
        EOFError: the file ends before.
    """
    while memory:
        read = os.preadv(file, [memory], offset)
        if not read:
            raise EOFError
        memory, offset = memory[read:], offset + read
