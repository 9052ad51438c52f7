"""What whoever starts the service decides."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from memfit.errors import InputError
from memfit.service.uploads import UploadLimits
from memfit.units import format_bytes, parse_bytes

DEFAULT_PORT: Final = 8321


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """One service.

    Attributes:
        folder: for all that it keeps: the store, uploads, runs and their results.
        capacity: bytes that runs share, on each device and tier: {"cpu": 8 << 30} or {"cuda:0": ..., "host": ..., "disk": ...}.
        data: folders that runs may read besides their own code: data sets and models.
        modules: that `model.python` and `data.python` may name without uploaded code.
        confined: whether runs are confined to their own folder (`memfit.service.confine`).
        upload: limits of one upload.
        uploads: that one owner may have.
        live_runs: of one owner that are not over.
        config_bytes: of a run file.
        planning_seconds: after which planning is given up.
        planning_at_once: runs that are planned at one time.
        run_seconds: after which a run is stopped; None for no limit.
        silent_seconds: without output or a line in its log, after which a run is stopped; None for no limit.
        restarts: of a run that was killed or lost, each from its last snapshot.
        grace_seconds: that a run has to write a snapshot when it is paused or cancelled.
        planning_bytes: of the computer's memory that one process of planning may take; they are an account of their own beside what runs share.
        keep_days: after which the files of a run that is over, and code that no run needs, are removed; None for never.
        keep_bytes: that the files of all runs may take before those of the oldest that are over are removed; None for any.
        keep_audit_days: after which rows of the audit log are removed; None for never.
        owner_disk_bytes: that the files of one owner's runs may take; None for any.
        program: by which a run is planned and trained: what comes before `plan`, `train` and `resume`.
    """

    folder: Path
    capacity: Mapping[str, int]
    data: tuple[Path, ...] = ()
    modules: tuple[str, ...] = ()
    confined: bool = True
    upload: UploadLimits = field(default_factory=UploadLimits)
    uploads: int = 100
    live_runs: int = 1000
    config_bytes: int = 256 << 10
    planning_seconds: float = 600.0
    planning_at_once: int = 1
    run_seconds: float | None = None
    silent_seconds: float | None = None
    restarts: int = 3
    grace_seconds: float = 60.0
    program: tuple[str, ...] = (sys.executable, "-m", "memfit")
    planning_bytes: int = 4 << 30
    keep_days: float | None = None
    keep_bytes: int | None = None
    keep_audit_days: float | None = None
    owner_disk_bytes: int | None = None

    def check_memory(self) -> None:
        """Check that what runs share and what planning takes are there.

        Raises:
            InputError: this computer has less memory.
        """
        total = memory_bytes()
        planning = self.planning_bytes * self.planning_at_once
        shared = sum(size for name, size in self.capacity.items() if name in {"cpu", "host"})
        if shared + planning > total:
            raise InputError(
                f"runs are to share {format_bytes(shared)} and planning may take {format_bytes(planning)}, and this computer has {format_bytes(total)}: "
                "lower --capacity, or --planning-memory"
            )


def memory_bytes() -> int:
    """Of this computer."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def planning_memory() -> int:
    """What one process of planning may take where nobody says: a quarter of the computer's memory, 8 GiB at most."""
    return min(8 << 30, memory_bytes() // 4)


def read_capacity(texts: tuple[str, ...]) -> dict[str, int]:
    """Bytes by device and tier, as given on the command line: "8GiB" is of the CPU, "cuda:0=24GiB" of a device by its name.

    Raises:
        InputError, BudgetError: it cannot be read.
    """
    total = memory_bytes()
    found: dict[str, int] = {}
    for text in texts:
        name, equals, size = text.rpartition("=")
        name = name if equals else "cpu"
        kind, _, number = name.partition(":")
        if kind not in {"cpu", "cuda", "host", "disk"} or (number and not number.isdecimal()):
            raise InputError(f"{name!r} is no device: write cpu=8GiB, cuda:0=24GiB, host=64GiB or disk=500GiB")
        found[name] = parse_bytes(size, total_bytes=total if kind in {"cpu", "host"} else None)
    return found
