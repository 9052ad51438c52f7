"""What every request passes through before anything looks at it: its host, its origin and its size; and what every answer carries: a strict content policy."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memfit.errors import InputError
from memfit.service.store import ServiceStore, storable

_log = logging.getLogger("memfit.service.requests")
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
_HEADERS: Final = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
UPLOADS: Final = "/v1/uploads"
_JUDGED: Final = {b"host", b"origin", b"content-length", b"transfer-encoding"}  # headers that are looked at here


class Guarding:
    """Wraps the application.

    Args:
        app: of FastAPI.
        store: for the audit log.
        hosts: names by which the service may be called; a page of somebody else's that was led here by its DNS uses another one.
        body_bytes: of a request; uploads are limited where they are written.
    """

    def __init__(self, app: ASGIApp, store: ServiceStore, hosts: Collection[str], body_bytes: int) -> None:
        self.app, self.store, self.hosts, self.body_bytes = app, store, set(hosts), body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()
        told = {"status": 500}

        async def answering(message: Message) -> None:
            if message["type"] == "http.response.start":
                told["status"] = message["status"]
                there = {name.lower() for name, _ in message["headers"]}
                extra = [each for each in _HEADERS if each[0] not in there]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        scope.setdefault("state", {})
        try:
            refused = self._refused(scope)
            if refused is None:
                body = await self._body(scope, receive)
                if body is None:
                    refused = (413, "TooLargeError", f"a request has at most {self.body_bytes} bytes")
                else:
                    await self.app(scope, body, answering)
            if refused is not None:
                await _answer(answering, *refused)
        finally:
            self._note(scope, told["status"], time.perf_counter() - begun)

    def _refused(self, scope: Scope) -> tuple[int, str, str] | None:
        headers = _headers(scope)
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:  # parsers differ in whether they let this through
            return 400, "Refusal", "a request names its host once, in one Host header"
        host = _name(headers.get("host", ""))
        if host not in self.hosts:
            return 421, "Refusal", "this service is not known by that name: start it with --name to add one"
        if "content-length" in headers and "transfer-encoding" in headers:
            return 400, "Refusal", "a request says its length once: by Content-Length or by Transfer-Encoding"
        origin = headers.get("origin")
        if (
            origin is not None
            and scope["method"] not in {"GET", "HEAD"}
            and origin.partition("://")[2] != headers.get("host")
        ):
            return (
                403,
                "NotAllowedError",
                "requests that change something come from the service's own page or from no page",
            )
        return None

    async def _body(self, scope: Scope, receive: Receive) -> Receive | None:
        """The request's body, all of it, as something that can be received; None where it is too large."""
        if scope["path"] == UPLOADS or scope["method"] in {"GET", "HEAD", "OPTIONS"}:
            return receive
        length = _headers(scope).get("content-length", "0")
        if not length.isdecimal() or int(length) > self.body_bytes:
            return None
        content, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                break
            content += message.get("body", b"")
            more = message.get("more_body", False)
            if len(content) > self.body_bytes:
                return None
        told: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

        async def again() -> Message:
            return told.pop() if told else await receive()

        return again

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        who = scope["state"].get("caller", "")
        address = (scope.get("client") or ("",))[0]
        if _log.isEnabledFor(logging.INFO):
            told = RequestNote(
                method=scope["method"],
                path=scope["path"][:300],
                status=status,
                seconds=round(seconds, 4),
                caller=who,
                address=address,
            )
            _log.info("%s", told)
        if scope["method"] in {"GET", "HEAD"} and status not in {401, 403}:
            return
        try:
            with self.store.writing() as connection:
                connection.execute(
                    "INSERT INTO audit (time, owner, address, method, path, status) VALUES (?, ?, ?, ?, ?, ?)",
                    (
                        time.time(),
                        who,
                        address,
                        scope["method"],
                        storable(scope["path"][:300].encode("ascii", "replace").decode()),
                        status,
                    ),
                )
        except InputError as error:
            _log.error("the audit log cannot be written: %s", error)


class RequestNote(dict[str, Any]):
    """A request, for the log: JSON as a text."""

    def __str__(self) -> str:
        return json.dumps(self)


def _headers(scope: Scope) -> dict[str, str]:
    """Those that are looked at here; servers of ASGI give their names in small letters."""
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _JUDGED}


def _name(host: str) -> str:
    """A Host header without its port."""
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0].lower()


async def _answer(send: Send, status: int, error: str, message: str) -> None:
    body = json.dumps({"error": error, "message": message}).encode()
    headers: Any = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
