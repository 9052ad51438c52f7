"""What is offloaded to disk: its files have no name, their space is taken before the first step, and a disk that fails fails one step and no more."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from faults.runs import alike
from faults.test_steps import FAILING, STEPS, batch, build, engine, loss_of, planned, state_of, untouched
from memfit.errors import EngineError, InfeasibleError, SnapshotError

pytestmark = pytest.mark.usefixtures("one_thread")

BELOW = ("swap", "8-bit state on disk", "streamed layers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where everything goes that goes to disk."""
    made = tmp_path / "below"
    made.mkdir()
    monkeypatch.setenv("MEMFIT_OFFLOAD_DIR", str(made))
    return made


@pytest.mark.parametrize("technique", BELOW)
def test_nobody_can_delete_what_lies_below_a_run(technique: str, folder: Path) -> None:
    states = untouched(technique)
    made = engine(technique)
    torch.manual_seed(11)
    made.step(batch(0))
    assert list(folder.iterdir()) == []
    folder.rmdir()
    for number in range(1, STEPS):
        made.step(batch(number))
        assert alike(state_of(made), states[number]), number


@pytest.mark.slow  # `test_runs` fills the room below under swap in the quick run
def test_a_disk_that_is_full_by_now_stops_no_run(tmp_path: Path) -> None:
    """A filesystem in a namespace of its own, filled to the last block after the first step."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f'mount -t tmpfs -o size=4m none {disk} || exit 99; exec "$0" {__file__} {disk}'
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "MEMFIT_OFFLOAD_DIR": str(tmp_path)}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, sys.executable],  # noqa: S607 - where the distribution has put it
        env={**os.environ, "OMP_NUM_THREADS": "1", **paths}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode in (1, 99) and "Traceback" not in done.stderr:
        pytest.skip(f"no filesystem of one's own here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == [f"{technique}: as if there were room" for technique in BELOW]


def fill_up_and_go_on() -> None:
    """In the process of the test above."""
    torch.set_num_threads(1)
    for technique in BELOW:
        planned(technique)  # which measures a disk, with more than this one holds
    os.environ["MEMFIT_OFFLOAD_DIR"] = sys.argv[1]
    rest = Path(sys.argv[1]) / "rest"
    for technique in BELOW:
        states = untouched(technique)
        made = engine(technique)
        torch.manual_seed(11)
        made.step(batch(0))
        with rest.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left on device"):
            while True:
                file.write(bytes(4096))
        assert os.statvfs(rest).f_bavail == 0
        for number in range(1, STEPS):
            made.step(batch(number))
            assert alike(state_of(made), states[number]), number
        rest.unlink()
        print(f"{technique}: as if there were room", flush=True)  # noqa: T201 - the test reads it


def failing_once(name: str) -> tuple[SimpleNamespace, list[int]]:
    """`os` in which one call of this name fails, and how often it was called."""
    calls: list[int] = []
    right: Callable[..., Any] = getattr(os, name)

    def call(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return right(*arguments)

    return SimpleNamespace(**{**vars(os), name: call}), calls


@pytest.mark.parametrize(
    ("technique", "name", "sentence"),
    [
        ("8-bit state on disk", "preadv", "optimizer states could not be read from .*the step was not taken"),
        ("streamed layers", "preadv", "streamed layers could not be read from .*the step was not taken"),
        # Gradients are the first that is written, as they wait for the norm of all; parameters change later.
        ("streamed layers", "pwritev", "streamed layers could not be written to .*the step was not taken"),
    ],
)
def test_a_disk_that_fails_before_the_update_fails_one_step(
    technique: str, name: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = untouched(technique)
    made = engine(technique)
    torch.manual_seed(11)
    for number in range(FAILING):
        made.step(batch(number))
    failing, calls = failing_once(name)
    with monkeypatch.context() as patch:
        patch.setattr("memfit.storage.files.os", failing)
        with pytest.raises(EngineError, match=sentence):
            made.step(batch(FAILING))
    assert calls
    assert alike(state_of(made), states[FAILING - 1])
    for number in range(FAILING, STEPS):
        made.step(batch(number))
        assert alike(state_of(made), states[number]), number


def test_a_disk_that_fails_in_the_middle_of_the_update_is_named_and_not_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = engine("8-bit state on disk")
    made.step(batch(0))
    with monkeypatch.context() as patch:
        patch.setattr("memfit.storage.files.os", failing_once("pwritev")[0])
        with pytest.raises(
            EngineError, match=r"failed half way \(optimizer states could not be written to .*\(Input/output error\)"
        ):
            made.step(batch(1))
    with pytest.raises(EngineError, match="load the last snapshot"):
        made.step(batch(2))


@pytest.mark.parametrize(
    ("technique", "reserved", "sentence"),
    [
        (
            "swap",
            0,
            "free space there, set MEMFIT_OFFLOAD_DIR to a folder on a larger disk, or plan with a smaller host_budget",
        ),
        (
            "8-bit state on disk",
            0,
            "free space there, set MEMFIT_OFFLOAD_DIR to a folder on a larger disk, or keep the state",
        ),
        (
            "streamed layers",
            1,
            "free space there, set MEMFIT_OFFLOAD_DIR to a folder on a larger disk, or plan without",
        ),
        (
            "streamed layers",
            4,
            "free space there, set MEMFIT_OFFLOAD_DIR to a folder on a larger disk, or plan without",
        ),
    ],
    ids=["swap", "state", "layers", "state of layers"],
)
def test_without_room_below_nothing_is_begun_and_the_model_is_whole(
    technique: str, reserved: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(technique)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    right, calls = os.posix_fallocate, 0

    def full(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > reserved:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        right(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(InfeasibleError, match=sentence):
            memfit.apply(planned(technique), model)
    assert calls == reserved + 1
    assert alike(dict(model.state_dict()), before)
    made = memfit.apply(planned(technique), model)
    torch.manual_seed(11)
    made.step(batch(0))
    assert alike(state_of(made), untouched(technique)[0])


def test_a_fit_that_fails_gives_streamed_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model: nn.Module = build("streamed layers")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SnapshotError, match="free some disk space, set TMPDIR"):
        memfit.fit(model, batch(0), loss_of, 1 << 40, fixed={"micro_batches": 1, "streamed": "blocks"})
    assert alike(dict(model.state_dict()), before)


if __name__ == "__main__":
    fill_up_and_go_on()
