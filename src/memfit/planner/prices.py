"""The prices of memory at which the step fits, in one layout: plans from minimum cuts, the price raised until the replayed peak is within the budget.

Moments that turn out to be the peak get a price of their own. One price makes equal blocks decide alike, so what a cut drops is then mixed with what the
next lower price drops, and trimmed one recomputation at a time (`local_search`).

Source: rematerialisation as project selection is our own, after the cut formulation in torch.compile's partitioner (Horace He, 2022), which minimises saved
bytes, not the peak, and takes no budget.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple

from memfit.planner.front_search import MOST_SHAKEN, FrontSearch
from memfit.planner.priced_cuts import Weights
from memfit.planner.solution import Solution
from memfit.planner.window_layouts import WindowLayout

BISECTIONS: Final = 9
ROUNDS: Final = 2
MIXINGS: Final = 7
PRICE_RANGE: Final = (1e-4, 1e4)  # in units of the graph's scale of prices


class Bracket(NamedTuple):
    """Where plans begin to fit, as the price rises.

    Attributes:
        fitting: the plan at the lowest price at which plans were found to fit; None where none does.
        too_large: the plan at the highest price below it; None where all fit.
        point: which of the prices that of `fitting` is.
    """

    fitting: Solution | None
    too_large: Solution | None
    point: int


def bracket(
    plan_at: Callable[[float], Solution], budget_bytes: int, scale: float, steps: int, near: int | None = None
) -> Bracket:
    """Where among 2**steps prices, each the same multiple of the one before, plans begin to fit.

    By bisection; or from a point near which it is taken to be, in steps that double until a plan fits and another does not. A right guess takes two plans in
    the place of `steps`.

    Args:
        plan_at: the plan at a price.
        budget_bytes: what plans have to fit into.
        scale: unit of the prices.
        steps: of the bisection.
        near: the `point` of a bracket that is likely to be near.
    """
    lowest, highest = PRICE_RANGE
    low, high = 0, 1 << steps
    fitting: Solution | None = None
    too_large: Solution | None = None
    at, stride = (low + high) // 2 if near is None else near, 1
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        found = plan_at(scale * lowest * (highest / lowest) ** (at / (1 << steps)))
        if found.peak <= budget_bytes:
            high, fitting = at, found
        else:
            low, too_large = at, found
        if near is None or (fitting is not None and too_large is not None):
            at = (low + high) // 2
        else:
            at += stride if fitting is None else -stride
            stride *= 2
    return Bracket(fitting, too_large, high)


class PriceSearch:
    """The search for prices, on behalf of a search that remembers its plans."""

    def __init__(self, search: FrontSearch) -> None:
        self._search = search
        self._problem = search.problem
        self.at_peak: Weights = {self._problem.baseline.evaluation.peak_event: 1.0}

    def plans(self, layout: WindowLayout, budget_bytes: int) -> list[Solution]:
        """Bisect the price, then price the moments that stay too full. Returns the plans found, trimmed."""
        weights = dict(self.at_peak)
        before: Solution | None = None
        found: list[Solution] = []
        for _ in range(ROUNDS):
            fitting, too_large, _ = self.bracket(layout, weights, budget_bytes, BISECTIONS)
            if fitting is not None:
                if fitting is before:
                    break
                before = fitting
                if too_large is not None and fitting.runs > MOST_SHAKEN:
                    fitting = self._mixed(layout, fitting, too_large, budget_bytes)
                found.append(self._search.trimmed(fitting, budget_bytes))
                if found[-1].seconds >= min((f.seconds for f in found[:-1]), default=inf):
                    break
            if too_large is None:
                break
            more = with_peak_priced(weights, too_large)
            if more is None:
                break
            weights = more
        return found

    def bracket(
        self, layout: WindowLayout, weights: Weights, budget_bytes: int, steps: int, near: int | None = None
    ) -> Bracket:
        """`bracket` of the plans of one layout."""

        def plan_at(price: float) -> Solution:
            found = self._problem.cuts.at_price(layout, weights, price)
            self._search.front.add(found)
            return found

        return bracket(plan_at, budget_bytes, self._problem.graph.price_scale, steps, near)

    def _mixed(self, layout: WindowLayout, fitting: Solution, larger: Solution, budget_bytes: int) -> Solution:
        """Of a plan that fits and a larger one: the first's decisions in the first part of forward, the other's in the rest.

        Where many blocks are alike one price decides alike about all of them; so a long plan is brought near the budget at once, and trimming has less to do.
        """
        nodes = self._problem.graph.nodes
        low, high, best = 0, len(nodes), fitting
        for _ in range(MIXINGS):
            middle = (low + high) // 2
            head, rest = set(nodes[:middle]), set(nodes[middle:])
            found = self._problem.cuts.solution(
                layout,
                (fitting.dropped & head) | (larger.dropped & rest),
                (fitting.transients & head) | (larger.transients & rest),
            )
            if found.peak <= budget_bytes:
                high, best = middle, found
                self._search.front.add(found)
            else:
                low = middle
        return best


def with_peak_priced(weights: Weights, too_large: Solution) -> dict[int, float] | None:
    """The weights with a price for the moment that kept a plan from fitting; if it has one, with more of it. None where it has all of the price already."""
    event = too_large.evaluation.peak_event
    if weights.keys() == {event}:
        return None
    return {**weights, event: weights.get(event, 0.0) + 0.5 * sum(weights.values())}
