"""Several GPUs, simulated: the service promises, hands out and shows them as if they were there, and runs tell which they were given."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.service import launching
from memfit.service.dispatcher import Dispatcher
from memfit.service.planned import Planned
from memfit.service.service import Service, Submission
from memfit.service.store import ServiceStore
from memfit.service.tokens import Caller
from service import killing

GIB = 1 << 30
FOUR = {"cuda:0": 8 * GIB, "cuda:1": 8 * GIB, "cuda:2": 12 * GIB, "cuda:3": 24 * GIB}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Service]]:
    """A service with GPUs, moved on by hand; a second call is the service started anew. Its own GPUs are some of the computer's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    killing.write_plan(tmp_path)
    opened: list[Service] = []
    left: list[Any] = []  # children of this process, which outlive their service

    def made(capacity: Mapping[str, int]) -> Service:
        for each in opened:
            left.extend(attempt.process for attempt in each.dispatcher.runner._running.values())
            each.dispatcher.close()
            each.store.close()
        settings = replace(killing.settings(tmp_path), capacity=capacity)
        store = ServiceStore(settings.folder)
        opened[:] = [Service(settings, store, Dispatcher(settings, store))]
        return opened[0]

    yield made
    for each in opened:
        each.dispatcher.runner.close()
        each.store.close()
    for process in left:
        process.wait()


def submitted(service: Service, size: int, ranks: int = 1, *, steps: int = 4, gate: Path | None = None, large: bool = False) -> int:  # fmt: skip
    config: dict[str, Any] = killing.run_file(1)
    config["fit"] = {"budget": size, "device": "cuda", **({"devices": ranks} if ranks > 1 else {})}
    config["model"]["args"] = {"large": large, "status": 0, **({"gate": str(gate)} if gate is not None else {})}
    config["train"]["steps"] = steps
    return service.submit(killing.CLIENT, Submission(config))[0].number


