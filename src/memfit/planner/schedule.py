"""From the dropped storages, and how long a recomputed copy is kept, to the recomputations in order.

A saved tensor that was dropped is rebuilt at the unpack that needs it, with whatever that takes. What was rebuilt stays for later uses within the
same *window* (a stretch of forward, usually one block) and is forgotten at its end, so that at most one window is rebuilt at a time. What was offloaded is
reloaded in the same way, only that it may begin earlier than it is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

from memfit.planner.recipes import Recipes

Remember = Callable[[int], Collection[int]]  # window -> storages rebuilt earlier that stay when it begins


def recomputations_for(
    recipes: Recipes,
    dropped: Collection[int],
    window_of_event: Mapping[int, int] | None = None,
    kept_transients: Collection[int] = (),
    remember: Remember | None = None,
    offloaded: Mapping[int, int] | None = None,
) -> dict[int, list[int]]:
    """The recomputations that rebuild every dropped storage in time, and reload every offloaded one.

    Args:
        recipes: of the trace.
        dropped: saved storages to drop; each must be rebuildable.
        window_of_event: window of each forward event; None for a single window.
        kept_transients: storages backward does not read but recomputations do, to be held from forward on.
        remember: storages that stay when a window begins; None for none.
        offloaded: storage -> its reload, of those that come back from a lower tier; they are not rebuilt.
    """
    offloaded = offloaded or {}
    dropped = set(dropped)
    # What has no recipe of its own is held from forward on wherever a recomputation reads it.
    kept = ((recipes.saved - dropped) | set(kept_transients) | recipes.held_always) - offloaded.keys()
    dropped |= recipes.saved & offloaded.keys()
    # Of what a recipe makes, these are not counted as there; other storages that are kept are asked for by nothing.
    not_remade = (kept & dropped) | offloaded.keys()
    rebuilt_from: dict[int, list[int]] = {}  # recipe -> inputs that are not held from forward on
    available: set[int] = set()
    window = None
    out: dict[int, list[int]] = {}
    recipe_of = recipes.recipe_of
    table = recipes.recipes
    last_operation = recipes.last_operation
    reads: dict[int, list[int]] = defaultdict(list)  # of each offloaded storage: where something reads it
    for event, s, by in recipes.unpacks:
        if s not in dropped:
            continue
        if window_of_event is not None:
            here = window_of_event[by]
            if here != window:
                available = available & set(remember(here)) if remember is not None else set()
                window = here
        if s in available:
            if s in offloaded:
                reads[s].append(event)
            continue
        # Depth first through what is missing; recipes then run in the order of forward.
        needed: set[int] = set()
        coming: set[int] = set()
        stack = [s]
        while stack:
            i = stack.pop()
            if i in offloaded:
                coming.add(i)
            elif recipe_of[i] not in needed:
                recipe = recipe_of[i]
                needed.add(recipe)
                inputs = rebuilt_from.get(recipe)
                if inputs is None:
                    inputs = rebuilt_from[recipe] = [i for i in table[recipe].inputs if i not in kept]
                for i in inputs:
                    if i not in available:
                        stack.append(i)
                    if i in offloaded:
                        reads[i].append(event)
        for i in sorted(coming, key=lambda i: last_operation[recipe_of[i]]):
            _reload(recipes, out, reads[i], offloaded[i], event)
            available.add(i)
            reads[i].append(event)
        if needed:
            runs = sorted(needed, key=last_operation.__getitem__)
            out.setdefault(event, []).extend(runs)
            for recipe in runs:
                makes = table[recipe].makes
                available.update(makes if not_remade.isdisjoint(makes) else [i for i in makes if i not in not_remade])
    return {event: out[event] for event in sorted(out)}


def _reload(recipes: Recipes, out: dict[int, list[int]], reads: list[int], reload: int, event: int) -> None:
    """Begin a reload in time for an event; where it would have to begin before the last copy is done with, that one stays instead."""
    begin = recipes.begin(reload, event)
    before = max((e for e in reads if e < event), default=-1)
    if before < begin:
        runs = out.setdefault(begin, [])
        # After those that are read earlier, before what computes: the link is busy meanwhile.
        place = next((at for at, run in enumerate(runs) if run not in recipes.reloads), len(runs))
        runs.insert(place, reload)
