"""What a runner knows of its runs, in SQLite: it survives the runner's death, and what is in it is whole after any crash (write-ahead log)."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memfit.errors import InputError
from memfit.runner.file_lock import locked
from memfit.runner.request import RunRequest

FORMAT: Final = 1  # of the file
NAME: Final = "runs.sqlite"
_LOCK: Final = "runner.lock"
_LOCK_SECONDS: Final = (
    2.0  # a runner that was killed in the middle of starting a process leaves the lock to that process for a moment
)
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    request TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'running', 'ended')),
    attempt INTEGER NOT NULL,
    faults INTEGER NOT NULL DEFAULT 0,
    end TEXT
)
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One run, as it is stored.

    Attributes:
        request: of it.
        state: "waiting", "running" (an attempt was begun) or "ended".
        attempt: number of the last attempt, from 1 on; 0 before the first.
        faults: attempts that were killed or lost.
        end: as JSON; None before the end.
    """

    request: RunRequest
    state: str
    attempt: int
    faults: int
    end: dict[str, Any] | None


class RunStore:
    """The runs of one folder; one process at a time has it open.

    Args:
        folder: is made where it is missing.

    Raises:
        InputError: another runner has the folder, it cannot be written, or its file is damaged or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(
                f"cannot write {folder}: {error.strerror or error}; name another folder, or free space"
            ) from error
        if not locked(self._lock, _LOCK_SECONDS):
            os.close(self._lock)
            raise InputError(
                f"another process runs what is in {folder}: wait for it, or give this one a folder of its own"
            )
        try:
            self._connection = self._opened(folder / NAME)
        except BaseException:
            os.close(self._lock)
            raise

    def _opened(self, file: Path) -> sqlite3.Connection:
        # A runner may be made in one thread and used in another, by one at a time.
        connection = sqlite3.connect(file, isolation_level=None, timeout=30, check_same_thread=False)
        try:
            (whole,) = connection.execute("PRAGMA integrity_check").fetchone()
            if whole != "ok":
                raise sqlite3.DatabaseError(whole.splitlines()[0])
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found not in (0, FORMAT):
                raise InputError(
                    f"{file} is of version {found} and this memfit reads {FORMAT}: use the memfit that wrote it, or another folder"
                )
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA user_version={FORMAT}")
        except sqlite3.OperationalError as error:
            connection.close()
            raise InputError(
                f"cannot write {file}: {error}; what it held before is intact: free space, then start again"
            ) from error
        except sqlite3.DatabaseError as error:
            connection.close()
            raise InputError(
                f"{file} is damaged ({error}): put a copy back, or move it away to begin anew; it was left as it is"
            ) from error
        except InputError:
            connection.close()
            raise
        return connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._connection
        except sqlite3.OperationalError as error:
            raise InputError(
                f"cannot write {self.folder / NAME}: {error}; what it held before is intact: free space, then start again"
            ) from error

    def add(self, request: RunRequest) -> None:
        """A run that waits."""
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO runs (name, request, state, attempt) VALUES (?, ?, 'waiting', 0)",
                (request.name, json.dumps(request.to_json())),
            )

    def begin(self, name: str, attempt: int) -> None:
        """An attempt is about to start: written before it does."""
        with self._writing() as connection:
            connection.execute("UPDATE runs SET state='running', attempt=? WHERE name=?", (attempt, name))

    def wait(self, name: str, faults: int) -> None:
        """It waits again; so many of its attempts were killed or lost."""
        with self._writing() as connection:
            connection.execute("UPDATE runs SET state='waiting', faults=? WHERE name=?", (faults, name))

    def end(self, name: str, end: dict[str, Any]) -> None:
        """How it ended."""
        with self._writing() as connection:
            connection.execute("UPDATE runs SET state='ended', end=? WHERE name=?", (json.dumps(end), name))

    def forget(self, name: str) -> None:
        """It is known no more."""
        with self._writing() as connection:
            connection.execute("DELETE FROM runs WHERE name=?", (name,))

    def rows(self) -> list[Row]:
        """All runs, in the order in which they were added."""
        found = self._connection.execute("SELECT request, state, attempt, faults, end FROM runs ORDER BY number")
        return [
            Row(
                RunRequest.from_json(json.loads(request)),
                state,
                attempt,
                faults,
                None if end is None else json.loads(end),
            )
            for request, state, attempt, faults, end in found
        ]

    def close(self) -> None:
        """Another process may open the folder."""
        self._connection.close()
        os.close(self._lock)
