"""Snapshots that reach the disk beside the training: those of training that waits, one after the other, and what goes wrong is told at the next step."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import SnapshotError
from memfit.train import durable, snapshot_folders, snapshots
from memfit.train.config import TrainConfig
from memfit.train.snapshots import Staged
from train.test_loop import Crash, crash_at, engine, losses, run, same_state

BESIDE = TrainConfig(steps=11, save_every=2, keep=9, log_every=1, eval_every=3, save_async=True)


class Disk:
    """A disk on which files arrive when the test lets them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.arrives, self.under_way, self.most, self.threads = threading.Event(), 0, 0, set[str]()
        on_disk = Staged.on_disk

        def slow(staged: Staged) -> dict[str, Any]:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            self.threads.add(threading.current_thread().name)
            assert self.arrives.wait(60)
            self.under_way -= 1
            return on_disk(staged)

        patch.setattr(Staged, "on_disk", slow)


def test_what_is_saved_beside_training_is_the_state_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engine()
    run(tmp_path / "waits", whole, settings=TrainConfig(steps=11, save_every=2, keep=9, log_every=1, eval_every=3))
    disk = Disk(monkeypatch)
    beside: list[list[str]] = []

    def on_step(step: int) -> None:
        if step == 4:  # the step after the one of the first snapshot was taken beside it
            beside.append(sorted(folder.name for folder in (tmp_path / "beside").glob("*step-*")))
            disk.arrives.set()

    made = engine(on_step)
    outcome = run(tmp_path / "beside", made, settings=BESIDE)

    assert beside == [[".step-000002.partial"]]
    assert disk.most == 1
    assert disk.threads == {"memfit-saving"}
    assert outcome.snapshot == tmp_path / "beside" / "step-000011"
    assert not list((tmp_path / "beside").glob(".step-*"))
    assert same_state(whole, made)
    assert losses(tmp_path / "beside") == losses(tmp_path / "waits")
    for step in (2, 4, 6, 8, 10, 11):
        one, other = (snapshots.read(tmp_path / name / f"step-{step:06d}") for name in ("waits", "beside"))
        records = [json.loads((each.folder / snapshots.RECORD).read_text())["files"] for each in (one, other)]
        assert records[0] == records[1]  # with the sums of all that is in them


def test_files_that_do_not_reach_the_disk_end_training_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, begun = durable.sync, threading.Event()

    def full(file: Path) -> None:
        if ".step-000004" in str(file) and file.suffix == ".pt":
            assert begun.wait(60)
            raise OSError(28, "No space left on device")
        sync(file)

    monkeypatch.setattr(durable, "sync", full)
    taken: list[int] = []

    def on_step(step: int) -> None:
        taken.append(step)
        if step == 5:
            begun.set()
            arrived()

    with pytest.raises(SnapshotError, match="no space for a snapshot in .*step-000002 is as it was"):
        run(tmp_path, engine(on_step), settings=BESIDE)
    assert max(taken) == 5
    assert [folder.name for folder in snapshot_folders.folders(tmp_path)] == ["step-000002"]
    assert not list(tmp_path.glob(".step-*"))


def test_training_that_fails_completes_the_snapshot_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch).arrives.set()
    with pytest.raises(Crash):
        run(tmp_path, engine(crash_at(5)), settings=BESIDE)
    assert snapshots.latest(tmp_path, pytest.fail).step == 4


def test_a_process_that_goes_while_a_snapshot_is_under_way_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)

    def on_step(step: int) -> None:
        if step == 4:
            disk.arrives.set()
            arrived()
            disk.arrives.clear()
        elif step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", engine(on_step), settings=BESIDE)
    assert [each.name for each in (tmp_path / "cut").glob("*step-*")].count(".step-000004.partial") == 1
    disk.arrives.set()
    arrived()
    snapshot = snapshots.latest(tmp_path / "cut", pytest.fail)
    assert snapshot.step == 2
    whole, resumed = engine(), engine()
    run(tmp_path / "whole", whole, settings=BESIDE)
    run(tmp_path / "cut", resumed, settings=BESIDE, snapshot=snapshot)
    assert same_state(whole, resumed)


def arrived() -> None:
    """All that is under way has reached the disk."""
    for thread in threading.enumerate():
        if thread.name == "memfit-saving":
            thread.join()
