"""Which folder on disk is used: one for what is offloaded, one for what has been measured.

What is offloaded to disk (activations, streamed layers, optimizer state) goes to one folder, and plans use the speed and the free space of that folder's
disk. A caller may name it (`lower_tier=` of `memfit.apply`); otherwise the environment does.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Value = TypeVar("Value", bound=DataclassInstance)

SETTING: Final = "MEMFIT_OFFLOAD_DIR"
FORMER_SETTING: Final = "MEMFIT_SWAP_DIR"

_told: set[str] = set()


def offload_folder(named: str | Path | None = None) -> Path:
    """The folder for what is offloaded to disk.

    The first that exists of: MEMFIT_OFFLOAD_DIR, MEMFIT_SWAP_DIR (its former name), TMPDIR, and /var/tmp, which unlike /tmp is nowhere kept in memory.

    Args:
        named: by the caller; it overrides the environment even where it does not exist, so that nothing is silently written to another disk.
    """
    if named is not None:
        return Path(named)
    for setting in (SETTING, FORMER_SETTING, "TMPDIR"):
        folder = os.environ.get(setting)
        if folder and Path(folder).is_dir():
            if setting == FORMER_SETTING and setting not in _told:
                _told.add(setting)
                warnings.warn(
                    "MEMFIT_SWAP_DIR is now called MEMFIT_OFFLOAD_DIR: set that", DeprecationWarning, stacklevel=2
                )
            return Path(folder)
    lasting = Path("/var/tmp")  # noqa: S108 - files there have no name
    return lasting if lasting.is_dir() else Path(tempfile.gettempdir())


def free_bytes(folder: Path) -> int:
    """What is free on the disk of a folder."""
    return shutil.disk_usage(folder).free


def cache_folder() -> Path:
    """Where measurements are kept: MEMFIT_CACHE_DIR, or memfit's folder in the user's cache."""
    base = os.environ.get("MEMFIT_CACHE_DIR")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memfit"


def measured_once(
    kind: type[Value],
    folder: str,
    identity: str,
    measure: Callable[[], Value],
    worth_another: Callable[[Value], bool] = lambda _: False,
) -> Value:
    """What was measured on this computer before, else what `measure` gives, kept for the next time.

    The file is a convenience: one that cannot be read is measured again, and a read-only or full disk stops nothing.

    Args:
        kind: a dataclass of plain values.
        folder: inside `cache_folder`.
        identity: tells apart what is measured separately.
        measure: what it raises is raised, and nothing is kept.
        worth_another: whether what was measured before is to be measured again.
    """
    path = cache_folder() / folder / f"{identity}.json"
    with suppress(OSError, ValueError, TypeError):
        known = kind(**json.loads(path.read_text()))
        if not worth_another(known):
            return known
    found = measure()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(found)))
        temporary.replace(path)
    return found
