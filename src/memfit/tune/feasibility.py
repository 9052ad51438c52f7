"""Whether any trial of a search could fit: asked before the first, so that a budget under which nothing fits is one sentence and no trial."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

from memfit.errors import BudgetError, InfeasibleError, InputError
from memfit.tune.capacity import largest_device
from memfit.tune.plans import Fit
from memfit.tune.search import Search
from memfit.tune.space import Choices, Space, corners
from memfit.units import format_bytes, parse_bytes

_MOST_COMBINATIONS: Final = 12
_SAME_PLAN: Final = ("optim.lr", "schedule.", "train.", "early_stopping.", "generate.")  # keys on which no plan depends


def to_plan(space: Space) -> tuple[list[dict[str, Any]], bool]:
    """Combinations of extreme values, which tell whether anything fits, and whether they are all that tell; more than a few are not tried."""
    telling = {}
    for name, each in space.items():
        values = each.extremes()
        if name.startswith(_SAME_PLAN):
            values = values[:1]
        elif name == "fit.budget":
            values = _largest(values)
        telling[name] = Choices(dict(enumerate(values)))
    found = list(corners(telling, _MOST_COMBINATIONS))
    for each_value in product(*(each.extremes() for each in telling.values())):
        combination = dict(zip(telling, each_value, strict=True))
        if combination not in found:
            if len(found) == _MOST_COMBINATIONS:
                return found, False
            found.append(combination)
    return found, True


def _largest(budgets: list[Any]) -> list[Any]:
    """What fits into any of these budgets fits into the largest; all of them where some are shares, of what is not known here."""
    try:
        return [max(budgets, key=parse_bytes)]
    except BudgetError:
        return budgets


def check_feasible(search: Search, capacity: Mapping[str, int], planned: Callable[[dict[str, Any], Path], Fit]) -> None:
    """Check that some trial can start.

    Args:
        search: that is to begin.
        capacity: bytes that all trials share, by the names of devices and tiers.
        planned: the plan of a run of memfit with these values, in this folder.

    Raises:
        InfeasibleError: none of the combinations fits, or no device has what a command is promised; names the smallest budget that would do.
        InputError: the same is wrong with all of them, such as a function that the model's file does not have.
    """
    if search.is_command:
        _check_promise(search, capacity)
    else:
        _check_corners(search, capacity, planned)


def _check_promise(search: Search, capacity: Mapping[str, int]) -> None:
    each, most = search.config.memory, largest_device(capacity)
    if each is None or most is None or parse_bytes(each) <= most:
        return
    least = parse_bytes(each)
    raise InfeasibleError(
        f"no trial fits, so none was started: search.memory promises {format_bytes(least)} to each, and the largest device has {format_bytes(most)}: "
        f"the smallest search.budget that would do is {format_bytes(least)} ({least} bytes)",
        budget_bytes=most,
        minimum_bytes=least,
    )


def _check_corners(search: Search, capacity: Mapping[str, int], planned: Callable[[dict[str, Any], Path], Fit]) -> None:
    smallest: Fit | None = None
    at: dict[str, Any] = {}
    wrong = set()
    combinations, complete = to_plan(search.space)
    for values in combinations:
        fit = planned(values, search.out / "check")
        if fit.fits:
            return
        if fit.error:
            wrong.add(fit.message)
        elif smallest is None or (fit.minimum_bytes or math.inf) < (smallest.minimum_bytes or math.inf):
            smallest, at = fit, values
    if len(wrong) == 1 and smallest is None:
        raise InputError(f"no trial could be planned, so none was started: {wrong.pop()}")
    if wrong or smallest is None or not complete:
        return  # the trials will tell
    telling = [name for name in at if not name.startswith((*_SAME_PLAN, "fit.budget"))]
    words = ", ".join(f"{name}={_shown(at[name])}" for name in telling)
    least = smallest.minimum_bytes
    told = (
        "no budget was found that would do"
        if least is None
        else f"the smallest that would is {format_bytes(least)} ({least} bytes){', with ' if words else ''}{words}"
    )
    raise InfeasibleError(
        f"nothing in search.space fits into its budget, so no trial was started: {told}",
        budget_bytes=largest_device(capacity) or 0,
        minimum_bytes=least,
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
