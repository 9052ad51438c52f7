"""A tracker: which metrics of each step are logged, under which names, to which library. No failure of a library can end the training.

A failure at the start (a missing package, a folder that cannot be written to) is an error, before anything is trained. A later failure is reported once, and
the training continues without that tracker.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from memfit.errors import InputError, MemfitError
from memfit.trackers.start import End, OpenRun, Start
from memfit.values.plan import Plan
from memfit.values.report import StepRecord

KINDS: Final = ("tensorboard", "mlflow", "wandb", "trackio")  # each is the name of its package and of its extra
# Read when the packages are imported. memfit opens no connection, so theirs that carry no runs stay closed too, unless the user has said otherwise.
_QUIET: Final = {"mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"}, "wandb": {"WANDB_ERROR_REPORTING": "false"}}


class Tracker:
    """A run in one library.

    Use it as a context, or close it: what is not flushed is lost.

    Attributes:
        kind: one of `KINDS`.
        look: the command that shows the run.
    """

    def __init__(self, kind: str, run: OpenRun, plan: Plan | None, note: Callable[[str], None]) -> None:
        self.kind, self.look = kind, run.look
        self._run: OpenRun | None = run
        self._plan, self._note = plan, note
        self._skipped = 0

    def step(self, record: StepRecord, *, learning_rate: float | None = None, skipped_steps: int | None = None) -> None:
        """Log an optimizer step.

        Args:
            record: what `engine.step` returned.
            learning_rate: of that step.
            skipped_steps: steps skipped so far because fp16 overflowed; those of the records seen when left out.
        """
        self._skipped = self._skipped + record.skipped if skipped_steps is None else skipped_steps
        metrics: dict[str, float] = {
            "train/loss": record.loss,
            "train/seconds": record.seconds,
            "train/micro_batches": record.micro_batches,
            "train/skipped_steps": self._skipped,
        }
        if learning_rate is not None:
            metrics["train/lr"] = learning_rate
        if record.peak_bytes is not None:
            metrics["memory/peak_bytes"] = record.peak_bytes
        if self._plan is not None:
            metrics["memory/predicted_peak_bytes"] = self._plan.prediction.peak_bytes
            metrics["memory/budget_bytes"] = self._plan.budget_bytes
        self._log(record.step, metrics)

    def validation(self, step: int, loss: float) -> None:
        """Log an evaluation after `step` optimizer steps."""
        self._log(step, {"validation/loss": loss})

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            return
        try:
            self._run.log(step, metrics)
        except Exception as error:  # noqa: BLE001 - a training is worth more than its picture
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        run, self._run = self._run, None
        self._note(f"tracking with {self.kind} has stopped ({_reason(error)}); training goes on without it")
        if run is not None:
            with suppress(Exception):
                run.close("failed")

    def close(self, end: End = "finished") -> None:
        """End the run; what is buffered is written.

        Args:
            end: how the run ended, for libraries that show it.
        """
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.close(end)
        except Exception as error:  # noqa: BLE001 - as above
            self._stop(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.close("failed" if issubclass(kind, Exception) else "stopped")


def tracker(
    kind: str,
    folder: str | Path,
    *,
    plan: Plan | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    step: int = 0,
    note: Callable[[str], None] | None = None,
) -> Tracker:
    """Begin a run in a library, or continue one.

    Args:
        kind: "tensorboard", "mlflow", "wandb" or "trackio".
        folder: of the run; each library has a folder of its own in it, where it also keeps what it takes to go on.
        plan: what is followed, usually `engine.plan`: predicted bytes and budget become metrics, the plan itself parameters.
        settings: further parameters, nested as you like.
        name: of the run; the folder's name when left out.
        step: optimizer steps taken before. With more than 0 the same run goes on, where the library can.
        note: called with a message when the library fails during training; a warning when left out.

    Raises:
        InputError: there is no such library, its package is missing, or it cannot start.
    """
    check([kind])
    home = Path(folder) / kind
    described = {**(settings or {}), **({} if plan is None else {"plan": _parameters(plan)})}
    start = Start(home, name or Path(folder).resolve().name, described, "" if plan is None else plan.explain(), step)
    try:
        home.mkdir(parents=True, exist_ok=True)
        run = import_module(f"memfit.trackers.{kind}").begin(start)
    except MemfitError:
        raise
    except Exception as error:
        raise InputError(
            f"tracking with {kind} cannot start ({_reason(error)}): put that right, or leave {kind} out"
        ) from error
    return Tracker(kind, run, plan, note or _warn)


def check(kinds: Iterable[str]) -> None:
    """Check that the packages are installed.

    Raises:
        InputError: there is no such library, or its package is missing.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(f"there is no tracker {kind!r}: take one of {', '.join(KINDS)}")
        for variable, value in _QUIET.get(kind, {}).items():
            os.environ.setdefault(variable, value)
        try:
            import_module(kind)
        except ImportError as error:
            raise InputError(f"tracking with {kind} needs its package: pip install 'memfit[{kind}]'") from error


def _parameters(plan: Plan) -> dict[str, Any]:
    """What a plan is about, for comparing runs."""
    return {
        **plan.summary(),
        "choices": plan.choices.to_json(),
        "device": plan.device,
        "model": plan.model,
        "torch": plan.torch_version,
    }


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
