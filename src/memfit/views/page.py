"""The report as one page: HTML and SVG in one file, without scripts and without a single request to anywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median
from typing import Any, Final

from memfit import __version__
from memfit.units import format_bytes, format_seconds, one_unit
from memfit.values.plan import Plan, in_places
from memfit.values.report import Report, steps_between
from memfit.views.document import cards, definitions, document, figure, folded, listed, prose, section
from memfit.views.drawing import TIMES, counted
from memfit.views.frontier_picture import frontier_picture
from memfit.views.loss_picture import loss_picture
from memfit.views.svg import escaped
from memfit.views.tables import Cells, copying, frontier_cells, modules_cells, records_cells, savings_cells, texts_cells
from memfit.views.timeline_picture import timeline_picture
from memfit.views.verdict import error_text, measured_peak, verdict

_SOURCES: Final = {
    "fake": "a step captured without data",
    "real": "a real step",
    "scaled": "real steps on a few samples, scaled",
}


def page(report: Report) -> str:
    """The whole page. Its sizes are in the unit of the budget, so that they can be compared without arithmetic."""
    with one_unit(report.plan.budget_bytes):
        return _page(report)


def _page(report: Report) -> str:
    result = verdict(report)
    body = [
        cards(_facts(report)),
        figure(lambda layout: timeline_picture(report.plan, report.rehearsal, layout)),
        figure(lambda layout: frontier_picture(report.plan, report.frontier, layout)),
        # What is short comes before what is long.
        _table_section(savings_cells(report.plan)),
        section("Divergences from the plan", listed(_divergences(report))),
        section("Facts", definitions(report.facts)),
        section("Notes", listed(report.plan.notes)),
        section("Rejected", listed(report.plan.rejected)),
        section("The plan in words", _words(report.plan)),
        _training(report),
        _table_section(texts_cells(report.texts)),
        _table_section(frontier_cells(report.plan, report.frontier)),
        _table_section(modules_cells(report.plan)),
        _reproduce(report.plan),
    ]
    return document(report.title or "memfit report", result.sentence, result.outcome, body)


def _facts(report: Report) -> list[tuple[str, str, str]]:
    plan, p, rehearsal = report.plan, report.plan.prediction, report.rehearsal
    facts = [
        ("Budget", format_bytes(plan.budget_bytes), f"{plan.budget_bytes:,} bytes"),
        (
            "Predicted peak",
            format_bytes(p.peak_bytes),
            f"{p.peak_bytes:,} bytes, {100 * p.peak_bytes / plan.budget_bytes:.1f} % of the budget",
        ),
    ]
    if rehearsal is not None:
        remark = f"prediction: {error_text(rehearsal.predicted_peak_bytes, rehearsal.measured_peak_bytes)}"
        if rehearsal.predicted_peak_bytes != p.peak_bytes:
            remark += f" ({format_bytes(rehearsal.predicted_peak_bytes)} for that step)"
        facts.append(("Measured peak", format_bytes(rehearsal.measured_peak_bytes), remark))
    elif (peak := measured_peak(report)) is not None:
        facts.append(("Measured peak", format_bytes(peak), "highest step; not rehearsed"))
    else:
        facts.append(("Measured peak", "none", "not rehearsed"))
    share = f"this plan: {100 * p.peak_bytes / p.plain_peak_bytes:.1f} % of it" if p.plain_peak_bytes else ""
    facts += [
        ("Plain peak", format_bytes(p.plain_peak_bytes), share),
        *_slowdowns(report),
        (
            "Gap",
            f"{100 * plan.gap:.1f} %",
            f"no plan in these bytes with {counted(plan.choices.micro_batches, 'micro-batch')} is faster"
            + (" by more" if plan.gap > 0 else ""),
        ),
    ]
    if plan.choices.micro_batches > 1:
        facts.append(
            ("Micro-batches", f"{plan.choices.micro_batches}", f"losses weighted by {plan.choices.weights_in_words}")
        )
    if p.copy_seconds:
        facts.append(("Copying to and from host memory or disk", copying(plan), _offloaded(plan)))
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
        facts.append(("Steps run", f"{count:,}", remark))
    return facts


def _slowdowns(report: Report) -> list[tuple[str, str, str]]:
    """What a step costs: as predicted and, where steps were taken on the device that was planned for, as measured, both over the plain step."""
    p = report.plan.prediction
    plain = format_seconds(p.plain_step_seconds)
    facts = [
        (
            "Slowdown predicted",
            f"{p.slowdown:.2f}{TIMES}",
            f"{format_seconds(p.step_seconds)} instead of {plain}, {p.seconds_are}",
        )
    ]
    # Metered steps are slower for the meter's sake.
    seconds = [r.seconds for r in report.records if r.peak_bytes is None]
    if seconds and p.plain_step_seconds > 0 and p.seconds_are == "measured":
        taken = median(seconds)
        facts.append(
            (
                "Slowdown measured",
                f"{taken / p.plain_step_seconds:.2f}{TIMES}",
                f"{format_seconds(taken)} in the median of {counted(len(seconds), 'step')}; the plain step's {plain} are predicted",
            )
        )
    return facts


def _offloaded(plan: Plan) -> str:
    """What is offloaded to host memory or disk, for a remark."""
    return "; ".join(
        f"{use.contents} on {in_places([use.tier])} ({100 * use.hidden_share:.0f} % overlapped)"
        for use in plan.prediction.tiers
        if use.all_bytes
    )


def _words(plan: Plan) -> str:
    """`explain()` as a list of two levels; notes and what was rejected have sections of their own."""
    items: list[tuple[str, list[str]]] = []
    for line in replace(plan, rejected=(), notes=()).explain().splitlines():
        if line.startswith(" ") and items:
            items[-1][1].append(line.strip())
        elif line.strip():
            items.append((line, []))
    return "<ul>\n" + "\n".join(f"<li>{prose(text)}{listed(deeper)}</li>" for text, deeper in items) + "\n</ul>"


def _training(report: Report) -> str:
    if not report.records:
        return ""
    drawn = figure(lambda layout: loss_picture(report.records, layout), "small")
    return section("Training", f"{drawn}\n{folded('Step by step', records_cells(report.records), most=5)}")


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
    return section(cells.caption, folded(f"All {len(cells.rows)} rows", cells)) if cells.rows else ""


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
    return section("How to reproduce", f"{definitions(pair for pair in pairs if pair[1])}\n{code}")


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
