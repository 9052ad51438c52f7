"""The service over HTTP: the same functions, and whatever else a client may send."""

from __future__ import annotations

import io
import json
import random
import socket
import stat
import time
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from memfit.cli.submit import client_of
from memfit.errors import InfeasibleError, InputError
from memfit.service.client import Client
from memfit.service.database import NAME
from memfit.service.guarding import HEADERS
from memfit.service.serving import Serving
from memfit.service.uploads import UploadLimits
from service import small_runs
from service.http import client, listening


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    limits = UploadLimits(bytes=2 << 20, unpacked_bytes=1 << 20)
    with listening(tmp_path_factory.mktemp("service") / "folder", upload=limits) as found:
        yield found


def answered(serving: Serving, method: str, path: str, *, role: str | None = "submit", **named: Any) -> httpx2.Response:
    days = named.pop("days", None)  # of a token that is none any more
    made = role or (days and "submit")
    headers = {"authorization": f"Bearer {serving.service.tokens.make('hostile', made, days)}"} if made else {}
    headers |= named.pop("headers", {})
    return httpx2.request(method, serving.url + path, headers=headers, trust_env=False, **named)


def test_a_run_is_sent_with_its_code_streamed_and_fetched(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(serving) as asking:
        run = asking.submit(
            small_runs.run_file(steps=4), code=small_runs.code(tmp_path / "code"), name="first", key="k"
        )
        told = list(asking.stream(run["run"]))
        done = asking.wait(run["run"])
        assert done["state"] == "done"
        assert [content["kind"] for kind, content in told if kind == "event"] == [
            "planning",
            "waiting",
            "running",
            "done",
        ]
        assert [content["step"] for kind, content in told if kind == "metrics"] == [1, 2, 3, 4]
        output = "\n".join(line for kind, content in told if kind == "output" for line in content["lines"])
        assert "training, step 1 to 4" in output
        assert "training, step 1 to 4" in asking.output(run["run"])
        assert json.loads(asking.output(run["run"], errors=False))["status"] == "done"
        assert "Fits:" in asking.plan(run["run"])
        fetched = asking.fetch(run["run"], tmp_path / "fetched")
        assert {file.name: file.stat().st_size for file in fetched}.items() >= {
            "model.pt": asking.artifacts(run["run"])["model.pt"]
        }.items()
        # A run that goes on removes snapshots between the moment they are listed and that in which they are fetched.
        monkeypatch.setattr(asking, "artifacts", lambda _: {"step-000002/gone.pt": 8, "model.pt": 8})
        assert [file.name for file in asking.fetch(run["run"], tmp_path / "later")] == ["model.pt"]
        assert not (tmp_path / "later" / "step-000002").exists()
        with pytest.raises(InputError, match="there is no file"):
            asking.fetch(run["run"], tmp_path / "named", "step-000002/gone.pt")
        (cpu,) = asking.devices()
        assert [(each["name"], each["state"]) for each in cpu["runs"]] == [("first", "done")]
        assert cpu["runs"][0]["bytes"] == cpu["runs"][0]["measured_bytes"] <= cpu["capacity_bytes"]
        # The same once more is the same run, over any number of connections.
        assert (
            asking.submit(small_runs.run_file(steps=4), code=tmp_path / "code", name="first", key="k")["run"]
            == run["run"]
        )


@pytest.mark.slow  # a search for the smallest plan
def test_what_cannot_fit_is_an_error_with_its_ways_out(serving: Serving, tmp_path: Path) -> None:
    with client(serving) as asking:
        run = asking.submit(small_runs.run_file(budget="30KiB"), code=small_runs.code(tmp_path / "code"))
        with pytest.raises(InfeasibleError, match="is too little: the smallest plan found needs") as refused:
            asking.wait(run["run"])
        assert refused.value.minimum_bytes is not None
        assert refused.value.remedies


def archive(name: str, content: bytes = b"", kind: int = stat.S_IFREG) -> bytes:
    """A zip archive with one entry."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as opened:
        entry = zipfile.ZipInfo(name)
        entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (kind | 0o644) << 16
        opened.writestr(entry, content)
    return written.getvalue()


CONFIG = small_runs.run_file()
BAD: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "no token": ("GET", "/v1/runs", {"role": None}, 401),
    "a wrong token": ("GET", "/v1/runs", {"role": None, "headers": {"authorization": "Bearer memfit_wrong"}}, 401),
    "a token of another scheme": ("GET", "/v1/runs", {"role": None, "headers": {"authorization": "Basic YTpi"}}, 401),
    "a token that has expired": ("GET", "/v1/runs", {"role": None, "days": -1.0}, 401),
    "a token with control characters": ("GET", "/v1/runs", {"role": None, "headers": {"authorization": "Bearer a\tb\x7f"}}, 401),
    "a token in the address": ("GET", "/v1/runs?token=x", {"role": None}, 401),
    "figures without a token": ("GET", "/metrics", {"role": None}, 401),
    "a reader submits": ("POST", "/v1/runs", {"role": "read", "json": {"config": CONFIG}}, 403),
    "a reader uploads": ("POST", "/v1/uploads", {"role": "read", "content": b"PK"}, 403),
    "somebody else's run": ("GET", "/v1/runs/1", {}, 404),
    "a run that is not there": ("POST", "/v1/runs/99999/cancel", {}, 404),
    "a run with a huge number": ("GET", f"/v1/runs/{10**30}", {}, 422),
    "a run that is no number": ("GET", "/v1/runs/one", {}, 422),
    "an artifact above the folder": ("GET", "/v1/runs/1/artifacts/..%2f..%2fplan.json", {"role": "admin"}, 404),
    "an absolute artifact": ("GET", "/v1/runs/1/artifacts//etc/passwd", {"role": "admin"}, 404),
    "a file of the page above its folder": ("GET", "/page/..%2fapp.py", {}, 404),
    "no JSON": ("POST", "/v1/runs", {"content": b"{", "headers": {"content-type": "application/json"}}, 422),
    "no object": ("POST", "/v1/runs", {"json": []}, 422),
    "an unknown field": ("POST", "/v1/runs", {"json": {"config": CONFIG, "pickle": "x"}}, 422),
    "a pickle": ("POST", "/v1/runs", {"content": b"\x80\x04.", "headers": {"content-type": "application/octet-stream"}}, 422),
    "deep nesting": ("POST", "/v1/runs", {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400),
    "deep values": (
        "POST", "/v1/runs", {"content": b'{"config":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001, "headers": {"content-type": "application/json"}}, 400,
    ),
    "a huge body": ("POST", "/v1/runs", {"json": {"config": {"model": {"args": {"x": "y" * 300_000}}}}}, 413),
    "not a number": ("POST", "/v1/runs", {"content": b'{"config": {"model": {"args": {"x": NaN}}}}', "headers": {"content-type": "application/json"}}, 422),
    "half a character": ("POST", "/v1/runs", {"content": b'{"config": {"\\ud800": 1}}', "headers": {"content-type": "application/json"}}, 422),
    "a name in two lines": ("POST", "/v1/runs", {"json": {"config": CONFIG, "name": "a\nb"}}, 422),
    "a long name": ("POST", "/v1/runs", {"json": {"config": CONFIG, "name": "a" * 81}}, 422),
    "a key that is none": ("POST", "/v1/runs", {"json": {"config": CONFIG}, "headers": {"idempotency-key": "a b"}}, 422),
    "priority over others": ("POST", "/v1/runs", {"json": {"config": CONFIG, "priority": 5}}, 403),
    "an upload that is no archive": ("POST", "/v1/uploads", {"content": b"#!/bin/sh"}, 422),
    "a zip bomb": ("POST", "/v1/uploads", {"content": archive("zeros", bytes(2 << 20))}, 413),
    "a link in an archive": ("POST", "/v1/uploads", {"content": archive("net.py", b"/etc/passwd", stat.S_IFLNK)}, 422),
    "a device in an archive": ("POST", "/v1/uploads", {"content": archive("net.py", b"", stat.S_IFCHR)}, 422),
    "an archive that climbs": ("POST", "/v1/uploads", {"content": archive("../../net.py")}, 422),
    "an archive with an absolute path": ("POST", "/v1/uploads", {"content": archive("/etc/net.py")}, 422),
    "an upload that is too large": ("POST", "/v1/uploads", {"content": random.Random(0).randbytes(3 << 20)}, 413),
    "an upload from another site's page": ("POST", "/v1/uploads", {"content": archive("net.py"), "headers": {"origin": "http://evil.example"}}, 403),
    "code that was not sent": ("POST", "/v1/runs", {"json": {"config": CONFIG, "code": "0" * 64}}, 404),
    "code by a path": ("POST", "/v1/runs", {"json": {"config": CONFIG, "code": "../../runs"}}, 404),
    "a module without code": ("POST", "/v1/runs", {"json": {"config": CONFIG}}, 422),
    "a function of the system": ("POST", "/v1/runs", {"json": {"config": small_runs.run_file(model={"python": "os:system"})}}, 422),
    "a file of the system": ("POST", "/v1/runs", {"json": {"config": small_runs.run_file(data={"train": "/etc/passwd"})}}, 422),
    "a home folder": ("POST", "/v1/runs", {"json": {"config": small_runs.run_file(data={"train": "~/.ssh/*"})}}, 422),
    "a climbing path": ("POST", "/v1/runs", {"json": {"config": small_runs.run_file(data={"train": "../../*/train.npz"})}}, 422),
    "a folder of its own": ("POST", "/v1/runs", {"json": {"config": {**CONFIG, "folder": "/etc"}}}, 422),
    "a file of another library": ("POST", "/v1/runs", {"json": {"config": {**CONFIG, "deepspeed": "/etc/passwd"}}}, 422),
    "another site's page": ("POST", "/v1/runs/1/cancel", {"headers": {"origin": "http://evil.example"}}, 403),
    "no site's page": ("POST", "/v1/runs/1/cancel", {"headers": {"origin": "null"}}, 403),
    "another name for this computer": ("GET", "/v1/runs", {"headers": {"host": "evil.example"}}, 421),
    "another site's form": (
        "POST", "/v1/runs", {"content": b"config=1", "headers": {"origin": "https://evil.example", "content-type": "application/x-www-form-urlencoded"}}, 403,
    ),
    "a page of another port": ("POST", "/v1/runs/1/pause", {"headers": {"origin": "http://127.0.0.1:1"}}, 403),
    "a host with a path": ("GET", "/v1/runs", {"headers": {"host": "evil.example/127.0.0.1"}}, 421),
    "no such method": ("DELETE", "/v1/runs", {}, 405),
    "no such state": ("GET", "/v1/runs?state=unknown", {}, 422),
}  # fmt: skip


def left(serving: Serving) -> tuple[list[str], list[Any]]:
    """Everything that requests leave behind, but the audit log and tokens, which the tests make themselves."""
    folder, apart = serving.settings.folder, {"service.sqlite", "service.sqlite-wal", "service.sqlite-shm", "code"}
    files = sorted(str(file) for file in folder.rglob("*") if file.name not in apart)
    queries = ("SELECT * FROM runs", "SELECT * FROM events", "SELECT * FROM uploads")
    return files, [[tuple(row) for row in serving.store.read(query)] for query in queries]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_with_a_sentence_and_leaves_nothing(serving: Serving, name: str) -> None:
    method, path, named, status = BAD[name]
    before = left(serving)
    answer = answered(serving, method, path, **named)

    found = answer.status_code, answer.headers["content-type"]
    # httptools takes no control character; h11 does, and then it is no token.
    by_parser = (400, "application/json") if "control characters" in name else None
    assert found in {(status, "application/json"), by_parser}, answer.text
    assert answer.json()["message"]
    assert "Traceback" not in answer.text
    assert left(serving) == before
    for header in ("content-security-policy", "x-content-type-options"):
        assert answer.headers[header] == HEADERS[header]


SMUGGLED = [
    "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/runs HTTP/1.1\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n folded: header\r\n\r\n",
    "GET / HTTP/1.1\r\nX: " + "a" * 200_000 + "\r\n\r\n",
    "\0\1\2\3\r\n\r\n",
    "GET /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n",
    "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
    "GET /healthz HTTP/1.1\r\nHost: evil.example\r\nHost: 127.0.0.1\r\n\r\n",
    "GET http://evil.example/healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    "POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length : 5\r\n\r\nhello",
]


def said_to(serving: Serving, request: bytes, *, ends: bool = True) -> bytes:
    """All that is answered on a connection until the service closes it."""
    answer = b""
    with socket.create_connection(("127.0.0.1", serving.port), timeout=20) as connection:
        with suppress(OSError):  # it may have closed the connection in the middle
            connection.sendall(request)
            if ends:
                connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                answer += chunk
    return answer


@pytest.mark.parametrize("text", SMUGGLED)
def test_smuggled_and_broken_requests_get_one_answer_at_most(serving: Serving, text: str) -> None:
    before = left(serving)
    answer = said_to(serving, text.encode("latin-1"))
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert b"200 OK" not in answer
    assert left(serving) == before


def test_a_token_expires_and_is_taken_back(serving: Serving) -> None:
    tokens = serving.service.tokens
    assert tokens.caller(tokens.make("late", "read", days=-1)) is None
    token = tokens.make("gone", "read")
    assert tokens.caller(token) is not None
    assert tokens.take_back("gone") == 1
    assert tokens.caller(token) is None
    assert token.encode() not in (serving.settings.folder / NAME).read_bytes()


def test_what_was_tried_is_in_the_audit_log(serving: Serving) -> None:
    answered(serving, "GET", "/v1/runs", role=None)
    answered(serving, "POST", "/v1/runs/77777/cancel")
    wanted = [("hostile", "POST", "/v1/runs/77777/cancel", 404), ("", "GET", "/v1/runs", 401)]
    query = "SELECT owner, method, path, status FROM audit ORDER BY number DESC LIMIT 2"
    deadline = time.monotonic() + 10  # it is written after the answer
    while [tuple(row) for row in serving.store.read(query)] != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_method_that_is_not_there_is_answered_with_those_that_are(serving: Serving) -> None:
    assert answered(serving, "DELETE", "/v1/runs").headers["allow"] == "GET, POST"
    assert answered(serving, "GET", "/v1/runs/1/cancel").headers["allow"] == "POST"


def test_health_readiness_figures_and_the_document(serving: Serving) -> None:
    assert answered(serving, "GET", "/healthz", role=None).json()["status"] == "alive"
    # A computer with much other work takes its time until the service has looked at its runs.
    until = time.monotonic() + 60.0
    while (ready := answered(serving, "GET", "/readyz", role=None).json()) != {"status": "ready"}:
        assert time.monotonic() < until, ready
        time.sleep(0.1)
    figures = answered(serving, "GET", "/metrics", role="read").text
    assert 'memfit_capacity_bytes{device="cpu"} 1.048576e+06' in figures
    assert 'memfit_runs{state="running"} 0.0' in figures
    document = answered(serving, "GET", "/openapi.json", role=None).json()
    assert {"/v1/runs", "/v1/runs/{number}/stream", "/v1/uploads"} <= document["paths"].keys()


def test_nobody_answers(tmp_path: Path) -> None:
    with (
        Client("http://127.0.0.1:9", "token") as asking,
        pytest.raises(InputError, match="no service answers at http://127.0.0.1:9"),
    ):
        asking.me()
    with pytest.raises(InputError, match="no service answers"):
        Client("http://127.0.0.1:9", "token").fetch(1, tmp_path, "log.jsonl")


def test_a_port_that_is_taken_is_told(serving: Serving, tmp_path: Path) -> None:
    other = Serving(replace(serving.settings, folder=tmp_path / "other"), port=serving.port)
    with pytest.raises(
        InputError, match=f"cannot listen at 127.0.0.1:{serving.port}, for the reason in the line above"
    ):
        other.run()


def test_an_address_of_the_new_kind_stands_in_brackets(serving: Serving, tmp_path: Path) -> None:
    other = Serving(replace(serving.settings, folder=tmp_path / "other"), host="fe80::1")
    try:
        assert other._name == "[fe80::1]"
    finally:
        other.close()


@pytest.mark.parametrize("url", ["localhost:8321", "", "http://", "http://here:port", "http://here:99999"])
def test_what_is_no_address_is_told(url: str) -> None:
    with pytest.raises(InputError, match="is no address of a service: write it as http://127.0.0.1:8321"):
        Client(url, "token")


@pytest.mark.parametrize("end", ["", "/"])
def test_the_address_that_is_told_for_the_browser_is_taken(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.delenv("MEMFIT_SERVICE_TOKEN", raising=False)
    token = serving.service.tokens.make("anna", "submit")
    asked = Namespace(url=f"{serving.url}{end}#token={token}", token_file=None, folder=tmp_path)
    with client_of(asked) as asking:
        assert asking.me()["name"] == "anna"


@pytest.mark.parametrize("token", ["", "two words", "tökén", "one\ntwo"])
def test_what_is_no_token_is_told_without_it(token: str) -> None:
    with pytest.raises(InputError, match="^this is no token: a token is one word"):
        Client("http://127.0.0.1:9", token)


def test_what_json_cannot_say_is_not_sent() -> None:
    for value in (float("nan"), {1}):
        with pytest.raises(InputError, match="the run file cannot be sent, as it holds what JSON cannot say"):
            Client("http://127.0.0.1:9", "token").submit({"model": {"args": {"x": value}}})


@pytest.mark.parametrize("status", [200, 302, 404, 502])
def test_what_answers_and_is_no_service_is_told(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    page = httpx2.MockTransport(lambda _: httpx2.Response(status, text="<html>a page</html>"))
    asking = Client("http://127.0.0.1:9", "token")
    monkeypatch.setattr(asking, "_http", httpx2.Client(base_url="http://127.0.0.1:9", transport=page))
    with pytest.raises(InputError, match=f"http://127.0.0.1:9/v1/me answers {status} and not as a service of memfit"):
        asking.me()


def test_results_are_fetched_by_any_name_and_not_written_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with listening(tmp_path / "service") as serving, client(serving) as asking:
        asking.submit(small_runs.run_file(), code=small_runs.code(tmp_path / "code"), plan_only=True)
        (run,) = asking.runs(limit=1)
        out = serving.service.folder(serving.store.run(run["run"])) / "out"
        out.mkdir(parents=True)
        (out / "a").write_text("a")
        strange = "b #1?%41 ü.txt"
        (out / strange).write_text("b")
        assert asking.fetch(run["run"], tmp_path / "results") == [
            tmp_path / "results" / each for each in ("a", strange)
        ]
        with pytest.raises(InputError, match=r"cannot write .*file.a: .*; name another folder, or free space"):
            asking.fetch(run["run"], tmp_path / "file")
