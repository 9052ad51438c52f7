"""Bytes promised on each device and tier, and which waiting run is admitted next. Pure: the same rules pack runs on a clock that is simulated.

A run is admitted when its predicted peak fits beside those that are promised already; no byte is promised twice. One of several ranks gets a device for each,
all of them or none. Runs that are small may go before one that is large and waits, but not for ever: after `patience` of them the large one is next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memfit.errors import InputError
from memfit.runner.cores import CORES
from memfit.runner.request import RunRequest
from memfit.units import format_bytes

PATIENCE = 8


@dataclass(frozen=True, slots=True)
class Promise:
    """What one run has.

    Attributes:
        request: of it.
        devices: one for each rank; empty where the request names its devices itself.
    """

    request: RunRequest
    devices: tuple[str, ...]

    def bytes_on(self, name: str) -> int:
        """Of a device or tier."""
        ranks = zip(self.devices, self.request.rank_bytes, strict=True)
        return self.request.peak_bytes.get(name, 0) + sum(size for device, size in ranks if device == name)


class Ledger:
    """Who has been promised how many bytes.

    Args:
        capacity: bytes on each device and tier, by name.
        at_once: runs at one time; None for as many as fit.
    """

    def __init__(self, capacity: Mapping[str, int], at_once: int | None = None) -> None:
        self.capacity = dict(capacity)
        self.at_once = at_once
        self._promised: dict[str, Promise] = {}
        self._passed: dict[str, int] = {}

    def check(self, request: RunRequest) -> None:
        """Check that a run fits where nothing else runs.

        Raises:
            InputError: it never will, or names a device that is not here.
        """
        there = ", ".join(name for name in self.capacity if name != CORES) or "none"
        for name, wanted in request.peak_bytes.items():
            if name not in self.capacity:
                raise InputError(
                    f"{request.name} asks for bytes on {name!r}, and the devices here are {there}: name one of them"
                )
            if wanted > self.capacity[name]:
                raise InputError(
                    f"{request.name} needs {format_bytes(wanted)} on {name} and there are {format_bytes(self.capacity[name])}: it could never start"
                )
        if not request.rank_bytes:
            return
        devices, ranks = self._of_kind(request.device), len(request.rank_bytes)
        if not devices:
            raise InputError(
                f"{request.name} asks for bytes on {request.device!r}, and the devices here are {there}: name one of them"
            )
        if ranks > len(devices) and not self._shared(request.device):
            raise InputError(
                f"{request.name} has {ranks} ranks, each on a device of its own, and of {request.device} there are {len(devices)}: it could never start"
            )
        if Ledger(self.capacity).place(request) is None:
            largest = max(devices, key=self.capacity.__getitem__)
            wanted = sum(request.rank_bytes) if self._shared(request.device) else max(request.rank_bytes)
            if wanted > self.capacity[largest]:
                raise InputError(
                    f"{request.name} needs {format_bytes(wanted)} on {largest} and there are {format_bytes(self.capacity[largest])}: it could never start"
                )
            sizes = ", ".join(format_bytes(size) for size in request.rank_bytes)
            there = ", ".join(f"{format_bytes(self.capacity[name])} on {name}" for name in devices)
            raise InputError(
                f"the ranks of {request.name} need {sizes}, each on a device of its own, and there are {there}: it could never start"
            )

    @staticmethod
    def named(request: RunRequest, devices: Sequence[str]) -> RunRequest:  # noqa: ARG004 - of one computer all is here
        """A request whose bytes are on tiers by the names that these have here, where its ranks have these devices."""
        return request

    def used(self, name: str) -> int:
        """Bytes promised on a device."""
        return sum(promise.bytes_on(name) for promise in self._promised.values())

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the runs that have been promised bytes."""
        return tuple(self._promised)

    def devices(self, name: str) -> tuple[str, ...]:
        """The devices of the ranks of a run, in their order; empty where it has none."""
        return self._promised[name].devices if name in self._promised else ()

    def place(self, request: RunRequest) -> tuple[str, ...] | None:
        """A device for each rank; None where they do not all have one now.

        The largest rank chooses first, and each takes the fullest device that still has room: what fits a larger rank fits a smaller one, too, so where any
        choice works this one does.
        """
        left = {name: self.capacity[name] - self.used(name) for name in self._of_kind(request.device)}
        chosen: dict[int, str] = {}
        for rank, wanted in sorted(enumerate(request.rank_bytes), key=lambda each: -each[1]):
            fitting = [name for name, free in left.items() if wanted <= free]
            if not fitting:
                return None
            name = chosen[rank] = min(fitting, key=left.__getitem__)
            if self._shared(name):
                left[name] -= wanted
            else:
                del left[name]
        return tuple(chosen[rank] for rank in range(len(request.rank_bytes)))

    def fits(self, request: RunRequest) -> bool:
        """Whether it could start now."""
        if self.at_once is not None and len(self._promised) >= self.at_once:
            return False
        if self._promised and (request.alone or any(each.request.alone for each in self._promised.values())):
            return False
        devices = self.place(request)
        if devices is None:
            return False
        # Bytes may be asked for by name and by ranks at once.
        promise = Promise(self.named(request, devices), devices)
        wanted = {name: promise.bytes_on(name) for name in {*devices, *promise.request.peak_bytes}}
        return all(self.used(name) + size <= self.capacity.get(name, 0) for name, size in wanted.items())

    def promise(self, request: RunRequest, devices: Sequence[str] | None = None) -> None:
        """Promise a run its bytes.

        Args:
            request: of the run.
            devices: where its ranks are, where it runs already, as after a restart: that may exceed what there is now.
        """
        placed = self.place(request) if devices is None else tuple(devices)
        assert placed is not None, "whoever promises has asked whether it fits"
        self._promised[request.name] = Promise(self.named(request, placed), placed)
        self._passed.pop(request.name, None)

    def give_back(self, name: str) -> None:
        """What a run was promised is free again."""
        self._promised.pop(name, None)
        self._passed.pop(name, None)

    def admitted(self, waiting: Sequence[RunRequest]) -> list[RunRequest]:
        """Those of the waiting runs that start now, in the order in which they came; their bytes are promised."""
        chosen: list[RunRequest] = []
        passed_over: list[RunRequest] = []
        for request in waiting:
            if any(self._passed.get(each.name, 0) >= PATIENCE for each in passed_over):
                break
            if not self.fits(request):
                passed_over.append(request)
                continue
            self._count(passed_over)
            self.promise(request)
            chosen.append(request)
        return chosen

    def _count(self, passed_over: Iterable[RunRequest]) -> None:
        for request in passed_over:
            self._passed[request.name] = self._passed.get(request.name, 0) + 1

    def _of_kind(self, kind: str) -> list[str]:
        return [name for name in self.capacity if name.partition(":")[0] == kind]

    def _shared(self, name: str) -> bool:
        """Whether several ranks of a run may be on it: memory that has no number is the computer's."""
        return ":" not in name and name in self.capacity