def until(service: Service, condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        service.dispatcher.look(0.02)
        check_promises(service)
        told = [(run.number, run.state, run.reason) for run in service.store.listed(owner=None)]
        assert time.monotonic() < deadline, told


def check_promises(service: Service) -> None:
    """No byte of a device is promised twice, and no two ranks of a run are on one."""
    used = dict.fromkeys(service.settings.capacity, 0)
    for run in service.store.listed(owner=None, states=("running",), limit=500):
        devices = service.dispatcher.runner.ledger.devices(launching.name_of(run.number, run.part))
        sizes = Planned.from_json(run.plan or {}).rank_bytes
        assert len(set(devices)) == len(devices)
        for name, size in zip(devices, sizes, strict=bool(devices)):
            used[name] = used.get(name, 0) + size
    for name, size in service.settings.capacity.items():
        assert used[name] <= size


def states(service: Service, *numbers: int) -> list[str]:
    return [service.store.run(number).state for number in numbers]


def visible(service: Service, number: int) -> list[str]:
    """What each attempt of a run was given."""
    return (launching.folder_of(service.settings, number) / "out" / "visible").read_text().splitlines()


def test_runs_of_one_to_four_ranks_share_four_unlike_gpus(served: Callable[..., Service], tmp_path: Path) -> None:
    service, draw = served(FOUR), random.Random(3)
    wanted: dict[int, int] = {}
    for _ in range(24):
        ranks = draw.choice((1, 1, 1, 2, 2, 3, 4))
        large = draw.random() < 0.4
        # What is large takes more than half of whichever device it gets; four ranks fit the smallest.
        size = (
            draw.randint(13, 20) * GIB
            if large and ranks == 1
            else draw.randint(5, 8) * GIB
            if large
            else draw.randint(1, 3) * GIB
        )
        number = submitted(service, size, ranks, steps=draw.randint(2, 10), large=size > 12 * GIB)
        wanted[number] = ranks
    until(service, lambda: set(states(service, *wanted)) == {"done"})
    for number, ranks in wanted.items():
        (given,) = visible(service, number)
        assert len(set(given.split(","))) == ranks
        assert set(given.split(",")) <= {"4", "5", "6", "7"}
    assert not (tmp_path / "noticed").exists()


def test_a_run_of_several_ranks_waits_for_all_of_its_gpus_and_is_not_passed_for_ever(
    served: Callable[..., Service], tmp_path: Path
) -> None:
    service, gate = served({"cuda:0": 8 * GIB, "cuda:1": 8 * GIB}), tmp_path / "gate"
    first = submitted(service, 6 * GIB, gate=gate, steps=40)
    until(service, lambda: states(service, first) == ["running"])
    both = submitted(service, 6 * GIB, 2)
    until(service, lambda: states(service, both) == ["waiting"])
    until(service, lambda: both in service.dispatcher.view.turns)
    told = service.described(service.store.run(both))
    assert "needs 6.0 GiB on cuda:" in told["reason"] or "do not all have a device" in told["reason"]
    assert told["expected_start"] is not None
    beside = submitted(service, 2 * GIB, steps=2)  # takes nothing that the two ranks need
    until(service, lambda: states(service, beside) == ["done"])
    late = submitted(service, 6 * GIB, steps=4000)  # would delay them by more than a minute
    until(service, lambda: states(service, late) == ["waiting"])
    for _ in range(5):
        service.dispatcher.look(0.02)
    assert states(service, both, late) == ["waiting", "waiting"]
    gate.touch()
    until(service, lambda: states(service, first, both) == ["done", "done"])
    assert sorted(visible(service, both)[0].split(",")) == ["4", "5"]
    events = {number: service.store.events(number) for number in (both, late)}
    begun = {number: next((e.number for e in each if e.kind == "running"), 1 << 40) for number, each in events.items()}
    assert begun[both] < begun[late]
    service.cancel(killing.CLIENT, late)
    until(service, lambda: states(service, late) == ["cancelled"])


def test_ranks_that_have_no_gpus_of_their_own_are_refused_when_planned(served: Callable[..., Service]) -> None:
    service = served({"cuda:0": 8 * GIB, "cuda:1": 8 * GIB})
    many, alone = submitted(service, GIB, 3), submitted(service, 8 * GIB)
    until(service, lambda: states(service, many, alone) == ["refused", "done"])
    assert "3 ranks, each on a device of its own, and of cuda there are 2" in service.store.run(many).reason


def test_gpus_of_ranks_are_still_theirs_for_a_service_that_comes_back_without_one(
    served: Callable[..., Service], tmp_path: Path
) -> None:
    """A device vanishes while it is in use, and comes back."""
    two, gate = {"cuda:0": 8 * GIB, "cuda:1": 8 * GIB}, tmp_path / "gate"
    service = served(two)
    running = submitted(service, 6 * GIB, 2, gate=gate, steps=10)
    until(service, lambda: states(service, running) == ["running"])
    waiting, one = submitted(service, 5 * GIB, 2), submitted(service, 5 * GIB)
    until(service, lambda: states(service, waiting, one) == ["waiting", "waiting"])
    service = served({"cuda:0": 8 * GIB})
    for _ in range(3):
        service.dispatcher.look(0.05)
    assert states(service, running, waiting, one) == ["running", "waiting", "waiting"]
    reason = service.described(service.store.run(waiting))["reason"]
    assert "not here now" in reason
    assert "2 ranks, each on a device of its own, and of cuda there are 1" in reason
    strip = service.devices(Caller("anna", "submit"))
    assert [(each["name"], each["used_bytes"]) for each in strip] == [("cuda:0", 6 * GIB)]
    gate.touch()
    until(service, lambda: states(service, running, one) == ["done", "done"])
    assert visible(service, one) == ["4"]
    assert states(service, waiting) == ["waiting"]
    service = served(two)
    until(service, lambda: states(service, waiting) == ["done"])
    assert sorted(visible(service, waiting)[0].split(",")) == ["4", "5"]


def test_the_strip_of_each_gpu_shows_what_is_promised_on_it(served: Callable[..., Service], tmp_path: Path) -> None:
    service, gate = served(FOUR), tmp_path / "gate"
    three, one = submitted(service, 7 * GIB, 3, gate=gate), submitted(service, 20 * GIB, gate=gate)
    until(service, lambda: states(service, three, one) == ["running", "running"])
    service.dispatcher.look()
    until(service, lambda: one in service.dispatcher.view.devices)
    strip = {each["name"]: each for each in service.devices(killing.CLIENT)}
    shown = {name: [(run["run"], run["bytes"]) for run in each["runs"]] for name, each in strip.items()}
    assert shown["cuda:3"] == [(one, 20 * GIB)]
    assert [shown[f"cuda:{number}"] for number in range(3)] == [[(three, 7 * GIB)]] * 3
    assert [strip[name]["used_bytes"] for name in FOUR] == [7 * GIB] * 3 + [20 * GIB]
    hidden = service.devices(Caller("ben", "submit"))
    assert {run["run"] for each in hidden for run in each["runs"]} == {None}
    gate.touch()
    until(service, lambda: states(service, three, one) == ["done", "done"])
