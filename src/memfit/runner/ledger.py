"""Bytes promised on each device and tier, and which waiting run is admitted next. Pure: the same rules pack runs on a clock that is simulated.

A run is admitted when its predicted peak fits beside those that are promised already; no byte is promised twice. Runs that are small may go before one that is
large and waits, but not for ever: after `patience` of them the large one is next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memfit.errors import InputError
from memfit.runner.request import RunRequest
from memfit.units import format_bytes

PATIENCE = 8


class Ledger:
    """Who has been promised how many bytes.

    Args:
        capacity: bytes on each device and tier, by name.
        at_once: runs at one time; None for as many as fit.
    """

    def __init__(self, capacity: Mapping[str, int], at_once: int | None = None) -> None:
        self.capacity = dict(capacity)
        self.at_once = at_once
        self._promised: dict[str, RunRequest] = {}
        self._passed: dict[str, int] = {}

    def check(self, request: RunRequest) -> None:
        """Check that a run fits where nothing else runs.

        Raises:
            InputError: it never will, or names a device that is not here.
        """
        for name, wanted in request.peak_bytes.items():
            if name not in self.capacity:
                raise InputError(
                    f"{request.name} asks for bytes on {name!r}, and the devices here are {', '.join(self.capacity) or 'none'}: name one of them"
                )
            if wanted > self.capacity[name]:
                raise InputError(
                    f"{request.name} needs {format_bytes(wanted)} on {name} and there are {format_bytes(self.capacity[name])}: it could never start"
                )

    def used(self, name: str) -> int:
        """Bytes promised on a device."""
        return sum(request.peak_bytes.get(name, 0) for request in self._promised.values())

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the runs that have been promised bytes."""
        return tuple(self._promised)

    def fits(self, request: RunRequest) -> bool:
        """Whether it could start now."""
        if self.at_once is not None and len(self._promised) >= self.at_once:
            return False
        if self._promised and (request.alone or any(each.alone for each in self._promised.values())):
            return False
        return all(self.used(name) + wanted <= self.capacity[name] for name, wanted in request.peak_bytes.items())

    def promise(self, request: RunRequest) -> None:
        """Promise a run its bytes; one that runs already, as after a restart, may exceed what there is now."""
        self._promised[request.name] = request
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
