"""Several devices on the command line: planned for on a machine that has none of them, and trained in as many processes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import memfit
from cli.commands import Ran
from sharding import fits, toy_run
from sharding.ranks import as_torchrun_tells, on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = toy_run.written(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the configuration's folder goes in front
    monkeypatch.delitem(sys.modules, "ranks_toy", raising=False)
    return path


def test_a_plan_for_devices_that_are_not_here_tells_the_peak_of_each_rank(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    zero = ("--set", "fit.fixed.sharding=zero3")
    told = Ran(capsys, "plan", run_file, "--devices", "4x24GiB", *zero, "--save", "plan.json", "--json")
    in_file = Ran(capsys, "plan", run_file, "--set", "fit.devices=4x24GiB", "--set", "fit.fixed.sharding=data")

    assert told.status == in_file.status == 0
    assert len(told.data["ranks"]) == 4
    assert max(rank["peak_bytes"] for rank in told.data["ranks"]) == told.data["peak_bytes"] <= 1 << 20
    saved = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert memfit.Plan.from_json(saved).choices.sharding.endswith("/4")
    assert "float32[2, 64]" in saved["signature"]  # a quarter of the batch
    assert "At its peak each of the 4 ranks holds " in in_file.out


def test_a_gpu_that_the_configuration_names_is_planned_for_and_not_trained_on(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    named = Ran(capsys, "plan", run_file, "--set", "fit.device=4090", "--budget", "1GiB", "--json")
    asked = Ran(capsys, "plan", run_file, "--device", "4090", "--budget", "1GiB", "--json")
    trained = Ran(capsys, "train", run_file, "--set", "fit.device=4090")

    assert named.status == asked.status == 0
    assert named.data == asked.data
    assert trained.status == 3
    assert "fit.device: '4090' is the name of a GPU" in trained.err


@pytest.mark.parametrize(
    ("settings", "status", "says"),
    [
        (["--devices", "some"], 3, 'write how many and what, as "4x24GiB"'),
        (["--devices", "0x1GiB"], 3, 'write how many and what, as "4x24GiB"'),
        (["--devices", "2x1GiB+2x2GiB"], 3, "for devices of several kinds"),
        (["--devices", "1x1GiB"], 3, "devices names one device"),
        (["--devices", "4xnosuch"], 3, "no device called"),
        (["--devices", "4x512KiB"], 3, "fit.budget: 1.00 MiB is more than the 512 KiB that each of the 4 devices has"),
        (["--devices", "9x1GiB"], 3, "a batch has 8 samples for 9 ranks"),
        (["--devices", "4x1GiB", "--budget", "10KiB"], 1, ".\nNot tried: more devices, a smaller batch"),
        (["--devices", "4xh100", "--few-blocks"], 3, "the model has no list of repeated blocks that are alike"),
        (["--devices", "1xh100", "--few-blocks"], 3, "devices names one device, and a step is shared out among two"),
        (["--devices", "4x1GiB", "--save-trace", "t.json"], 3, "fit.devices: a trace is of one device"),
    ],
)
def test_what_cannot_be_planned_for_is_one_sentence(
    capsys: pytest.CaptureFixture[str], run_file: Path, settings: list[str], status: int, says: str
) -> None:
    ran = Ran(capsys, "plan", run_file, "--set", "fit.fixed.sharding=zero1", *settings)

    assert ran.status == status, ran.err
    assert says in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "devices:\n- number: 2\n  memory_bytes: 1GiB\n",
            "line 3: devices[0].memory_bytes: no such key; did you mean devices[0].memory?",
        ),
    ],
)
def test_a_machine_file_that_does_not_do_is_told_in_one_sentence(
    capsys: pytest.CaptureFixture[str], run_file: Path, text: str, says: str
) -> None:
    Path("machines.yaml").write_text(text, encoding="utf-8")
    ran = Ran(capsys, "plan", run_file, "--devices", "machines.yaml")

    assert (ran.status, "Traceback" in ran.err) == (3, False)
    assert says in ran.err.splitlines()[-1]


DEEP = """
from ranks_toy import *

class Deep(Net):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)))

def build():
    return Deep()
