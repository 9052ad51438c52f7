"""Runs in processes of their own: admitted by their bytes, limited, told apart by their ends, and found again."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.runner import End, Ledger, Runner, RunRequest, guard

GIB = 1 << 30


def request(name: str, code: str = "", **named: Any) -> RunRequest:
    return RunRequest(name, (sys.executable, "-S", "-c", code), **named)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Runner]]:
    opened = []

    def made(capacity: dict[str, int] | None = None, at_once: int | None = None, folder: str = "runner") -> Runner:
        opened.append(Runner(tmp_path / folder, {"cpu": GIB} if capacity is None else capacity, at_once))
        return opened[-1]

    yield made
    for each in opened:
        try:
            each.close()
        except (sqlite3.ProgrammingError, OSError):  # closed by the test
            continue


def until_over(runner: Runner, *names: str, seconds: float = 60.0) -> dict[str, End]:
    ends: dict[str, End] = {}
    deadline = time.monotonic() + seconds
    while not set(names) <= set(ends):
        ends |= dict(runner.poll(0.2))
        assert time.monotonic() < deadline, f"{ends}, {runner.running}, {runner.waiting}"
    return ends


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ends_are_told_apart(make: Callable[..., Runner]) -> None:
    runner = make()
    codes = {
        "done": "print('x=1')",
        "failed": "raise SystemExit(7)",
        "torch": "raise RuntimeError(\"[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes. "
        'Error code 12 (Cannot allocate memory)")',
        "python": "x = bytearray(1 << 50)",
        "killed": "import os; os.kill(os.getpid(), 9)",
    }
    for name, code in codes.items():
        runner.submit(request(name, code))
    runner.submit(RunRequest("absent", ("no-such-command-anywhere",)))
    ends = until_over(runner, *codes, "absent")

    kinds = {name: end.kind for name, end in ends.items()}
    assert kinds == {
        "done": "done",
        "failed": "failed",
        "torch": "out_of_memory",
        "python": "out_of_memory",
        "killed": "killed",
        "absent": "failed",
    }
    assert (ends["failed"].status, ends["killed"].signal) == (7, signal.SIGKILL)
    assert ends["absent"].text == "failed (could not be started: no-such-command-anywhere: No such file or directory)"
    assert runner.stdout("done").read_text() == "x=1\n"
    assert ends["done"].resident_bytes > 1 << 20


def test_a_process_gets_no_more_memory_than_its_limit(make: Callable[..., Runner]) -> None:
    runner = make()
    grow = "x = []\nwhile len(x) < 400: x.append(bytearray(1 << 20))"
    runner.submit(request("limited", grow, memory_limit_bytes=100 << 20))
    runner.submit(request("free", grow))
    ends = until_over(runner, "limited", "free")
    assert (ends["limited"].kind, ends["free"].kind) == ("out_of_memory", "done")
    assert ends["limited"].resident_bytes < 120 << 20 < ends["free"].resident_bytes


def test_two_that_do_not_fit_together_never_run_together(make: Callable[..., Runner], tmp_path: Path) -> None:
    file = tmp_path / "running"
    code = f"import os, time; os.mkdir({str(file)!r}); time.sleep(0.2); os.rmdir({str(file)!r})"  # mkdir fails if the other is there
    runner = make()
    for name in ("a", "b", "c"):
        runner.submit(request(name, code, peak_bytes={"cpu": 6 * GIB // 10}))
    ends = until_over(runner, "a", "b", "c")
    assert {end.kind for end in ends.values()} == {"done"}


def test_what_fits_runs_side_by_side_and_gives_its_bytes_back(make: Callable[..., Runner]) -> None:
    runner = make()
    for name in ("a", "b"):
        runner.submit(request(name, "import time; time.sleep(60)", peak_bytes={"cpu": GIB // 2}))
    runner.submit(request("c", "", peak_bytes={"cpu": GIB // 2}))
    assert runner.poll() == []
    assert (runner.running, runner.waiting, runner.ledger.used("cpu")) == (("a", "b"), ("c",), GIB)
    runner.stop("a", at_once=True)
    ends = until_over(runner, "a", "c")
    assert (ends["a"].kind, ends["a"].reason, ends["c"].kind) == ("stopped", "asked", "done")
    assert runner.ledger.used("cpu") == GIB // 2


@pytest.mark.parametrize(
    ("peak", "message"),
    [
        ({"cpu": 2 * GIB}, r"big needs 2.00 GiB on cpu and there are 1.00 GiB: it could never start"),
        ({"cuda:0": 1}, r"big asks for bytes on 'cuda:0', and the devices here are cpu: name one of them"),
    ],
)
def test_what_could_never_start_is_refused(make: Callable[..., Runner], peak: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make().submit(request("big", peak_bytes=peak))


def test_a_run_that_ignores_its_end_signal_is_killed_after_the_grace(
    make: Callable[..., Runner], tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    deaf = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(ready)!r}, 'w').close(); time.sleep(60)"
    runner = make()
    runner.submit(request("deaf", deaf, grace_seconds=0.3))
    runner.poll()
    until(ready.exists)
    runner.stop("deaf")
    end = until_over(runner, "deaf")["deaf"]
    assert (end.kind, end.forced) == ("stopped", True)
    assert end.text == "stopped (asked), by force: it ignored its end signal"


def test_no_process_of_a_run_is_left_behind(make: Callable[..., Runner], tmp_path: Path) -> None:
    """One in a session of its own, too, as torchrun's."""
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], start_new_session=True);"
        f"open({str(file)!r}, 'w').write(str(p.pid))"
    )
    runner = make()
    runner.submit(request("parent", code))
    assert until_over(runner, "parent")["parent"].kind == "done"
    assert guard.started(int(file.read_text())) is None


