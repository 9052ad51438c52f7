"""What the service knows: runs, events with their reasons, uploads, tokens and the audit log, in one SQLite file that is whole after any crash.

Each thread has a connection of its own. Requests write what is asked (a new run, "cancel"); the dispatcher alone moves a run from state to state.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memfit.errors import InputError
from memfit.service.states import LIVE, State

FORMAT: Final = 2  # of the file
NAME: Final = "service.sqlite"
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    key TEXT,
    digest TEXT NOT NULL,
    config TEXT NOT NULL,
    code TEXT,
    plan_only INTEGER NOT NULL DEFAULT 0,
    priority INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'planning',
    asked TEXT NOT NULL DEFAULT '',
    part INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '',
    plan TEXT,
    refusal TEXT,
    request TEXT,
    measured_peak_bytes INTEGER,
    submitted REAL NOT NULL,
    started REAL,
    ended REAL,
    run_seconds REAL NOT NULL DEFAULT 0,
    study INTEGER,
    disk_bytes INTEGER NOT NULL DEFAULT 0,
    removed REAL,
    UNIQUE (owner, key)
);
CREATE INDEX IF NOT EXISTS runs_by_state ON runs (state);
CREATE INDEX IF NOT EXISTS runs_by_owner ON runs (owner, number);
CREATE INDEX IF NOT EXISTS runs_by_owner_and_state ON runs (owner, state, number);
CREATE INDEX IF NOT EXISTS runs_by_end ON runs (ended);
CREATE INDEX IF NOT EXISTS runs_by_study ON runs (study);
CREATE TABLE IF NOT EXISTS studies (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    key TEXT,
    digest TEXT NOT NULL,
    config TEXT NOT NULL,
    code TEXT,
    priority INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'running',
    asked TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL DEFAULT '',
    summary TEXT,
    submitted REAL NOT NULL,
    ended REAL,
    UNIQUE (owner, key)
);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_by_run ON events (run);
CREATE TABLE IF NOT EXISTS uploads (
    digest TEXT NOT NULL, owner TEXT NOT NULL, bytes INTEGER NOT NULL, files INTEGER NOT NULL, made REAL NOT NULL, PRIMARY KEY (owner, digest)
);
CREATE TABLE IF NOT EXISTS tokens (
    digest TEXT PRIMARY KEY, owner TEXT NOT NULL, role TEXT NOT NULL, made REAL NOT NULL, expires REAL
);
CREATE TABLE IF NOT EXISTS audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, owner TEXT NOT NULL, address TEXT NOT NULL, method TEXT NOT NULL,
    path TEXT NOT NULL, status INTEGER NOT NULL
);
"""
# What a file of an earlier version lacks, by that version.
_UPGRADES: Final = {
    1: (
        "ALTER TABLE runs ADD COLUMN study INTEGER",
        "ALTER TABLE runs ADD COLUMN disk_bytes INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE runs ADD COLUMN removed REAL",
    )
}
_LATE_SECONDS: Final = 120.0  # after its end, in which the files of a run are measured once more
_PARTS: Final = ("config", "plan", "refusal", "request")  # columns that hold JSON


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run, as it is stored. Times are seconds since 1970.

    Attributes:
        number: by which it is known.
        owner: name of who submitted it.
        name: as its owner calls it.
        digest: of what was submitted, to tell whether a second submission under the same key is the same.
        config: of `memfit train`, as submitted.
        code: digest of the uploaded code; None without.
        plan_only: whether it is to be planned and not run.
        priority: higher goes first.
        state: see `memfit.service.states`.
        asked: what its owner has asked that has not happened yet: "cancel", "pause" or "".
        part: how often it was handed to the runner: one more with each resumption.
        reason: of the state, in a sentence.
        plan: what was predicted, as `memfit.service.planned.Planned`; None before.
        refusal: as `memfit plan --json` answers what does not fit; None otherwise.
        request: of the runner, of its last part; None before the first.
        measured_peak_bytes: largest metered step so far; None where none was metered.
        submitted, started, ended: None for what has not happened.
        run_seconds: that its parts have run, those that are over.
        key: that its owner gave, so that a submission that is sent twice is one run; None for none.
        study: number of the study whose trial it is; None for a run of its own.
        disk_bytes: that its files take, as last measured.
        removed: when its files were removed; None while they are there.
    """

    number: int
    owner: str
    name: str
    key: str | None
    digest: str
    config: Mapping[str, Any]
    code: str | None
    plan_only: bool
    priority: int
    state: State
    asked: str
    part: int
    reason: str
    plan: Mapping[str, Any] | None
    refusal: Mapping[str, Any] | None
    request: Mapping[str, Any] | None
    measured_peak_bytes: int | None
    submitted: float
    started: float | None
    ended: float | None
    run_seconds: float
    study: int | None = None
    disk_bytes: int = 0
    removed: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a run, with its reason.

    Attributes:
        number: in the order in which they happened.
        run: number of the run.
        time: seconds since 1970.
        kind: the state that began, or what was asked.
        text: why, in a sentence.
    """

    number: int
    run: int
    time: float
    kind: str
    text: str


