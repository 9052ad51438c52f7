"""Runs in processes of their own: admitted by their bytes, limited, told apart by their ends, and found again."""

from __future__ import annotations

import itertools
import json
import os
import random
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
from memfit.runner import End, Ledger, RankEnd, Runner, RunRequest, guard
from memfit.runner.ends import classified
from runner.waiting import until_over
from sweeps import each_seed

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


def test_an_error_of_memory_that_python_cannot_print_is_one(tmp_path: Path) -> None:
    printed = "Traceback (most recent call last):\nobject address  : 0x7f01\nobject type name: MemoryError\nobject repr     : MemoryError()\nlost sys.stderr\n"
    (tmp_path / "stderr").write_text(printed)

    end = classified({"status": 1}, tmp_path / "stderr", 1)

    assert end.text == "out of memory: MemoryError"


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
    ("ranks", "device", "message"),
    [
        (
            (GIB, GIB, 1),
            "cuda",
            "big has 3 ranks, each on a device of its own, and of cuda there are 2: it could never start",
        ),
        ((2 * GIB,), "cuda", "big needs 2.00 GiB on cuda:0 and there are 1.00 GiB: it could never start"),
        (
            (GIB, GIB),
            "cuda",
            "the ranks of big need 1.00 GiB, 1.00 GiB, each on a device of its own, and there are 1.00 GiB on cuda:0, 512 MiB on cuda:1: it could",
        ),
        ((1,), "xpu", "big asks for bytes on 'xpu', and the devices here are cuda:0, cuda:1, cpu: name one of them"),
        ((GIB, GIB), "cpu", "big needs 2.00 GiB on cpu and there are 1.00 GiB: it could never start"),
    ],
)
def test_ranks_that_could_never_start_are_refused(ranks: tuple[int, ...], device: str, message: str) -> None:
    ledger = Ledger({"cuda:0": GIB, "cuda:1": GIB // 2, "cpu": GIB})
    with pytest.raises(InputError, match=message):
        ledger.check(RunRequest("big", (), rank_bytes=ranks, device=device))


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


def test_a_watcher_that_was_halted_is_woken(make: Callable[..., Runner]) -> None:
    """It would see no end and keep no limit."""
    runner = make()
    runner.submit(request("run", "import time; time.sleep(60)", seconds=0.5, grace_seconds=1.0))
    runner.poll()
    pid = runner._running["run"].pid
    until((runner.folder / "runs" / "run" / "1" / guard.CLAIM).exists)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: guard.halted(pid))
    end = until_over(runner, "run")["run"]
    assert (end.kind, end.reason) == ("stopped", "time")


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


@pytest.mark.parametrize("found_again", [False, True])
def test_what_a_run_has_started_ends_with_it_when_its_watcher_is_killed(
    make: Callable[..., Runner], tmp_path: Path, *, found_again: bool
) -> None:
    """Its ranks, say: else they would write beside those of the next attempt."""
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], start_new_session=True);"
        f"open({str(file)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    runner = make()
    runner.submit(request("run", code, outlives_runner=True))
    runner.poll()
    until(lambda: file.exists() and bool(file.read_text()))
    watcher = runner._running["run"].process
    assert watcher is not None
    if found_again:
        runner.close(stop=False)
    watcher.kill()
    watcher.wait()
    if found_again:
        runner = make()
    assert until_over(runner, "run")["run"].kind == "lost"
    assert guard.started(int(file.read_text())) is None


def test_what_runs_when_the_runner_ends_is_begun_again_by_the_next_and_what_was_stopped_is_not(
    make: Callable[..., Runner], tmp_path: Path
) -> None:
    runner, there = make(), tmp_path / "there"
    once = f"import os, time; there = os.path.exists({str(there)!r}); open({str(there)!r}, 'w').close(); time.sleep(0 if there else 60)"
    deaf = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(tmp_path / 'deaf')!r}, 'w').close(); time.sleep(60)"
    runner.submit(request("goes on", once, restarts=0))
    runner.submit(request("stopped", deaf, grace_seconds=60))
    runner.poll()
    until(lambda: there.exists() and (tmp_path / "deaf").exists())
    runner.stop("stopped")
    time.sleep(0.2)  # until its guard has it
    runner.close()
    runner = make()
    ends = {"stopped": runner.end_of("stopped"), **until_over(runner, "goes on")}
    assert [(each.kind, each.attempts) for each in ends.values() if each] == [("stopped", 1), ("done", 2)]


NO_SPACE = "import sys; sys.stderr.write('OSError: [Errno 28] No space left on device'); raise SystemExit(1)"


