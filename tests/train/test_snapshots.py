"""A snapshot is whole or not there; what is damaged is noticed; what is written can be read back bit for bit."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memfit.errors import SnapshotError
from memfit.step import process_generators
from memfit.train import durable, snapshots
from memfit.train.data import Position
from memfit.train.saving import Saving
from train.fakes import FakeEngine, Noisy

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 3), "y": torch.randn(4)}


def engine(optimizer: Optimizer = torch.optim.AdamW, steps: int = 2) -> FakeEngine:
    model = Noisy()
    made = FakeEngine(model, optimizer(list(model.parameters())))
    for _ in range(steps):
        made.step(batch())
    return made


def write(out: Path, trained: FakeEngine, step: int = 1) -> Path:
    loop = {"generators": process_generators.generators(), "loss": 0.5}
    moment = snapshots.Moment(step, Position(0, step), 10, loop, {"model": {"python": "toy:build"}})
    return Saving.of(out, trained, moment, None, beside=False).finish()


def names(out: Path) -> list[str]:
    return sorted(f.name for f in out.iterdir())


def tensors(trained: FakeEngine) -> dict[str, torch.Tensor]:
    assert trained.optimizer is not None
    kept = {f"{i}.{k}": v for i, s in enumerate(trained.optimizer.state.values()) for k, v in s.items()}
    return {**trained.model.state_dict(), **dict(trained.model.named_buffers()), **kept}


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW([*p, nn.Parameter(torch.ones(2))]),  # of a loss, say: not the model's
    ],
    ids=["adamw", "amsgrad", "momentum", "sgd", "another's"],
)
def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path, optimizer: Optimizer) -> None:
    saved, other = engine(optimizer), engine(optimizer, steps=3)
    write(tmp_path, saved)

    loop = snapshots.restore(snapshots.read(tmp_path / "step-000001"), other)

    assert loop["loss"] == 0.5
    mine, theirs = tensors(saved), tensors(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine)


def test_state_of_another_type_than_the_parameters_stays_of_that_type(tmp_path: Path) -> None:
    saved, other = engine(), engine()
    for each in (saved, other):
        assert each.optimizer is not None
        for kept in each.optimizer.state.values():
            kept["exp_avg"] = torch.full_like(kept["exp_avg"], 7, dtype=torch.uint8)
    write(tmp_path, saved)

    snapshots.restore(snapshots.read(tmp_path / "step-000001"), other)

    assert tensors(other)["0.exp_avg"].dtype == torch.uint8


def test_a_restored_optimizer_keeps_the_settings_it_was_made_with(tmp_path: Path) -> None:
    write(tmp_path, engine(lambda p: torch.optim.AdamW(p, lr=0.5)))
    other = engine(lambda p: torch.optim.AdamW(p, lr=0.25))

    snapshots.restore(snapshots.read(tmp_path / "step-000001"), other)

    assert other.optimizer is not None
    assert other.optimizer.param_groups[0]["lr"] == 0.25


def test_generators_go_on_where_they_were() -> None:
    states = process_generators.generators()
    drawn = (torch.rand(3), random.random(), np.random.rand())  # noqa: NPY002 - the global one is meant

    process_generators.set_generators(states)

    again = (torch.rand(3), random.random(), np.random.rand())  # noqa: NPY002 - as above
    assert torch.equal(drawn[0], again[0])
    assert drawn[1:] == again[1:]


def test_it_says_what_it_is(tmp_path: Path) -> None:
    trained = engine()

    folder = write(tmp_path, trained, step=12)

    snapshot = snapshots.read(folder)
    assert folder.name == "step-000012"
    assert (snapshot.step, snapshot.position, snapshot.samples) == (12, Position(0, 12), 10)
    assert snapshot.config == {"model": {"python": "toy:build"}}
    assert snapshot.plan == json.loads(json.dumps(trained.plan.to_json()))
    assert names(tmp_path) == ["step-000012"]


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def removed(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "loop.pt", "snapshot.json"])
@pytest.mark.parametrize("damage", [truncated, flipped, removed])
def test_damage_is_noticed_and_the_snapshot_before_is_used(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    trained = engine()
    write(tmp_path, trained, step=1)
    newest = write(tmp_path, trained, step=2)
    damage(newest / name)
    notices: list[str] = []

    with pytest.raises(SnapshotError, match=r"step-000002 is (damaged|no snapshot)"):
        snapshots.read(newest)
    found = snapshots.latest(tmp_path, notices.append)

    assert found.step == 1
    assert len(notices) == 1
    assert "step-000002" in notices[0]


def test_without_any_whole_snapshot_there_is_none_to_use(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="there is no snapshot in"):
        snapshots.latest(tmp_path, print)
    truncated(write(tmp_path, engine()) / "model.pt")
    with pytest.raises(SnapshotError, match=r"no snapshot in .* can be read"):
        snapshots.latest(tmp_path, lambda _: None)


def test_another_format_is_said_to_be_one(tmp_path: Path) -> None:
    folder = write(tmp_path, engine())
    record = json.loads((folder / "snapshot.json").read_text())
    (folder / "snapshot.json").write_text(json.dumps({**record, "format_version": 99}))

    with pytest.raises(SnapshotError, match="has format 99 and this memfit reads 2"):
        snapshots.read(folder)


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path, engine())
    model = nn.Linear(2, 2)
    other = FakeEngine(model, torch.optim.AdamW(model.parameters()))

    with pytest.raises(SnapshotError, match="is of another model or optimizer"):
        snapshots.restore(snapshots.read(tmp_path / "step-000001"), other)


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("function", ["durable.put", "durable.sync_folder", "save"])
def test_a_full_disk_leaves_older_snapshots_and_the_state_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    trained = engine()
    write(tmp_path, trained, step=1)
    before = {name: value.clone() for name, value in tensors(trained).items()}
    monkeypatch.setattr(f"memfit.train.snapshots.{function}", no_space)

    with pytest.raises(SnapshotError, match=r"it takes .* and .* are free.*step-000001 is as it was"):
        write(tmp_path, trained, step=2)

    assert snapshots.latest(tmp_path, pytest.fail).step == 1
    assert not [name for name in names(tmp_path) if "partial" in name]
    assert all(torch.equal(before[name], value) for name, value in tensors(trained).items())


@pytest.mark.parametrize("room", [0, 100, 1000, 3000])
def test_a_disk_that_fills_up_in_mid_file_is_an_error_of_the_disk(tmp_path: Path, room: int) -> None:
    """torch.save itself raises RuntimeError about positions then, as seen on a real full disk."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > room:
                no_space()
            return super().write(data)

    with pytest.raises(OSError, match="No space left") as caught:
        snapshots.save({"weight": torch.zeros(1000)}, Full())
    assert caught.value.errno == errno.ENOSPC


