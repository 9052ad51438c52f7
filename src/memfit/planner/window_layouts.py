"""The layouts worth trying, that is, divisions of forward into windows: how many cells each window has, and which boundaries count.

A *window* is rebuilt as a whole when backward comes to it, and what was rebuilt in it is forgotten at its end (`schedule`). Few large windows run little
again, many small ones hold little at once; which of them suits a budget is found by trying.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.planner.recipes import Recipes
from memfit.planner.segments import Boundary, boundaries, lasting, windows


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """One division of forward into windows.

    Attributes:
        cells: in a window; 0 where everything is one window.
        around: lasting storages were left out when the boundaries were looked for.
        cuts: the events after which a window ends.
        window_of_event: window of each forward event; None where everything is one window.
        boundary_storages: those that cross from one window into others.
        forced: those of them that backward reads; they are kept.
    """

    cells: int
    around: bool
    cuts: tuple[int, ...]
    window_of_event: dict[int, int] | None
    boundary_storages: frozenset[int]
    forced: frozenset[int]

    @property
    def windows(self) -> int:
        """How many there are."""
        return len(self.cuts) + 1

    def window_of(self, events: Any) -> Any:
        """The windows of events of forward, as `segments.windows` counts them."""
        return np.searchsorted(np.array(self.cuts, dtype=np.int64), events)


class WindowLayouts:
    """All layouts of a trace.

    Attributes:
        cuts: the boundaries at which windows may end.
        cuts_around: the same where storages that last long may cross; empty where that finds no others.
    """

    def __init__(self, recipes: Recipes) -> None:
        self._recipes = recipes
        self.cuts: list[Boundary] = boundaries(recipes)
        around = lasting(recipes)
        self.cuts_around = boundaries(recipes, around) if around else []
        if [b.event for b in self.cuts_around] == [b.event for b in self.cuts]:
            self.cuts_around = []

    def layout(self, cells: int, *, around: bool = False) -> WindowLayout:
        """Windows of `cells` cells each; 0 for one window, in which everything stays once rebuilt.

        Args:
            cells: in a window.
            around: between boundaries that lasting storages may cross, which are held.
        """
        cuts = self.cuts_around if around else self.cuts
        if cells == 0 or not cuts:
            return WindowLayout(0, False, (), None, frozenset(), frozenset())
        chosen = cuts[cells - 1 :: cells]
        crossing = frozenset(s for b in chosen for s in b.storages)
        return WindowLayout(
            cells,
            around,
            tuple(b.event for b in chosen),
            windows(chosen, self._recipes.trace.forward_events),
            crossing,
            crossing & self._recipes.saved,
        )

    def all(self) -> list[WindowLayout]:
        """All layouts worth trying."""
        out = [self.layout(size) for size in _window_sizes(len(self.cuts))]
        return out + [self.layout(size, around=True) for size in _window_sizes(len(self.cuts_around))[1:]]


def _window_sizes(count: int) -> list[int]:
    """Window sizes worth trying, in cells, where there are so many boundaries; 0 stands for all."""
    sizes = [0]
    size = 1
    while size <= max(1, count // 2) and count:
        sizes.append(size)
        size = size + 1 if size < 4 else (size * 3 + 1) // 2
    return sizes
