"""With ten thousand runs in the store, what is asked of it takes no more work than with a few hundred; counted in steps of SQLite's machine, not in seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.service.database import SqliteDatabase
from memfit.service.dispatcher import Dispatcher
from memfit.service.settings import ServiceSettings
from memfit.service.states import LIVE
from memfit.service.store import ServiceStore, StoredRun

BYTES = {"budget_bytes": 10, "peak_bytes": 10, "plain_peak_bytes": 10}
PLAN = json.dumps({"rank_bytes": [10], **BYTES})
OLD = time.time() - 7 * 86400
QUESTIONS: dict[str, Callable[[ServiceStore], Any]] = {
    "a run": lambda store: store.run(77),
    "its events": lambda store: store.events(77),
    "by its key": lambda store: store.by_key("anna", "77"),
    "the newest": lambda store: store.listed(owner=None),
    "an owner's newest": lambda store: store.listed(owner="anna"),
    "the newest of one state": lambda store: store.listed(owner=None, states=("done",)),
    "the newest of several states": lambda store: store.listed(owner=None, states=("done", "failed", *LIVE)),
    "an owner's newest of one state": lambda store: store.listed(owner="anna", states=("done",)),
    "an owner's newest of several states": lambda store: store.listed(owner="anna", states=("done", "failed", *LIVE)),
    "a state that nobody is in": lambda store: store.listed(owner=None, states=("paused",)),
    "an owner's in a state that nobody is in": lambda store: store.listed(owner="anna", states=("paused",)),
    "those that are not over": lambda store: store.live(),
    "those that ended of late": lambda store: store.ended_since(time.time() - 1800),
}


def filled(folder: Path, runs: int) -> ServiceStore:
    """Runs that are over, of two owners, and a few that are not."""
    store = ServiceStore(folder)
    about = [
        (f"u{n % 50}" if n % 2 else "anna", str(n), "done" if n % 3 else "failed", OLD + n, OLD + n, OLD + n + 1)
        for n in range(runs)
    ]
    with store.writing() as connection:
        connection.executemany(
            "INSERT INTO runs (owner, key, state, submitted, started, ended, name, digest, config) VALUES (?, ?, ?, ?, ?, ?, '', '', '{}')",
            about,
        )
        connection.execute("UPDATE runs SET state='running', ended=NULL WHERE number > ?", (runs - 5,))
        connection.execute(
            "INSERT INTO events (run, time, kind, text) SELECT number, submitted, 'planning', '' FROM runs"
        )
    return store


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = [filled(tmp_path_factory.mktemp("store"), runs) for runs in (500, 10_000)]
    yield found
    for store in found:
        store.close()


def steps(store: ServiceStore, question: Callable[[ServiceStore], Any]) -> int:
    counted = [0]

    def one() -> int:
        counted[0] += 1
        return 0

    assert isinstance(store.database, SqliteDatabase)
    store.database.connection.set_progress_handler(one, 1)
    question(store)
    store.database.connection.set_progress_handler(None, 1)
    return counted[0]


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_takes_no_more_work_with_ten_thousand_runs(stores: list[ServiceStore], name: str) -> None:
    few, many = (steps(store, QUESTIONS[name]) for store in stores)
    assert few > 0
    assert many <= 1.1 * few + 50


def test_fair_shares_read_each_end_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, 300)
    with store.writing() as connection:
        connection.execute(
            "UPDATE runs SET ended=?, run_seconds=2, plan=? WHERE ended IS NOT NULL", (time.time() - 600, PLAN)
        )
    dispatcher = Dispatcher(ServiceSettings(tmp_path, {"cpu": 1 << 30}), store)
    read: list[int] = []
    whole = store.ended_since

    def noted(moment: float) -> list[StoredRun]:
        found = whole(moment)
        read.extend(run.number for run in found)
        return found

    monkeypatch.setattr(store, "ended_since", noted)
    first = dispatcher._shares.had([])
    assert first["anna"] == sum(10 * 2 for n in range(295) if not n % 2)
    store.change(
        299, "done", "done", state="done", ended=time.time(), run_seconds=4.0, plan={"rank_bytes": [10], **BYTES}
    )
    dispatcher._shares._found = (-1e9, {})
    second = dispatcher._shares.had([])
    assert second == {**first, "anna": first["anna"] + 10 * 4}
    assert len(read) <= 2 * 295 + 1
    store.change(
        297, "done", "done", state="done", ended=time.time(), run_seconds=4.0, plan={"rank_bytes": [10], **BYTES}
    )
    dispatcher._shares._found = (-1e9, {})
    read.clear()
    assert dispatcher._shares.had([])["anna"] == second["anna"] + 10 * 4
    assert sorted(read) == [297, 299]
    dispatcher.close()
    store.close()