@pytest.mark.parametrize("limit", [{"seconds": 0.3}, {"silent_seconds": 0.3}])
def test_a_run_is_stopped_at_its_limit(make: Callable[..., Runner], limit: dict[str, float]) -> None:
    runner = make()
    runner.submit(request("slow", "import time; time.sleep(60)", grace_seconds=1.0, **limit))
    end = until_over(runner, "slow")["slow"]
    assert (end.kind, end.reason) == ("stopped", "time" if "seconds" in limit else "silence")


def test_a_run_that_was_halted_is_stopped_for_its_silence(make: Callable[..., Runner]) -> None:
    runner = make()
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    runner.submit(request("halted", code, silent_seconds=0.5, grace_seconds=1.0))
    end = until_over(runner, "halted")["halted"]
    assert (end.kind, end.reason) == ("stopped", "silence")


def test_a_killed_run_goes_on_from_its_snapshot(make: Callable[..., Runner], tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    runner = make()
    first = f"open({str(snapshot)!r}, 'w').close(); import os; os.kill(os.getpid(), 9)"
    again = (sys.executable, "-S", "-c", "print('resumed')")
    runner.submit(request("run", first, resume_command=again, resume_if=str(snapshot), restarts=1))
    end = until_over(runner, "run")["run"]
    assert (end.kind, end.attempts) == ("done", 2)
    assert runner.stdout("run").read_text() == "resumed\n"


def test_restarts_run_out(make: Callable[..., Runner]) -> None:
    runner = make()
    runner.submit(request("run", "import os; os.kill(os.getpid(), 9)", restarts=2))
    end = until_over(runner, "run")["run"]
    assert (end.kind, end.attempts) == ("killed", 3)


def test_a_run_whose_watcher_is_killed_is_lost_and_does_not_go_on(make: Callable[..., Runner], tmp_path: Path) -> None:
    file = tmp_path / "pid"
    runner = make()
    runner.submit(request("run", f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"))
    runner.poll()
    until(lambda: file.exists() and bool(file.read_text()))
    os.kill(runner._running["run"].pid, signal.SIGKILL)
    assert until_over(runner, "run")["run"].kind == "lost"
    until(lambda: guard.started(int(file.read_text())) is None)


def test_a_name_is_run_once(make: Callable[..., Runner], tmp_path: Path) -> None:
    runner = make()
    for _ in range(2):
        runner.submit(request("run", "print(1)"))
    until_over(runner, "run")
    runner.submit(request("run", "print(1)"))
    assert runner.poll() == []
    assert runner.stdout("run").read_text() == "1\n"


def test_one_folder_has_one_runner(make: Callable[..., Runner]) -> None:
    make()
    with pytest.raises(InputError, match="another process runs what is in"):
        make()


def test_a_damaged_store_is_refused_and_left_as_it_is(make: Callable[..., Runner], tmp_path: Path) -> None:
    runner = make()
    for number in range(50):
        runner.submit(request(f"run-{number}"))
    runner.close()
    file = tmp_path / "runner" / "runs.sqlite"
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = bytearray(file.read_bytes())
    content[4096:12288] = b"\xff" * 8192
    file.write_bytes(content)
    with pytest.raises(InputError, match="is damaged .*put a copy back"):
        make()
    assert file.read_bytes() == content


def test_a_store_of_another_version_is_refused(make: Callable[..., Runner], tmp_path: Path) -> None:
    make().close()
    with sqlite3.connect(tmp_path / "runner" / "runs.sqlite") as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(InputError, match="is of version 99 and this memfit reads 1"):
        make()


# ---------------------------------------------------------------------------------------------- the runner dies, and comes back

PARENT = """
import sys
from memfit.runner import Runner, RunRequest
folder, log, outlives = sys.argv[1:]
runner = Runner(folder, {"cpu": 1 << 30})
code = f"import os, time; open({log!r}, 'a').write('x'); time.sleep(float(os.environ['LENGTH'])); print('x=1')"
for number in range(3):
    runner.submit(RunRequest(f"run-{number}", (sys.executable, "-S", "-c", code), environment={"LENGTH": "0.2"}, outlives_runner=outlives == "yes"))
while runner.waiting or runner.running:
    runner.poll(0.1)
runner.close()
"""


def parent(tmp_path: Path, outlives: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PARENT, tmp_path / "runner", tmp_path / "log", outlives])


@pytest.mark.parametrize(
    "after",
    [0.1, 0.3, *(pytest.param(n / 20, marks=pytest.mark.slow) for n in range(20))],
    ids=lambda after: f"{after}s",
)
@pytest.mark.parametrize("outlives", ["yes", "no"])
def test_nothing_is_run_twice_when_the_runner_is_killed(
    make: Callable[..., Runner], tmp_path: Path, outlives: str, after: float
) -> None:
    process = parent(tmp_path, outlives)
    until((tmp_path / "runner" / "runner.lock").exists)
    time.sleep(after)
    process.kill()
    process.wait()
    runner = make()
    known = {f"run-{number}" for number in range(3) if runner.knows(f"run-{number}")}
    expected = {name: runner.end_of(name) for name in known}
    ends = {name: end for name, end in expected.items() if end} | until_over(
        runner, *(name for name, end in expected.items() if end is None)
    )
    assert {end.kind for end in ends.values()} <= {"done"}
    begun = len((tmp_path / "log").read_text()) if (tmp_path / "log").exists() else 0
    if outlives == "yes":  # each that was known ran exactly once, whoever saw its end
        assert begun == len(known)
    else:  # what was cut short ran again from the beginning
        assert len(known) <= begun <= 2 * len(known)


def test_runs_do_not_outlive_their_runner_unless_asked(tmp_path: Path) -> None:
    process = parent(tmp_path, "no")
    log = tmp_path / "log"
    until(lambda: log.exists() and bool(log.read_text()))
    process.kill()
    process.wait()
    until((tmp_path / "runner" / "runs" / "run-0" / "1" / "end.json").exists, 5)


def test_an_attempt_that_was_written_down_and_never_began_is_begun_once(
    make: Callable[..., Runner], tmp_path: Path
) -> None:
    """The runner died between its store and the start; a guard that is late finds the folder claimed."""
    runner = make()
    runner.submit(request("run", "print(1)"))
    runner._store.begin("run", 1)
    folder = runner._folder("run", 1)
    folder.mkdir(parents=True)
    runner.close()
    runner = make()
    (folder / "spec.json").write_text('{"outlives_runner": true}')
    assert guard.claim(str(folder), {}) is False
    end = until_over(runner, "run")["run"]
    assert (end.kind, runner.stdout("run").parent.name) == ("done", "2")


# ---------------------------------------------------------------------------------------------------------------- admission


def test_a_large_run_is_not_passed_over_for_ever() -> None:
    ledger = Ledger({"cpu": 10})
    ledger.promise(RunRequest("holder", (), peak_bytes={"cpu": 5}))
    large = RunRequest("large", (), peak_bytes={"cpu": 10})
    passed = 0
    for number in range(100):
        small = RunRequest(f"small-{number}", (), peak_bytes={"cpu": 5})
        if ledger.admitted([large, small]) == [small]:
            ledger.give_back(small.name)
            passed += 1
    assert passed == 8
    ledger.give_back("holder")
    assert ledger.admitted([large]) == [large]


def test_one_that_is_to_be_alone_runs_alone() -> None:
    ledger = Ledger({"cpu": 10})
    small, alone = RunRequest("small", (), peak_bytes={"cpu": 1}), RunRequest("alone", (), alone=True)
    assert ledger.admitted([small, alone]) == [small]
    ledger.give_back("small")
    assert ledger.admitted([alone, small]) == [alone]


def test_no_more_run_at_once_than_asked() -> None:
    ledger = Ledger({"cpu": 10}, 2)
    assert len(ledger.admitted([RunRequest(str(number), ()) for number in range(5)])) == 2
