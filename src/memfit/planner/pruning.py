"""Candidates that cannot give the fastest plan, excluded before they are captured by bounds on what their techniques can do to bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from memfit.planner.found import WORTH_MORE, Found
from memfit.planner.optimistic import least_bytes, optimistic_bound
from memfit.planner.solvers import Solvers
from memfit.techniques.choices import Choices
from memfit.techniques.technique import OptimisticBound
from memfit.units import format_bytes, format_seconds


def why_hopeless(solvers: Solvers, candidate: Choices, budget_bytes: int, best: Found | None) -> str | None:
    """Why a candidate need not be captured; None where it may give the fastest plan."""
    baseline = solvers.bundle.candidates[0]
    if candidate == baseline:
        return None
    saved = [_bound(solvers, name, value).saved_bytes for name, value in _added(candidate, baseline)]
    if all(size is not None for size in saved):
        least = least_bytes(solvers.baseline) - sum(size or 0 for size in saved) + solvers.extra_bytes
        if least > budget_bytes:
            return f"at least {format_bytes(least)} are held during the optimizer's update"
    if best is not None:
        seconds = _least_seconds(solvers, candidate, budget_bytes)
        if seconds * WORTH_MORE >= best.seconds:
            return (
                f"a step takes at least {format_seconds(seconds)}, with the chosen plan {format_seconds(best.seconds)}"
            )
    return None


def adds_to_any(candidate: Choices, known: Iterable[Choices]) -> bool:
    """Whether a candidate takes over every technique of one of the known ones."""
    return any(_adds_to(other, candidate) for other in known)


def _least_seconds(solvers: Solvers, candidate: Choices, budget_bytes: int) -> float:
    """Seconds that a step run this way takes at least, from the candidates already solved whose techniques it takes over and adds to.

    With the bytes that the added techniques save at most, the rest of the step is no easier than the older candidate is with that much more budget.
    """
    least = 0.0
    for other in {replace(choices, micro_batches=1) for choices in solvers.asked} - {candidate}:
        if not _adds_to(other, candidate):
            continue
        added = [_bound(solvers, *technique) for technique in _added(candidate, other)]
        saved = [each.saved_bytes for each in added]
        bounds = [
            solver.trace.plain_step_seconds
            + sum(each.seconds for each in added)
            + (
                0.0
                if None in saved
                else solver.trace.micro_batches * solver.bound(budget_bytes + sum(s or 0 for s in saved))
            )
            for choices, solver in solvers.asked.items()
            if replace(choices, micro_batches=1) == other
        ]
        least = max(least, min(bounds))
    return least


def _bound(solvers: Solvers, name: str, value: object) -> OptimisticBound:
    """The best this technique can do; what it did alone, where it was tried alone."""
    bundle, baseline = solvers.bundle, solvers.baseline
    bound = optimistic_bound(baseline, name, bundle.lower_tier, bundle.layers)
    alone = bundle.candidates[0].but(**{name: value}, micro_batches=solvers.baseline_number)
    if bound is not None and name != "streamed" and alone in solvers.asked:
        seconds = solvers.asked[alone].trace.plain_step_seconds - baseline.trace.plain_step_seconds
        return replace(bound, seconds=seconds)
    return bound if bound is not None else OptimisticBound(None, -inf)


def _adds_to(known: Choices, candidate: Choices) -> bool:
    """Whether a candidate takes over every technique of a known one."""
    own = candidate.used
    return all(own.get(name) == value for name, value in known.techniques)


def _added(candidate: Choices, known: Choices) -> list[tuple[str, object]]:
    """Techniques that a candidate has and a known one has not."""
    return sorted(set(candidate.techniques) - set(known.techniques), key=str)
