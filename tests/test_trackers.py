"""What a run tells is found again by the libraries' own readers; a library that fails ends no training; one that is missing is named before any."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import InputError
from memfit.trackers import Tracker
from memfit.trackers import tensorboard as tensorboard_file
from memfit.trackers.start import End, flat
from memfit.values.report import StepRecord
from train.fakes import plan

RECORDS = (
    StepRecord(1, 2.5, 0.25),
    StepRecord(2, 2.0, 0.125, micro_batches=4, peak_bytes=500_000),
    StepRecord(3, math.inf, 0.125, skipped=True),
    StepRecord(4, math.nan, 0.125),
)


def needs(package: str) -> pytest.MarkDecorator:
    there = find_spec(package) is not None
    return pytest.mark.skipif(not there, reason=f"{package} is not installed: pip install 'memfit[{package}]'")


def told(tracker: Tracker, records: tuple[StepRecord, ...] = RECORDS) -> None:
    for record in records:
        tracker.step(record, learning_rate=0.1 / record.step)


class Recorder:
    """A library that keeps what it gets, and fails when it is told to."""

    look = "look here"

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.ends: list[End] = []
        self.error: Exception | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.error is not None:
            raise self.error
        self.rows.append((step, metrics))

    def close(self, end: End) -> None:
        self.ends.append(end)
        if self.error is not None:
            raise self.error


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Stands in for TensorBoard."""
    made = Recorder()
    monkeypatch.setattr(tensorboard_file, "begin", lambda start: made)
    monkeypatch.setitem(sys.modules, "tensorboard", sys)
    return made


# ------------------------------------------------------------------------------------------------------------- what is told


def test_a_step_is_told_with_predicted_and_measured_bytes(recorder: Recorder, tmp_path: Path) -> None:
    with memfit.tracker("tensorboard", tmp_path, plan=plan(budget_bytes=2**20, peak_bytes=2**19)) as tracker:
        told(tracker, RECORDS[:3])
        tracker.validation(3, 1.5)

    bytes_of_the_plan = {"memory/predicted_peak_bytes": 2**19, "memory/budget_bytes": 2**20}
    assert recorder.rows[1] == (
        2,
        {
            "train/loss": 2.0, "train/seconds": 0.125, "train/micro_batches": 4, "train/skipped_steps": 0, "train/lr": 0.05,
            "memory/peak_bytes": 500_000, **bytes_of_the_plan,
        },
    )  # fmt: skip
    assert "memory/peak_bytes" not in recorder.rows[0][1]
    assert [row["train/skipped_steps"] for _, row in recorder.rows[:3]] == [0, 0, 1]
    assert recorder.rows[3] == (3, {"validation/loss": 1.5})
    assert recorder.ends == ["finished"]


def test_without_a_plan_there_are_no_predicted_bytes(recorder: Recorder, tmp_path: Path) -> None:
    with memfit.tracker("tensorboard", tmp_path) as tracker:
        tracker.step(RECORDS[0])

    assert recorder.rows == [
        (1, {"train/loss": 2.5, "train/seconds": 0.25, "train/micro_batches": 1, "train/skipped_steps": 0})
    ]


def test_nested_settings_become_flat_names() -> None:
    assert dict(flat({"fit": {"budget": "1GiB", "fixed": {}}, "seed": 0})) == {
        "fit.budget": "1GiB",
        "fit.fixed": {},
        "seed": 0,
    }


def test_how_a_block_ended_is_told(recorder: Recorder, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), memfit.tracker("tensorboard", tmp_path):
        raise ZeroDivisionError
    with pytest.raises(KeyboardInterrupt), memfit.tracker("tensorboard", tmp_path):
        raise KeyboardInterrupt

    assert recorder.ends == ["failed", "stopped"]


# ----------------------------------------------------------------------------------------------------------------- failures


def test_a_library_that_fails_is_told_of_once_and_ends_nothing(recorder: Recorder, tmp_path: Path) -> None:
    notes: list[str] = []
    tracker = memfit.tracker("tensorboard", tmp_path, note=notes.append)
    tracker.step(RECORDS[0])
    recorder.error = OSError(28, "No space left on device")

    told(tracker)
    tracker.validation(4, 1.0)
    tracker.close()

    assert notes == [
        "tracking with tensorboard has stopped (OSError: [Errno 28] No space left on device); training goes on without it"
    ]
    assert len(recorder.rows) == 1
    assert recorder.ends == ["failed"]


def test_a_library_that_fails_at_the_end_is_told_of(recorder: Recorder, tmp_path: Path) -> None:
    tracker = memfit.tracker("tensorboard", tmp_path)
    recorder.error = RuntimeError("gone\nand more")

    with pytest.warns(UserWarning, match=r"tracking with tensorboard has stopped \(RuntimeError: gone\)"):
        tracker.close()


