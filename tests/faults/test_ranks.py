"""A rank that is killed or stops answering: the run goes on from its last snapshot, and ends with the parameters of a run that nothing befell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import psutil
import pytest
import torch

from memfit.units import format_seconds
from sharding import toy_run

STEPS = 40
LIMIT_SECONDS = 300.0
# A rank that waits for its turn on a busy computer is not to be taken for lost, which would use up the restarts.
RANK_TIMEOUT = 15.0
ZERO3 = ("fit.fixed.sharding=zero3",)
# In so many micro-batches the numbers do not depend on where the model is cut, which is decided by seconds.
STAGES = ("fit.fixed.sharding=1f1b", "fit.fixed.micro_batches=4")


class Launched:
    """`memfit train --nproc` in a process of its own.

    Args:
        folder: with the run's files.
        out: of the run, in it.
        options: the number of processes, and further ones; none for one process.
        more: further settings.
        way: of sharing the step out.
        environment: besides that of this process.
    """

    def __init__(
        self,
        folder: Path,
        out: str,
        *options: str,
        more: Sequence[str] = (),
        way: Sequence[str] = ZERO3,
        **environment: str,
    ) -> None:
        self._log = folder / f"{out}.txt"
        settings = [
            "model.python=ranks_toy:build_slow", "optim.name=adamw", "train.save_every=3", f"train.steps={STEPS}", "train.eval_every=0",
            f"train.out={out}", f"train.rank_timeout={RANK_TIMEOUT}", *more,
        ]  # fmt: skip
        command = [sys.executable, "-m", "memfit", "train", "run.yaml"]
        if options:
            settings += way
            command += ["--nproc", *options]
        command += [word for setting in settings for word in ("--set", setting)]
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    @property
    def told(self) -> str:
        """All that it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for_step(self, step: int) -> None:
        """Until so many steps are done."""
        end = time.monotonic() + LIMIT_SECONDS
        while not re.search(rf"^step {step}/", self.told, re.MULTILINE):
            assert self._process.poll() is None, self.told
            assert time.monotonic() < end, self.told
            time.sleep(0.02)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def killed(self) -> None:
        """It and all below it, at once."""
        below = psutil.Process(self._process.pid).children(recursive=True)
        for each in (psutil.Process(self._process.pid), *below):
            each.kill()
        self._process.wait(LIMIT_SECONDS)
        psutil.wait_procs(below, LIMIT_SECONDS)

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks: those below torchrun."""
        return [
            each
            for each in psutil.Process(self._process.pid).children(recursive=True)
            if "--plan" in each.cmdline() and "torch.distributed.run" not in each.cmdline()
        ]

    def ended(self) -> int:
        """Its status; nothing of it is left afterwards."""
        below = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        try:
            return self._process.wait(LIMIT_SECONDS)
        finally:
            for each in [*below, *([] if self._process.poll() is not None else [psutil.Process(self._process.pid)])]:
                if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                    each.kill()


def parameters(folder: Path, out: str) -> dict[str, torch.Tensor]:
    trained: dict[str, torch.Tensor] = torch.load(folder / out / "model.pt")
    return trained


def recovered(folder: Path, number: signal.Signals, draw: Random, out: str, way: Sequence[str] = ZERO3) -> None:
    """One rank gets a signal at some moment of training; then the run goes on by itself to the same end."""
    run = Launched(folder, out, "2", "--restarts", "2", way=way)
    run.wait_for_step(draw.randint(1, STEPS - 2))
    time.sleep(draw.random() * 0.1)
    befallen = draw.choice(run.ranks())
    befallen.send_signal(number)

    assert run.ended() == 0, run.told
    assert "ended without an answer" in run.told
    assert "going on with 2 ranks from the last snapshot" in run.told
    undisturbed, found = parameters(folder, "undisturbed"), parameters(folder, out)
    assert all(torch.equal(found[name], value) for name, value in undisturbed.items())


@pytest.mark.slow
def test_ranks_that_are_killed_or_stop_answering_are_found_and_the_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    toy_run.written(tmp_path)
    assert Launched(tmp_path, "undisturbed", "2").ended() == 0
    draw = Random(0)
    for attempt in range(20):
        recovered(tmp_path, signal.SIGKILL, draw, f"killed-{attempt}")
    for attempt in range(5):
        recovered(tmp_path, signal.SIGSTOP, draw, f"stopped-{attempt}")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "attempts"), [(signal.SIGKILL, 20), (signal.SIGSTOP, 5)])
def test_a_pipeline_of_which_a_rank_is_killed_or_stops_answering_goes_on_bit_by_bit(
    tmp_path: Path, number: signal.Signals, attempts: int
) -> None:
    """Each rank has the other half of the model, and waits for the other one in every micro-batch."""
    toy_run.written(tmp_path)
    assert Launched(tmp_path, "undisturbed", "2", way=STAGES).ended() == 0
    draw = Random(1)
    for attempt in range(attempts):
        recovered(tmp_path, number, draw, f"befallen-{attempt}", STAGES)


def sentences(told: str) -> list[str]:
    """Without the headings of tracebacks."""
    lines = [line for line in told.splitlines() if line.startswith("memfit: ")]
    return [line for line in lines if not line.startswith("memfit: code that memfit called has failed")]


@pytest.mark.slow
@pytest.mark.parametrize("way", [ZERO3, STAGES], ids=["zero3", "1f1b"])
def test_a_rank_that_loops_is_named_by_those_that_wait_for_it_and_the_run_goes_on_bit_by_bit(
    tmp_path: Path, way: tuple[str, ...]
) -> None:
    toy_run.written(tmp_path)
    assert Launched(tmp_path, "undisturbed", "2", way=way).ended() == 0
    looping = ("model.python=ranks_toy:build_looping",)
    alone = Launched(tmp_path, "alone", "2", more=looping, way=way, LOOPING="1")
    assert alone.ended() == 2
    *own, told = sentences(alone.told)
    assert told.startswith("memfit: rank 1 ended without an answer"), alone.told
    # Where torchrun waits for it, its own watchdog may end it first.
    assert all(line.startswith("memfit: rank 1 has done no step") for line in own), alone.told
    (tmp_path / "looped-1").unlink()

    run = Launched(tmp_path, "out", "2", "--restarts", "1", more=looping, way=way, LOOPING="1")
    assert run.ended() == 0, run.told
    told = sentences(run.told)[-1]
    assert told.startswith("memfit: rank 1 ended without an answer")
    assert "going on with 2 ranks from the last snapshot" in told
    undisturbed, found = parameters(tmp_path, "undisturbed"), parameters(tmp_path, "out")
    assert all(torch.equal(found[name], value) for name, value in undisturbed.items())


@pytest.mark.slow
@pytest.mark.parametrize("way", [ZERO3, ("fit.fixed.sharding=data",)], ids=["zero3", "data"])
def test_ranks_that_all_loop_at_once_end_themselves_and_the_run_goes_on_bit_by_bit(
    tmp_path: Path, way: tuple[str, ...]
) -> None:
    """No collective waits for any of them: only what watches each process notices."""
    toy_run.written(tmp_path)
    assert Launched(tmp_path, "undisturbed", "2", way=way).ended() == 0
    looping = ("model.python=ranks_toy:build_looping",)
    run = Launched(tmp_path, "out", "2", "--restarts", "1", more=looping, way=way, LOOPING="0 1")

    assert run.ended() == 0, run.told
    *by_ranks, told = sentences(run.told)
    named = {
        line.partition(f" has done no step, evaluation or snapshot for {format_seconds(2 * RANK_TIMEOUT)}")[0]
        for line in by_ranks
    }
    assert named
    assert named <= {"memfit: rank 0", "memfit: rank 1"}, run.told  # torchrun may end one before its own time is up
    assert "going on with 2 ranks from the last snapshot" in told
    undisturbed, found = parameters(tmp_path, "undisturbed"), parameters(tmp_path, "out")
    assert all(torch.equal(found[name], value) for name, value in undisturbed.items())


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("2",)], ids=["one-process", "two-ranks"])
def test_a_run_that_is_killed_while_a_snapshot_reaches_the_disk_goes_on_from_the_one_before(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    toy_run.written(tmp_path)
    assert Launched(tmp_path, "undisturbed", *options).ended() == 0
    beside = ("model.python=ranks_toy:build_slow_on_a_disk_that_stops", "train.save_async=true")
    run = Launched(tmp_path, "out", *options, more=beside)
    under_way, before = tmp_path / "out" / ".step-000006.partial", tmp_path / "out" / "step-000003"
    end = time.monotonic() + LIMIT_SECONDS
    while not under_way.is_dir() or not list(under_way.glob("**/*")):
        assert run.running, run.told
        assert time.monotonic() < end, run.told
        time.sleep(0.01)
    run.killed()

    assert before.is_dir()
    assert not (tmp_path / "out" / "step-000006").exists()
    resumed = subprocess.run(
        [sys.executable, "-m", "memfit", "resume", "out", "--set", "model.python=ranks_toy:build_slow"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert not under_way.exists()
    undisturbed, found = parameters(tmp_path, "undisturbed"), parameters(tmp_path, "out")
    assert all(torch.equal(found[name], value) for name, value in undisturbed.items())


@pytest.mark.slow
def test_without_restarts_the_rank_that_was_lost_is_named_and_the_run_can_be_resumed_by_fewer(tmp_path: Path) -> None:
    toy_run.written(tmp_path)
    run = Launched(tmp_path, "out", "2")
    run.wait_for_step(7)
    lost = run.ranks()[1]
    lost.kill()

    assert run.ended() == 2
    assert re.search(r"memfit: rank \d ended without an answer .*, so all were stopped", run.told)
    resumed = subprocess.run(
        [sys.executable, "-m", "memfit", "resume", "out", "--nproc", "1"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert "the snapshot is of 2 ranks and this run has 1" in resumed.stderr
    assert f"{STEPS} of {STEPS} steps done" in resumed.stdout


@pytest.mark.slow
def test_memory_that_one_rank_is_refused_is_one_sentence_that_names_it(tmp_path: Path) -> None:
    toy_run.written(tmp_path)
    greedy = ("model.python=ranks_toy:build_greedy", "fit.fixed.sharding=data")
    run = Launched(tmp_path, "out", "2", way=greedy)

    assert run.ended() == 2
    told = sentences(run.told)
    assert len(told) == 1, run.told
    assert told[0].startswith("memfit: rank 1: out of memory (4.00 PiB more were refused), so all were stopped")
