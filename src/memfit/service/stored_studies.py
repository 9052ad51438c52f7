"""Studies in the store of a service: what is searched, for whom, and how far it has come. Their trials are runs like any other."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from memfit.service.store import ServiceStore, storable

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
        host: of several that share the store, the one that goes on with it; "" for none.
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
    host: str = ""


class StudyStore:
    """The studies of one service.

    Args:
        store: of it.
    """

    def __init__(self, store: ServiceStore) -> None:
        self._store = store

    def add(self, study: Mapping[str, Any]) -> StoredStudy:
        """A study that was submitted; columns by name."""
        columns = {**{name: _written(value) for name, value in study.items()}, "submitted": time.time()}
        with self._store.writing() as connection:
            marks = ", ".join("?" * len(columns))
            (number,) = connection.execute(
                f"INSERT INTO studies ({', '.join(columns)}) VALUES ({marks}) RETURNING number",  # noqa: S608 - names of our own columns
                tuple(columns.values()),
            ).fetchone()
        return self.study(number)

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
        rows = self._store.read("SELECT * FROM studies WHERE number=?", (number,)) if number < 2**63 else []
        if not rows:
            raise KeyError(number)
        return _study(rows[0])

    def by_key(self, owner: str, key: str) -> StoredStudy | None:
        """The study that an owner has submitted under a key."""
        rows = self._store.read("SELECT * FROM studies WHERE owner=? AND key=?", (owner, key))
        return _study(rows[0]) if rows else None

    def numbers_by_state(self) -> dict[str, int]:
        """How many studies there are in each state."""
        return dict(map(tuple, self._store.read("SELECT state, COUNT(*) FROM studies GROUP BY state")))

    def listed(
        self, *, owner: str | None, states: Sequence[str] = (), before: int | None = None, limit: int = 100
    ) -> list[StoredStudy]:
        """Studies, the newest first; arguments as of `ServiceStore.listed`."""
        return [_study(row) for row in self._store.newest("studies", owner, states, before, limit)]


def _written(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, Mapping) else storable(value) if isinstance(value, str) else value


def _study(row: Any) -> StoredStudy:
    columns = dict(row)
    for name in ("config", "summary"):
        columns[name] = None if columns[name] is None else json.loads(columns[name])
    return StoredStudy(**columns)
