"""A service, its watchers and its runs are killed at random moments: no run is lost or run twice, and every end has its reason. Runs take milliseconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.service.client import Client
from memfit.service.serving import local_address
from memfit.service.store import ServiceStore
from memfit.service.tokens import Tokens
from service import killing


def environment() -> dict[str, str]:
    """In which a script finds this package."""
    paths = [str(Path(__file__).parent.parent), str(Path(memfit.__file__).parent.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def killed(folder: Path, runs: int, seed: int, pause: float) -> killing.Killed:
    command = [sys.executable, "-m", "service.killing", str(folder), str(runs), str(seed), str(pause)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return killing.Killed(**{**told, "kills": Counter(told["kills"]), "states": Counter(told["states"])})


def check(found: killing.Killed) -> None:
    assert (found.lost, found.twice, found.together, found.unexplained) == ([], [], 0, [])
    assert found.states.total() == found.runs
    assert set(found.kills) == {"service", "watcher", "run"}


def test_runs_outlive_kills_of_service_watchers_and_processes(tmp_path: Path) -> None:
    check(killed(tmp_path, runs=12, seed=2, pause=0.25))


@pytest.mark.slow  # half an hour of processes
def test_a_thousand_runs_outlive_kills_of_service_watchers_and_processes(tmp_path: Path) -> None:
    check(killed(tmp_path, runs=1000, seed=time.time_ns(), pause=0.4))


def served(folder: Path, port: int) -> subprocess.Popen[bytes]:
    (folder / "service" / "address.json").unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cheap_service", str(folder), str(port)],
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while local_address(folder / "service") is None:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_twenty_runs_do_not_notice_an_upgrade_in_their_middle(tmp_path: Path) -> None:
    killing.write_plan(tmp_path)
    service, gate = served(tmp_path, 0), tmp_path / "gate"
    here = local_address(tmp_path / "service") or {}
    port = int(here["url"].rpartition(":")[2])
    told: dict[int, list[tuple[str, dict[str, Any]]]] = {}

    def watched(number: int, token: str) -> None:
        with Client(here["url"], token) as client:
            told[number] = list(client.stream(number))

    with Client(here["url"], here["token"]) as client:
        # The service gives its local clients a new token with each start.
        store = ServiceStore(tmp_path / "service")
        own = Tokens(store).make("ben", "admin")
        store.close()
        config = killing.run_file(1)
        config["model"]["args"]["gate"] = str(gate)
        config["fit"]["budget"] = killing.CAPACITY // 20
        numbers = [client.submit(config, key=str(n))["run"] for n in range(20)]
        watching = threading.Thread(target=watched, args=(numbers[0], own))
        watching.start()
        while Counter(run["state"] for run in client.runs()) != {"running": 20}:
            time.sleep(0.05)
    service.terminate()
    assert service.wait(30) == 0
    service = served(tmp_path, port)
    try:
        gate.touch()
        with Client(here["url"], own) as client:
            ended = [client.wait(number) for number in numbers]
            kinds = [[event["kind"] for event in client.run(number)["events"]] for number in numbers]
        watching.join(60)
    finally:
        service.terminate()
        assert service.wait(30) == 0
    assert [run["state"] for run in ended] == ["done"] * 20
    assert kinds == [["planning", "waiting", "running", "done"]] * 20
    for number in numbers:  # one process each, from the beginning to the end
        assert [each.name for each in (tmp_path / "service" / "runner" / "runs" / f"{number:06d}-1").iterdir()] == ["1"]
    assert not (tmp_path / "noticed").exists()
    # Somebody who watches is told everything once.
    steps = [content["step"] for kind, content in told[numbers[0]] if kind == "metrics"]
    assert steps == list(range(1, config["train"]["steps"] + 1))
