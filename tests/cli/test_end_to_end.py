"""The whole thing in processes of its own: plan, train, Ctrl-C, resume, with the engine that users get."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forking
from memfit.cli.main import main
from memfit.train import log

EXAMPLES = Path(__file__).parents[2] / "examples" / "cli"

TOY = """
import itertools, os, signal
from torch import nn

seen = itertools.count(1)  # in no module: planning looks at what forwards do that count in one

class Net(nn.Module):
    def __init__(self, interrupt_at):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
        )
        self.interrupt_at = interrupt_at

    def forward(self, x, y):
        if os.path.exists("training"):  # not while planning
            if next(seen) == self.interrupt_at:
                os.kill(os.getpid(), signal.SIGINT)
        return (self.body(x).squeeze(-1) - y).square().mean()

def build(interrupt_at=0):
    return Net(interrupt_at)
"""

CONFIG = """
model: {python: "toy:build"}
data: {train: train.npz, validation: validation.npz}
fit: {budget: 225KiB, global_batch: 128, clip_norm: 1.0, fixed: {micro_batches: 1}}
optim: {lr: 1e-2}
schedule: {name: cosine, warmup_steps: 2}
train: {steps: 9, save_every: 4, eval_every: 2, log_every: 1, out: whole}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(TOY, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    random = np.random.default_rng(0)
    for name, samples in (("train", 500), ("validation", 100)):
        x = random.standard_normal((samples, 8)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.sin(x.sum(1)))
    return tmp_path


def _command(folder: Path, arguments: tuple[str, ...], out: Path, err: Path) -> None:
    """In a process of its own."""
    os.chdir(folder)
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.exit(main(list(arguments)))


def memfit(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Status, JSON answer and messages of the command in a process that has imported torch."""
    with tempfile.TemporaryDirectory() as said:
        out, err = Path(said, "out"), Path(said, "err")
        process = forking.process(_command, folder, (*arguments, "--json"), out, err)
        forking.start([process])
        try:
            process.join(300)
        finally:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return process.exitcode, json.loads(out.read_text()), err.read_text()


def from_the_beginning(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """The same in a new interpreter, as from a shell."""
    command = [sys.executable, "-m", "memfit", *arguments, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def numbers(out: Path) -> list[tuple[Any, ...]]:
    return [(line["step"], line.get("loss"), line.get("validation_loss"), line.get("lr")) for line in log.read(out)]


def test_a_run_interrupted_by_ctrl_c_and_resumed_ends_with_the_same_bits(folder: Path) -> None:
    status, whole, _ = memfit(folder, "train", "run.yaml")
    assert (status, whole["step"]) == (0, 9)
    assert whole["peak_bytes"] <= whole["budget_bytes"]
    assert whole["peak_bytes"] == pytest.approx(whole["predicted_peak_bytes"], rel=0.01)

    # The rehearsal runs forwards as well, in the same process; which step it hits does not matter.
    (folder / "training").touch()
    status, cut, messages = memfit(
        folder, "train", "run.yaml", "--set", "train.out=cut", "--set", "model.args={interrupt_at: 12}"
    )
    assert (status, cut["status"]) == (130, "interrupted"), messages
    assert 0 < cut["step"] < 9
    (folder / "training").unlink()
    status, resumed, _ = memfit(folder, "resume", "cut")

    assert (status, resumed["step"]) == (0, 9)
    assert numbers(folder / "cut") == numbers(folder / "whole")
    one, other = (torch.load(folder / name / "model.pt", weights_only=True) for name in ("whole", "cut"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_plan_says_whether_it_fits_and_training_follows_it(folder: Path) -> None:
    status, fits, _ = memfit(folder, "plan", "run.yaml", "--save", "plan.json")
    assert (status, fits["fits"]) == (0, True)
    assert fits["peak_bytes"] <= fits["budget_bytes"] < fits["plain_peak_bytes"]

    status, done, _ = memfit(folder, "train", "run.yaml", "--plan", "plan.json")
    assert status == 0
    assert done["peak_bytes"] == pytest.approx(fits["peak_bytes"], rel=0.01)


@pytest.mark.slow
def test_what_cannot_fit_says_what_would(folder: Path) -> None:
    status, none, messages = memfit(folder, "plan", "run.yaml", "--budget", "40KiB")

    assert (status, none["fits"]) == (1, False)
    assert none["minimum_bytes"] > 40 * 1024
    assert "Traceback" not in messages


@pytest.mark.slow  # as with Ctrl-C, in the quick run
def test_a_terminated_process_leaves_a_snapshot_too(folder: Path) -> None:
    command = [sys.executable, "-m", "memfit", "train", "run.yaml", "--set", "train.steps=100000"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGTERM)
                break
        out, _ = process.communicate(timeout=300)

    assert process.returncode == 128 + signal.SIGTERM
    assert "To go on: memfit resume" in out


def test_the_example_trains(tmp_path: Path) -> None:
    status, data, messages = memfit(
        EXAMPLES,
        "train",
        "byte_gpt.yaml",
        *("--set", f"train.out={tmp_path / 'out'}"),
        *("--set", "train.steps=2"),
        *("--set", "fit.fixed={micro_batches: 1}"),  # one capture instead of several
    )

    assert status == 0, messages
    assert data["peak_bytes"] <= data["budget_bytes"]


def test_a_trace_written_once_gives_plans_for_other_budgets_without_the_model(folder: Path) -> None:
    status, first, _ = memfit(folder, "plan", "run.yaml", "--save-trace", "step.gz")
    assert status == 0
    for name in ("toy.py", "run.yaml", "train.npz"):
        (folder / name).unlink()
    status, again, _ = from_the_beginning(
        folder, "plan", "--trace", "step.gz", "--budget", "225KiB", "--save", "plan.json"
    )
    assert status == 0
    assert again["peak_bytes"] == first["peak_bytes"]
    assert (folder / "plan.json").exists()
    status, refused, message = memfit(folder, "plan", "--trace", "step.gz", "--budget", "10KiB")
    assert status == 1
    assert refused["minimum_bytes"] > 10240
    assert "10.0 KiB is too little" in message