def test_an_unknown_tracker_is_told_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="take one of tensorboard, mlflow, wandb, trackio"):
        memfit.tracker("comet", tmp_path)


def test_a_library_that_cannot_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "tensorboard", sys)

    with pytest.raises(InputError, match="tracking with tensorboard cannot start .FileExistsError"):
        memfit.tracker("tensorboard", tmp_path)


# -------------------------------------------------------------------------------------------------------------- TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return {tag: [(each.step, each.value) for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def texts(folder: Path) -> dict[str, str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return {tag: read.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}


@needs("tensorboard")
def test_tensorboard_reads_back_what_was_told(tmp_path: Path) -> None:
    with memfit.tracker("tensorboard", tmp_path, plan=plan(), settings={"optim": {"lr": 0.1}}) as tracker:
        told(tracker)
        tracker.validation(4, 1.5)

    read = scalars(tmp_path)
    assert read["train/loss"][:2] == [(1, 2.5), (2, 2.0)]
    assert read["train/loss"][2] == (3, math.inf)
    assert math.isnan(read["train/loss"][3][1])
    assert read["memory/peak_bytes"] == [(2, 500_000)]
    assert read["memory/predicted_peak_bytes"] == [(step, 2**19) for step in (1, 2, 3, 4)]
    assert read["memory/budget_bytes"][0] == (1, 2**20)
    assert read["train/micro_batches"][1] == (2, 4)
    assert read["train/skipped_steps"] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert read["validation/loss"] == [(4, 1.5)]
    described = texts(tmp_path)
    assert '"lr": 0.1' in described["settings/text_summary"]
    assert '"budget_bytes": 1048576' in described["settings/text_summary"]
    assert "Fits: " in described["plan/text_summary"]


@needs("tensorboard")
def test_a_resumed_tensorboard_run_shows_steps_taken_again_once(tmp_path: Path) -> None:
    with memfit.tracker("tensorboard", tmp_path) as tracker:
        told(tracker)  # killed after step 4, its snapshot is of step 2

    with memfit.tracker("tensorboard", tmp_path, step=2) as tracker:
        told(tracker, (StepRecord(3, 1.5, 0.1), StepRecord(4, 1.25, 0.1)))

    assert scalars(tmp_path)["train/loss"] == [(1, 2.5), (2, 2.0), (3, 1.5), (4, 1.25)]


@needs("tensorboard")
def test_a_plain_loop_with_an_engine_is_tracked(tmp_path: Path, one_thread: None) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    batch = torch.randn(64, 8)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    made = memfit.plan(model, batch, loss_fn, "1GiB", lambda p: torch.optim.SGD(p, lr=0.1))
    engine = memfit.apply(made, model)
    with memfit.tracker("tensorboard", tmp_path, plan=engine.plan) as tracker:
        records = [engine.step(batch, meter=step == 1) for step in range(2)]
        for record in records:
            tracker.step(record, learning_rate=0.1)

    read = scalars(tmp_path)
    assert [value for _, value in read["train/loss"]] == pytest.approx([record.loss for record in records])
    assert read["memory/peak_bytes"] == [(2, records[1].peak_bytes)]
    assert read["memory/predicted_peak_bytes"][0] == (1, made.prediction.peak_bytes)


# ------------------------------------------------------------------------------------------------------------------- MLflow


@pytest.mark.slow  # seconds go by while the library starts
@needs("mlflow")
@needs("sqlalchemy")
@pytest.mark.filterwarnings("ignore")  # of MLflow's own, about libraries it uses
def test_mlflow_reads_back_what_was_told_and_goes_on_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow import MlflowClient

    with memfit.tracker("mlflow", tmp_path, plan=plan(), settings={"optim": {"lr": 0.1}}, name="first") as tracker:
        told(tracker)
    run = json.loads((tmp_path / "mlflow" / "run.json").read_text())["run"]
    with (
        pytest.raises(KeyboardInterrupt),
        memfit.tracker("mlflow", tmp_path, settings={"optim": {"lr": 0.01, "eps": 1}}, step=4) as tracker,
    ):
        tracker.step(StepRecord(5, 1.0, 0.1))
        raise KeyboardInterrupt

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    read = client.get_run(run)
    losses = [(each.step, each.value) for each in client.get_metric_history(run, "train/loss")]
    assert losses[:2] == [(1, 2.5), (2, 2.0)]
    assert math.isnan(losses[3][1])
    assert losses[4:] == [(5, 1.0)]
    assert [each.value for each in client.get_metric_history(run, "memory/peak_bytes")] == [500_000]
    assert read.data.metrics["memory/predicted_peak_bytes"] == 2**19
    assert read.data.params["optim.lr"] == "0.1"
    assert read.data.params["optim.eps"] == "1"
    assert read.data.params["plan.budget_bytes"] == str(2**20)
    assert read.data.tags["from_step_5.optim.lr"] == "0.01"
    assert read.data.tags["mlflow.note.content"].startswith("Fits: ")
    assert (read.info.run_name, read.info.status) == ("first", "KILLED")
    with memfit.tracker("mlflow", tmp_path, name="second"):
        assert json.loads((tmp_path / "mlflow" / "run.json").read_text())["run"] != run