class ServiceStore:
    """The file of one service.

    Args:
        folder: is made where it is missing.

    Raises:
        InputError: the file is damaged, of another version, or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.file = folder / NAME
        self._here = threading.local()
        self._writing = threading.Lock()
        self._opened: list[sqlite3.Connection] = []
        self._prepare()

    def _prepare(self) -> None:
        try:
            connection = self.connection
            (whole,) = connection.execute("PRAGMA quick_check").fetchone()
            if whole != "ok":
                raise sqlite3.DatabaseError(whole.splitlines()[0])
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found not in (0, FORMAT, *_UPGRADES):
                raise InputError(
                    f"{self.file} is of version {found} and this memfit reads {FORMAT}: use the memfit that wrote it, or another folder"
                )
            for each in sorted(_UPGRADES):
                if found and found <= each:
                    self._upgrade(connection, each)
            connection.executescript(_TABLES)
            connection.execute(f"PRAGMA user_version={FORMAT}")
        except sqlite3.OperationalError as error:
            self.close()
            raise InputError(
                f"cannot write {self.file}: {error}; what it held before is intact: free space, then start again"
            ) from error
        except sqlite3.DatabaseError as error:
            self.close()
            raise InputError(
                f"{self.file} is damaged ({error}): put a copy back, or move it away to begin anew; it was left as it is"
            ) from error
        except InputError:
            self.close()
            raise

    @staticmethod
    def _upgrade(connection: sqlite3.Connection, version: int) -> None:
        """From one version to the next, all of it or nothing."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in _UPGRADES[version]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={version + 1}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    @property
    def connection(self) -> sqlite3.Connection:
        """The one of this thread."""
        found: sqlite3.Connection | None = getattr(self._here, "connection", None)
        if found is None:
            # The last thread to go closes all of them.
            found = sqlite3.connect(self.file, isolation_level=None, timeout=30, check_same_thread=False)
            found.row_factory = sqlite3.Row
            found.execute("PRAGMA journal_mode=WAL")
            found.execute("PRAGMA synchronous=FULL")
            self._here.connection = found
            self._opened.append(found)
        return found

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """All of what is written inside, or nothing of it.

        Raises:
            InputError: it cannot be written, as on a full disk; what was there before is intact.
        """
        connection = self.connection
        with self._writing:  # one writer at a time in this process, without waiting on SQLite's own lock
            try:
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                except BaseException:
                    connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise InputError(
                    f"cannot write {self.file}: {error}; what it held before is intact: free space, then start again"
                ) from error

    def backup(self, file: Path) -> None:
        """Write a copy that is whole, while the service goes on."""
        with sqlite3.connect(file) as copy:
            self.connection.backup(copy)
        copy.close()

    def close(self) -> None:
        """Close the connections of all threads."""
        for connection in self._opened:
            connection.close()
        self._opened.clear()
        self._here = threading.local()

    # ------------------------------------------------------------------------------------------------------------ runs

    def add(self, run: Mapping[str, Any]) -> StoredRun:
        """A run that was submitted; columns by name."""
        columns = {name: json.dumps(value) if name in _PARTS else value for name, value in run.items()}
        now = time.time()
        with self.writing() as connection:
            marks = ", ".join("?" * len(columns))
            done = connection.execute(
                f"INSERT INTO runs ({', '.join(columns)}, submitted) VALUES ({marks}, ?)",  # noqa: S608 - names of our own columns
                (*columns.values(), now),
            )
            assert done.lastrowid is not None
            self._event(connection, done.lastrowid, "planning", "submitted")
        return self.run(done.lastrowid)

    def change(self, number: int, kind: str, text: str, **columns: Any) -> None:
        """Change a run, and write down why, both or neither.

        Args:
            number: of the run.
            kind, text: of the event.
            columns: that change, by name.
        """
        values = [json.dumps(value) if name in _PARTS else value for name, value in columns.items()]
        with self.writing() as connection:
            if columns:
                told = ", ".join(f"{name}=?" for name in columns)
                connection.execute(f"UPDATE runs SET {told} WHERE number=?", (*values, number))  # noqa: S608 - as above
            self._event(connection, number, kind, text)

    def measured(self, number: int, peak_bytes: int) -> None:
        """A metered step of a run: no event."""
        with self.writing() as connection:
            connection.execute("UPDATE runs SET measured_peak_bytes=? WHERE number=?", (peak_bytes, number))

    @staticmethod
    def _event(connection: sqlite3.Connection, number: int, kind: str, text: str) -> None:
        connection.execute(
            "INSERT INTO events (run, time, kind, text) VALUES (?, ?, ?, ?)", (number, time.time(), kind, text)
        )

    def run(self, number: int) -> StoredRun:
        """One run.

        Raises:
            KeyError: there is none.
        """
        row = self.connection.execute("SELECT * FROM runs WHERE number=?", (number,)).fetchone()
        if row is None:
            raise KeyError(number)
        return _run(row)

    def by_key(self, owner: str, key: str) -> StoredRun | None:
        """The run that an owner has submitted under a key."""
        row = self.connection.execute("SELECT * FROM runs WHERE owner=? AND key=?", (owner, key)).fetchone()
        return None if row is None else _run(row)

    def of_study(self, study: int) -> list[StoredRun]:
        """The trials of a study, in the order in which they came."""
        rows = self.connection.execute("SELECT * FROM runs WHERE study=? ORDER BY number", (study,))
        return [_run(row) for row in rows]

    # ------------------------------------------------------------------------------------------------------------ files

    def to_measure(self, live: Sequence[str]) -> list[StoredRun]:
        """Runs that may have written since their files were last measured: those that are not over, that ended of late, or that were never measured."""
        marks = ", ".join("?" * len(live))
        query = f"SELECT * FROM runs WHERE removed IS NULL AND (state IN ({marks}) OR disk_bytes=0 OR ended>?)"  # noqa: S608 - as above
        return [_run(row) for row in self.connection.execute(query, (*live, time.time() - _LATE_SECONDS))]

    def has_on_disk(self, number: int, size: int) -> None:
        """What the files of a run take: no event."""
        with self.writing() as connection:
            connection.execute("UPDATE runs SET disk_bytes=? WHERE number=?", (size, number))

    def disk_by_owner(self) -> dict[str, int]:
        """What the files of all runs of each owner take."""
        return dict(self.connection.execute("SELECT owner, SUM(disk_bytes) FROM runs GROUP BY owner").fetchall())

    def with_files(self, over: Sequence[str], ended_before: float = 1e18) -> list[StoredRun]:
        """Runs that are over and have files, the oldest first; but trials of a study that goes on."""
        marks = ", ".join("?" * len(over))
        query = (
            f"SELECT * FROM runs WHERE removed IS NULL AND state IN ({marks}) AND ended<? "  # noqa: S608 - as above
            "AND (study IS NULL OR study NOT IN (SELECT number FROM studies WHERE state='running')) ORDER BY ended"
        )
        return [_run(row) for row in self.connection.execute(query, (*over, ended_before))]

    def half_removed(self) -> list[StoredRun]:
        """Runs whose files were to be removed, and were not all."""
        return [
            _run(row)
            for row in self.connection.execute("SELECT * FROM runs WHERE removed IS NOT NULL AND disk_bytes>0")
        ]

    def unused_uploads(self, made_before: float) -> list[tuple[str, str]]:
        """Digest and owner of uploaded code that neither a run with files nor a study that goes on needs."""
        query = (
            "SELECT digest, owner FROM uploads WHERE made<? "
            "AND digest NOT IN (SELECT code FROM runs WHERE code IS NOT NULL AND removed IS NULL) "
            "AND digest NOT IN (SELECT code FROM studies WHERE code IS NOT NULL AND state='running')"
        )
        return [tuple(row) for row in self.connection.execute(query, (made_before,))]

    def forget_upload(self, digest: str, owner: str) -> bool:
        """An owner has not sent this code any more; whether nobody has."""
        with self.writing() as connection:
            connection.execute("DELETE FROM uploads WHERE digest=? AND owner=?", (digest, owner))
            (left,) = connection.execute("SELECT COUNT(*) FROM uploads WHERE digest=?", (digest,)).fetchone()
        return not left

    def forget_audit(self, before: float) -> int:
        """Rows of the audit log from before a moment go; how many they were."""
        with self.writing() as connection:
            return connection.execute("DELETE FROM audit WHERE time<?", (before,)).rowcount

    # ------------------------------------------------------------------------------------------------------------ lists

    def live(self) -> list[StoredRun]:
        """Runs that are not over, in the order in which they came."""
        marks = ", ".join("?" * len(LIVE))
        rows = self.connection.execute(f"SELECT * FROM runs WHERE state IN ({marks}) ORDER BY number", LIVE)  # noqa: S608 - as above
        return [_run(row) for row in rows]

    def listed(
        self, *, owner: str | None, states: Sequence[str] = (), before: int | None = None, limit: int = 100
    ) -> list[StoredRun]:
        """Runs, the newest first.

        Args:
            owner: whose; None for everybody's.
            states: only those; empty for all.
            before: only those with a smaller number.
            limit: so many at most.
        """
        return [_run(row) for row in self.newest("runs", owner, states, before, limit)]

    def newest(
        self, table: str, owner: str | None, states: Sequence[str], before: int | None, limit: int
    ) -> sqlite3.Cursor:
        """Rows of one of its tables that have owner, state and number, as `listed` says."""
        wanted: list[str] = []
        values: list[Any] = []
        if owner is not None:
            wanted.append("owner=?")
            values.append(owner)
        if states:
            wanted.append(f"state IN ({', '.join('?' * len(states))})")
            values += states
        if before is not None:
            wanted.append("number<?")
            values.append(before)
        where = f"WHERE {' AND '.join(wanted)} " if wanted else ""
        query = f"SELECT * FROM {table} {where}ORDER BY number DESC LIMIT ?"  # noqa: S608 - as above
        return self.connection.execute(query, (*values, limit))

    def ended_since(self, moment: float) -> list[StoredRun]:
        """Runs that have run and ended after a moment."""
        rows = self.connection.execute(
            "SELECT * FROM runs WHERE ended>? AND started IS NOT NULL ORDER BY ended", (moment,)
        )
        return [_run(row) for row in rows]

    def numbers_by_state(self) -> dict[str, int]:
        """How many runs there are in each state."""
        return dict(self.connection.execute("SELECT state, COUNT(*) FROM runs GROUP BY state").fetchall())

    def last_event(self) -> int:
        """How many events there have been."""
        (found,) = self.connection.execute("SELECT COALESCE(MAX(number), 0) FROM events").fetchone()
        return int(found)

    def events(self, number: int, after: int = 0) -> list[Event]:
        """What happened to a run, from the beginning or after an event."""
        rows = self.connection.execute(
            "SELECT number, run, time, kind, text FROM events WHERE run=? AND number>? ORDER BY number", (number, after)
        )
        return [Event(*row) for row in rows]


def _run(row: sqlite3.Row) -> StoredRun:
    columns = dict(row)
    for name in _PARTS:
        columns[name] = None if columns[name] is None else json.loads(columns[name])
    columns["plan_only"] = bool(columns["plan_only"])
    return StoredRun(**columns)
