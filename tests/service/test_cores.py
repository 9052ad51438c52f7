"""Runs that the service trains on the processor share its cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.runner.cores import CORES, THREADS
from memfit.service import launching
from memfit.service.planned import Planned
from memfit.service.service import Service, Submission
from memfit.service.store import StoredRun
from service import killing


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Service]]:
    """A service whose runs take milliseconds, in an environment that says nothing of threads; it is moved on by hand."""
    monkeypatch.delenv(THREADS, raising=False)
    with killing.moved_by_hand(tmp_path) as made:
        yield made


def submitted(service: Service, *, budget: int = killing.SMALL, gate: Path | None = None, **fit: Any) -> int:
    config = killing.run_file(1)
    config["fit"].update(budget=budget, **fit)
    if gate is not None:
        config["model"]["args"]["gate"] = str(gate)
    return service.submit(killing.CLIENT, Submission(config))[0].number


def until(service: Service, *states: str) -> list[StoredRun]:
    """Look until every run is in one of these states, the first ones submitted first."""
    deadline = time.monotonic() + 60
    while True:
        found = service.store.listed(owner=None)[::-1]
        if all(run.state in states for run in found):
            return found
        assert time.monotonic() < deadline, [(run.number, run.state, run.reason) for run in found]
        service.dispatcher.look(0.02)


def threads(run: StoredRun) -> str | None:
    assert run.request is not None
    found: str | None = run.request["environment"].get(THREADS)
    return found


def test_as_many_runs_are_side_by_side_as_there_are_cores(served: Callable[..., Service], tmp_path: Path) -> None:
    service, gate = served(cores=3), tmp_path / "gate"
    for _ in range(5):
        submitted(service, gate=gate)
    until(service, "waiting", "running")
    for _ in range(3):
        service.dispatcher.look(0.1)
    runs = until(service, "waiting", "running")
    assert [run.state for run in runs] == ["running"] * 3 + ["waiting"] * 2
    assert service.dispatcher.runner.ledger.used(CORES) == 3
    told = service.described(runs[3])
    assert told["reason"] == "needs 1 of the processor's cores, and no core is free"
    assert told["expected_start"] > time.time()
    gate.touch()
    assert {run.state for run in until(service, "done", "failed", "refused")} == {"done"}
    assert [each["name"] for each in service.devices(killing.CLIENT)] == ["cpu"], "cores are no device"


@pytest.mark.parametrize(
    ("cores", "budget", "wanted"),
    [
        (64, killing.SMALL, "6"),  # ten fit
        (8, killing.SMALL, "1"),  # ten fit, and are more than there are cores
        (64, killing.CAPACITY // 3, "21"),
        (64, killing.LARGE, None),  # no other like it fits beside it: it has all
        (1, killing.SMALL, None),
    ],
)
def test_a_run_has_its_part_of_the_cores_beside_as_many_like_it_as_fit(
    served: Callable[..., Service], cores: int, budget: int, wanted: str | None
) -> None:
    service = served(cores=cores)
    submitted(service, budget=budget)
    (run,) = until(service, "done", "failed", "refused")
    assert run.state == "done"
    assert threads(run) == wanted
    planning = launching.planning(service.settings, run)
    assert planning.environment.get(THREADS) == wanted, "what is measured for the plan is measured so, too"


def test_ranks_of_a_run_share_its_part(served: Callable[..., Service]) -> None:
    service = served(cores=64)
    submitted(service, budget=killing.CAPACITY // 8, devices=2)  # four like it fit
    submitted(service, budget=killing.CAPACITY // 8, devices=2)
    runs = until(service, "done", "failed", "refused")
    assert [(run.state, threads(run)) for run in runs] == [("done", "8")] * 2
    assert runs[0].request is not None
    assert runs[0].request["peak_bytes"][CORES] == 2
    assert launching.planning(service.settings, runs[0]).environment[THREADS] == "8"


def test_more_ranks_than_cores_take_all_of_them(served: Callable[..., Service]) -> None:
    service = served(cores=2)
    submitted(service, budget=killing.CAPACITY // 8, devices=4)
    (run,) = until(service, "done", "failed", "refused")
    assert run.state == "done"
    assert run.request is not None
    assert run.request["peak_bytes"] == {CORES: 2}


def test_a_run_on_gpus_takes_no_core_of_the_account(served: Callable[..., Service]) -> None:
    service = served(cores=1, capacity={"cuda:0": killing.CAPACITY, "cpu": killing.CAPACITY})
    submitted(service, device="cuda")
    (run,) = until(service, "done", "failed", "refused")
    assert run.state == "done"
    assert run.request is not None
    assert (threads(run), run.request["peak_bytes"]) == (None, {})


def test_threads_that_the_services_environment_sets_are_every_runs(
    served: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THREADS, "5")
    service = served(cores=8)
    submitted(service)
    (run,) = until(service, "done", "failed", "refused")
    assert threads(run) == "5"


def test_a_run_goes_on_with_the_threads_that_it_began_with(
    served: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = served(cores=64)
    submitted(service)
    submitted(service, budget=killing.LARGE)
    shared, alone = until(service, "done", "failed", "refused")
    for cores in (1, 8, 64):
        settings = replace(service.settings, cores=cores)
        for run, wanted in ((shared, "6"), (alone, None)):
            again = launching.training(settings, run, Planned.from_json(run.plan or {}), 2)
            assert again.environment.get(THREADS) == wanted
    monkeypatch.setenv(THREADS, "5")
    assert (
        launching.training(service.settings, shared, Planned.from_json(shared.plan or {}), 2).environment[THREADS]
        == "6"
    )
