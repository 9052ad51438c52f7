"""The table that lives in the terminal while a search runs; plain lines where there is none."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
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
    told = row.why if row.why.startswith(row.state) else f"{row.state}: {row.why}" if row.why else row.state
    end = values or told
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


@dataclass(frozen=True)
class _Column:
    """What stands in one column, and its heading, broken where it may be."""

    heading: str
    cells: tuple[str, ...]
    right: bool = True

    @property
    def width(self) -> int:
        """Characters that it takes whole."""
        return max(len(each) for each in (*self.heading.split("\n"), *self.cells))


class _Table:
    """Draws itself as wide as the terminal is: every cell whole and on one line, and what has no room left out and named."""

    def __init__(self, tuning: Tuning, found: Results) -> None:
        self._title = totals(tuning, found)
        self._rows = found.rows[-_MOST_ROWS:]
        self._best = {row.number for row in found.best}
        names = [each.name for each in found.search.config.objectives]
        rows = self._rows
        self._first = [
            _Column("trial", tuple(str(row.number) for row in rows)),
            _Column("state", tuple(row.state for row in rows), right=False),
            *(
                _Column(_broken(name), tuple(f"{row.values[place]:.6g}" if row.values else "-" for row in rows))
                for place, name in enumerate(names)
            ),
        ]
        self._peak = _Column(
            "peak", tuple("-" if row.peak_bytes is None else format_bytes(row.peak_bytes) for row in rows)
        )
        self._time = _Column("time", tuple("-" if row.seconds is None else format_seconds(row.seconds) for row in rows))
        space = list(found.search.space)
        short = [name.rpartition(".")[2] for name in space]
        self._params = {
            name: _Column(
                _broken(own if short.count(own) == 1 else name),
                tuple(_number(row.params.get(name, "")) for row in rows),
            )
            for name, own in zip(space, short, strict=True)
        }

    def __rich_console__(self, _console: Any, options: Any) -> Any:
        """What `rich` asks of whatever it prints."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        left = options.max_width - sum(each.width + 2 for each in self._first) + 2  # no space at the edges
        shown = list(self._first)
        without = []
        for name, column in (("peak", self._peak), ("time", self._time), *self._params.items()):
            if column.width + 2 <= left:
                left -= column.width + 2
                shown.append(column)
            else:
                without.append(name)
        drawn = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for column in shown:
            drawn.add_column(Text(column.heading), justify="right" if column.right else "left", no_wrap=True)
        for place, row in enumerate(self._rows):
            cells = (Text(column.cells[place]) for column in shown)
            drawn.add_row(*cells, style="bold" if row.number in self._best else "")
        yield Text(self._title)
        yield drawn
        if without:
            yield Text(f"no room for {', '.join(without)}", style="dim")


def table(tuning: Tuning, found: Results) -> Any:
    """The last trials as a table for `rich`, with totals above it."""
    return _Table(tuning, found)


def _broken(name: str) -> str:
    """A name with breaks after its underscores and dots, so that a column need not be as wide as its heading."""
    return re.sub(r"([._])(?=.)", r"\1\n", name)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
