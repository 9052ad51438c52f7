"""What the service knows: runs, events with their reasons, uploads, tokens and the audit log.

Requests write what is asked (a new run, "cancel"); the dispatcher alone moves a run from state to state, and of several hosts the one that has the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memfit.service.database import Connection, opened
from memfit.service.states import LIVE, State

_LATE_SECONDS: Final = 120.0  # after its end, in which the files of a run are measured once more
_PARTS: Final = ("config", "plan", "refusal", "request")  # columns that hold JSON
_LARGEST: Final = 2**63 - 1  # number that a database has


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
        host: of several that share the store, the one that has it, or had it last; "" for none.
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
    host: str = ""

    @classmethod
    def of_row(cls, row: Any) -> StoredRun:
        """The run of a row of the table."""
        columns = dict(row)
        for name in _PARTS:
            columns[name] = None if columns[name] is None else json.loads(columns[name])
        columns["plan_only"] = bool(columns["plan_only"])
        return cls(**columns)


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
    """The store of one service.

    Args:
        folder: of the service; is made where it is missing.
        url: of a PostgreSQL database; None for a file in the folder.

    Raises:
        InputError: the store is damaged, of another version, or cannot be written.
    """

    def __init__(self, folder: Path, url: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.database = opened(folder, url)
        self.read, self.writing, self.version = self.database.read, self.database.writing, self.database.version
        self.backup, self.close = self.database.backup, self.database.close
        self.database.give_no_number_again({name: _largest(folder / name) for name in ("runs", "studies")})

    # ------------------------------------------------------------------------------------------------------------ runs

    def add(self, run: Mapping[str, Any]) -> StoredRun:
        """A run that was submitted; columns by name."""
        columns = {**_written(run), "submitted": time.time()}
        with self.writing() as connection:
            (number,) = connection.execute(
                f"INSERT INTO runs ({', '.join(columns)}) VALUES ({_marks(columns)}) RETURNING number",  # noqa: S608 - names of our own columns
                tuple(columns.values()),
            ).fetchone()
            add_event(connection, number, "planning", "submitted")
        return self.run(number)

    def change(
        self, number: int, kind: str, text: str, *, if_still: Mapping[str, Any] | None = None, **columns: Any
    ) -> bool:
        """Change a run, and write down why, both or neither.

        Args:
            number: of the run.
            kind, text: of the event.
            if_still: columns that must be so, by name; else nothing is changed.
            columns: that change, by name.

        Returns:
            Whether it was changed.
        """
        wanted, values = ["number=?"], [number]
        for name, value in (if_still or {}).items():
            wanted.append(f"{name} IS NULL" if value is None else f"{name}=?")
            values += [] if value is None else [value]
        told = ", ".join(f"{name}=?" for name in columns) or "number=number"
        with self.writing() as connection:
            query = f"UPDATE runs SET {told} WHERE {' AND '.join(wanted)}"  # noqa: S608 - as above
            if not connection.execute(query, (*_written(columns).values(), *values)).rowcount:
                return False
            add_event(connection, number, kind, text)
        return True

    def move(self, run: StoredRun, kind: str, text: str, **columns: Any) -> bool:
        """As `change`, for whoever has a run: nothing is changed where another has it by now."""
        still = {"state": run.state, "part": run.part, "host": run.host}
        return self.change(run.number, kind, text, if_still=still, **columns)

    def measured(self, number: int, peak_bytes: int) -> None:
        """A metered step of a run: no event."""
        with self.writing() as connection:
            connection.execute("UPDATE runs SET measured_peak_bytes=? WHERE number=?", (peak_bytes, number))

    def run(self, number: int) -> StoredRun:
        """One run.

        Raises:
            KeyError: there is none.
        """
        return StoredRun.of_row(self.row(number))

    def row(self, number: int) -> Any:
        """The row of one run.

        Raises:
            KeyError: there is none.
        """
        rows = self.read("SELECT * FROM runs WHERE number=?", (number,)) if number <= _LARGEST else []
        if not rows:
            raise KeyError(number)
        return rows[0]

    def by_key(self, owner: str, key: str) -> StoredRun | None:
        """The run that an owner has submitted under a key."""
        rows = self.read("SELECT * FROM runs WHERE owner=? AND key=?", (owner, key))
        return StoredRun.of_row(rows[0]) if rows else None

    def of_study(self, study: int) -> list[StoredRun]:
        """The trials of a study, in the order in which they came."""
        rows = self.read("SELECT * FROM runs WHERE study=? ORDER BY number", (study,))
        return [StoredRun.of_row(row) for row in rows]

    # ------------------------------------------------------------------------------------------------------------ files

    def to_measure(self, live: Sequence[str]) -> list[StoredRun]:
        """Runs that may have written since their files were last measured: those that are not over, that ended of late, or that were never measured."""
        marks = ", ".join("?" * len(live))
        query = f"SELECT * FROM runs WHERE removed IS NULL AND (state IN ({marks}) OR disk_bytes=0 OR ended>?) ORDER BY number"  # noqa: S608 - as above
        return [StoredRun.of_row(row) for row in self.read(query, (*live, time.time() - _LATE_SECONDS))]

    def has_on_disk(self, number: int, size: int) -> None:
        """What the files of a run take: no event."""
        with self.writing() as connection:
            connection.execute("UPDATE runs SET disk_bytes=? WHERE number=?", (size, number))

    def disk_by_owner(self) -> dict[str, int]:
        """What the files of all runs of each owner take."""
        rows = self.read("SELECT owner, SUM(disk_bytes) FROM runs GROUP BY owner")
        return {owner: int(size) for owner, size in rows}

    def with_files(self, over: Sequence[str], ended_before: float = 1e18) -> list[StoredRun]:
        """Runs that are over and have files, the oldest first; but trials of a study that goes on."""
        marks = ", ".join("?" * len(over))
        query = (
            f"SELECT * FROM runs WHERE removed IS NULL AND state IN ({marks}) AND ended<? "  # noqa: S608 - as above
            "AND (study IS NULL OR study NOT IN (SELECT number FROM studies WHERE state='running')) ORDER BY ended"
        )
        return [StoredRun.of_row(row) for row in self.read(query, (*over, ended_before))]

    def half_removed(self) -> list[StoredRun]:
        """Runs whose files were to be removed, and were not all."""
        return [
            StoredRun.of_row(row)
            for row in self.read("SELECT * FROM runs WHERE removed IS NOT NULL AND disk_bytes>0 ORDER BY number")
        ]

    def unused_uploads(self, made_before: float) -> list[tuple[str, str]]:
        """Digest and owner of uploaded code that neither a run with files nor a study that goes on needs."""
        query = (
            "SELECT digest, owner FROM uploads WHERE made<? "
            "AND digest NOT IN (SELECT code FROM runs WHERE code IS NOT NULL AND removed IS NULL) "
            "AND digest NOT IN (SELECT code FROM studies WHERE code IS NOT NULL AND state='running') ORDER BY digest, owner"
        )
        return [tuple(row) for row in self.read(query, (made_before,))]

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
        rows = self.read(f"SELECT * FROM runs WHERE state IN ({marks}) ORDER BY number", LIVE)  # noqa: S608 - as above
        return [StoredRun.of_row(row) for row in rows]

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
        return [StoredRun.of_row(row) for row in self.newest("runs", owner, states, before, limit)]

    def newest(self, table: str, owner: str | None, states: Sequence[str], before: int | None, limit: int) -> list[Any]:
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
        return self.read(query, (*values, limit))

    def ended_since(self, moment: float) -> list[StoredRun]:
        """Runs that have run and ended after a moment."""
        rows = self.read("SELECT * FROM runs WHERE ended>? AND started IS NOT NULL ORDER BY ended", (moment,))
        return [StoredRun.of_row(row) for row in rows]

    def numbers_by_state(self) -> dict[str, int]:
        """How many runs there are in each state."""
        return dict(map(tuple, self.read("SELECT state, COUNT(*) FROM runs GROUP BY state")))

    def last_event(self) -> int:
        """How many events there have been."""
        ((found,),) = self.read("SELECT COALESCE(MAX(number), 0) FROM events")
        return int(found)

    def events(self, number: int, after: int = 0) -> list[Event]:
        """What happened to a run, from the beginning or after an event."""
        return [Event(*row) for row in self.event_rows(number, after)]

    def event_rows(self, number: int, after: int = 0) -> list[Any]:
        """The same, as rows with the columns of an event."""
        query = "SELECT number, run, time, kind, text FROM events WHERE run=? AND number>? ORDER BY number"
        return self.read(query, (number, after))


def add_event(connection: Connection, number: int, kind: str, text: str) -> None:
    """Write down what has happened to a run, with what else is written."""
    connection.execute(
        "INSERT INTO events (run, time, kind, text) VALUES (?, ?, ?, ?)", (number, time.time(), kind, storable(text))
    )


def storable(text: str) -> str:
    """A text as every database takes it: what a run has printed or a client has sent may hold what is no character."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _written(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: json.dumps(value) if name in _PARTS else storable(value) if isinstance(value, str) else value
        for name, value in columns.items()
    }


def _marks(columns: Sequence[Any] | Mapping[str, Any]) -> str:
    return ", ".join("?" * len(columns))


def _largest(folder: Path) -> int:
    """Number of the last run, or study, that has a folder."""
    return max((int(each.name) for each in folder.glob("[0-9]*") if each.name.isdecimal()), default=0)
