"""A service whose runs are on the machines of a real Ray cluster, several of them on this computer: none is lost or run twice, whatever ends in the middle."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.cli.main import main
from memfit.errors import InputError
from memfit.runner import guard
from memfit.runner.machines import Machines
from memfit.runner.runs import read_json
from memfit.service import confine, launching
from memfit.service.client import Client
from memfit.service.dispatcher import Dispatcher
from memfit.service.hosts import MOVED
from memfit.service.planned import Planned
from memfit.service.service import Service, Submission
from memfit.service.serving import local_address
from memfit.service.settings import ServiceSettings
from memfit.service.store import ServiceStore
from runner import ray_machines
from runner.ray_machines import MIB, machine
from service import command, conftest, killing, small_runs

LEASE = 8.0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with ray_machines.cluster_of_a_head(monkeypatch) as made:
        yield made


class Served:
    """A service of a cluster that is moved on by hand, and its lives."""

    def __init__(self, folder: Path) -> None:
        killing.write_plan(folder)
        self.folder = folder
        self.service = self._begun()

    def _begun(self) -> Service:
        settings = replace(
            killing.settings(self.folder), capacity=Machines(), cluster="auto", lease_seconds=LEASE, planning_at_once=1
        )
        store = ServiceStore(settings.folder)
        try:
            return Service(settings, store, Dispatcher(settings, store))
        except BaseException:
            store.close()
            raise

    def again(self) -> None:
        """The service ends, and another begins."""
        self.close()
        self.service = self._begun()

    def close(self) -> None:
        """Let go of the folder; what runs goes on."""
        self.service.dispatcher.close()
        self.service.store.close()

    def submit(self, mib: int, steps: int, gate: Path | None = None) -> int:
        """A run that takes so many steps, the second half of them once there is a file."""
        config: dict[str, Any] = killing.run_file(1)
        config["fit"] = {"budget": mib * MIB, "device": "cpu"}
        config["model"]["args"] = {"large": False, "status": 0, **({} if gate is None else {"gate": str(gate)})}
        config["train"]["steps"] = steps
        return self.service.submit(killing.CLIENT, Submission(config))[0].number

    def until(self, condition: Callable[[], object], seconds: float = 300.0) -> None:
        """Look until something holds; no byte is promised twice meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.service.dispatcher.look(0.1)
            ledger = self.service.dispatcher.runner.ledger
            assert all(ledger.used(name) <= size for name, size in ledger.capacity.items())
            told = [(run.number, run.state, run.reason) for run in self.service.store.listed(owner=None)]
            assert time.monotonic() < deadline, told

    def states(self, *numbers: int) -> list[str]:
        """Of runs."""
        return [self.service.store.run(number).state for number in numbers]

    def steps(self, number: int) -> list[int]:
        """That a run has taken."""
        log = launching.folder_of(self.service.settings, number) / "out" / "log.jsonl"
        return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []

    def device(self, number: int) -> str:
        """Where a run is."""
        run = self.service.store.run(number)
        return "".join(self.service.dispatcher.runner.ledger.devices(launching.name_of(number, run.part)))

    def claims(self, number: int) -> list[dict[str, Any]]:
        """What the watcher of each attempt of a run has said of itself when it began."""
        attempts = launching.outputs_of(self.service.settings, f"{number:06d}-[1-9]*")
        return [found for each in sorted(attempts) if (found := read_json(each / guard.CLAIM)) is not None]

    def kinds(self, number: int) -> list[str]:
        """Of events of a run."""
        return [event.kind for event in self.service.store.events(number)]


@pytest.fixture
def served(cluster: Any, tmp_path: Path) -> Iterator[Callable[[], Served]]:
    opened: list[Served] = []

    def made() -> Served:
        opened.append(Served(tmp_path))
        return opened[0]

    yield made
    for each in opened:
        each.service.dispatcher.runner.close(stop=True)
        each.service.dispatcher.planner.close()
        each.service.store.close()
    assert not (tmp_path / "noticed").exists(), (tmp_path / "noticed").read_text()


def actors() -> list[str]:
    """Names of those that are there."""
    import ray

    return [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if "memfit-" in each["namespace"]]


