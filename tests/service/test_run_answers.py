"""What `AskedOften` answers is what FastAPI would, in every byte; and no answer is older than the store."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.service.app import application
from memfit.service.dispatcher import View
from memfit.service.guarding import Guarding
from memfit.service.progress import Progress
from memfit.service.run_answers import AskedOften, Kept
from memfit.service.store import ServiceStore
from service.conftest import Serving

PLAN = {"budget_bytes": 10, "peak_bytes": 9, "plain_peak_bytes": 20, "rank_bytes": [9], "tiers": {}, "total_steps": 4}
BEARER = {"authorization": "Bearer {}"}
# Method, path, headers, and by whom it is answered with which status.
REQUESTS: dict[str, tuple[str, str, dict[str, str], int, bool]] = {
    "a run": ("GET", "/v1/runs/1", BEARER, 200, True),
    "a run that has a name of many letters": ("GET", "/v1/runs/3", BEARER, 200, True),
    "a run that was refused": ("GET", "/v1/runs/5", BEARER, 200, True),
    "the newest": ("GET", "/v1/runs", BEARER, 200, True),
    "so many": ("GET", "/v1/runs?limit=2", BEARER, 200, True),
    "of states, before one": ("GET", "/v1/runs?state=done&state=failed&before=6&limit=3", BEARER, 200, True),
    "none of a state": ("GET", "/v1/runs?state=paused", BEARER, 200, True),
    "a scheme in small letters": ("GET", "/v1/runs/1", {"authorization": "bearer {}"}, 200, True),
    "a scheme in large letters": ("GET", "/v1/runs/1", {"authorization": "BEARER {}"}, 200, False),
    "a token with a space behind it": ("GET", "/v1/runs/1", {"authorization": "Bearer {} "}, 200, False),
    "a query that means nothing": ("GET", "/v1/runs/1?x=1", BEARER, 200, False),
    "a limit twice": ("GET", "/v1/runs?limit=2&limit=3", BEARER, 200, False),
    "an escaped query": ("GET", "/v1/runs?st%61te=done", BEARER, 200, False),
    "a number that begins with zeros": ("GET", "/v1/runs/0001", BEARER, 200, False),
    "no token": ("GET", "/v1/runs/1", {}, 401, False),
    "a wrong token": ("GET", "/v1/runs", {"authorization": "Bearer memfit_wrong"}, 401, False),
    "a token of another scheme": ("GET", "/v1/runs/1", {"authorization": "Basic {}"}, 401, False),
    "another site's name": ("GET", "/v1/runs", {**BEARER, "host": "evil.example"}, 421, False),
    "a change from another site": ("POST", "/v1/runs/1/cancel", {**BEARER, "origin": "http://evil.example"}, 403, False),
    "somebody else's run": ("GET", "/v1/runs/2", BEARER, 404, False),
    "a run that is not there": ("GET", "/v1/runs/99", BEARER, 404, False),
    "the largest number": ("GET", f"/v1/runs/{2**62}", BEARER, 404, False),
    "a number that is too large": ("GET", f"/v1/runs/{2**62 + 1}", BEARER, 422, False),
    "no run": ("GET", "/v1/runs/0", BEARER, 422, False),
    "a limit of nothing": ("GET", "/v1/runs?limit=0", BEARER, 422, False),
    "a limit above the most": ("GET", "/v1/runs?limit=501", BEARER, 422, False),
    "no such state": ("GET", "/v1/runs?state=gone", BEARER, 422, False),
    "a query with no end": ("GET", "/v1/runs?limit=2&", BEARER, 200, False),
    "a path with an end": ("GET", "/v1/runs/", BEARER, 307, False),
    "heads alone": ("HEAD", "/v1/runs/1", BEARER, 405, False),
    "no such method": ("DELETE", "/v1/runs/1", BEARER, 405, False),
    "another question": ("GET", "/v1/runs/1/plan", BEARER, 200, False),
}  # fmt: skip


class Asking:
    """The application of a service, asked without a connection."""

    def __init__(self, serving: Serving) -> None:
        self.serving, self.service = serving, serving.service
        made = application(serving.service, serving.studies, serving.housekeeping, {"127.0.0.1"})
        assert isinstance(made, Guarding)
        assert isinstance(made.app, AskedOften)
        self.whole, self.often = made, made.app
        self.plain = Guarding(made.app.app, made.store, made.hosts, made.body_bytes)
        self.token = self.service.tokens.make("anna", "submit")

    def __call__(
        self, method: str, path: str, headers: dict[str, str], *, plain: bool = False
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers and body."""
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        where, _, query = path.partition("?")
        told = {"host": "127.0.0.1:1", **headers}
        raw = [(name.encode(), value.format(self.token).encode()) for name, value in told.items()]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": where, "raw_path": where.encode(),
            "query_string": query.encode(), "root_path": "", "scheme": "http", "headers": raw, "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 1),
        }  # fmt: skip
        asyncio.run((self.plain if plain else self.whole)(scope, receive, send))
        body = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], sorted(sent[0]["headers"]), body

    def kept(self) -> int:
        return len(self.often._kept._kept)

    def one(self, path: str = "/v1/runs/1") -> Any:
        """What is answered, which is what FastAPI answers."""
        told, plain = self("GET", path, BEARER), self("GET", path, BEARER, plain=True)
        assert told == plain
        return json.loads(told[2])


