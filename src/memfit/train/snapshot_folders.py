"""The snapshots in a run's folder, by the names of their folders: what can be told without torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"step-(\d{6,})")


def named(step: int) -> str:
    """The folder of the snapshot after so many steps."""
    return f"step-{step:06d}"


def step_of(folder: Path) -> int | None:
    """Steps taken before the snapshot in a folder; None where its name is no snapshot's."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def folders(out: Path) -> list[Path]:
    """The snapshots in a run's folder, by step, unchecked."""
    if not out.is_dir():
        return []
    found = [(step, folder) for folder in out.iterdir() if (step := step_of(folder)) is not None and folder.is_dir()]
    return [folder for _, folder in sorted(found)]


def size(folder: Path) -> int:
    """Bytes of the files of a snapshot."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
