"""When nothing fits: the smallest budget that would do, where its peak is, and the remedies with what each of them saves and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memfit.errors import InfeasibleError, Remedy
from memfit.planner.description import where
from memfit.planner.found import Found, Rejection, named
from memfit.planner.smallest_budget import smallest
from memfit.planner.solvers import Solvers
from memfit.units import format_bytes, format_seconds
from memfit.values.trace import Category

MOST_REMEDIES: Final = 3


def infeasible(solvers: Solvers, budget_bytes: int, rejected: Sequence[Rejection]) -> InfeasibleError:
    """The error that says so.

    Args:
        solvers: of the bundle that was searched.
        budget_bytes: into which nothing fits.
        rejected: what was weighed.
    """
    size, found = smallest(solvers)
    trace, solution = found.solver.trace, found.solution
    phase, module, operation = where(trace, solution.evaluation.peak_event)
    remedies = _remedies(solvers, budget_bytes, size, found)
    ways_out = "; ".join(
        f"{r.text} ({format_bytes(abs(r.saved_bytes))} {'more' if r.kind == 'budget' else 'less'}, "
        f"{'+' if r.extra_seconds >= 0 else '-'}{format_seconds(abs(r.extra_seconds))} a step)"
        for r in remedies
    )
    message = (
        f"{format_bytes(budget_bytes)} is too little: the smallest plan found needs {format_bytes(size)} ({size} bytes), set in {phase} by "
        f"{module or 'an operation outside any module'} ({operation}). Ways out: {ways_out}"
    )
    if rejected:
        message += ". Weighed: " + "; ".join(map(str, rejected))
    return InfeasibleError(
        message,
        budget_bytes=budget_bytes,
        minimum_bytes=size,
        moment=f"{phase}: {operation}",
        module=module,
        remedies=remedies,
    )


def _remedies(solvers: Solvers, budget_bytes: int, size: int, found: Found) -> tuple[Remedy, ...]:
    """Ways out, the cheapest first where there are many."""
    bundle, trace, solution = solvers.bundle, found.solver.trace, found.solution
    plain = solvers.baseline.trace.plain_step_seconds
    how = named(found.candidate, found.number) if found.number > 1 or found.candidate != bundle.candidates[0] else ""
    remedies = [
        Remedy(
            f'budget="{_budget_of(size)}"' + (f" ({how})" if how else ""),
            size - budget_bytes,
            found.seconds - plain,
            "budget",
        )
    ]
    if bundle.request.micro_batches == 1 and bundle.samples > 1:
        smaller, free = smallest(solvers.of_request(bundle.request.leaving_open("micro_batches")))
        if smaller < size:
            text = f'fixed={{"micro_batches": {free.number}}}'
            remedies.append(Remedy(text, size - smaller, free.seconds - plain, "micro_batches"))
    state = trace.bytes_of(Category.OPTIMIZER_STATE)
    if state:
        text = "an optimizer without state (torch.optim.SGD without momentum)"
        remedies.append(Remedy(text, state, 0.0, "optimizer"))
    batch_part = solution.evaluation.peak_bytes - trace.bytes_before_step
    if bundle.samples > 1 and batch_part > 0:
        text = f"a batch of {bundle.samples // 2} instead of {bundle.samples} samples"
        remedies.append(Remedy(text, batch_part // 2, -plain / 2, "batch"))
    if len(remedies) > MOST_REMEDIES:
        remedies = sorted(remedies, key=lambda r: r.extra_seconds)[:MOST_REMEDIES]
    return tuple(remedies)


def _budget_of(size: int) -> str:
    """A budget that is at least `size` bytes, as a person would write it where that wastes little."""
    mib = -(-size // (1 << 20))
    return f"{mib}MiB" if mib >= 64 else f"{size}B"
