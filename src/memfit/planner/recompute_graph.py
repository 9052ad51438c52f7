"""Which storages a plan decides about, and the network whose minimum cuts decide.

Nodes are the storages that backward reads and can be rebuilt, with all that rebuilding them may need, and their recipes. A storage on the source side has
to be there; its recipe joins it there when it is run again, for its seconds, and takes its inputs along. What it costs to keep a storage instead is told at
each cut (`priced_cuts`, `bound`).
"""

from __future__ import annotations

from math import inf

import numpy as np

from memfit.planner.priced_network import PricedNetwork
from memfit.planner.timeline import Timeline


class RecomputeGraph:
    """The decisions about one trace, in columns with a row for each node.

    Attributes:
        droppable: storages that backward reads and that can be rebuilt.
        nodes: these, and everything rebuildable that rebuilding them may need, in ascending order.
        recipe_of_node: of each node, the network's node of its recipe.
        run_seconds: that each recipe takes at least where it runs, the engine's own included.
        price_scale: a price per byte at which holding everything would cost about as much as running everything again.
        unpacks: a row (event, operation whose backward asks) for each unpack.
        reads: a row (node, event, last event held) for each unpack of a node.
        node: storage numbers; node_droppable, node_saved: whether each is; node_bytes, node_birth, node_death: of the storages; node_baseline_end: the last
            event of each when nothing is dropped; node_first_read: the first unpack, after the end where there is none; node_by: the operation whose
            window a storage belongs to: the last whose backward reads it, else the one that made it.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.recipes = recipes = timeline.recipes
        self.trace = trace = timeline.trace
        self.droppable = frozenset(recipes.saved & recipes.rebuildable)
        self.nodes = self._closure()
        number = {s: i for i, s in enumerate(self.nodes)}
        used = sorted({recipes.recipe_of[s] for s in self.nodes})
        recipe_number = {r: len(self.nodes) + i for i, r in enumerate(used)}
        recipe_of_node = [recipe_number[recipes.recipe_of[s]] for s in self.nodes]
        self._keep_arcs = list(enumerate(recipe_of_node))
        self._input_arcs = [
            (recipe_number[r], number[s], inf) for r in used for s in recipes.recipes[r].inputs if s in number
        ]
        self.run_seconds = [timeline.least_seconds(r) for r in used]
        # A recipe that runs has its parts of forward followed.
        self._parts, self._part_arcs = timeline.following.in_network(
            [(recipe_number[r], r) for r in used], len(self.nodes) + len(used)
        )
        size = sum(trace.storages[s].bytes for s in self.droppable)
        self.price_scale = sum(self.run_seconds) / size if size else 1.0
        self._networks: dict[frozenset[int], PricedNetwork] = {}
        self.recipe_of_node = np.array(recipe_of_node, dtype=np.int64)
        self._columns()

    def _closure(self) -> list[int]:
        """Everything rebuildable that a dropped storage may need."""
        seen: set[int] = set()
        stack = list(self.droppable)
        while stack:
            s = stack.pop()
            if s not in seen:
                seen.add(s)
                inputs = self.recipes.recipes[self.recipes.recipe_of[s]].inputs
                stack.extend(i for i in inputs if i in self.recipes.rebuildable)
        return sorted(seen)

    def _columns(self) -> None:
        trace, nodes = self.trace, self.nodes
        first_read: dict[int, int] = {}
        last_by: dict[int, int] = {}
        for save in trace.saves:
            for event, _ in save.unpacks:
                first_read[save.storage] = min(first_read.get(save.storage, event), event)
                last_by[save.storage] = max(last_by.get(save.storage, -1), save.by)
        unpacks = [(event, save.by) for save in trace.saves for event, _ in save.unpacks]
        self.unpacks = np.array(unpacks, dtype=np.int64).reshape(-1, 2)
        end = self.timeline.events + 1
        self.node = np.array(nodes, dtype=np.int64)
        self.node_droppable = np.array([s in self.droppable for s in nodes], dtype=bool)
        self.node_saved = np.array([s in self.recipes.saved for s in nodes], dtype=bool)
        self.node_bytes = np.array([trace.storages[s].bytes for s in nodes], dtype=np.int64)
        self.node_birth = np.array([trace.storages[s].birth for s in nodes], dtype=np.int64)
        self.node_death = np.array([trace.storages[s].death for s in nodes], dtype=np.int64)
        self.node_baseline_end = np.array([self.timeline.plain_end[s] for s in nodes], dtype=np.int64)
        self.node_first_read = np.array([first_read.get(s, end) for s in nodes], dtype=np.int64)
        self.node_by = np.array([last_by.get(s, trace.storages[s].birth) for s in nodes], dtype=np.int64)
        reads = [
            (i, event, release) for i, s in enumerate(nodes) for event, release in self.timeline.unpack_uses.get(s, ())
        ]
        self.reads = np.array(reads, dtype=np.int64).reshape(-1, 3)

    def network(self, needed: frozenset[int]) -> PricedNetwork:
        """The network in which backward reads the needed storages; the priced arcs are those from each storage to its recipe."""
        if needed not in self._networks:
            others = len(self.run_seconds) + len(self._parts)
            source = [inf if s in needed else 0.0 for s in self.nodes] + [0.0] * others
            sink = [0.0] * len(self.nodes) + self.run_seconds + self._parts
            self._networks[needed] = PricedNetwork(source, sink, self._input_arcs + self._part_arcs, self._keep_arcs)
        return self._networks[needed]
