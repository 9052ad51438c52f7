"""The smallest budget in which a step can run, over all candidates and numbers of micro-batches."""

from __future__ import annotations

from functools import partial

from memfit.planner.found import Found
from memfit.planner.optimistic import least_bytes
from memfit.planner.solvers import RefusedError, Solvers


def smallest(solvers: Solvers) -> tuple[int, Found]:
    """Bytes and plan of the smallest plan found.

    Raises:
        MissingTrace, MissingWeighting: the bundle lacks what is needed, and the caller can capture it.
        RefusedError: the baseline cannot be captured.
    """
    found: list[tuple[int, Found]] = []
    baseline = solvers.bundle.candidates[0]
    for candidate in solvers.bundle.candidates:
        own: list[int] = []
        for number in solvers.numbers():
            if number > 1 and solvers.weights()[0] is None:
                break
            try:
                solver = solvers.of(number, candidate)
            except RefusedError:
                if candidate == baseline and not found:
                    raise
                break
            # The plain step needs no bytes for what only recomputation takes.
            least = min((solver.least(), solver.plain), key=partial(solvers.budget_for, solver))
            own.append(solvers.budget_for(solver, least))
            found.append((own[-1], Found(candidate, number, solver, least)))
            # At the update, which dividing the batch leaves as it is.
            held_anyway = solver.needed(least) <= max(map(least_bytes, solver.roles()))
            if held_anyway or (len(own) > 1 and own[-1] >= own[-2]):
                break
    return min(found, key=lambda f: f[0])
