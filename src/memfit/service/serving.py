"""A service that runs: the dispatcher in a thread, HTTP in front of it, and an end that leaves runs alone."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from memfit.errors import InputError
from memfit.runner import guard
from memfit.service import confine, http_server
from memfit.service.app import application
from memfit.service.dispatcher import Dispatcher
from memfit.service.guarding import RequestNote
from memfit.service.housekeeping import Housekeeping
from memfit.service.own_folder import ADDRESS
from memfit.service.service import Service
from memfit.service.settings import ServiceSettings
from memfit.service.store import ServiceStore
from memfit.service.studies import Studies
from memfit.service.tokens import Tokens

LOCAL: Final = ("127.0.0.1", "localhost", "[::1]")


class Serving:
    """One service, from its start to its end.

    Args:
        settings: of it.
        host, port: where it listens; port 0 for any that is free.
        names: by which it may be called besides those of the loopback.

    Raises:
        InputError: the folder is another service's, this computer has less memory than is promised, or this kernel cannot confine runs.
    """

    def __init__(
        self, settings: ServiceSettings, host: str = "127.0.0.1", port: int = 0, names: Collection[str] = ()
    ) -> None:
        if settings.confined and not confine.available():
            raise InputError(
                "this kernel cannot confine runs to their own folder (Landlock, Linux 6.7 or newer): --unconfined runs them with all rights of this user"
            )
        self.settings, self.host = settings, host
        settings.check_memory()
        settings.check_host()
        settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.store = ServiceStore(settings.folder, settings.store)
        try:
            dispatcher = Dispatcher(settings, self.store)
        except BaseException:
            self.store.close()
            raise
        self.service = Service(settings, self.store, dispatcher)
        self.studies = Studies(self.service)
        self.housekeeping = Housekeeping(self.service)
        app = application(self.service, self.studies, self.housekeeping, {*LOCAL, self._name, *names})
        self._server = http_server.server(app, host, port)
        self._stopping = threading.Event()
        self._dispatching = threading.Thread(target=dispatcher.serve, args=(self._stopping,), name="memfit-dispatcher")
        self._searching = threading.Thread(target=self.studies.serve, args=(self._stopping,), name="memfit-studies")
        self._keeping = threading.Thread(
            target=self.housekeeping.serve, args=(self._stopping,), name="memfit-housekeeping"
        )
        self._beating = threading.Thread(target=self._beat, name="memfit-beats")

    @property
    def port(self) -> int:
        """Where it listens, once it does."""
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://{self._name}:{self.port}"

    @property
    def _name(self) -> str:
        """Of the host, as it stands in addresses."""
        return f"[{self.host}]" if ":" in self.host else self.host

    def run(self, begun: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT. Runs go on, and the next service of the folder finds them.

        Args:
            begun: called once it listens.

        Raises:
            InputError: it cannot listen there.
        """
        import asyncio

        async def serve() -> None:
            serving = asyncio.create_task(self._listening())
            while not self._server.started and not serving.done():  # noqa: ASYNC110 - uvicorn tells it by a flag alone
                await asyncio.sleep(0.01)
            if self._server.started:
                begun()
            await serving

        self._dispatching.start()
        self._searching.start()
        self._keeping.start()
        self._beating.start()
        try:
            with (
                _outlived(signal.SIGTERM, signal.SIGINT),
                asyncio.Runner(loop_factory=http_server.loop_factory()) as runner,
            ):
                runner.run(serve())
        finally:
            self.close()

    async def _listening(self) -> None:
        try:
            await self._server.serve()
        except SystemExit:  # uvicorn's own way; what the system has said is in its log
            raise InputError(
                f"cannot listen at {self._name}:{self._server.config.port}, for the reason in the line above: --port 0 takes any port that is free"
            ) from None

    def _beat(self) -> None:
        """What runs on one of several hosts goes on as long as that host says that it lives."""
        if self.service.dispatcher.host is not None:
            self.service.dispatcher.host.serve(self._stopping)

    def stop(self) -> None:
        """Have `run` return, from another thread."""
        self.service.dispatcher.draining = True
        self._server.should_exit = True

    def stop_runs(self) -> None:
        """End what runs, once `run` has returned: for a demonstration, whose folder is thrown away."""
        from memfit.runner import Runner

        Runner(self.settings.own / "runner", self.settings.capacity).close(stop=True)

    def close(self) -> None:
        """Let go of the folder; what runs goes on."""
        self._stopping.set()
        for thread in (self._keeping, self._searching, self._dispatching, self._beating):
            if thread.is_alive():
                thread.join()
        self.service.dispatcher.close()
        self.store.close()

    def tell_local_clients(self) -> str:
        """Write down where it listens, with a new token for this user; the token."""
        tokens, file = Tokens(self.store), self.settings.own / ADDRESS
        if self.settings.host:  # the other hosts' are good still
            tokens.forget((_told(file) or {}).get("token", ""))
        else:
            tokens.take_back("local")
        token = tokens.make("local", "admin")
        waiting = file.with_suffix(".partial")
        waiting.unlink(missing_ok=True)
        with os.fdopen(os.open(waiting, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
            json.dump({"url": self.url, "token": token, "boot": guard.boot()}, stream)
        waiting.replace(file)
        return token


@contextmanager
def _outlived(*numbers: signal.Signals) -> Iterator[None]:
    """Signals that end the server do not end the process before it has let go of its folder: uvicorn raises them once more when it is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def local_address(folder: Path) -> dict[str, str] | None:
    """Where the service of a folder of this user listens on this computer, with a token; None where it has not been started."""
    hosts = [_told(each) for each in sorted(folder.glob(f"hosts/*/{ADDRESS}"))]
    return _told(folder / ADDRESS) or next((each for each in hosts if each and each.get("boot") == guard.boot()), None)


def _told(file: Path) -> dict[str, str] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


class JsonLines(logging.Formatter):
    """A line of JSON for each message."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "from": record.name,
        }
        if isinstance(record.args, RequestNote):
            told |= record.args
        else:
            told["message"] = record.getMessage()
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told)
