"""A stage on each path that its forward takes, where values of the batch (whether there is padding, say) decide which operations run.

Where the paths part among the first operations each has a plan of its own (`planner.branches`); else one plan is for all of them, and what it runs again lies
in calls of modules that run the same on each (`planner.steady_calls`). No rank knows the path before its forward has taken it, so what counts is the most that
any of them takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Final, TypeAlias

from memfit.capture.comparing import path_taken
from memfit.planner.branches import branches
from memfit.planner.draws import Draws, ForwardPath
from memfit.planner.script_compiler import compile_stage, compile_stage_calls
from memfit.planner.solution import Solution
from memfit.planner.stage_bytes import StageLevels, different
from memfit.planner.timeline import Recomputations, Timeline
from memfit.values.script import Script
from memfit.values.stages import Recompute
from memfit.values.trace import Trace

StagePlan: TypeAlias = tuple[Solution, ...]
"""What a stage runs again: for each of the paths that have plans of their own."""
OnPaths: TypeAlias = tuple[Recomputations, ...]
"""The same without what the timelines say of it."""
Menu: TypeAlias = list[tuple[Recompute, StagePlan]]

NOTHING: Final[OnPaths] = ({},)


@dataclass(frozen=True, eq=False)
class StagePaths:
    """The steps of one stage.

    Attributes:
        timelines: of the step on each path, that with the most operations first.
        receiving: on each, the parameters of the model that get gradients.
        each_its_own: whether each has a plan of its own.
    """

    timelines: tuple[Timeline, ...]
    receiving: tuple[frozenset[str], ...]
    each_its_own: bool

    @classmethod
    def of(cls, captured: Sequence[tuple[Trace, frozenset[str]]]) -> StagePaths:
        """Those on which other operations run.

        Args:
            captured: traces of the stage for batches of all kinds, and what gets gradients.
        """
        found: list[tuple[Trace, frozenset[str]]] = []
        for trace, receiving in captured:
            if all(path_taken(trace) != path_taken(known) for known, _ in found):
                found.append((trace, receiving))
        found.sort(key=lambda one: -one[0].forward_operations)
        longest, *others = (trace for trace, _ in found)
        alone = branches(replace(longest, paths=tuple(others)))
        if others and not alone:
            # The first call is that of the module around the model, which no rank has.
            inside = [replace(trace, calls=trace.calls[1:]) for trace in (longest, *others)]
            traces = tuple(replace(one, paths=tuple(other for other in inside if other is not one)) for one in inside)
        else:
            traces = alone or (longest,)
        return cls(tuple(map(Timeline, traces)), tuple(receiving for _, receiving in found), bool(alone))

    @property
    def planned(self) -> tuple[Timeline, ...]:
        """Of the paths that have plans of their own."""
        return self.timelines if self.each_its_own else self.timelines[:1]

    @cached_property
    def _forwards(self) -> tuple[ForwardPath, ...]:
        """Of all paths but the first, where one plan is for all."""
        return tuple(map(ForwardPath, self.timelines[1:]))

    def on_each(self, plans: OnPaths, draws: Draws) -> Sequence[Recomputations]:
        """What is run again on each path.

        Args:
            plans: of those that have one of their own; none means that nothing is.
            draws: by which a plan for all paths was made.
        """
        if not any(plans):
            return [{}] * len(self.timelines)
        if len(self.planned) == len(self.timelines):
            return plans
        (plan,) = plans
        decisions = draws.decisions(plan)
        assert decisions is not None, "plans that decide across calls are not taken"
        return plan, *(path.recomputations(decisions) for path in self._forwards)

    def script(self, plans: OnPaths, draws: Draws) -> Script:
        """What a rank follows in forwards of the stage.

        Args:
            plans, draws: as for `on_each`.
        """
        if len(self.planned) < len(self.timelines):
            return compile_stage_calls(draws, plans[0])
        return compile_stage([(each.recipes, plan) for each, plan in zip(self.timelines, plans, strict=True)])

    def until_known(self, number: int, plans: OnPaths) -> int:
        """The most that forward holds until it is known that it takes a path, above what is there before: what any other wants of that is held till then.

        Args:
            number: of the path.
            plans: of all.
        """
        return self._until_known[number] if self.each_its_own and any(plans) else 0

    @cached_property
    def _until_known(self) -> tuple[int, ...]:
        """On each path, with all held that is made until then: the same under every plan."""
        found = []
        for timeline in self.timelines:
            trace = timeline.trace
            shared = trace.shared_operations
            made = sum(trace.storages[s].bytes for op in islice(trace.in_forward(), shared) for s in op.makes)
            levels = timeline.plain().levels[: trace.events_in_forward[shared]]
            found.append(int(levels.max(initial=0)) - trace.bytes_before_step + made)
        return tuple(found)


def on_paths(plan: StagePlan) -> OnPaths:
    """What a plan runs again."""
    return tuple(solution.recomputations for solution in plan)


def most(levels: Sequence[StageLevels]) -> StageLevels:
    """On any path."""
    return StageLevels(*map(max, *map(astuple, levels))) if len(levels) > 1 else levels[0]


def menu_of_paths(menus: Sequence[Sequence[tuple[Recompute, Solution]]]) -> Menu:
    """Ways to hold a stage's activations, whichever path its forward takes.

    A way of one path is put together with the fastest of each other path that holds no more, or where none does with the one that holds least beyond it.

    Args:
        menus: of each path.
    """
    if len(menus) == 1:
        return [(way, (solution,)) for way, solution in menus[0]]

    def beside(way: Recompute) -> Callable[[tuple[Recompute, Solution]], tuple[int, float]]:
        def rank(other: tuple[Recompute, Solution]) -> tuple[int, float]:
            more = max(0, other[0].kept_bytes - way.kept_bytes) + max(0, other[0].pass_bytes - way.pass_bytes)
            return more, other[0].extra_seconds

        return rank

    found: Menu = []
    for number, menu in enumerate(menus):
        for one in menu:
            chosen = [
                one if other == number else min(of_other, key=beside(one[0])) for other, of_other in enumerate(menus)
            ]
            ways = [way for way, _ in chosen]
            together = Recompute(
                max(way.kept_bytes for way in ways),
                max(way.pass_bytes for way in ways),
                max(way.extra_seconds for way in ways),
            )
            found.append((together, tuple(solution for _, solution in chosen)))
    return different(found)
