"""A service's store in PostgreSQL gives the answers that a file gives; and what goes wrong with a server ends in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import postgresql_server
from memfit.errors import InputError
from memfit.service.client import Client
from memfit.service.database import StoreError
from memfit.service.own_folder import ADDRESS
from memfit.service.postgresql import PostgresqlDatabase
from memfit.service.service import Submission
from memfit.service.serving import local_address
from memfit.service.states import LIVE, OVER
from memfit.service.store import ServiceStore
from memfit.service.stored_studies import STUDY_LIVE, StudyStore
from memfit.service.tokens import Tokens
from postgresql_server import Server
from service import killing, killing_hosts, small_runs
from service.conftest import ANNA, Serving
from service.test_killing import environment

pytestmark = postgresql_server.needed


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgresql_server.started() as found:
        yield found


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> str:
    """An empty database."""
    return server.database(f"t{abs(hash(request.node.name))}")


def run(number: int, **columns: Any) -> dict[str, Any]:
    about = {
        "owner": "anna" if number % 3 else "ben",
        "name": f"job {number}",
        "key": str(number),
        "digest": "0",
        "config": {"train": {"steps": number}},
    }
    return {**about, "code": "c" if number % 2 else None, **columns}  # fmt: skip


def talked_to(store: ServiceStore) -> list[Any]:
    """Everything that is asked of a store, with what it answers."""
    answers: list[Any] = [store.add(run(number, priority=number % 2)) for number in range(1, 8)]
    with pytest.raises(Exception, match=r"(?i)unique"):
        store.add(run(8, key="1"))
    plan = {"rank_bytes": [1 << 40], "tiers": {}}
    answers.append(store.change(1, "waiting", "fits", state="waiting", plan=plan))
    answers.append(store.change(2, "running", "started", state="running", request={"a": None}, started=5.5, part=1))
    answers.append(store.change(3, "done", "done", state="done", ended=1e9 + 0.123456, started=7.0, run_seconds=2.5))
    answers.append(
        store.change(4, "failed", "out\0of \ud800 memory", state="failed", reason="\0", ended=1e9 + 5, started=1.0)
    )
    answers.append(store.change(1, "paused", "no", if_still={"state": "running"}, state="paused"))
    answers.append(store.change(1, "asked", "yes", if_still={"removed": None, "asked": ""}, asked="pause"))
    answers.append(store.change(77, "done", "there is none", state="done"))
    stale = store.run(2)
    answers += [store.move(stale, "waiting", "again", state="waiting"), store.move(stale, "waiting", "twice", part=9)]
    store.measured(3, 5 << 40)
    store.has_on_disk(3, 7 << 40)
    store.has_on_disk(6, 3)
    answers += [store.run(number) for number in range(1, 8)]
    answers += [store.by_key("anna", "1"), store.by_key("ben", "1"), store.live(), store.numbers_by_state()]
    answers += [store.listed(owner="anna", states=(*LIVE, *OVER), before=6, limit=3), store.listed(owner=None)]
    answers += [store.ended_since(1e9 + 1), store.to_measure(LIVE), store.disk_by_owner(), store.last_event()]
    answers += [[(event.number, event.kind, event.text) for event in store.events(number)] for number in (1, 2, 3, 4)]
    answers.append([event.number for event in store.events(1, 3)])
    for number in (2**63, 2**70, 0):
        with pytest.raises(KeyError):
            store.run(number)
    with pytest.raises(RuntimeError), store.writing() as connection:
        connection.execute("UPDATE runs SET name='gone'")
        raise RuntimeError
    answers.append(store.run(1).name)
    answers += talked_about_files(store)
    studies = StudyStore(store)
    study = studies.add({"owner": "anna", "name": "s", "key": "k", "digest": "", "config": {"search": {}}, "code": "c"})
    studies.change(study.number, summary={"states": {"done": 1}}, reason="goes on")
    store.change(5, "done", "done", state="done", ended=3.0, study=study.number)
    answers += [studies.study(study.number), studies.by_key("anna", "k"), studies.by_key("ben", "k")]
    answers += [studies.listed(owner=None, states=STUDY_LIVE), studies.numbers_by_state(), store.of_study(study.number)]
    answers += [store.with_files(OVER, ended_before=1e18), store.with_files(OVER)]
    tokens = Tokens(store)
    token, late = tokens.make("anna", "submit"), tokens.make("late", "read", days=-1)
    answers += [tokens.caller(token), tokens.caller(late), tokens.caller("\0"), tokens.take_back("anna")]
    answers.append(tokens.caller(token))
    return answers


def talked_about_files(store: ServiceStore) -> list[Any]:
    query = "INSERT INTO uploads (digest, owner, bytes, files, made) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
    with store.writing() as connection:
        connection.executemany(
            query, [("c", "anna", 1 << 40, 1, 1.0), ("d", "anna", 1, 1, 1.0), ("d", "anna", 2, 1, 1.0)]
        )
        connection.execute(
            "INSERT INTO audit (time, owner, address, method, path, status) VALUES (1.0, '', '', 'GET', '/', 401)"
        )
    answers: list[Any] = [store.unused_uploads(2.0), store.unused_uploads(0.5), store.forget_upload("d", "anna")]
    answers += [store.forget_audit(2.0), store.forget_audit(2.0)]
    store.change(3, "removed", "asked", removed=1.0)
    return [*answers, store.half_removed()]


def told(answers: list[Any]) -> str:
    """Without the times at which they were asked."""
    text = json.dumps(answers, default=lambda value: {name: getattr(value, name) for name in value.__slots__})
    data = json.loads(text)

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: timeless(each) for name, each in value.items() if name != "submitted"}
        return [timeless(each) for each in value] if isinstance(value, list) else value

    return json.dumps(timeless(data), indent=1, sort_keys=True)


def test_postgresql_answers_as_a_file_does(tmp_path: Path, url: str) -> None:
    answers = []
    for name, place in (("file", None), ("server", url)):
        store = ServiceStore(tmp_path / name, place)
        answers.append(told(talked_to(store)))
        store.close()
    assert answers[0] == answers[1]
    assert len(answers[0]) > 5000


def test_what_was_stored_is_there_for_the_next(tmp_path: Path, url: str) -> None:
    first = ServiceStore(tmp_path, url)
    before = first.add(run(1))
    first.close()
    second = ServiceStore(tmp_path, url)
    assert second.run(before.number) == before
    second.close()


def test_hosts_that_race_for_an_empty_database_make_its_tables_once(tmp_path: Path, url: str) -> None:
    failed: list[BaseException] = []

    def opened() -> None:
        try:
            ServiceStore(tmp_path, url).close()
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=opened) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_writers_are_alone(tmp_path: Path, url: str) -> None:
    store = ServiceStore(tmp_path, url)
    number = store.add(run(1)).number

    def counted() -> None:
        for _ in range(20):
            with store.writing() as connection:
                (part,) = connection.execute("SELECT part FROM runs WHERE number=?", (number,)).fetchone()
                connection.execute("UPDATE runs SET part=? WHERE number=?", (part + 1, number))

    threads = [threading.Thread(target=counted) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.run(number).part == 80
    store.close()


def test_numbers_whose_folders_are_there_are_not_given_again(tmp_path: Path, url: str) -> None:
    (tmp_path / "runs" / "000041").mkdir(parents=True)
    store = ServiceStore(tmp_path, url)
    assert store.add(run(1)).number == 42
    store.close()
    (tmp_path / "runs" / "000007").mkdir()
    store = ServiceStore(tmp_path, url)
    assert store.add(run(2)).number == 43
    store.close()


def test_a_database_of_another_version_is_refused(tmp_path: Path, url: str) -> None:
    ServiceStore(tmp_path, url).close()
    other = PostgresqlDatabase(url)
    with other.writing() as connection:
        connection.execute("UPDATE format SET version=99")
    other.close()
    with pytest.raises(InputError, match="is of version 99 and this memfit reads 3"):
        ServiceStore(tmp_path, url)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("mysql://me:secret@127.0.0.1/x", r"mysql://me@127.0.0.1/x is no PostgreSQL database: write postgresql://"),
        ("what is this", "is no PostgreSQL database"),
        ("postgresql://me:secret@127.0.0.1:1/x", r"the store postgresql://me@127.0.0.1:1/x cannot be used: .*refused"),
    ],
)
def test_a_store_that_cannot_be_is_told_without_its_password(tmp_path: Path, place: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        ServiceStore(tmp_path, place)
    assert "secret" not in str(caught.value)


def test_a_server_that_goes_away_is_told_and_used_again_once_it_is_back(tmp_path: Path) -> None:
    with postgresql_server.started() as server:
        store = ServiceStore(tmp_path, server.url)
        number = store.add(run(1)).number
        server.stop()
        for asked in (lambda: store.run(number), lambda: store.change(number, "waiting", "no", state="waiting")):
            with pytest.raises(StoreError, match="cannot be used: .*what it holds is intact"):
                asked()
        server.start()
        assert store.run(number).state == "planning"
        assert store.change(number, "waiting", "yes", state="waiting")
        store.close()


def test_a_copy_is_left_to_postgresql(tmp_path: Path, url: str) -> None:
    store = ServiceStore(tmp_path, url)
    with pytest.raises(InputError, match="pg_dump --schema=memfit_service"):
        store.backup(tmp_path / "copy")
    store.close()


@pytest.mark.slow
def test_a_run_is_planned_and_trained_with_its_store_there(serve: Callable[..., Serving], url: str) -> None:
    serving = serve(store=url, host="one", lease_seconds=60.0)
    number = serving.submit(key="k").number
    assert serving.submit(key="k").number == number
    done = serving.until_state(number, "done", "failed", "refused")
    assert (done.state, done.host) == ("done", "one")
    assert [event.kind for event in serving.service.store.events(number)] == ["planning", "waiting", "running", "done"]
    with serving.service.artifact(ANNA, number, "log.jsonl") as stream:
        assert len(stream.readlines()) == 6
    assert json.loads(serving.service.output(ANNA, number, errors=False).read_text())
    assert serving.service.submit(ANNA, Submission(small_runs.run_file(), code=serving.code()))[1]


# ---------------------------------------------------------------------------------------------------------- several hosts


def listening(folder: Path, url: str, host: str) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """A host of its own process, and where it listens."""
    address = folder / "service" / "hosts" / host / ADDRESS
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cheap_service", str(folder), "0", url, host], env=environment(), stderr=subprocess.DEVNULL
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not address.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, json.loads(address.read_text())


def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow  # starts services and a server
def test_services_that_listen_take_each_others_runs_and_outlive_their_database(tmp_path: Path) -> None:
    killing.write_plan(tmp_path)
    with postgresql_server.started() as server:
        one, at_one = listening(tmp_path, server.url, "one")
        two, at_two = listening(tmp_path, server.url, "two")
        try:
            assert local_address(tmp_path / "service") in (at_one, at_two)
            first, second = tmp_path / "first", tmp_path / "second"
            with Client(at_one["url"], at_one["token"]) as asking, Client(at_two["url"], at_two["token"]) as other:
                other.drain(on=True)
                config = killing_hosts.run_file(1)
                config["model"]["args"]["gate"] = str(first)
                number = asking.submit(config, key="k")["run"]
                until(lambda: other.run(number)["state"] == "running")
                assert other.run(number)["host"] == "one"
                time.sleep(2 * killing_hosts.LEASE)  # it goes on as long as its host beats
                assert [event["kind"] for event in other.run(number)["events"]] == ["planning", "waiting", "running"]
                other.drain(on=False)
                one.kill()
                one.wait()
                until(lambda: other.run(number)["host"] == "two" and other.run(number)["state"] == "running")
                first.touch()
                assert other.wait(number)["state"] == "done"
                config["model"]["args"]["gate"] = str(second)
                number = other.submit(config, key="l")["run"]
                until(lambda: other.run(number)["state"] == "running")
                server.stop()
                until(lambda: not any(True for _ in killing.processes(tmp_path)))  # its lease is over
                with pytest.raises(InputError, match=r"\(503\): the store postgresql://me@.* cannot be used"):
                    other.run(number)
                second.touch()
                server.start()
                until(lambda: two.poll() is None and _state(other, number) == "done")
                kinds = [event["kind"] for event in other.run(number)["events"]]
                assert kinds == ["planning", "waiting", "running", "waiting", "running", "done"]
        finally:
            for process in (one, two):
                process.terminate()
                process.wait(60)
    for number in (1, 2):
        log = tmp_path / "service" / "runs" / f"{number:06d}" / "out" / "log.jsonl"
        assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(1, 51))
    assert not (tmp_path / "noticed").exists()


def _state(client: Client, number: int) -> str:
    try:
        return str(client.run(number)["state"])
    except InputError:  # the database is not back yet
        return ""


def killed(folder: Path, url: str, runs: int, seed: int, pause: float) -> killing_hosts.Killed:
    command = [sys.executable, "-m", "service.killing_hosts", str(folder), url, str(runs), str(seed), str(pause)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    counters = {name: Counter(told[name]) for name in ("kills", "states", "on")}
    return killing_hosts.Killed(**{**told, **counters})


def check(found: killing_hosts.Killed) -> None:
    assert (found.lost, found.twice, found.unexplained) == ([], [], [])
    assert found.states.total() == found.runs
    assert set(found.kills) == {"service", "watcher", "run", "host"}
    assert set(found.on) == {"one", "two"}
    assert found.moved > 0


@pytest.mark.slow
def test_runs_of_two_hosts_outlive_kills_and_a_host_that_is_gone(tmp_path: Path, url: str) -> None:
    check(killed(tmp_path, url, runs=24, seed=4, pause=0.3))


@pytest.mark.slow  # several minutes of processes
def test_hundreds_of_runs_of_two_hosts_outlive_kills_and_a_host_that_is_gone(tmp_path: Path, url: str) -> None:
    check(killed(tmp_path, url, runs=300, seed=time.time_ns(), pause=0.4))
