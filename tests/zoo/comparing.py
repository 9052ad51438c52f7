"""What is the same, and what is near enough: numbers to the last bit, peaks as predicted."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

import torch
from torch import Tensor

import memfit
from models.outcome import Outcome

# Of the prediction against the metered peak. The models are so small that scalars which kernels take for themselves count, hence the bytes.
SHARE, BYTES = 0.005, 4096
SEEDS = (7, 8, 9, 10)  # of the steps that are metered where random numbers decide sizes


def seeds_of(made: memfit.Plan) -> tuple[int, ...]:
    """From which steps under a plan are metered."""
    return SEEDS if made.prediction.varies_bytes else SEEDS[:1]


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
