"""Minimum cuts of one graph again and again, at other prices.

Everything that does not depend on the prices is worked out once. Nodes whose side is forced are left out; what is left falls apart into connected
components, and components that are alike (the blocks of a network) are cut once for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Any, Final

import numpy as np

from memfit.planner.mincut import FREE, SINK_SIDE, SOURCE_SIDE, Arc, FreeNetwork, check_network, forced_sides

MOST_KNOWN: Final = 32  # numbers of copies of components that are kept joined
_NOTHING: Final = np.zeros(0)


@dataclass(slots=True)
class _Component:
    """Connected nodes, and all other components that look the same from the inside.

    Attributes:
        source, sink: capacities of its nodes.
        arcs: (from, to, capacity), nodes counted from the component's first.
        priced: (from, to) of arcs whose capacities are told at each cut; -1 is the source side at `from`, the sink side at `to`.
        nodes: per component, which nodes they are.
        prices: per component, which priced arcs they are.
    """

    source: list[float]
    sink: list[float]
    arcs: list[Arc]
    priced: list[tuple[int, int]]
    nodes: Any = field(default_factory=list)
    prices: Any = field(default_factory=list)


class _Joined:
    """Some copies of each of several components, which are one network of which no node's side is forced.

    Args:
        components: that the copies are of.
        counts: of copies of each.
    """

    def __init__(self, components: Sequence[_Component], counts: Sequence[int]) -> None:
        source: list[float] = []
        sink: list[float] = []
        ends: list[tuple[int, int]] = []
        capacities: list[float] = []
        # Of the prices, in the order of components, copies and arcs: which of them is added to which source, sink or arc.
        places: tuple[list[tuple[int, int]], ...] = ([], [], [])
        price = 0
        for component, count in zip(components, counts, strict=True):
            for _ in range(count):
                start = len(source)
                source += component.source
                sink += component.sink
                for u, v, c in component.arcs:
                    if u < 0:
                        source[start + v] += c
                    elif v < 0:
                        sink[start + u] += c
                    else:
                        ends.append((start + u, start + v))
                        capacities.append(c)
                for u, v in component.priced:
                    if u < 0:
                        places[0].append((start + v, price))
                    elif v < 0:
                        places[1].append((start + u, price))
                    else:
                        places[2].append((len(ends), price))
                        ends.append((start + u, start + v))
                        capacities.append(0.0)
                    price += 1
        self._amounts = [np.array(amounts, dtype=float) for amounts in (source, sink, capacities)]
        self._places = [np.array(each, dtype=np.int64).reshape(-1, 2).T for each in places]
        self._network = FreeNetwork(len(source), ends)

    def source_side(self, prices: Any) -> Any:
        """Of each node whether it is on the source side, at these capacities of the priced arcs."""
        amounts = [each.copy() for each in self._amounts]
        for each, (place, price) in zip(amounts, self._places, strict=True):
            np.add.at(each, place, prices[price])
        return self._network.source_side(*amounts)


def _out_of_reach(
    source: Sequence[float], arcs: Sequence[Arc], priced: Sequence[tuple[int, int]], forced: list[int]
) -> list[int]:
    """The forced sides, with free nodes that no source reaches on the sink side: nothing is ever paid for them there."""
    onward: list[list[int]] = [[] for _ in source]
    for u, v in [*((u, v) for u, v, _ in arcs), *priced]:
        onward[u].append(v)
    stack = [v for v, a in enumerate(source) if a > 0 and forced[v] != SINK_SIDE]
    reached = [False] * len(source)
    for v in stack:
        reached[v] = True
    while stack:
        for v in onward[stack.pop()]:
            if not reached[v] and forced[v] != SINK_SIDE:
                reached[v] = True
                stack.append(v)
    return [SINK_SIDE if side == FREE and not there else side for side, there in zip(forced, reached, strict=True)]


class PricedNetwork:
    """Minimum cuts of one graph in which some arcs change their capacities from cut to cut.

    Args:
        source, sink: per node, as for `minimum_cut`.
        arcs: whose capacities stay.
        priced: (from, to) of the arcs whose capacities, all finite, are told at each cut.

    Raises:
        ValueError: every cut is infinite, or an arc names a node there is not.
    """

    def __init__(
        self,
        source: Sequence[float],
        sink: Sequence[float],
        arcs: Sequence[Arc],
        priced: Sequence[tuple[int, int]],
    ) -> None:
        check_network(source, sink, arcs)
        self._source, self._sink = np.array(source, dtype=float), np.array(sink, dtype=float)
        self._priced = np.array(priced, dtype=np.int64).reshape(-1, 2)
        self._finite = [arc for arc in arcs if arc[2] != inf]
        forced = forced_sides(source, sink, arcs)
        self._pinned = np.array(forced) == SOURCE_SIDE
        side = _out_of_reach(source, arcs, priced, forced)
        # Nodes of no forced side that an arc joins belong to one component, named by the smallest of them.
        root = list(range(len(source)))

        def find(v: int) -> int:
            while root[v] != v:
                root[v] = root[root[v]]
                v = root[v]
            return v

        for u, v in [*((u, v) for u, v, _ in arcs), *priced]:
            if side[u] == side[v] == FREE:
                a, b = find(u), find(v)
                root[max(a, b)] = min(a, b)
        members: dict[int, list[int]] = defaultdict(list)
        place = [-1] * len(source)
        component_of = [-1] * len(source)
        for v, its_side in enumerate(side):
            if its_side == FREE:
                component_of[v] = find(v)
                place[v] = len(members[component_of[v]])
                members[component_of[v]].append(v)
        inside: dict[int, list[Arc]] = defaultdict(list)
        for u, v, c in arcs:
            u_side, v_side = side[u], side[v]
            if u_side == FREE and v_side != SOURCE_SIDE:
                inside[component_of[u]].append((place[u], place[v], c))
            elif u_side == SOURCE_SIDE and v_side == FREE:
                inside[component_of[v]].append((-1, place[v], c))
        told: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for k, (u, v) in enumerate(priced):
            u_side, v_side = side[u], side[v]
            if u_side == FREE and v_side != SOURCE_SIDE:
                told[component_of[u]].append((place[u], place[v], k))
            elif u_side == SOURCE_SIDE and v_side == FREE:
                told[component_of[v]].append((-1, place[v], k))
        alike: dict[tuple[object, ...], _Component] = {}
        for name, nodes in members.items():
            own = [source[v] for v in nodes], [sink[v] for v in nodes]
            at = [(u, v) for u, v, _ in told[name]]
            key = (*map(tuple, own), tuple(inside[name]), tuple(at))
            if key not in alike:
                alike[key] = _Component(*own, inside[name], at)
            alike[key].nodes.append(nodes)
            alike[key].prices.append([k for _, _, k in told[name]])
        self._known: dict[tuple[int, ...], _Joined] = {}
        self._cuts: dict[bytes, tuple[Any, float]] = {}  # by a digest of the capacities
        self._components = list(alike.values())
        for each in self._components:
            each.nodes = np.array(each.nodes, dtype=np.int64)
            each.prices = np.array(each.prices, dtype=np.int64).reshape(len(each.nodes), -1)

    def cut(self, capacities: Any) -> tuple[Any, float]:
        """The sides of the nodes as `Cut.on_source_side` has them, and the value of the cut, at these capacities of the priced arcs."""
        # A search that turns one knob often asks for the capacities that it had with another.
        key = blake2b(np.ascontiguousarray(capacities, dtype=float).tobytes(), digest_size=16).digest()
        if key not in self._cuts:
            self._cuts[key] = self._cut(capacities)
        sides, value = self._cuts[key]
        return sides.copy(), value

    def _cut(self, capacities: Any) -> tuple[Any, float]:
        """`cut`, of capacities that it was not asked for before."""
        counts: list[int] = []
        placed: list[list[int]] = []  # of each component, of each of its prices which of those that differ
        told: list[Any] = []  # these, as arrays
        for component in self._components:
            rows = capacities[component.prices]
            # Rows alike are found by their bytes, which is faster than sorting floats.
            seen: dict[bytes, int] = {}
            which = [seen.setdefault(row.tobytes(), len(seen)) for row in rows]
            first = np.zeros(len(seen), dtype=np.int64)
            first[which[::-1]] = np.arange(len(rows))[::-1]
            counts.append(len(seen))
            placed.append(which)
            told.append(rows[first].ravel())
        found = self._joined(tuple(counts)).source_side(np.concatenate([*told, _NOTHING]))
        sides = self._pinned.copy()
        start = 0
        for component, count, which in zip(self._components, counts, placed, strict=True):
            width = len(component.source)
            sides[component.nodes] = found[start : start + count * width].reshape(count, width)[which]
            start += count * width
        return sides, self._value(sides, capacities)

    def _joined(self, counts: tuple[int, ...]) -> _Joined:
        """So many of each component."""
        if counts not in self._known:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            self._known[counts] = _Joined(self._components, counts)
        return self._known[counts]

    def _value(self, sides: Any, capacities: Any) -> float:
        """What it costs to put the nodes on these sides."""
        u, v = self._priced.T
        value = self._source[~sides].sum() + self._sink[sides].sum() + capacities[sides[u] & ~sides[v]].sum()
        return float(value) + sum(c for u, v, c in self._finite if sides[u] and not sides[v])
