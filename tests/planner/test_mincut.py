"""Minimum cuts against brute force and networkx, and on graphs shaped like those of training steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product
from math import inf, isinf
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.planner import mincut
from memfit.planner.mincut import minimum_cut
from memfit.planner.priced_network import PricedNetwork
from sweeps import each_seed


@dataclass
class Network:
    source: list[float] = field(default_factory=list)
    sink: list[float] = field(default_factory=list)
    arcs: list[tuple[int, int, float]] = field(default_factory=list)

    def node(self, source: float = 0.0, sink: float = 0.0) -> int:
        self.source.append(source)
        self.sink.append(sink)
        return len(self.source) - 1

    def cost(self, sides: list[bool]) -> float:
        nodes = sum(b if side else a for a, b, side in zip(self.source, self.sink, sides, strict=True))
        return nodes + sum(c for u, v, c in self.arcs if sides[u] and not sides[v])

    def cut(self) -> mincut.Cut:
        return minimum_cut(self.source, self.sink, self.arcs)


def block_chain(
    num_blocks: int, *, storages: int = 33, views: int = 40, saved: float = 0.6, price: float = 10.0, seed: int = 0
) -> Network:
    """A forward pass of equal blocks, as the planner poses it: what to keep, what to recompute.

    need(s) -> run(op(s)) costs keeping s (price x bytes x lifetime), run(o) -> sink the seconds of o, and run(o)
    implies need(input), at times through the run of a view. Blocks are equal but for noise, as measured seconds are.

    Args:
        num_blocks: how many blocks follow each other.
        storages: per block.
        views: per block, on average.
        saved: share of the storages that backward reads.
        price: seconds for keeping one unit of bytes for the whole step.
        seed: of the block's shape and the noise.
    """
    rng = random.Random(seed)
    block = []
    for k in range(storages):
        reads = {rng.choice((1, 1, 1, 2, 3, 5, 8)) for _ in range(rng.choice((1, 2, 3, 4)))} | {1}
        if k in {storages // 2, storages - 1}:
            reads.add(storages // 2)  # The residual connection.
        size = rng.choice((1, 1, 1, 2, 4))
        seconds = size * (rng.uniform(5, 20) if rng.random() < 0.25 else rng.uniform(0.2, 1))
        viewed = {d: rng.random() < views / (2.2 * storages) for d in sorted(reads)}
        block.append((size, seconds, rng.random() < saved, viewed))
    network = Network()
    needs: list[int] = []
    for i in range(num_blocks * storages):
        size, seconds, is_saved, viewed = block[i % storages]
        lifetime = rng.uniform(0.95, 1.05) * (1 - i / (num_blocks * storages))
        need = network.node(source=inf if is_saved else 0.0)
        run = network.node(sink=1e-3 * seconds * rng.uniform(0.95, 1.05))
        network.arcs.append((need, run, 1e-3 * price * size * lifetime))
        for distance, through_view in viewed.items():
            if distance <= i:
                reader = run
                if through_view:
                    reader = network.node(sink=2e-6)
                    network.arcs.append((run, reader, inf))
                network.arcs.append((reader, needs[i - distance], inf))
        needs.append(need)
    return network


def networkx_value(network: Network) -> float:
    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    arcs = [("source", v, c) for v, c in enumerate(network.source)] + [
        (v, "sink", c) for v, c in enumerate(network.sink)
    ]
    for u, v, c in arcs + network.arcs:
        if c:
            graph.add_edge(u, v, capacity=c + graph.get_edge_data(u, v, {"capacity": 0.0})["capacity"])
    value, _ = nx.minimum_cut(graph, "source", "sink")
    return float(value)


@st.composite
def networks(draw: st.DrawFn, max_nodes: int = 6) -> Network:
    # Whole numbers, so that costs compare exactly and ties are many.
    num_nodes = draw(st.integers(1, max_nodes))
    finite = st.integers(0, draw(st.sampled_from((1, 4, 30)))).map(float)
    terminal = st.lists(st.one_of(st.just(0.0), finite, finite, st.just(inf)), min_size=num_nodes, max_size=num_nodes)
    node = st.integers(0, num_nodes - 1)
    arcs = st.lists(st.tuples(node, node, st.one_of(finite, finite, st.just(inf))), max_size=3 * num_nodes)
    return Network(draw(terminal), draw(terminal), draw(arcs))


@pytest.mark.parametrize("plain_searches", [12, 1])  # With 1, nearly all searches go by capacity scaling, the fallback.
@settings(deadline=None)
@given(network=networks())
def test_cut_is_the_smallest_of_all_minimum_cuts(network: Network, plain_searches: int) -> None:
    costs = {sides: network.cost(list(sides)) for sides in product((False, True), repeat=len(network.source))}
    lowest = min(costs.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mincut, "_UNSCALED_SEARCHES", plain_searches)
        if isinf(lowest):
            with pytest.raises(ValueError, match=r"Every cut is infinite: node \d is forced to both"):
                network.cut()
            return
        cut = network.cut()
    assert cut.value == lowest
    minimal = [all(column) for column in zip(*(sides for sides, cost in costs.items() if cost == lowest), strict=True)]
    assert cut.on_source_side == minimal


@settings(deadline=None)
@given(network=networks(max_nodes=12), scale=st.sampled_from((1e-100, 1e-9, 0.3, 1e12)), seed=st.integers(0, 99))
def test_unit_and_order_of_arcs_do_not_matter(network: Network, scale: float, seed: int) -> None:
    scaled = Network(
        [c * scale for c in network.source],
        [c * scale for c in network.sink],
        [(u, v, c * scale) for u, v, c in network.arcs],
    )
    random.Random(seed).shuffle(scaled.arcs)
    try:
        cut = network.cut()
    except ValueError:
        with pytest.raises(ValueError, match="infinite"):
            scaled.cut()
        return
    assert scaled.cut().value == pytest.approx(cut.value * scale, rel=1e-12, abs=0)
    # The sides may differ: rounding splits ties, as 0.3 + 0.6 is not 0.9. They cost the same.
    assert network.cost(scaled.cut().on_source_side) == cut.value


@settings(deadline=None)
@given(network=networks(max_nodes=9), copies=st.integers(1, 3), data=st.data())
def test_a_network_at_prices_is_cut_as_if_it_were_new(network: Network, copies: int, data: st.DataObject) -> None:
    """Several copies of one graph, joined nowhere, some of whose arcs have other capacities at each cut."""
    num_nodes, stays = len(network.source), [data.draw(st.booleans()) or isinf(c) for *_, c in network.arcs]
    source, sink = network.source * copies, network.sink * copies
    arcs = [
        (u + i * num_nodes, v + i * num_nodes, c)
        for i in range(copies)
        for (u, v, c), stay in zip(network.arcs, stays, strict=True)
        if stay
    ]
    priced = [
        (u + i * num_nodes, v + i * num_nodes)
        for i in range(copies)
        for (u, v, _), stay in zip(network.arcs, stays, strict=True)
        if not stay
    ]
    try:
        at_prices = PricedNetwork(source, sink, arcs, priced)
    except ValueError:
        with pytest.raises(ValueError, match="infinite"):
            network.cut()
        return
    for _ in range(3):
        # Few values, so that some copies are alike and others are not.
        capacities = data.draw(st.lists(st.sampled_from((0.0, 1.0, 7.0)), min_size=len(priced), max_size=len(priced)))
        whole = minimum_cut(source, sink, arcs + [(u, v, c) for (u, v), c in zip(priced, capacities, strict=True)])
        sides, value = at_prices.cut(np.array(capacities))
        assert value == whole.value
        assert sides.tolist() == whole.on_source_side


def test_blocks_that_are_alike_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = 200
    # Of each three nodes the first is pinned, and the other two hang together.
    source = [inf, 0.0, 0.0] * blocks
    sink = [0.0, 0.0, 2.0] * blocks
    arcs = [(3 * i + 2, 3 * i + 1, inf) for i in range(blocks)]
    priced = [(3 * i + j, 3 * i + 2) for i in range(blocks) for j in (0, 1)]
    network = PricedNetwork(source, sink, arcs, priced)
    asked: list[int] = []

    def counted(network: mincut.FreeNetwork, source: Any, *rest: Any) -> Any:
        asked.append(len(source))
        return source_side(network, source, *rest)

    source_side = mincut.FreeNetwork.source_side
    monkeypatch.setattr(mincut.FreeNetwork, "source_side", counted)
    capacities = np.array([3.0 if i % 10 else 1.0 for i in range(blocks) for _ in range(2)])
    sides, value = network.cut(capacities)
    assert asked == [4]  # two free nodes, at two prices
    assert value == sum(2.0 if i % 10 else 1.0 for i in range(blocks))
    assert sides[2::3].tolist() == [bool(i % 10) for i in range(blocks)]
    sides[:] = False  # the caller's own
    assert network.cut(capacities)[0][2::3].tolist() == [bool(i % 10) for i in range(blocks)]
    assert asked == [4]  # nothing is cut twice


@pytest.mark.parametrize("price", [0.3, 3.0, 30.0, 300.0])
@pytest.mark.parametrize("saved", [0.1, 0.4, 0.9])
def test_value_equals_that_of_networkx_and_of_the_sides_returned(saved: float, price: float) -> None:
    for seed in range(3):
        network = block_chain(3, storages=12, views=14, saved=saved, price=price, seed=seed)
        cut = network.cut()
        assert cut.value == pytest.approx(networkx_value(network), rel=1e-9)
        assert cut.value == pytest.approx(network.cost(cut.on_source_side), rel=1e-12)


@each_seed(8)
def test_value_equals_that_of_networkx_when_nodes_come_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    num_nodes = 150
    network = Network(
        [
            rng.choice((0.0, 0.0, 1.0, inf if v < 3 else 9.0)) * rng.random() if v >= 3 else inf
            for v in range(num_nodes)
        ],
        [rng.choice((0.0, 1.0, 9.0)) * rng.random() for _ in range(num_nodes)],
        [
            (rng.randrange(num_nodes), rng.randrange(num_nodes), rng.choice((0.1, 1.0, 5.0)) * rng.random())
            for _ in range(4 * num_nodes)
        ],
    )
    network.arcs += [(rng.randrange(num_nodes), rng.randrange(num_nodes), inf) for _ in range(30)]
    assert network.cut().value == pytest.approx(networkx_value(network), rel=1e-9)


def test_infinite_arcs_are_never_cut() -> None:
    network = block_chain(24)
    sides = network.cut().on_source_side
    assert any(sides)
    assert not all(sides)
    assert not [(u, v) for u, v, c in network.arcs if isinf(c) and sides[u] and not sides[v]]
    assert all(side for side, c in zip(sides, network.source, strict=True) if isinf(c))


def test_a_dearer_price_recomputes_more() -> None:
    # The smallest source sides of a parametric cut are nested.
    before: list[bool] = [False] * len(block_chain(8).source)
    for price in (0.1, 1.0, 3.0, 10.0, 30.0, 100.0):
        sides = block_chain(8, price=price).cut().on_source_side
        assert all(now or not was for was, now in zip(before, sides, strict=True))
        before = sides
    assert all(before[:2])


def test_finite_capacities_far_above_the_cut_cost_no_precision() -> None:
    # need -> run -> need -> run; recomputing is forbidden by a huge number where infinity was meant.
    network = Network([inf, 0, 0, 0], [0, 1e-6, 0, 1e30], [(0, 1, 3e-6), (1, 2, inf), (2, 3, 1e-6)])
    cut = network.cut()
    assert cut.value == 2e-6
    assert cut.on_source_side == [True, True, True, False]


def test_a_tie_keeps() -> None:
    assert Network([inf, 0], [0, 0.7], [(0, 1, 0.7)]).cut().on_source_side == [True, False]


def test_an_empty_network_costs_nothing() -> None:
    assert Network().cut() == mincut.Cut(0.0, [])


def test_a_thousand_blocks_need_no_recursion_and_work_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = 0

    def counted(*args: Any) -> list[int]:
        nonlocal visits
        found = search(*args)
        visits += len(found)
        return found

    search = mincut._Residual.search
    monkeypatch.setattr(mincut._Residual, "search", counted)

    def work(num_blocks: int) -> int:
        nonlocal visits
        visits = 0
        block_chain(num_blocks, storages=8, views=6, saved=0.15, price=300.0).cut()
        return visits

    assert len(block_chain(1000, storages=8, views=6).source) > 20_000
    assert 0 < work(1000) < 12 * work(100)


def test_one_unbroken_chain_is_solved_without_recursion() -> None:
    # Backward reads the last storage only, and all of 10,000 operations lie behind it.
    network = Network()
    for i in range(10_000):
        need = network.node(source=inf if i == 9_999 else 0.0)
        run = network.node(sink=1.0)
        network.arcs.append((need, run, 1e5))
        if i:
            network.arcs.append((run, need - 2, inf))
    cut = network.cut()
    assert cut.value == 10_000
    assert all(cut.on_source_side)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Network([1.0], [], []), "1 source capacities, but 0 sink capacities"),
        (Network([1.0, -1.0], [0.0, 0.0], []), "Node 1 has capacities -1.0 and 0.0"),
        (Network([1.0, 0.0], [0.0, float("nan")], []), "Node 1 has capacities 0.0 and nan"),
        (Network([1.0], [0.0], [(0, 1, 1.0)]), r"Arc \(0, 1, 1.0\) must join two of the nodes 0 to 0"),
        (Network([1.0], [0.0], [(-1, 0, 1.0)]), r"Arc \(-1, 0, 1.0\)"),
        (Network([1.0], [0.0], [(0, 0, float("nan"))]), r"Arc \(0, 0, nan\)"),
    ],
)
def test_what_is_no_network_is_refused(network: Network, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network.cut()
