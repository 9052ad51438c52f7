"""Minimum cut for project selection: which storages to recompute, when their inputs may have to be recomputed too.

Every node pays for one of two sides: its source capacity if it ends on the sink side, its sink capacity if it ends on
the source side; an arc (u, v) is paid when u ends on the source side and v on the sink side, so an infinite arc says
"u implies v". Here storages on the source side must be available in backward, recipes there run again, and capacities
are seconds.

networkx has minimum cuts too, but keeps a dictionary for each arc and takes about 30 times as long on our graphs.

Method (sources below): nodes whose side is forced by infinite capacities are removed first, which divides the graph of a
training step into many small components. The rest is solved by augmenting paths, one source after another: a
depth-first search from a source leaves flow at every sink it meets without going back to the start. When a search
pushes nothing, no arc with residual capacity leads out of the nodes it visited, and none ever will, since later paths
end at sinks and so never enter; these nodes are on the source side for good, and later searches skip them: they are
**buried**. Components need not be separated: a search never leaves its own.

Measured on chains of 24 transformer-like blocks (2,660 nodes, 3,710 arcs, from a tenth to nine tenths of the storages
read by backward, low to high prices; milliseconds on one core, the flow alone with its lists built, all as prototypes):
this 0.8 to 4, Boykov-Kolmogorov 1.4 to 10, Dinic 1 to 19, Hochbaum's pseudoflow 1 to 22. Push-relabel with global
relabelling took 40 to 570 where the others took 1 to 50. `minimum_cut` as a whole, checks included: 4 to 9; a chain
ten times as long, 50 to 160. Known limit: when thousands of sources share one far sink across a long path
without others, each walks the whole path, and time grows with the square of its length (8,000 nodes: 9 s). An operation
whose storage backward reads ends every path, and every operation costs seconds, so our graphs have no such paths;
the nearest to one, a recurrence of 5,000 steps that is not read itself but whose every branch is, took 0.2 s.

Arithmetic: seconds are rounded up to integer multiples of 2**-51 of an upper bound on the cut. With floats, `x + y - y`
leaves tiny residual capacities; searches follow them, one that is lost to rounding can bury nodes that still reach a sink
(a float prototype did), and which of two equally good cuts is found depends on the order of the arcs. Integers leave
none, so the smallest source side is unique. The cost is an error of at most 2**-51 of that bound for each capacity
cut. The value returned is summed from the capacities as given, along the cut returned.

`priced_network` cuts one graph repeatedly, at different prices.

Not here, as measurements gave no reason: a warm start from the flow at the last prices, which could save the flow (half of the time) but not the checks and
lists (the other half).

Sources: Picard, "Maximal closure of a graph and applications to combinatorial problems", Management Science 22 (1976),
for the model; Ford and Fulkerson, "Maximal flow through a network", Canadian Journal of Mathematics 8 (1956), for
augmenting paths; Ahuja, Magnanti and Orlin, "Network flows" (1993), section 7.3, for capacity scaling, the fallback
that keeps the worst case polynomial. Also measured: Boykov and Kolmogorov, IEEE TPAMI 26 (2004); Dinic, Soviet
Mathematics Doklady 11 (1970); Hochbaum, "The pseudoflow algorithm", Operations Research 56 (2008); Goldberg and Tarjan,
Journal of the ACM 35 (1988). Burying exhausted nodes is folklore; we know no paper to cite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, fsum, inf, isinf, ldexp
from math import frexp as split_float
from typing import Any

import numpy as np

Arc = tuple[int, int, float]
"""From node, to node, capacity."""

FREE, SOURCE_SIDE, SINK_SIDE = 0, 1, 2  # which side a node is forced to

_BURIED = 1 << 62  # As a mark: more than the number of any search.

# Searches from one source before capacity scaling begins. Two or three are usual, so this is seldom reached.
_UNSCALED_SEARCHES = 12


@dataclass(frozen=True, slots=True)
class Cut:
    """A minimum cut.

    Attributes:
        value: sum of the capacities cut, in the unit of the capacities (seconds).
        on_source_side: per node, whether it is on the source side. Of all minimum cuts this one has the smallest source
            side (contained in that of every other), so a node for which both sides cost the same is on the sink side.
    """

    value: float
    on_source_side: list[bool]


def minimum_cut(source: Sequence[float], sink: Sequence[float], arcs: Sequence[Arc]) -> Cut:
    """The cheapest division of the nodes into a source side and a sink side, and of those the smallest source side.

    Fastest when nodes are numbered in the order of execution, so that arcs mostly lead to smaller numbers.

    Args:
        source: per node, what it costs on the sink side; infinite forces it to the source side.
        sink: per node, what it costs on the source side; infinite forces it to the sink side.
        arcs: what it costs when the first node is on the source side and the second on the sink side; may be infinite.

    Returns:
        The cut; its value is exactly what its sides cost, and exceeds the minimum by rounding only.

    Raises:
        ValueError: every cut is infinite, a capacity is negative or not a number, or an arc names a node that does not exist.
    """
    check_network(source, sink, arcs)
    forced = forced_sides(source, sink, arcs)
    pinned = [side == SOURCE_SIDE for side in forced]
    bounds = [
        bound
        for bound in (
            _cut_value(source, sink, arcs, pinned),
            _cut_value(source, sink, arcs, [side != SINK_SIDE for side in forced]),
        )
        if 0 < bound < inf
    ]
    # A capacity above an upper bound on the minimum is never cut, however large: twice the bound stands for all such.
    limit = 2 * min(bounds, default=1.0)
    residual = _Residual.between_free_nodes(source, sink, arcs, forced, limit)
    residual.push_flow()
    sides = [pin or rest for pin, rest in zip(pinned, residual.source_side(), strict=True)]
    value = _cut_value(source, sink, arcs, sides)
    assert not isinf(value), "an infinite capacity was cut although a finite cut exists"
    return Cut(value, sides)


def check_network(source: Sequence[float], sink: Sequence[float], arcs: Sequence[Arc]) -> None:
    """Raise a ValueError where these are not the capacities of a network."""
    num_nodes = len(source)
    if len(sink) != num_nodes:
        raise ValueError(f"{num_nodes} source capacities, but {len(sink)} sink capacities: there must be one per node.")
    # min() passes over a nan that does not come first, so test each; `not x >= 0` is true for nan as well.
    for v, (a, b) in enumerate(zip(source, sink, strict=True)):
        if not (a >= 0 and b >= 0):
            raise ValueError(f"Node {v} has capacities {a} and {b}: they must be numbers, zero or more.")
    for u, v, c in arcs:
        if not (c >= 0 and 0 <= u < num_nodes and 0 <= v < num_nodes):
            raise ValueError(
                f"Arc ({u}, {v}, {c}) must join two of the nodes 0 to {num_nodes - 1}, with a capacity of zero or more."
            )


def forced_sides(source: Sequence[float], sink: Sequence[float], arcs: Sequence[Arc]) -> list[int]:
    """The side each node is forced to by infinite capacities, its own or along a path of infinite arcs."""
    num_nodes = len(source)
    forced = [FREE] * num_nodes
    from_source = [v for v, a in enumerate(source) if a == inf]
    to_sink = [v for v, b in enumerate(sink) if b == inf]
    onward: list[list[int]] = [[] for _ in range(num_nodes)]
    backward: list[list[int]] = [[] for _ in range(num_nodes)]
    for u, v, c in arcs:
        if c == inf:
            onward[u].append(v)
            backward[v].append(u)
    for roots, neighbours, side in ((from_source, onward, SOURCE_SIDE), (to_sink, backward, SINK_SIDE)):
        for v in roots:
            if forced[v] not in (FREE, side):
                raise ValueError(f"Every cut is infinite: node {v} is forced to both sides.")
            forced[v] = side
        while roots:
            for v in neighbours[roots.pop()]:
                if forced[v] == FREE:
                    forced[v] = side
                    roots.append(v)
                elif forced[v] != side:
                    raise ValueError(f"Every cut is infinite: node {v} is forced to both sides.")
    return forced


class _Residual:
    """The residual network between the nodes that no infinite capacity forces, in integers.

    Attributes:
        excess: per node, flow to be pushed on (positive), or what it can still absorb (negative).
        residual: residual capacity of arc k.
        head: arc k leads to node head[k]; arc k ^ 1 is its reverse.
        arcs: per node, the arcs that leave it.
    """

    def __init__(self, excess: list[int], residual: list[int], head: list[int], arcs: list[list[int]]) -> None:
        self.excess = excess
        self.residual = residual
        self.head = head
        self.arcs = arcs
        self.mark = [0] * len(excess)  # The last search that visited the node.
        self.cursor = [0] * len(excess)  # How far among its arcs that search is.

    @classmethod
    def between_free_nodes(
        cls, source: Sequence[float], sink: Sequence[float], arcs: Sequence[Arc], forced: list[int], limit: float
    ) -> _Residual:
        """Of a whole network; what arcs from and to nodes with a forced side carry is their neighbour's own."""
        scale = _scale(limit)
        excess = [
            0 if side or a == b else ceil(min(a, limit) * scale) - ceil(min(b, limit) * scale)
            for side, a, b in zip(forced, source, sink, strict=True)
        ]
        head: list[int] = []
        residual: list[int] = []
        leaving: list[list[int]] = [[] for _ in forced]
        for u, v, c in arcs:
            u_side, v_side = forced[u], forced[v]
            if u_side == v_side == FREE:
                leaving[u].append(len(head))
                leaving[v].append(len(head) + 1)
                head += (v, u)
                residual += (ceil(min(c, limit) * scale), 0)
            elif u_side == FREE and v_side == SINK_SIDE:
                excess[u] -= ceil(min(c, limit) * scale)
            elif u_side == SOURCE_SIDE and v_side == FREE:
                excess[v] += ceil(min(c, limit) * scale)
        return cls(excess, residual, head, leaving)

    def push_flow(self) -> None:
        """Push excess along arcs with residual capacity until none reaches a node that can absorb it: the maximum flow."""
        num_searches = 0
        for origin in range(len(self.excess)):
            if self.excess[origin] <= 0 or self.mark[origin] == _BURIED:
                continue
            floor = 0
            unscaled_searches_left = _UNSCALED_SEARCHES
            while before := self.excess[origin]:
                num_searches += 1
                visited = self.search(origin, floor, num_searches)
                if self.excess[origin] < before:
                    unscaled_searches_left -= 1
                    if unscaled_searches_left == 0:
                        # Capacity scaling: arcs above the floor first; the floor halves when they are used up.
                        floor = self.excess[origin]
                elif floor:
                    floor >>= 1
                else:
                    for v in visited:
                        self.mark[v] = _BURIED
                    break

    def search(self, origin: int, floor: int, number: int) -> list[int]:
        """One depth-first search along arcs with residual capacity above `floor`, leaving flow at every node that absorbs it.

        An arc's flow is updated when the search comes back over it, so no path is walked again to find its
        bottleneck. A node at which flow ran out is unmarked, as more may come along another path; one whose arcs ran out
        stays marked.

        Returns:
            The nodes visited. If nothing was pushed and the floor is zero, arcs with residual capacity lead from them to each
            other and to buried nodes only.
        """
        excess, head, residual, mark, cursor = self.excess, self.head, self.residual, self.mark, self.cursor
        # u: node the search is at; left: flow still to be placed; inflow: what came along the arc into u.
        u, left, inflow = origin, excess[origin], 0
        mark[u] = number
        cursor[u] = 0
        visited = [u]
        path: list[tuple[int, int, int, int]] = []  # (u, arc taken out of it, left, inflow) of the nodes before u.
        while True:
            arcs = self.arcs[u]
            for i in range(cursor[u], len(arcs)):
                k = arcs[i]
                if residual[k] > floor:
                    v = head[k]
                    if mark[v] < number:
                        break
            else:
                # [1] No arc is left: go back with what could not be placed.
                if not path:
                    break
                placed = inflow - left
                u, k, left, inflow = path.pop()
                residual[k] -= placed
                residual[k ^ 1] += placed
                left -= placed
                if left:
                    continue
                k = -1
            if k >= 0:
                cursor[u] = i
                pushed = min(left, residual[k])
                demand = -excess[v]
                if pushed > demand or demand <= 0:
                    # [2] Go on to v with what it does not absorb.
                    path.append((u, k, left, inflow))
                    u, left, inflow = v, pushed, pushed
                    if demand > 0:
                        excess[v] = 0
                        left -= demand
                    mark[v] = number
                    cursor[v] = 0
                    visited.append(v)
                    continue
                # [3] v absorbs all that comes.
                excess[v] += pushed
                residual[k] -= pushed
                residual[k ^ 1] += pushed
                left -= pushed
            # [4] Nothing is left to place from here: go back until something is.
            while not left and path:
                mark[u] = 0
                placed = inflow
                u, k, left, inflow = path.pop()
                residual[k] -= placed
                residual[k ^ 1] += placed
                left -= placed
            if not left:
                break
        excess[origin] = left
        return visited

    def source_side(self) -> list[bool]:
        """The smallest source side: the nodes that remaining excess reaches in the residual network, which are the buried ones."""
        return [mark == _BURIED for mark in self.mark]


