"""The smallest budget in which a step can run, over all candidates and numbers of micro-batches."""

from __future__ import annotations

from functools import partial

from memfit.planner.found import Found
from memfit.planner.optimistic import least_bytes
from memfit.planner.pruning import held_bytes, least_needed
from memfit.planner.solvers import RefusedError, Solvers
from memfit.techniques.choices import Choices


def smallest(solvers: Solvers) -> tuple[int, Found]:
    """Bytes and plan of the smallest plan found; of several the one with the fewest techniques.

    Candidates that hold least in the update come first, of several those with the fewest techniques: next to their plans what needs more can be left out
    uncaptured.

    Raises:
        MissingTrace, MissingWeighting: the bundle lacks what is needed, and the caller can capture it.
        RefusedError: the baseline cannot be captured.
    """
    found: list[tuple[int, int, Found]] = []  # bytes, place among the candidates, plan
    needed: dict[Choices, int] = {}  # bytes of candidates, tried in all numbers of micro-batches that could help
    baseline = solvers.bundle.candidates[0]
    places = {candidate: place for place, candidate in enumerate(solvers.bundle.candidates)}
    solvers.of(solvers.numbers()[0])  # what the others hold is told from the baseline
    others = sorted(solvers.bundle.candidates[1:], key=lambda each: (held_bytes(solvers, each), places[each]))
    for candidate in (baseline, *others):
        # Where the two are equal, the one with fewer techniques is taken.
        if found and (least_needed(solvers, candidate, needed), places[candidate]) > min(f[:2] for f in found):
            continue
        own: list[int] = []
        all_tried = True  # numbers that could help
        for number in solvers.numbers():
            if number > 1 and solvers.weights()[0] is None:
                break
            try:
                solver = solvers.of(number, candidate)
            except RefusedError:
                if candidate == baseline and not own:
                    raise
                all_tried = False
                break
            # The plain step needs no bytes for what only recomputation takes.
            least = min((solver.least(), solver.plain), key=partial(solvers.budget_for, solver))
            own.append(solvers.budget_for(solver, least))
            found.append((own[-1], places[candidate], Found(candidate, number, solver, least)))
            # At the update, which dividing the batch leaves as it is.
            held_anyway = solver.needed(least) <= max(map(least_bytes, solver.roles()))
            if held_anyway or (len(own) > 1 and own[-1] >= own[-2]):
                all_tried = held_anyway
                break
        if own and all_tried:
            needed[candidate] = min(own)
    size, _, smallest_found = min(found, key=lambda f: f[:2])
    return size, smallest_found
