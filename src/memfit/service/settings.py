"""What whoever starts the service decides."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from memfit.errors import InputError
from memfit.hardware.cores import cores as cores_here
from memfit.runner.cores import CORES
from memfit.runner.ledger import Ledger
from memfit.runner.machines import MachineLedger, Machines
from memfit.service.uploads import UploadLimits
from memfit.units import format_bytes, parse_bytes

DEFAULT_PORT: Final = 8321
LEASE_SECONDS: Final = 120.0


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
        store: URL of a PostgreSQL database, which several hosts may share with the folder; None for a file in the folder, which has one host.
        host: name of this host among those that share the store; "" for the one of a store of its own.
        lease_seconds: that runs of a host go on without a word between it and the store, and those of a cluster without one between service and machine; after
            twice as long others have them.
        cluster: address of the Ray cluster whose machines train; `capacity` is `Machines` then, which the service fills. None for this computer.
        cores: of the processor, which runs on it share.
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
    store: str | None = None
    host: str = ""
    lease_seconds: float = LEASE_SECONDS
    cluster: str | None = None
    cores: int = field(default_factory=cores_here)

    @property
    def accounts(self) -> dict[str, int]:
        """All that runs are promised: bytes on each device and tier, and cores."""
        return self.machines.accounts if self.machines is not None else {**self.capacity, CORES: self.cores}

    @property
    def machines(self) -> Machines | None:
        """Those of the cluster; None for a service of this computer."""
        return self.capacity if isinstance(self.capacity, Machines) else None

    @property
    def ledger(self) -> type[Ledger]:
        """By whose rules runs are placed."""
        return Ledger if self.machines is None else MachineLedger

    def shares_tier(self, name: str) -> bool:
        """Whether bytes of a lower tier are told, so that runs are promised them."""
        return name in self.capacity if self.machines is None else self.machines.tells(name)

    def check_host(self) -> None:
        """Check what is said about several hosts.

        Raises:
            InputError: it cannot be.
        """
        if self.host and not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", self.host):
            raise InputError(f"{self.host!r} is no name for a host: use small letters, digits and dashes, 63 at most")
        if bool(self.host) != bool(self.store):
            raise InputError(
                "a host has a name where several share a store: give both --store and --host-name, or none"
            )
        if not 2 <= self.lease_seconds <= 86400:
            raise InputError(f"a lease of {self.lease_seconds:g} s: it is from 2 to 86400 s (--lease)")

    @property
    def own(self) -> Path:
        """What of the folder is this host's alone: its runner, and where it listens."""
        return self.folder / "hosts" / self.host if self.host else self.folder

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


def own_name() -> str:
    """Of this computer, as a host among several is called where nobody says otherwise."""
    return re.sub(r"[^a-z0-9-]", "-", socket.gethostname().partition(".")[0].lower()) or "host"


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
        found["cuda:0" if name == "cuda" else name] = parse_bytes(
            size, total_bytes=total if kind in {"cpu", "host"} else None
        )
    return found
