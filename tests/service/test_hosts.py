"""Several hosts on one store: a run is one host's at a time, and another's only once it has certainly ended. Clocks are the tests' own where seconds count."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.runner import guard
from memfit.service import launching
from memfit.service.hosts import Host
from memfit.service.housekeeping import Housekeeping
from memfit.service.refusals import NotNowError
from memfit.service.service import Service, Submission
from memfit.service.settings import ServiceSettings
from memfit.service.store import ServiceStore, StoredRun
from memfit.service.stored_studies import StudyStore
from memfit.service.tokens import Caller
from service import killing

LEASE = 10.0


class Clock:
    """Seconds, as a test says; as long as it says nothing, those of the computer."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return guard.since_boot() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServiceStore]:
    found = ServiceStore(tmp_path / "service")
    yield found
    found.close()


@pytest.fixture
def host(store: ServiceStore, tmp_path: Path, clock: Clock) -> Callable[..., Host]:
    def made(name: str, lease: float = LEASE, **told: Any) -> Host:
        settings = ServiceSettings(tmp_path / "service", {"cpu": 1 << 20}, host=name, lease_seconds=lease, **told)
        found = Host(store, settings, clock)
        found.begin()
        return found

    return made


def run(store: ServiceStore, **columns: Any) -> StoredRun:
    number = store.add({"owner": "anna", "name": "", "digest": "", "config": {}}).number
    if columns:
        store.change(number, columns.get("state", "changed"), "so", **columns)
    return store.run(number)


def later(clock: Clock, seconds: float, *hosts: Host) -> list[str]:
    """Whose runs were taken, after so many seconds in which these hosts have looked at each other."""
    taken: list[str] = []
    for _ in range(int(seconds)):
        clock.ahead += 1.0
        for each in hosts:
            taken += each.look()
    return taken


# ------------------------------------------------------------------------------------------------------ whose a run is


def test_a_run_is_claimed_by_one_host(store: ServiceStore, host: Callable[..., Host]) -> None:
    one, two = host("one"), host("two")
    waiting = run(store, state="waiting")
    assert [one.claims(waiting), two.claims(waiting), one.claims(waiting)] == [True, False, False]
    assert store.run(waiting.number).host == "one"
    asked = run(store, state="waiting", asked="cancel")
    assert not one.claims(replace(asked, asked=""))
    gone_on = run(store, state="waiting", part=1)
    assert not one.claims(replace(gone_on, part=0))


def test_a_silent_host_loses_its_runs_after_two_leases_and_no_sooner(
    store: ServiceStore, host: Callable[..., Host], clock: Clock
) -> None:
    one, two = host("one"), host("two")
    numbers = [run(store, state=state, host="one", part=part).number for state, part in (("planning", 0), ("waiting", 0), ("running", 1))]  # fmt: skip
    untouched = [run(store, state=state, host="one") for state in ("paused", "done", "failed")]
    untouched.append(run(store, state="running", host="two"))
    two.look()  # it sees the last beat now
    one.beat()  # which is another one
    clock.ahead += LEASE
    assert two.look() == []
    assert later(clock, 2 * LEASE - 1, two) == []
    assert later(clock, 2, two) == ["one"]
    found = [store.run(number) for number in numbers]
    assert [(each.state, each.host, each.part) for each in found] == [
        ("planning", "", 0),
        ("waiting", "", 1),
        ("waiting", "", 1),
    ]
    for each in found:
        assert store.events(each.number)[-1].kind == "moved"
        assert "host one has said nothing for 20 s" in store.events(each.number)[-1].text
    assert [store.run(each.number) for each in untouched] == untouched
    assert later(clock, 3 * LEASE, two) == [], "it has nothing any more"


