"""A service that listens, in a thread of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memfit.service import confine
from memfit.service.client import Client
from memfit.service.serving import Serving
from memfit.service.settings import ServiceSettings


@contextmanager
def listening(folder: Path, **told: Any) -> Iterator[Serving]:
    """One on a free port of the loopback; what runs when it ends is ended with it."""
    settings = ServiceSettings(
        **{"folder": folder, "capacity": {"cpu": 1 << 20}, "cores": 8, "confined": confine.available(), **told}
    )
    serving, begun = Serving(settings), threading.Event()
    thread = threading.Thread(target=serving.run, args=(begun.set,))
    thread.start()
    try:
        assert begun.wait(30)
        yield serving
    finally:
        for name in (*serving.service.dispatcher.runner.running, *serving.service.dispatcher.runner.waiting):
            serving.service.dispatcher.runner.stop(name, at_once=True)
        serving.stop()
        thread.join(30)
        assert not thread.is_alive()


def client(serving: Serving, name: str = "anna", role: str = "submit") -> Client:
    """One with a token of its own."""
    return Client(serving.url, serving.service.tokens.make(name, role))
