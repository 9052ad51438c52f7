"""What happened in training, to be compared with the prediction. Values: torch-free, JSON both ways."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from memfit.values.plan import Plan

FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step as it ran.

    Attributes:
        step: number of the step, from 1.
        loss: of the whole batch.
        seconds: wall time. On a GPU until the host is done with the step, which may be before the GPU is; of steps in a row that is what each takes.
        micro_batches: parts it ran in.
        peak_bytes: measured, when the step was metered.
        recomputations: operations run again.
        divergences: where a forward differed from the plan, so that from there on everything was kept; empty when there was no difference.
        skipped: scaled gradients overflowed (fp16), so the optimizer was not stepped.
        begun_anew: where forwards left every path that was known, so that the step was begun anew under a plan that knows its path; once as a rule, if at all.
        waiting: the share of the passes of all micro-batches in which this rank of a pipeline waited for others; None where there is none.
    """

    step: int
    loss: float
    seconds: float
    micro_batches: int = 1
    peak_bytes: int | None = None
    recomputations: int = 0
    divergences: tuple[str, ...] = ()
    skipped: bool = False
    begun_anew: tuple[str, ...] = ()
    waiting: float | None = None


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan of the frontier: bytes against seconds.

    Attributes:
        budget_bytes: what the plan was asked to fit in.
        peak_bytes, step_seconds: predicted.
        bound_seconds: lower bound for any plan in that budget.
        micro_batches: of the plan.
    """

    budget_bytes: int
    peak_bytes: int
    step_seconds: float
    bound_seconds: float
    micro_batches: int = 1


@dataclass(frozen=True, slots=True)
class MeasuredRank:
    """What a rehearsal, or a run, of several ranks has shown of one of them.

    Attributes:
        predicted_peak_bytes: of a step.
        measured_peak_bytes: the largest of the metered steps; None where none was.
        waiting: of the last step, as in `StepRecord`.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    waiting: float | None = None


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One real step under the meter, before training.

    Attributes:
        predicted_peak_bytes, measured_peak_bytes: for the same step.
        measured_seconds: wall time, the meter's cost included.
        rounds: plans made until the measurement fitted (1: the first did).
        divergences: where the step differed from the plan.
        curve: measured bytes after each allocation or release, thinned; for the picture.
        ranks: of each of several ranks; empty for one device. The other figures are those of the rank that tells them.
        waiting: as in `StepRecord`.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int
    measured_seconds: float
    rounds: int = 1
    divergences: tuple[str, ...] = ()
    curve: tuple[int, ...] = ()
    ranks: tuple[MeasuredRank, ...] = ()
    waiting: float | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rehearsal:
        """Inverse of `dataclasses.asdict`.

        Raises:
            KeyError, TypeError: these are not its fields.
        """
        lists = {name: tuple(data[name]) for name in ("divergences", "curve")}
        ranks = tuple(MeasuredRank(**each) for each in data.get("ranks", ()))
        return cls(**{**data, **lists, "ranks": ranks})

    @property
    def error(self) -> float:
        """Predicted against measured, as a part of the measured peak."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1 if self.measured_peak_bytes else 0.0


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """What a language model has written while it was trained.

    Attributes:
        step: optimizer steps taken before.
        prompt: what it went on from.
        text: what it wrote after it.
    """

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """A plan and the steps that were taken under it.

    Attributes:
        title: what was trained.
        plan: the plan followed.
        rehearsal: None when there was none.
        records: steps, in order; perhaps some of them alone, the first and the last among them.
        frontier: points from the peak of plain PyTorch down to the smallest budget; may be empty.
        facts: further lines for the reader (accuracy, versions), as (name, text).
        texts: that the model has written on the way, in order.
    """

    title: str
    plan: Plan
    rehearsal: Rehearsal | None = None
    records: tuple[StepRecord, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    texts: tuple[GeneratedText, ...] = ()
    format_version: int = field(default=FORMAT_VERSION)

    def to_json(self) -> dict[str, Any]:
        """Versioned JSON."""
        return {
            "memfit": "report",
            "format_version": self.format_version,
            "title": self.title,
            "plan": self.plan.to_json(),
            "rehearsal": asdict(self.rehearsal) if self.rehearsal else None,
            # JSON has no infinity; a skipped step may have lost its loss to one.
            "records": [{**asdict(r), "loss": r.loss if math.isfinite(r.loss) else None} for r in self.records],
            "frontier": [asdict(p) for p in self.frontier],
            "facts": [list(f) for f in self.facts],
            "texts": [asdict(t) for t in self.texts],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """Inverse of `to_json`."""
        return cls(
            data["title"],
            Plan.from_json(data["plan"]),
            None if data["rehearsal"] is None else Rehearsal.from_json(data["rehearsal"]),
            tuple(
                StepRecord(
                    **{
                        **r,
                        "loss": _number(r["loss"]),
                        "divergences": tuple(r["divergences"]),
                        "begun_anew": tuple(r.get("begun_anew", ())),
                    }
                )
                for r in data["records"]
            ),
            tuple(FrontierPoint(**p) for p in data["frontier"]),
            tuple((str(a), str(b)) for a, b in data["facts"]),
            tuple(GeneratedText(**t) for t in data.get("texts", ())),
        )

    def save(self, path: str | Path) -> None:
        """Write the value as JSON; `memfit.views.write_report` makes the page and the pictures."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


def steps_between(records: Sequence[StepRecord]) -> int:
    """Steps that were taken from the first record to the last one: a log holds a line for some of them alone."""
    return records[-1].step - records[0].step + 1 if records else 0


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss
