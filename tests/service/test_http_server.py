"""With the parsers and event loops that there are: requests that are none get one answer, and heads have an end."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from memfit.service import http_server
from memfit.service.guarding import HEADERS
from memfit.service.serving import Serving
from service.http import client, listening
from service.test_http import SMUGGLED, said_to

FAST = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("httptools", "uvloop"))), reason="there is no httptools or no uvloop"
)


@pytest.fixture(scope="module", params=["plain", pytest.param("fast", marks=FAST)])
def serving(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with ExitStack() as until_then:
        with pytest.MonkeyPatch.context() as patch:  # until it listens
            patch.setattr(http_server, "_installed", lambda _package: request.param == "fast")
            found = until_then.enter_context(listening(tmp_path_factory.mktemp("service") / "folder"))
        yield found


@pytest.mark.parametrize("number", range(len(SMUGGLED)))
def test_smuggled_and_broken_requests_get_one_answer_at_most(serving: Serving, number: int) -> None:
    answer = said_to(serving, SMUGGLED[number].encode("latin-1"))
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert b"200 OK" not in answer


@pytest.mark.parametrize(
    "begin",
    ["GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", "GET /", "POST /v1/runs HTTP/1.1\r\nContent-Length: 9\r\nX: "],
)
def test_a_head_that_does_not_end_is_refused(serving: Serving, begin: str) -> None:
    assert said_to(serving, begin.encode() + b"a" * 300_000, ends=False).startswith(b"HTTP/1.1 400 ")


def test_a_long_body_is_no_head(serving: Serving) -> None:
    body = b'{"config": {"x": "%s"}}' % (b"a" * 150_000)
    token = serving.service.tokens.make("anna", "submit").encode()
    head = b"POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    head += b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n"
    assert said_to(serving, head % (token, len(body)) + body, ends=False).startswith(b"HTTP/1.1 422 ")


def test_many_requests_on_one_connection_are_answered(serving: Serving) -> None:
    with client(serving) as asking:
        assert all(asking.runs() == [] for _ in range(300))


@FAST
def test_the_fast_parser_refuses_as_the_service_does(tmp_path: Any) -> None:
    with listening(tmp_path / "folder") as serving:
        head, _, body = said_to(serving, b"\0\1\2\3\r\n\r\n").partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert all(f"{name}: {value}".encode() in head for name, value in HEADERS.items())
    assert body.startswith(b'{"error": "Refusal", "message": "')
