"""Clients that cost little: one thread, plain sockets that are kept open, requests at a steady rate.

And a server that only says what it is told to, to measure them by.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CONNECTIONS = 8


@dataclass
class Asked:
    """What one window has found.

    Attributes:
        latencies: seconds from the moment at which each request was due to the end of its answer.
        processor_seconds: of the client, in all.
        answer: the last one, all of it.
    """

    latencies: list[float] = field(default_factory=list)
    processor_seconds: float = 0.0
    answer: bytes = b""


def ask(port: int, request: Callable[[], bytes], seconds: float, rate: float) -> Asked:
    """Requests at a rate, each on a connection that is free; one that is due while none is free is sent as soon as one is, and counts from when it was due."""
    found, begun_processor = Asked(), time.thread_time()
    waiting = selectors.DefaultSelector()
    free = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(CONNECTIONS)]
    connections = list(free)
    for each in connections:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    due_of: dict[socket.socket, float] = {}
    begun, sent, wanted = time.perf_counter(), 0, int(seconds * rate)
    while sent < wanted or due_of:
        due = begun + sent / rate
        while sent < wanted and free and due <= time.perf_counter():
            connection = free.pop(0)
            connection.sendall(request())
            waiting.register(connection, selectors.EVENT_READ)
            due_of[connection], sent = due, sent + 1
            due = begun + sent / rate
        left = None if sent == wanted or not free else max(0.0, due - time.perf_counter())
        if not due_of:
            time.sleep(left or 0.0)
            continue
        for key, _ in waiting.select(left):
            connection = key.fileobj  # type: ignore[assignment]
            found.answer = answer(connection)
            found.latencies.append(time.perf_counter() - due_of.pop(connection))
            waiting.unregister(connection)
            free.append(connection)
    for each in connections:
        each.close()
    found.latencies.sort()
    found.processor_seconds = time.thread_time() - begun_processor
    return found


def answer(connection: socket.socket) -> bytes:
    """One answer of a connection, whole."""
    content = connection.recv(1 << 18)
    head = content.index(b"\r\n\r\n") + 4
    assert content.startswith(b"HTTP/1.1 200 "), content
    begin = content.index(b"content-length: ") + 16
    whole = head + int(content[begin : content.index(b"\r\n", begin)])
    while len(content) < whole:
        content += connection.recv(1 << 18)
    return content


def say(told: Any) -> None:
    """A server in a process of its own that answers whatever comes with what it was last told through a pipe, and tells its port through it first."""
    listening = socket.create_server(("127.0.0.1", 0))
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    waiting.register(told, selectors.EVENT_READ)
    told.send(listening.getsockname()[1])
    said = b""
    while True:
        for key, _ in waiting.select():
            if key.fileobj is told:
                said = told.recv()
            elif key.fileobj is listening:
                connection = listening.accept()[0]
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                waiting.register(connection, selectors.EVENT_READ)
            else:
                connection = key.fileobj  # type: ignore[assignment]
                if connection.recv(1 << 16):
                    connection.sendall(said)
                else:
                    waiting.unregister(connection)
                    connection.close()
