"""What the stages of a cut run again, chosen anew for the bytes that their ranks have left.

The cut knows a few ways to hold the activations of each stage (`planner.stage_bytes.menu`), since it asks for those of many stages. Between two of them there
may be a megabyte, or the whole step between everything kept and a first block that runs again. So the stages of the cut that was taken are planned once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log
from typing import Final

from memfit.planner.prices import PRICE_RANGE
from memfit.planner.problem import Problem
from memfit.planner.solution import Solution
from memfit.planner.solver import Solver
from memfit.planner.window_layouts import WindowLayout

HALVINGS: Final = 6  # of the range between the plan that the cut has and that with everything kept


def faster(
    solvers: Sequence[Solver], solutions: Sequence[Solution], fits: Callable[[Sequence[Solution]], bool]
) -> list[Solution]:
    """The plans of all stages, each replaced by the fastest found with which they fit.

    Args:
        solvers: of each stage.
        solutions: of each stage; together they fit.
        fits: whether all ranks have the bytes for such plans.
    """
    found = list(solutions)
    for number, solver in enumerate(solvers):
        if not found[number].recomputations:
            continue

        def fit(tried: Solution, number: int = number) -> bool:
            return fits([*found[:number], tried, *found[number + 1 :]])

        for family in _families(solver, found[number]):
            fitting = (one for one in _halved(family, fit) if one.seconds < found[number].seconds)
            found[number] = min(fitting, key=lambda one: one.seconds, default=found[number])
    return found


@dataclass(frozen=True, slots=True)
class _Family:
    """Plans of a stage by a number.

    Attributes:
        make: the plan of a number; None where there is none.
        little, much: the numbers with which little is held, and much.
    """

    make: Callable[[float], Solution | None]
    little: float
    much: float


def _halved(family: _Family, fits: Callable[[Solution], bool]) -> list[Solution]:
    """Plans that fit, each holding more than the one before."""
    found = []
    little, much = family.little, family.much
    for _ in range(HALVINGS):
        middle = (little + much) / 2
        tried = family.make(middle)
        if tried is not None and fits(tried):
            little = middle
            found.append(tried)
        else:
            much = middle
    return found


def _families(solver: Solver, known: Solution) -> Iterator[_Family]:
    """By the peak of a pass; and by the price of what is held after forward, alone and beside that of the peak."""
    if known.peak < solver.plain.peak:
        yield _Family(lambda budget: solver.solve(int(budget)), known.peak, solver.plain.peak)
    problem, last = solver.problem, solver.trace.forward_events - 1
    if not solver.droppable:
        return
    cheap, dear = (log(bound * problem.graph.price_scale) for bound in PRICE_RANGE)
    for weights in ({last: 1.0}, {last: 1.0, problem.baseline.evaluation.peak_event: 1.0}):
        for layout in problem.layouts:
            yield _Family(partial(_at_price, problem, layout, weights), -dear, -cheap)


def _at_price(problem: Problem, layout: WindowLayout, weights: Mapping[int, float], less: float) -> Solution:
    return problem.cuts.at_price(layout, weights, exp(-less))
