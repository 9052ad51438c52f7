"""What following a plan through forward costs: host seconds for each operation that the engine looks at.

Where nothing is dropped for some operations in a row, the engine is off (`Script.kept_stretches`) and they cost nothing more than in plain PyTorch. Whether it
is off is decided for parts of forward of about `PART` operations, bounded by calls of modules: a stretch much shorter gains nothing. So dropping much in a
few blocks may be faster than dropping a little in every block, though more runs again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import Final

from memfit.planner.mincut import Arc
from memfit.planner.recipes import Recipes
from memfit.values.trace import ModuleCall

PART: Final = 12  # operations; taking the follower off and putting it on again takes as long as following about four


class Following:
    """The parts of one trace's forward, and which of them are followed under a plan.

    Attributes:
        seconds: of following each part.
        parts_of: of each recipe, the parts that are followed where it runs: those of its operations, of what makes its inputs, and of what autograd saves.
        own_parts: of each recipe, those of its operations alone.
    """

    def __init__(self, recipes: Recipes) -> None:
        trace = recipes.trace
        forward = [trace.events[event] for event in trace.events_in_forward]
        bounds = part_bounds(trace.calls, len(forward))
        self.seconds = [
            trace.dispatch_seconds * sum(trace.operations[op].host_factor for op in forward[begin:end])
            for begin, end in pairwise(bounds)
        ]
        position = {op: number for number, op in enumerate(forward)}

        def part_at(number: int) -> int:
            return min(bisect_right(bounds, number) - 1, len(self.seconds) - 1)

        made_in = {s: part_at(position[op]) for op in forward for s in trace.operations[op].makes}
        saved_in: dict[int, set[int]] = {}
        for save in trace.saves:
            if 0 <= save.by < trace.forward_events and trace.events[save.by] >= 0:
                saved_in.setdefault(save.storage, set()).add(part_at(position[trace.events[save.by]]))
        self.own_parts: list[tuple[int, ...]] = []
        self.parts_of: list[frozenset[int]] = []
        for number, recipe in enumerate(recipes.recipes):
            if number in recipes.calls:  # nothing is followed where a call is made again as a whole
                self.own_parts.append(())
                self.parts_of.append(frozenset())
                continue
            own = {part_at(position[op]) for op in recipe.operations}
            stored = [recipes.reloads[number].storage] if number in recipes.reloads else recipe.makes
            around = {made_in[s] for s in (*recipe.inputs, *stored) if s in made_in}
            around |= {part for s in stored for part in saved_in.get(s, ())}
            self.own_parts.append(tuple(sorted(own)))
            self.parts_of.append(frozenset(own | around))

    @property
    def always(self) -> float:
        """Seconds of following any plan that drops something: of the one part, where there is one."""
        return self.seconds[0] if len(self.seconds) == 1 else 0.0

    def in_network(self, recipes: Iterable[tuple[int, int]], first: int) -> tuple[list[float], list[Arc]]:
        """Nodes for a network of recipes that may run, with what each costs on the source side, and the arcs that put it there with any recipe of its part.

        A recipe brings the parts of its own operations alone, since more would join all of forward into one component; so what a cut costs is a little less
        than what its plan costs. Where there is one part there are no nodes: `always` has its seconds.

        Args:
            recipes: the node and the number of each recipe.
            first: the number of the first node that is free.
        """
        if len(self.seconds) == 1:
            return [], []
        numbered: dict[int, int] = {}
        arcs: list[Arc] = []
        for node, recipe in recipes:
            for part in self.own_parts[recipe]:
                arcs.append((node, first + numbered.setdefault(part, len(numbered)), inf))
        return [self.seconds[part] for part in numbered], arcs

    def seconds_of(self, recipes: Iterable[int]) -> float:
        """Seconds of following a plan that runs these recipes."""
        parts = frozenset().union(*(self.parts_of[recipe] for recipe in set(recipes)))
        return sum(self.seconds[part] for part in parts)


def part_bounds(calls: Sequence[ModuleCall], operations: int) -> list[int]:
    """Where parts begin and end, in operations of forward: 0 first, their number last. Calls come in the order in which they begin, outer ones first."""
    bounds = [0]
    inside: list[list[int]] = [
        [] for _ in range(len(calls) + 1)
    ]  # the calls right inside each; last, those inside none
    open_calls: list[int] = []
    for number, call in enumerate(calls):
        while open_calls and calls[open_calls[-1]].operations[1] <= call.operations[0]:
            open_calls.pop()
        inside[open_calls[-1] if open_calls else -1].append(number)
        open_calls.append(number)

    def split(number: int, end: int) -> None:
        """Bounds inside a call: at the begins and ends of calls inside it, no closer to each other than a part."""
        for inner in inside[number]:
            first, last = calls[inner].operations
            if first - bounds[-1] >= PART and end - first >= PART:
                bounds.append(first)
            if last - first >= 2 * PART:
                split(inner, last)
            if last - bounds[-1] >= PART and end - last >= PART:
                bounds.append(last)

    split(-1, operations)
    if operations > bounds[-1]:
        bounds.append(operations)
    return bounds if len(bounds) > 1 else [0, operations]
