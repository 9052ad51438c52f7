"""The service is killed with runs going on, its disk fills, its store is damaged: no run is lost, none is run twice, and nothing is half done."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.service.client import Client
from memfit.service.database import NAME, SqliteDatabase
from memfit.service.serving import local_address
from memfit.service.store import ServiceStore
from service import small_runs
from service.command import started
from service.conftest import ANNA, Serving


@pytest.mark.slow  # a dozen processes that import torch
def test_a_service_that_is_killed_again_and_again_loses_no_run_and_runs_none_twice(tmp_path: Path) -> None:
    folder = tmp_path / "service"
    service = started(folder, "--capacity", "64MiB")
    here = local_address(folder) or {}
    with Client(here["url"], here["token"]) as asking:
        code = asking.upload(small_runs.code(tmp_path / "code"))
        numbers = [
            asking.submit(small_runs.run_file(steps=60, slow=0.1), code=code, key=str(n))["run"] for n in range(4)
        ]
    for pause in (0.5, 8.0, 3.0, 5.0):
        time.sleep(pause)
        os.kill(service.pid, signal.SIGKILL)
        service.wait()
        service = started(folder, "--capacity", "64MiB")
    here = local_address(folder) or {}
    try:
        with Client(here["url"], here["token"]) as asking:
            again = [
                asking.submit(small_runs.run_file(steps=60, slow=0.1), code=code, key=str(n))["run"] for n in range(4)
            ]
            assert again == numbers
            ended = [asking.wait(number) for number in numbers]
            assert [run["state"] for run in ended] == ["done"] * 4
            assert len(asking.runs()) == 4
            for number in numbers:
                kinds = [event["kind"] for event in asking.run(number)["events"]]
                assert kinds == ["planning", "waiting", "running", "done"]
                asking.fetch(number, tmp_path / str(number), "log.jsonl")
                lines = (tmp_path / str(number) / "log.jsonl").read_text().splitlines()
                assert [json.loads(line)["step"] for line in lines] == list(range(1, 61))
                # One attempt each: the service's death is no reason to begin anew.
                assert [each.name for each in (folder / "runner" / "runs" / f"{number:06d}-1").iterdir()] == ["1"]
    finally:
        service.terminate()
        assert service.wait(30) == 0


def commands() -> Iterator[tuple[int, list[str]]]:
    """Processes and the words of their commands."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield int(name), Path(f"/proc/{name}/cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue


@pytest.mark.slow  # as above
def test_a_run_that_is_killed_goes_on_from_its_snapshot(tmp_path: Path, serve: Callable[..., Serving]) -> None:
    serving = serve()
    number = serving.submit(steps=40, slow=0.1).number
    progress = serving.service.dispatcher
    serving.until(lambda: bool((p := progress.view.progress.get(number)) and p.step >= 5))
    own = (f"runs/{number:06d}/run.json", str(tmp_path))
    victims = [pid for pid, words in commands() if "train" in words and any(all(o in w for o in own) for w in words)]
    assert victims
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    run = serving.until_state(number, "done", "failed")
    assert run.state == "done"
    end = progress.runner.end_of(f"{number:06d}-1")
    assert end is not None
    assert end.attempts == 2
    with serving.service.artifact(ANNA, number, "log.jsonl") as stream:
        assert [json.loads(line)["step"] for line in stream] == list(range(1, 41))


def test_a_full_disk_leaves_what_was_there_and_goes_on_when_there_is_space(serve: Callable[..., Serving]) -> None:
    serving = serve()
    store = serving.service.store
    first = serving.submit()
    assert isinstance(store.database, SqliteDatabase)
    (pages,) = store.database.connection.execute("PRAGMA page_count").fetchone()
    store.database.connection.execute(f"PRAGMA max_page_count={pages}")  # what a full disk is to SQLite
    with pytest.raises(InputError, match="what it held before is intact: free space, then start again"):
        for _ in range(500):
            store.change(first.number, "planning", "a long reason " * 100)
    events = store.events(first.number)
    assert store.run(first.number) == first
    store.database.connection.execute("PRAGMA max_page_count=1000000")
    store.change(first.number, "planning", "there is space")
    assert store.events(first.number)[:-1] == events
    assert serving.submit(steps=7).number == first.number + 1


def test_a_damaged_store_is_told_and_left_as_it_is_and_a_copy_can_be_put_back(
    tmp_path: Path, serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve()
    serving.submit()
    serving.service.store.backup(tmp_path / "copy.sqlite")
    copied = sqlite3.connect(tmp_path / "copy.sqlite")
    assert copied.execute("SELECT COUNT(*) FROM runs").fetchone() == (1,)
    copied.close()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    content = bytearray((tmp_path / "copy.sqlite").read_bytes())
    content[:100] = b"\xff" * 100
    (damaged / NAME).write_bytes(content)
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def noted(*arguments: Any, **named: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    with pytest.raises(InputError, match="is damaged"):
        ServiceStore(damaged)
    (left,) = opened
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        left.execute("SELECT 1")
    assert (damaged / NAME).read_bytes() == bytes(content)


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    ServiceStore(tmp_path).close()
    other = sqlite3.connect(tmp_path / NAME)
    other.execute("PRAGMA user_version=99")
    other.close()
    with pytest.raises(InputError, match="is of version 99 and this memfit reads 3"):
        ServiceStore(tmp_path)


def test_a_store_of_the_version_before_is_brought_up_to_date(serve: Callable[..., Serving]) -> None:
    serving = serve()
    before = serving.submit()
    with serving.service.store.writing() as connection:  # what the version before did not have
        connection.execute("DROP TABLE studies")
        connection.execute("DROP TABLE hosts")
        connection.execute("DROP INDEX runs_by_study")
        for column in ("study", "disk_bytes", "removed", "host"):
            connection.execute(f"ALTER TABLE runs DROP COLUMN {column}")
        connection.execute("PRAGMA user_version=1")
    serving.again()
    assert serving.service.store.run(before.number) == before
    assert serving.studies.store.listed(owner=None) == []


def test_a_store_without_hosts_is_brought_up_to_date(serve: Callable[..., Serving]) -> None:
    serving = serve()
    before = serving.submit()
    with serving.service.store.writing() as connection:  # what version 2 did not have
        connection.execute("DROP TABLE hosts")
        for table in ("runs", "studies"):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN host")
        connection.execute("PRAGMA user_version=2")
    serving.again()
    assert serving.service.store.run(before.number) == before
    assert serving.studies.store.listed(owner=None) == []


def test_one_service_has_a_folder(serve: Callable[..., Serving]) -> None:
    serving = serve()
    with pytest.raises(InputError, match="another process runs what is in"):
        serve(folder=serving.settings.folder)


def test_reading_a_run_file_and_serving_need_no_torch() -> None:
    code = "import sys, memfit.service.serving, memfit.service.client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
