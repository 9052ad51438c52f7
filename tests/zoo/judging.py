"""One architecture judged: the same numbers inside half of the memory, and the peak as predicted?"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import memfit
from memfit.errors import MemfitError
from models.outcome import Outcome, measured_peak, outcome_of

from .building import NotBuiltError, Specimen, built, in_short

# Of the prediction against the metered peak. The models are so small that scalars which kernels take for themselves count, hence the bytes.
SHARE, BYTES = 0.005, 4096
SEEDS = (7, 8, 9, 10)  # of the steps that are metered where random numbers decide sizes

CLASSES = ("exact", "drawn", "kept plain", "refused", "not deterministic", "not built", "wrong")


@dataclass(slots=True)
class Verdict:
    """What came of one architecture.

    Attributes:
        kind: one of CLASSES.
        reason: why it is not "exact"; what is wrong.
        how: class, way of shrinking and variant of the inputs.
        where: for crashes, the innermost lines of memfit and at all.
        shares: of the plain peak, what the budget was.
    """

    architecture: str
    kind: str = ""
    reason: str = ""
    how: str = ""
    where: str = ""
    parameters: int = 0
    operations: int = 0
    reruns: int = 0
    plain_bytes: int = 0
    smallest_bytes: int = 0
    budget_bytes: int = 0
    predicted_bytes: int = 0
    metered_bytes: int = 0
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def judged(name: str, known: list[str], tell: Callable[[str], None] = lambda _: None) -> Verdict:
    """Build it, run it plainly, plan, run the plan, compare.

    Args:
        name: of the architecture.
        known: its classes.
        tell: called with what is done next, so that a process that is ended from outside leaves behind where it was.
    """
    verdict = Verdict(name)
    started = time.monotonic()
    try:
        tell("building")
        specimen = built(name, known)
        verdict.how = specimen.how
        verdict.parameters = sum(p.numel() for p in specimen.model.parameters())
        verdict.kind, verdict.reason = _judged(verdict, specimen, tell)
    except NotBuiltError as error:
        verdict.kind, verdict.reason = "not built", str(error)
    except MemfitError as error:
        verdict.kind, verdict.reason, verdict.where = "refused", in_short(error), where(error)
    except Exception as error:  # noqa: BLE001  (a crash is what is looked for)
        verdict.kind, verdict.reason, verdict.where = "wrong", f"crash: {in_short(error)}", where(error)
    verdict.seconds = round(time.monotonic() - started, 2)
    return verdict


def _judged(verdict: Verdict, specimen: Specimen, tell: Callable[[str], None]) -> tuple[str, str]:
    model, batch, loss_fn = specimen.model, specimen.batch, specimen.loss_fn
    tell("plain")
    outcome_of(model, batch, loss_fn)  # what a model builds once is built here
    reference = outcome_of(model, batch, loss_fn)
    again = differences(outcome_of(model, batch, loss_fn), reference)
    if again:
        return "not deterministic", f"plain PyTorch differs from itself: {again}"

    tell("planning")
    plain = memfit.plan(model, batch, loss_fn, 1 << 50, None, fixed={"micro_batches": 1})
    search: Any = plain.runtime.search
    verdict.operations = len(search.solver(1).trace.operations)
    verdict.plain_bytes, verdict.smallest_bytes = search.plain_peak(), search.smallest()[0]
    verdict.budget_bytes = max(verdict.plain_bytes // 2, verdict.smallest_bytes)
    made = memfit.replan(plain, verdict.budget_bytes)
    verdict.predicted_bytes = made.prediction.peak_bytes

    tell("following")
    try:
        found = outcome_of(model, batch, loss_fn, memfit.apply(made, model, loss_fn, None))
    except MemfitError as error:
        return "wrong", f"a plan that was made cannot be run: {in_short(error)}"
    verdict.reruns = found.reruns
    different = differences(found, reference)
    if different:
        return "wrong", f"numbers differ: {different}" + (f"; departure: {found.departure}" if found.departure else "")
    if found.departure:
        return "kept plain", f"departure: {found.departure}"

    tell("metering")
    try:
        seeds = SEEDS if made.prediction.varies_bytes else SEEDS[:1]
        peaks = [measured_peak(made, model, batch, loss_fn, None, seed=seed) for seed in seeds]
    except MemfitError as error:
        return "wrong", f"a plan that was made cannot be run: {in_short(error)}"
    verdict.metered_bytes = max(peaks)
    kind, reason = weighed(made, peaks)
    if kind != "wrong" and made.script.plain:
        return "kept plain", "nothing to drop: the smallest plan is the plain one"
    return kind, reason


def weighed(made: memfit.Plan, peaks: Sequence[int]) -> tuple[str, str]:
    """What the metered peaks of some steps say of a plan's prediction: class and reason."""
    predicted, varies = made.prediction.peak_bytes, made.prediction.varies_bytes
    allowed = [round(SHARE * peak) + BYTES for peak in peaks]
    for peak, much in zip(peaks, allowed, strict=True):
        if peak > made.budget_bytes + BYTES:
            return "wrong", f"peak {peak} above the budget {made.budget_bytes}"
        # Of a plan whose sizes are drawn the prediction is the largest of the draws that were seen; as far as they lie apart, others may lie beyond them.
        if not predicted - 2 * varies - much <= peak <= predicted + varies + much:
            how = "high" if predicted > peak else "low"
            return (
                "wrong",
                f"prediction too {how} by {abs(predicted - peak)} bytes of {peak} ({made.prediction.peak_operation})",
            )
    if any(abs(predicted - peak) > much for peak, much in zip(peaks, allowed, strict=True)):
        return "drawn", "random numbers decide sizes, as the plan says, and every metered step is inside the budget"
    return "exact", ""


def differences(one: Outcome, other: Outcome) -> str:
    """What differs in bits; "" when nothing does. Unlike `Outcome.differs`, a NaN equals the same NaN."""
    found = [] if same_bits(one.loss, other.loss) else ["loss"]
    for what in ("gradients", "buffers"):
        pairs = list(zip(getattr(one, what), getattr(other, what), strict=True))
        wrong = [place for place, (a, b) in enumerate(pairs) if not same_bits(a, b)]
        if wrong:
            found.append(f"{len(wrong)} of {len(pairs)} {what}")
    return ", ".join(found)


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal as bytes, or both absent."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def where(error: BaseException) -> str:
    """The innermost line of memfit on the way to an error, and the innermost line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/memfit/" in f.filename]
    picked = [*ours[-1:], *frames[-1:]]
    return " > ".join(f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno} {f.name}" for f in picked)


def grouped(reason: str) -> str:
    """A reason without its numbers, so that the same one counts as the same."""
    needs = re.search(r"requires the (\w+) library", reason)
    if needs is not None:
        return f"needs {needs[1]}, which is not installed"
    return re.sub(r"\d[\d_,.]*", "#", reason)[:160]
