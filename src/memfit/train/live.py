"""What a terminal shows while a run trains: steps, bytes against the budget, losses and the time left, drawn anew after each step.

Every line is made for the width of the terminal, so that nothing wraps, down to 30 columns. Drawing is `lines`, which needs no terminal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from memfit.units import format_bytes, format_seconds, one_unit
from memfit.values.report import StepRecord

_WIDEST: Final = 100
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_FULL: Final = "█"
_EMPTY: Final = "░"


@dataclass
class RunState:
    """How far a run is.

    Attributes:
        first, total: the step after which this process began, and the last one.
        predicted_bytes, budget_bytes: of the plan.
        clock: seconds; a test has its own.
        may_end_early: whether evaluations may end training before the last step.
        fullest_bytes: of the plan, on the fullest of several ranks; `predicted_bytes` are this one's.
        last: the step that was taken last; None before the first.
        measured_bytes: the largest peak of a metered step; None while none was metered.
        losses: of the steps of this process.
        divergence: where a step last differed from the plan; "" while none did.
    """

    first: int
    total: int
    predicted_bytes: int
    budget_bytes: int
    clock: Callable[[], float] = time.monotonic
    may_end_early: bool = False
    fullest_bytes: int = 0
    last: StepRecord | None = None
    learning_rate: float = 0.0
    measured_bytes: int | None = None
    losses: list[float] = field(default_factory=list)
    divergence: str = ""
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = self.clock()

    def take(self, record: StepRecord, learning_rate: float) -> None:
        """A step was taken."""
        self.last, self.learning_rate = record, learning_rate
        self.losses.append(record.loss)
        if record.divergences:
            self.divergence = f"not as planned in step {record.step}: {record.divergences[0]}"
        if record.peak_bytes is not None:
            self.measured_bytes = max(record.peak_bytes, self.measured_bytes or 0)

    @property
    def seconds_left(self) -> float | None:
        """To the last step, at the pace since the beginning, evaluation and snapshots included; None before the first step."""
        if self.last is None or self.last.step <= self.first:
            return None
        return (self.clock() - self.began) / (self.last.step - self.first) * (self.total - self.last.step)


def lines(state: RunState, width: int) -> list[Text]:
    """The picture for a terminal of so many columns; no line is wider."""
    width = max(20, min(width, _WIDEST))
    done = state.first if state.last is None else state.last.step
    left = state.seconds_left
    steps = f"step {done:,} of {state.total:,}"
    at_most = "at most " if state.may_end_early else ""
    shown = [
        _ends(steps, "" if left is None else f"{at_most}{format_seconds(left)} left", width),
        Text(bar(done / max(state.total, 1), width), "cyan"),
        *_bytes(state, width),
    ]
    if state.last is not None:
        shown.append(_ends(f"loss {state.last.loss:.4f}", f"lr {state.learning_rate:.3g}", width))
        shown.append(Text(sparkline(state.losses, width), "cyan"))
        pace = f"{format_seconds(state.last.seconds)} this step"
        if state.last.skipped:
            pace += "; skipped: gradients overflowed"
        shown.append(Text(_cut(pace, width), "dim"))
        if state.divergence:
            shown.append(Text(_cut(state.divergence, width), "yellow"))
    return shown


def _bytes(state: RunState, width: int) -> list[Text]:
    """The peak beside the budget: as measured where a step was metered, as predicted before."""
    peak = state.predicted_bytes if state.measured_bytes is None else state.measured_bytes
    share = peak / max(state.budget_bytes, 1)
    style = "red" if peak > state.budget_bytes else "green"
    with one_unit(state.budget_bytes):
        sizes = f"{format_bytes(peak)} of {format_bytes(state.budget_bytes)}"
        known = (
            []
            if state.measured_bytes is None
            else [Text(_cut(f"predicted {format_bytes(state.predicted_bytes)}", width), "dim")]
        )
    name = "peak" if state.measured_bytes is not None else "predicted peak"
    over = "over by " + format_bytes(peak - state.budget_bytes) if peak > state.budget_bytes else f"{100 * share:.0f} %"
    return [_ends(f"{name} {sizes}", over, width), Text(bar(share, width), style), *known]


def bar(share: float, width: int) -> str:
    """A bar that is filled so far; never quite full before it is, never empty once something is there."""
    share = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    full = math.floor(share * width + 1e-9)
    full = max(full, 1) if share > 0 else full
    return _FULL * full + _EMPTY * (width - full)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars of eight heights, from the lowest to the highest; of more than fit, the mean of each stretch."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    means = []
    for i in range(count):
        stretch = finite[i * len(finite) // count : (i + 1) * len(finite) // count]
        means.append(sum(stretch) / len(stretch))
    low, high = min(means), max(means)
    size = high - low
    return "".join(_LEVELS[round((value - low) / size * (len(_LEVELS) - 1)) if size > 0 else 0] for value in means)


def _ends(left: str, right: str, width: int) -> Text:
    """Two texts at the ends of a line; the right one is left out where both do not fit."""
    if not right or cell_len(left) + 2 + cell_len(right) > width:
        return Text(_cut(left, width))
    return Text(left + " " * (width - cell_len(left) - cell_len(right)) + right)


def _cut(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"
