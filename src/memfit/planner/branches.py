"""A forward that takes one of a few paths early on (with a mask or without): each path is planned for by itself, as if it were the only one.

    operations   0 ... n-1          n ... last
    with mask    embed  all()       attention, mask added   ...   loss        a plan of its own
    without      embed  all()       attention               ...   loss        a plan of its own, in the same budget

Nothing of the operations that they share is dropped, so that the engine may follow either plan up to the one at which they part, and by its name knows which
it is. What is gained over plans within calls of modules (`steady_calls`): recomputation across calls, whole calls, offloading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Final

from memfit.planner.recipes import Recipes
from memfit.values.trace import Trace

MOST_BRANCHES: Final = 4  # each takes a search of its own


def branches(trace: Trace) -> tuple[Trace, ...]:
    """The paths of a step as traces of one path each, that of the given trace first; empty where they are not to be planned for one by one.

    They are where it is known early which one it is: where fewer bytes of what backward reads are left that cannot be made again than in calls that are the
    same on all, on the path that leaves most. What they make before they part has the same numbers in all.
    """
    everything = (trace, *trace.paths)
    if not 1 < len(everything) <= MOST_BRANCHES or any(path.sized_by_values for path in everything):
        return ()
    apart = [trace]
    for path in trace.paths:
        numbers = max((_beginning(known, path)[1] for known in apart), key=len)
        apart.append(_renumbered(path, numbers))
    shared = [0] * len(apart)
    for (i, one), (j, other) in combinations(enumerate(apart), 2):
        alike, numbers = _beginning(one, other)
        if not alike or any(a != b for a, b in numbers.items()):
            return ()
        shared[i], shared[j] = max(shared[i], alike), max(shared[j], alike)
    alone = tuple(replace(path, paths=(), shared_operations=number) for path, number in zip(apart, shared, strict=True))
    within_calls = (replace(path, paths=tuple(p for p in everything if p is not path)) for path in everything)
    return alone if max(map(_left, alone)) < max(map(_left, within_calls)) else ()


def _beginning(one: Trace, other: Trace) -> tuple[int, dict[int, int]]:
    """With how many operations two paths begin alike, 0 where the names of the next ones do not tell them apart.

    And the storages of the other path that these make, each with its number in the one. What was there before may be numbered otherwise, or be one tensor
    here and two there (labels that are the tokens).
    """
    numbers: dict[int, int] = {}
    known: set[int] = set()  # their numbers in the one
    for alike, (first, second) in enumerate(zip(one.in_forward(), other.in_forward(), strict=False)):
        if first.name != second.name:
            return (
                (alike, numbers)
                if _saved(one, alike, {s: s for s in numbers.values()}) == _saved(other, alike, numbers)
                else (0, {})
            )
        told = [(path.module, path.wanted, path.outputs, len(path.makes)) for path in (first, second)]
        numbers.update(zip(second.makes, first.makes, strict=False))
        sizes = [[path.storages[s].bytes for s in op.makes] for path, op in ((one, first), (other, second))]
        known.update(first.makes)
        touched = [
            [numbers.get(s) for s in (*second.reads, *second.writes)],
            [s if s in known else None for s in (*first.reads, *first.writes)],
        ]
        if told[0] != told[1] or sizes[0] != sizes[1] or touched[0] != touched[1]:
            break
    return 0, {}


def _saved(trace: Trace, operations: int, numbers: Mapping[int, int]) -> list[int | None]:
    """What autograd saves for the first operations of a forward: storages made by these, by these numbers; None for others."""
    known = trace.events_in_forward[operations]
    return [numbers.get(save.storage) for save in trace.saves if save.by < known]


def _renumbered(trace: Trace, numbers: Mapping[int, int]) -> Trace:
    """The same trace with other numbers for some of its storages, and for those that have these numbers now."""
    free = sorted(numbers.keys() - set(numbers.values()))
    taken = sorted(set(numbers.values()) - numbers.keys())
    if len(set(numbers.values())) < len(numbers) or max(taken, default=0) >= len(trace.storages):
        return trace
    new = {**numbers, **dict(zip(taken, free, strict=True))}

    def again(storages: Iterable[int]) -> tuple[int, ...]:
        return tuple(new.get(s, s) for s in storages)

    old = {b: a for a, b in new.items()}
    return replace(
        trace,
        storages=tuple(trace.storages[old.get(s, s)] for s in range(len(trace.storages))),
        operations=tuple(
            replace(each, makes=again(each.makes), reads=again(each.reads), writes=again(each.writes))
            for each in trace.operations
        ),
        saves=tuple(replace(each, storage=new.get(each.storage, each.storage)) for each in trace.saves),
        calls=tuple(
            replace(each, arguments=again(each.arguments), results=again(each.results)) for each in trace.calls
        ),
        gathered=tuple((new.get(s, s), spans) for s, spans in trace.gathered),
    )


def _left(trace: Trace) -> int:
    """Bytes that backward reads and that cannot be made again."""
    recipes = Recipes(trace)
    again = {s for recipe in recipes.recipes if recipe.runnable for s in recipe.makes}
    return sum(trace.storages[s].bytes for s in recipes.saved - again)
