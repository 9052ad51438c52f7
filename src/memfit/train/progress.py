"""What a person sees while something runs: a bar on a terminal, plain lines elsewhere.

Everything goes to standard error; standard output belongs to results.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, TextIO

from memfit.units import format_bytes, format_seconds
from memfit.values.report import StepRecord


class Display(Protocol):
    """Shows what a run is doing."""

    def stage(self, text: str, share: float) -> None:
        """Something before training that takes a while, and how much of it is done (0 to 1)."""

    def begin(self, step: int, total_steps: int, predicted_peak_bytes: int) -> None:
        """Training starts after `step` steps."""

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

    def begin(self, step: int, total_steps: int, predicted_peak_bytes: int) -> None:
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

    def begin(self, step: int, total_steps: int, predicted_peak_bytes: int) -> None:
        """Where training starts."""
        self._total, self._predicted = total_steps, predicted_peak_bytes
        self.note(f"training, step {step + 1} to {total_steps}; predicted peak {format_bytes(predicted_peak_bytes)}")

    def step(self, record: StepRecord, learning_rate: float, *, log: bool) -> None:
        """A line for each line of the log."""
        if log:
            self.note(f"step {record.step}/{self._total}  {described(record, learning_rate, self._predicted)}")

    def note(self, text: str) -> None:
        """A line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class BarDisplay:
    """A bar on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        # No markup: what is shown holds paths and messages of others, where [bold] is just text.
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._stages = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._steps = Progress(
            TextColumn("training", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
        )
        self._open: Any = None
        self._task: Any = None
        self._predicted = 0

    def _switch(self, bars: Any, description: str, total: float, done: float) -> None:
        if self._open is not bars:
            self.close()
            self._open = bars
            self._task = bars.add_task(description, total=total, completed=done)
            bars.start()

    def stage(self, text: str, share: float) -> None:
        """One bar that fills up, with what is being done before it."""
        self._switch(self._stages, text, 1.0, share)
        self._stages.update(self._task, description=text, completed=share)

    def begin(self, step: int, total_steps: int, predicted_peak_bytes: int) -> None:
        """The bar of steps."""
        self._predicted = predicted_peak_bytes
        self._switch(self._steps, "", total_steps, step)

    def step(self, record: StepRecord, learning_rate: float, *, log: bool) -> None:  # noqa: ARG002 - a bar shows them all
        """Move the bar."""
        self._steps.update(
            self._task, completed=record.step, description=described(record, learning_rate, self._predicted)
        )

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._open is not None:
            self._open.stop()
            self._open.remove_task(self._task)
            self._open = None


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
    """A bar when standard error is a terminal, plain lines otherwise."""
    return BarDisplay() if stream is None and sys.stderr.isatty() else PlainDisplay(stream)
