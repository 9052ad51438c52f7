"""Find the prices of memory at which the step fits, the cheapest plan there, and a lower bound on any plan.

At given prices per byte and moment one minimum cut decides every storage at once: keep it and pay for the moments it is alive, or drop it and pay the
seconds of its recipe, whose inputs then must be there in turn. The prices are raised until the replayed peak fits the budget; moments that turn out to be
the peak get a price of their own. One price makes equal blocks decide alike, so the last step between two cuts is walked storage by storage.

The bound is Lagrangian: for any prices, (cheapest total at these prices) - (price of the budget) is at most the extra seconds of every plan that fits,
because a rebuilt storage is charged only at the moments at which backward reads it, which no plan avoids (`Pricing.bound`).

Sources: Lagrangian relaxation as in Held and Karp 1971; rematerialisation as project selection: our own, after the cut formulation in
torch.compile's partitioner (Horace He, 2022), which minimises saved bytes, not the peak, and takes no budget.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import numpy as np

from memfit.planner.chains import CellChain
from memfit.planner.mincut import minimum_cut
from memfit.planner.recipes import Recipes
from memfit.planner.schedule import reruns_for
from memfit.planner.segments import Boundary, boundaries, windows
from memfit.planner.timeline import Evaluation, Reruns, Timeline

BISECTIONS: Final = 9
ROUNDS: Final = 3
FEW_STORAGES: Final = 64  # up to here every exchange of one kept storage for one dropped is tried
FEW_CELLS: Final = 24
CHAINS_WORTH: Final = 0.15  # nested sweeps are looked at when a plan costs more than this part of a step


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan for one trace.

    Attributes:
        reruns: what to run again, and when.
        evaluation: what the timeline says of it.
        dropped: storages rebuilt; transients: storages held for reruns only.
        window: how many cells are rebuilt together (0: all).
    """

    reruns: Reruns
    evaluation: Evaluation
    dropped: frozenset[int] = frozenset()
    transients: frozenset[int] = frozenset()
    window: int = 0

    @property
    def seconds(self) -> float:
        """Extra seconds of one micro-batch."""
        return self.evaluation.extra_seconds

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.evaluation.peak_bytes


@dataclass(slots=True)
class _Layout:
    """One way to cut forward into windows."""

    cells: int
    window_of_event: dict[int, int] | None
    boundary_storages: frozenset[int]
    first_unpack: dict[int, int] = field(default_factory=dict)


