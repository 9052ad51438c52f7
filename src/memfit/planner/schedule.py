"""Which storages are dropped, and for how long a rebuilt copy is remembered -> the reruns, in order.

A saved tensor that was dropped is rebuilt at the unpack that needs it, with whatever that takes. What was rebuilt stays for later uses within the
same *window* (a stretch of forward, usually one block) and is forgotten at its end, so that at most one window is rebuilt at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from memfit.planner.recipes import Recipes

Remember = Callable[[int], Collection[int]]  # window -> storages rebuilt earlier that stay when it begins


def reruns_for(
    recipes: Recipes,
    dropped: Collection[int],
    window_of_event: Mapping[int, int] | None = None,
    kept_transients: Collection[int] = (),
    remember: Remember | None = None,
) -> dict[int, list[int]]:
    """The reruns that rebuild every dropped storage in time.

    Args:
        recipes: of the trace.
        dropped: saved storages to drop; each must be rebuildable.
        window_of_event: window of each forward event; None for a single window.
        kept_transients: storages backward does not read but reruns do, to be held from forward on.
        remember: storages that stay when a window begins; None for none.
    """
    dropped = set(dropped)
    # What has no recipe of its own is held from forward on wherever a rerun reads it.
    kept = (recipes.saved - dropped) | set(kept_transients) | recipes.held_always
    available: set[int] = set()
    window = None
    out: dict[int, list[int]] = {}
    recipe_of = recipes.recipe_of
    table = recipes.recipes
    last_operation = recipes.last_operation
    for event, s, by in recipes.unpacks:
        if s not in dropped:
            continue
        if window_of_event is not None:
            here = window_of_event[by]
            if here != window:
                available = available & set(remember(here)) if remember is not None else set()
                window = here
        if s in available:
            continue
        # Depth first through what is missing; recipes then run in the order of forward.
        needed: set[int] = set()
        stack = [s]
        while stack:
            recipe = recipe_of[stack.pop()]
            if recipe not in needed:
                needed.add(recipe)
                stack += [i for i in table[recipe].inputs if i not in kept and i not in available]
        runs = sorted(needed, key=last_operation.__getitem__)
        out[event] = runs
        for recipe in runs:
            available.update(i for i in table[recipe].makes if i not in kept)
    return out
