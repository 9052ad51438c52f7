"""Files that a run has written, read without being led out of its folder: a run may put a link, a pipe or a device where a file is expected."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Final

from memfit.service.refusals import NotKnownError

ADDRESS: Final = (
    "address.json"  # where a service listens, and a token: for clients of the same user on the same computer
)
_MOST_FILES: Final = 10_000
_DEEPEST: Final = 12
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def is_services(folder: Path) -> bool:
    """Whether a service, or hosts of one, keep in this folder what they have: its token, and all runs with their code."""
    return (folder / ADDRESS).is_file() or any(folder.glob(f"hosts/*/{ADDRESS}"))


def open_inside(folder: Path, name: str) -> IO[bytes]:
    """Open a regular file below a folder; no part of its path may be a link.

    Args:
        folder: of ours.
        name: relative, with slashes.

    Raises:
        NotKnownError: there is no such file, or it is none that is handed out.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or "\0" in name or any(part in {"..", "."} for part in parts):
        raise NotKnownError(f"there is no file {name!r}")
    opened = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            opened.append(os.open(part, flags, dir_fd=opened[-1]))
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(parts[-1], flags, dir_fd=opened[-1])
    except (OSError, ValueError) as error:
        raise NotKnownError(f"there is no file {name!r}") from error
    finally:
        for each in opened:
            os.close(each)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotKnownError(f"there is no file {name!r}")
    return os.fdopen(file, "rb")


def files_inside(folder: Path, name: str) -> Iterator[tuple[str, int]]:
    """Regular files below a folder in ours, with their bytes, by name; links are neither told nor followed, the folder itself included.

    Args:
        folder: of ours.
        name: of the folder in it, which a run may have put a link in place of.
    """
    # By file descriptors: what is looked at is what was opened, whatever a run puts there meanwhile.
    ours = os.open(folder, _FOLDER) if folder.is_dir() else None
    if ours is not None:
        try:
            yield from islice(_below(ours, name, ""), _MOST_FILES)
        finally:
            os.close(ours)


def _below(above: int, name: str, inside: str) -> Iterator[tuple[str, int]]:
    """Files of the folder `name` in an open one, and of those below it, with `inside` in front of their names."""
    try:
        here = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    except OSError:
        return
    try:
        for each in sorted(os.listdir(here)):  # noqa: PTH208 - by its descriptor
            try:
                about = os.stat(each, dir_fd=here, follow_symlinks=False)
            except OSError:
                continue
            if each.startswith("."):
                continue
            if stat.S_ISREG(about.st_mode):
                yield inside + each, about.st_size
            elif stat.S_ISDIR(about.st_mode) and inside.count("/") < _DEEPEST:
                yield from _below(here, each, f"{inside}{each}/")
    finally:
        os.close(here)
