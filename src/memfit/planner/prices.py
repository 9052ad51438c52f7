"""Find the prices of memory at which the step fits, the cheapest plan there, and a lower bound on any plan.

At given prices per byte and moment one minimum cut decides every storage at once: keep it and pay for the moments it is alive, or drop it and pay the
seconds of its recipe, whose inputs then must be there in turn. The prices are raised until the replayed peak fits the budget; moments that turn out to be
the peak get a price of their own. One price makes equal blocks decide alike, so what a cut drops is then trimmed rerun by rerun (`local_search`). Graphs
so small that all plans can be tried are not searched but enumerated. Whatever is found for one budget is remembered for all.

The bound is Lagrangian: for any prices, (cheapest total at these prices) - (price of the budget) is at most the extra seconds of every plan that fits,
because a rebuilt storage is charged only at the moments at which backward reads it, which no plan avoids (`Solver.bound`).

Sources: Lagrangian relaxation as in Held and Karp 1971; rematerialisation as project selection: our own, after the cut formulation in
torch.compile's partitioner (Horace He, 2022), which minimises saved bytes, not the peak, and takes no budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy as np

from memfit.garbage import uncollected
from memfit.planner.chains import CellChain
from memfit.planner.draws import Draws
from memfit.planner.local_search import exchange, shake, shrink, trim
from memfit.planner.mincut import PricedNetwork
from memfit.planner.recipes import Recipes
from memfit.planner.schedule import reruns_for
from memfit.planner.segments import Boundary, boundaries, lasting, windows
from memfit.planner.timeline import Evaluation, Reruns, Timeline

BISECTIONS: Final = 9
ROUNDS: Final = 2
LAYOUTS: Final = 3
GLANCES: Final = 6  # prices at which a layout is looked at before it is taken or left
CLOSE: Final = 0.001  # a plan this part of a pass above the bound is good enough
FEW_STORAGES: Final = 64  # up to here reruns are exchanged one for others
FEW_CELLS: Final = 24
# Nested sweeps are looked at when a plan costs more than this part of a pass,
CHAINS_WORTH: Final = 0.15
# and a budget is above the least that windows can do by less than this part of the way to plain.
NEAR_TIGHTEST: Final = 0.12
TRIM_TRIES: Final = 6000
EXCHANGE_TRIES: Final = 300
SHAKES: Final = 16
# Plans of other kinds are improved too when they are within this part of a pass of the fastest.
OTHER_KINDS: Final = 0.03
FAR: Final = 0.01  # plans this part of a pass above the bound are shaken
MOST_SHAKEN: Final = 1500  # plans of more reruns take too long to trim again and again
SHRINK_TRIES: Final = 1500
SHRUNK_LAYOUTS: Final = 3
MIXINGS: Final = 7
# Nested sweeps save the last percent of the bytes by running everything hundreds of times: no plan costs more than so many passes.
SLOWEST: Final = 10.0
MOST_RUNS: Final = 12000  # plans of more reruns are left as they are
STEP: Final = 0.002  # a smallest plan smaller by less than this part is not worth another round
EVERY_PLAN: Final = 4096  # this many plans are enumerated rather than searched
TANGENTS: Final = 14
DRAWN_ROUNDS: Final = 4  # of planning for less, where other draws take more than the one planned for


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
class Layout:
    """One way to cut forward into windows.

    Attributes:
        cells: in a window; 0 where everything is one window.
        around: lasting storages were left out when the boundaries were looked for.
        cuts: the events after which a window ends.
        boundary_storages: those that cross from one window into others.
        forced: those of them that backward reads; they are kept.
        held: what `Solver._held` says of this layout, once it was asked.
    """

    cells: int
    around: bool
    cuts: tuple[int, ...]
    window_of_event: dict[int, int] | None
    boundary_storages: frozenset[int]
    forced: frozenset[int]
    held: tuple[Any, Any, Any] | None = None

    @property
    def windows(self) -> int:
        """How many there are."""
        return len(self.cuts) + 1

    def window_of(self, events: Any) -> Any:
        """The windows of events of forward, as `segments.windows` counts them."""
        return np.searchsorted(np.array(self.cuts, dtype=np.int64), events)


class Solver:
    """Plans for one trace at any budget; what depends on the trace alone is worked out once."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.recipes: Recipes = timeline.recipes
        self.trace = timeline.trace
        self.draws = Draws(timeline)
        self.droppable = frozenset(self.recipes.saved & self.recipes.rebuildable)
        self.plain = Solution({}, timeline.plain())
        self.cuts: list[Boundary] = boundaries(self.recipes)
        # Where something lasts, boundaries around it are tried as well.
        around = lasting(self.recipes)
        self.cuts_around = boundaries(self.recipes, around) if around else []
        if [b.event for b in self.cuts_around] == [b.event for b in self.cuts]:
            self.cuts_around = []
        self._cells: CellChain | None = None
        self._know_smallest = False
        self._narrow: list[Solution] = []  # what the search for the smallest came to
        overhead = self.trace.dispatch_seconds * self.trace.forward_operations
        self._front = _Front(SLOWEST * (self.trace.pass_seconds + overhead))
        self._front.add(self.plain)
        self._solved: set[int] = set()
        self._floor = int(timeline.floor().max())
        self._bounds: dict[int, float] = {}
        self._tight: list[tuple[Solution, Layout]] = []
        self._cut_at: dict[tuple[tuple[int, ...], tuple[tuple[int, float], ...], float], Solution] = {}
        self._solution_of: dict[tuple[tuple[int, ...], bytes], Solution] = {}
        self._enumerated = False
        self._few = False  # all plans that follow the rule of scheduling are in the front
        trace = self.trace
        first_read: dict[int, int] = {}
        save_event: dict[int, int] = {}
        for save in trace.saves:
            for event, _ in save.unpacks:
                first_read[save.storage] = min(first_read.get(save.storage, event), event)
                save_event[save.storage] = max(save_event.get(save.storage, -1), save.by)
        # (event, operation whose backward asks) of every unpack.
        unpacks = [(event, save.by) for save in trace.saves for event, _ in save.unpacks]
        self._unpacks = np.array(unpacks, dtype=np.int64).reshape(-1, 2)
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
        number = {s: i for i, s in enumerate(nodes)}
        recipes = sorted({self.recipes.recipe_of[s] for s in nodes})
        recipe_number = {r: len(nodes) + i for i, r in enumerate(recipes)}
        recipe_of_node = [recipe_number[self.recipes.recipe_of[s]] for s in nodes]
        self._keep_arcs = list(enumerate(recipe_of_node))
        self._input_arcs = [
            (recipe_number[r], number[s], inf) for r in recipes for s in self.recipes.recipes[r].inputs if s in number
        ]
        dispatch = trace.dispatch_seconds
        self._run_seconds = [
            self.recipes.recipes[r].seconds + dispatch * len(self.recipes.recipes[r].operations) for r in recipes
        ]
        self._networks: dict[frozenset[int], PricedNetwork] = {}
        # The same in columns, a row for each node.
        end = self.timeline.events + 1
        self._node = np.array(nodes, dtype=np.int64)
        self._recipe_of_node = np.array(recipe_of_node, dtype=np.int64)
        self._node_droppable = np.array([s in self.droppable for s in nodes], dtype=bool)
        self._node_saved = np.array([s in self.recipes.saved for s in nodes], dtype=bool)
        self._node_bytes = np.array([trace.storages[s].bytes for s in nodes], dtype=np.int64)
        self._node_birth = np.array([trace.storages[s].birth for s in nodes], dtype=np.int64)
        self._node_death = np.array([trace.storages[s].death for s in nodes], dtype=np.int64)
        self._node_plain_end = np.array([self.timeline.plain_end[s] for s in nodes], dtype=np.int64)
        self._node_first_read = np.array([first_read.get(s, end) for s in nodes], dtype=np.int64)
        # The operation whose window a storage belongs to: the last whose backward reads it, else the one that made it.
        self._node_by = np.array([save_event.get(s, trace.storages[s].birth) for s in nodes], dtype=np.int64)
        reads = [
            (i, event, release) for i, s in enumerate(nodes) for event, release in self.timeline.unpack_uses.get(s, ())
        ]
        self._reads = np.array(reads, dtype=np.int64).reshape(-1, 3)

    # -- the cut -------------------------------------------------------------------------------------------------------------

    def layout(self, cells: int, *, around: bool = False) -> Layout:
        """Windows of `cells` cells each; 0 for one window, in which everything stays once rebuilt.

        Args:
            cells: in a window.
            around: between boundaries that lasting storages may cross, which are held.
        """
        cuts = self.cuts_around if around else self.cuts
        if cells == 0 or not cuts:
            return Layout(0, False, (), None, frozenset(), frozenset())
        chosen = cuts[cells - 1 :: cells]
        crossing = frozenset(s for b in chosen for s in b.storages)
        return Layout(
            cells,
            around,
            tuple(b.event for b in chosen),
            windows(chosen, self.trace.forward_events),
            crossing,
            crossing & self.recipes.saved,
        )

    def layouts(self) -> list[Layout]:
        """All layouts worth trying."""
        out = [self.layout(size) for size in _window_sizes(len(self.cuts))]
        return out + [self.layout(size, around=True) for size in _window_sizes(len(self.cuts_around))[1:]]

    def _keep_prices(self, layout: Layout, cumulative: Any) -> Any:
        """What it costs to hold each storage from when it would die until its window is rebuilt; boundaries are held anyway."""
        if layout.held is None:
            layout.held = self._held(layout)
        first, until, sizes = layout.held
        return np.where(until > first, (cumulative[until] - cumulative[first]) * sizes, 0.0)

    def _begins(self, layout: Layout) -> Any:
        """For each window, the first event at which backward asks for something of it; the start of backward where it asks for nothing."""
        never = self.timeline.events + 1
        events, by = self._unpacks.T
        begins = np.full(layout.windows, never)
        np.minimum.at(begins, layout.window_of(by), events)
        begins[begins == never] = self.trace.forward_events
        return begins

    def _held(self, layout: Layout) -> tuple[Any, Any, Any]:
        """For each storage, from which event until before which it would be held, and its bytes."""
        never = self.timeline.events + 1
        until = np.minimum(self._begins(layout)[layout.window_of(self._node_by)], self._node_first_read)
        first = np.minimum(np.maximum(self._node_death, self._node_birth) + 1, never)
        return first, until, np.where(np.isin(self._node, sorted(layout.forced)), 0, self._node_bytes)

    def cut(self, layout: Layout, prices: Any) -> Solution:
        """The plan of the cheapest cut at prices per byte and event; the boundaries of a layout are kept."""
        cumulative = np.concatenate([[0.0], np.cumsum(prices)])
        sides, _ = self._network(self.droppable).cut(self._keep_prices(layout, cumulative))
        again = sides[self._recipe_of_node]
        dropped = self._node_droppable & again
        # A recipe that runs anyway rebuilds all it makes, but what is cheaper kept stays kept: dropped only where the cut ran the recipe for it.
        held = ~self._node_saved & sides[: len(self.nodes)] & ~again
        # Neighbouring prices often give one cut.
        key = layout.cuts, np.packbits([dropped, held]).tobytes()
        if key not in self._solution_of:
            self._solution_of[key] = self.solution(
                layout, set(self._node[dropped].tolist()) - layout.forced, self._node[held].tolist()
            )
        return self._solution_of[key]

    def _network(self, needed: frozenset[int]) -> PricedNetwork:
        """Nodes are the storages, then their recipes; backward reads the needed storages."""
        if needed not in self._networks:
            source = [inf if s in needed else 0.0 for s in self.nodes] + [0.0] * len(self._run_seconds)
            sink = [0.0] * len(self.nodes) + self._run_seconds
            self._networks[needed] = PricedNetwork(source, sink, self._input_arcs, self._keep_arcs)
        return self._networks[needed]

    # -- plans ---------------------------------------------------------------------------------------------------------------

    def solution(self, layout: Layout, dropped: Collection[int], transients: Collection[int]) -> Solution:
        """The plan that drops these storages in this layout, replayed."""
        reruns = reruns_for(self.recipes, dropped, layout.window_of_event, transients)
        return Solution(reruns, self.timeline.evaluate(reruns), frozenset(dropped), frozenset(transients), layout.cells)

    def needed(self, solution: Solution) -> int:
        """Bytes that a plan is to be given: its peak, and room for other draws where random numbers decide sizes."""
        return self.draws.needed(solution.reruns) if self.trace.drawn_bytes else solution.peak

    def fitting(self, budget_bytes: int) -> Solution | None:
        """`solve`, with what a plan needs, not only its peak under the first draw, inside the budget."""
        if not self.trace.drawn_bytes:
            return self.solve(budget_bytes)
        target = budget_bytes
        for _ in range(DRAWN_ROUNDS):
            found = self.solve(target)
            over = 0 if found is None else self.needed(found) - budget_bytes
            if over <= 0:
                break
            target -= over
        self.smallest()
        known = sorted(self._front, key=lambda plan: plan.seconds)
        return next((plan for plan in known if self.needed(plan) <= budget_bytes), None)

    def worst(self, solution: Solution) -> tuple[Timeline, Evaluation]:
        """The draw under which a plan takes most, and what it comes to there."""
        if not self.trace.drawn_bytes:
            return self.timeline, solution.evaluation
        timeline = self.draws.largest(solution.reruns)
        return timeline, timeline.evaluate(solution.reruns)

    def least(self) -> Solution:
        """`smallest`, by what plans need."""
        smallest = self.smallest()
        return min(self._front, key=self.needed) if self.trace.drawn_bytes else smallest

    @uncollected()
    def solve(self, budget_bytes: int) -> Solution | None:
        """The fastest plan found that fits; None when none was found.

        What was found before for other budgets is remembered: a plan is never slower than one found for less.
        """
        if self.plain.peak <= budget_bytes:
            return self.plain
        if self._know_smallest and budget_bytes < self._front.smallest().peak:
            return None
        if budget_bytes not in self._solved:
            self._solved.add(budget_bytes)
            self._search(budget_bytes)
        return self._front.best(budget_bytes)

    def _search(self, budget: int) -> None:
        if budget < self._floor:
            self.smallest()  # what no plan fits into is not searched
            return
        self._enumerate()
        target = self.bound(budget) + CLOSE * self.trace.pass_seconds
        if self._few:
            self._by_chains(budget)
            self._improve(budget, [])
            return
        if self._good(budget, target):
            return
        # A few prices tell which layouts suit this budget; those are looked at closely.
        promising: list[tuple[float, int, Layout]] = []
        plain = {self.plain.evaluation.peak_event: 1.0}
        for tight, layout in self._tightest():
            if tight.peak <= budget:
                fitting, worst = self._bisect(layout, plain, budget, GLANCES)
                promising.append((_between(fitting or tight, worst, budget), layout.cells, layout))
        promising.sort(key=lambda p: p[:2])
        starts: list[Solution] = []  # the fastest of each kind
        for around in (False, True):
            kind: list[Solution] = []
            for _, _, layout in [p for p in promising if p[2].around is around][:LAYOUTS]:
                kind += self._by_prices(layout, budget)
                if self._good(budget, target):
                    return
            starts += sorted(kind, key=lambda s: s.seconds)[:1]
        if self._dear(budget) or len(self.cuts) <= FEW_CELLS:
            starts += self._by_chains(budget)
        if self._dear(budget) and self._worth_shaking(self._front.best(budget), budget):
            self.smallest()
            best = self._front.best(budget)
            narrow = sorted((s for s in self._narrow if s.peak <= budget), key=lambda s: s.seconds)[:1]
            starts += [self._trimmed(s, budget) for s in ([best, *narrow] if best is not None else narrow)]
        self._improve(budget, starts)

    def _dear(self, budget: int) -> bool:
        """Whether windows serve a budget badly: none fits, or they come near to the least they can do and cost much."""
        best = self._front.best(budget)
        tightest = min(tight.peak for tight, layout in self._tightest() if not layout.around)
        near = budget < tightest + NEAR_TIGHTEST * (self.plain.peak - tightest)
        return best is None or (near and best.seconds > CHAINS_WORTH * self.trace.pass_seconds)

    def _worth_shaking(self, solution: Solution | None, budget: int) -> bool:
        """Whether a plan is far from the bound, and not so long that searching around it would take too long."""
        return solution is None or (
            solution.seconds > self.bound(budget) + FAR * self.trace.pass_seconds and _runs(solution) <= MOST_SHAKEN
        )

    def _good(self, budget: int, target: float) -> bool:
        best = self._front.best(budget)
        return best is not None and best.seconds <= target

    def _improve(self, budget: int, starts: Sequence[Solution]) -> None:
        """Local search from the fastest plan, and from the fastest of other kinds that come near it: greedy steps end where they begin."""
        best = self._front.best(budget)
        if best is None:
            return
        near = best.seconds + OTHER_KINDS * self.trace.pass_seconds
        for start in {s.seconds: s for s in (*starts, best) if s.seconds <= near}.values():
            trimmed = self._trimmed(start, budget)
            if len(self.nodes) <= FEW_STORAGES:
                self._keep(exchange(self.timeline, trimmed.reruns, budget, EXCHANGE_TRIES))
            elif self._worth_shaking(trimmed, budget):
                self._keep(shake(self.timeline, trimmed.reruns, budget, SHAKES))

    def _trimmed(self, solution: Solution, budget: int) -> Solution:
        if _runs(solution) > MOST_RUNS:
            return solution
        return self._keep(trim(self.timeline, solution.reruns, budget, TRIM_TRIES // _repeats(solution)))

    def _keep(self, reruns: Reruns) -> Solution:
        """Replay a plan, and remember it."""
        evaluation = self.timeline.evaluate(reruns)
        again = {s for runs in reruns.values() for r in runs for s in self.recipes.recipes[r].makes}
        found = Solution(reruns, evaluation, self.droppable & again)
        self._front.add(found)
        return found

    def _tightest(self) -> list[tuple[Solution, Layout]]:
        if not self._tight:
            for layout in self.layouts():
                self._tight.append((self.tightest(layout), layout))
        return self._tight

    def _enumerate(self) -> None:
        """On small graphs, every plan that follows the rule of scheduling, once."""
        if self._enumerated:
            return
        self._enumerated = True
        layouts = self.layouts()
        seen: set[tuple[tuple[int, ...], ...]] = set()
        self._few = self._enumerate_in([layout for layout in layouts if not layout.around], seen)
        if self._few:
            self._enumerate_in([layout for layout in layouts if layout.around], seen)

    def _enumerate_in(self, layouts: Sequence[Layout], seen: set[tuple[tuple[int, ...], ...]]) -> bool:
        """Every plan in these layouts that is not among those seen; False where they are too many."""
        droppable = sorted(self.droppable)
        transients = [s for s in self.nodes if s not in self.recipes.saved]
        if len(layouts) << (len(droppable) + len(transients)) > EVERY_PLAN:
            transients = []
        if len(layouts) << len(droppable) > EVERY_PLAN:
            return False
        for layout in layouts:
            for number in range(1 << (len(droppable) + len(transients))):
                chosen = {s for i, s in enumerate(droppable + transients) if number >> i & 1}
                dropped, held = chosen & self.droppable, chosen - self.droppable
                reruns = reruns_for(self.recipes, dropped, layout.window_of_event, held)
                key = tuple((e, *runs) for e, runs in sorted(reruns.items()))
                if key not in seen:
                    seen.add(key)
                    self._front.add(
                        Solution(
                            reruns, self.timeline.evaluate(reruns), frozenset(dropped), frozenset(held), layout.cells
                        )
                    )
        return True

    def _by_chains(self, budget: int) -> list[Solution]:
        """The fastest of the nested sweeps that fit, trimmed; none where nothing fits."""
        if self._chain.length < 3:
            return []
        schedules = self._chain.schedules(budget, lambda plan: self.timeline.peak(plan) <= budget)
        fitting = [found for found in map(self._keep, schedules) if found.peak <= budget]
        return [self._trimmed(min(fitting, key=lambda s: (s.seconds, s.peak)), budget)] if fitting else []

    @property
    def _chain(self) -> CellChain:
        if self._cells is None:
            self._cells = CellChain(self.timeline, self.cuts)
        return self._cells

    def tightest(self, layout: Layout) -> Solution:
        """Everything that can be dropped is, but the boundaries of the windows."""
        found = self.solution(layout, self.droppable - layout.boundary_storages, ())
        self._front.add(found)
        return found

    def _by_prices(self, layout: Layout, budget: int) -> list[Solution]:
        """Bisect the price, then price the moments that stay too full. Returns the plans found, trimmed."""
        weights = {self.plain.evaluation.peak_event: 1.0}
        before: Solution | None = None
        found: list[Solution] = []
        for _ in range(ROUNDS):
            fitting, worst = self._bisect(layout, weights, budget, BISECTIONS)
            if fitting is not None:
                if fitting is before:
                    break
                before = fitting
                if worst is not None and _runs(fitting) > MOST_SHAKEN:
                    fitting = self._mixed(layout, fitting, worst, budget)
                found.append(self._trimmed(fitting, budget))
                if found[-1].seconds >= min((f.seconds for f in found[:-1]), default=inf):
                    break
            if worst is None:
                break
            event = worst.evaluation.peak_event
            # The moment that kept a plan from fitting gets a price of its own; if it has one, more of it.
            weights[event] = weights.get(event, 0.0) + 0.5 * sum(weights.values())
        return found

    def _mixed(self, layout: Layout, fitting: Solution, larger: Solution, budget: int) -> Solution:
        """Of a plan that fits and a larger one: the first's decisions in the first part of forward, the other's in the rest.

        Where many blocks are alike one price decides alike about all of them; so a long plan is brought near the budget at once, and trimming has less to do.
        """
        low, high, best = 0, len(self.nodes), fitting
        for _ in range(MIXINGS):
            middle = (low + high) // 2
            head, rest = set(self.nodes[:middle]), set(self.nodes[middle:])
            found = self.solution(
                layout,
                (fitting.dropped & head) | (larger.dropped & rest),
                (fitting.transients & head) | (larger.transients & rest),
            )
            if found.peak <= budget:
                high, best = middle, found
                self._front.add(found)
            else:
                low = middle
        return best

    def _bisect(
        self, layout: Layout, weights: dict[int, float], budget: int, steps: int
    ) -> tuple[Solution | None, Solution | None]:
        """The plans at the lowest price at which they fit and at the highest at which they do not, after so many steps."""
        low, high = self._scale() * 1e-4, self._scale() * 1e4
        worst: Solution | None = None
        fitting: Solution | None = None
        for _ in range(steps):
            middle = (low * high) ** 0.5
            found = self._at_price(layout, weights, middle)
            if found.peak <= budget:
                high, fitting = middle, found
            else:
                low, worst = middle, found
        return fitting, worst

    def _at_price(self, layout: Layout, weights: dict[int, float], price: float) -> Solution:
        """The plan of a cut. Budgets share their first cuts, so each is made once."""
        key = (layout.cuts, tuple(sorted(weights.items())), price)
        found = self._cut_at.get(key)
        if found is None:
            found = self._cut_at[key] = self.cut(layout, self._prices(weights, price))
            self._front.add(found)
        return found

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

    # -- the smallest budget -------------------------------------------------------------------------------------------------

    @uncollected()
    def smallest(self) -> Solution:
        """The plan with the smallest peak found."""
        if not self._know_smallest:
            self._know_smallest = True
            self._find_smallest()
        return self._front.smallest()

    def _find_smallest(self) -> None:
        if not self.droppable:
            return  # plain is all there is (a streamed step is one)
        self._enumerate()
        starts: list[Solution] = []  # the smallest of each kind
        if not self._few:
            for around in (False, True):
                tightest = [tight for tight, layout in self._tightest() if layout.around is around]
                shrunk = [self._shrunk(tight) for tight in sorted(tightest, key=lambda t: t.peak)[:SHRUNK_LAYOUTS]]
                starts += sorted(shrunk, key=lambda s: s.peak)[:1]
        starts += self._smallest_by_chains()
        for start in {id(s): s for s in (*starts, self._front.smallest())}.values():
            self._shrunk(start)
        best = self._front.smallest()
        self._trimmed(best, best.peak)

    def _shrunk(self, solution: Solution) -> Solution:
        if _runs(solution) > MOST_RUNS:
            return solution
        self._narrow.append(self._keep(shrink(self.timeline, solution.reruns, SHRINK_TRIES // _repeats(solution))))
        return self._narrow[-1]

    def _smallest_by_chains(self) -> list[Solution]:
        """The smallest plan of nested sweeps; none where there is nothing to nest."""
        if self._chain.length < 3:
            return []
        known, best = self._front.smallest().peak, None
        while True:
            found = [self._keep(reruns) for reruns in self._chain.smallest_schedules(known)]
            found = [s for s in found if s.seconds <= self._front.slowest_seconds]
            best = min([best, *found] if best is not None else found, key=lambda s: s.peak, default=None)
            if best is None or known - best.peak <= STEP * known:
                return [best] if best is not None else []
            known = best.peak

    # -- the bound -----------------------------------------------------------------------------------------------------------

    @uncollected()
    def bound(self, budget_bytes: int) -> float:
        """Extra seconds of one micro-batch that no plan within the budget can avoid."""
        if self.plain.peak <= budget_bytes:
            return 0.0
        if budget_bytes not in self._bounds:
            overhead = self.trace.dispatch_seconds * self.trace.forward_operations
            levels = self.plain.evaluation.levels
            best = 0.0
            # The fullest moments first: what they demand, the others seldom top.
            for moment in sorted(self._moments(budget_bytes), key=lambda e: (-int(levels[e]), e)):
                best = self._bound_at(moment, budget_bytes, best)
            self._bounds[budget_bytes] = best + overhead
        bound, known = self._bounds[budget_bytes], self._front.best(budget_bytes)
        # Where plan and bound meet, they are sums of the same numbers in another order.
        return known.seconds if known is not None and known.seconds < bound <= known.seconds * (1 + 1e-9) else bound

    def _moments(self, budget: int) -> set[int]:
        """The highest moment, and the highest of stretches of backward."""
        levels = self.plain.evaluation.levels
        first, end = self.trace.forward_events, self.trace.pass_events
        stretch = max(1, (end - first) // 12)
        moments = {self.plain.evaluation.peak_event}
        for start in range(first, end, stretch):
            event = start + int(np.argmax(levels[start : min(start + stretch, end)]))
            if levels[event] > budget:
                moments.add(event)
        return moments

    def _bound_at(self, moment: int, budget: int, known: float) -> float:
        """Lagrangian bound from one moment; `known` where that is larger.

        Whatever backward reads after the moment must be there at it, or be made again after it from what is there at it. So each storage is charged its
        bytes if it is there, its recipe's seconds if it is not, and the rest is a minimum cut. The dual is concave in the price and every cut
        is a tangent to it, so the next price is where the two nearest tangents meet (Kelley 1960 in one dimension).
        """
        floor = int(self.plain.evaluation.levels[moment])
        nodes, events, releases = self._reads.T
        held_by_a_read = np.zeros(len(self.nodes), dtype=bool)
        held_by_a_read[nodes[(events <= moment) & (moment <= releases)]] = True
        gone = (self._node_birth <= moment) & (self._node_death < moment)
        chargeable = np.where(gone & ~held_by_a_read, self._node_bytes, 0)
        floor -= int(chargeable[self._node_droppable & (self._node_plain_end >= moment)].sum())
        needed = np.zeros(len(self.nodes), dtype=bool)
        needed[nodes[events > moment]] = True
        network = self._network(frozenset(self._node[needed & self._node_droppable].tolist()))

        def tangent(price: float) -> tuple[float, float]:
            """The dual at a price, and its slope there."""
            sides, value = network.cut(price * chargeable)
            held = int(chargeable[sides[: len(self.nodes)] & ~sides[self._recipe_of_node]].sum())
            return value + price * (floor - budget), held + floor - budget

        return best_dual(tangent, self._scale() * 1e3, known)


def best_dual(tangent: Callable[[float], tuple[float, float]], high: float, known: float) -> float:
    """The largest value of a concave dual between the prices 0 and `high`, and at least `known`.

    Args:
        tangent: the dual at a price, and its slope there.
        high: the highest price.
        known: what is known from elsewhere.
    """
    best = known
    low = 0.0
    low_value, low_slope = tangent(low)
    if low_slope <= 0:
        return best
    high_value, high_slope = tangent(high)
    best = max(best, high_value)
    for _ in range(TANGENTS):
        if high_slope >= 0:
            break
        price = (high_value - low_value + low_slope * low - high_slope * high) / (low_slope - high_slope)
        ceiling = low_value + low_slope * (price - low)
        if not low < price < high or ceiling <= best * 1.0005:
            break
        value, slope = tangent(price)
        best = max(best, value)
        if slope > 0:
            low, low_value, low_slope = price, value, slope
        else:
            high, high_value, high_slope = price, value, slope
    return best


class _Front:
    """Plans found so far that no other beats in both bytes and seconds, by peak; none slower than `slowest_seconds`."""

    def __init__(self, slowest_seconds: float) -> None:
        self.slowest_seconds = slowest_seconds
        self._plans: list[Solution] = []
        self._peaks: list[int] = []

    def __iter__(self) -> Iterator[Solution]:
        return iter(self._plans)

    def best(self, budget: int) -> Solution | None:
        """The fastest that fits."""
        i = bisect_right(self._peaks, budget)
        return self._plans[i - 1] if i else None

    def smallest(self) -> Solution:
        """The one with the smallest peak."""
        return self._plans[0]

    def add(self, plan: Solution) -> None:
        """Remember a plan, unless a known one is as good or nobody would wait for it."""
        if plan.seconds > self.slowest_seconds:
            return
        i = bisect_right(self._peaks, plan.peak)
        if i and self._plans[i - 1].seconds <= plan.seconds:
            return
        if i and self._peaks[i - 1] == plan.peak:
            i -= 1
        j = i
        while j < len(self._plans) and self._plans[j].seconds >= plan.seconds:
            j += 1
        self._plans[i:j] = [plan]
        self._peaks[i:j] = [plan.peak]


def _between(fitting: Solution, larger: Solution | None, budget: int) -> float:
    """Seconds at a budget between two plans, as if all between them could be had."""
    if larger is None:
        return fitting.seconds
    return fitting.seconds + (larger.seconds - fitting.seconds) * (budget - fitting.peak) / (larger.peak - fitting.peak)


def _repeats(solution: Solution) -> int:
    """How often recipes run again, about: a try takes the longer the more copies there are."""
    return max(1, _runs(solution) // max(1, len({r for runs in solution.reruns.values() for r in runs})))


def _runs(solution: Solution) -> int:
    return sum(map(len, solution.reruns.values()))


def _window_sizes(count: int) -> list[int]:
    """Window sizes worth trying, in cells, where there are so many boundaries; 0 stands for all."""
    sizes = [0]
    size = 1
    while size <= max(1, count // 2) and count:
        sizes.append(size)
        size = size + 1 if size < 4 else (size * 3 + 1) // 2
    return sizes
