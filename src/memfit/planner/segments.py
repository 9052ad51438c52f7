"""Where few bytes flow: the places at which forward can be cut into cells, found from the graph alone.

Between two residual blocks one storage is alive that later operations read; inside a block there are several. A *boundary* is an operation after which
the bytes still to be read are at a local minimum; a *cell* is what lies between two boundaries; a *window* is one or more cells rebuilt together.

What is read over much of forward hides the boundaries it crosses: the encoder's output is there in the whole decoder, a skip of a U-Net until its level is
reached again. Such *lasting* storages may be left out of the count; they are held across the boundaries found then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from memfit.planner.recipes import Recipes

HILL: Final = 1.3  # bytes must rise by this factor between two valleys
NEAR: Final = 1.02  # positions this close to a valley's minimum are boundaries too
OWN_SHARE: Final = 0.5  # a boundary's operation makes at least this share of what crosses it
LASTING: Final = 0.2  # what is still read after this part of forward lasts


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place to cut.

    Attributes:
        event: the operation after which.
        storages: managed storages alive across it that later operations read.
        crossing_bytes: of those.
    """

    event: int
    storages: tuple[int, ...]
    crossing_bytes: int


def lasting(recipes: Recipes) -> frozenset[int]:
    """Managed storages that are read for so long that they cross boundaries of much besides themselves."""
    trace = recipes.trace
    last_read = recipes.last_reads
    long = LASTING * trace.forward_events
    return frozenset(s for s in recipes.managed if last_read.get(s, -1) - trace.storages[s].birth > long)


def boundaries(recipes: Recipes, around: Collection[int] = ()) -> list[Boundary]:
    """All boundaries of a trace's forward, in order; storages in `around` do not count among the bytes that cross."""
    trace = recipes.trace
    end = trace.forward_events
    last_read = recipes.last_reads
    crossing = np.zeros(end + 1, dtype=np.int64)
    for s in recipes.managed:
        birth, last = trace.storages[s].birth, last_read.get(s, -1)
        if last > birth and s not in around:
            crossing[birth] += trace.storages[s].bytes
            crossing[last] -= trace.storages[s].bytes
    crossing = np.cumsum(crossing)[:end]
    found = {e for valley in _valleys(crossing) for e in valley if _makes_its_own(recipes, e, int(crossing[e]))}
    # Where a single storage crosses, nothing else can be needed from before: a boundary however the bytes around it lie.
    births = {trace.storages[s].birth for s in recipes.managed}
    found |= {e for e in births if crossing[e] > 0 and _crossed_by_one(recipes, e, int(crossing[e]), last_read)}
    # What is a boundary with all that crosses it is one without some of it.
    found |= {b.event for b in boundaries(recipes)} if around else set()
    return boundaries_after(recipes, sorted(found))


def boundaries_after(recipes: Recipes, events: Sequence[int]) -> list[Boundary]:
    """The boundaries after these events of forward, in order, with what crosses them."""
    storages, last_read = recipes.trace.storages, recipes.last_reads
    spans = sorted((storages[s].birth, s) for s in recipes.managed if s in last_read)
    out = []
    alive: list[int] = []
    at = 0
    for e in events:
        while at < len(spans) and spans[at][0] <= e:
            alive.append(spans[at][1])
            at += 1
        alive = [s for s in alive if last_read[s] > e]
        out.append(Boundary(e, tuple(alive), sum(storages[s].bytes for s in alive)))
    return out


def _crossed_by_one(recipes: Recipes, event: int, crossing_bytes: int, last_read: dict[int, int]) -> bool:
    trace = recipes.trace
    made = [s for s in trace.operations[trace.events[event]].makes if last_read.get(s, -1) > event]
    return len(made) == 1 and trace.storages[made[0]].bytes == crossing_bytes


def _makes_its_own(recipes: Recipes, event: int, crossing_bytes: int) -> bool:
    op = recipes.trace.events[event]
    made = sum(recipes.trace.storages[s].bytes for s in recipes.trace.operations[op].makes) if op >= 0 else 0
    # An in-place write (relu_) ends a block as well as an operation that makes something.
    written = (
        sum(recipes.trace.storages[s].bytes for s in recipes.trace.operations[op].writes if s in recipes.recipe_of)
        if op >= 0
        else 0
    )
    return crossing_bytes > 0 and max(made, written) >= OWN_SHARE * crossing_bytes


def _valleys(crossing: Any) -> list[list[int]]:
    """Positions near the bottom of each valley of the curve."""
    out: list[list[int]] = []
    falling = True
    low, high = float("inf"), 0.0
    start = 0
    for e, value in enumerate([*crossing.tolist(), float("inf")]):
        if falling:
            low = min(low, value) if value > 0 else low
            if value > low * HILL:
                out.append([i for i in range(start, e) if 0 < crossing[i] <= low * NEAR])
                falling, high = False, value
        else:
            high = max(high, value)
            if value < high / HILL:
                falling, low, start = True, value, e
    return [v for v in out if v]


def windows(cuts: list[Boundary], events: int) -> dict[int, int]:
    """Window of each forward event, -1 included, when forward is cut at these boundaries.

    The operation at a boundary ends its window; what the next one saves of it belongs to the next.
    """
    places = [b.event for b in cuts]
    return {e: bisect_left(places, e) for e in range(-1, events + 1)}
