"""A run that goes on no longer than its lease: told to end, killed, and ended by a second process where its watcher was killed or halted."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from memfit.runner import Runner, RunRequest, guard
from runner.waiting import until_over

# A command whose work is done by a process in a session of its own, as ranks are started.
WORKER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
COMMAND = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1], sys.argv[2]], start_new_session=True).wait()"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({!r}, 'w').close(); time.sleep(60)"


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    with Runner(tmp_path / "runner", {"cpu": 1 << 30}) as found:
        yield found


def lease(folder: Path, ends: float, last: float) -> Path:
    """A lease that is over after so many seconds."""
    now = guard.since_boot()
    guard.write_lease(str(folder / "lease"), now + ends, now + last)
    return folder / "lease"


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def watchers(folder: Path) -> list[int]:
    """The processes that watch a run: its guard, and then the second one."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            if guard.__file__.encode() in words and any(word.startswith(str(folder).encode()) for word in words):
                found.append(int(name))
    return sorted(found, key=lambda pid: guard.started(pid) or 0)


def begun(runner: Runner, tmp_path: Path, ends: float, last: float) -> int:
    """A run with a lease, once its worker works; the worker's process."""
    place = tmp_path / "worker"
    told = str(lease(tmp_path, ends, last))
    runner.submit(RunRequest("one", (sys.executable, "-S", "-c", COMMAND, WORKER, str(place)), lease=told))
    runner.poll(0.0)
    until(lambda: place.exists() and place.read_text())
    return int(place.read_text())


def test_a_run_goes_on_while_its_lease_is_written_anew_and_is_told_to_end_after_it(
    runner: Runner, tmp_path: Path
) -> None:
    worker, start = begun(runner, tmp_path, 2.0, 30.0), time.monotonic()
    while time.monotonic() - start < 3.0:
        lease(tmp_path, 2.0, 30.0)
        time.sleep(0.1)
    assert guard.started(worker) is not None
    end = until_over(runner, "one")["one"]
    assert (end.kind, end.reason, end.forced, end.attempts) == ("stopped", "lease", False, 1)
    assert 4.5 < time.monotonic() - start < 12
    assert guard.started(worker) is None


def test_a_run_that_ignores_the_end_of_its_lease_is_killed_at_its_last_moment(runner: Runner, tmp_path: Path) -> None:
    there = tmp_path / "there"
    command = (sys.executable, "-S", "-c", STUBBORN.format(str(there)))
    runner.submit(RunRequest("one", command, lease=str(lease(tmp_path, 1.5, 2.5)), grace_seconds=60))
    start = time.monotonic()
    runner.poll(0.0)
    until(there.exists)
    runner.stop("one")  # asked to end first, with a grace that is longer than the lease
    end = until_over(runner, "one")["one"]
    assert (end.reason, end.forced) == ("asked", True)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("content", [None, "", "what is this", "over", "of another boot"])
def test_a_run_without_a_lease_that_holds_does_not_begin(runner: Runner, tmp_path: Path, content: str | None) -> None:
    file, ran = lease(tmp_path, -1.0 if content == "over" else 60.0, 90.0), tmp_path / "ran"
    if content is None:
        file.unlink()
    elif content == "of another boot":
        file.write_text(file.read_text().replace(guard.boot(), "another"))
    elif content != "over":
        file.write_text(content)
    runner.submit(RunRequest("one", (sys.executable, "-S", "-c", f"open({str(ran)!r}, 'w')"), lease=str(file)))
    end = until_over(runner, "one")["one"]
    assert (end.kind, end.reason) == ("stopped", "lease")
    assert not ran.exists()


def test_a_lease_that_is_half_written_is_the_one_before(tmp_path: Path) -> None:
    file = lease(tmp_path, 60.0, 90.0)
    held = guard.Lease(str(file))
    assert not held.is_over()
    left = held.seconds_left()
    whole = file.read_bytes()
    guard.write_lease(str(file), guard.since_boot() + 600, guard.since_boot() + 900)
    for cut in range(len(whole)):
        file.write_bytes(file.read_bytes()[:cut] + whole[cut:])
        assert not held.is_over()
        assert held.seconds_left() <= 901
        guard.write_lease(str(file), guard.since_boot() + 600, guard.since_boot() + 900)
    file.write_text("nothing")
    assert held.seconds_left() > left


def test_what_a_killed_watcher_leaves_behind_ends_without_a_runner(runner: Runner, tmp_path: Path) -> None:
    worker = begun(runner, tmp_path, 60.0, 90.0)
    first, second = watchers(tmp_path)
    os.kill(second, signal.SIGKILL)  # it is replaced
    until(lambda: len(watchers(tmp_path)) == 2 and second not in watchers(tmp_path))
    os.kill(first, signal.SIGKILL)
    until(lambda: guard.started(worker) is None)
    until(lambda: not watchers(tmp_path))


def test_a_watcher_that_was_halted_does_not_make_a_lease_longer(runner: Runner, tmp_path: Path) -> None:
    worker = begun(runner, tmp_path, 2.0, 3.0)
    os.kill(watchers(tmp_path)[0], signal.SIGSTOP)  # and nobody polls the runner, which would wake it
    until(lambda: guard.started(worker) is None, seconds=8.0)
    assert until_over(runner, "one")["one"].kind == "lost"


@pytest.mark.slow
def test_a_file_system_that_does_not_answer_makes_no_lease_longer(runner: Runner, tmp_path: Path) -> None:
    worker = begun(runner, tmp_path, 30.0, 45.0)
    second = watchers(tmp_path)[1]
    os.kill(second, signal.SIGKILL)  # the one that comes in its place knows the lease as well
    until(lambda: len(watchers(tmp_path)) == 2 and second not in watchers(tmp_path))
    file = tmp_path / "lease"
    lease(tmp_path, 3.0, 4.5)
    time.sleep(1.2)
    waits = tmp_path / "waits"
    os.mkfifo(waits)  # whoever opens it waits for ever
    waits.replace(file)
    start = time.monotonic()
    until(lambda: guard.started(worker) is None, seconds=20.0)
    assert 2.0 < time.monotonic() - start < 12.0
    until(lambda: not watchers(tmp_path))


def test_a_run_that_ends_leaves_no_second_watcher(runner: Runner, tmp_path: Path) -> None:
    runner.submit(RunRequest("one", (sys.executable, "-S", "-c", ""), lease=str(lease(tmp_path, 60.0, 90.0))))
    assert until_over(runner, "one")["one"].kind == "done"
    assert watchers(tmp_path) == []
