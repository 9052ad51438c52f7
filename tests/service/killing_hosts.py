"""Two hosts on one PostgreSQL database, their services, watchers and runs killed at random, one gone for a while: whether what is left tells the truth.

As `killing`, whose runs and judgement these are. The hosts are processes of one computer, with a part of the folder each, so whatever is run twice at a time is
noticed by the locks that runs take.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from memfit.runner import guard
from memfit.runner.runs import read_json
from memfit.service.dispatcher import Dispatcher
from memfit.service.hosts import MOVED
from memfit.service.service import Service, Submission
from memfit.service.settings import ServiceSettings
from memfit.service.states import OVER, RUNNING
from memfit.service.store import ServiceStore, StoredRun
from service import killing

HOSTS: Final = ("one", "two")
LEASE: Final = 3.0
OVER_FILE: Final = "over"  # once it is there, no service is needed any more


@dataclass
class Killed:
    """What was killed, and what is wrong with what is left; as `killing.Killed`.

    Attributes:
        runs: that were submitted.
        moved: runs that went on on the other host, after theirs was gone.
        ended_by_lease: attempts that were told to end as their host was gone.
        on: runs by the host that ended them.
    """

    runs: int
    kills: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    on: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    moved: int = 0
    ended_by_lease: int = 0
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    seconds: float = 0.0


def settings(folder: Path, url: str, host: str) -> ServiceSettings:
    """Of one host."""
    return replace(killing.settings(folder), store=url, host=host, lease_seconds=LEASE)


def run_file(number: int) -> dict[str, Any]:
    """The run that is submitted as number so and so: from a fifth of a second to six; one in ten fails by itself."""
    found = killing.run_file(number)
    found["model"]["args"] = {"large": False, "status": 3 if number % 10 == 7 else 0}
    found["fit"]["budget"] = killing.SMALL
    found["train"]["steps"] = 10 + 40 * (number % 8)
    return found


def serve(folder: Path, url: str, host: str, runs: int) -> None:
    """One life of a host's service; that of the second host has the client in the same process."""
    os.setsid()
    told = settings(folder, url, host)
    store = ServiceStore(told.folder, url)
    service = Service(told, store, Dispatcher(told, store))
    assert service.dispatcher.host is not None
    stopping = threading.Event()
    beating = threading.Thread(target=service.dispatcher.host.serve, args=(stopping,))
    beating.start()
    sent = 0 if host == HOSTS[1] else runs
    while not (folder / OVER_FILE).exists():
        if sent < runs:
            service.submit(killing.CLIENT, Submission(run_file(sent), name=f"job {sent}", key=str(sent)))
            sent += 1
            if sent == runs:
                (folder / "sent").touch()
        service.dispatcher.look(0.02)
    stopping.set()
    beating.join()
    service.dispatcher.close()
    store.close()


def killed_at_random(folder: Path, url: str, runs: int, seed: int, pause: float) -> Killed:
    """Work through runs, with kills in between.

    Args:
        folder: that is empty.
        url: of an empty database.
        runs: to submit.
        seed: of what is killed when.
        pause: seconds between two kills, on the mean.

    Returns:
        What was killed, and what came of it.
    """
    killing.write_plan(folder)
    found, draw, begun = Killed(runs), random.Random(seed), time.monotonic()
    killed: set[Path] = set()
    fork = multiprocessing.get_context("fork")
    lives: dict[str, Any] = {}
    gone_since: float | None = None
    while not (folder / OVER_FILE).exists():
        for host in HOSTS:
            if host == HOSTS[0] and gone_since is not None:
                continue
            life = lives.get(host)
            if life is not None and not life.is_alive() and life.exitcode != -signal.SIGKILL:
                raise RuntimeError(f"the service of host {host} ended with {life.exitcode}")
            if life is None or not life.is_alive():
                lives[host] = fork.Process(target=serve, args=(folder, url, host, runs))
                lives[host].start()
        time.sleep(draw.expovariate(1 / pause))
        # While one is gone the other one's service lives: it has to see for two leases that nothing is said.
        _kill_something(folder, found, draw, lives if gone_since is None else {}, killed)
        running, moved, over = _stand(folder, url)
        if (
            gone_since is None
            and running
            and not moved
            and time.monotonic() > begun + 4.0
            and lives[HOSTS[0]].is_alive()
        ):
            lives[HOSTS[0]].kill()
            lives[HOSTS[0]].join()
            found.kills["host"] += 1
            gone_since = time.monotonic()
        elif gone_since is not None and (moved or time.monotonic() > gone_since + 6 * LEASE):
            gone_since = (
                None  # it had something that moved; or what it had was over by then, and it will be gone once more
            )
        elif gone_since is None and over and (folder / "sent").exists():
            (folder / OVER_FILE).touch()
    for life in lives.values():
        life.join()
    found.seconds = time.monotonic() - begun
    _judge(folder, url, found, killed)
    return found


