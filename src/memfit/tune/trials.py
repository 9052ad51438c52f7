"""A trial as a run: what is started for it, what it reports, and what it takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from memfit.runner import RunRequest
from memfit.runner.ends import tail_of
from memfit.train.limit_variable import VARIABLE as MEMORY_LIMIT
from memfit.tune.metrics import Metrics, MetricsFile
from memfit.tune.plans import Fit, Planner
from memfit.tune.search import AT_END, DURING, Search, command_with
from memfit.units import parse_bytes

ALONE: Final = "-alone"  # ends the name of a run that repeats one which ran out of memory, with nothing beside it
_LESS: Final = 0.85  # of its predicted peak, for a run that is repeated so


def name_of(number: int) -> str:
    """The name of the run of a trial."""
    return f"trial-{number:05d}"


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

    def close(self) -> None:
        """No more trials."""


class MemfitTrials:
    """Trials that are runs of `memfit train`: planned before they start, and resumed from their snapshots."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.planner = Planner(search.out / "planner.log")

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
        (folder / "run.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        return self.planner.ask(config, folder / "plan.json")

    def request(self, name: str, number: int, values: Mapping[str, Any], folder: Path, fit: Fit) -> RunRequest:  # noqa: ARG002 - as in the protocol
        """`memfit train` with the plan that was made, and `memfit resume` once there is something to resume."""
        config = self.search.config
        ours = (sys.executable, "-m", "memfit")
        plan = ("--plan", str(folder / "plan.json"), "--json")
        device = _device(fit)
        out = folder / "run"
        return RunRequest(
            name,
            (*ours, "train", str(folder / "run.json"), *plan),
            folder=str(self.search.folder),
            environment={MEMORY_LIMIT: str(fit.peak_bytes), "MEMFIT_TRIAL": str(number)},
            peak_bytes={device: fit.peak_bytes},
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
        try:
            answer = json.loads(tail_of(stdout))
        except ValueError:
            answer = {}
        known = {
            "loss": answer.get("loss"),
            "validation_loss": answer.get("validation_loss"),
            "validation_accuracy": answer.get("validation_accuracy"),
            "peak_bytes": answer.get("peak_bytes") or answer.get("predicted_peak_bytes"),
            "predicted_peak_bytes": answer.get("predicted_peak_bytes"),
            "step_seconds": None if fit is None else fit.step_seconds,
            "seconds": seconds,
        }
        for name, value in known.items():
            if value is not None and (name in AT_END or name not in metrics.values) and name in (*DURING, *AT_END):
                metrics.values[name] = [*metrics.values.get(name, ()), (answer.get("step") or 0, float(value))]
        return metrics

    def close(self) -> None:
        """The process that plans ends."""
        self.planner.close()


class CommandTrials:
    """Trials that are commands of any kind; what they take is what the user says."""

    def __init__(self, search: Search) -> None:
        self.search = search
        memory = search.config.memory
        self._bytes = None if memory is None else parse_bytes(memory)

    def fit(self, values: Mapping[str, Any], folder: Path, *, again: int | None = None) -> Fit:  # noqa: ARG002 - as in the protocol
        """Nothing is known but what was said."""
        folder.mkdir(parents=True, exist_ok=True)
        return Fit(fits=True, peak_bytes=self._bytes or 0, device=self.search.config.device)

    def request(self, name: str, number: int, values: Mapping[str, Any], folder: Path, fit: Fit) -> RunRequest:
        """The command, with the values in their places."""
        config = self.search.config
        return RunRequest(
            name,
            command_with(self.search, values, number, folder),
            folder=str(self.search.folder),
            environment={"MEMFIT_TRIAL": str(number), "MEMFIT_TRIAL_DIR": str(folder)},
            peak_bytes={} if self._bytes is None else {fit.device: fit.peak_bytes},
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

    def close(self) -> None:
        """Nothing is open."""


def _device(fit: Fit) -> str:
    return "cpu" if fit.device == "cpu" else "cuda:0"
