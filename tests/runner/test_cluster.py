"""Runs on the machines of a real Ray cluster, several of them on this computer: placed by their bytes, and told whole when a machine is lost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.runner import RunRequest
from memfit.runner.cluster import ClusterLedger, ClusterRunner
from memfit.tune.results import results
from memfit.tune.tuning import Tuning
from runner import ray_machines, waiting
from runner.ray_machines import MIB, machine
from tune import searches

until_over = partial(waiting.until_over, seconds=600.0)  # Ray is slow to start what it runs


def request(name: str, code: str, mib: int, **named: Any) -> RunRequest:
    return RunRequest(name, (sys.executable, "-S", "-c", code), rank_bytes=(mib * MIB,), **named)


def test_a_machine_has_to_hold_the_whole_run() -> None:
    ledger = ClusterLedger({"aaaa": {"cuda": 8 * MIB, "host": 100 * MIB}, "bbbb": {"cuda": 16 * MIB, "host": 10 * MIB}})
    ledger.check(RunRequest("run", (), rank_bytes=(16 * MIB,), device="cuda", peak_bytes={"host": 9 * MIB, "disk": 5}))
    with pytest.raises(
        InputError,
        match="run needs 16.0 MiB on cuda, 11.0 MiB on host, and the machines of the cluster have 8.00 MiB on cuda:aaaa, .*: it could never start",
    ):
        ledger.check(RunRequest("run", (), rank_bytes=(15 * MIB + 1,), device="cuda", peak_bytes={"host": 11 * MIB}))
    with pytest.raises(InputError, match="run has 2 ranks, and on a cluster a run has one: leave the cluster out"):
        ledger.check(RunRequest("run", (), rank_bytes=(1, 1), device="cuda"))
    with pytest.raises(InputError, match="have told no bytes: it could never start"):
        ClusterLedger({}).check(RunRequest("run", (), rank_bytes=(1,)))


def test_without_a_cluster_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="a cluster needs Ray: pip install 'memfit.ray.'"):
        ClusterRunner(tmp_path)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with ray_machines.cluster_of_a_head(monkeypatch) as made:
        yield made


def until(runner: ClusterRunner, condition: Callable[[], bool], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        runner.poll(0.1)
        assert time.monotonic() < deadline, f"{runner.running}, {runner.waiting}"


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_run_on_a_cluster_prints_ends_and_gives_its_bytes_back(cluster: Any, tmp_path: Path) -> None:
    machine(cluster, 100)
    with ClusterRunner(tmp_path) as runner:
        with pytest.raises(
            InputError, match="big needs 101 MiB on cpu, and the machines of the cluster have 100 MiB on"
        ):
            runner.submit(request("big", "", 101))
        runner.submit(request("first", "import time; print('x=1', flush=True); time.sleep(600)", 60, grace_seconds=1.0))
        until(runner, lambda: runner.running == ("first",) and bool(runner.stdout("first").exists()))
        (name,) = runner.ledger.capacity
        assert runner.ledger.used(name) == 60 * MIB
        runner.submit(request("second", "raise SystemExit(7)", 60))
        runner.poll(1.0)
        assert runner.waiting == ("second",)
        runner.stop("first")
        ends = until_over(runner, "first", "second")
        assert (ends["first"].kind, ends["first"].reason) == ("stopped", "asked")
        assert (ends["second"].kind, ends["second"].status) == ("failed", 7)
        assert runner.stdout("first").read_text() == "x=1\n"
        assert runner.ledger.used(name) == 0
        # A process of this name that is gone: what it ran begins again, once.
        runner.submit(
            request("third", f"import time; open({str(tmp_path / 'log')!r}, 'a').write('x'); time.sleep(1)", 60)
        )
        until(runner, (tmp_path / "log").exists)
    with ClusterRunner(tmp_path) as again:
        assert until_over(again, "third")["third"].attempts == 2
    assert (tmp_path / "log").read_text() == "xx"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_machine_that_is_lost_loses_no_run(cluster: Any, tmp_path: Path) -> None:
    """Two machines, six runs, one machine killed in the middle: each run ends once, and never do two run where one fits."""
    machine(cluster, 100)
    second = machine(cluster, 100)
    code = "import os, time; p = os.environ['LOG']; open(p, 'a').write('x'); time.sleep(3); print('value=1')"
    names = [f"run-{number}" for number in range(6)]
    with ClusterRunner(tmp_path / "runner") as runner:
        for name in names:
            runner.submit(request(name, code, 60, environment={"LOG": str(tmp_path / name)}, restarts=1))
        until(runner, lambda: len(runner.running) == 2)
        assert sorted(runner.ledger.used(name) for name in runner.ledger.capacity) == [60 * MIB, 60 * MIB]
        before = dict.fromkeys(runner.running)
        until(runner, lambda: all((tmp_path / name).exists() for name in before))
        cluster.remove_node(second, allow_graceful=False)
        ends = until_over(runner, *names)
    assert {end.kind for end in ends.values()} == {"done"}
    # That of the lost machine began twice; more attempts may have been handed to it before Ray had noticed.
    assert sorted(len((tmp_path / name).read_text()) for name in names) == [1, 1, 1, 1, 1, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_study_on_two_machines_of_which_one_is_lost_has_all_trials(cluster: Any, tmp_path: Path) -> None:
    machine(cluster, 100)
    second = machine(cluster, 100)
    lost = tmp_path / "lost"  # the first trials wait for it, so that both machines have one
    code = (
        f"import os, sys, time; x, y = map(float, sys.argv[1:])\nwhile not os.path.exists({str(lost)!r}): time.sleep(0.1)\n"
        "time.sleep(1); print(f'value={x + y!r}')"
    )
    search = searches.command(tmp_path, code, trials=8, at_once=2, sampler="random", memory="60MiB", cluster="auto")
    tuning = Tuning(search)
    removed = False
    try:
        while tuning.step(0.1):
            if not removed and len(tuning.runner.running) == 2:
                cluster.remove_node(second, allow_graceful=False)
                lost.touch()
                removed = True
        found = results(search, tuning.study, tuning.launched)
    finally:
        tuning.close()
    assert removed
    assert (len(found.rows), found.count("done"), found.launched) == (8, 8, 8)
    assert all(row.values == (row.params["x"] + row.params["y"],) for row in found.rows)
    again = [each for each in (search.out / "runner" / "runs").iterdir() if (each / "2").exists()]
    assert again
