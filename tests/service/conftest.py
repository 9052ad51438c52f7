"""One service for each test that asks for it, without HTTP."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from memfit.service import confine, launching, uploads
from memfit.service.dispatcher import Dispatcher
from memfit.service.housekeeping import Housekeeping
from memfit.service.service import Service, Submission
from memfit.service.settings import ServiceSettings
from memfit.service.store import ServiceStore, StoredRun
from memfit.service.studies import Studies
from memfit.service.tokens import Caller
from service import small_runs

ANNA = Caller("anna", "submit")


@dataclass
class Serving:
    """A service that a test moves on by hand."""

    settings: ServiceSettings
    service: Service
    folder: Path
    studies: Studies
    housekeeping: Housekeeping

    def again(self, **changes: Any) -> Serving:
        """A service that is started anew on the same folder, after the first was let go of or killed."""
        self.studies.close()
        self.service.dispatcher.close()
        self.service.store.close()
        fresh = started(replace(self.settings, **changes), self.folder)
        self.settings, self.service = fresh.settings, fresh.service
        self.studies, self.housekeeping = fresh.studies, fresh.housekeeping
        return self

    def code(self, caller: Caller = ANNA) -> str:
        """Code that a caller has sent."""
        archive = self.folder / "code.zip"
        with archive.open("wb") as stream:
            uploads.packed(small_runs.code(self.folder / "code"), stream)
        return self.service.upload(caller, archive).digest

    def submit(
        self, caller: Caller = ANNA, *, key: str | None = None, plan_only: bool = False, name: str = "", **told: Any
    ) -> StoredRun:
        """A small run with its code."""
        sent = Submission(small_runs.run_file(**told), name=name, code=self.code(caller), key=key, plan_only=plan_only)
        return self.service.submit(caller, sent)[0]

    def until(self, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        """Look until something holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.service.dispatcher.host is not None:
                self.service.dispatcher.host.beat()
            self.service.dispatcher.look(0.1)
            states = [(run.number, run.state, run.reason) for run in self.service.store.listed(owner=None)]
            assert time.monotonic() < deadline, states

    def until_state(self, number: int, *states: str) -> StoredRun:
        """Look until a run is in one of these states."""
        self.until(lambda: self.service.store.run(number).state in states)
        return self.service.store.run(number)


def started(settings: ServiceSettings, folder: Path) -> Serving:
    store = ServiceStore(settings.folder, settings.store)
    try:
        service = Service(settings, store, Dispatcher(settings, store))
    except BaseException:
        store.close()
        raise
    return Serving(settings, service, folder, Studies(service), Housekeeping(service))


@pytest.fixture(scope="session", autouse=True)
def one_thread_for_each_run() -> Iterator[None]:
    """Tiny kernels on several threads spend their time waiting for each other; runs get this from the service's environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(autouse=True)
def costs_of_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a run has timed of this computer is there for the runs of later tests: each has a cache of its own, and filling it takes half of planning."""
    known = Path(os.environ["MEMFIT_CACHE_DIR"]) / "runs"
    write = launching.write

    def with_costs(settings: ServiceSettings, run: StoredRun) -> Path:
        folder = write(settings, run)
        if known.exists() and not (folder / "cache" / "costs").exists():
            shutil.copytree(known, folder / "cache" / "costs")
        return folder

    monkeypatch.setattr(launching, "write", with_costs)
    yield
    timed = next(tmp_path.glob("**/cache/costs"), None)
    if timed is not None and not known.exists():
        shutil.copytree(timed, tmp_path / "timed")
        known.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another worker was first
            (tmp_path / "timed").rename(known)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    opened: list[Serving] = []

    def made(**settings: Any) -> Serving:
        told = {
            "folder": tmp_path / "service",
            "capacity": {"cpu": 1 << 20},
            "cores": 8,
            "confined": confine.available(),
            **settings,
        }
        opened.append(started(ServiceSettings(**told), tmp_path))
        return opened[-1]

    yield made
    for each in opened:
        each.studies.close()
        each.service.dispatcher.runner.close()
        each.service.store.close()