def _kill_something(folder: Path, found: Killed, draw: random.Random, lives: dict[str, Any], killed: set[Path]) -> None:
    kind = draw.choices(("service", "watcher", "run"), (1, 2, 2))[0]
    if kind == "service":
        life = lives.get(draw.choice(HOSTS))
        if life is not None and life.is_alive():
            life.kill()
            life.join()
            found.kills[kind] += 1
        return
    there = sorted(each for each in killing.processes(folder) if each[1] == kind)
    if there:
        pid, _, attempt = draw.choice(there)
        killed.add(attempt)  # first, as the kill may be noticed before it is written down
        if killing.kill(pid, str(folder)):
            found.kills[kind] += 1


def _stand(folder: Path, url: str) -> tuple[bool, bool, bool]:
    """Whether the first host has runs that run, whether any has moved, and whether all are over."""
    store = ServiceStore(folder / "service", url)
    try:
        live = store.live()
        moved = store.read("SELECT 1 FROM events WHERE kind=? LIMIT 1", (MOVED,))
        return any((run.state, run.host) == (RUNNING, HOSTS[0]) for run in live), bool(moved), not live
    finally:
        store.close()


def _judge(folder: Path, url: str, found: Killed, killed: set[Path]) -> None:
    store = ServiceStore(folder / "service", url)
    try:
        stored = {run.name: run for run in store.listed(owner=None, limit=10 * found.runs)}
        found.lost += [f"job {number}" for number in range(found.runs) if f"job {number}" not in stored]
        if len(store.listed(owner=None, limit=10 * found.runs)) > found.runs:
            found.twice.append("a submission became two runs")
        for number in range(found.runs):
            run = stored.get(f"job {number}")
            if run is not None:
                found.states[run.state] += 1
                found.on[run.host] += 1
                _judge_run(folder, found, killed, store, run, number)
    finally:
        store.close()
    deadline = time.monotonic() + 2 * LEASE  # what others had by then ends by its lease
    while list(killing.processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if list(killing.processes(folder)):
        found.unexplained.append(f"processes that are left: {list(killing.processes(folder))}")
    noticed = folder / "noticed"
    found.twice += noticed.read_text().splitlines() if noticed.exists() else []


def _judge_run(
    folder: Path, found: Killed, killed: set[Path], store: ServiceStore, run: StoredRun, number: int
) -> None:
    events = store.events(run.number)
    kinds = [event.kind for event in events]
    moves = kinds.count(MOVED)
    found.moved += moves
    if run.state not in OVER:
        found.lost.append(f"{run.name} is {run.state}")
    if not run.reason or kinds[0] != "planning" or kinds[-1] != run.state or kinds.count(run.state) != 1:
        found.unexplained.append(f"{run.name} is {run.state}: {run.reason!r}, {kinds}")
    # One that was killed before it had claimed its folder counts as lost, too.
    of_run = [attempt.parent.name for attempt in killed if attempt.parent.name.startswith(f"{run.number:06d}-")]
    faults = Counter("plan" if name.endswith("plan") else "train" for name in of_run)
    for attempt in sorted((folder / "service").glob(f"hosts/*/runner/runs/{run.number:06d}-*/[0-9]*")):
        if (read_json(attempt / guard.CLAIM) or {"void": True}).get("void"):
            continue  # it was written down and never began
        trains = not attempt.parent.name.endswith("plan")
        found.attempts += trains
        end = read_json(attempt / guard.END)
        by_itself = end is not None and end["status"] in {0, 3}
        by_lease = end is not None and end["reason"] == "lease"
        # Ended at once, when its host came back and found that others have the run.
        no_more_ours = end is not None and end["reason"] == "asked" and moves > 0
        found.ended_by_lease += by_lease
        if not (by_itself or by_lease or no_more_ours or attempt in killed):
            found.unexplained.append(f"{attempt} was not killed and ended with {end}")
    log = folder / "service" / "runs" / f"{run.number:06d}" / "out" / "log.jsonl"
    lines = [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []
    if run.state == "done" and lines != list(range(1, run_file(number)["train"]["steps"] + 1)):
        found.twice.append(f"{run.name} is done with the steps {lines}")
    wanted = {"failed"} if run_file(number)["model"]["args"]["status"] else {"done"}
    if faults["train"] > killing.settings(folder).restarts:
        wanted.add("failed")
    if faults["plan"] > 1:  # planning is started again once
        wanted.add("refused")
    if run.state not in wanted:
        found.unexplained.append(f"{run.name} is {run.state} ({run.reason}), and was to be {wanted}")


def main() -> None:
    """In a process that has no threads: `killing_hosts.py FOLDER URL RUNS SEED PAUSE`."""
    folder, url, runs, seed, pause = sys.argv[1:]
    found = killed_at_random(Path(folder), url, int(runs), int(seed), float(pause))
    sys.stdout.write(json.dumps(vars(found)))


if __name__ == "__main__":
    main()
