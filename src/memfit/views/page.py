"""The report as one page: HTML and SVG in one file, without scripts and without a single request to anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any, Final

from memfit import __version__
from memfit.units import format_bytes, format_seconds
from memfit.values.plan import Plan, in_places
from memfit.values.report import Report, steps_between
from memfit.views.drawing import TIMES, Drawing, counted
from memfit.views.frontier_picture import frontier_picture
from memfit.views.loss_picture import loss_picture
from memfit.views.svg import FONTS, escaped, svg
from memfit.views.tables import Cells, copying, frontier_cells, modules_cells, records_cells, savings_cells
from memfit.views.timeline_picture import timeline_picture
from memfit.views.verdict import error_text, measured_peak, verdict

# The policy makes the browser itself refuse what this page must never do.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

_SOURCES: Final = {
    "fake": "a step captured without data",
    "real": "a real step",
    "scaled": "real steps on a few samples, scaled",
}
_MOST_OPEN_ROWS: Final = 15  # A longer table is folded.

_STYLE: Final = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f8fa; color: #1f2328; font: 16px/1.5 FONTS; }
main { max-width: 1060px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 14px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 10px; }
.verdict { margin: 0 0 20px; padding: 12px 16px; border-radius: 8px; border-left: 6px solid; font-size: 17px; }
.fits { border-color: #1a7f37; background: #e9f7ed; }
.predicted { border-color: #0b5fa5; background: #eaf3fb; }
.over { border-color: #b42318; background: #fdecea; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 0; }
.cards > div { flex: 1 1 200px; }
.cards.thirds > div { flex-basis: 290px; }
.cards > div { background: #fff; border: 1px solid #d8dee4; border-radius: 8px; padding: 10px 14px; }
.cards dt { font-size: 14px; color: #57606a; }
.cards dd { margin: 0; }
.cards .number { font-size: 23px; font-weight: 600; font-variant-numeric: tabular-nums; }
.cards .remark { font-size: 14px; color: #57606a; }
figure, pre, .table { background: #fff; border: 1px solid #d8dee4; border-radius: 8px; overflow-x: auto; }
figure { margin: 16px 0 0; padding: 16px; }
figure svg { display: block; max-width: 100%; height: auto; min-width: 680px; margin: 0 auto; }
figure + .table, figure + details { margin-top: 12px; }
figure.small { width: fit-content; max-width: 100%; padding: 16px 8px; }
figure.small svg { min-width: 0; margin: 0; }
table { border-collapse: collapse; width: 100%; font-size: 15px; }
th, td { padding: 6px 14px; text-align: right; border-bottom: 1px solid #e8ecf0; font-variant-numeric: tabular-nums; }
th { font-weight: 600; }
thead th { color: #57606a; background: #fafbfc; vertical-align: bottom; }
tbody th { font-weight: 400; overflow-wrap: anywhere; }
tbody tr:last-child > * { border-bottom: 0; }
.words { text-align: left; }
tr.marked > * { font-weight: 600; background: #eaf3fb; }
caption, .remark-line { caption-side: bottom; text-align: left; padding: 8px 14px; color: #57606a; font-size: 14px; }
ul { margin: 0; padding-left: 22px; }
li { margin: 3px 0; overflow-wrap: anywhere; }
dl.facts { display: grid; grid-template-columns: minmax(120px, max-content) 1fr; gap: 4px 20px; margin: 0; }
dl.facts dt { color: #57606a; }
dl.facts dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: #0b5fa5; padding: 4px 0; }
pre { padding: 12px 16px; font-size: 14px; }
footer { margin-top: 40px; color: #57606a; font-size: 14px; }
@media print { body { background: #fff; } figure, .table, .cards > div { break-inside: avoid; } }
"""


