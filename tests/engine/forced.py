"""Plans that offload as they are told, not as it pays: in a small model, and to a disk, it never does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from torch import nn

import memfit
from memfit.hardware.machine import Link
from memfit.planner.recipes import Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planner.script_compiler import compile_script
from memfit.planner.timeline import Timeline
from memfit.planning import changed, planning_of
from memfit.values.trace import Trace

LINK: Final = Link("disk", 1e9, 1e9, 1e-4, least_bytes=1)
Choice = Callable[[Recipes], dict[int, list[int]]]


def everything(lag: int) -> Choice:
    """Offload whatever backward reads."""

    def plan(recipes: Recipes) -> dict[int, list[int]]:
        offloaded = {s: ways[lag] for s, ways in recipes.reloads_of.items() if s in recipes.saved}
        assert offloaded
        return recomputations_for(recipes, (), offloaded=offloaded)

    return plan


def forced(
    model: nn.Module,
    sample: Any,
    loss_fn: Any,
    choice: Choice,
    optimizer: Any = None,
    parts: int = 1,
    link: Link = LINK,
    **fixed: Any,
) -> tuple[memfit.Plan, Trace]:
    """A plan that offloads as it is told, not as it pays."""
    plain = memfit.plan(model, sample, loss_fn, 1 << 50, optimizer, fixed={"micro_batches": parts, **fixed})
    search = planning_of(plain)
    trace = search.solver(parts).trace
    recipes = Recipes(trace, link)
    recomputations = choice(recipes)
    peak = Timeline(trace, recipes).evaluate(recomputations).peak_bytes + search.extra_bytes
    script = compile_script(recipes, recomputations)
    return changed(plain, script=script, prediction=replace(plain.prediction, peak_bytes=peak)), trace
