"""A trial as a run: what is started for it, what it reports, and what it takes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from memfit.hardware.cores import cores
from memfit.runner import End, RunRequest
from memfit.runner.cores import runs_at_once, threads
from memfit.runner.ends import tail_of
from memfit.runner.ledger import Ledger
from memfit.train.config import TrainConfig
from memfit.train.limit_variable import VARIABLE as MEMORY_LIMIT
from memfit.train.snapshot_folders import folders
from memfit.tune.capacity import capacity_of, device_of, largest_device, ranks_of
from memfit.tune.metrics import Metrics, MetricsFile
from memfit.tune.plans import Fit, Planner
from memfit.tune.search import AT_END, Search, command_with
from memfit.units import parse_bytes
from memfit.values.script import TIERS

ALONE: Final = "-alone"  # ends the name of a run that repeats one which ran out of memory, with nothing beside it
_AUTO: Final = 64  # trials at once, where bytes alone decide
_LESS: Final = 0.85  # of its predicted peak, for a run that is repeated so


def name_of(number: int) -> str:
    """The name of the run of a trial."""
    return f"trial-{number:05d}"


def most_at_once(search: Search) -> int:
    """How many trials run at once at most.

    "auto" leaves it to their bytes, and for runs of memfit on this computer's CPU to its cores, too.
    """
    at_once = search.config.at_once
    if isinstance(at_once, int):
        return at_once
    if search.is_command or search.config.cluster is not None or device_of(search) != "cpu":
        return _AUTO
    return runs_at_once(cores(), ranks_of(search))


def threads_of(search: Search, peak_bytes: int | None = None) -> dict[str, str]:
    """The variable by which torch takes its share of the processor's cores, where trials that run on it at once have to share them.

    Nothing where one runs alone, and where the user has said it.

    Args:
        search: whose trials.
        peak_bytes: predicted, of a trial. Under `at_once: auto` it shares the cores with as many as there is room for if they are like it; None for as many
            as run at once at most.
    """
    at_once, ranks = most_at_once(search), ranks_of(search)
    if search.config.cluster is not None or device_of(search) != "cpu":
        return {}
    if search.config.at_once == "auto" and peak_bytes:
        capacity = largest_device(capacity_of(search))
        at_once = runs_at_once(cores(), ranks, fit=None if capacity is None else capacity // peak_bytes)
    return threads(cores(), at_once, ranks)


class Trials(Protocol):
    """How trials of one search are run."""

    def fit(self, values: Mapping[str, Any], folder: Path, *, again: int | None = None) -> Fit:
        """Whether a trial fits; called before anything of it is started.

        Args:
            values: of the parameters.
            folder: of the trial.
            again: predicted peak of the same trial, which ran out of memory all the same.
        """

    def request(self, name: str, number: int, values: Mapping[str, Any], folder: Path, fit: Fit) -> RunRequest:
        """What is started for it."""

    def watched(self, folder: Path, stdout: Path) -> MetricsFile:
        """Where it reports."""

    def final(self, folder: Path, stdout: Path, fit: Fit | None, seconds: float, metrics: Metrics) -> Metrics:
        """What it has reported once it is over."""

    def snapshots(self, values: Mapping[str, Any]) -> int:
        """How many snapshots a trial has on the disk at one time, at most."""

    def forget(self, folder: Path) -> None:
        """A trial is over: what only going on with it would need is removed."""

    def close(self) -> None:
        """No more trials."""


def snapshots_of(config: Mapping[str, Any]) -> int:
    """How many snapshots a run has at one time: as many as it keeps, and one that is being written; without `save_every` the one at the end."""
    train = TrainConfig(**(config.get("train") or {}))
    return train.keep + 1 if train.save_every else 1


class TrialRuns(Protocol):
    """Where the runs of trials run: a runner (`memfit.runner.Runs`), or a service that has one."""

    folder: Path
    ledger: Ledger

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of runs that have not started."""

    @property
    def running(self) -> tuple[str, ...]:
        """Names of runs that run."""

    def knows(self, name: str) -> bool:
        """Whether there is such a run."""

    def end_of(self, name: str) -> End | None:
        """How a run ended; None before that."""

    def stdout(self, name: str) -> Path:
        """What a run has printed."""

    def submit(self, request: RunRequest) -> None:
        """Have something run when there are bytes for it; a name that is known already changes nothing."""

    def stop(self, name: str, *, at_once: bool = False) -> None:
        """Have a run end."""

    def poll(self, seconds: float = 0.0) -> list[tuple[str, End]]:
        """The runs that ended since the last call, each with how."""

    def close(self) -> None:
        """No more runs."""


