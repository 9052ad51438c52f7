"""The machines of a cluster: their bytes and cores as they are now, and the account in which one machine has to hold all of a run. Pure.

Names are those of one computer with the machine's name behind them: "cuda:1a2b3c4d", "host:1a2b3c4d", "cores:1a2b3c4d".
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import replace

from memfit.errors import InputError
from memfit.runner.cores import CORES
from memfit.runner.ledger import Ledger, Promise
from memfit.runner.request import RunRequest
from memfit.units import format_bytes


class Machines(Mapping[str, int]):
    """Bytes by the names of devices and tiers. It changes as machines come and go, while other threads read it: whoever walks through it has it as it was.

    Attributes:
        by_machine: bytes by kind of device or tier, and cores, of each machine.
        seen: the same, of those that have been here as well, one of several that are alike.
    """

    def __init__(self, by_machine: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self.by_machine: Mapping[str, Mapping[str, int]] = {}
        self.seen: Mapping[str, Mapping[str, int]] = {}
        self._bytes: dict[str, int] = {}
        self.become(by_machine or {})

    def become(self, by_machine: Mapping[str, Mapping[str, int]]) -> None:
        """These are there now."""
        self.by_machine = by_machine
        gone = {name: sizes for name, sizes in self.seen.items() if sizes not in by_machine.values()}
        self.seen = {**gone, **by_machine}
        self._bytes = {name: size for name, size in self.accounts.items() if kind_of(name) != CORES}

    @property
    def accounts(self) -> dict[str, int]:
        """Bytes and cores."""
        return accounts_of(self.by_machine)

    def tells(self, kind: str) -> bool:
        """Whether some machine has told its bytes of a kind of device or tier."""
        return any(kind_of(name) == kind for name in self.keys())

    def __getitem__(self, name: str) -> int:
        return self._bytes.get(name, 0)  # of a machine that went a moment ago, whose name the reader still has

    def __contains__(self, name: object) -> bool:
        return name in self._bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    def __len__(self) -> int:
        return len(self._bytes)

    def keys(self) -> KeysView[str]:
        """Names, as they are now."""
        return self._bytes.keys()

    def values(self) -> ValuesView[int]:
        """Bytes, as they are now."""
        return self._bytes.values()

    def items(self) -> ItemsView[str, int]:
        """Both, as they are now."""
        return self._bytes.items()


class MachineLedger(Ledger):
    """As that of one computer, where a run has one rank, and all that it takes is on the machine of that rank."""

    def check(self, request: RunRequest) -> None:
        """As on one computer.

        Raises:
            InputError: no machine could ever hold the run; or it has several ranks.
        """
        check_ranks(request)
        tiers = {name: size for name, size in request.peak_bytes.items() if name != CORES}
        wanted = {request.device: sum(request.rank_bytes), **tiers}
        sizes: dict[str, dict[str, int]] = {}
        for name, there in self.capacity.items():
            kind, _, machine = name.partition(":")
            if kind != CORES:
                sizes.setdefault(machine, {})[kind] = there
        check_one_machine(request.name, wanted, sizes)

    @staticmethod
    def named(request: RunRequest, devices: Sequence[str]) -> RunRequest:
        """As in `Ledger`: tiers and cores are those of the rank's machine."""
        if not devices:
            return request
        machine = machine_of(devices[0])
        tiers = {name if ":" in name else f"{name}:{machine}": size for name, size in request.peak_bytes.items()}
        return replace(request, peak_bytes=tiers)

    def place(self, request: RunRequest) -> tuple[str, ...] | None:
        """The device of its rank, the fullest that has room for it and whose machine has the rest; None where there is none now."""
        if len(request.rank_bytes) != 1:
            return None
        fitting = [name for name in self._of_kind(request.device) if self._holds(name, request)]
        return (min(fitting, key=lambda name: self.capacity[name] - self.used(name)),) if fitting else None

    def _holds(self, device: str, request: RunRequest) -> bool:
        promise = Promise(self.named(request, (device,)), (device,))
        names = {device, *promise.request.peak_bytes}
        return all(self.used(name) + promise.bytes_on(name) <= self.capacity.get(name, 0) for name in names)


def accounts_of(by_machine: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Bytes and cores by the names of devices and tiers of all machines."""
    return {f"{kind}:{machine}": size for machine, sizes in by_machine.items() for kind, size in sizes.items()}


def kind_of(name: str) -> str:
    """Of a device or tier: "cuda" of "cuda:1a2b3c4d"."""
    return name.partition(":")[0]


def machine_of(name: str) -> str:
    """Where a device is."""
    return name.partition(":")[2]


def check_ranks(request: RunRequest) -> None:
    """Check that a run has one rank.

    Raises:
        InputError: it has several.
    """
    if len(request.rank_bytes) > 1:
        raise InputError(
            f"{request.name} has {len(request.rank_bytes)} ranks, and on a cluster a run has one: leave the cluster out to run it on this computer"
        )


def check_one_machine(name: str, wanted: Mapping[str, int], machines: Mapping[str, Mapping[str, int]]) -> None:
    """Check that one machine could hold all that a run takes.

    Args:
        name: of the run.
        wanted: bytes by kind of device or tier.
        machines: the same, of each machine.

    Raises:
        InputError: none could.
    """
    if any(all(size <= sizes.get(kind, 0) for kind, size in wanted.items()) for sizes in machines.values()):
        return
    asked = ", ".join(f"{format_bytes(size)} on {kind}" for kind, size in wanted.items())
    there = ", ".join(
        f"{format_bytes(size)} on {kind}:{machine}"
        for machine, sizes in machines.items()
        for kind, size in sizes.items()
    )
    raise InputError(
        f"{name} needs {asked}, and the machines of the cluster have {there or 'told no bytes'}: it could never start"
    )
