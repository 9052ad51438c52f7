"""The tables of a report: prepared once as text, printed in the terminal with rich and in the page as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Final

from rich.table import Table
from rich.text import Text

from memfit.techniques.choices import in_words
from memfit.units import format_bytes, format_seconds
from memfit.values.plan import Plan
from memfit.values.report import FrontierPoint, GeneratedText, StepRecord, steps_between
from memfit.views.drawing import TIMES, counted

_MOST_ROWS: Final = 40


@dataclass(frozen=True, slots=True)
class Cells:
    """A table before it is printed.

    Attributes:
        caption: what it shows.
        columns: heads; the first column names the row, the others are numbers unless in `words`.
        rows: texts.
        words: columns that read from the left.
        marked: row to point out, if any.
        remark: what is left out; "" when nothing is.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int] = field(default=frozenset({0}))
    marked: int | None = None
    remark: str = ""


def plan_cells(plan: Plan) -> Cells:
    """The plan in a few lines."""
    p, c = plan.prediction, plan.choices
    share = f" ({100 * p.peak_bytes / plan.budget_bytes:.1f} %)" if plan.budget_bytes else ""
    rows = [
        ("budget", format_bytes(plan.budget_bytes)),
        ("predicted peak", format_bytes(p.peak_bytes) + share),
        ("plain peak", format_bytes(p.plain_peak_bytes)),
        ("step", f"{format_seconds(p.step_seconds)} ({p.slowdown:.2f}{TIMES} plain, {p.seconds_are})"),
        ("plain step", format_seconds(p.plain_step_seconds)),
        ("at most faster", f"{100 * plan.gap:.1f} %"),
        ("micro-batches", f"{c.micro_batches}" + (f" (losses by {c.weights})" if c.micro_batches > 1 else "")),
        ("run again", "nothing" if plan.script.plain else _again(plan)),
    ]
    if in_words(c):
        rows.append(("techniques", in_words(c)))
    if p.copy_seconds:
        rows.append(("offload copies", copying(plan)))
    return Cells("Plan", ("", "value"), tuple(rows), frozenset({0, 1}))


def _again(plan: Plan) -> str:
    if plan.script.plain:
        return "nothing"
    number = plan.script.whole_calls
    return (
        counted(plan.script.recomputations, "operation")
        + (" per micro-batch" if plan.choices.micro_batches > 1 else "")
        + (f", in {counted(number, 'whole call')} of modules" if number else "")
    )


def copying(plan: Plan) -> str:
    """How long the links to host memory and disk are busy in a step, and how much of that overlaps with computing."""
    p = plan.prediction
    return f"{format_seconds(p.copy_seconds)}, {100 * p.hidden_share:.0f} % overlapped"


def savings_cells(plan: Plan) -> Cells:
    """What each technique of the plan saves beside what is commonly claimed, and what it costs."""
    rows = [
        (
            saving.technique,
            format_bytes(saving.predicted_bytes)
            if saving.predicted_bytes >= 0
            else f"-{format_bytes(-saving.predicted_bytes)}",
            format_bytes(saving.claimed_bytes),
            f"{'+' if saving.seconds >= 0 else '-'}{format_seconds(abs(saving.seconds))}",
            saving.claim,
        )
        for saving in plan.savings
    ]
    columns = ("technique", "off the peak", "as claimed", "a step", "the claim")
    remark = "Each compared with the same step without it, nothing dropped or offloaded in either." if rows else ""
    return Cells("Techniques", columns, tuple(rows), frozenset({0, 4}), remark=remark)


def modules_cells(plan: Plan) -> Cells:
    """What is kept, dropped, offloaded and recomputed in each module; most dropped first."""
    modules = sorted(plan.by_module, key=lambda m: (-m.dropped_bytes, -m.swapped_bytes, -m.kept_bytes, m.module))
    offloads = any(m.swapped_bytes for m in modules)
    rows = [
        (
            m.module or "(model)",
            format_bytes(m.kept_bytes),
            format_bytes(m.dropped_bytes),
            *([format_bytes(m.swapped_bytes)] if offloads else []),
            format_seconds(m.recompute_seconds),
        )
        for m in modules[:_MOST_ROWS]
    ]
    each = ", per micro-batch" if plan.choices.micro_batches > 1 else ""
    columns = ("module", "kept", "dropped", *(["offloaded"] if offloads else []), f"run again{each}")
    rest = modules[_MOST_ROWS:]
    remark = ""
    if rest:
        kept, dropped = sum(m.kept_bytes for m in rest), sum(m.dropped_bytes for m in rest)
        remark = f"{counted(len(rest), 'more module')}: {format_bytes(kept)} kept, {format_bytes(dropped)} dropped."
    return Cells("What backward needs, by module", columns, tuple(rows), remark=remark)