# --------------------------------------------------------------------------------------------------------- Weights & Biases

WANDB = """
import json, sys
import memfit
from test_trackers import told
from memfit.values.report import StepRecord
from train.fakes import plan

with memfit.tracker("wandb", sys.argv[1], plan=plan(), settings={"optim": {"lr": 0.1}}, name="first") as tracker:
    told(tracker)
with memfit.tracker("wandb", sys.argv[1], step=4) as tracker:
    tracker.step(StepRecord(5, 1.0, 0.1))
print(tracker.look)
"""


def logged(content: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, behind W&B's header of 7 bytes: blocks of 32 KiB, each record in one or more pieces."""
    at, record = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # what is too short for a header is filled up
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # whole, or the last piece
            yield record
            record = b""


def wandb_records(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """History and configuration of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    history, config = [], {}
    for data in logged(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            history.append(
                {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
        for part in (record.config, record.run.config):
            config.update({item.key: json.loads(item.value_json) for item in part.update})
    return history, config


@pytest.mark.slow  # seconds go by while the library starts
@needs("wandb")
@pytest.mark.filterwarnings("ignore")  # of W&B's own readers
def test_wandb_keeps_an_offline_run_and_goes_on_with_it(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment |= {"PYTHONPATH": os.pathsep.join(["tests", *sys.path]), "HOME": str(tmp_path)}

    # In a process of its own: it starts a service that lives as long as the process.
    done = subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path / "run")],
        capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL, timeout=120, cwd=Path(__file__).parents[1],
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "run" / "wandb" / "run.json").read_text())["run"]
    assert done.stdout == f"wandb sync {tmp_path}/run/wandb/wandb/offline-run-*-{run}\n"
    first, second = sorted((tmp_path / "run").rglob("*.wandb"))
    assert first.name == second.name == f"run-{run}.wandb"
    history, config = wandb_records(first)
    assert [(row["_step"], row["train/loss"]) for row in history][:2] == [(1, 2.5), (2, 2.0)]
    assert history[1]["memory/peak_bytes"] == 500_000
    assert history[1]["memory/predicted_peak_bytes"] == 2**19
    assert config["optim"] == {"lr": 0.1}
    assert config["plan"]["budget_bytes"] == 2**20
    assert [(row["_step"], row["train/loss"]) for row in wandb_records(second)[0]] == [(5, 1.0)]


@pytest.mark.slow  # seconds go by while the library starts
@needs("wandb")
@pytest.mark.filterwarnings("ignore")  # as above
def test_wandb_never_asks_for_a_login(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path), "WANDB_MODE": "online"}
    code = "import sys, memfit; memfit.tracker('wandb', sys.argv[1])"

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip

    assert "WANDB_MODE is 'online' and Weights & Biases knows no key" in done.stderr


# ------------------------------------------------------------------------------------------------------------------ trackio

TRACKIO = """
import sys
import memfit
from test_trackers import told
from memfit.values.report import StepRecord
from train.fakes import plan

with memfit.tracker("trackio", sys.argv[1], plan=plan(), settings={"optim": {"lr": 0.1}}, name="first") as tracker:
    told(tracker)
with memfit.tracker("trackio", sys.argv[1], step=4) as tracker:
    tracker.step(StepRecord(5, 1.0, 0.1))
"""


@pytest.mark.slow  # seconds go by while the library starts
@needs("trackio")
def test_trackio_keeps_a_local_run_and_goes_on_with_it(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRACKIO_")}
    environment |= {"PYTHONPATH": os.pathsep.join(["tests", *sys.path]), "TRACKIO_DIR": str(tmp_path / "home")}
    read = "import sys, json; from trackio.sqlite_storage import SQLiteStorage as s; print(json.dumps(s.get_logs('memfit', sys.argv[1]), default=str))"

    # In a process of its own: trackio reads its folder when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path / "run")],
        capture_output=True, text=True, check=False, env=environment, timeout=120, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    run = json.loads((tmp_path / "run" / "trackio" / "run.json").read_text())["run"]
    logs = subprocess.run(
        [sys.executable, "-c", read, run], capture_output=True, text=True, check=True, env=environment, timeout=120
    )

    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    rows = json.loads(logs.stdout)
    assert [(row["step"], row["train/loss"]) for row in rows][:2] == [(1, 2.5), (2, 2.0)]
    assert rows[1]["memory/peak_bytes"] == 500_000
    assert rows[1]["memory/predicted_peak_bytes"] == 2**19
    assert math.isnan(rows[3]["train/loss"])
    assert (rows[4]["step"], rows[4]["train/loss"]) == (5, 1.0)
