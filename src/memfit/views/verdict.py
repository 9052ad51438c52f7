"""The verdict of a report, as a status and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memfit.units import format_bytes
from memfit.values.report import Report
from memfit.views.drawing import TIMES


class BudgetOutcome(StrEnum):
    """Whether the budget was kept, as far as is known."""

    FITS = "fits"
    FITS_AS_PREDICTED_ONLY = "predicted"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome and the sentence that gives the numbers for it."""

    outcome: BudgetOutcome
    sentence: str


def measured_peak(report: Report) -> int | None:
    """The most that was ever measured, in the rehearsal or in training; None when nothing was metered."""
    peaks = [r.peak_bytes for r in report.records if r.peak_bytes is not None]
    if report.rehearsal is not None:
        peaks.append(report.rehearsal.measured_peak_bytes)
    return max(peaks, default=None)


def verdict(report: Report) -> Verdict:
    """Whether it fits; a measurement outweighs the prediction."""
    plan, prediction = report.plan, report.plan.prediction
    budget = format_bytes(plan.budget_bytes)
    if plan.script.plain and plan.choices.micro_batches == 1:
        cost = "Nothing had to be done for it: this is the plain step."
    else:
        cost = (
            f"A step is predicted to take {prediction.slowdown:.2f}{TIMES} the time of a plain one, "
            f"which would need {format_bytes(prediction.plain_peak_bytes)}."
        )
    peak = measured_peak(report)
    if peak is None:
        head = f"Predicted to fit, not measured yet: {format_bytes(prediction.peak_bytes)} of {budget} at the peak."
        return Verdict(BudgetOutcome.FITS_AS_PREDICTED_ONLY, f"{head} {cost}")
    if peak > plan.budget_bytes:
        excess = format_bytes(peak - plan.budget_bytes)
        head = f"Over budget: {format_bytes(peak)} measured, {excess} more than the {budget} allowed."
        return Verdict(BudgetOutcome.OVER, f"{head} {cost}")
    share = 100 * peak / plan.budget_bytes
    head = f"Fits: {format_bytes(peak)} measured at the peak, {share:.1f} % of the {budget} allowed."
    return Verdict(BudgetOutcome.FITS, f"{head} {cost}")


def error_text(predicted_bytes: int, measured_bytes: int) -> str:
    """A prediction against its measurement, in words: "12,288 bytes (0.12 %) too low", "equal to the byte"."""
    difference = predicted_bytes - measured_bytes
    if difference == 0:
        return "equal to the byte"
    share = abs(difference) / max(measured_bytes, 1)
    size = f"{100 * share:.2f} %" if share >= 5e-5 else "less than 0.01 %"
    return f"{abs(difference):,} bytes ({size}) too {'high' if difference > 0 else 'low'}"
