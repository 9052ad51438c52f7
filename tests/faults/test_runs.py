"""Processes killed, interrupted, out of disk, and snapshots damaged: going on ends with the bits of a run that nothing happened to.

`python bench/faults/run.py --tries 200 --seed 1` does the same as often as one likes, and counts.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from faults import series
from faults.runs import (
    CONFIG,
    INTERRUPTED,
    TECHNIQUES,
    Tally,
    Workplace,
    alike,
    child,
    fill,
    interrupt,
    kill,
    prepare,
)
from memfit.train import snapshot_folders, snapshots

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="tries are forked")

FEW: dict[Callable[..., Tally], tuple[int, dict[str, Any]]] = {
    series.killed: (3, {}),
    series.interrupted: (3, {}),
    series.full_disk: (3, {}),
    series.too_large: (2, {}),
    series.damaged: (20, {"resumed": 1}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return prepare(tmp_path_factory.mktemp("faults"))


def nothing_lost(tally: Tally) -> None:
    print(f"{tally.fault}: {tally.tried} tried, {tally.faults} faults, {tally.survived} survived")  # noqa: T201 - shown by pytest -s
    assert not tally.lost


@pytest.mark.parametrize("fault", FEW, ids=lambda each: each.__name__)
def test_nothing_is_lost(place: Workplace, fault: Callable[..., Tally]) -> None:
    tries, named = FEW[fault]
    nothing_lost(fault(place, tries, Random(0), **named))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FEW, ids=lambda each: each.__name__)
def test_nothing_is_lost_in_many_tries(place: Workplace, fault: Callable[..., Tally]) -> None:
    named = {"resumed": 20} if fault is series.damaged else {}
    nothing_lost(fault(place, 200 if fault is series.damaged else 50, Random(1), **named))


BELOW = ("state on disk", "8-bit state on disk", "swap", "streamed layers")


def check_technique(folder: Path, technique: str, tries: int) -> None:
    place = prepare(folder, technique)
    assert ("below" in place.moments) == (technique in BELOW)
    nothing_lost(series.killed(place, tries, Random(2)))
    if technique in BELOW:
        nothing_lost(series.full_disk(place, tries, Random(3)))
        nothing_lost(series.full_below(place, tries, Random(4)))


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["8-bit state on disk", "swap"])
def test_nothing_is_lost_under_any_technique(tmp_path: Path, technique: str) -> None:
    check_technique(tmp_path / "run", technique, 2)


@pytest.mark.slow
@pytest.mark.parametrize("technique", [name for name in TECHNIQUES if name != "plain"])
def test_nothing_is_lost_under_any_technique_in_many_tries(tmp_path: Path, technique: str) -> None:
    check_technique(tmp_path / "run", technique, 20)


# -- one by one --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(3))
def test_killed_between_any_two_renames_of_a_snapshot_that_is_written_again(place: Workplace, number: int) -> None:
    """A snapshot of a step that has one already: the old one goes aside first, and must come back."""
    out = place.folder / f"again-{number}"
    assert place.start(out, at=("write", 10**9)).status == 0
    shutil.rmtree(out / "step-000009")
    shutil.copytree(out / "step-000008", out / ".step-000008.old")
    shutil.rmtree(out / "step-000008")
    place.resume(out, at=("rename", number), fault=kill)

    end = place.go_on(out)

    assert end.status == 0, end.said
    assert place.differs(out) is None


def test_a_run_killed_before_its_first_snapshot_follows_the_plan_it_had(place: Workplace) -> None:
    """Planning again could split the batch in another way, and takes the time of a capture."""
    out = place.folder / "early"
    place.start(out, at=("layer", 3), fault=kill)
    assert not snapshot_folders.folders(out)
    plan = (out / "plan.json").read_text()

    end = place.resume(out)

    assert end.status == 0, end.said
    assert "planning" not in end.said
    assert (out / "plan.json").read_text() == plan
    assert place.differs(out) is None


def test_a_run_under_a_plan_made_before_needs_no_budget_to_go_on(place: Workplace) -> None:
    folder, out = place.folder, place.folder / "planned"
    (folder / "no_budget.yaml").write_text(CONFIG.replace("budget: 60KiB, ", ""), encoding="utf-8")
    arguments = ["train", "no_budget.yaml", "--plan", "plan.json", "--set", f"train.out={out}"]
    child(folder, out, arguments, at=("layer", 70), fault=kill)
    assert snapshot_folders.folders(out)

    end = place.resume(out)

    assert end.status == 0, end.said
    assert place.differs(out) is None


@pytest.mark.parametrize("kind", ["rename", "fsync", "open", "write", "mkdir"])
def test_a_full_disk_is_said_to_be_one_wherever_it_is_met(place: Workplace, kind: str) -> None:
    out = place.folder / f"full-{kind}"

    end = place.start(out, at=(kind, 7), fault=fill)

    assert end.status == 3, end.said
    assert "No space left" in end.said or "no space for a snapshot" in end.said
    assert "Traceback" not in end.said
    resumed = place.go_on(out)
    assert resumed.status == 0, resumed.said
    assert place.differs(out) is None


def test_a_really_full_disk_leaves_the_older_snapshot(place: Workplace) -> None:
    """A filesystem of 300 KiB in a namespace of its own; a snapshot takes some 60."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    command = (
        "mount -t tmpfs -o size=300k none disk || exit 99; "
        '"$0" -m memfit train run.yaml --plan plan.json --set train.out=disk/run --set train.keep=9; '
        "status=$?; mkdir -p saved; cp -r disk/run saved/; exit $status"
    )
    (place.folder / "disk").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, sys.executable],  # noqa: S607 - where the distribution has put it
        cwd=place.folder, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode in (1, 99) and "memfit" not in done.stderr:
        pytest.skip(f"no filesystem of one's own here: {done.stderr.strip()}")

    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "no space for a snapshot" in done.stderr or "No space left" in done.stderr
    out = place.folder / "saved" / "run"
    assert snapshot_folders.folders(out), "nothing was there to be left"
    assert place.resume(out).status == 0
    one, other = (snapshots.read(each / "step-000009") for each in (out, place.whole))
    assert alike(one.load("model.pt"), other.load("model.pt"))
    assert alike(one.load("optimizer.pt"), other.load("optimizer.pt"))


