"""What watches a run on a machine of a cluster, without Ray: it begins what it was heard about, and no word makes a lease longer than its sender knows."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit.runner import RunRequest, guard
from memfit.runner.detached_watch import LEASE, DetachedWatch, problem

WORK = "import os, sys, time; print('begun', flush=True); time.sleep(float(sys.argv[1]))"


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    folders: list[Path] = []

    def made(*command: str, **told: Any) -> Path:
        folder = tmp_path / f"attempt-{len(folders)}"
        folder.mkdir()
        command = command or (sys.executable, "-S", "-c", WORK, "60")
        request = RunRequest("run", command, outlives_runner=True, lease=str(folder / LEASE), **told)
        (folder / guard.SPEC).write_text(json.dumps({**request.to_json(), "runner": os.getpid()}))
        folders.append(folder)
        return folder

    yield made
    for folder in folders:
        guard.end_left_behind(str(folder))


def watching(folder: Path, *, inherits: bool = False, leave: Callable[[], None] = lambda: None) -> DetachedWatch:
    """One that does not end the process of the test."""
    return DetachedWatch(str(folder), inherits=inherits, leave=leave)


def until(watch: DetachedWatch, heard: float, *, seconds: float, wait: float = 30.0, **told: Any) -> dict[str, Any]:
    """Speak to it until the run is over; what it said then."""
    deadline = time.monotonic() + wait
    while True:
        said = watch.look(heard, seconds, **told)
        if said["over"]:
            return said
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_begins_before_the_answer_was_heard(attempt: Callable[..., Path]) -> None:
    folder = attempt(sys.executable, "-S", "-c", WORK, "0.1")
    watch = watching(folder)
    first = watch.look(None, 60.0)
    assert (first["over"], (folder / guard.CLAIM).exists(), (folder / LEASE).exists()) == (False, False, False)
    said = until(watch, first["clock"], seconds=60.0)
    assert (said["end"]["status"], (folder / "stdout").read_text()) == (0, "begun\n")
    assert watch.look(said["clock"], 60.0)["over"], "and it is not begun again"


def test_a_word_that_was_long_on_its_way_begins_and_renews_nothing(attempt: Callable[..., Path]) -> None:
    folder = attempt()
    watch = watching(folder)
    old = watch.look(None, 2.0)["clock"]
    time.sleep(2.2)
    said = until(watch, old, seconds=2.0)
    assert (said["end"]["reason"], (folder / "stdout").read_text() if (folder / "stdout").exists() else "") == (
        "lease",
        "",
    )


def test_a_run_ends_by_its_lease_though_old_words_keep_coming(attempt: Callable[..., Path]) -> None:
    folder = attempt(grace_seconds=1.0)
    watch = watching(folder)
    heard, begun = watch.look(None, 2.0)["clock"], time.monotonic()
    assert until(watch, heard, seconds=2.0)["end"]["reason"] == "lease"
    assert 1.9 < time.monotonic() - begun < 15.0


@pytest.mark.slow
def test_it_leaves_once_what_it_watched_has_ended_by_its_lease(attempt: Callable[..., Path]) -> None:
    folder, left = attempt(grace_seconds=1.0), threading.Event()
    watch = watching(folder, leave=left.set)
    begun = time.monotonic()
    watch.look(watch.look(None, 2.0)["clock"], 2.0)
    assert left.wait(60.0)
    assert time.monotonic() - begun > 2 * 2.0
    assert watch.look(None, 2.0)["end"]["reason"] == "lease"


def test_another_one_in_its_place_goes_on_with_the_run(attempt: Callable[..., Path]) -> None:
    folder = attempt()
    first = watching(folder)
    first.look(first.look(None, 60.0)["clock"], 60.0)
    deadline = time.monotonic() + 30
    while not (folder / "stdout").exists() or not (folder / "stdout").read_text():
        time.sleep(0.05)
        assert time.monotonic() < deadline
    claimed = (folder / guard.CLAIM).read_text()
    second = watching(folder)
    said = second.look(None, 60.0)
    assert not said["over"]
    assert not second.look(said["clock"], 60.0)["over"]
    assert (folder / guard.CLAIM).read_text() == claimed
    os.kill(json.loads(claimed)["pid"], signal.SIGSTOP)  # it is woken, or would not hear
    end = until(second, said["clock"], seconds=60.0, stop="ask")["end"]
    assert (end["reason"], end["signal"]) == ("asked", signal.SIGTERM)
    assert first.look(None, 60.0)["over"]


@pytest.mark.parametrize("inherits", [False, True])
def test_a_run_is_told_the_machines_gpus_and_no_more_of_its_environment(
    attempt: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, *, inherits: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("SECRET", "word")
    code = "import os; print(*(os.environ.get(name) for name in ('CUDA_VISIBLE_DEVICES', 'SECRET', 'TOLD')))"
    folder = attempt(sys.executable, "-S", "-c", code, environment={"TOLD": "yes"})
    watch = watching(folder, inherits=inherits)
    until(watch, watch.look(None, 60.0)["clock"], seconds=60.0)
    assert (folder / "stdout").read_text() == f"3 {'word' if inherits else None} yes\n"


def test_what_a_killed_watcher_leaves_behind_is_ended_before_it_is_over(attempt: Callable[..., Path]) -> None:
    folder = attempt()
    watch = watching(folder)
    heard = watch.look(None, 60.0)["clock"]
    watch.look(heard, 60.0)
    deadline = time.monotonic() + 30
    while not (folder / "stdout").exists() or not (folder / "stdout").read_text():
        time.sleep(0.05)
        assert time.monotonic() < deadline
    os.kill(json.loads((folder / guard.CLAIM).read_text())["pid"], signal.SIGKILL)
    said = until(watch, heard, seconds=60.0)
    assert said["end"] is None
    assert guard.end_left_behind(str(folder)) == 0, "nothing of it was left"


def test_a_machine_says_what_keeps_it_from_running_anything(tmp_path: Path) -> None:
    probe = (sys.executable, "-S", "-c", "")
    (tmp_path / "word").write_text("word")
    assert problem(str(tmp_path), "word", "seen", probe, {}) == ""
    assert (tmp_path / "seen").exists()
    (tmp_path / "other").write_text("word")
    assert "has another folder" in problem(str(tmp_path), "other", "seen", probe, {})
    missing = problem(str(tmp_path / "missing"), "word", "seen", probe, {})
    assert missing.startswith(f"cannot use the folder {tmp_path / 'missing'} (No such file or directory): put it on a")
    assert problem(str(tmp_path), "word", "seen", ("/no/python",), {}).startswith("cannot start /no/python (")
    failing = (sys.executable, "-S", "-c", "import memfit_that_is_missing")
    told = "cannot start runs (ModuleNotFoundError: No module named 'memfit_that_is_missing'): install"
    assert problem(str(tmp_path), "word", "seen", failing, {}).startswith(told)