def test_a_disk_fuller_than_the_state_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(snapshots, "save", lambda *_: pytest.fail("written"))

    with pytest.raises(SnapshotError, match=r"and 100 B are free\. Free space.*No snapshot was there before"):
        write(tmp_path, engine())


def test_another_failure_to_write_says_which(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file, not a folder")

    with pytest.raises(SnapshotError, match="cannot write"):
        write(tmp_path / "out", engine())


def test_an_interrupted_write_leaves_nothing_that_looks_like_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(durable, "put", interrupt)

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, engine())

    assert names(tmp_path) == []


def test_the_same_step_may_be_written_again(tmp_path: Path) -> None:
    write(tmp_path, engine())
    second = engine()
    write(tmp_path, second)

    other = engine(steps=3)
    snapshots.restore(snapshots.read(tmp_path / "step-000001"), other)

    assert names(tmp_path) == ["step-000001"]
    assert torch.equal(other.model.state_dict()["inner.0.weight"], second.model.state_dict()["inner.0.weight"])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    trained = engine()
    for step in (1, 2, 10, 1_000_000):
        write(tmp_path, trained, step=step)
    (tmp_path / ".step-000003.partial").mkdir()

    snapshots.prune(tmp_path, 2)

    assert names(tmp_path) == ["step-000010", "step-1000000"]


def test_what_a_crash_in_mid_rename_left_gets_its_name_back(tmp_path: Path) -> None:
    write(tmp_path, engine()).rename(tmp_path / ".step-000001.old")

    snapshots.sweep(tmp_path)

    assert snapshots.latest(tmp_path, pytest.fail).step == 1


def test_a_future_that_is_given_up_is_set_aside(tmp_path: Path) -> None:
    trained = engine()
    for step in (1, 2, 3):
        write(tmp_path, trained, step=step)

    snapshots.set_aside(tmp_path, 1)

    assert names(tmp_path) == ["step-000001", "step-000002.superseded", "step-000003.superseded"]
    assert snapshots.latest(tmp_path, pytest.fail).step == 1


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return object()

        def set_extra_state(self, state: object) -> None:
            raise AssertionError

    model = Odd(1, 1)

    with pytest.raises(SnapshotError, match=r"_extra_state.* is a object, which a snapshot cannot hold"):
        write(tmp_path, FakeEngine(model, torch.optim.SGD(model.parameters())))
    assert not list(tmp_path.iterdir())


def test_reading_runs_no_code(tmp_path: Path) -> None:
    """A file swapped for another one, checksums and all, is still read as plain values only."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("code ran",)

    folder = write(tmp_path, engine())
    torch.save(Trap(), folder / "loop.pt")
    record = json.loads((folder / "snapshot.json").read_text())
    record.pop("sha256")
    about = record["files"]["loop.pt"]
    about["bytes"], about["sha256"] = (folder / "loop.pt").stat().st_size, snapshots._sum(folder / "loop.pt")
    (folder / "snapshot.json").write_text(json.dumps({**record, "sha256": snapshots._own_sum(record)}))

    with pytest.raises(SnapshotError, match=r"cannot read .*loop\.pt"):
        snapshots.read(folder).load("loop.pt")