class FreeNetwork:
    """Nodes of which no infinite capacity forces one to a side, and their arcs: cut again and again at other capacities.

    What does not depend on capacities is worked out once, and so is half of the time of `minimum_cut`.

    Args:
        num_nodes: how many there are.
        arcs: (from, to) of each.
    """

    def __init__(self, num_nodes: int, arcs: Sequence[tuple[int, int]]) -> None:
        self._head: list[int] = []
        self._leaving: list[list[int]] = [[] for _ in range(num_nodes)]
        for u, v in arcs:
            self._leaving[u].append(len(self._head))
            self._leaving[v].append(len(self._head) + 1)
            self._head += (v, u)

    def source_side(self, source: Any, sink: Any, capacities: Any) -> Any:
        """Of each node whether it is on the source side of the cut, the one of `minimum_cut`.

        Args:
            source, sink: of each node, as for `minimum_cut`, finite; arrays.
            capacities: of each arc; an array.
        """
        # All nodes may be on one side.
        bounds = [bound for bound in (fsum(source.tolist()), fsum(sink.tolist())) if 0 < bound < inf]
        limit = 2 * min(bounds, default=1.0)
        scale = _scale(limit)

        def scaled(values: Any) -> Any:
            return np.ceil(np.minimum(values, limit) * scale).astype(np.int64)

        residual = np.zeros(len(self._head), dtype=np.int64)
        residual[::2] = scaled(capacities)
        excess = scaled(source) - scaled(sink)
        found = _Residual(excess.tolist(), residual.tolist(), self._head, self._leaving)
        found.push_flow()
        return np.array(found.source_side(), dtype=bool)


def _scale(limit: float) -> float:
    """What capacities up to a limit are multiplied by before they are rounded up."""
    # A power of two, so that multiplying is exact; 2**1023 is the largest there is.
    return ldexp(1.0, min(53 - split_float(limit)[1], 1023))


def _cut_value(source: Sequence[float], sink: Sequence[float], arcs: Sequence[Arc], sides: list[bool]) -> float:
    """What it costs to put the nodes on these sides; exactly rounded, so independent of the order of the arcs."""
    of_nodes = [b if side else a for a, b, side in zip(source, sink, sides, strict=True)]
    return fsum(of_nodes + [c for u, v, c in arcs if sides[u] and not sides[v]])