def until_no_actors() -> None:
    deadline = time.monotonic() + 60
    while actors():
        time.sleep(0.2)
        assert time.monotonic() < deadline, actors()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_runs_go_on_on_their_machines_while_the_service_is_begun_anew(
    cluster: Any, served: Callable[[], Served], tmp_path: Path
) -> None:
    machine(cluster, 100, cores=4)
    machine(cluster, 60, cores=4)
    first, gate = served(), tmp_path / "gate"
    large, small, waits = first.submit(70, 40, gate), first.submit(50, 40, gate), first.submit(80, 4)
    first.until(lambda: first.states(large, small) == ["running"] * 2 and first.steps(large) and first.steps(small))
    assert first.device(large) != first.device(small)
    first.until(lambda: first.states(waits) == ["waiting"])
    first.until(lambda: "are free" in first.service.described(first.service.store.run(waits))["reason"])
    used = {each["name"]: each["used_bytes"] for each in first.service.devices(killing.CLIENT)}
    assert used == {first.device(large): 70 * MIB, first.device(small): 50 * MIB}
    before = [first.claims(number) for number in (large, small)]
    for _ in range(2):
        first.again()
        first.until(lambda: first.states(large, small) == ["running"] * 2)
    gate.touch()
    first.until(lambda: first.states(large, small, waits) == ["done"] * 3)
    assert [first.claims(number) for number in (large, small)] == before, "one attempt each"
    assert first.kinds(large) == ["planning", "waiting", "running", "done"]
    assert first.steps(large) == first.steps(small) == list(range(1, 41))
    until_no_actors()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_service_of_a_cluster_that_is_killed_again_and_again_begins_no_run_twice(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    for _ in range(2):
        machine(cluster, 100, cores=1)
    folder, words = tmp_path / "service", ("--cluster", "auto", "--lease", "60")
    service = command.started(folder, *words)
    here = local_address(folder) or {}
    with Client(here["url"], here["token"]) as asking:
        code = asking.upload(small_runs.code(tmp_path / "code"))
        numbers = [asking.submit(small_runs.run_file(steps=60, slow=0.1), code=code)["run"] for _ in range(3)]
    for pause in (4.0, 9.0, 3.0):
        time.sleep(pause)
        os.kill(service.pid, signal.SIGKILL)
        service.wait()
        service = command.started(folder, *words)
    here = local_address(folder) or {}
    try:
        with Client(here["url"], here["token"]) as asking:
            assert [asking.wait(number)["state"] for number in numbers] == ["done"] * 3
            told = [asking.run(number)["events"] for number in numbers]
            for number in numbers:
                asking.fetch(number, tmp_path / str(number), "log.jsonl")
                lines = (tmp_path / str(number) / "log.jsonl").read_text().splitlines()
                assert [json.loads(line)["step"] for line in lines] == list(range(1, 61))
                assert [each.name for each in (folder / "cluster" / "runs" / f"{number:06d}-1").iterdir()] == ["1"]
        for events in told:
            assert [event["kind"] for event in events] == ["planning", "waiting", "running", "done"]
        machines = {event["text"].rpartition(" on ")[2] for events in told for event in events if event["kind"] == "running"}  # fmt: skip
        assert len(machines) == 2
        until_no_actors()
    finally:
        service.terminate()
        assert service.wait(30) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_machine_that_is_lost_loses_no_run_and_has_none_run_twice(
    cluster: Any, served: Callable[[], Served], tmp_path: Path, how: str
) -> None:
    machine(cluster, 100, cores=4)
    second = machine(cluster, 100, cores=4)
    first, gate = served(), tmp_path / "gate"
    numbers = [first.submit(60, 60, gate if position < 2 else None) for position in range(5)]
    first.until(lambda: all(first.steps(number) for number in numbers[:2]))
    assert first.device(numbers[0]) != first.device(numbers[1])
    name = second.node_id[:8]
    (lost,) = (number for number in numbers[:2] if first.device(number) == f"cpu:{name}")
    (claimed,) = first.claims(lost)
    silent = _workers_of(launching.outputs_of(first.service.settings, launching.name_of(lost, 1))[0])
    killed = time.monotonic()
    if how == "killed":
        cluster.remove_node(second, allow_graceful=False)
    else:
        silent += [process.pid for _, process in second.live_processes()]
        for process in silent:
            os.kill(process, signal.SIGSTOP)
        assert guard.started(claimed["pid"]) == claimed["started"], "its run has noticed nothing"
    first.until(lambda: "goes on from its last snapshot" in first.service.store.run(lost).reason)
    assert time.monotonic() - killed > LEASE, "Ray's word ends nothing"
    assert guard.started(claimed["pid"]) is None
    if how == "cut off":  # what was said meanwhile arrives now
        for process in silent:
            os.kill(process, signal.SIGCONT)
    gate.touch()
    first.until(lambda: first.states(*numbers) == ["done"] * len(numbers))
    assert all(first.steps(number) == list(range(1, 61)) for number in numbers)
    assert [len(first.claims(number)) for number in numbers] == [1 + (number == lost) for number in numbers]
    told = [event.text for event in first.service.store.events(lost) if "goes on from its last snapshot" in event.text]
    left = read_json(launching.outputs_of(first.service.settings, launching.name_of(lost, 1))[0] / guard.END) or {}
    if left.get("reason") == "lease":  # its watcher was still there to say so
        assert told[0].startswith("its machine has heard nothing of the service")
    else:
        assert told[0].startswith(f"nothing was heard of machine {name} for {2 * LEASE:g} s")
        assert first.kinds(lost).count(MOVED) == 1
    until_no_actors()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_runs_on_a_cluster_are_cancelled_paused_and_go_on_and_survive_what_watches_them(
    cluster: Any, served: Callable[[], Served], tmp_path: Path
) -> None:
    import ray

    machine(cluster, 100, cores=4)
    first, gate = served(), tmp_path / "gate"
    cancelled, paused, stays = (first.submit(30, 40, gate) for _ in range(3))
    first.until(lambda: all(first.steps(number) for number in (cancelled, paused, stays)))
    # The actor of one is killed: another takes its place, and the run has not noticed.
    (name,) = (each for each in actors() if each.startswith(f"{stays:06d}-"))
    before = first.claims(stays)
    for process in _workers_of(launching.outputs_of(first.service.settings, f"{stays:06d}-1")[0]):
        os.kill(process, signal.SIGKILL)
    first.service.cancel(killing.CLIENT, cancelled)
    first.service.pause(killing.CLIENT, paused)
    first.until(lambda: first.states(cancelled, paused) == ["cancelled", "paused"])
    first.until(lambda: name in actors())
    namespace = next(
        each["namespace"] for each in ray.util.list_named_actors(all_namespaces=True) if each["name"] == name
    )
    first.until(lambda: not ray.get(ray.get_actor(name, namespace=namespace).look.remote(None, LEASE))["over"])
    gate.touch()
    first.service.resume(killing.CLIENT, paused)
    first.until(lambda: first.states(paused, stays) == ["done"] * 2)
    assert first.claims(stays) == before
    assert first.steps(paused) == first.steps(stays) == list(range(1, 41))
    until_no_actors()


def _workers_of(attempt: Path) -> list[int]:
    """Parents of the watcher of an attempt: the processes of Ray that started it."""
    claimed = read_json(attempt / guard.CLAIM)
    assert claimed is not None
    stat = Path(f"/proc/{claimed['pid']}/stat").read_text()
    return [int(stat.rpartition(")")[2].split()[1])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_service_that_does_not_come_back_leaves_neither_runs_nor_actors(
    cluster: Any, served: Callable[[], Served], tmp_path: Path
) -> None:
    machine(cluster, 100, cores=4)
    first, gate = served(), tmp_path / "gate"
    number = first.submit(30, 40, gate)
    first.until(lambda: first.steps(number))
    first.close()
    until_no_actors()
    (attempt,) = launching.outputs_of(first.service.settings, launching.name_of(number, 1))
    assert (read_json(attempt / guard.END) or {})["reason"] == "lease"
    with pytest.raises(
        InputError, match=r"are on the machines of a Ray cluster \(1\): start its service with --cluster"
    ):
        Dispatcher(replace(killing.settings(tmp_path)), ServiceStore(first.service.settings.folder))
    first.service = first._begun()
    gate.touch()
    first.until(lambda: first.states(number) == ["done"])
    assert first.steps(number) == list(range(1, 41))
    assert "heard nothing of the service" in " ".join(each.text for each in first.service.store.events(number))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_real_run_is_planned_here_and_trained_there_confined(cluster: Any, tmp_path: Path) -> None:
    machine(cluster, 100, cores=2)
    settings = ServiceSettings(
        tmp_path / "service", Machines(), confined=confine.available(), cluster="auto", lease_seconds=60.0
    )
    serving = conftest.started(settings, tmp_path)
    try:
        run = serving.until_state(serving.submit(steps=4).number, "done", "failed", "refused")
        assert (run.state, run.reason) == ("done", "done")
        log = (launching.folder_of(settings, run.number) / "out" / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in log if "step" in json.loads(line)][-1] == 4
        assert run.measured_peak_bytes is not None
        assert '"step": 4' in serving.service.output(conftest.ANNA, run.number, errors=False).read_text()
        assert {name for name, _ in serving.service.artifacts(conftest.ANNA, run.number)} >= {
            "log.jsonl",
            "config.json",
        }
    finally:
        serving.studies.close()
        serving.service.dispatcher.close()
        serving.service.store.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_cluster_that_cannot_run_anything_is_said_in_a_sentence(cluster: Any, tmp_path: Path) -> None:
    settings = ServiceSettings(tmp_path / "service", Machines(), confined=False, cluster="auto")
    store = ServiceStore(settings.folder)
    with pytest.raises(InputError, match="no machine of the Ray cluster 'auto' has told its bytes: ray start --res"):
        Dispatcher(settings, store)
    machine(cluster, 100)
    lacks = replace(settings, confined=True) if not confine.available() else settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memfit.service.executors._PROBE", ("-c", "import memfit_that_is_missing"))
        with pytest.raises(
            InputError, match=r"no machine of .* 'auto' can start runs: \w{8} cannot start runs \(ModuleNotFoundError"
        ):
            Dispatcher(lacks, store)
    Dispatcher(settings, store).close()
    store.close()


# ------------------------------------------------------------------------------------------------------- without a cluster


def test_without_ray_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    settings = ServiceSettings(tmp_path, Machines(), cluster="auto")
    store = ServiceStore(tmp_path)
    for _ in range(2):  # the folder is let go of
        with pytest.raises(InputError, match="a cluster needs Ray: pip install 'memfit.ray.'"):
            Dispatcher(settings, store)
    store.close()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--store", "postgresql://nobody@localhost/none"),
            "--cluster is for one service, and --store for several hosts",
        ),
        (("--capacity", "8GiB"), "--capacity and --cores are of this computer"),
        (("--cores", "4"), "--capacity and --cores are of this computer"),
        (("--demo",), "--demo trains on this computer: leave --cluster out"),
        (("--host-name", "one"), "--host-name and --lease are for hosts that share a store"),
    ],
)
def test_what_does_not_go_with_a_cluster_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert main(["serve", "--folder", str(tmp_path), "--cluster", "auto", *words]) == 3
    assert told in capsys.readouterr().err