def test_a_run_that_ends_for_want_of_space_is_begun_again_once_there_may_be_some(
    make: Callable[..., Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as a run that is killed; and where the disk is the runner's own, and still full, only by the next runner, after a word to its user."""
    runner = make()
    runner.submit(request("run", NO_SPACE, restarts=1))
    end = until_over(runner, "run")["run"]
    assert (end.kind, end.attempts, end.text.partition(":")[0]) == (
        "failed",
        2,
        "failed (exit status 1, the disk was full)",
    )
    runner.submit(request("again", NO_SPACE, restarts=0))
    monkeypatch.setattr(guard, "is_full", lambda *_: True)
    for _ in range(2):
        with pytest.raises(InputError, match="the disk of .* is full, and again has ended for it: free space"):
            until_over(runner, "again")
    runner.close()
    monkeypatch.undo()
    end = until_over(make(), "again")["again"]
    assert (end.kind, end.attempts, end.disk_full) == ("failed", 2, True)


RANKS = """
import os, sys, time
rank, how, folder = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
open(f"{folder}/{rank}", "w").write(str(os.getpid()))
if rank == 1 and how == "killed" and not os.path.exists(f"{folder}/again"):
    open(f"{folder}/again", "w").close()
    os.kill(os.getpid(), 9)
if rank == 1 and how == "memory":
    bytearray(1 << 30)
if rank == 1 and how == "halted":
    os.kill(os.getpid(), 19)
time.sleep(60 if rank == 0 and how != "done" and not os.path.exists(f"{folder}/again") else 0)
"""


def torchrun(folder: Path, how: str) -> tuple[str, ...]:
    """Two ranks, of which the second ends so."""
    (folder / "ranks.py").write_text(RANKS)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    return (sys.executable, *launcher, str(folder / "ranks.py"), how, str(folder))


REPORT = """
Failures:
[1]:
  time      : 2026-11-23_22:08:00
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 11)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 11
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_22:08:00
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 12
"""


@pytest.mark.parametrize(("kills", "kind"), [(0, "killed"), (1, "out_of_memory")])
def test_what_torchrun_reports_of_its_ranks_is_read(tmp_path: Path, kills: int, kind: str) -> None:
    (tmp_path / "stderr").write_text(REPORT)
    end = classified({"status": 1, "oom_kills": kills}, tmp_path / "stderr", 1)
    assert (end.kind, end.ranks) == (kind, (RankEnd(1, signal=signal.SIGKILL),))
    assert End.from_json(json.loads(json.dumps(end.to_json()))) == end


@pytest.mark.slow
def test_the_end_of_a_run_of_several_ranks_names_the_rank(make: Callable[..., Runner], tmp_path: Path) -> None:
    """A rank that is killed makes torchrun fail; the run counts as killed, so it is started again; one out of memory is not."""
    runner = make({"cpu:0": GIB, "cpu:1": GIB}, at_once=1)
    for name in ("killed", "memory"):
        folder = tmp_path / name
        folder.mkdir()
        command = torchrun(folder, name)
        runner.submit(RunRequest(name, command, rank_bytes=(1, 1), memory_limit_bytes=GIB, restarts=1))
    ends = until_over(runner, "killed", "memory")
    assert (ends["killed"].kind, ends["killed"].attempts) == ("done", 2)
    first = classified({"status": 1}, runner.folder / "runs" / "killed" / "1" / "stderr", 1)
    assert (first.kind, first.text) == ("killed", "killed (rank 1: killed by SIGKILL)")
    assert (ends["memory"].kind, ends["memory"].ranks) == ("out_of_memory", (RankEnd(1, status=1),))
    assert ends["memory"].text == "out of memory: MemoryError (rank 1: exit status 1)"


@pytest.mark.slow
def test_a_halted_rank_is_noticed_by_its_silence_and_leaves_no_process(
    make: Callable[..., Runner], tmp_path: Path
) -> None:
    runner = make({"cpu": GIB})
    command = torchrun(tmp_path, "halted")
    runner.submit(RunRequest("run", command, rank_bytes=(1, 1), silent_seconds=15.0, grace_seconds=1.0))
    end = until_over(runner, "run", seconds=120)["run"]
    assert (end.kind, end.reason) == ("stopped", "silence")
    assert [guard.started(int((tmp_path / str(rank)).read_text())) for rank in range(2)] == [None, None]


def test_a_run_sees_the_devices_of_its_ranks_alone(
    make: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found again after the runner was gone, it still has them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    capacity = {"cuda:0": 8, "cuda:1": 8, "cuda:2": 8}
    runner = make(capacity)
    code = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep({})"
    runner.submit(request("one", code.format(60), rank_bytes=(8,), device="cuda", outlives_runner=True))
    runner.submit(request("two", code.format(0), rank_bytes=(6, 7), device="cuda"))
    until_over(runner, "two")
    assert runner.stdout("two").read_text() == "5,6\n" or runner.stdout("two").read_text() == "6,5\n"
    told = runner.stdout("one")
    until(lambda: told.exists() and told.read_text() != "")  # "two" may be over before it has begun
    assert told.read_text() == "4\n"
    left = runner._running["one"].process
    assert left is not None
    runner.close(stop=False)
    again = make(capacity)
    assert (again.running, again.ledger.devices("one"), again.ledger.used("cuda:0")) == (("one",), ("cuda:0",), 8)
    again.stop("one", at_once=True)
    until_over(again, "one")
    left.wait()
    assert again.ledger.used("cuda:0") == 0


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


def test_ranks_get_a_device_each_all_or_none() -> None:
    ledger = Ledger({"cuda:0": 10, "cuda:1": 10, "host": 100})
    small = RunRequest("small", (), rank_bytes=(4,), device="cuda")
    pair = RunRequest("pair", (), rank_bytes=(7, 8), device="cuda")
    third = RunRequest("third", (), rank_bytes=(4,), device="cuda")
    assert ledger.admitted([small, pair, third]) == [
        small,
        third,
    ]  # 6 are left on one device, and neither rank fits there
    assert (ledger.devices("small"), ledger.devices("third")) == (("cuda:0",), ("cuda:0",))  # the fullest that has room
    ledger.give_back("small")
    ledger.give_back("third")
    assert ledger.admitted([pair]) == [pair]
    assert ledger.devices("pair") == ("cuda:1", "cuda:0")  # the larger rank chooses first
    assert (ledger.used("cuda:0"), ledger.used("cuda:1")) == (8, 7)


def test_lower_tiers_are_in_the_account() -> None:
    ledger = Ledger({"cuda:0": 10, "host": 100})
    runs = [RunRequest(str(n), (), rank_bytes=(2,), device="cuda", peak_bytes={"host": 60}) for n in range(2)]
    assert ledger.admitted(runs) == runs[:1]
    ledger.give_back("0")
    assert ledger.admitted(runs[1:]) == runs[1:]
    with pytest.raises(InputError, match="2 needs 101 B on host and there are 100 B: it could never start"):
        ledger.check(RunRequest("2", (), peak_bytes={"host": 101}))


def test_ranks_share_memory_that_has_no_number() -> None:
    ledger = Ledger({"cpu": 10})
    pair = RunRequest("pair", (), rank_bytes=(4, 5), device="cpu")
    assert ledger.admitted([pair, RunRequest("other", (), rank_bytes=(2,))]) == [pair]
    assert (ledger.devices("pair"), ledger.used("cpu")) == (("cpu", "cpu"), 9)


@each_seed(20, 400)
def test_a_placement_is_found_wherever_there_is_one(seed: int) -> None:
    """Against all ways to give each rank a device of its own."""
    draw = random.Random(seed)
    for _ in range(20):
        ledger = Ledger({f"cuda:{n}": draw.randint(1, 9) for n in range(draw.randint(1, 4))})
        for n in range(draw.randint(0, 3)):
            ledger.admitted([RunRequest(f"other-{n}", (), rank_bytes=(draw.randint(1, 5),), device="cuda")])
        ranks = tuple(draw.randint(1, 8) for _ in range(draw.randint(1, 4)))
        free = {name: size - ledger.used(name) for name, size in ledger.capacity.items()}
        ways = [
            way
            for way in itertools.permutations(free, len(ranks))
            if all(size <= free[name] for size, name in zip(ranks, way, strict=True))
        ]
        placed = ledger.place(RunRequest("run", (), rank_bytes=ranks, device="cuda"))
        assert (placed in ways) if ways else placed is None


def test_no_more_run_at_once_than_asked() -> None:
    ledger = Ledger({"cpu": 10}, 2)
    assert len(ledger.admitted([RunRequest(str(number), ()) for number in range(5)])) == 2


def test_limits_of_time_and_silence_do_not_follow_a_clock_that_is_set() -> None:
    limits = guard.Limits(100.0, 10.0, 1000.0)
    assert limits.passed(1009.0, 5e9) == ""  # a file changed, whatever time it tells
    assert limits.passed(1018.0, 5e9) == ""
    assert limits.passed(1020.0, 1.0) == "", "the clock was set back, and a line came"
    assert limits.passed(1031.0, 1.0) == "silence"
    assert limits.passed(1101.0, 2.0) == "time"