class MemfitTrials:
    """Trials that are runs of `memfit train`: planned before they start, and resumed from their snapshots."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.planner = Planner(search.out / "planner.log", threads_of(search))
        # On a cluster each machine says which of them it has.
        self._tiers = set(TIERS) if search.config.cluster else set(TIERS) & capacity_of(search).keys()

    def config(self, values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """The configuration of a trial's run."""
        data = self.search.run_with(values)
        train = data.get("train") or {}
        report = data.get("report") or {}
        return {
            **data,
            "train": {**train, "out": str(folder / "run")},
            "report": {"html": False, **report},
        }

    def fit(self, values: Mapping[str, Any], folder: Path, *, again: int | None = None) -> Fit:
        """Whether there is a plan; it is written into the folder, beside the configuration."""
        config = self.config(values, folder)
        if again is not None:
            config["fit"] = {**config.get("fit", {}), "budget": int(_LESS * again)}
        folder.mkdir(parents=True, exist_ok=True)
        fit = self.planner.ask(config, folder / "plan.json")
        if str(config.get("fit", {}).get("device", "")).startswith("cuda:"):
            config["fit"]["device"] = "cuda"  # the runner chooses which, and lets the run see no other
        self.write(config, folder)
        return fit

    @staticmethod
    def write(config: Mapping[str, Any], folder: Path) -> None:
        """The configuration, where the trial's run reads it."""
        (folder / "run.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    def request(self, name: str, number: int, values: Mapping[str, Any], folder: Path, fit: Fit) -> RunRequest:  # noqa: ARG002 - as in the protocol
        """`memfit train` with the plan that was made, and `memfit resume` once there is something to resume."""
        config = self.search.config
        ours = (sys.executable, "-m", "memfit")
        plan: tuple[str, ...] = ("--plan", str(folder / "plan.json"), "--json")
        if len(fit.by_rank) > 1:
            plan = ("--nproc", str(len(fit.by_rank)), *plan)
        out = folder / "run"
        return RunRequest(
            name,
            (*ours, "train", str(folder / "run.json"), *plan),
            folder=str(self.search.folder),
            environment={
                MEMORY_LIMIT: ",".join(map(str, fit.by_rank)),
                "MEMFIT_TRIAL": str(number),
                **threads_of(self.search, fit.peak_bytes),
            },
            peak_bytes={name: size for name, size in (fit.tiers or {}).items() if name in self._tiers},
            rank_bytes=fit.by_rank,
            device=fit.device,
            seconds=config.timeout,
            silent_seconds=config.silence,
            watched=str(out / "log.jsonl"),
            grace_seconds=config.grace,
            resume_command=(*ours, "resume", str(out), *plan),
            resume_if=str(out / "config.json"),
            restarts=1,
            alone=name.endswith(ALONE),
        )

    def watched(self, folder: Path, stdout: Path) -> MetricsFile:  # noqa: ARG002 - as in the protocol
        """The run's log."""
        return MetricsFile(folder / "run" / "log.jsonl")

    def final(self, folder: Path, stdout: Path, fit: Fit | None, seconds: float, metrics: Metrics) -> Metrics:  # noqa: ARG002 - as in the protocol
        """What the log has, and what is known of the run as a whole."""
        return with_answer(metrics, tail_of(stdout), fit, seconds)

    def snapshots(self, values: Mapping[str, Any]) -> int:
        """As in the protocol."""
        return snapshots_of(self.search.run_with(values))

    def forget(self, folder: Path) -> None:
        """Its snapshots are removed; log, plan and configuration stay."""
        for out in (folder / "run", folder / "alone" / "run"):
            for each in (*folders(out), *out.glob(".step-*")):
                shutil.rmtree(each, ignore_errors=True)

    def close(self) -> None:
        """The process that plans ends."""
        self.planner.close()


def with_answer(metrics: Metrics, text: str, fit: Fit | None, seconds: float) -> Metrics:
    """What a run's log has, and what `memfit train --json` has answered at its end.

    Args:
        metrics: of the log; added to.
        text: the answer.
        fit: what was predicted.
        seconds: that the run took.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = {}
    answer = answer if isinstance(answer, dict) else {}
    known = {
        "loss": answer.get("loss"),
        "validation_loss": answer.get("validation_loss"),
        "validation_accuracy": answer.get("validation_accuracy"),
        "peak_bytes": answer.get("peak_bytes") or answer.get("predicted_peak_bytes"),
        "predicted_peak_bytes": answer.get("predicted_peak_bytes"),
        "step_seconds": None if fit is None else fit.step_seconds,
        "seconds": seconds,
    }
    step = answer.get("step")
    for name, value in known.items():
        if isinstance(value, (int, float)) and (name in AT_END or name not in metrics.values):
            at = step if isinstance(step, int) else 0
            metrics.values[name] = [*metrics.values.get(name, ()), (at, float(value))]
    return metrics


class CommandTrials:
    """Trials that are commands of any kind; what they take is what the user says."""

    def __init__(self, search: Search) -> None:
        self.search = search
        memory = search.config.memory
        self._bytes = None if memory is None else parse_bytes(memory)

    def fit(self, values: Mapping[str, Any], folder: Path, *, again: int | None = None) -> Fit:  # noqa: ARG002 - as in the protocol
        """Nothing is known but what was said."""
        folder.mkdir(parents=True, exist_ok=True)
        each = self._bytes or 0
        return Fit(
            fits=True,
            peak_bytes=each,
            device=self.search.config.device.partition(":")[0],
            rank_bytes=(each,) * self.search.config.ranks,
        )

    def request(self, name: str, number: int, values: Mapping[str, Any], folder: Path, fit: Fit) -> RunRequest:
        """The command, with the values in their places."""
        config = self.search.config
        return RunRequest(
            name,
            command_with(self.search, values, number, folder),
            folder=str(self.search.folder),
            environment={"MEMFIT_TRIAL": str(number), "MEMFIT_TRIAL_DIR": str(folder)},
            rank_bytes=() if self._bytes is None else fit.by_rank,
            device=fit.device,
            memory_limit_bytes=self._bytes if fit.device == "cpu" else None,
            seconds=config.timeout,
            silent_seconds=config.silence,
            watched="" if config.metrics is None else str(folder / config.metrics),
            grace_seconds=config.grace,
            restarts=1,
            alone=name.endswith(ALONE),
        )

    def watched(self, folder: Path, stdout: Path) -> MetricsFile:
        """Its output, or the file that it writes."""
        metrics = self.search.config.metrics
        return MetricsFile(stdout if metrics is None else folder / metrics)

    def final(self, folder: Path, stdout: Path, fit: Fit | None, seconds: float, metrics: Metrics) -> Metrics:  # noqa: ARG002 - as in the protocol
        """What it has reported itself, and how long it took."""
        metrics.values.setdefault("seconds", [(0, seconds)])
        return metrics

    def snapshots(self, values: Mapping[str, Any]) -> int:  # noqa: ARG002 - as in the protocol
        """None that is known of."""
        return 0

    def forget(self, folder: Path) -> None:
        """What a command has written is its user's."""

    def close(self) -> None:
        """Nothing is open."""
