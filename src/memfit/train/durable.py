"""Files and folders that are on the disk whole, or not there: what `snapshots` writes with, and searches write their results."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def put(file: Path, data: bytes) -> None:
    """Write a new file, down to the disk."""
    with file.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def rewrite(file: Path, text: str) -> None:
    """Write a text into a file that others read meanwhile: they find it as it was before, or as it is now."""
    waiting = file.with_name(f".{file.name}.partial")
    waiting.write_text(text, encoding="utf-8")
    waiting.replace(file)


def sync(file: Path) -> None:
    """Have what was written into a file reach the disk."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(partial: Path, final: Path) -> None:
    """Give a complete folder its name; what had it before (the same step, run again after a resume) goes."""
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        remove(old)
        final.rename(old)
    partial.rename(final)
    remove(old)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder reach the disk."""
    sync(folder)


def remove(folder: Path) -> None:
    """Remove a folder with all in it, where it is there."""
    shutil.rmtree(folder, ignore_errors=True)
