"""The answers to what is asked again and again, how one run stands and which runs are the newest: their bytes, and a way to them below FastAPI.

FastAPI's own part of such a request is several times that of the store. `AskedOften` answers the plain ones itself, those that succeed; whatever else comes,
a wrong token, a run that is not there, a query that is not spelled plainly, goes on to FastAPI, which answers and documents all of them.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar, get_args

from starlette.types import ASGIApp, Receive, Scope, Send

from memfit.errors import InputError
from memfit.service.dispatcher import View
from memfit.service.http_values import LARGEST, MOST_LISTED, USUALLY_LISTED
from memfit.service.service import Service
from memfit.service.states import State
from memfit.service.tokens import Caller

_KEPT_BYTES: Final = 2 << 20  # of described runs, and as much of answers
_ENCODER: Final = json.JSONEncoder(allow_nan=False)
_RUNS: Final = "/v1/runs"
_RUN: Final = re.compile(_RUNS + r"/([1-9][0-9]{0,18})", re.ASCII)
_TOKEN: Final = re.compile(rb"[Bb]earer ([A-Za-z0-9_-]{1,200})")
_QUERY: Final = re.compile(
    rb"(?:(?:state=[a-z]{1,20}|before=[1-9][0-9]{0,18}|limit=[1-9][0-9]{0,2})(?:&(?!\Z)|\Z)){0,16}"
)


class RunAnswers:
    """What is answered about runs, as JSON in ASCII. For one thread.

    A described run is kept with the row and the view that it was made of, and serves again while both are the same. So the store is asked each time, and no
    answer is older than it would be without.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self._kept: Kept[int, tuple[tuple[Any, ...], View | None]] = Kept(_KEPT_BYTES)

    def one(self, caller: Caller, number: int) -> bytes:
        """One run, with its run file and what happened to it.

        Raises:
            NotKnownError: there is none, or they may not see it.
            StoreError: the store cannot be reached.
        """
        row = self.service.row(caller, number)
        events = [dict(event) for event in self.service.store.event_rows(number)]
        # The run file is stored as JSON in ASCII, and goes out as it is.
        return b'%s, "config": %s, "events": %s}' % (self._described(row)[:-1], row["config"].encode(), _json(events))

    def newest(self, caller: Caller, states: Sequence[str] = (), before: int | None = None, limit: int = 100) -> bytes:
        """Runs, the newest first, as many as they may see.

        Raises:
            Refusal: there is no such state.
            StoreError: the store cannot be reached.
        """
        return b"[%s]" % b", ".join(map(self._described, self.service.rows(caller, states, before, limit)))

    def _described(self, row: Any) -> bytes:
        """`Service.described` of a row."""
        number, columns, view = row["number"], tuple(row), self.service.dispatcher.view
        # Of a run that the view does not know it tells nothing; else it is another one with each look.
        made_of = columns, view if view.knows(number) else None
        found = self._kept.get(number)
        if found is not None and found[0][1] is made_of[1] and found[0][0] == columns:
            return found[1]
        read = {name: None if row[name] is None else json.loads(row[name]) for name in ("plan", "refusal")}
        described = _json(self.service.described_columns({**dict(row), **read}))
        if view is self.service.dispatcher.view:  # else it may be of either
            self._kept.put(number, made_of, described)
        return described


class AskedOften:
    """Answers plain requests for runs, and hands the others on.

    Answers are kept while nothing is written into the store and the dispatcher has not looked anew; where the store does not tell its version (PostgreSQL),
    none are.

    Args:
        app: of FastAPI.
        answers: about runs.
    """

    def __init__(self, app: ASGIApp, answers: RunAnswers) -> None:
        self.app, self.answers = app, answers
        self._kept: Kept[tuple[Caller, str, bytes], tuple[object, View]] = Kept(_KEPT_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        body = self._answer(scope) if scope["type"] == "http" and scope["method"] == "GET" else None
        if body is None:
            await self.app(scope, receive, send)
            return
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, scope: Scope) -> bytes | None:
        """The body of a plain request that succeeds; None for all others."""
        path, query = scope["path"], scope["query_string"]
        if not path.startswith(_RUNS):
            return None
        try:
            service = self.answers.service
            version, view = service.store.version(), service.dispatcher.view  # before all that is read
            caller = self._caller(scope, version)
            if caller is None:
                return None
            key = caller, path, query
            found = self._kept.get(key) if version is not None else None
            if found is not None and found[0][1] is view and found[0][0] == version:
                body: bytes | None = found[1]
            else:
                body = self._made(caller, path, query)
                if body is not None and version is not None:
                    self._kept.put(key, (version, view), body)
        except InputError:
            return None  # FastAPI's part finds the same, and says it
        if body is not None:
            scope["state"]["caller"] = caller.name
        return body

    def _made(self, caller: Caller, path: str, query: bytes) -> bytes | None:
        if path == _RUNS:
            listed = _plain_query(query)
            return None if listed is None else self.answers.newest(caller, *listed)
        asked = _RUN.fullmatch(path) if not query else None
        return self.answers.one(caller, int(asked[1])) if asked and int(asked[1]) <= LARGEST else None

    def _caller(self, scope: Scope, version: object | None) -> Caller | None:
        """Whose token a request carries, where it is written plainly."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        token = _TOKEN.fullmatch(given[0]) if len(given) == 1 else None
        return None if token is None else self.answers.service.tokens.caller(token[1].decode("ascii"), version)


Key = TypeVar("Key")
Origin = TypeVar("Origin")


class Kept(Generic[Key, Origin]):
    """Bytes with what they were made of, by a key; those that were not asked for the longest go first.

    Args:
        most_bytes: in all, besides what they were made of.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._kept: OrderedDict[Key, tuple[Origin, bytes]] = OrderedDict()

    def get(self, key: Key) -> tuple[Origin, bytes] | None:
        """What they were made of, and the bytes."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: Key, origin: Origin, content: bytes) -> None:
        """Keep bytes, in the place of those of the same key."""
        before = self._kept.pop(key, None)
        self._kept[key] = origin, content
        self.bytes += len(content) - (0 if before is None else len(before[1]))
        while self.bytes > self.most_bytes:
            self.bytes -= len(self._kept.popitem(last=False)[1][1])


@lru_cache(maxsize=256)
def _plain_query(query: bytes) -> tuple[tuple[str, ...], int | None, int] | None:
    """The states, `before` and `limit` of a query, as they are usually written; None for what FastAPI is to judge."""
    if len(query) > 300 or not _QUERY.fullmatch(query):
        return None
    pairs = [each.decode("ascii").split("=") for each in query.split(b"&") if each]
    states = tuple(value for name, value in pairs if name == "state")
    numbers = {name: int(value) for name, value in pairs if name != "state"}
    before, limit = numbers.get("before"), numbers.get("limit", USUALLY_LISTED)
    twice = len(numbers) + len(states) != len(pairs)
    if twice or not set(states) <= set(get_args(State)) or (before or 1) > LARGEST or limit > MOST_LISTED:
        return None
    return states, before, limit


def _json(content: Any) -> bytes:
    return _ENCODER.encode(content).encode("ascii")