@pytest.fixture
def asking(serve: Callable[..., Serving]) -> Asking:
    serving = serve(keep_days=3.0)
    store = serving.service.store
    for number in range(1, 8):
        owner = "ben" if number == 2 else "anna"
        name = 'Ä \u2028 <b>"\\' * 5 if number == 3 else ""
        store.add(
            {"owner": owner, "name": name, "digest": "", "config": {"x": [1.5e-7, None, "é"]}, "key": f"k{number}"}
        )
        state = ("done", "failed", "waiting", "running")[number % 4]
        store.change(number, state, "so \x00 é", state=state, plan=PLAN, ended=1e9 + 0.1 if number % 4 < 2 else None)
    store.change(5, "refused", "no", state="refused", refusal={"message": "no", "minimum_bytes": 7}, plan=None)
    return Asking(serving)


@pytest.mark.parametrize("name", REQUESTS)
def test_both_ways_answer_alike(asking: Asking, name: str, caplog: pytest.LogCaptureFixture) -> None:
    method, path, headers, status, often = REQUESTS[name]
    noted: list[Any] = []
    with caplog.at_level(logging.INFO, "memfit.service.requests"):
        for plain in (False, False, True):
            caplog.clear()
            answer = asking(method, path, headers, plain=plain)
            audit = asking.service.store.read(
                "SELECT owner, address, method, path, status FROM audit ORDER BY number DESC LIMIT 1"
            )
            (note,) = [
                json.loads(record.getMessage()) for record in caplog.records if record.name == "memfit.service.requests"
            ]
            noted.append((answer, {**note, "seconds": 0}, [tuple(row) for row in audit]))
    assert noted[0] == noted[1] == noted[2]
    assert noted[0][0][0] == status
    assert asking.kept() == int(often), "the first way answers what succeeds and is written plainly, and nothing else"


@pytest.mark.parametrize("role", ["read", "submit", "admin"])
def test_each_role_sees_what_it_may(asking: Asking, role: str) -> None:
    asking.token = asking.service.tokens.make("cora", role)
    for path in ("/v1/runs", "/v1/runs/2", "/v1/runs?state=running"):
        assert asking("GET", path, BEARER) == asking("GET", path, BEARER, plain=True)
    assert asking("GET", "/v1/runs/2", BEARER)[0] == (404 if role == "submit" else 200)


def test_what_is_kept_for_one_is_not_told_to_another(asking: Asking) -> None:
    tokens = [
        asking.service.tokens.make(name, role)
        for name, role in (("root", "admin"), ("ben", "submit"), ("anna", "submit"), ("anna", "read"))
    ]
    for _ in range(2):  # nothing is written meanwhile
        seen = []
        for asking.token in tokens:
            runs = json.loads(asking("GET", "/v1/runs", BEARER)[2])
            seen.append(
                (
                    [run["run"] for run in runs],
                    asking("GET", "/v1/runs/2", BEARER)[0],
                    asking("GET", "/v1/runs/3", BEARER)[0],
                )
            )
        everything = [7, 6, 5, 4, 3, 2, 1]
        assert seen == [(everything, 200, 200), ([2], 200, 404), ([7, 6, 5, 4, 3, 1], 404, 200), (everything, 200, 200)]


