"""What a person sees while something runs: on a terminal a bar, then the steps (`live`); plain lines elsewhere.

Everything goes to standard error; standard output belongs to results.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final, Protocol, TextIO

from memfit.train.live import RunState, lines
from memfit.units import format_bytes, format_seconds
from memfit.values.report import StepRecord

_SECONDS_BETWEEN: Final = 0.1


class Display(Protocol):
    """Shows what a run is doing."""

    def stage(self, text: str, share: float) -> None:
        """Something before training that takes a while, and how much of it is done (0 to 1)."""

    def begin(self, run: RunState) -> None:
        """Training starts. `run` is the display's, which notes in it how far training comes."""

    def step(self, record: StepRecord, learning_rate: float, *, log: bool) -> None:
        """An optimizer step was taken; `log` when the log has a line for it."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def close(self) -> None:
        """Nothing more comes."""


class SilentDisplay:
    """Says nothing; for use from Python."""

    def stage(self, text: str, share: float) -> None:
        """Nothing."""

    def begin(self, run: RunState) -> None:
        """Nothing."""

    def step(self, record: StepRecord, learning_rate: float, *, log: bool) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PlainDisplay:
    """One line for each thing, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._stage = ""
        self._total = 0
        self._predicted = 0

    def stage(self, text: str, share: float) -> None:  # noqa: ARG002 - a line cannot fill up
        """A line when something new begins."""
        if text != self._stage:
            self._stage = text
            self.note(text)

    def begin(self, run: RunState) -> None:
        """Where training starts."""
        self._total, self._predicted = run.total, run.predicted_bytes
        if run.first >= run.total:
            self.note(f"all {run.total} steps are done: --set train.steps=... or train.epochs=... asks for more")
            return
        last = f"at most {run.total}" if run.may_end_early else f"{run.total}"
        peak = format_bytes(run.predicted_bytes)
        if run.fullest_bytes > run.predicted_bytes:
            peak += f" on rank 0 and {format_bytes(run.fullest_bytes)} on the fullest rank,"
        self.note(
            f"training, step {run.first + 1} to {last}; predicted peak {peak} of {format_bytes(run.budget_bytes)}"
        )

    def step(self, record: StepRecord, learning_rate: float, *, log: bool) -> None:
        """A line for each line of the log."""
        if log:
            self.note(f"step {record.step}/{self._total}  {described(record, learning_rate, self._predicted)}")

    def note(self, text: str) -> None:
        """A line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class LiveDisplay:
    """On a terminal: a bar while things are prepared, then the steps, the bytes, the losses and the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        # No markup: what is shown holds paths and messages of others, where [bold] is just text.
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._stages = Progress(
            # In as many lines as it takes: how much is left stands at its end.
            TextColumn("{task.description}", markup=False, table_column=Column()),
            BarColumn(bar_width=12),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task: Any = None
        self._live: Any = None
        self._state: RunState | None = None
        self._drawn = 0.0

    def stage(self, text: str, share: float) -> None:
        """One bar that fills up, with what is being done before it."""
        if self._live is not None:
            return  # what is said of the steps stays
        if self._task is None:
            self._task = self._stages.add_task(text, total=1.0)
            self._stages.start()
        self._stages.update(self._task, description=text, completed=share)

    def begin(self, run: RunState) -> None:
        """From here on the steps are shown."""
        from rich.live import Live

        self.close()
        if run.fullest_bytes > run.predicted_bytes:
            self.note(f"bytes below are those of rank 0; the fullest rank is to hold {format_bytes(run.fullest_bytes)}")
        self._state = run
        # Drawn by the loop itself, at most ten times a second: a thread that draws would take its seconds from the steps.
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()
        self._draw()

    def step(self, record: StepRecord, learning_rate: float, *, log: bool) -> None:
        """Draw the step, unless one was drawn just before."""
        if self._state is None:
            return
        self._state.take(record, learning_rate)
        if log or record.step == self._state.total or time.monotonic() - self._drawn >= _SECONDS_BETWEEN:
            self._draw()

    def note(self, text: str) -> None:
        """A line above what is drawn."""
        self._console.print(text)

    def close(self) -> None:
        """The bar goes, the last picture of the steps stays."""
        if self._task is not None:
            self._stages.stop()
            self._stages.remove_task(self._task)
            self._task = None
        if self._live is not None:
            self._draw()
            self._live.stop()
            self._live = self._state = None

    def _draw(self) -> None:
        from rich.console import Group

        assert self._state is not None, "it is drawn between begin and close"
        self._live.update(Group(*lines(self._state, self._console.width)), refresh=True)
        self._drawn = time.monotonic()


def described(record: StepRecord, learning_rate: float, predicted_peak_bytes: int) -> str:
    """A step in a line."""
    text = f"loss {record.loss:.4f}  lr {learning_rate:.3g}  {format_seconds(record.seconds)}"
    if record.peak_bytes is not None:
        text += f"  peak {format_bytes(record.peak_bytes)} (predicted {format_bytes(predicted_peak_bytes)})"
    if record.skipped:
        text += "  skipped: gradients overflowed"
    if record.divergences:
        text += f"  not as planned: {record.divergences[0]}"
    return text


def display(stream: TextIO | None = None) -> Display:
    """A picture that is drawn anew when standard error is a terminal, plain lines otherwise."""
    return LiveDisplay() if stream is None and sys.stderr.isatty() else PlainDisplay(stream)
