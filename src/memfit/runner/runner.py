"""The runner of one machine: admits runs by their predicted peaks, watches them, and finds them again after its own death.

Nothing is run twice: an attempt is written into the store before it starts, and its guard begins by claiming the attempt's folder. A runner that comes
back reads the claim (pid and start time) of each attempt that was running. Where there is none it claims the folder itself, so that a guard that is still on
its way ends at once.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from memfit.errors import InputError
from memfit.runner import guard
from memfit.runner.ends import End, classified
from memfit.runner.ledger import Ledger
from memfit.runner.request import RunRequest
from memfit.runner.store import Row, RunStore

_NEVER_STARTED: Final = {"void": True}
_AGAIN: Final = ("killed", "lost")  # ends after which a run is started again; others would only happen again


@dataclass(slots=True)
class _Attempt:
    """One that runs."""

    request: RunRequest
    number: int
    folder: Path
    pid: int
    watch: int  # a file descriptor that is readable once the process has ended
    process: subprocess.Popen[bytes] | None  # None where an earlier runner started it


class Runner:
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
        self.folder = Path(folder).resolve()
        self.ledger = Ledger(capacity, at_once)
        self._store = RunStore(self.folder)
        self._waiting: dict[str, RunRequest] = {}
        self._attempts: dict[str, int] = {}
        self._faults: dict[str, int] = {}
        self._running: dict[str, _Attempt] = {}
        self._ended: dict[str, End] = {}
        self._news: list[tuple[str, End]] = []
        for row in self._store.rows():
            self._found_again(row)

    # ------------------------------------------------------------------------------------------------------- questions

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of runs that have not started, in order."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[str, ...]:
        """Names of runs that run."""
        return tuple(self._running)

    def end_of(self, name: str) -> End | None:
        """How a run ended; None before that, or where there is no such run."""
        return self._ended.get(name)

    def knows(self, name: str) -> bool:
        """Whether there is such a run."""
        return name in self._attempts

    def stdout(self, name: str) -> Path:
        """The output of a run's last attempt."""
        return self._folder(name, max(1, self._attempts.get(name, 1))) / "stdout"

    def stderr(self, name: str) -> Path:
        """The error output of a run's last attempt."""
        return self.stdout(name).with_name("stderr")

    # --------------------------------------------------------------------------------------------------------- changes

    def submit(self, request: RunRequest) -> None:
        """Have something run when there are bytes for it; a name that is known already changes nothing.

        Raises:
            InputError: it could never start; or the store cannot be written.
        """
        if self.knows(request.name):
            return
        if not request.name or "/" in request.name or request.name.startswith("."):
            raise InputError(f"{request.name!r} is no name for a run: it is a folder's name, too")
        self.ledger.check(request)
        self._store.add(request)
        self._attempts[request.name] = 0
        self._waiting[request.name] = request

    def stop(self, name: str, *, at_once: bool = False) -> None:
        """Have a run end: by its end signal, and SIGKILL after the grace; or by SIGKILL now. One that waits never starts."""
        if name in self._waiting:
            self._finish(self._waiting.pop(name), End("stopped", reason="asked", attempts=self._attempts[name]))
        elif name in self._running:
            with suppress(ProcessLookupError):
                os.kill(self._running[name].pid, signal.SIGUSR1 if at_once else signal.SIGTERM)

    def poll(self, seconds: float = 0.0) -> list[tuple[str, End]]:
        """Start what fits, and wait for an end.

        Args:
            seconds: to wait at most, where nothing has ended.

        Returns:
            The runs that ended since the last call, each with how.

        Raises:
            InputError: the store cannot be written. What has happened is on disk; the next call tries again.
        """
        self._start()
        if not self._news:
            self._watch(seconds)
        while any(self._is_over(attempt) for attempt in self._running.values()):
            for attempt in [each for each in self._running.values() if self._is_over(each)]:
                self._ended_now(attempt)
        self._start()
        news, self._news = self._news, []
        return news

    def close(self, *, stop: bool = True) -> None:
        """Let go of the folder.

        Args:
            stop: end what runs, at once; else runs that outlive the runner go on, to be found again.
        """
        if stop:
            for name in self.running:
                self.stop(name, at_once=True)
            for attempt in list(self._running.values()):
                select.select([attempt.watch], [], [], 10)
                with suppress(InputError):
                    self._ended_now(attempt)
        for attempt in self._running.values():
            os.close(attempt.watch)
        self._running.clear()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _folder(self, name: str, attempt: int) -> Path:
        return self.folder / "runs" / name / str(attempt)

    def _start(self) -> None:
        for request in self.ledger.admitted(list(self._waiting.values())):
            try:
                self._launch(request)
            except BaseException:
                self.ledger.give_back(request.name)
                raise

    def _launch(self, request: RunRequest) -> None:
        number = self._attempts[request.name] + 1
        folder = self._folder(request.name, number)
        again = bool(request.resume_command) and Path(request.resume_if).exists()
        spec = {
            **request.to_json(),
            "command": list(request.resume_command if again else request.command),
            "runner": os.getpid(),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / guard.SPEC).write_text(json.dumps(spec), encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write {folder}: {error.strerror or error}; free space, then start again"
            ) from error
        self._store.begin(request.name, number)
        del self._waiting[request.name]
        self._attempts[request.name] = number
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, guard.SIGNALS
        )  # inherited: the guard must not die of one that comes early
        try:
            process = subprocess.Popen(  # noqa: S603 - our own file
                [sys.executable, "-I", "-S", guard.__file__, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal is for the runner alone
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._running[request.name] = _Attempt(
            request, number, folder, process.pid, os.pidfd_open(process.pid), process
        )

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

    def _again(self, request: RunRequest, end: End) -> bool:
        """Whether the run is to be started again, and now waits for it."""
        with_runner = end.kind == "stopped" and end.reason == "runner died"
        faults = self._faults.get(request.name, 0) + (0 if with_runner else 1)
        if not with_runner and (end.kind not in _AGAIN or faults > request.restarts):
            return False
        self._store.wait(request.name, faults)
        self._faults[request.name] = faults
        self._waiting[request.name] = request
        self.ledger.give_back(request.name)
        return True

    def _finish(self, request: RunRequest, end: End) -> None:
        self._store.end(request.name, end.to_json())
        self._ended[request.name] = end
        self._news.append((request.name, end))
        self.ledger.give_back(request.name)

    def _end_of_attempt(self, attempt: _Attempt) -> End:
        left = _read(attempt.folder / guard.END)
        if left is None:
            return End(
                "lost", reason="the process that watched it was killed", attempts=attempt.number
            )  # the kernel has killed the run with it
        return classified(left, attempt.folder / "stderr", attempt.number)

    def _found_again(self, row: Row) -> None:
        """What an earlier runner has left."""
        request, name, number = row.request, row.request.name, row.attempt
        self._attempts[name], self._faults[name] = number, row.faults
        if row.state == "ended":
            assert row.end is not None
            self._ended[name] = End(**row.end)
            return
        if row.state == "waiting":
            self._waiting[name] = request
            return
        folder = self._folder(name, number)
        claimed = _read(folder / guard.CLAIM)
        if claimed is None and guard.claim(str(folder), _NEVER_STARTED):
            claimed = _NEVER_STARTED
        claimed = claimed or _read(folder / guard.CLAIM) or _NEVER_STARTED
        if claimed.get("void"):  # the attempt never began, and now never will
            self._store.wait(name, row.faults)
            self._waiting[name] = request
            return
        pid = int(claimed["pid"])
        watch = _open(pid)
        if watch is not None and (guard.started(pid), guard.boot()) == (claimed["started"], claimed["boot"]):
            self._running[name] = _Attempt(request, number, folder, pid, watch, None)
            self.ledger.promise(request)
            return
        if watch is not None:
            os.close(watch)
        left = _read(folder / guard.END)
        gone = End("lost", reason="it was gone when the runner came back", attempts=number)
        found = gone if left is None else classified(left, folder / "stderr", number)
        if not self._again(request, found):
            self._finish(request, found)


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
