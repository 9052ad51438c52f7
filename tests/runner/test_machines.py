"""Machines of a cluster: one has to hold all of a run, and whoever walks through them has them as they were."""

from __future__ import annotations

import pytest

from memfit.errors import InputError
from memfit.runner import RunRequest
from memfit.runner.machines import MachineLedger, Machines
from memfit.service.queue import Occupied, Queued, turns

MIB = 1 << 20
SMALL = {"cpu": 60 * MIB, "disk": 100 * MIB, "cores": 2}
LARGE = {"cpu": 100 * MIB, "disk": 10 * MIB, "cores": 4}


def request(name: str, mib: int, **tiers: int) -> RunRequest:
    return RunRequest(name, (), rank_bytes=(mib * MIB,), peak_bytes={"cores": 1, **tiers})


@pytest.fixture
def ledger() -> MachineLedger:
    return MachineLedger(Machines({"aaaa": SMALL, "bbbb": LARGE}).accounts)


def test_the_fullest_machine_that_has_all_of_it_gets_a_run(ledger: MachineLedger) -> None:
    assert ledger.place(request("small", 50)) == ("cpu:aaaa",)
    assert ledger.place(request("large", 61)) == ("cpu:bbbb",)
    ledger.promise(request("small", 50, disk=100 * MIB))
    assert [ledger.used(name) for name in ("cpu:aaaa", "disk:aaaa", "cores:aaaa", "cpu:bbbb")] == [50 * MIB, 100 * MIB, 1, 0]  # fmt: skip
    # Where its memory would be, the disk is full; and the other way round.
    assert ledger.place(request("other", 10, disk=1)) == ("cpu:bbbb",)
    assert not ledger.fits(request("other", 61, disk=11 * MIB))
    ledger.give_back("small")
    assert ledger.used("disk:aaaa") == 0


def test_cores_of_a_machine_limit_its_runs(ledger: MachineLedger) -> None:
    for number in range(6):
        ledger.promise(request(f"run-{number}", 1))
    assert [ledger.used(f"cores:{name}") for name in ("aaaa", "bbbb")] == [2, 4]
    assert not ledger.fits(request("one more", 1))


def test_what_no_machine_holds_could_never_start(ledger: MachineLedger) -> None:
    ledger.check(request("large", 100, disk=10 * MIB))
    with pytest.raises(
        InputError, match=r"run needs 61.0 MiB on cpu, 11.0 MiB on disk, and .* have 60.0 MiB on cpu:aaaa, .*: it could"
    ):
        ledger.check(request("run", 61, disk=11 * MIB))
    with pytest.raises(InputError, match="run has 2 ranks, and on a cluster a run has one"):
        ledger.check(RunRequest("run", (), rank_bytes=(1, 1)))
    with pytest.raises(InputError, match="have told no bytes"):
        MachineLedger({}).check(request("run", 1))


def test_the_queue_lays_runs_out_on_machines(ledger: MachineLedger) -> None:
    there = [Occupied(request("first", 60), ("cpu:bbbb",), 10.0), Occupied(request("second", 50), ("cpu:aaaa",), 5.0)]
    queue = [Queued(request("large", 90), 8.0), Queued(request("middle", 55), 3.0), Queued(request("gone", 200), 1.0)]
    found = turns(ledger.capacity, there, queue, ledger=MachineLedger)
    assert [(turn.seconds, turn.devices) for turn in found] == [(10.0, ("cpu:bbbb",)), (5.0, ("cpu:aaaa",)), (None, ())]
    assert found[0].reason == "needs 90.0 MiB on cpu:bbbb, and 40.0 MiB are free"
    assert found[2].reason.startswith("not here now: gone needs 200 MiB on cpu")
    busy = [Occupied(request(f"run-{number}", 1), ("cpu:aaaa",) if number < 2 else ("cpu:bbbb",), 5.0) for number in range(6)]  # fmt: skip
    (turn,) = turns(ledger.capacity, busy, queue[1:2], ledger=MachineLedger)
    assert turn.reason == "needs 1 of the processor's cores, and no core is free"


def test_machines_that_go_while_somebody_reads_them_are_there_to_the_end() -> None:
    machines = Machines({"aaaa": SMALL, "bbbb": LARGE})
    assert (dict(machines), len(machines)) == (
        {"cpu:aaaa": 60 * MIB, "disk:aaaa": 100 * MIB, "cpu:bbbb": 100 * MIB, "disk:bbbb": 10 * MIB},
        4,
    )
    found = {}
    for name, size in machines.items():
        machines.become({})
        found[name] = (size, machines.get(name), name in machines)
    assert found["disk:bbbb"] == (10 * MIB, 0, False)
    assert len(found) == 4
    assert not machines


def test_a_machine_that_was_here_is_remembered_once() -> None:
    machines = Machines({"aaaa": SMALL, "bbbb": LARGE})
    machines.become({"aaaa": SMALL})
    assert machines.seen == {"aaaa": SMALL, "bbbb": LARGE}
    machines.become({"cccc": LARGE})  # it has joined again
    machines.become({})
    assert machines.seen == {"aaaa": SMALL, "cccc": LARGE}
