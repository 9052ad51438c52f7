"""The replay of a plan against a slow simulation that walks through time and asks, of each copy, whether it is still wanted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

import pytest

from memfit.hardware.machine import Link
from memfit.planner.recipes import Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planner.timeline import Timeline
from memfit.values.trace import BEFORE_STEP, Category, Trace
from planner.traces import Writer, drawn, layers, network
from sweeps import each_seed

Tick = tuple[int, int]  # (event, position among its recomputations); the event itself comes after its recomputations
OWN = 1 << 20


@dataclass
class Copy:
    """One copy of a storage, with the moments at which it is wanted."""

    bytes: int
    made: Tick
    wanted: list[Tick]

    def alive(self, now: Tick) -> bool:
        """From when it is made up to the last moment at which it is wanted."""
        return self.made <= now <= max(self.wanted)


def simulate(trace: Trace, recipes: Recipes, recomputations: Mapping[int, Sequence[int]]) -> list[int]:
    """Bytes at each event, by walking through all moments.

    What autograd keeps itself is wanted until autograd lets go. What the plan answers for (made again, or asked for where recomputations start) is
    wanted by unpacks and recomputations, each of which takes the newest copy; the first copy of what is offloaded also by its copy down.
    """
    events = len(trace.events)
    recomputations = {e: list(runs) for e, runs in recomputations.items() if runs}
    table = recipes.recipes
    makings: dict[int, list[Tick]] = {}
    for e in sorted(recomputations):
        for p, r in enumerate(recomputations[e]):
            for s in table[r].makes:
                makings.setdefault(s, []).append((e, p))
    answered = set(makings) | {trace.saves[~trace.events[e]].storage for e in recomputations}
    copies: list[Copy] = []
    for s, storage in enumerate(trace.storages):
        births: list[Tick] = [(storage.birth, OWN) if storage.birth != BEFORE_STEP else (0, -1), *makings.get(s, [])]
        mine = [Copy(storage.bytes, born, [born]) for born in births]
        mine[0].wanted.append((storage.death, OWN))
        ways = [recipes.reloads[r] for runs in recomputations.values() for r in runs if r in recipes.reloads]
        mine[0].wanted += [(way.gone_by, OWN) for way in ways if way.storage == s]
        if storage.birth == BEFORE_STEP and storage.death < trace.pass_events:
            # What no operation makes is held for what reads it until the pass is over.
            held = any(
                s in trace.operations[op].reads
                for r in {*chain(*recomputations.values())}
                for op in table[r].operations
            )
            mine[0].wanted += [(trace.pass_events - 1, OWN)] * held
        taking: list[tuple[Tick, Tick]] = []  # (when it is taken, until when it is wanted)
        for e in recomputations:
            taking += [((e, p), (e, p)) for p, r in enumerate(recomputations[e]) if s in table[r].inputs]
        for save in trace.saves:
            if save.storage != s:
                continue
            if s not in answered:
                last = max([r for _, r in save.unpacks], default=-1)
                mine[0].wanted.append((max(last, save.freed), OWN))
            elif storage.birth != BEFORE_STEP:
                taking += [((u, OWN), (r, OWN)) for u, r in save.unpacks]
        for when, until in taking:
            newest = max((c for c in mine if c.made < when), key=lambda c: c.made)
            newest.wanted.append(until)
        copies += mine
    # Generator states are there from the first run of a random operation to its recipe's last rerun.
    for r in {r for runs in recomputations.values() for r in runs}:
        latest = max((e, p) for e, runs in recomputations.items() for p, other in enumerate(runs) if other == r)
        for op in table[r].operations:
            if trace.operations[op].random and trace.rng_state_bytes:
                copies.append(Copy(trace.rng_state_bytes, (recipes.event_of_operation[op], OWN), [latest]))
    levels = []
    for e in range(events):
        op = trace.events[e]
        workspace = trace.operations[op].workspace_bytes if op >= 0 else 0
        level = sum(c.bytes for c in copies if c.alive((e, OWN))) + workspace
        for p, r in enumerate(recomputations.get(e, [])):
            there = sum(c.bytes for c in copies if c.alive((e, p)) and c.made < (e, p))
            level = max(level, there + table[r].peak_bytes)
        levels.append(level)
    return levels


def some_plan(recipes: Recipes, chance: random.Random) -> dict[int, list[int]]:
    dropped = [s for s in sorted(recipes.saved & recipes.rebuildable) if chance.random() < 0.7]
    transients = [s for s in sorted(recipes.rebuildable - recipes.saved) if chance.random() < 0.3]
    window = None
    if chance.random() < 0.6:
        length = chance.randint(1, 4)
        window = {e: (e + 1) // length for e in range(-1, recipes.trace.forward_events + 1)}
    return recomputations_for(recipes, dropped, window, transients)


def offloading_plan(recipes: Recipes, chance: random.Random) -> dict[int, list[int]]:
    """`some_plan` in which some storages are offloaded, some of them read by recomputations alone."""
    offloaded = {s: chance.choice(ways) for s, ways in sorted(recipes.reloads_of.items()) if chance.random() < 0.5}
    dropped = [s for s in sorted(recipes.saved & recipes.rebuildable - offloaded.keys()) if chance.random() < 0.5]
    transients = [s for s in sorted(recipes.rebuildable - recipes.saved - offloaded.keys()) if chance.random() < 0.3]
    window = None
    if chance.random() < 0.6:
        length = chance.randint(1, 4)
        window = {e: (e + 1) // length for e in range(-1, recipes.trace.forward_events + 1)}
    return recomputations_for(recipes, dropped, window, transients, offloaded=offloaded)


def check(trace: Trace, recomputations: Mapping[int, Sequence[int]], recipes: Recipes | None = None) -> None:
    timeline = Timeline(trace, recipes)
    found = timeline.evaluate(recomputations)
    expected = simulate(trace, timeline.recipes, recomputations)
    assert found.levels[: len(expected)].tolist() == expected
    assert found.peak_bytes == max(expected)
    assert expected[found.peak_event] == found.peak_bytes
    table = timeline.recipes.recipes
    cold = [op.host_factor for op in trace.operations]
    asked = Counter(save.storage for save in trace.saves for _ in save.unpacks)
    runs = [table[r] for rs in recomputations.values() for r in rs]
    actions = 0.0
    for r in runs:
        actions += sum(cold[op] for op in r.operations) if r.operations else 5  # a copy down and one up
    for r in (table[number] for number in {each for rs in recomputations.values() for each in rs}):
        noted = 0.55 + 0.5 * sum(asked[s] for s in r.makes) / max(1, len(r.operations))
        actions += noted * sum(cold[op] for op in r.operations)
    for rs in recomputations.values():
        factors = [fmean(cold[op] for op in table[r].operations) for r in rs if table[r].operations]
        actions += 1.4 + 6.6 * (max(factors) - 1) if factors else 0
    followed = sum(cold[e] for e in trace.events[: trace.forward_events] if e >= 0)
    engine = trace.dispatch_seconds * followed + trace.recomputed_seconds * actions if runs else 0
    waiting = found.copying.exposed_seconds
    assert found.extra_seconds == pytest.approx(sum(r.seconds for r in runs) + engine + waiting)


@each_seed(150)
def test_any_plan_of_any_trace_comes_to_what_walking_through_time_says(seed: int) -> None:
    chance = random.Random(seed)
    trace = drawn(
        seed,
        forward=chance.randint(3, 14),
        rng_bytes=chance.choice((0, 11)),
        dispatch=chance.choice((0.0, 0.1)),
        constants=seed % 2 == 1,
    )
    recipes = Recipes(trace)
    for _ in range(6):
        check(trace, some_plan(recipes, chance))


@each_seed(30)
def test_plans_of_networks_come_to_the_same(seed: int) -> None:
    trace = network(seed, blocks=4)
    for number in range(4):
        check(trace, some_plan(Recipes(trace), random.Random(number)))


@each_seed(100)
def test_plans_that_offload_come_to_what_walking_through_time_says(seed: int) -> None:
    chance = random.Random(seed)
    link = Link("disk", chance.choice((1.0, 30.0, 1e9)), chance.choice((1.0, 30.0, 1e9)), least_bytes=1)
    for trace in (drawn(seed, forward=chance.randint(4, 14), rng_bytes=chance.choice((0, 11))), network(seed)):
        recipes = Recipes(trace, link)
        for _ in range(4):
            check(trace, offloading_plan(recipes, chance), recipes)


def test_the_plans_of_these_tests_are_no_empty_ones() -> None:
    plans = [some_plan(Recipes(t), random.Random(s)) for s in range(40) for t in (drawn(s, forward=12), network(s))]
    assert sum(bool(p) for p in plans) > 50
    assert any(len(runs) > 2 for p in plans for runs in p.values())


@each_seed(20)
def test_any_recomputations_at_all_are_replayed_not_only_those_a_schedule_makes(seed: int) -> None:
    """Needless and repeated recomputations: the replay judges any list, as long as its inputs are there."""
    trace = network(seed)
    recipes = Recipes(trace)
    recomputations = {
        e: list(runs) for e, runs in recomputations_for(recipes, recipes.saved & recipes.rebuildable).items()
    }
    if not recomputations:
        return
    first = min(recomputations)
    for event in range(first + 1, trace.pass_events):
        if trace.events[event] < 0 and event not in recomputations:
            recomputations[event] = recomputations[first][:1]
    check(trace, dict(sorted(recomputations.items())))


def test_a_plain_step_holds_what_is_saved_until_backward_lets_go() -> None:
    w = Writer()
    weight = w.before(5)
    a = w.one((weight,), 100, workspace=40)  # event 0
    save = w.save(a)
    b = w.one((a,), 30)  # 1
    w.backward()
    g = w.one((b,), 7)  # 2
    w.unpack(save, held=1, late=1)  # 3; held in 4, packed until 5
    w.one((g, a), 7)  # 4
    w.run((), (1,))  # 5
    w.run((), (1,))  # 6
    found = Timeline(w.trace()).plain()
    assert found.levels[:7].tolist() == [145, 135, 112, 112, 119, 106, 6]
    assert (found.peak_bytes, found.peak_event, found.extra_seconds) == (145, 0, 0.0)


def test_a_dropped_storage_is_away_between_its_transient_death_and_its_unpack() -> None:
    trace = layers(3)
    timeline = Timeline(trace)
    recipes = timeline.recipes
    large = [s for s in recipes.saved if trace.storages[s].bytes == 300]
    assert len(large) == 3
    found = timeline.evaluate(recomputations_for(recipes, large))
    difference = (timeline.plain().levels - found.levels)[: len(trace.events)].tolist()
    assert max(difference) == 900  # at the end of forward none of the three is there
    assert min(difference) == 0
    assert found.extra_seconds == pytest.approx(3.0)
    assert found.peak_bytes < timeline.plain().peak_bytes


def test_the_plan_of_nothing_is_plain() -> None:
    trace = drawn(3, forward=10, dispatch=0.5)
    timeline = Timeline(trace)
    for nothing in ({}, {trace.forward_events + 1: []}):
        assert timeline.evaluate(nothing).levels.tolist() == timeline.plain().levels.tolist()
        assert timeline.evaluate(nothing).extra_seconds == 0.0


@each_seed(20)
def test_categories_add_up_to_the_level(seed: int) -> None:
    trace = drawn(seed, forward=10, rng_bytes=5)
    timeline = Timeline(trace)
    plan = some_plan(timeline.recipes, random.Random(seed))
    bands = timeline.by_category(plan)
    assert (sum(bands.values()) == timeline.evaluate(plan).levels).all()
    assert set(bands) == set(Category)
    assert bands[Category.PARAMETER].tolist()[0] == sum(
        s.bytes for s in trace.storages if s.category is Category.PARAMETER and s.birth == BEFORE_STEP
    )


def test_what_autograd_asks_for_costs_once_however_much_runs_for_it() -> None:
    """A chain of recomputations for one tensor leaves autograd once, and notes the arguments of each operation once in a pass."""
    trace = network(3, dispatch=0.1)
    timeline = Timeline(trace)
    one = next(number for number, recipe in enumerate(timeline.recipes.recipes) if recipe.operations)
    first, second = sorted(timeline.saves_at)[:2]
    once, twice = timeline.seconds({first: [one]}), timeline.seconds({first: [one, one]})
    assert twice - once == pytest.approx(timeline.run_seconds(one))
    assert once > timeline.least_seconds(one) > timeline.run_seconds(one)
    # For another tensor it is asked again, and nothing is noted again.
    assert timeline.seconds({first: [one], second: [one]}) == pytest.approx(twice + 1.4 * trace.recomputed_seconds)
