"""Files that a run has written, read without being led out of its folder: a run may put a link, a pipe or a device where a file is expected."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Final

from memfit.service.refusals import NotKnownError

_MOST_FILES: Final = 10_000
_DEEPEST: Final = 12


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


def files_inside(folder: Path) -> Iterator[tuple[str, int]]:
    """Regular files below a folder with their bytes, by name; links are neither told nor followed."""
    found = 0
    for place, folders, names in os.walk(folder, followlinks=False):
        inside = Path(place).relative_to(folder)
        folders[:] = sorted(each for each in folders if not each.startswith(".") and len(inside.parts) < _DEEPEST)
        for name in sorted(names):
            try:
                about = (Path(place) / name).lstat()
            except OSError:
                continue
            if stat.S_ISREG(about.st_mode) and not name.startswith("."):
                yield (inside / name).as_posix(), about.st_size
                found += 1
                if found >= _MOST_FILES:
                    return