def frontier_cells(plan: Plan, points: Sequence[FrontierPoint]) -> Cells:
    """Bytes against seconds; the row of the plan's own budget is marked."""
    plain_seconds = plan.prediction.plain_step_seconds
    ordered = sorted(points, key=lambda p: (-p.budget_bytes, -p.peak_bytes))
    rows = [
        (
            format_bytes(p.budget_bytes),
            format_bytes(p.peak_bytes),
            format_seconds(p.step_seconds),
            f"{p.step_seconds / plain_seconds:.2f}{TIMES}" if plain_seconds > 0 else "",
            format_seconds(p.bound_seconds),
            f"{p.micro_batches}",
        )
        for p in ordered
    ]
    own = [i for i, p in enumerate(ordered) if p.budget_bytes == plan.budget_bytes]
    columns = ("budget", "peak", "step", "of plain", "no plan below", "micro-batches")
    return Cells("Bytes against time", columns, tuple(rows), marked=own[0] if own else None)


def records_cells(records: Sequence[StepRecord]) -> Cells:
    """The steps as they ran; of many, the first and the last."""
    half = _MOST_ROWS // 2
    shown = list(records) if len(records) <= _MOST_ROWS else [*islice(records, half), *records[-half:]]
    rows = [
        (
            f"{r.step}",
            f"{r.loss:.6g}",
            format_seconds(r.seconds),
            "" if r.peak_bytes is None else format_bytes(r.peak_bytes),
            f"{r.micro_batches}",
            f"{r.recomputations}",
            "; ".join(r.divergences),
        )
        for r in shown
    ]
    columns = ("step", "loss", "time", "measured peak", "micro-batches", "operations run again", "divergences")
    left_out = steps_between(records) - len(shown)
    remark = f"{counted(left_out, 'step')} between {'is' if left_out == 1 else 'are'} left out." if left_out else ""
    if len(records) > 1:
        remark = f"Median time of a step: {format_seconds(median(r.seconds for r in records))}. {remark}".strip()
    return Cells("Steps", columns, tuple(rows), frozenset({0, 6}), remark=remark)


def texts_cells(texts: Sequence[GeneratedText]) -> Cells:
    """What a language model has written, the newest first."""
    rows = [(f"{each.step:,}", each.prompt, each.text) for each in reversed(texts)]
    return Cells("Generated text", ("after step", "prompt", "text"), tuple(rows), frozenset({0, 1, 2}))


def to_rich(cells: Cells) -> Table:
    """For the terminal. Texts are taken as they are: a module called [red] stays one."""
    table = Table(title=cells.caption, caption=cells.remark or None, title_justify="left", caption_justify="left")
    for i, head in enumerate(cells.columns):
        table.add_column(Text(head), justify="left" if i in cells.words else "right", overflow="fold")
    for i, row in enumerate(cells.rows):
        table.add_row(*map(Text, row), style="bold" if i == cells.marked else None)
    return table


def plan_table(plan: Plan) -> Table:
    """`plan_cells` for the terminal."""
    table = to_rich(plan_cells(plan))
    table.show_header = False
    return table


def modules_table(plan: Plan) -> Table:
    """`modules_cells` for the terminal."""
    return to_rich(modules_cells(plan))


def frontier_table(plan: Plan, points: Sequence[FrontierPoint]) -> Table:
    """`frontier_cells` for the terminal."""
    return to_rich(frontier_cells(plan, points))


def records_table(records: Sequence[StepRecord]) -> Table:
    """`records_cells` for the terminal."""
    return to_rich(records_cells(records))