class Solver:
    """Plans for one trace at any budget; what depends on the trace alone is worked out once."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.recipes: Recipes = timeline.recipes
        self.trace = timeline.trace
        self.droppable = frozenset(self.recipes.saved & self.recipes.rebuildable)
        self.plain = Solution({}, timeline.plain())
        self.cuts: list[Boundary] = boundaries(self.recipes)
        self.evaluations = 0
        self._cells: CellChain | None = None
        self._smallest: Solution | None = None
        trace = self.trace
        self._first_read: dict[int, int] = {}
        self._save_event: dict[int, int] = {}
        for save in trace.saves:
            for event, _ in save.unpacks:
                self._first_read[save.storage] = min(self._first_read.get(save.storage, event), event)
                self._save_event[save.storage] = max(self._save_event.get(save.storage, -1), save.by)
        # Storages the cut decides about: everything rebuildable that a dropped storage may need.
        nodes: list[int] = []
        seen: set[int] = set()
        stack = list(self.droppable)
        while stack:
            s = stack.pop()
            if s in seen:
                continue
            seen.add(s)
            nodes.append(s)
            stack.extend(
                i for i in self.recipes.recipes[self.recipes.recipe_of[s]].inputs if i in self.recipes.rebuildable
            )
        nodes.sort()
        self.nodes = nodes
        self._number = {s: i for i, s in enumerate(nodes)}
        recipes = sorted({self.recipes.recipe_of[s] for s in nodes})
        self._recipe_number = {r: len(nodes) + i for i, r in enumerate(recipes)}
        self._recipe_list = recipes
        dispatch = trace.dispatch_seconds
        self._run_seconds = [
            self.recipes.recipes[r].seconds + dispatch * len(self.recipes.recipes[r].operations) for r in recipes
        ]

    # -- the cut -------------------------------------------------------------------------------------------------------------

    def layout(self, cells: int) -> _Layout:
        """Windows of `cells` cells each; 0 for one window, in which everything stays once rebuilt."""
        if cells == 0 or not self.cuts:
            made = _Layout(0, None, frozenset())
        else:
            chosen = self.cuts[cells - 1 :: cells]
            made = _Layout(
                cells,
                windows(chosen, self.trace.forward_events),
                frozenset(s for b in chosen for s in b.storages),
            )
        for save in self.trace.saves:
            window = made.window_of_event[save.by] if made.window_of_event is not None else 0
            for event, _ in save.unpacks:
                made.first_unpack[window] = min(made.first_unpack.get(window, event), event)
        return made

    def _keep_prices(self, layout: _Layout, cumulative: Any) -> list[float]:
        """What it costs to hold each storage from when it would die until its window is rebuilt."""
        out = []
        trace = self.trace
        for s in self.nodes:
            storage = trace.storages[s]
            where = self._save_event.get(s, storage.birth)
            window = layout.window_of_event[where] if layout.window_of_event is not None else 0
            until = layout.first_unpack.get(window, trace.forward_events)
            until = min(until, self._first_read.get(s, until))
            first = max(storage.death, storage.birth) + 1
            out.append(float(cumulative[until] - cumulative[first]) * storage.bytes if until > first else 0.0)
        return out

    def cut(self, layout: _Layout, prices: Any, forced: Collection[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Dropped storages, and transients to hold, at prices per byte and event; `forced` storages are kept."""
        cumulative = np.concatenate([[0.0], np.cumsum(prices)])
        side, _ = self._minimum(self._keep_prices(layout, cumulative), forced)
        dropped = {s for s in self.droppable if side[self._recipe_number[self.recipes.recipe_of[s]]]}
        dropped -= set(forced)
        # A recipe that runs anyway rebuilds all it makes, but what is cheaper kept stays kept: dropped only where the cut ran the recipe for it.
        transients = {
            s
            for s in self.nodes
            if s not in self.recipes.saved
            and side[self._number[s]]
            and not side[self._recipe_number[self.recipes.recipe_of[s]]]
        }
        return frozenset(dropped), frozenset(transients)

    def _minimum(
        self, keep: list[float], forced: Collection[int], needed: Collection[int] | None = None
    ) -> tuple[list[bool], float]:
        needed = self.droppable if needed is None else needed
        count = len(self.nodes) + len(self._recipe_list)
        source = [0.0] * count
        sink = [0.0] * len(self.nodes) + self._run_seconds
        arcs: list[tuple[int, int, float]] = []
        for i, s in enumerate(self.nodes):
            if s in forced:
                continue
            if s in needed:
                source[i] = inf
            arcs.append((i, self._recipe_number[self.recipes.recipe_of[s]], keep[i]))
        for r in self._recipe_list:
            for s in self.recipes.recipes[r].inputs:
                if s in self._number and s not in forced:
                    arcs.append((self._recipe_number[r], self._number[s], inf))
        found = minimum_cut(source, sink, arcs)
        return list(found.on_source_side), found.value

    # -- plans ---------------------------------------------------------------------------------------------------------------

    def solution(self, layout: _Layout, dropped: Collection[int], transients: Collection[int]) -> Solution:
        """The plan that drops these storages in this layout, replayed."""
        reruns = reruns_for(self.recipes, dropped, layout.window_of_event, transients)
        self.evaluations += 1
        return Solution(reruns, self.timeline.evaluate(reruns), frozenset(dropped), frozenset(transients), layout.cells)

    def window_sizes(self) -> list[int]:
        """Window sizes worth trying, in cells."""
        count = len(self.cuts)
        sizes = [0]
        size = 1
        while size <= max(1, count // 2) and count:
            sizes.append(size)
            size = size + 1 if size < 4 else (size * 3 + 1) // 2
        return sizes

    def solve(self, budget_bytes: int) -> Solution | None:
        """The fastest plan found that fits; None when none was found."""
        if self.plain.peak <= budget_bytes:
            return self.plain
        best: Solution | None = None
        layouts = [self.layout(size) for size in self.window_sizes()]
        # The tightest plan of each layout tells whether it can fit at all, and how soon it is worth looking at.
        feasible: list[tuple[float, _Layout]] = []
        for layout in layouts:
            tight = self.tightest(layout)
            if tight.peak <= budget_bytes:
                feasible.append((tight.seconds, layout))
                best = _better(best, tight, budget_bytes)
        feasible.sort(key=lambda f: f[0])
        for _, layout in feasible[:4]:
            best = self._by_prices(layout, budget_bytes, best)
        if best is not None:
            best = self.refine(best, budget_bytes)
        if best is not None and len(self.nodes) <= FEW_STORAGES:
            best = self.exchange(best, budget_bytes)
        few = len(self.cuts) <= FEW_CELLS
        if few or best is None or best.seconds > CHAINS_WORTH * self.trace.pass_seconds:
            best = self._by_chains(budget_bytes, best)
        if best is None:
            best = _better(None, self.smallest(), budget_bytes)
        return best

    def _by_chains(self, budget: int, best: Solution | None) -> Solution | None:
        if self._cells is None:
            self._cells = CellChain(self.timeline, self.cuts)
        if self._cells.length < 3:
            return best
        everything = sum(self.trace.storages[s].bytes for s in self.droppable)
        room = everything - (self.plain.peak - budget)
        for reruns in self._cells.schedules(room):
            found = Solution(reruns, self.timeline.evaluate(reruns), self.droppable)
            self.evaluations += 1
            better = _better(best, found, budget)
            if better is found:
                return found  # schedules come in order of time
        return best

    def tightest(self, layout: _Layout) -> Solution:
        """Everything that can be dropped is, but the boundaries of the windows."""
        return self.solution(layout, self.droppable - layout.boundary_storages, ())

    def _by_prices(self, layout: _Layout, budget: int, best: Solution | None) -> Solution | None:
        weights = {self.plain.evaluation.peak_event: 1.0}
        forced = layout.boundary_storages & self.recipes.saved
        scale = self._scale()
        for _ in range(ROUNDS):
            low, high = scale * 1e-4, scale * 1e4
            worst: Solution | None = None
            fitting: Solution | None = None
            for _ in range(BISECTIONS):
                middle = (low * high) ** 0.5
                dropped, transients = self.cut(layout, self._prices(weights, middle), forced)
                found = self.solution(layout, dropped, transients)
                if found.peak <= budget:
                    high, fitting = middle, found
                    best = _better(best, found, budget)
                else:
                    low, worst = middle, found
            if fitting is not None and worst is not None:
                best = _better(best, self._between(layout, fitting, worst, budget), budget)
            if worst is None:
                break
            event = worst.evaluation.peak_event
            # The moment that kept a plan from fitting gets a price of its own; if it has one, more of it.
            weights[event] = weights.get(event, 0.0) + 0.5 * sum(weights.values())
        return best

    def _scale(self) -> float:
        """A price at which holding everything would cost about as much as running everything again."""
        seconds = sum(self._run_seconds)
        size = sum(self.trace.storages[s].bytes for s in self.droppable)
        return seconds / size if size else 1.0

    def _prices(self, weights: dict[int, float], scale: float) -> Any:
        prices = np.zeros(self.timeline.events + 1)
        total = sum(weights.values())
        for event, weight in weights.items():
            prices[event] += scale * weight / total
        return prices

    def _between(self, layout: _Layout, fitting: Solution, larger: Solution, budget: int) -> Solution:
        """Keep, one group after the other, what the larger plan keeps and the fitting one drops, as long as it fits."""
        give_back = fitting.dropped - larger.dropped
        hold = larger.transients - fitting.transients
        current = fitting
        for group in self._groups(give_back | hold):
            dropped = current.dropped - group
            transients = (current.transients | (group & hold)) - (set() if dropped else group)
            candidate = self.solution(layout, dropped, transients)
            if candidate.peak <= budget and candidate.seconds <= current.seconds:
                current = candidate
        return current

    def _groups(self, storages: Iterable[int]) -> list[frozenset[int]]:
        """Storages by cell, the last cells first: what is kept there is released first."""
        window = windows(self.cuts, self.trace.forward_events)
        by_cell: dict[int, set[int]] = {}
        for s in storages:
            by_cell.setdefault(window[self.trace.storages[s].birth], set()).add(s)
        return [frozenset(by_cell[c]) for c in sorted(by_cell, reverse=True)]

    def refine(self, solution: Solution, budget: int, tries: int = 120) -> Solution:
        """Keep single storages where room is left, the most seconds per byte first."""
        layout = self.layout(solution.window)
        current = solution
        table = self.recipes.recipes
        runs = {r for rs in current.reruns.values() for r in rs}

        def worth(s: int) -> float:
            return table[self.recipes.recipe_of[s]].seconds / max(1, self.trace.storages[s].bytes)

        room = budget - current.peak
        candidates = sorted(
            (s for s in self.nodes if self.recipes.recipe_of[s] in runs and s not in current.transients),
            key=worth,
            reverse=True,
        )
        for s in candidates:
            if tries <= 0:
                break
            if worth(s) <= 0:
                break
            size = self.trace.storages[s].bytes
            if size > room and s not in current.dropped and room >= 0 and size > room * 4:
                continue
            tries -= 1
            if s in self.recipes.saved:
                found = self.solution(layout, current.dropped - {s}, current.transients)
            else:
                found = self.solution(layout, current.dropped, current.transients | {s})
            if found.peak <= budget and found.seconds < current.seconds:
                current = found
        return current

    def exchange(self, solution: Solution, budget: int) -> Solution:
        """Try every drop of one more storage together with keeping one or more of the dropped, until nothing gets better."""
        current = solution
        for _ in range(4):
            start = current
            layout = self.layout(current.window)
            for other in sorted(self.droppable - current.dropped, key=lambda s: -self.trace.storages[s].bytes):
                swapped = self.solution(layout, current.dropped | {other}, current.transients)
                if swapped.seconds >= current.seconds + self.trace.pass_seconds:
                    continue
                tried = self.refine(swapped, budget) if swapped.peak <= budget else swapped
                if tried.peak <= budget and tried.seconds < current.seconds:
                    current = tried
            if current is start:
                break
        return current

    # -- the smallest budget -------------------------------------------------------------------------------------------------

    def smallest(self) -> Solution:
        """The plan with the smallest peak found."""
        if self._smallest is None:
            self._smallest = self._find_smallest()
        return self._smallest

    def _find_smallest(self) -> Solution:
        best = self.plain
        for size in self.window_sizes():
            found = self.tightest(self.layout(size))
            if found.peak < best.peak:
                best = found
        if self._cells is None:
            self._cells = CellChain(self.timeline, self.cuts)
        room = sum(self.trace.storages[s].bytes for s in self.droppable) - (self.plain.peak - best.peak)
        while self._cells.length > 2 and room > 0:
            better = best
            for reruns in self._cells.schedules(room):
                found = Solution(reruns, self.timeline.evaluate(reruns), self.droppable)
                if found.peak < better.peak:
                    better = found
            if better is best:
                break
            room -= max(best.peak - better.peak, room // 50)
            best = better
        return best if best.window == 0 and best.reruns and not best.dropped else self._shrink(best)

    def _shrink(self, solution: Solution, tries: int = 160) -> Solution:
        """Drop less where that needs fewer bytes: rebuilding a storage may hold more than the storage itself."""
        current = solution
        for size in self.window_sizes():
            layout = self.layout(size)
            found = self.tightest(layout)
            if found.peak > 2 * current.peak and size != solution.window:
                continue
            for s in sorted(found.dropped, key=lambda s: self.trace.storages[s].bytes):
                if tries <= 0:
                    return current
                tries -= 1
                less = self.solution(layout, found.dropped - {s}, found.transients)
                if less.peak < found.peak:
                    found = less
            if found.peak < current.peak:
                current = found
        return current

    # -- the bound -----------------------------------------------------------------------------------------------------------

    def bound(self, budget_bytes: int) -> float:
        """Extra seconds of one micro-batch that no plan within the budget can avoid."""
        if self.plain.peak <= budget_bytes:
            return 0.0
        overhead = self.trace.dispatch_seconds * self.trace.forward_operations
        levels = self.plain.evaluation.levels
        over = [e for e in range(self.trace.pass_events) if levels[e] > budget_bytes]
        # The highest moment, the ends of forward and the highest moments of stretches of backward.
        stretch = max(1, (self.trace.pass_events - self.trace.forward_events) // 12)
        moments = {self.plain.evaluation.peak_event}
        for start in range(self.trace.forward_events, self.trace.pass_events, stretch):
            inside = [e for e in over if start <= e < start + stretch]
            if inside:
                moments.add(max(inside, key=lambda e: int(levels[e])))
        return max(self._bound_at(moment, budget_bytes) for moment in sorted(moments)) + overhead

    def _bound_at(self, moment: int, budget: int) -> float:
        """Lagrangian bound from one moment.

        Whatever backward reads after the moment must be there at it, or be made again after it from what is there at it. So each storage is charged its
        bytes if it is there, its recipe's seconds if it is not, and the rest is a minimum cut; the best price is found by bisection (the
        dual is concave in it).
        """
        trace = self.trace
        floor = int(self.plain.evaluation.levels[moment])
        chargeable: list[int] = []
        needed: set[int] = set()
        for i, s in enumerate(self.nodes):
            storage = trace.storages[s]
            gone = storage.birth <= moment and storage.death < moment
            reads = self.timeline.unpack_uses.get(s, [])
            held_by_a_read = any(event <= moment <= release for event, release in reads)
            chargeable.append(storage.bytes if gone and not held_by_a_read else 0)
            if s in self.droppable:
                if chargeable[i] and self.timeline.plain_end[s] >= moment:
                    floor -= storage.bytes
                if any(event > moment for event, _ in reads):
                    needed.add(s)
        best = 0.0
        low, high = self._scale() * 1e-3, self._scale() * 1e3

        def dual(price: float) -> float:
            _, value = self._minimum([price * size for size in chargeable], (), needed)
            return value + price * (floor - budget)

        for _ in range(16):
            a, b = low * (high / low) ** 0.4, low * (high / low) ** 0.6
            value_a, value_b = dual(a), dual(b)
            best = max(best, value_a, value_b)
            if value_a > value_b:
                high = b
            else:
                low = a
        return best


def _better(a: Solution | None, b: Solution, budget: int) -> Solution | None:
    if b.peak > budget:
        return a
    if a is None or (b.seconds, b.peak) < (a.seconds, a.peak):
        return b
    return a
