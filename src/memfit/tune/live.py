"""The table that lives in the terminal while a search runs; plain lines where there is none."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TextIO

from memfit.tune.results import Results, TrialRow
from memfit.tune.tuning import Tuning
from memfit.units import format_bytes, format_seconds
from memfit.views.drawing import counted

_MOST_ROWS = 12


class SearchDisplay(Protocol):
    """Shows a search."""

    def show(self, tuning: Tuning, found: Results) -> None:
        """How things are now."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def close(self) -> None:
        """Nothing more comes."""


class SilentDisplay:
    """Says nothing; for use from Python."""

    def show(self, tuning: Tuning, found: Results) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing is open."""


class PlainDisplay:
    """A line for each trial that is over."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._told: set[int] | None = None

    def show(self, tuning: Tuning, found: Results) -> None:
        """The trials that have ended since the last call."""
        over = {row.number: row for row in found.rows if row.state not in {"running", "waiting"}}
        if self._told is None:  # those of earlier calls
            self._told = set(over)
            if over:
                self.note(f"going on after {counted(len(over), 'trial')} in {found.store}")
        for number in sorted(over.keys() - self._told):
            self.note(f"trial {described(over[number], found)}; {totals(tuning, found)}")
            self._told.add(number)

    def note(self, text: str) -> None:
        """A line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class TableDisplay:
    """A table on a terminal, drawn anew as things change."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, markup=False, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()
        self._told: set[int] | None = None

    def show(self, tuning: Tuning, found: Results) -> None:
        """The last trials, and totals; above them why a trial failed, for which the table has no column."""
        failed = {row.number: row for row in found.rows if row.state in {"failed", "out of memory"}}
        for number in sorted(failed.keys() - (failed.keys() if self._told is None else self._told)):
            self.note(f"trial {described(failed[number], found)}")
        self._told = set(failed)
        self._live.update(table(tuning, found), refresh=True)

    def note(self, text: str) -> None:
        """A line above the table."""
        self._console.print(text)

    def close(self) -> None:
        """The table stays as it is."""
        self._live.stop()


def display() -> SearchDisplay:
    """A table when standard error is a terminal, plain lines otherwise."""
    return TableDisplay() if sys.stderr.isatty() else PlainDisplay()


def described(row: TrialRow, found: Results) -> str:
    """A trial in a line."""
    names = [each.name for each in found.search.config.objectives]
    params = ", ".join(f"{name}={_number(value)}" for name, value in row.params.items())
    values = ", ".join(f"{name} {value:.6g}" for name, value in zip(names, row.values or (), strict=False))
    end = values or (f"{row.state}: {row.why}" if row.why else row.state)
    size = "" if row.peak_bytes is None or row.state == "infeasible" else f", {format_bytes(row.peak_bytes)}"
    return f"{row.number} ({params}): {end}{size}"


def totals(tuning: Tuning, found: Results) -> str:
    """Progress, the best so far, and bytes in use."""
    told = (
        f"{sum(row.state not in {'running', 'waiting'} for row in found.rows)} of {found.search.config.trials} trials"
    )
    if found.best and found.best[0].values:
        told += f", best {found.best[0].values[0]:.6g} (trial {found.best[0].number})"
    for name, capacity in tuning.runner.ledger.capacity.items():
        told += f", {format_bytes(tuning.runner.ledger.used(name))} of {format_bytes(capacity)} in use on {name}"
    return told


def table(tuning: Tuning, found: Results) -> Any:
    """The last trials as a table for `rich`."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(totals(tuning, found)), title_justify="left")
    drawn.add_column("trial", justify="right")
    drawn.add_column("state")
    for objective in found.search.config.objectives:
        drawn.add_column(Text(objective.name), justify="right")
    for name in found.search.space:
        drawn.add_column(Text(name), justify="right")
    drawn.add_column("peak", justify="right")
    drawn.add_column("time", justify="right")
    best = {row.number for row in found.best}
    for row in found.rows[-_MOST_ROWS:]:
        values = [f"{value:.6g}" for value in row.values or ()] or ["-"] * len(found.search.config.objectives)
        cells = [
            str(row.number),
            row.state,
            *values,
            *(_number(row.params.get(name, "")) for name in found.search.space),
        ]
        cells += [
            "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            "-" if row.seconds is None else format_seconds(row.seconds),
        ]
        drawn.add_row(*map(Text, cells), style="bold" if row.number in best else "")
    return drawn


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
