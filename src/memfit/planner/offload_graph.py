"""Which storages a plan with offloading decides about: recompute, offload to some tier, or keep.

As in `recompute_graph`, with two differences. A storage that no recipe can make again may be a node, as it can be offloaded all the same; running its
recipe is then infinitely dear. And each storage has reloads of its own from each tier.
"""

from __future__ import annotations

from math import inf

import numpy as np

from memfit.planner.priced_network import PricedNetwork
from memfit.planner.recipes import PREFETCH_DISTANCES
from memfit.planner.timeline import Timeline


class OffloadGraph:
    """The decisions about one trace, in columns with a row for each node.

    Attributes:
        tiers: numbers of the tiers.
        nodes: storages that backward reads and that can be rebuilt or offloaded, and what rebuilding them may need, in ascending order.
        recipe_of_node: of each node, the network's node of its recipe.
        size, place: bytes of each storage, on the device and on a lower tier; birth, death: events.
        is_saved, may_recompute, may_offload: whether backward reads it, it can be rebuilt, it can be offloaded.
        copy_seconds, up_seconds: a row for each tier: what the copies both ways, and the copy up, take on its link; infinitely long where there is none.
        first: the first unpack of each, after the end where there is none.
        asked_by: the operation whose window a storage belongs to.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.recipes = recipes = timeline.recipes
        self.trace = trace = timeline.trace
        self.tiers = range(len(recipes.tiers))
        self.nodes = self._closure()
        number = {s: i for i, s in enumerate(self.nodes)}
        used = sorted({recipes.recipe_of[s] for s in self.nodes})
        run = {r: len(number) + i for i, r in enumerate(used)}
        runnable = [recipes.recipes[r].runnable for r in used]
        self._again_seconds = np.array(
            [timeline.least_seconds(r) if may else inf for r, may in zip(used, runnable, strict=True)]
        )
        self._arcs = [
            (run[r], number[s], inf)
            for r, may in zip(used, runnable, strict=True)
            if may
            for s in recipes.recipes[r].inputs
            if s in number
        ]
        self._parts, part_arcs = timeline.following.in_network(
            [(run[r], r) for r, may in zip(used, runnable, strict=True) if may], len(number) + len(used)
        )
        self._arcs += part_arcs
        self.recipe_of_node = np.array([run[recipes.recipe_of[s]] for s in self.nodes], dtype=np.int64)
        self._networks: dict[tuple[frozenset[int], float], PricedNetwork] = {}
        storages = [trace.storages[s] for s in self.nodes]
        reloads = [[self.reloads(s, tier) for s in self.nodes] for tier in self.tiers]
        self.size = np.array([st.bytes for st in storages], dtype=np.int64)
        self.place = np.array([recipes.place_bytes(s) for s in self.nodes], dtype=np.int64)
        self.is_saved = np.array([s in recipes.saved for s in self.nodes], dtype=bool)
        self.may_recompute = np.array([s in recipes.rebuildable for s in self.nodes], dtype=bool)
        self.may_offload = np.array([bool(r) for r in reloads[0]], dtype=bool)
        self.birth = np.array([st.birth for st in storages], dtype=np.int64)
        self.death = np.array([st.death for st in storages], dtype=np.int64)
        self.copy_seconds = np.array([[timeline.link_seconds(r[0]) if r else inf for r in row] for row in reloads])
        self.up_seconds = np.array([[recipes.reloads[r[0]].in_seconds if r else inf for r in row] for row in reloads])
        end = timeline.events + 1
        reads = [timeline.unpack_uses.get(s, ()) for s in self.nodes]
        self.first = np.array([min((e for e, _ in uses), default=end) for uses in reads], dtype=np.int64)
        by = {save.storage: -1 for save in trace.saves}
        for save in trace.saves:
            by[save.storage] = max(by[save.storage], save.by) if save.unpacks else by[save.storage]
        self.asked_by = np.array(
            [by[s] if by.get(s, -1) >= 0 else trace.storages[s].birth for s in self.nodes], dtype=np.int64
        )

    def _closure(self) -> list[int]:
        """Everything that can be rebuilt or offloaded, as far as backward or a recipe may need it."""
        recipes = self.recipes
        movable = recipes.rebuildable | recipes.reloads_of.keys()
        nodes: set[int] = set()
        stack = list(recipes.saved & movable)
        while stack:
            s = stack.pop()
            if s not in nodes:
                nodes.add(s)
                if s in recipes.rebuildable:
                    stack += [i for i in recipes.recipes[recipes.recipe_of[s]].inputs if i in movable]
        return sorted(nodes)

    def reloads(self, storage: int, tier: int) -> tuple[int, ...]:
        """The reloads of a storage from a tier, one for each prefetch distance; none where it does not go there."""
        count = len(PREFETCH_DISTANCES)
        return self.recipes.reloads_of.get(storage, ())[tier * count : (tier + 1) * count]

    def network(self, needed: frozenset[int], again: float) -> PricedNetwork:
        """The network in which backward reads the needed storages and seconds of recipes count `again` times."""
        if (needed, again) not in self._networks:
            others = len(self._again_seconds) + len(self._parts)
            source = [inf if s in needed else 0.0 for s in self.nodes] + [0.0] * others
            seconds = np.where(np.isinf(self._again_seconds), inf, 0.0)
            finite = np.isfinite(self._again_seconds)
            seconds[finite] = self._again_seconds[finite] * again
            sink = [0.0] * len(self.nodes) + seconds.tolist() + [part * again for part in self._parts]
            self._networks[needed, again] = PricedNetwork(
                source, sink, self._arcs, list(enumerate(self.recipe_of_node.tolist()))
            )
        return self._networks[needed, again]
