"""What each owner has had of the devices of late: bytes times seconds, by which the queue is fair."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from memfit.service.planned import Planned
from memfit.service.store import ServiceStore, StoredRun

_SHARES_SECONDS: Final = 24 * 3600.0  # that count for fair shares
_OVERLAP_SECONDS: Final = 60.0
_ANEW_SECONDS: Final = 5.0  # between two looks into the store


class Shares:
    """Of the owners of one store's runs."""

    def __init__(self, store: ServiceStore) -> None:
        self._store = store
        self._ended: dict[int, tuple[float, str, float]] = {}  # when, whose, and bytes times seconds
        self._found: tuple[float, dict[str, float]] = (-1e9, {})

    def had(self, running: Iterable[StoredRun]) -> dict[str, float]:
        """Bytes times seconds that each owner has had of late, and has with the runs that run."""
        now = time.time()
        if time.monotonic() - self._found[0] > _ANEW_SECONDS:
            # What ended before the last look is known; a little more is read again, as clocks are set back.
            newest = max((ended for ended, _, _ in self._ended.values()), default=0.0)
            for run in self._store.ended_since(max(now - _SHARES_SECONDS, newest - _OVERLAP_SECONDS)):
                self._ended[run.number] = (run.ended or now, run.owner, _bytes(run) * run.run_seconds)
            found: dict[str, float] = {}
            for number, (ended, owner, taken) in list(self._ended.items()):
                if ended < now - _SHARES_SECONDS:
                    del self._ended[number]
                else:
                    found[owner] = found.get(owner, 0.0) + taken
            self._found = (time.monotonic(), found)
        had = dict(self._found[1])
        for run in running:
            had[run.owner] = had.get(run.owner, 0.0) + _bytes(run) * max(0.0, now - (run.started or now))
        return had


def _bytes(run: StoredRun) -> int:
    return sum(Planned.from_json(run.plan).rank_bytes) if run.plan else 0