def page(report: Report) -> str:
    """The whole page."""
    result = verdict(report)
    title = escaped(report.title or "memfit report")
    body = [
        f"<h1>{title}</h1>",
        f'<p class="verdict {result.outcome}">{escaped(result.sentence)}</p>',
        _cards(report),
        _figure(timeline_picture(report.plan, report.rehearsal)),
        _figure(frontier_picture(report.plan, report.frontier)),
        # What is short comes before what is long.
        _table_section(savings_cells(report.plan)),
        _section("Divergences from the plan", _list(_divergences(report))),
        _section("Facts", _definitions(report.facts)),
        _section("Notes", _list(report.plan.notes)),
        _section("Rejected", _list(report.plan.rejected)),
        _section("The plan in words", _words(report.plan)),
        _training(report),
        _table_section(frontier_cells(report.plan, report.frontier)),
        _table_section(modules_cells(report.plan)),
        _reproduce(report.plan),
        f"<footer>Written by memfit {escaped(__version__)}. Sizes are binary: 1 GiB is 1024 MiB.</footer>",
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>{_STYLE.replace('FONTS', FONTS)}</style>",
            "</head>",
            "<body>",
            "<main>",
            *filter(None, body),
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _cards(report: Report) -> str:
    plan, p, rehearsal = report.plan, report.plan.prediction, report.rehearsal
    cards = [
        ("Budget", format_bytes(plan.budget_bytes), f"{plan.budget_bytes:,} bytes"),
        ("Predicted peak", format_bytes(p.peak_bytes), f"{100 * p.peak_bytes / plan.budget_bytes:.1f} % of the budget"),
    ]
    if rehearsal is not None:
        remark = f"prediction: {error_text(rehearsal.error)}"
        if rehearsal.predicted_peak_bytes != p.peak_bytes:
            remark += f" ({format_bytes(rehearsal.predicted_peak_bytes)} for that step)"
        cards.append(("Measured peak", format_bytes(rehearsal.measured_peak_bytes), remark))
    elif (peak := measured_peak(report)) is not None:
        cards.append(("Measured peak", format_bytes(peak), "highest step; not rehearsed"))
    else:
        cards.append(("Measured peak", "none", "not rehearsed"))
    share = f"this plan: {100 * p.peak_bytes / p.plain_peak_bytes:.1f} % of it" if p.plain_peak_bytes else ""
    cards += [
        ("Plain peak", format_bytes(p.plain_peak_bytes), share),
        (
            "Slowdown predicted",
            f"{p.slowdown:.2f}{TIMES}",
            f"{format_seconds(p.step_seconds)} instead of {format_seconds(p.plain_step_seconds)}, {p.seconds_are}",
        ),
        (
            "Gap",
            f"{100 * plan.gap:.1f} %",
            f"no plan in these bytes with {counted(plan.choices.micro_batches, 'micro-batch')} is faster"
            + (" by more" if plan.gap > 0 else ""),
        ),
    ]
    if plan.choices.micro_batches > 1:
        cards.append(
            ("Micro-batches", f"{plan.choices.micro_batches}", f"losses weighted by {plan.choices.weights_in_words}")
        )
    if p.copy_seconds:
        cards.append(("Copying to and from host memory or disk", copying(plan), _offloaded(plan)))
    if report.records:
        seconds = median(r.seconds for r in report.records)
        recorded, count = len(report.records), steps_between(report.records)
        of = "" if recorded == count else f" of the {recorded:,} in the log"
        remark = f"{format_seconds(seconds)} each, in the median{of}" if count > 1 else format_seconds(seconds)
        if p.step_seconds > 0:
            remark += f" ({format_seconds(p.step_seconds)} predicted)"
        metered = max((r.peak_bytes for r in report.records if r.peak_bytes is not None), default=None)
        if metered is not None:
            remark += f"; measured peak {format_bytes(metered)}"
        cards.append(("Steps run", f"{count:,}", remark))
    inner = "".join(
        f'<div><dt>{escaped(name)}</dt><dd class="number">{escaped(number)}</dd>'
        f'<dd class="remark">{escaped(remark)}</dd></div>\n'
        for name, number, remark in cards
    )
    return f'<dl class="cards{" thirds" if len(cards) % 3 == 0 else ""}">\n{inner}</dl>'


def _offloaded(plan: Plan) -> str:
    """What is offloaded to host memory or disk, for a remark."""
    return "; ".join(
        f"{use.contents} on {in_places([use.tier])} ({100 * use.hidden_share:.0f} % overlapped)"
        for use in plan.prediction.tiers
        if use.all_bytes
    )


def _figure(drawing: Drawing, css: str = "") -> str:
    opening = f'<figure class="{css}">' if css else "<figure>"
    return f"{opening}\n{svg(drawing)}\n</figure>"


def _section(heading: str, inner: str) -> str:
    return f"<section>\n<h2>{escaped(heading)}</h2>\n{inner}\n</section>" if inner else ""


def _words(plan: Plan) -> str:
    """`explain()` as a list of two levels; notes and what was rejected have sections of their own."""
    items: list[tuple[str, list[str]]] = []
    for line in replace(plan, rejected=(), notes=()).explain().splitlines():
        if line.startswith(" ") and items:
            items[-1][1].append(line.strip())
        elif line.strip():
            items.append((line, []))
    return "<ul>\n" + "\n".join(f"<li>{escaped(text)}{_list(deeper)}</li>" for text, deeper in items) + "\n</ul>"


def _list(texts: Iterable[str]) -> str:
    items = "\n".join(f"<li>{escaped(text)}</li>" for text in texts)
    return f"<ul>\n{items}\n</ul>" if items else ""


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    items = "\n".join(f"<dt>{escaped(name)}</dt><dd>{escaped(text)}</dd>" for name, text in pairs)
    return f'<dl class="facts">\n{items}\n</dl>' if items else ""


def _training(report: Report) -> str:
    if not report.records:
        return ""
    curve = loss_picture(report.records)
    drawn = _figure(curve, "small") if curve is not None else ""
    return _section("Training", f"{drawn}\n{_folded('Step by step', records_cells(report.records), most=5)}")


def _divergences(report: Report) -> list[str]:
    """Each once, with the steps in which it happened."""
    steps: dict[str, list[str]] = {}
    if report.rehearsal is not None:
        for text in report.rehearsal.divergences:
            steps.setdefault(text, []).append("rehearsal")
    for record in report.records:
        for text in record.divergences:
            steps.setdefault(text, []).append(f"step {record.step}")
    return [
        f"{text} ({', '.join(where[:5])}{f' and {len(where) - 5} more' if len(where) > 5 else ''})"
        for text, where in steps.items()
    ]


def _table_section(cells: Cells) -> str:
    return _section(cells.caption, _folded(f"All {len(cells.rows)} rows", cells)) if cells.rows else ""


def _folded(name: str, cells: Cells, *, most: int = _MOST_OPEN_ROWS) -> str:
    """The table; a long one behind its name, to be opened."""
    if len(cells.rows) <= most:
        return _table(cells)
    return f"<details>\n<summary>{escaped(name)}</summary>\n{_table(cells)}\n</details>"


def _table(cells: Cells) -> str:
    def css(column: int) -> str:
        return ' class="words"' if column in cells.words else ""

    head = "".join(f'<th scope="col"{css(i)}>{escaped(text)}</th>' for i, text in enumerate(cells.columns))
    rows = []
    for number, row in enumerate(cells.rows):
        marked = ' class="marked"' if number == cells.marked else ""
        first = f'<th scope="row"{css(0)}>{escaped(row[0])}</th>'
        rest = "".join(f"<td{css(i)}>{escaped(text)}</td>" for i, text in enumerate(row) if i)
        rows.append(f"<tr{marked}>{first}{rest}</tr>")
    remark = f"<caption>{escaped(cells.remark)}</caption>\n" if cells.remark else ""
    body = "<tbody>\n" + "\n".join(rows) + "\n</tbody>"
    return f'<div class="table">\n<table>\n{remark}<thead><tr>{head}</tr></thead>\n{body}\n</table>\n</div>'


def _reproduce(plan: Plan) -> str:
    pairs = [
        ("memfit", __version__),
        ("torch", plan.torch_version),
        ("device", plan.device),
        ("model", plan.model),
        ("batch", plan.signature),
        ("bytes from", _SOURCES.get(plan.source, plan.source)),
        ("seconds", plan.prediction.seconds_are),
        ("gradient clipping", "none" if plan.clip_norm is None else f"norm {plan.clip_norm:g}"),
    ]
    code = f"<pre><code>{escaped(reproducing_call(plan))}</code></pre>"
    return _section("How to reproduce", f"{_definitions(pair for pair in pairs if pair[1])}\n{code}")


def reproducing_call(plan: Plan) -> str:
    """The call that makes this plan again.

    It pins what the search was free to choose: a plan does not say which of its choices were, and pinning what was found finds it again. What the plan
    does not hold (functions, budgets of lower tiers) is left as an ellipsis.
    """
    lines = [
        "plan = memfit.plan(",
        "    model,",
        "    sample,",
        "    loss_fn=...,  # as before; None when the model returns its loss",
        f"    budget={plan.budget_bytes},  # {format_bytes(plan.budget_bytes)}",
        "    optimizer=...,  # as before",
    ]
    choices = plan.choices
    if choices.frozen:
        lines.append(f"    freeze={json.dumps(list(choices.frozen))},")
    fixed: dict[str, Any] = {"micro_batches": choices.micro_batches}
    fixed |= {name: value for name, value in choices.techniques if name != "frozen"}
    lines.append(f"    fixed={json.dumps(fixed)},  # what this plan uses, pinned or found")
    if plan.prediction.copy_seconds:
        lines.append("    host_budget=...,  # as before")
    if len(plan.prediction.tiers) > 1:
        lines.append("    disk_budget=...,  # as before")
    if plan.clip_norm is not None:
        lines.append(f"    clip_norm={plan.clip_norm!r},")
    if plan.prediction.seconds_are == "estimated":  # so are those for a device that is not here, and no others
        lines.append(f"    device={json.dumps(plan.device)},")
    return "\n".join([*lines, ")"])
