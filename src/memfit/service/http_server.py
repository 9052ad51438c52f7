"""The HTTP server: uvicorn, on httptools and uvloop where they are installed, on h11 and asyncio where not."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
from collections.abc import Callable
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from memfit.service.guarding import HEADERS

_MOST_HEAD_BYTES: Final = (
    64 << 10
)  # that a request may hold back before its head is complete, as uvicorn has it for h11
_MOST_CONNECTIONS: Final = 500


def server(app: ASGIApp, host: str, port: int) -> uvicorn.Server:
    """One that has yet to listen.

    Args:
        app: that answers.
        host, port: where it is to listen; port 0 for any that is free.
    """
    config = uvicorn.Config(
        app,
        host,
        port,
        http=_limited() if _installed("httptools") else "h11",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        limit_concurrency=_MOST_CONNECTIONS,
    )
    return uvicorn.Server(config)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop of the server; None for Python's own."""
    if not _installed("uvloop"):
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return made


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _limited() -> type[asyncio.Protocol]:
    """Uvicorn's protocol on httptools, which by itself takes a head of any size, with answers to what is no request that look like all others."""
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

    class Limited(HttpToolsProtocol):
        def __init__(self, *about: Any, **told: Any) -> None:
            super().__init__(*about, **told)
            self._held = 0  # bytes since the last head or request was complete

        def data_received(self, data: bytes) -> None:
            self._held += len(data)
            super().data_received(data)
            if self._held > _MOST_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the head of a request has at most {_MOST_HEAD_BYTES} bytes")

        def on_headers_complete(self) -> None:
            self._held = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._held = 0
            super().on_body(body)

        def send_400_response(self, msg: str) -> None:
            body = json.dumps({"error": "Refusal", "message": msg}).encode("ascii")
            told = {
                **HEADERS,
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            }
            head = "".join(f"{name}: {value}\r\n" for name, value in told.items()).encode("ascii")
            self.transport.write(STATUS_LINE[400] + head + b"\r\n" + body)
            self.transport.close()

    return Limited
