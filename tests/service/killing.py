"""A service, its watchers and its runs, killed at random moments while it works through many runs; and whether what is left of it tells the truth.

Runs are `cheap_program`'s. The service is forked from one process that has imported it, so that it is there again within milliseconds. What was killed is
written down, and each end is held against that.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from memfit.runner import guard
from memfit.runner.runs import read_json
from memfit.service.dispatcher import Dispatcher
from memfit.service.service import Service, Submission
from memfit.service.settings import ServiceSettings
from memfit.service.store import ServiceStore, StoredRun
from memfit.service.tokens import Caller
from memfit.techniques.choices import Choices
from memfit.values.plan import Plan
from memfit.values.prediction import Prediction
from memfit.values.script import Script
from service import cheap_program

CAPACITY: Final = 100 << 20
LARGE, SMALL = CAPACITY * 6 // 10, CAPACITY // 10
CLIENT: Final = Caller("anna", "submit")
_AHEAD: Final = 40  # runs that the client has submitted and that are not over


@dataclass
class Killed:
    """What was killed, and what is wrong with what is left.

    Attributes:
        runs: that were submitted.
        kills: by what was killed: "service", "watcher" or "run".
        states: of the runs, at their end.
        attempts: of all runs, to train.
        lost: runs that were submitted and are not there, or are not over.
        twice: runs with work that was done twice, or by two processes at a time.
        together: how often two of 60 % were running at the same time.
        unexplained: ends that are not what the program did, what was asked, or what was killed.
        seconds: in all.
    """

    runs: int
    kills: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    together: int = 0
    unexplained: list[str] = field(default_factory=list)
    seconds: float = 0.0


def settings(folder: Path) -> ServiceSettings:
    """Of a service whose runs are cheap."""
    program = (sys.executable, "-I", "-S", cheap_program.__file__, str(folder))
    return ServiceSettings(
        folder / "service",
        {"cpu": CAPACITY},
        modules=("net",),
        confined=False,
        planning_at_once=3,
        grace_seconds=5.0,
        program=program,
        cores=64,
    )


@contextmanager
def moved_by_hand(folder: Path) -> Iterator[Callable[..., Service]]:
    """Opens services with their dispatchers, none of which moves by itself, and closes them after the block; they are called with settings that are others."""
    write_plan(folder)
    opened: list[Service] = []

    def made(**told: Any) -> Service:
        own = replace(settings(folder), **told)
        store = ServiceStore(own.folder)
        try:
            opened.append(Service(own, store, Dispatcher(own, store)))
        except BaseException:
            store.close()
            raise
        return opened[-1]

    yield made
    for each in opened:
        each.dispatcher.runner.close()
        each.store.close()


def run_file(number: int) -> dict[str, Any]:
    """The run that is submitted as number so and so: one in three takes 60 %, one in forty fails by itself."""
    about = {"large": number % 3 == 0, "status": 3 if number % 40 == 7 else 0}
    return {
        "model": {"python": "net:build", "args": about},
        "data": {"python": "net:data"},
        "fit": {"budget": LARGE if about["large"] else SMALL, "device": "cpu"},
        "train": {"steps": 10 + 10 * (number % 8)},
    }


def is_cancelled(number: int) -> bool:
    """Whether its owner thinks better of it."""
    return number % 25 == 11


def serve(folder: Path, runs: int) -> None:
    """One life of the service, with its client in the same process, which submits all that it has no answer for."""
    os.setsid()
    told = settings(folder)
    store = ServiceStore(told.folder)
    service = Service(told, store, Dispatcher(told, store))
    answered = folder / "answered"
    sent = int(answered.read_text() or 0) if answered.exists() else 0
    while sent < runs or store.live():
        while sent < runs and len(store.live()) < _AHEAD:
            run, _ = service.submit(CLIENT, Submission(run_file(sent), name=f"job {sent}", key=str(sent)))
            if is_cancelled(sent):
                service.cancel(CLIENT, run.number)
            sent += 1
            waiting = folder / "answered.new"
            waiting.write_text(str(sent))
            waiting.rename(answered)
        service.dispatcher.look(0.02)
    service.dispatcher.close()
    store.close()


def processes(folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Watchers, those that watch them, and runs: process, "watcher", "second" or "run", and the folder of the attempt that it is of."""
    parents: dict[int, int] = {}
    watchers: dict[int, Path] = {}
    runs: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace").split("\0")
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if guard.__file__ in words and str(folder) in words[4]:
            watchers[int(name)] = Path(words[4])
        elif cheap_program.__file__ in words and str(folder) in words:
            runs.append(int(name))
    for pid, attempt in watchers.items():
        yield pid, "second" if parents.get(pid) in watchers else "watcher", attempt
    for pid in runs:
        above = parents.get(pid, 0)
        of = watchers.get(above) or watchers.get(parents.get(above, 0))
        if of is not None:
            yield pid, "run", of


