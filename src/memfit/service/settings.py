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
from memfit.units import parse_bytes

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


def read_capacity(texts: tuple[str, ...]) -> dict[str, int]:
    """Bytes by device and tier, as given on the command line: "8GiB" is of the CPU, "cuda:0=24GiB" of a device by its name.

    Raises:
        InputError, BudgetError: it cannot be read.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, int] = {}
    for text in texts:
        name, equals, size = text.rpartition("=")
        name = name if equals else "cpu"
        kind, _, number = name.partition(":")
        if kind not in {"cpu", "cuda", "host", "disk"} or (number and not number.isdecimal()):
            raise InputError(f"{name!r} is no device: write cpu=8GiB, cuda:0=24GiB, host=64GiB or disk=500GiB")
        found[name] = parse_bytes(size, total_bytes=total if kind in {"cpu", "host"} else None)
    return found
