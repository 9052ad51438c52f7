"""Candidates that cannot give the fastest plan, excluded before they are captured by what their techniques can do to bytes and seconds at most.

Bytes are bounded. Seconds are bounded where they can be (`Solver.bound`), and estimated where the bound is loose: what a technique saves in bytes can be
worth no more than as many bytes are in plans that are known (`_least_extra_seconds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Final

from memfit.planner.found import WORTH_MORE, Found
from memfit.planner.optimistic import floor_left, least_bytes, saved_together
from memfit.planner.solver import Solver
from memfit.planner.solvers import SLACK_BYTES, Solvers
from memfit.techniques.choices import Choices
from memfit.techniques.registry import BY_NAME
from memfit.techniques.technique import OptimisticBound
from memfit.units import format_bytes, format_seconds

# Of the budget: seconds that plans take more when they have so much less. Over fewer bytes, whether one large activation fits decides.
WORTH_OVER: Final = 0.05


def why_hopeless(
    solvers: Solvers, candidate: Choices, budget_bytes: int, best: Found | None, needed: Mapping[Choices, int]
) -> str | None:
    """Why a candidate need not be captured; None where it may give the fastest plan.

    Args:
        solvers: of what was captured.
        candidate: in question.
        budget_bytes: of the plan.
        best: the fastest plan found so far.
        needed: bytes of the smallest plan found for candidates that do not fit, tried in every number of micro-batches that could help.
    """
    if candidate == solvers.bundle.candidates[0]:
        return None
    held = held_bytes(solvers, candidate)
    if held > budget_bytes:
        return f"at least {format_bytes(held)} are held during the optimizer's update"
    least = least_needed(solvers, candidate, needed)
    if least > budget_bytes:
        return f"needs about {format_bytes(least)} or more, whatever is recomputed or offloaded"
    if best is not None:
        seconds = _least_seconds(solvers, candidate, budget_bytes)
        if seconds * WORTH_MORE >= best.seconds:
            return f"a step takes about {format_seconds(seconds)} or more, with the chosen plan {format_seconds(best.seconds)}"
    return None


def held_bytes(solvers: Solvers, candidate: Choices) -> int:
    """Bytes that are held at least during the update of a step run this way, by what was captured of those whose techniques it takes over; 0 if not known."""
    return max([0, *(_held_beside(solvers, candidate, other) for other in _known(solvers, candidate))])


def _held_beside(solvers: Solvers, candidate: Choices, known: Choices) -> int:
    """The same by one of those."""
    held = [0]
    for choices in _asked(solvers, known):
        saved = saved_together(bound for bound in _bounds(solvers, candidate, choices) if bound.within is None)
        if saved is not None:
            held.append(least_bytes(solvers.asked[choices]) - saved + solvers.extra_bytes)
    return max(held)


def least_needed(solvers: Solvers, candidate: Choices, needed: Mapping[Choices, int]) -> int:
    """Bytes that plans of a candidate need at least in any number of micro-batches, by what is known of those whose techniques it takes over; 0 if nothing.

    Args:
        solvers: of what was captured.
        candidate: in question.
        needed: as for `why_hopeless`.
    """
    least = [held_bytes(solvers, candidate)]
    for other in _known(solvers, candidate):
        asked = _asked(solvers, other)
        left = [
            floor_left(solvers.asked[choices], _bounds(solvers, candidate, choices)) + solvers.extra_bytes
            for choices in asked
        ]
        # A larger number needs no more than the smaller ones.
        if asked[-1].micro_batches < solvers.numbers()[-1] and not solvers.cannot_split:
            left.append(_held_beside(solvers, candidate, other))
        least.append(min(left))
    for other, size in needed.items():
        saved = _saved_bytes(solvers, candidate, other)
        if saved is not None:
            least.append(size - saved)
    return max(least)


def _known(solvers: Solvers, candidate: Choices) -> list[Choices]:
    """The captured candidates whose techniques this one takes over and adds to, in one micro-batch."""
    captured = dict.fromkeys(_in_one(choices) for choices in solvers.asked)
    return [other for other in captured if other != candidate and _adds_to(other, candidate)]


def _in_one(choices: Choices) -> Choices:
    return replace(choices, micro_batches=1)


def _asked(solvers: Solvers, known: Choices) -> list[Choices]:
    """A captured candidate in the numbers of micro-batches in which it was captured, the smallest first."""
    numbers = (choices for choices in solvers.asked if _in_one(choices) == known)
    return sorted(numbers, key=lambda choices: choices.micro_batches)


def _saved_bytes(solvers: Solvers, candidate: Choices, known: Choices) -> int | None:
    """The most that a candidate saves at any moment of the step of a known one; None where it does not add to that, or where it is not known."""
    if not _adds_to(known, candidate):
        return None
    return saved_together(_bounds(solvers, candidate, _asked(solvers, known)[0]))


def _bounds(solvers: Solvers, candidate: Choices, known: Choices) -> list[OptimisticBound]:
    """What each technique that a candidate adds to a known step could do to that."""
    facts = solvers.facts(known)
    # What the update makes is not seen where it is inside backward, and where state goes through buffers their sizes add up to more than is there at once.
    through_buffers = facts.state_bytes // 8 if known.state_place != "device" else 0
    made = max(facts.update_temporary_bytes, solvers.baseline_facts.update_temporary_bytes) + through_buffers
    facts = replace(facts, update_temporary_bytes=made)
    bounds = [
        BY_NAME[name].bound(facts)
        if name not in known.used
        else BY_NAME[name].bound_beyond(solvers.baseline_facts, known.used[name])
        for name, _ in _added(candidate, known)
    ]
    return [bound or OptimisticBound(None, -inf) for bound in bounds]


def adds_to_any(candidate: Choices, known: Iterable[Choices]) -> bool:
    """Whether a candidate takes over every technique of one of the known ones."""
    return any(_adds_to(other, candidate) for other in known)


def _least_seconds(solvers: Solvers, candidate: Choices, budget_bytes: int) -> float:
    """Seconds that a step run this way takes at least, from the candidates already solved whose techniques it takes over and adds to.

    With the bytes that the added techniques save at most, the rest of the step is no easier than the older candidate is with that much more budget.
    """
    least = 0.0
    for other in _known(solvers, candidate):
        added = sum(
            _bound(solvers, name, value).seconds if name not in other.used else _further_seconds(solvers, name, other)
            for name, value in _added(candidate, other)
        )
        saved = _saved_bytes(solvers, candidate, other)
        seconds = [
            solver.trace.planned_step_seconds
            + added
            + solver.trace.micro_batches * _least_extra_seconds(solvers, solver, budget_bytes, saved)
            for choices, solver in solvers.asked.items()
            if _in_one(choices) == other
        ]
        least = max(least, min(seconds))
    return least


def _least_extra_seconds(solvers: Solvers, solver: Solver, budget_bytes: int, saved_bytes: int | None) -> float:
    """Seconds of one micro-batch that recomputation and offloading add at least to a known candidate, were its budget larger by so many bytes.

    The bound, or an estimate where that is more: further bytes are worth no more than as many were in the plans that were found for fewer. Each byte is worth
    less than the one before it (the fastest plans over all budgets are nearly convex), and plans for fewer bytes were met on the way to this budget's rather
    than searched for, so they are slower than need be: both make it too low.

    Args:
        solvers: of all candidates.
        solver: of this one.
        budget_bytes: that its plans have.
        saved_bytes: more that they would have; None for any number.
    """
    if saved_bytes is None:
        return 0.0
    bound = solver.bound(budget_bytes + saved_bytes)
    capacity = budget_bytes - solvers.extra_bytes - SLACK_BYTES
    less = capacity - max(saved_bytes, int(WORTH_OVER * capacity))
    best, fewer = solver.met(capacity, capacity), solver.met(capacity, less)
    if best is None or fewer is None:
        return bound
    return max(bound, best - saved_bytes * (fewer - best) / (capacity - less))


def _bound(solvers: Solvers, name: str, value: object) -> OptimisticBound:
    """The best this technique can do; what it did alone, where it was tried alone."""
    bound = BY_NAME[name].bound(solvers.baseline_facts)
    alone = solvers.bundle.candidates[0].but(**{name: value}, micro_batches=solvers.baseline_number)
    if bound is not None and bound.seconds > -inf and name != "streamed" and alone in solvers.asked:
        seconds = solvers.asked[alone].trace.plain_step_seconds - solvers.baseline.trace.plain_step_seconds
        return replace(bound, seconds=seconds)
    return bound if bound is not None else OptimisticBound(None, -inf)


def _further_seconds(solvers: Solvers, name: str, known: Choices) -> float:
    """Seconds that a setting beyond a known one adds at least: an estimate, that it saves no more than the known one did."""
    bound = BY_NAME[name].bound_beyond(solvers.baseline_facts, known.used[name])
    return bound.seconds + min(0.0, _bound(solvers, name, known.used[name]).seconds)


def _adds_to(known: Choices, candidate: Choices) -> bool:
    """Whether a candidate takes over every technique of a known one, or goes beyond it."""
    own = candidate.used
    return all(
        name in own and (own[name] == value or BY_NAME[name].goes_beyond(own[name], value))
        for name, value in known.techniques
    )


def _added(candidate: Choices, known: Choices) -> list[tuple[str, object]]:
    """Techniques that a candidate has and a known one has not, or not in this setting."""
    return sorted(set(candidate.techniques) - set(known.techniques), key=str)