def kill(pid: int, word: str) -> bool:
    """Kill a process, if it is still the one that was meant."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if word not in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def write_plan(folder: Path) -> None:
    """The plan that each run gets, with the bytes of its run file."""
    prediction = Prediction(
        1, 1, cheap_program.STEP_SECONDS, cheap_program.STEP_SECONDS, cheap_program.STEP_SECONDS, "measured"
    )
    plan = Plan(1, Choices(1, 1), Script(), prediction, "signature", "net", "cpu", "none", None, (), (), ())
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))


def killed_at_random(folder: Path, runs: int, seed: int, pause: float) -> Killed:
    """Work through runs, with kills in between.

    Args:
        folder: that is empty.
        runs: to submit.
        seed: of what is killed when.
        pause: seconds between two kills, on the mean.

    Returns:
        What was killed, and what came of it.
    """
    write_plan(folder)
    found, draw, begun = Killed(runs), random.Random(seed), time.monotonic()
    killed: dict[tuple[str, int], str] = {}  # by attempt
    fork = multiprocessing.get_context("fork")
    life = fork.Process(target=serve, args=(folder, runs))
    life.start()
    while life.is_alive() or life.exitcode != 0:
        if not life.is_alive():
            if life.exitcode != -signal.SIGKILL:
                raise RuntimeError(f"the service ended with {life.exitcode}")
            life = fork.Process(target=serve, args=(folder, runs))
            life.start()
        life.join(draw.expovariate(1 / pause))
        kind = draw.choices(("service", "watcher", "run"), (1, 2, 2))[0]
        if kind == "service":
            if life.is_alive():
                life.kill()
                life.join()
                found.kills[kind] += 1
            continue
        there = sorted(each for each in processes(folder) if each[1] == kind)
        if there:
            pid, _, attempt = draw.choice(there)
            killed.setdefault(
                (attempt.parent.name, int(attempt.name)), kind
            )  # first, as the kill may be noticed before it is written down
            if kill(pid, str(folder)):
                found.kills[kind] += 1
    found.seconds = time.monotonic() - begun
    _judge(folder, found, killed)
    return found


def _judge(folder: Path, found: Killed, killed: Mapping[tuple[str, int], str]) -> None:
    told = settings(folder)
    store = ServiceStore(told.folder)
    dispatcher = Dispatcher(told, store)
    try:
        stored = {run.name: run for run in store.listed(owner=None, limit=10 * found.runs)}
        found.lost += [f"job {number}" for number in range(found.runs) if f"job {number}" not in stored]
        if len(stored) != len(store.listed(owner=None, limit=10 * found.runs)) or len(stored) > found.runs:
            found.twice.append("a submission became two runs")
        for number in range(found.runs):
            run = stored.get(f"job {number}")
            if run is not None:
                found.states[run.state] += 1
                _judge_run(folder, found, killed, dispatcher, run, number)
        if list(processes(folder)):
            found.unexplained.append(f"processes that are left: {list(processes(folder))}")
    finally:
        dispatcher.close()
        store.close()
    noticed = folder / "noticed"
    for line in noticed.read_text().splitlines() if noticed.exists() else ():
        if "twice" in line:
            found.twice.append(line)
        else:
            found.together += 1


def _judge_run(
    folder: Path,
    found: Killed,
    killed: Mapping[tuple[str, int], str],
    dispatcher: Dispatcher,
    run: StoredRun,
    number: int,
) -> None:
    events = [event.kind for event in dispatcher.store.events(run.number)]
    attempts: dict[tuple[str, int], dict[str, Any] | None] = {}
    for part in ("plan", "1"):
        name = f"{run.number:06d}-{part}"
        for place in (folder / "service" / "runner" / "runs" / name).glob("*"):
            # One that was written down and never began, as the service was killed in between, is none.
            if not (read_json(place / guard.CLAIM) or {"void": True}).get("void"):
                attempts[name, int(place.name)] = read_json(place / guard.END)
    trained = {attempt: end for attempt, end in attempts.items() if not attempt[0].endswith("plan")}
    found.attempts += len(trained)
    if run.state not in {"done", "failed", "cancelled", "refused"}:
        found.lost.append(f"{run.name} is {run.state}")
    if not run.reason or events[0] != "planning" or events[-1] != run.state or events.count(run.state) != 1:
        found.unexplained.append(f"{run.name} is {run.state}: {run.reason!r}, {events}")
    # An end that the run has not chosen is one that somebody caused.
    for attempt, end in attempts.items():
        by_itself = end is not None and end["status"] in {0, 3}
        asked = end is not None and end["reason"] == "asked" and is_cancelled(number)
        if not by_itself and not asked and attempt not in killed:
            found.unexplained.append(f"{attempt} was not killed and ended with {end}")
    finished = [attempt for attempt, end in trained.items() if end is not None and end["status"] in {0, 3}]
    if finished and max(trained) != finished[0]:
        found.twice.append(f"{run.name} had ended as {finished[0]} and was started again as {max(trained)}")
    log = folder / "service" / "runs" / f"{run.number:06d}" / "out" / "log.jsonl"
    lines = [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []
    whole = list(range(1, run_file(number)["train"]["steps"] + 1))
    if run.state == "done" and lines != whole:
        found.twice.append(f"{run.name} is done with the steps {lines}")
    # What its end is to be, from what was done to it.
    faults = sum(name == f"{run.number:06d}-1" for name, _ in killed)
    status = run_file(number)["model"]["args"]["status"]
    wanted = {"cancelled"} if is_cancelled(number) and run.state == "cancelled" else {"failed"} if status else {"done"}
    if faults > dispatcher.settings.restarts:
        wanted.add("failed")
    if sum(name == f"{run.number:06d}-plan" for name, _ in killed) > 1:  # planning is started again once
        wanted.add("refused")
    if run.state not in wanted:
        found.unexplained.append(f"{run.name} is {run.state} ({run.reason}), and was to be {wanted}")


def main() -> None:
    """In a process that has no threads: `killing.py FOLDER RUNS SEED PAUSE`."""
    folder, runs, seed, pause = sys.argv[1:]
    found = killed_at_random(Path(folder), int(runs), int(seed), float(pause))
    sys.stdout.write(json.dumps(vars(found)))


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
