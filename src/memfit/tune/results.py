"""What a search has found: a row for each trial, the best of them, and files of both."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from memfit.errors import InputError
from memfit.train import durable
from memfit.tune.search import Search
from memfit.tune.tuning import BYTES, ENDED, MINIMUM, STATE, best_trials

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

CSV_NAME: Final = "trials.csv"
BEST_NAME: Final = "best.yaml"
PAGE_NAME: Final = "report.html"


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial, for tables.

    Attributes:
        number: in the study.
        state: "done", "pruned", "infeasible", "out of memory", "failed", "running" or "waiting".
        values: of the objectives; None where there are none.
        params: as the study knows them.
        peak_bytes: predicted; of an infeasible trial the smallest budget that would do; None where nothing is known.
        seconds: from asked to told; None before the end.
        why: how it ended, in words.
    """

    number: int
    state: str
    values: tuple[float, ...] | None
    params: dict[str, Any]
    peak_bytes: int | None
    seconds: float | None
    why: str


@dataclass(frozen=True)
class Results:
    """A search, when it is over or for now.

    Attributes:
        search: that was made.
        rows: all trials, by number.
        best: the best ones: one, or with several objectives those that no other surpasses in all of them. Empty before the first was done.
        launched: trials that this call has started.
        store: the study's, as Optuna's tools take it.
    """

    search: Search
    rows: tuple[TrialRow, ...]
    best: tuple[TrialRow, ...]
    launched: int = 0
    store: str = ""

    @property
    def best_run(self) -> dict[str, Any]:
        """The configuration of the best run, with the values found in their places.

        Raises:
            InputError: there is none yet, or trials are commands.
        """
        if not self.best or self.search.is_command:
            raise InputError("there is no best run: no trial is done yet, or trials are commands")
        data = self.search.run_with(values_of(self.search, self.best[0].params))
        train = data.get("train") or {}
        return {**data, "train": {**train, "out": str(self.search.out / "best")}}

    def count(self, state: str) -> int:
        """Trials in a state."""
        return sum(row.state == state for row in self.rows)

    def save(self) -> list[Path]:
        """Write the trials as CSV and the best one as a file that `memfit train` takes; returns what was written.

        Raises:
            InputError: it cannot be written.
        """
        written = [self.search.out / CSV_NAME]
        texts = {written[0]: as_csv(self)}
        if self.best and not self.search.is_command:
            best = self.search.out / BEST_NAME
            told = f"# Trial {self.best[0].number} of {self.search.name}: {self._told(self.best[0])}\n"
            texts[best] = told + yaml.safe_dump(self.best_run, sort_keys=False)
            written.append(best)
        for file, text in texts.items():
            try:
                durable.rewrite(file, text)
            except OSError as error:
                raise InputError(
                    f"cannot write {file}: {error.strerror or error}; free space, then start again"
                ) from error
        return written

    def _told(self, row: TrialRow) -> str:
        names = [each.name for each in self.search.config.objectives]
        return ", ".join(f"{name} {value:.6g}" for name, value in zip(names, row.values or (), strict=False))


def values_of(search: Search, params: dict[str, Any]) -> dict[str, Any]:
    """The values that a study's parameters stand for."""
    return {name: search.space[name].value(each) for name, each in params.items() if name in search.space}


def results(search: Search, study: Study, launched: int = 0, store: str = "") -> Results:
    """What a study holds by now."""
    rows = tuple(_row(each) for each in study.get_trials(deepcopy=False))
    return Results(search, rows, tuple(_row(each) for each in best_trials(study)), launched, store)


def _row(trial: FrozenTrial) -> TrialRow:
    said = trial.user_attrs
    state = said.get(STATE) or {"COMPLETE": "done", "FAIL": "failed"}.get(trial.state.name, trial.state.name.lower())
    if not trial.state.is_finished():
        state = trial.state.name.lower()
    seconds = None if trial.duration is None else trial.duration.total_seconds()
    values = tuple(trial.values) if trial.state.name == "COMPLETE" and trial.values else None
    peak = said.get(MINIMUM) if state == "infeasible" else said.get(BYTES)
    return TrialRow(
        trial.number,
        state,
        values,
        dict(trial.params),
        peak or None,
        seconds,
        said.get(ENDED) or (state if state == "done" else ""),
    )


def as_csv(found: Results) -> str:
    """The trials as comma-separated values: one row each, a column for each objective and parameter."""
    objectives = [each.name for each in found.search.config.objectives]
    params = list(found.search.space)
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    write(["trial", "state", *objectives, *params, "peak_bytes", "seconds", "why"])
    for row in found.rows:
        values = row.values or [""] * len(objectives)
        given = [row.params.get(name, "") for name in params]
        write(
            [
                row.number,
                row.state,
                *values,
                *given,
                row.peak_bytes or "",
                "" if row.seconds is None else f"{row.seconds:.3f}",
                row.why,
            ]
        )
    return text.getvalue()
