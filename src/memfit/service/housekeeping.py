"""What a service keeps, and for how long: files of runs that are over, uploaded code, the audit log; and how much of the disk one owner may take.

Nothing goes without a word: a removal is an event of its run, with its bytes and the reason, and the run itself (what was asked, planned and measured, and
how it ended) stays. Nothing is removed but what whoever started the service, or the owner, has asked for.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import threading
import time
from pathlib import Path
from typing import Final

from memfit.errors import InputError
from memfit.service import launching
from memfit.service.refusals import NotAllowedError, NotNowError
from memfit.service.service import Service
from memfit.service.states import LIVE, OVER, RUNNING
from memfit.service.store import StoredRun
from memfit.service.tokens import Caller
from memfit.units import format_bytes

_log = logging.getLogger("memfit.service")
_SECONDS: Final = 30.0  # between looks
_DAY: Final = 86400.0
_JUMP_SECONDS: Final = 60.0
_JUMPED_SECONDS: Final = 3600.0


class Housekeeping:
    """Of one service.

    Args:
        service: whose folder it looks after.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.settings, self.store = service, service.settings, service.store
        self._clocks: tuple[float, float] | None = None
        self._steady_from = 0.0

    def serve(self, stopping: threading.Event) -> None:
        """Look now and then until told to stop."""
        while not stopping.wait(_SECONDS):
            try:
                self.look()
            except (InputError, OSError) as error:
                _log.error("housekeeping cannot go on for now: %s", error)

    def look(self) -> None:
        """Once: measure, hold owners to their quota, remove what is due."""
        self._measure()
        self._hold_to_quota()
        self._finish_removals()
        if self._clock_is_steady(time.time(), time.monotonic()):
            self._remove_old()
            self._remove_code()
            self._remove_audit()

    def _clock_is_steady(self, now: float, steady: float) -> bool:
        """Whether the computer's clock has gone on as time does, for an hour since it last did not: nothing is old because a clock was set."""
        before, self._clocks = self._clocks, (now, steady)
        if before is not None and abs((now - before[0]) - (steady - before[1])) > _JUMP_SECONDS:
            _log.error("the computer's clock has jumped: nothing is removed for its age in the next hour")
            self._steady_from = steady + _JUMPED_SECONDS
        return steady >= self._steady_from

    def remove(self, caller: Caller, number: int) -> StoredRun:
        """Have the files of a run that is over removed; one whose files are gone stays as it is.

        Raises:
            NotKnownError, NotAllowedError: they may not see it, or not change it.
            NotNowError: it is not over.
        """
        run = self.service.run(caller, number)
        if not caller.may_change(run.owner):
            raise NotAllowedError(f"run {number} is of {run.owner}, and this token may not change it")
        if run.state not in OVER:
            raise NotNowError(f"run {number} is {run.state}: cancel it first, then its files can be removed")
        if run.removed is None:
            self._remove(run, f"asked by {caller.name}")
        return self.store.run(number)

    # ------------------------------------------------------------------------------------------------------------ inside

    def _measure(self) -> None:
        """Bytes of runs that may have written since they were last looked at."""
        for run in self.store.to_measure(LIVE):
            size = sum(map(bytes_on_disk, self._folders(run)))
            if size != run.disk_bytes:
                self.store.has_on_disk(run.number, size)

    def _hold_to_quota(self) -> None:
        """Runs of an owner who has more on the disk than is allowed write a snapshot and stop, until there is space."""
        quota = self.settings.owner_disk_bytes
        if quota is None:
            return
        used = self.store.disk_by_owner()
        for run in self.store.live():
            if run.state == RUNNING and not run.asked and used.get(run.owner, 0) > quota:
                taken = f"the files of {run.owner}'s runs take {format_bytes(used[run.owner])}"
                why = f"{taken}, and {format_bytes(quota)} are allowed: remove some, then resume it"
                self.store.change(run.number, "pause", why, if_still={"state": RUNNING, "asked": ""}, asked="pause")

    def _remove_old(self) -> None:
        days, most = self.settings.keep_days, self.settings.keep_bytes
        if days is not None:
            for run in self.store.with_files(OVER, ended_before=time.time() - days * _DAY):
                self._remove(run, f"it ended more than {days:g} days ago")
        if most is None:
            return
        total = sum(self.store.disk_by_owner().values())
        for run in self.store.with_files(OVER) if total > most else ():
            self._remove(run, f"the files of all runs take {format_bytes(total)}, and {format_bytes(most)} are kept")
            total -= run.disk_bytes
            if total <= most:
                return

    def _remove(self, run: StoredRun, why: str) -> None:
        text = f"its files ({format_bytes(run.disk_bytes)}) are removed: {why}"
        if self.store.change(run.number, "removed", text, if_still={"removed": None}, removed=time.time()):
            self._remove_files(run)

    def _finish_removals(self) -> None:
        """What was begun before the service ended."""
        for run in self.store.half_removed():
            self._remove_files(run)

    def _remove_files(self, run: StoredRun) -> None:
        for folder in self._folders(run):
            shutil.rmtree(folder, ignore_errors=True)  # follows no links
        for part in range(run.part + 1):
            self.service.dispatcher.forgotten.put(launching.name_of(run.number, part))
        self.store.has_on_disk(run.number, 0)

    def _folders(self, run: StoredRun) -> list[Path]:
        """Its own, and those in which the runner has what it has printed."""
        names = [launching.name_of(run.number, part) for part in range(run.part + 1)]
        attempts = [attempt for name in names for attempt in launching.outputs_of(self.settings, name)]
        parts = sorted({attempt.parent for attempt in attempts})
        return [launching.folder_of(self.settings, run.number), *parts]

    def _remove_code(self) -> None:
        """Uploaded code that no run with files needs, once it is as old as files become."""
        days = self.settings.keep_days
        if days is None:
            return
        for digest, owner in self.store.unused_uploads(time.time() - days * _DAY):
            if self.store.forget_upload(digest, owner):
                shutil.rmtree(launching.code_of(self.settings, digest), ignore_errors=True)

    def _remove_audit(self) -> None:
        days = self.settings.keep_audit_days
        if days is None:
            return
        gone = self.store.forget_audit(time.time() - days * _DAY)
        if gone:
            _log.warning("%d rows of the audit log are older than %g days and were removed", gone, days)


def bytes_on_disk(folder: Path) -> int:
    """That the files below a folder take; links are not followed."""
    found, waiting = 0, [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    about = entry.stat(follow_symlinks=False)
                    found += about.st_blocks * 512
                    if stat.S_ISDIR(about.st_mode):
                        waiting.append(entry.path)
        except OSError:
            continue  # it went away meanwhile
    return found