"""


@pytest.mark.slow
def test_a_few_blocks_tell_the_step_of_many_devices(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    Path("deep_toy.py").write_text(DEEP, encoding="utf-8")
    settings = ("--devices", "4xh100", "--few-blocks", "--set", "fit.fixed.sharding=zero3", "--json")
    ran = Ran(capsys, "plan", run_file, "--set", "model.python=deep_toy:build", "--set", "fit.budget=1GiB", *settings)

    assert ran.status == 0, ran.err
    told = [(each["recompute"], each["fits"]) for each in ran.data["predictions"]]
    assert told == [(recompute, True) for recompute in ("none", "selective", "alternate", "blocks")]


def test_a_frontier_is_of_one_device(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    ran = Ran(capsys, "frontier", run_file, "--set", "fit.devices=4")

    assert (ran.status, "fit.devices: a frontier is of one device" in ran.err) == (3, True)


def parameters(out: str) -> dict[str, torch.Tensor]:
    trained: dict[str, torch.Tensor] = torch.load(Path(out, "model.pt"))
    return trained


def losses(out: str) -> list[float]:
    lines = [json.loads(line) for line in Path(out, "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line.get("loss", line.get("validation_loss")) for line in lines]


def alone(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    assert Ran(capsys, "train", run_file, "--set", "train.out=one").status == 0


def same_as_alone(out: str) -> None:
    """Losses, evaluations and parameters: of the last batch of an epoch, which is smaller, too."""
    assert losses(out) == pytest.approx(losses("one"), abs=1e-6, rel=1e-6)
    whole = parameters("one")
    assert parameters(out).keys() == whole.keys()
    for name, value in parameters(out).items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-6)


def test_under_somebodys_torchrun_ranks_join_and_train_as_one_process_does(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    alone(capsys, run_file)
    settings = ("train.out=two", "fit.fixed.sharding=zero3", "train.save_every=2", "train.save_async=true")
    arguments = ("train", "run.yaml", "--json", *(word for setting in settings for word in ("--set", setting)))

    (first, told), (other, silent) = on_ranks(2, fits.commanded, str(run_file.parent), *arguments, joined=False)

    assert (first, other, silent) == (0, 0, "")
    answer = json.loads(told)
    assert (answer["status"], answer["step"], answer["snapshot"]) == (
        "done",
        5,
        str(run_file.parent / "two" / "step-000005"),
    )
    same_as_alone("two")
    kept = memfit.Plan.load(Path("two", "plan.json"))
    assert kept.choices.sharding == "zero3/2"
    assert sorted(folder.name for folder in Path("two").glob("*step-*")) == ["step-000004", "step-000005"]
    # Gone on from by one process: all is done, and the parameters are the same.
    ran = Ran(capsys, "resume", "two", "--nproc", "1", "--set", "train.steps=5", "--json")
    assert (ran.status, ran.data["step"]) == (0, 5)
    same_as_alone("two")
    again = Ran(capsys, "resume", "two", "--nproc", "1", "--restarts", "2")
    assert again.status == 3
    assert "--restarts goes on when one of several processes was lost, and this run has one" in again.err


@pytest.mark.slow
def test_a_rank_above_its_budget_is_repaired_in_processes_that_were_started_with_a_plan(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    way = ("--set", "model.python=ranks_toy:build_fuller", "--set", "fit.fixed.sharding=data", "--json")
    plain = Ran(capsys, "plan", run_file, "--devices", "2", "--save", "plan.json", *way).data["peak_bytes"]
    command = [sys.executable, "-m", "memfit", "train", "run.yaml", "--nproc", "2", "--budget", str(plain), *way]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)

    assert done.returncode == 0, done.stderr
    made = memfit.Plan.load(Path("out", "plan.json"))
    assert any("above the budget; planned again for" in note for note in made.notes)
    assert made.prediction.peak_bytes < made.budget_bytes == plain

    roomy = memfit.Plan.load("plan.json")
    replace(roomy, budget_bytes=plain).save("plan.json")  # by another process, which has not left what it was made of
    told = subprocess.run(
        [*command, "--plan", "plan.json", "--set", "train.out=other"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert told.returncode != 0
    assert "on rank 1, " in told.stderr
    assert "the plan was made by another process, so no smaller one can be made here" in told.stderr


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_with_stages_train_as_one_process_does_and_are_gone_on_from(
    capsys: pytest.CaptureFixture[str],
    run_file: Path,
    resumed: bool,  # noqa: FBT001 - a case
) -> None:
    alone(capsys, run_file)
    settings = ("--set", "train.out=two", "--set", "fit.fixed.sharding=pipeline")

    (first, told), (other, silent) = on_ranks(
        2, fits.commanded, str(run_file.parent), "train", "run.yaml", "--json", *settings, joined=False, limit=400.0
    )

    assert (first, other, silent) == (0, 0, "")
    answer = json.loads(told)
    for rank in answer["ranks"]:
        assert 0.99 * rank["predicted_peak_bytes"] <= rank["measured_peak_bytes"] <= 1.01 * rank["predicted_peak_bytes"]
        assert 0 <= rank["waiting"] < 1
        assert 0 < rank["predicted_waiting"] < 1
    report = json.loads(Path("two", "report.json").read_text(encoding="utf-8"))
    assert [name for name, _ in report["facts"] if name.startswith("rank")] == ["rank 0", "rank 1"]
    assert len(report["rehearsal"]["ranks"]) == 2
    same_as_alone("two")  # of the last batch of an epoch, which is smaller, and of evaluations, too
    assert memfit.Plan.load(Path("two", "plan.json")).choices.sharding == "1f1b/2"
    if not resumed:
        return
    ran = Ran(capsys, "resume", "two", "--nproc", "1", "--set", "train.steps=5", "--json")
    assert (ran.status, ran.data["step"]) == (0, 5)
    same_as_alone("two")


CLASSIFIER = """
from ranks_toy import *

class Classifier(Net):
    def forward(self, x, labels):
        logits = self.body(x)[:, :2]
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}

def build():
    return Classifier()