def test_an_answer_is_kept_and_never_older_than_the_store(asking: Asking) -> None:
    paths = ("/v1/runs/1", "/v1/runs")
    store, before = asking.service.store, [asking.one(path) for path in paths]
    reads: list[str] = []
    read = store.read

    def noted(query: str, values: Any = ()) -> list[Any]:
        reads.append(query)
        return read(query, values)

    store.read = noted  # type: ignore[method-assign]
    assert [json.loads(asking("GET", path, BEARER)[2]) for path in paths] == before
    assert reads == [], "nothing was written, and nothing is read"
    store.read = read  # type: ignore[method-assign]
    other = ServiceStore(asking.serving.settings.folder)  # as another process has it
    try:
        for number, writer in enumerate((store, other, other, store)):
            writer.change(1, "told", f"for the {number}th time", reason=f"reason {number}")
            told = [asking.one(path) for path in paths]
            assert told[0]["reason"] == told[1][-1]["reason"] == f"reason {number}"
            assert told[0]["events"][-1]["text"] == f"for the {number}th time"
        with other.writing() as connection:
            connection.execute("INSERT INTO events (run, time, kind, text) VALUES (1, 1.0, 'an event', 'alone')")
        assert asking.one()["events"][-1]["text"] == "alone"
    finally:
        other.close()


def test_an_answer_follows_the_dispatcher(asking: Asking) -> None:
    dispatcher = asking.service.dispatcher
    assert asking.one("/v1/runs/3")["step"] is None
    for step in (1, 2):
        dispatcher.view = View(progress={3: Progress(step=step, loss=0.5)}, remaining={3: 7.0}, made=1e9 + step)
        assert [asking.one("/v1/runs/3")["step"], asking.one("/v1/runs")[4]["step"]] == [step, step]
        assert asking.one("/v1/runs/3")["expected_end"] == 1e9 + step + 7
    dispatcher.view = View()
    assert asking.one("/v1/runs")[4]["step"] is None


def test_a_token_that_was_good_is_not_for_longer(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = asking.service.tokens
    good, late = asking.token, tokens.make("anna", "submit", days=1)
    for token in (good, late):
        asking.token = token
        assert [asking("GET", "/v1/runs/1", BEARER)[0] for _ in range(2)] == [200, 200]
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 86400 + 1)
        assert asking("GET", "/v1/runs/1", BEARER)[0] == 401
    assert asking("GET", "/v1/runs/1", BEARER)[0] == 200
    tokens.take_back("anna")
    for token in (good, late):
        asking.token = token
        assert asking("GET", "/v1/runs/1", BEARER)[0] == 401


def test_where_the_store_tells_no_version_no_answer_is_kept(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    store = asking.service.store
    monkeypatch.setattr(store, "version", lambda: None)
    assert asking.one()["reason"]
    assert asking.kept() == 0
    store.change(1, "told", "so", reason="another")
    assert asking.one()["reason"] == "another"
    asking.service.tokens.take_back("anna")
    assert asking("GET", "/v1/runs/1", BEARER)[0] == 401


def test_what_is_kept_has_an_end() -> None:
    kept: Kept[int, str] = Kept(10)
    for number in range(4):
        kept.put(number, "", b"four")
    assert [kept.get(number) is not None for number in range(4)] == [False, False, True, True]
    kept.put(3, "again", b"two")
    kept.get(2)
    kept.put(4, "", b"three")
    assert [kept.get(number) is not None for number in (2, 3, 4)] == [True, False, True]
    kept.put(5, "", bytes(11))
    assert kept.get(5) is None
    assert kept.bytes == 0


def test_a_store_that_fails_is_told_by_both(asking: Asking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.service.database import StoreError

    def fails(*_about: Any) -> Any:
        raise StoreError("the store cannot be reached")

    for name in ("version", "read"):
        monkeypatch.setattr(asking.service.store, name, fails)
    told = asking("GET", "/v1/runs", BEARER)
    assert told == asking("GET", "/v1/runs", BEARER, plain=True)
    assert told[0] == 503
