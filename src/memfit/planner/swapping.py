"""Plans that may swap: the third thing to do with a storage, beside keeping it and recomputing it.

The cut of `prices` gets one number more: a storage that is not recomputed costs the cheaper of being kept and of being swapped, and swapping costs what of
its copies is not hidden: seconds on the link times a *price of the link*. A link that nobody waits for is free, one that everybody waits for costs a
second a second; where a plan lies between the two is not known before it is replayed, so a few prices of the link are tried with every price of memory, and
the replay, which walks through the link's queues (`Timeline.copying`), says what each plan takes. While a copy is on its way it still takes memory, which
is charged at the moments' prices as if it were kept.

A swapped storage needs nothing to come back, neither inputs nor an operation that may run twice. So what no recipe can make again (large custom operations,
results of random ones without a generator's state) can go as well, and a boundary that is reloaded gives the window behind it to recomputing for nothing.

Where there are several tiers, the cut first sees the link to the nearest one. What is wanted there and has no room is cut once more at the seconds of
the next link: it may go there, or be kept or recomputed after all. Nearest lies what backward reads soonest; what it reads last has the longest time to
come back.

Whatever is found without a link is in the front too, and so is what is found without the last tier: neither swapping allowed nor a tier more makes a plan
slower.

Sources: vDNN (Rhu et al. 2016) for swapping activations behind computing; Capuchin (Peng et al. 2020) and POFO (Beaumont et al. 2021) weigh it against
recomputing, storage by storage in order of gain, and on chains. The cut is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

import numpy as np

from memfit.garbage import uncollected
from memfit.planner.mincut import PricedNetwork
from memfit.planner.prices import BISECTIONS, CLOSE, GLANCES, Layout, Solution, Solver, best_dual
from memfit.planner.recipes import LAGS, Recipes
from memfit.planner.schedule import reruns_for
from memfit.planner.timeline import Reruns, Timeline
from memfit.units import format_bytes

# Prices of the link, from always waited for to never waited for. What a second of it is worth lies between what products and what cheap operations
# take to run again, byte for byte, and layers that are alike change their mind together: hence steps of two.
LINK_PRICES: Final = (1.0, 0.5, 0.25, 0.12, 0.06, 0.02)
CLOSELY: Final = 2  # layouts that are looked at at all prices
EVERY_PLAN: Final = 729  # this many divisions into kept, recomputed and swapped are enumerated
BOUND_PRICES: Final = (0.0, 0.4, 0.8)


def why_nothing_swaps(recipes: Recipes) -> str | None:
    """Why no storage of a step can go to the lower tiers that its recipes know; None where one can."""
    link = recipes.lower_tier
    assert link is not None, "it is asked where there is one"
    rooms = [tier.room_bytes for tier in recipes.tiers]
    by_value = next((op.name for op in recipes.trace.operations if op.by_values), None)
    if by_value is None and recipes.trace.sized_by_values:
        by_value = "what follows random numbers"
    if by_value is not None:
        return f"results of {by_value} are as large as values decide, and places on the tier below are of fixed sizes"
    if not recipes.reloads_of:
        return f"nothing that backward reads takes {format_bytes(link.least_bytes)}, and less is not worth a copy"
    smallest = min(map(recipes.place_bytes, recipes.reloads_of))
    if all(room is not None and smallest > room for room in rooms):
        largest = max(room for room in rooms if room is not None)
        return f"the tensors worth it take {format_bytes(smallest)} or more each, and there is room for {format_bytes(largest)}"
    return None


class SwapSolver(Solver):
    """Plans for one trace at any budget, with lower tiers to swap to.

    Args:
        timeline: whose recipes know a lower tier, or several.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        recipes, trace = timeline.recipes, timeline.trace
        self._without = self._with_a_tier_less()
        self._lag = len(LAGS) // 2
        self._floor = int(timeline.floor_with_swap().max())
        swappable = recipes.reloads_of.keys()
        movable = recipes.rebuildable | swappable
        nodes: set[int] = set()
        stack = list(recipes.saved & movable)
        while stack:
            s = stack.pop()
            if s not in nodes:
                nodes.add(s)
                if s in recipes.rebuildable:
                    stack += [i for i in recipes.recipes[recipes.recipe_of[s]].inputs if i in movable]
        self._movable = sorted(nodes)
        number = {s: i for i, s in enumerate(self._movable)}
        used = sorted({recipes.recipe_of[s] for s in self._movable})
        run = {r: len(number) + i for i, r in enumerate(used)}
        runnable = [recipes.recipes[r].runnable for r in used]
        self._again_seconds = np.array(
            [timeline.run_seconds(r) if may else inf for r, may in zip(used, runnable, strict=True)]
        )
        self._arcs = [
            (run[r], number[s], inf)
            for r, may in zip(used, runnable, strict=True)
            if may
            for s in recipes.recipes[r].inputs
            if s in number
        ]
        self._run_of = np.array([run[recipes.recipe_of[s]] for s in self._movable], dtype=np.int64)
        self._swap_networks: dict[tuple[frozenset[int], float], PricedNetwork] = {}
        self._spans: dict[tuple[tuple[int, ...], int, int], Any] = {}
        self._decided: dict[tuple[object, ...], Solution] = {}
        # A row for each node.
        storages = [trace.storages[s] for s in self._movable]
        ways = [[self._ways(s, tier) for s in self._movable] for tier in range(len(recipes.tiers))]
        self._size = np.array([st.bytes for st in storages], dtype=np.int64)
        self._place = np.array([recipes.place_bytes(s) for s in self._movable], dtype=np.int64)
        self._is_saved = np.array([s in recipes.saved for s in self._movable], dtype=bool)
        self._may_rerun = np.array([s in recipes.rebuildable for s in self._movable], dtype=bool)
        self._may_swap = np.array([bool(w) for w in ways[0]], dtype=bool)
        self._birth = np.array([st.birth for st in storages], dtype=np.int64)
        self._death = np.array([st.death for st in storages], dtype=np.int64)
        # A row for each tier: what a copy down and up takes on its link, infinitely long where there is none.
        self._copy_seconds = np.array([[timeline.link_seconds(w[0]) if w else inf for w in row] for row in ways])
        self._up_seconds = np.array([[recipes.reloads[w[0]].in_seconds if w else inf for w in row] for row in ways])
        end = timeline.events + 1
        reads = [timeline.unpack_uses.get(s, ()) for s in self._movable]
        self._first = np.array([min((e for e, _ in uses), default=end) for uses in reads], dtype=np.int64)
        by = {save.storage: -1 for save in trace.saves}
        for save in trace.saves:
            by[save.storage] = max(by[save.storage], save.by) if save.unpacks else by[save.storage]
        self._asks = np.array(
            [by[s] if by.get(s, -1) >= 0 else trace.storages[s].birth for s in self._movable], dtype=np.int64
        )

    def _with_a_tier_less(self) -> Solver:
        """Of the same step, with the last tier taken away; what it finds are plans here, too, as recipes have the same numbers."""
        link = self.recipes.lower_tier
        fewer = Timeline(self.trace, Recipes(self.trace, link.shortened if link is not None else None))
        return (SwapSolver if fewer.recipes.reloads else Solver)(fewer)

    def _ways(self, storage: int, tier: int) -> tuple[int, ...]:
        """The reloads of a storage from a tier, one for each lag; none where it does not go there."""
        return self.recipes.reloads_of.get(storage, ())[tier * len(LAGS) : (tier + 1) * len(LAGS)]

    # -- the cut -------------------------------------------------------------------------------------------------------------

    def _cut_network(self, needed: frozenset[int], again: float) -> PricedNetwork:
        """Nodes are the storages, then their recipes, whose seconds count `again` times; backward reads the needed storages."""
        if (needed, again) not in self._swap_networks:
            source = [inf if s in needed else 0.0 for s in self._movable] + [0.0] * len(self._again_seconds)
            seconds = np.where(np.isinf(self._again_seconds), inf, 0.0)
            finite = np.isfinite(self._again_seconds)
            seconds[finite] = self._again_seconds[finite] * again
            sink = [0.0] * len(self._movable) + seconds.tolist()
            self._swap_networks[needed, again] = PricedNetwork(
                source, sink, self._arcs, list(enumerate(self._run_of.tolist()))
            )
        return self._swap_networks[needed, again]

    def _span(self, layout: Layout, lag: int, tier: int) -> tuple[Any, Any, Any, Any]:
        """Of each node: from which event, until before which one it would be held; by when it is gone, and from when it is back, when it is swapped there."""
        key = layout.cuts, lag, tier
        if key not in self._spans:
            never = self.timeline.events + 1
            until = np.minimum(self._begins(layout)[layout.window_of(self._asks)], self._first)
            first = np.minimum(np.maximum(self._death, self._birth) + 1, never)
            gone, back = first.copy(), until.copy()
            for i, s in enumerate(self._movable):
                if ways := self._ways(s, tier):
                    reload = ways[lag]
                    gone[i] = self.recipes.reloads[reload].gone_by + 1
                    back[i] = self.recipes.begin(reload, int(min(until[i], self.trace.pass_events)))
            self._spans[key] = first, until, np.maximum(gone, first), np.minimum(back, until)
        found: tuple[Any, Any, Any, Any] = self._spans[key]
        return found

    def decide(self, layout: Layout, prices: Any, link_price: float, lag: int, *, keeps_up: bool = False) -> Solution:
        """The plan of the cheapest cut at prices per byte and event and per second of the link.

        Layers that are alike want the same at the same prices: to swap, all of them, more than the link can carry, or none. Where it is to keep up, what it
        cannot carry in time is cut once more, with the next tier's link, or without one.
        """
        tiers = len(self.recipes.tiers)
        spans = [self._span(layout, lag, tier) for tier in range(tiers)]
        first, until, _, _ = spans[0]
        cumulative = np.concatenate([[0.0], np.cumsum(prices)])
        keep = np.where(until > first, (cumulative[until] - cumulative[first]) * self._size, 0.0)
        swaps = np.full((tiers + 1, len(self._movable)), inf)  # the last row: to no tier
        for tier, (_, _, gone, back) in enumerate(spans):
            on_its_way = (cumulative[gone] - cumulative[first] + cumulative[until] - cumulative[back]) * self._size
            copied = np.isfinite(self._copy_seconds[tier])
            swaps[tier] = np.where(
                copied & (back > gone), link_price * np.where(copied, self._copy_seconds[tier], 0.0) + on_its_way, inf
            )
        place = np.zeros(len(self._movable), dtype=np.int64)  # the tier that each is cut for
        forced = np.isin(self._movable, sorted(layout.forced))
        saved = frozenset(s for s, is_saved in zip(self._movable, self._is_saved, strict=True) if is_saved)
        network = self._cut_network(saved, 1.0)
        count = len(self._movable)
        for left in range(tiers, -1, -1):
            swap = swaps[place, np.arange(count)]
            sides, _ = network.cut(np.where(forced, 0.0, np.minimum(keep, swap)))
            again = sides[self._run_of] & self._may_rerun & ~forced
            there = (sides[:count] & ~sides[self._run_of]) | forced
            wanted = there & (swap < keep)
            swapped = np.zeros(count, dtype=bool)
            late = np.zeros(count, dtype=bool)
            for tier, (_, _, _, back) in enumerate(spans):
                here = self._with_room(wanted & (place == tier), keep - swap, tier)
                swapped |= here
                if keeps_up:
                    late |= here & ~self._in_time(here, lag, tier, back, until)
            further = (wanted & ~swapped & (place < tiers - 1)) | late
            if left == 0 or not further.any():
                break
            place = np.where(swapped & ~late, place, np.minimum(place + 1, tiers))
        dropped = self._is_saved & again
        return self._planned(layout, lag, dropped, ~self._is_saved & there & ~swapped & ~forced, swapped, place)

    def _in_time(self, wanted: Any, lag: int, tier: int, back: Any, until: Any) -> Any:
        """Of the storages to swap to a tier, those that its link can carry down before they are to be gone, and up again before they are read."""
        clock, reloads = self.recipes.clock, self.recipes.reloads
        carried = np.zeros(len(wanted), dtype=bool)
        copies = [(reloads[self._ways(self._movable[i], tier)[lag]], i) for i in np.flatnonzero(wanted).tolist()]
        free = 0.0
        for reload, i in sorted(copies, key=lambda copy: (copy[0].ready, copy[1])):
            done = max(free, clock[reload.ready + 1]) + reload.out_seconds
            if done <= clock[reload.gone_by + 1]:
                free, carried[i] = done, True
        free = 0.0
        for reload, i in sorted(copies, key=lambda copy: (back[copy[1]], copy[1])):
            if carried[i]:
                done = max(free, clock[back[i]]) + reload.in_seconds
                carried[i] = done <= clock[min(until[i], len(clock) - 1)]
                free = done if carried[i] else free
        return carried

    def _with_room(self, wanted: Any, gain: Any, tier: int) -> Any:
        """Of the storages to swap to a tier, those that have room there together: on the last tier what gains most for its bytes, else what is read soonest."""
        link = self.recipes.tiers[tier]
        if link.room_bytes is None:
            return wanted
        chosen = np.flatnonzero(wanted)
        last = link.below is None
        order = chosen[
            np.argsort(
                -(gain[chosen] / np.maximum(self._place[chosen], 1)) if last else self._first[chosen], kind="stable"
            )
        ]
        out = np.zeros(len(wanted), dtype=bool)
        out[order[np.cumsum(self._place[order]) <= link.room_bytes]] = True
        return out

    def _spread(self, wanted: Any, gain: Any) -> tuple[Any, Any]:
        """Of the storages to swap, those that have room on some tier, and the tier of each."""
        swapped = np.zeros(len(wanted), dtype=bool)
        place = np.zeros(len(wanted), dtype=np.int64)
        for tier in range(len(self.recipes.tiers)):
            here = self._with_room(wanted & ~swapped & np.isfinite(self._copy_seconds[tier]), gain, tier)
            swapped |= here
            place[here] = tier
        return swapped, place

    def _planned(self, layout: Layout, lag: int, dropped: Any, held: Any, swapped: Any, place: Any) -> Solution:
        place = np.where(swapped, place, 0)
        key = layout.cuts, lag, np.packbits([dropped, held, swapped]).tobytes(), place.tobytes()
        if key not in self._decided:
            named = np.array(self._movable, dtype=np.int64)
            reruns = reruns_for(
                self.recipes,
                named[dropped].tolist(),
                layout.window_of_event,
                named[held].tolist(),
                swapped={
                    s: self._ways(s, tier)[lag]
                    for s, tier in zip(named[swapped].tolist(), place[swapped].tolist(), strict=True)
                },
            )
            self._decided[key] = self._keep(reruns)
        return self._decided[key]

    def _keep(self, reruns: Reruns) -> Solution:
        found = Solution(
            reruns,
            self.timeline.evaluate(reruns),
            self.droppable & {s for runs in reruns.values() for r in runs for s in self.recipes.recipes[r].makes},
        )
        if self.timeline.has_room(reruns):
            self._front.add(found)
        return found

    # -- plans ---------------------------------------------------------------------------------------------------------------

    def _search(self, budget: int) -> None:
        self._without.solve(budget)
        self._take_over()
        if budget < self._floor:
            self.smallest()
            return
        self._enumerate_swaps()
        target = self.bound(budget) + CLOSE * self.trace.pass_seconds
        if self._good(budget, target):
            return
        promising = []
        for number, layout in enumerate(self.layouts()):
            fitting = self._at_prices(layout, budget, LINK_PRICES[1], self._lag, GLANCES)
            if fitting is not None:
                promising.append((fitting.seconds, number, layout))
        starts: list[Solution] = []
        for _, _, layout in sorted(promising, key=lambda p: p[:2])[:CLOSELY]:
            found = [
                self._at_prices(layout, budget, price, lag, BISECTIONS, keeps_up=keeps_up)
                for price in LINK_PRICES
                for lag in range(len(LAGS))
                for keeps_up in (False, True)
                if LAGS[lag] or not keeps_up
            ]
            fitting = min((f for f in found if f is not None), key=lambda f: f.seconds, default=None)
            if fitting is not None:
                starts.append(self._trimmed(fitting, budget))
        if self._front.best(budget) is None:
            self.smallest()
        self._improve(budget, starts)

    def _take_over(self) -> None:
        """What is known with a tier less is a plan with it, too."""
        for solution in self._without._front:  # noqa: SLF001 - a solver of our own
            self._front.add(solution)

    def _at_prices(
        self, layout: Layout, budget: int, link_price: float, lag: int, steps: int, *, keeps_up: bool = False
    ) -> Solution | None:
        """The fastest plan that fits found on the way to the lowest price of memory at which plans fit; then the same with a price for what was too full."""
        weights = {self.plain.evaluation.peak_event: 1.0}
        best: Solution | None = None
        for _ in range(2):
            low, high = self._scale() * 1e-4, self._scale() * 1e4
            worst: Solution | None = None
            for _ in range(steps):
                middle = (low * high) ** 0.5
                found = self.decide(layout, self._prices(weights, middle), link_price, lag, keeps_up=keeps_up)
                if found.peak <= budget:
                    high = middle
                    if best is None or found.seconds < best.seconds:
                        best = found
                else:
                    low, worst = middle, found
            if worst is None:
                break
            event = worst.evaluation.peak_event
            weights[event] = weights.get(event, 0.0) + 0.5 * sum(weights.values())
        return best

    def _enumerate_swaps(self) -> None:
        """On small graphs, every way to keep, recompute or swap what backward reads, once."""
        if self._enumerated:
            return
        self._enumerated = True
        tiers = range(len(self.recipes.tiers))
        ways = [
            [0]
            + [1] * bool(self._may_rerun[i])
            + [2 + tier for tier in tiers if np.isfinite(self._copy_seconds[tier][i])]
            for i in np.flatnonzero(self._is_saved).tolist()
        ]
        count = 1
        for each in ways:
            count *= len(each)
            if count > EVERY_PLAN:
                return
        saved = np.flatnonzero(self._is_saved)
        none = np.zeros(len(self._movable), dtype=bool)
        for layout in self.layouts():
            for lag in range(len(LAGS)):
                for number in range(count):
                    dropped, swapped, left = none.copy(), none.copy(), number
                    place = np.zeros(len(none), dtype=np.int64)
                    for node, each in zip(saved, ways, strict=True):
                        left, way = divmod(left, len(each))
                        dropped[node], swapped[node] = each[way] == 1, each[way] >= 2
                        place[node] = max(0, each[way] - 2)
                    self._planned(layout, lag, dropped, none, swapped, place)

    # -- the smallest budget -------------------------------------------------------------------------------------------------

    def _find_smallest(self) -> None:
        self._without.smallest()
        self._take_over()
        self._enumerate_swaps()
        none = np.zeros(len(self._movable), dtype=bool)
        size = self._size.astype(float)
        found: list[Solution] = []
        for layout in self.layouts():
            border = np.isin(self._movable, sorted(layout.boundary_storages))
            # [1] Everything goes down. [2] Boundaries go down, what lies between them is recomputed.
            rerun = self._is_saved & self._may_rerun & ~border
            for wanted in (self._is_saved | border, border | (self._is_saved & ~rerun)):
                swapped, place = self._spread(self._may_swap & wanted, size)
                found.append(self._planned(layout, 0, rerun & ~swapped, none, swapped, place))
        for start in sorted(found, key=lambda f: f.peak)[:2]:
            self._shrunk(start)
        best = self._front.smallest()
        self._trimmed(best, best.peak)

    # -- the bound -----------------------------------------------------------------------------------------------------------

    @uncollected()
    def bound(self, budget_bytes: int) -> float:
        """Extra seconds of one micro-batch that no plan within the budget can avoid, swapping or not.

        A swapped storage costs nothing as long as its copies hide; all copies up over one link hide behind no more than the whole pass and what is recomputed.
        Both are weighed (a Lagrangian of the links, each weighing as much as it is fast), and the best weight counts.
        """
        if self.plain.peak <= budget_bytes:
            return 0.0
        if budget_bytes not in self._bounds:
            overhead = self.trace.dispatch_seconds * self.trace.forward_operations
            levels = self.plain.evaluation.levels
            best = 0.0
            for moment in sorted(self._moments(budget_bytes), key=lambda e: (-int(levels[e]), e))[:4]:
                for price in BOUND_PRICES:
                    tangent = self._tangent(moment, budget_bytes, price)
                    best = best_dual(tangent, self._scale() * 1e3, best)
            self._bounds[budget_bytes] = best + overhead
        bound, known = self._bounds[budget_bytes], self._front.best(budget_bytes)
        return known.seconds if known is not None and known.seconds < bound <= known.seconds * (1 + 1e-9) else bound

    def _tangent(self, moment: int, budget: int, link_price: float) -> Callable[[float], tuple[float, float]]:
        """The dual at a price of memory at this moment, and its slope there."""
        timeline = self.timeline
        held = np.array(
            [any(e <= moment <= r for e, r in timeline.unpack_uses.get(s, ())) for s in self._movable], dtype=bool
        )
        needed = np.array([any(e > moment for e, _ in timeline.unpack_uses.get(s, ())) for s in self._movable])
        gone = (self._birth <= moment) & (self._death < moment)
        chargeable = np.where(gone & ~held, self._size, 0)
        ends = np.array([timeline.plain_end[s] for s in self._movable], dtype=np.int64)
        floor = int(self.plain.evaluation.levels[moment]) - int(chargeable[self._is_saved & (ends >= moment)].sum())
        named = frozenset(s for s, wanted in zip(self._movable, needed & self._is_saved, strict=True) if wanted)
        network = self._cut_network(named, 1.0 - link_price)
        rates = np.array([link.in_bandwidth for link in self.recipes.tiers])
        up = np.min(self._up_seconds * (rates / rates.sum())[:, None], axis=0)
        swap = np.where(self._may_swap, link_price * np.where(self._may_swap, up, 0.0), inf)
        hidden = link_price * (self.trace.pass_seconds + self.trace.dispatch_seconds * self.trace.forward_operations)

        def tangent(price: float) -> tuple[float, float]:
            keep = price * chargeable
            sides, value = network.cut(np.minimum(keep, swap))
            there = sides[: len(self._movable)] & ~sides[self._run_of] & (keep <= swap)
            return value - hidden + price * (floor - budget), int(chargeable[there].sum()) + floor - budget

        return tangent