"""


def test_the_accuracy_of_a_classifier_in_stages_is_that_of_one_process(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    Path("classifier_toy.py").write_text(CLASSIFIER, encoding="utf-8")
    for name in ("train", "validation"):
        with np.load(f"{name}.npz") as arrays:
            np.savez(f"{name}.npz", x=arrays["x"], labels=(arrays["y"] > 0).astype(np.int64))
    settings = ["--set", "model.python=classifier_toy:build", "--set", "train.eval_every=1"]
    settings += ["--set", "early_stopping.metric=validation_accuracy", "--set", "early_stopping.patience=5"]
    assert Ran(capsys, "train", run_file, *settings, "--set", "train.out=one").status == 0

    stages = ("--set", "train.out=two", "--set", "fit.fixed.sharding=1f1b/2", "--json")
    (first, told), (other, _) = on_ranks(
        2, fits.commanded, str(run_file.parent), "train", "run.yaml", *settings, *stages, joined=False, limit=400.0
    )

    assert (first, other) == (0, 0)
    one, two = (accuracies(folder) for folder in ("one", "two"))
    assert None not in one
    assert one == two
    assert json.loads(told)["validation_accuracy"] == two[-1]


def accuracies(folder: str) -> list[float | None]:
    """Of all evaluations of a run."""
    lines = map(json.loads, Path(folder, "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [line.get("validation_accuracy") for line in lines if "validation_loss" in line]


def test_a_run_that_goes_on_under_another_plan_is_explained_with_what_was_measured_under_that(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    divided = ("--set", "fit.fixed.micro_batches=4", "--set", "train.out=one")
    assert Ran(capsys, "train", run_file, *divided).status == 0
    before = Ran(capsys, "explain", "one", "--json").data
    assert Ran(capsys, "resume", "one", "--set", "fit.fixed.micro_batches=1", "--set", "train.steps=9").status == 0
    after = Ran(capsys, "explain", "one", "--json").data

    assert after["peak_bytes"] < before["peak_bytes"] == before["run"]["peak_bytes"]
    assert after["run"]["peak_bytes"] == after["peak_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["data", "zero1", "zero2/2", "zero2+whole", "zero3", "pipeline"])
def test_as_many_processes_as_asked_for_train_as_one_does(
    capsys: pytest.CaptureFixture[str], run_file: Path, way: str
) -> None:
    alone(capsys, run_file)
    command = [
        "train",
        "run.yaml",
        "--nproc",
        "2",
        "--json",
        "--set",
        "train.out=two",
        "--set",
        f"fit.fixed.sharding={way}",
    ]

    done = subprocess.run(
        [sys.executable, "-m", "memfit", *command], capture_output=True, text=True, check=False, timeout=300
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 5
    assert done.stderr.count("step 5/5") == 1  # rank 0 alone prints
    same_as_alone("two")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["--nproc", "1"], "--nproc 1: give a number of processes from 2 on"),
        (["--nproc", "2", "--devices", "4x1GiB"], "fit.devices: '4x1GiB' names 4 devices, and the run has 2 ranks"),
        (["--nproc", "9"], "a batch has 8 samples for 9 ranks"),
        (["--nproc", "4:2"], '--nproc 4:2: give a number of processes from 2 on, or the fewest and the most, as "2:4"'),
        (["--nproc", "some"], "--nproc some: give a number of processes from 2 on"),
        (["--restarts", "2"], "--restarts starts processes again, and --nproc says how many there are: give both"),
        (["--nproc", "2", "--set", "train.rank_timeout=0"], "--set train.rank_timeout=0: 0.0 is less than 1"),
        (["--nproc", "2", "--set", "report.frontier=true"], "report.frontier: a frontier is of one device"),
        (["--devices", "2x1GiB"], "names 2 devices, and this process is alone: memfit train --nproc 2"),
    ],
)
def test_what_ranks_cannot_do_is_one_sentence_before_any_starts(
    capsys: pytest.CaptureFixture[str], run_file: Path, settings: list[str], says: str
) -> None:
    ran = Ran(capsys, "train", run_file, *settings)

    assert ran.status == 3, ran.err
    assert says in ran.err.splitlines()[-1]
    assert not Path("out").exists()


def test_a_plan_for_another_world_is_refused_before_any_rank_starts(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    Ran(capsys, "plan", run_file, "--devices", "4x1GiB", "--set", "fit.fixed.sharding=data", "--save", "four.json")
    ran = Ran(capsys, "train", run_file, "--nproc", "2", "--plan", "four.json")

    assert ran.status == 3
    assert "the plan is for 4 ranks, and 2 were started" in ran.err.splitlines()[-1]


def test_a_world_of_another_size_is_refused_in_each_rank(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in as_torchrun_tells(1, 2, 1).items():
        monkeypatch.setenv(name, value)

    other = Ran(capsys, "train", run_file, "--devices", "4x1GiB")
    nproc = Ran(capsys, "train", run_file, "--nproc", "3")

    assert "names 4 devices, and the run has 2 ranks" in other.err.splitlines()[-1]
    assert "--nproc 3: this process is one of 2 that torchrun has started" in nproc.err.splitlines()[-1]