@pytest.mark.slow
def test_a_process_nobody_forked_is_killed_and_goes_on(place: Workplace) -> None:
    """The same once more as a person has it: the command in a process of its own, killed from outside, no moments."""
    out = place.folder / "own"
    command = [sys.executable, "-m", "memfit"]
    train = [*command, "train", "run.yaml", "--plan", "plan.json", "--set", f"train.out={out}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        train, cwd=place.folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        until = time.monotonic() + 120
        while not snapshot_folders.folders(out) and time.monotonic() < until and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()

    done = subprocess.run(
        [*command, "resume", str(out)], cwd=place.folder, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert place.differs(out) is None


def interrupt_twice() -> None:
    interrupt()
    interrupt()


def test_a_second_ctrl_c_stops_at_once_and_loses_nothing(place: Workplace) -> None:
    out = place.folder / "twice"

    end = place.start(out, at=("layer", 60), fault=interrupt_twice)

    assert end.status == INTERRUPTED, end.said
    assert "Traceback" not in end.said
    assert place.go_on(out).status == 0
    assert place.differs(out) is None


def test_an_evaluation_given_up_at_the_end_is_made_once_and_saved(place: Workplace) -> None:
    """Ctrl-C in the last update, before the evaluation after it: found by the above."""
    out = place.folder / "given_up"
    assert place.start(out, at=("update", place.moments["update"] - 1), fault=interrupt).status == INTERRUPTED
    assert not (out / "model.pt").exists()
    evaluated_again = place.resume(out, at=("write", 10**9))
    assert evaluated_again.status == 0

    assert place.resume(out).status == 0
    assert place.differs(out) is None


def test_a_kill_before_the_last_pruning_leaves_no_snapshot_too_many(place: Workplace) -> None:
    out = place.folder / "unpruned"
    shutil.copytree(place.whole, out)
    shutil.copytree(out / "step-000008", out / "step-000006")
    assert len(snapshot_folders.folders(out)) == 3

    assert place.resume(out).status == 0
    assert place.differs(out) is None


def test_ctrl_c_while_the_model_is_written_is_an_interrupt_and_no_crash(place: Workplace) -> None:
    """torch.save turns whatever is raised in its file into a RuntimeError about positions."""
    out = place.folder / "writing"

    end = place.start(out, at=("write", place.moments["write"] - 5), fault=interrupt)

    assert end.status == INTERRUPTED, end.said
    assert "Traceback" not in end.said
    assert not (out / "model.pt").exists()
    assert place.resume(out).status == 0
    assert place.differs(out) is None
