"""Studies in the store of a service: what is searched, for whom, and how far it has come. Their trials are runs like any other."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from memfit.service.store import ServiceStore

StudyState = Literal["running", "done", "failed", "refused", "cancelled"]
STUDY_LIVE: Final = ("running",)
STUDY_OVER: Final = ("done", "failed", "refused", "cancelled")


@dataclass(frozen=True, slots=True)
class StoredStudy:
    """One study, as it is stored. Times are seconds since 1970.

    Attributes:
        number: by which it is known.
        owner: name of who submitted it.
        name: as its owner calls it.
        key: that its owner gave, so that a submission that is sent twice is one study; None for none.
        digest: of what was submitted.
        config: of `memfit tune`, as submitted.
        code: digest of the uploaded code; None without.
        priority: of its trials.
        state: "running", "done", "failed", "refused" (no trial can fit) or "cancelled".
        asked: "cancel" where its owner has asked for it and it has not happened yet; or "".
        reason: of the state, in a sentence.
        summary: trials by their states, and the best of them; None before the first.
        submitted, ended: None for what has not happened.
    """

    number: int
    owner: str
    name: str
    key: str | None
    digest: str
    config: Mapping[str, Any]
    code: str | None
    priority: int
    state: StudyState
    asked: str
    reason: str
    summary: Mapping[str, Any] | None
    submitted: float
    ended: float | None


class StudyStore:
    """The studies of one service.

    Args:
        store: of it.
    """

    def __init__(self, store: ServiceStore) -> None:
        self._store = store

    def add(self, study: Mapping[str, Any]) -> StoredStudy:
        """A study that was submitted; columns by name."""
        columns = {name: _written(value) for name, value in study.items()}
        with self._store.writing() as connection:
            marks = ", ".join("?" * len(columns))
            done = connection.execute(
                f"INSERT INTO studies ({', '.join(columns)}, submitted) VALUES ({marks}, ?)",  # noqa: S608 - names of our own columns
                (*columns.values(), time.time()),
            )
            assert done.lastrowid is not None
        return self.study(done.lastrowid)

    def change(self, number: int, **columns: Any) -> None:
        """Change a study; columns by name."""
        told = ", ".join(f"{name}=?" for name in columns)
        with self._store.writing() as connection:
            values = [_written(value) for value in columns.values()]
            connection.execute(f"UPDATE studies SET {told} WHERE number=?", (*values, number))  # noqa: S608 - as above

    def study(self, number: int) -> StoredStudy:
        """One study.

        Raises:
            KeyError: there is none.
        """
        row = self._store.connection.execute("SELECT * FROM studies WHERE number=?", (number,)).fetchone()
        if row is None:
            raise KeyError(number)
        return _study(row)

    def by_key(self, owner: str, key: str) -> StoredStudy | None:
        """The study that an owner has submitted under a key."""
        row = self._store.connection.execute("SELECT * FROM studies WHERE owner=? AND key=?", (owner, key)).fetchone()
        return None if row is None else _study(row)

    def numbers_by_state(self) -> dict[str, int]:
        """How many studies there are in each state."""
        return dict(self._store.connection.execute("SELECT state, COUNT(*) FROM studies GROUP BY state").fetchall())

    def listed(
        self, *, owner: str | None, states: Sequence[str] = (), before: int | None = None, limit: int = 100
    ) -> list[StoredStudy]:
        """Studies, the newest first; arguments as of `ServiceStore.listed`."""
        return [_study(row) for row in self._store.newest("studies", owner, states, before, limit)]


def _written(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, Mapping) else value


def _study(row: sqlite3.Row) -> StoredStudy:
    columns = dict(row)
    for name in ("config", "summary"):
        columns[name] = None if columns[name] is None else json.loads(columns[name])
    return StoredStudy(**columns)
