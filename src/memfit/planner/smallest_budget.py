"""The smallest budget in which a step can run, over all candidates and numbers of micro-batches."""

from __future__ import annotations

from functools import partial

from memfit.planner.found import Found
from memfit.planner.optimistic import least_bytes
from memfit.planner.pruning import held_bytes
from memfit.planner.solvers import RefusedError, Solvers


def smallest(solvers: Solvers) -> tuple[int, Found]:
    """Bytes and plan of the smallest plan found; of several the one with the fewest techniques.

    Candidates with the most techniques come first: next to their plans what holds more in the update can be left out uncaptured.

    Raises:
        MissingTrace, MissingWeighting: the bundle lacks what is needed, and the caller can capture it.
        RefusedError: the baseline cannot be captured.
    """
    found: list[tuple[int, int, Found]] = []  # bytes, place among the candidates, plan
    baseline = solvers.bundle.candidates[0]
    places = {candidate: place for place, candidate in enumerate(solvers.bundle.candidates)}
    for candidate in (baseline, *reversed(solvers.bundle.candidates[1:])):
        if found and held_bytes(solvers, candidate) > min(found, key=lambda f: f[:2])[0]:
            continue
        own: list[int] = []
        for number in solvers.numbers():
            if number > 1 and solvers.weights()[0] is None:
                break
            try:
                solver = solvers.of(number, candidate)
            except RefusedError:
                if candidate == baseline and not own:
                    raise
                break
            # The plain step needs no bytes for what only recomputation takes.
            least = min((solver.least(), solver.plain), key=partial(solvers.budget_for, solver))
            own.append(solvers.budget_for(solver, least))
            found.append((own[-1], places[candidate], Found(candidate, number, solver, least)))
            # At the update, which dividing the batch leaves as it is.
            held_anyway = solver.needed(least) <= max(map(least_bytes, solver.roles()))
            if held_anyway or (len(own) > 1 and own[-1] >= own[-2]):
                break
    size, _, smallest_found = min(found, key=lambda f: f[:2])
    return size, smallest_found
