"""One architecture judged: the same numbers inside half of the memory, and the peak as predicted?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import memfit
from memfit.errors import MemfitError
from memfit.planning import Planning, planning_of
from models.outcome import Outcome, measured_peak, outcome_of

from .building import NotBuiltError, Specimen, built, in_short
from .comparing import differences, seeds_of, weighed, where
from .techniques import TECHNIQUES, applied, turn_of

TRAINS = ("exact", "drawn", "kept plain")
CLASSES = (*TRAINS, "refused", "not deterministic", "not built", "wrong")


@dataclass(slots=True)
class Verdict:
    """What came of one architecture.

    Attributes:
        kind: one of CLASSES.
        reason: why it is not "exact"; what is wrong.
        how: class, way of shrinking and variant of the inputs.
        where: for crashes, the innermost lines of memfit and at all.
        shares: of the plain peak, what the budget was.
        techniques: what came of those that were tried, as `techniques.Applied.row`.
    """

    architecture: str
    kind: str = ""
    reason: str = ""
    how: str = ""
    where: str = ""
    parameters: int = 0
    operations: int = 0
    recomputations: int = 0
    plain_bytes: int = 0
    smallest_bytes: int = 0
    budget_bytes: int = 0
    predicted_bytes: int = 0
    metered_bytes: int = 0
    seconds: float = 0.0
    techniques: list[dict[str, Any]] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def judged(
    name: str,
    known: list[str],
    tell: Callable[[str], None] = lambda _: None,
    *,
    tried: str = "none",
    halfway: Callable[[Verdict], None] = lambda _: None,
) -> Verdict:
    """Build it, run it plainly, plan, run the plan, compare; then the same with other techniques.

    Args:
        name: of the architecture.
        known: its classes.
        tell: called with what is done next, so that a process that is ended from outside leaves behind where it was.
        tried: "none" of the techniques, "one" (whose turn it is) or "all" that apply; where the architecture trains at all.
        halfway: called with the verdict before each technique, for the same reason.
    """
    verdict = Verdict(name)
    started = time.monotonic()
    try:
        tell("building")
        specimen = built(name, known)
        verdict.how = specimen.how
        verdict.parameters = sum(p.numel() for p in specimen.model.parameters())
        search, verdict.kind, verdict.reason = _judged(verdict, specimen, tell)
        verdict.seconds = round(time.monotonic() - started, 2)
        if search is not None and tried != "none" and verdict.kind in TRAINS:
            chosen = TECHNIQUES if tried == "all" else (turn_of(name, specimen.model, search),)
            for technique in chosen:
                halfway(verdict)
                verdict.techniques.append(applied(technique, specimen, search, tell).row())
    except NotBuiltError as error:
        verdict.kind, verdict.reason = "not built", str(error)
    except MemfitError as error:
        verdict.kind, verdict.reason, verdict.where = "refused", in_short(error), where(error)
    except Exception as error:  # noqa: BLE001  (a crash is what is looked for)
        verdict.kind, verdict.reason, verdict.where = "wrong", f"crash: {in_short(error)}", where(error)
    verdict.seconds = round(time.monotonic() - started, 2)
    return verdict


def _judged(verdict: Verdict, specimen: Specimen, tell: Callable[[str], None]) -> tuple[Planning | None, str, str]:
    model, batch, loss_fn = specimen.model, specimen.batch, specimen.loss_fn
    tell("plain")
    outcome_of(model, batch, loss_fn)  # what a model builds once is built here
    reference = outcome_of(model, batch, loss_fn)
    again = differences(outcome_of(model, batch, loss_fn), reference)
    if again:
        return None, "not deterministic", f"plain PyTorch differs from itself: {again}"

    tell("planning")
    plain = memfit.plan(model, batch, loss_fn, 1 << 50, None, fixed={"micro_batches": 1})
    search = planning_of(plain)
    assert search is not None
    verdict.operations = len(search.solver(1).trace.operations)
    verdict.plain_bytes, verdict.smallest_bytes = search.plain_peak(), search.smallest()[0]
    verdict.budget_bytes = max(verdict.plain_bytes // 2, verdict.smallest_bytes)
    made = memfit.replan(plain, verdict.budget_bytes)
    verdict.predicted_bytes = made.prediction.peak_bytes
    return search, *_followed(verdict, made, specimen, reference, tell)


def _followed(
    verdict: Verdict, made: memfit.Plan, specimen: Specimen, reference: Outcome, tell: Callable[[str], None]
) -> tuple[str, str]:
    model, batch, loss_fn = specimen.model, specimen.batch, specimen.loss_fn
    tell("following")
    try:
        found = outcome_of(model, batch, loss_fn, memfit.apply(made, model, loss_fn, None))
    except MemfitError as error:
        return "wrong", f"a plan that was made cannot be run: {in_short(error)}"
    verdict.recomputations = found.recomputations
    different = differences(found, reference)
    if different:
        return "wrong", f"numbers differ: {different}" + (
            f"; divergence: {found.divergence}" if found.divergence else ""
        )
    if found.divergence:
        return "kept plain", f"divergence: {found.divergence}"

    tell("metering")
    try:
        peaks = [measured_peak(made, model, batch, loss_fn, None, seed=seed) for seed in seeds_of(made)]
    except MemfitError as error:
        return "wrong", f"a plan that was made cannot be run: {in_short(error)}"
    verdict.metered_bytes = max(peaks)
    kind, reason = weighed(made, peaks)
    if kind != "wrong" and made.script.plain:
        return "kept plain", "nothing to drop: the smallest plan is the plain one"
    return kind, reason