def test_a_beat_at_the_last_moment_keeps_a_host_its_runs(
    store: ServiceStore, host: Callable[..., Host], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = host("one"), host("two")
    running = run(store, state="running", host="one", part=1)
    two.look()
    clock.ahead += 2 * LEASE + 2
    take = two._take

    def beaten(*about: Any) -> bool:
        one.beat()
        return take(*about)

    monkeypatch.setattr(two, "_take", beaten)
    assert two.look() == []
    assert store.run(running.number) == running


def test_a_look_that_is_halted_in_the_middle_takes_nobody_for_dead(
    store: ServiceStore, host: Callable[..., Host], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = host("one"), host("two")
    running = run(store, state="running", host="one", part=1)
    two.look()
    clock.ahead += 1.1  # until the next look is due
    read = store.read

    def halted(query: str, values: Any = ()) -> list[Any]:
        if "name<>?" in query:
            clock.ahead += 3 * LEASE
            one.beat()
        return read(query, values)

    with monkeypatch.context() as patch:
        patch.setattr(store, "read", halted)
        assert two.look() == []
    clock.ahead += 1.1
    assert two.look() == [], "the beat that it saw is a second old"
    assert store.run(running.number) == running


def test_a_host_that_was_taken_for_dead_claims_nothing_until_it_begins_again(
    store: ServiceStore, host: Callable[..., Host], clock: Clock
) -> None:
    one, two = host("one"), host("two")
    lease, lost = one.lease, run(store, state="running", host="one", part=1)
    two.look()
    assert later(clock, 2 * LEASE + 2, two) == ["one"]
    waiting = run(store, state="waiting")
    assert not one.claims(waiting)
    assert not store.move(lost, "done", "too late", state="done"), (
        "it has the run as it was, and the run is not its own"
    )
    until = lease.read_text()
    one.beat()
    assert one.taken
    assert lease.read_text() == until, "nothing that it ran goes on"
    one.begin()
    assert (one.taken, one.lease == lease, one.claims(waiting)) == (False, False, True)


def test_two_services_with_the_name_of_one_host_do_not_both_go_on(
    store: ServiceStore, host: Callable[..., Host]
) -> None:
    first, second = host("one"), host("one")
    with pytest.raises(InputError, match="another service has begun as host 'one'.*a name of its own"):
        first.beat()
    with pytest.raises(InputError, match="another service has begun"):
        first.look()
    assert not first.claims(run(store, state="waiting"))
    second.beat()
    assert second.claims(run(store, state="waiting"))


@pytest.mark.parametrize(("before", "after"), [(4.0, 40.0), (40.0, 4.0)])
def test_a_lease_of_another_length_is_waited_for(
    store: ServiceStore,
    host: Callable[..., Host],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    before: float,
    after: float,
) -> None:
    """The others wait for what is in the file, and for what will be, whenever the host is killed in between."""
    one, two = host("one", before), host("two")

    def waits() -> float:
        ((seconds,),) = store.read("SELECT lease_seconds FROM hosts WHERE name='one'")
        held = guard.Lease(str(one.lease))
        assert held.seconds_left() + clock.ahead <= 1.5 * seconds + 1
        return float(seconds)

    again = Host(store, replace(one.settings, lease_seconds=after), clock)
    with monkeypatch.context() as patch:
        patch.setattr(again, "_write", lambda _now: None)  # it is killed before it writes
        again.begin()
        assert waits() == max(before, after)
    again.beat()
    assert waits() == max(before, after)
    again.beat()
    assert waits() == after
    assert two.look() == []


def test_a_run_that_every_host_dies_of_is_not_started_for_ever(
    store: ServiceStore, host: Callable[..., Host], clock: Clock
) -> None:
    two = host("two", restarts=2)
    deadly = run(store, state="running", host="one", part=1)
    for part in range(1, 4):
        one = host("one")
        store.change(deadly.number, "running", "started", state="running", host="one", part=part)
        two.look()
        assert later(clock, 2 * LEASE + 2, two) == ["one"]
        assert one.look() == []
    ended = store.run(deadly.number)
    assert ended.state == "failed"
    assert "the third host that this run has lost" in ended.reason
    assert ended.ended is not None


def test_a_study_is_one_hosts(store: ServiceStore, host: Callable[..., Host], clock: Clock) -> None:
    one, two = host("one"), host("two")
    studies = StudyStore(store)
    number = studies.add({"owner": "anna", "name": "", "digest": "", "config": {"search": {}}}).number
    assert [one.claims_study(number), two.claims_study(number)] == [True, False]
    two.look()
    assert later(clock, 2 * LEASE + 2, two) == ["one"]
    assert studies.study(number).host == ""
    assert two.claims_study(number)


def test_the_clock_of_leases_is_not_the_one_that_people_set(
    store: ServiceStore, host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = host("one"), host("two")
    running, now = run(store, state="running", host="one", part=1), time.time()
    two.look()
    for year in (1, -1, 20):
        jumped = now + year * 365 * 86400.0
        monkeypatch.setattr(time, "time", lambda jumped=jumped: jumped)
        two._looked = -1e9
        assert two.look() == []
        assert not guard.Lease(str(one.lease)).is_over()
    assert store.run(running.number) == running


# ------------------------------------------------------------------------------------------- hosts that run cheap runs


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """A host with its dispatcher, moved on by hand, on a store that all of them share; what it runs takes milliseconds."""
    with killing.moved_by_hand(tmp_path) as made:
        yield lambda name, lease=60.0, **told: made(host=name, lease_seconds=lease, **told)
    assert not list(killing.processes(tmp_path))


def submitted(service: Service, gate: Path | None = None, steps: int = 4) -> int:
    config = killing.run_file(1)
    config["train"]["steps"] = steps
    if gate is not None:
        config["model"]["args"]["gate"] = str(gate)
    return service.submit(killing.CLIENT, Submission(config))[0].number


def until(condition: Callable[[], Any], *services: Service, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        for each in services:
            of(each).beat()
            each.dispatcher.look(0.02)
        told = [(run.number, run.state, run.host, run.reason) for each in services[:1] for run in each.store.listed(owner=None)]  # fmt: skip
        assert time.monotonic() < deadline, told


def of(service: Service) -> Host:
    assert service.dispatcher.host is not None
    return service.dispatcher.host


def state(service: Service, number: int) -> str:
    return service.store.run(number).state


def steps_of(service: Service, number: int) -> list[int]:
    log = launching.folder_of(service.settings, number) / "out" / "log.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def test_hosts_share_what_there_is_to_run_and_show_each_others_results(served: Callable[..., Service]) -> None:
    one, two = (served(name, capacity={"cpu": killing.SMALL}) for name in ("one", "two"))  # one run at a time
    numbers = [submitted(one if number % 2 else two) for number in range(6)]
    until(lambda: all(state(one, number) == "done" for number in numbers), one, two)
    assert {one.store.run(number).host for number in numbers} == {"one", "two"}
    for number in numbers:
        kinds = [event.kind for event in one.store.events(number)]
        assert kinds == ["planning", "waiting", "running", "done"]
        assert steps_of(two, number) == [1, 2, 3, 4]
        for each in (one, two):
            assert each.output(killing.CLIENT, number).is_file()
            assert each.described(each.store.run(number))["host"] in {"one", "two"}


def test_a_run_of_another_host_is_cancelled_paused_and_resumed(served: Callable[..., Service], tmp_path: Path) -> None:
    one, two = served("one"), served("two")
    gate = tmp_path / "gate"
    numbers = [submitted(one, gate) for _ in range(2)]
    until(lambda: all(state(one, number) == "running" for number in numbers), one)
    cancelled, paused = numbers
    two.cancel(killing.CLIENT, cancelled)
    two.pause(killing.CLIENT, paused)
    until(lambda: (state(two, cancelled), state(two, paused)) == ("cancelled", "paused"), two, one)
    gate.touch()
    assert two.resume(killing.CLIENT, paused).state == "waiting"
    with pytest.raises(NotNowError, match="is waiting: what is paused can be resumed"):
        one.resume(killing.CLIENT, paused)
    until(lambda: state(two, paused) == "done", two)
    assert (two.store.run(paused).host, two.store.run(paused).part) == ("two", 2)
    assert steps_of(two, paused) == [1, 2, 3, 4]


def test_files_of_a_run_are_removed_once_by_whichever_host(served: Callable[..., Service]) -> None:
    one, two = served("one", keep_days=0.0), served("two", keep_days=0.0)
    number = submitted(one)
    until(lambda: state(one, number) == "done", one)
    assert one.output(killing.CLIENT, number).is_file()
    for each in (two, one):
        Housekeeping(each).look()
    assert [event.kind for event in one.store.events(number)].count("removed") == 1
    assert not one.output(killing.CLIENT, number).exists()
    assert not list(one.settings.folder.glob(f"hosts/*/runner/runs/{number:06d}-*/*/stdout"))


@pytest.mark.slow
def test_what_a_host_that_is_gone_ran_ends_there_and_goes_on_elsewhere(
    served: Callable[..., Service], tmp_path: Path
) -> None:
    """The service of the first host is gone and nothing else is killed: its lease alone ends its runs."""
    one, two = served("one", 2.0), served("two", 2.0)
    gate = tmp_path / "gate"
    numbers = [submitted(one, gate, steps=20) for _ in range(3)]
    until(lambda: all(state(one, number) == "running" for number in numbers), one)
    until(lambda: all(steps_of(one, number)[-1:] == [10] for number in numbers), one)
    assert len(list(killing.processes(tmp_path))) > 3
    begun = time.monotonic()
    until(lambda: not any(True for _ in killing.processes(tmp_path)), seconds=10.0)
    assert 1.0 < time.monotonic() - begun < 4.0, "after a lease, and before two"
    gate.touch()
    until(lambda: all(state(two, number) == "done" for number in numbers), two)
    for number in numbers:
        assert [event.kind for event in two.store.events(number)][-3:] == ["moved", "running", "done"]
        assert two.store.run(number).host == "two"
        assert steps_of(two, number) == list(range(1, 21))
    assert not (tmp_path / "noticed").exists(), "none was run twice at a time"
    # It comes back, and leaves what is others' alone.
    for _ in range(10):
        one.dispatcher.look(0.02)
    assert of(one).lease.name == "lease-2"
    assert [state(one, number) for number in numbers] == ["done"] * 3
    assert [two.store.run(number).host for number in numbers] == ["two"] * 3
    last = submitted(one)
    until(lambda: state(one, last) == "done", one)


@pytest.mark.slow
def test_a_run_that_was_being_planned_on_a_host_that_is_gone_is_planned_anew(served: Callable[..., Service]) -> None:
    one, two = served("one", 2.0), served("two", 2.0)
    number = submitted(one)
    until(lambda: one.store.run(number).host == "one", one)  # and nobody hears of it any more
    until(lambda: state(two, number) == "done", two)
    assert [event.kind for event in two.store.events(number)] == ["planning", "moved", "waiting", "running", "done"]


def test_a_host_that_could_not_reach_the_store_goes_on_from_the_snapshots_of_its_runs(
    served: Callable[..., Service], tmp_path: Path
) -> None:
    one = served("one", 2.0)
    gate = tmp_path / "gate"
    number = submitted(one, gate, steps=20)
    until(lambda: state(one, number) == "running" and steps_of(one, number)[-1:] == [10], one)
    until(lambda: not any(True for _ in killing.processes(tmp_path)))  # and so it does not beat
    gate.touch()
    until(lambda: state(one, number) == "done", one)
    kinds = [event.kind for event in one.store.events(number)]
    assert kinds == ["planning", "waiting", "running", "waiting", "running", "done"]
    assert "could give no sign of life" in one.store.events(number)[3].text
    assert steps_of(one, number) == list(range(1, 21))


def test_a_run_that_its_host_does_not_know_waits_again_once_it_has_certainly_ended(
    served: Callable[..., Service],
) -> None:
    one = served("one", 2.0)
    number = submitted(one)
    until(lambda: state(one, number) == "done", one)
    plan = one.store.run(number).plan
    lost = one.store.add({"owner": "anna", "name": "", "digest": "", "config": killing.run_file(1)}).number
    launching.write(one.settings, one.store.run(lost))
    request = {**(one.store.run(number).request or {}), "name": "?"}
    one.store.change(lost, "running", "so", state="running", plan=plan, part=3, host="one", request=request)
    begun = of(one).begun = of(one).clock()
    until(lambda: state(one, lost) == "waiting" or one.store.run(lost).part == 4, one)
    assert of(one).clock() - begun > 4.0
    assert any("does not know it any more" in event.text for event in one.store.events(lost))


def test_one_host_is_one_service(served: Callable[..., Service]) -> None:
    served("one")
    with pytest.raises(InputError, match="another process runs what is in"):
        served("one")


def test_a_run_that_fits_another_host_alone_is_taken_and_waits_for_it(served: Callable[..., Service]) -> None:
    small, large = served("small", capacity={"cpu": killing.SMALL // 2}), served("large")
    number = submitted(small)
    assert small.store.run(number).config["fit"]["budget"] == killing.SMALL
    until(lambda: state(small, number) == "waiting", small)
    small.dispatcher.look()
    assert "not here now" in small.described(small.store.run(number))["reason"]
    until(lambda: state(large, number) == "done", small, large)
    assert large.store.run(number).host == "large"


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"host": "a/b", "store": "x"}, "is no name for a host"),
        ({"host": "", "store": "x"}, "give both --store and --host-name"),
        ({"host": "one"}, "give both --store and --host-name"),
        ({"host": "one", "store": "x", "lease_seconds": 0.5}, "a lease of 0.5 s: it is from 2 to 86400 s"),
    ],
)
def test_settings_of_hosts_that_cannot_be_are_told(tmp_path: Path, told: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ServiceSettings(tmp_path, {"cpu": 1}, **told).check_host()


def test_a_caller_sees_runs_whatever_host_has_them(served: Callable[..., Service]) -> None:
    one, two = served("one"), served("two")
    number = submitted(one)
    assert [each.number for each in two.runs(Caller("anna", "submit"))] == [number]
    assert two.runs(Caller("ben", "submit")) == []
