"""The runner of one machine: admits runs by their predicted peaks, watches them, and finds them again after its own death.

Nothing is run twice: an attempt is written into the store before it starts, and its guard begins by claiming the attempt's folder. A runner that comes
back reads the claim (pid and start time) of each attempt that was running. Where there is none it claims the folder itself, so that a guard that is still on
its way ends at once.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memfit.errors import InputError
from memfit.runner import guard
from memfit.runner.ends import End, classified
from memfit.runner.ledger import Ledger
from memfit.runner.node_watch import start_guard
from memfit.runner.request import RunRequest
from memfit.runner.runs import Runs, read_json
from memfit.runner.store import Row

_NEVER_STARTED: Final = {"void": True}


@dataclass(slots=True)
class _Attempt:
    """One that runs."""

    request: RunRequest
    number: int
    folder: Path
    pid: int
    watch: int  # a file descriptor that is readable once the process has ended
    process: subprocess.Popen[bytes] | None  # None where an earlier runner started it


class Runner(Runs):
    """Starts, watches, limits and ends runs.

    Args:
        folder: for what is known of the runs, and their output; one runner at a time.
        capacity: bytes on each device and tier, by name, as in `RunRequest.peak_bytes`.
        at_once: runs at one time; None for as many as fit.

    Raises:
        InputError: as for `RunStore`; or this is no Linux.
    """

    def __init__(self, folder: str | Path, capacity: Mapping[str, int], at_once: int | None = None) -> None:
        if not Path("/proc/self/stat").exists() or not hasattr(os, "pidfd_open"):
            raise InputError("runs are watched through /proc and pidfd_open, which this system lacks: use Linux")
        super().__init__(folder, Ledger(capacity, at_once))
        self._running: dict[str, _Attempt] = {}
        for row in self._store.rows():
            self._found_again(row)

    @property
    def running(self) -> tuple[str, ...]:
        """Names of runs that run."""
        return tuple(self._running)

    def _stop_begun(self, name: str, *, at_once: bool) -> None:
        if name in self._running:
            _send(self._running[name], signal.SIGUSR1 if at_once else signal.SIGTERM)

    def poll(self, seconds: float = 0.0) -> list[tuple[str, End]]:
        """As in `Runs`."""
        self._start()
        self._wake_guards()
        if not self._news:
            self._watch(seconds)
        while any(self._is_over(attempt) for attempt in self._running.values()):
            for attempt in [each for each in self._running.values() if self._is_over(each)]:
                self._ended_now(attempt)
        self._start()
        return self._told()

    def close(self, *, stop: bool = True) -> None:
        """Let go of the folder.

        Args:
            stop: end what runs, at once, for the next runner of the folder to begin it again; else runs that outlive the runner go on, to be found again.
        """
        if stop:
            for attempt in self._running.values():
                _send(attempt, signal.SIGQUIT)
            for attempt in list(self._running.values()):
                select.select([attempt.watch], [], [], 10)
                with suppress(InputError):
                    self._ended_now(attempt)
        for attempt in self._running.values():
            os.close(attempt.watch)
            if attempt.process is not None:
                attempt.process.poll()  # one that has ended leaves no zombie
        self._running.clear()
        self._store.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _start(self) -> None:
        for request in self.ledger.admitted(list(self._waiting.values())):
            try:
                self._launch(request)
            except BaseException:
                self.ledger.give_back(request.name)
                raise

    def _launch(self, request: RunRequest) -> None:
        number, folder, _ = self._begun(request, self.ledger.devices(request.name))
        process = start_guard(folder, None if request.inherits else {})
        self._running[request.name] = _Attempt(
            request, number, folder, process.pid, os.pidfd_open(process.pid), process
        )

    def _wake_guards(self) -> None:
        """A guard that somebody has halted sees no end and keeps no limit."""
        for attempt in self._running.values():
            if guard.halted(attempt.pid):
                _send(attempt, signal.SIGCONT)

    def _watch(self, seconds: float) -> None:
        watches = [attempt.watch for attempt in self._running.values()]
        if watches:
            select.select(watches, [], [], seconds)
        elif seconds:
            time.sleep(seconds)

    @staticmethod
    def _is_over(attempt: _Attempt) -> bool:
        return bool(select.select([attempt.watch], [], [], 0)[0])

    def _ended_now(self, attempt: _Attempt) -> None:
        end = self._end_of_attempt(attempt)
        request = attempt.request
        if not self._again(request, end):
            self._finish(request, end)
        del self._running[request.name]
        os.close(attempt.watch)
        if attempt.process is not None:
            attempt.process.wait()

    def _end_of_attempt(self, attempt: _Attempt) -> End:
        left = read_json(attempt.folder / guard.END)
        if left is None:
            guard.end_left_behind(str(attempt.folder))
            full = guard.is_full(str(attempt.folder))  # without space a guard cannot begin
            return End("lost", reason="the process that watched it was killed", attempts=attempt.number, disk_full=full)
        return classified(left, attempt.folder / "stderr", attempt.number)

    def _found_again(self, row: Row) -> None:
        """What an earlier runner has left."""
        request, name, number = row.request, row.request.name, row.attempt
        if self._is_recalled(row):
            return
        folder = self._folder(name, number)
        claimed = read_json(folder / guard.CLAIM)
        if claimed is None and guard.claim(str(folder), _NEVER_STARTED):
            claimed = _NEVER_STARTED
        claimed = claimed or read_json(folder / guard.CLAIM) or _NEVER_STARTED
        if claimed.get("void"):  # the attempt never began, and now never will
            self._store.wait(name, row.faults)
            self._waiting[name] = request
            return
        pid = int(claimed["pid"])
        watch = _open(pid)
        if watch is not None and (guard.started(pid), guard.boot()) == (claimed["started"], claimed["boot"]):
            self._running[name] = _Attempt(request, number, folder, pid, watch, None)
            self.ledger.promise(request, (read_json(folder / guard.SPEC) or {}).get("devices", ()))
            return
        if watch is not None:
            os.close(watch)
        left = read_json(folder / guard.END)
        if left is None:
            guard.end_left_behind(str(folder))
        gone = End("lost", reason="it was gone when the runner came back", attempts=number)
        found = gone if left is None else classified(left, folder / "stderr", number)
        if not self._again(request, found, earlier=True):
            self._finish(request, found)


def _send(attempt: _Attempt, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(attempt.pid, number)


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
