"""The smallest budget in which a step can run, over all candidates and numbers of micro-batches.

From two on, more micro-batches never need more (with two, gradients are there from the start). So the largest number is looked at first, and smaller ones to
find the fewest that need as little. With streamed layers it is not so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from memfit.planner.found import Found
from memfit.planner.optimistic import least_bytes
from memfit.planner.pruning import held_bytes, least_needed
from memfit.planner.solvers import RefusedError, Solvers
from memfit.techniques.choices import Choices


class _Smallest(NamedTuple):
    """The smallest plan of one candidate in one number of micro-batches.

    Attributes:
        bytes: of the budget for it.
        found: the plan.
        at_update: the optimizer's update takes as much, which dividing the batch leaves as it is.
    """

    bytes: int
    found: Found
    at_update: bool


def smallest(solvers: Solvers) -> tuple[int, Found]:
    """Bytes and plan of the smallest plan found; of several the one with the fewest techniques, and then with the fewest micro-batches.

    Candidates that hold least in the update come first, of several those with the fewest techniques: next to their plans what needs more can be left out
    uncaptured.

    Raises:
        MissingTrace, MissingWeighting: the bundle lacks what is needed, and the caller can capture it.
        RefusedError: the baseline cannot be captured.
    """
    found: list[tuple[int, int, int, Found]] = []  # bytes, place among the candidates, micro-batches, plan
    needed: dict[Choices, int] = {}  # bytes of candidates, tried in all numbers of micro-batches that could help
    baseline = solvers.bundle.candidates[0]
    places = {candidate: place for place, candidate in enumerate(solvers.bundle.candidates)}
    solvers.of(solvers.numbers()[0])  # what the others hold is told from the baseline
    others = sorted(solvers.bundle.candidates[1:], key=lambda each: (held_bytes(solvers, each), places[each]))
    for candidate in (baseline, *others):
        best = min((each[:3] for each in found), default=(inf, 0, solvers.numbers()[0]))
        # Where the two are equal, the one with fewer techniques is taken.
        if (least_needed(solvers, candidate, needed), places[candidate]) > best[:2]:
            continue
        own, all_tried = _in_some_numbers(solvers, candidate, best[0], undivided=best[2] == solvers.numbers()[0])
        found += [(each.bytes, places[candidate], each.found.number, each.found) for each in own]
        if own and all_tried:
            needed[candidate] = min(each.bytes for each in own)
    size, *_, smallest_found = min(found, key=lambda each: each[:3])
    return size, smallest_found


def _in_some_numbers(
    solvers: Solvers, candidate: Choices, known_bytes: float, *, undivided: bool
) -> tuple[list[_Smallest], bool]:
    """The smallest plans of a candidate, and whether no other number of micro-batches could give a smaller one.

    Args:
        solvers: of the bundle.
        candidate: in question.
        known_bytes: that the smallest plan of the other candidates takes.
        undivided: whether the smallest plan may be of the smallest number.
    """
    own: list[_Smallest] = []
    first, *numbers = solvers.numbers()
    if undivided or not numbers:
        try:
            own.append(_smallest_in(solvers, candidate, first))
        except RefusedError:
            if candidate == solvers.bundle.candidates[0]:
                raise
            return [], False
        if not numbers or own[0].at_update or solvers.weights()[0] is None:
            return own, True
    if candidate.streamed:
        return _as_long_as_it_falls(solvers, candidate, numbers, own)
    all_tried = True
    few: _Smallest | None = None  # of the fewest that need no more than the largest number, so far
    most = len(numbers)  # of these numbers, its place
    while few is None and most:
        most -= 1
        try:
            few = _smallest_in(solvers, candidate, numbers[most])
        except RefusedError:  # as of single samples
            all_tried = False
    if few is None:
        return own, False
    own.append(few)
    if few.bytes > known_bytes:
        return own, all_tried
    least, tried = 0, most - 1  # the next one is most often above it
    while least < most:
        try:
            own.append(_smallest_in(solvers, candidate, numbers[tried]))
        except RefusedError:
            return own, False
        if own[-1].bytes <= few.bytes:
            most = tried
        else:
            least = tried + 1
        tried = (least + most) // 2
    return own, all_tried


def _as_long_as_it_falls(
    solvers: Solvers, candidate: Choices, numbers: Sequence[int], own: list[_Smallest]
) -> tuple[list[_Smallest], bool]:
    """As `_in_some_numbers`, of streamed layers, which run through all micro-batches layer by layer and may need more in more of them."""
    for number in numbers:
        try:
            own.append(_smallest_in(solvers, candidate, number))
        except RefusedError:
            return own, False
        if own[-1].at_update or (len(own) > 1 and own[-1].bytes >= own[-2].bytes):
            break
    return own, True


def _smallest_in(solvers: Solvers, candidate: Choices, number: int) -> _Smallest:
    """In one number of micro-batches."""
    solver = solvers.of(number, candidate)
    # The plain step needs no bytes for what only recomputation takes.
    least = min((solver.least(), solver.plain), key=partial(solvers.budget_for, solver))
    at_update = solver.needed(least) <= max(map(least_bytes, solver.roles()))
    return _Smallest(solvers.budget_for(solver, least), Found(candidate, number, solver, least), at_update)
