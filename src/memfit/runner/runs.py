"""What every runner keeps of its runs, wherever they run: which wait, how often each was begun, and how each ended; all of it in the store first."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from memfit.errors import InputError
from memfit.runner import guard
from memfit.runner.ends import End
from memfit.runner.ledger import Ledger
from memfit.runner.request import RunRequest
from memfit.runner.store import Row, RunStore

_AGAIN: Final = ("killed", "lost")  # ends after which a run is started again; others would only happen again
_WITH_RUNNER: Final = ("runner died", "runner closed")  # why a run was stopped that had no part in it


class Runs(ABC):
    """Runs by their names.

    Args:
        folder: for what is known of them, and their output; one runner at a time.
        ledger: the bytes that there are, and who has them.

    Raises:
        InputError: as for `RunStore`.
    """

    def __init__(self, folder: str | Path, ledger: Ledger) -> None:
        self.folder = Path(folder).resolve()
        self.ledger = ledger
        self._store = RunStore(self.folder)
        self._waiting: dict[str, RunRequest] = {}
        self._attempts: dict[str, int] = {}
        self._faults: dict[str, int] = {}
        self._ended: dict[str, End] = {}
        self._news: list[tuple[str, End]] = []

    # ------------------------------------------------------------------------------------------------------- questions

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of runs that have not started, in order."""
        return tuple(self._waiting)

    @property
    @abstractmethod
    def running(self) -> tuple[str, ...]:
        """Names of runs that run."""

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

    def forget(self, name: str) -> None:
        """A run that has ended is known no more; one that has not stays.

        Raises:
            InputError: the store cannot be written.
        """
        if name in self._ended:
            self._store.forget(name)
            del self._ended[name], self._attempts[name]
            self._faults.pop(name, None)

    def stop(self, name: str, *, at_once: bool = False) -> None:
        """Have a run end: by its end signal, and SIGKILL after the grace; or by SIGKILL now. One that waits never starts."""
        if name in self._waiting:
            self._finish(self._waiting.pop(name), End("stopped", reason="asked", attempts=self._attempts[name]))
        else:
            self._stop_begun(name, at_once=at_once)

    @abstractmethod
    def _stop_begun(self, name: str, *, at_once: bool) -> None:
        """`stop`, of a run that does not wait; nothing where it has ended."""

    @abstractmethod
    def poll(self, seconds: float = 0.0) -> list[tuple[str, End]]:
        """Start what fits, and wait for an end.

        Args:
            seconds: to wait at most, where nothing has ended.

        Returns:
            The runs that ended since the last call, each with how.

        Raises:
            InputError: the store cannot be written. What has happened is on disk; the next call tries again.
        """

    @abstractmethod
    def close(self) -> None:
        """End what runs, at once, and let go of the folder; the next runner of the folder begins it again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _folder(self, name: str, attempt: int) -> Path:
        return self.folder / "runs" / name / str(attempt)

    def _begun(
        self, request: RunRequest, devices: tuple[str, ...], told: Mapping[str, Any] | None = None
    ) -> tuple[int, Path, dict[str, Any]]:
        """A new attempt, written down before anything starts: its number, its folder, and what its guard is told.

        Args:
            request: of the run.
            devices: of this computer, one for each rank.
            told: what else is written down.
        """
        number = self._attempts[request.name] + 1
        folder = self._folder(request.name, number)
        again = bool(request.resume_command) and Path(request.resume_if).exists()
        spec = {
            **request.to_json(),
            "command": list(request.resume_command if again else request.command),
            "environment": {**_visible(devices), **request.environment},
            "devices": list(devices),
            "runner": os.getpid(),
            **(told or {}),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / guard.SPEC).write_text(json.dumps(spec), encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write {folder}: {error.strerror or error}; free space, then start again"
            ) from error
        self._store.begin(request.name, number)
        self._waiting.pop(request.name, None)
        self._attempts[request.name] = number
        return number, folder, spec

    def _again(self, request: RunRequest, end: End, *, earlier: bool = False) -> bool:
        """Whether the run is to be started again, and now waits for it.

        Args:
            request: of the run.
            end: of its last attempt.
            earlier: whether that ended under an earlier runner. Since then somebody has started this one, and may be taken to have freed a full disk.

        Raises:
            InputError: it failed for want of space, which is still not there; nothing has changed, and the next call tries again.
        """
        for_space = end.disk_full and end.kind in {"failed", "lost"}
        if for_space and not earlier:
            if guard.is_full(str(self.folder)):
                raise InputError(
                    f"the disk of {self.folder} is full, and {request.name} has ended for it: free space, then start again"
                )
            if guard.is_full(str(self._folder(request.name, end.attempts))):
                return False  # a disk of its own, on which nothing can be begun
        no_fault = (end.kind == "stopped" and end.reason in _WITH_RUNNER) or (for_space and earlier)
        faults = self._faults.get(request.name, 0) + (0 if no_fault else 1)
        if not no_fault and (not (for_space or end.kind in _AGAIN) or faults > request.restarts):
            return False
        self._wait(request, faults)
        return True

    def _wait(self, request: RunRequest, faults: int) -> None:
        """It waits again, after so many attempts that were killed or lost."""
        self._store.wait(request.name, faults)
        self._faults[request.name] = faults
        self._waiting[request.name] = request
        self.ledger.give_back(request.name)

    def _finish(self, request: RunRequest, end: End) -> None:
        self._store.end(request.name, end.to_json())
        self._ended[request.name] = end
        self._news.append((request.name, end))
        self.ledger.give_back(request.name)

    def _is_recalled(self, row: Row) -> bool:
        """Take over what an earlier runner has left; False where an attempt was running, which is for the caller to find."""
        name = row.request.name
        self._attempts[name], self._faults[name] = row.attempt, row.faults
        if row.state == "ended":
            assert row.end is not None
            self._ended[name] = End.from_json(row.end)
        elif row.state == "waiting":
            self._waiting[name] = row.request
        return row.state in {"ended", "waiting"}

    def _told(self) -> list[tuple[str, End]]:
        news, self._news = self._news, []
        return news


def _visible(devices: tuple[str, ...]) -> dict[str, str]:
    """The variable by which a process sees the GPUs of its ranks alone, rank 0's first; none for other devices."""
    numbers = [name.partition(":")[2] for name in devices if name.startswith("cuda:")]
    if not numbers:
        return {}
    ours = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    named = [
        ours[int(number)] if number.isdecimal() and int(number) < len(ours) else number for number in numbers
    ]  # of those that this process may see
    return {"CUDA_VISIBLE_DEVICES": ",".join(named)}


def read_json(file: Path) -> dict[str, Any] | None:
    """What a file holds; None where it is not there, or not whole."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