def test_runs_of_this_computer_are_not_left_for_a_cluster(tmp_path: Path) -> None:
    with killing.moved_by_hand(tmp_path) as made:
        service = made()
        config = killing.run_file(1)
        config["model"]["args"]["gate"] = str(tmp_path / "gate")
        number = service.submit(killing.CLIENT, Submission(config))[0].number
        deadline = time.monotonic() + 60
        while service.store.run(number).state != "running":
            service.dispatcher.look(0.05)
            assert time.monotonic() < deadline
        (process,) = (attempt.process for attempt in service.dispatcher.runner._running.values())
        service.dispatcher.close()
        other = replace(service.settings, capacity=Machines(), cluster="auto")
        with pytest.raises(InputError, match=r"run on this computer \(1\): start its service without --cluster until"):
            Dispatcher(other, service.store)
        service.dispatcher = Dispatcher(service.settings, service.store)
        (tmp_path / "gate").touch()
        while service.store.run(number).state != "done":
            service.dispatcher.look(0.05)
            assert time.monotonic() < deadline
        process.wait()


def test_a_run_takes_the_tiers_and_the_cores_that_machines_have_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    small, middle, large = ({"cpu": size * MIB, "cores": cores} for size, cores in ((50, 2), (100, 12), (200, 16)))
    machines = Machines({"aaaa": small, "bbbb": {**middle, "disk": MIB}, "cccc": large})
    settings = ServiceSettings(tmp_path, machines, confined=False, cluster="auto", cores=64)
    store = ServiceStore(tmp_path)
    run = store.add({"owner": "anna", "name": "", "digest": "", "config": {}})
    store.close()
    planned = Planned(60 * MIB, 60 * MIB, 90 * MIB, (60 * MIB,), {"disk": 5, "host": 7})
    request = launching.training(settings, run, planned, 1)
    assert request.peak_bytes == {"disk": 5, "cores": 1}, "nobody has told bytes of a host"
    # It fits into two of them, once and three times: a third of sixteen cores is less than twelve.
    assert request.environment["OMP_NUM_THREADS"] == "5"
    on_gpu = launching.training(settings, run, replace(planned, device="cuda"), 1)
    assert "OMP_NUM_THREADS" not in on_gpu.environment
    assert machines.accounts == settings.accounts
