"""Copies and what they cost against a clock that ticks; plans that may offload against those that may not, and against every plan there is."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest

from memfit.hardware.machine import Link
from memfit.planner.budget_search import CLOSE
from memfit.planner.offloading import OffloadSolver
from memfit.planner.recipes import ALIGNMENT_BYTES, PREFETCH_DISTANCES, Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planner.script_compiler import compile_script
from memfit.planner.solver import Solver
from memfit.planner.timeline import Timeline
from memfit.planning import Planning
from memfit.units import format_bytes
from memfit.values.bundle import TraceBundle
from memfit.values.plan import in_places
from memfit.values.script import Script
from memfit.values.trace import Trace
from planner.test_timeline import offloading_plan
from planner.traces import Writer, drawn, layers, network
from sweeps import each_seed

FAST = Link("disk", 1e9, 1e9, least_bytes=1)
SLOW = Link("disk", 20.0, 40.0, least_bytes=1)


def chain(near: Link, far: Link, free_bytes: int | None) -> Link:
    """A tier with so much room, and one below it."""
    return replace(near, tier="host", free_bytes=free_bytes, below=far)


def solvers(trace: Trace, link: Link = SLOW) -> tuple[Solver, OffloadSolver]:
    return Solver(Timeline(trace)), OffloadSolver(Timeline(trace, Recipes(trace, link)))


# -- the clock ---------------------------------------------------------------------------------------------------------------


def ticking(trace: Trace, recipes: Recipes, recomputations: Mapping[int, Sequence[int]]) -> int:
    """Seconds that a pass takes under a plan, counted one by one, when all times are whole seconds."""
    ways = [recipes.reloads[r] for runs in recomputations.values() for r in runs if r in recipes.reloads]
    down = {}
    for way in sorted(ways, key=lambda w: w.gone_by):
        down[way.storage] = way
    program: list[tuple[str, int]] = []  # what computing does, in order

    def compute(seconds: float) -> None:
        assert seconds == int(seconds)
        program.extend([("tick", 0)] * int(seconds))

    for event, code in enumerate(trace.events[: trace.pass_events]):
        for r in recomputations.get(event, ()):
            if r in recipes.reloads:
                program.append(("up", recipes.reloads[r].storage))
                continue
            program.extend(("need", s) for s in recipes.recipes[r].inputs)
            compute(recipes.recipes[r].seconds)
        if code < 0:
            program.append(("need", trace.saves[~code].storage))
            continue
        compute(trace.operations[code].seconds)
        program.extend(("down", s) for s, way in sorted(down.items()) if way.ready == event)
        program.extend(("gone", s) for s, way in sorted(down.items()) if way.gone_by == event)
    queues: dict[tuple[str, int], deque[list[int]]] = {
        (way, tier): deque() for way in ("down", "up") for tier in range(len(recipes.tiers))
    }
    left: dict[tuple[str, int], int] = {}
    time = at = 0
    while at < len(program):
        what, s = program[at]
        if what in {"down", "up"}:
            seconds = down[s].out_seconds if what == "down" else down[s].in_seconds
            queues[what, down[s].tier].append([s, int(seconds)])
            left[what, s] = left.get((what, s), 0) + 1
            at += 1
            continue
        waits = left.get(("down" if what == "gone" else "up", s), 0) if what != "tick" else 0
        if what != "tick" and not waits:
            at += 1
            continue
        at += what == "tick"
        time += 1
        for (name, _), queue in queues.items():
            if queue:
                queue[0][1] -= 1
                if queue[0][1] == 0:
                    left[name, queue.popleft()[0]] -= 1
    return time


def whole_seconds(trace: Trace) -> Trace:
    return replace(trace, operations=tuple(replace(op, seconds=float(round(op.seconds))) for op in trace.operations))


@each_seed(80)
def test_seconds_are_those_of_a_clock_that_ticks(seed: int) -> None:
    chance = random.Random(seed)
    trace = whole_seconds(chance.choice((drawn(seed, forward=10), network(seed, blocks=4))))
    # Every copy takes a whole number of seconds, whatever its size.
    link = Link("disk", 1e30, 1e30, float(chance.choice((1, 2, 5))), least_bytes=1)
    if seed % 2:
        link = chain(replace(link, latency_seconds=1.0), link, None)
    recipes = Recipes(trace, link)
    timeline = Timeline(trace, recipes)
    for _ in range(3):
        # Each storage is reloaded once: a second reload in one queue is the same storage to this clock.
        plan = offloading_plan(recipes, chance)
        once: set[int] = set()
        plan = {
            e: [r for r in runs if r not in recipes.reloads or not (r in once or once.add(r))]  # type: ignore[func-returns-value]
            for e, runs in plan.items()
        }
        expected = ticking(trace, recipes, plan) - trace.pass_seconds
        assert timeline.seconds(plan) == pytest.approx(expected)


def all_offloaded(recipes: Recipes, lag: int) -> dict[int, list[int]]:
    return recomputations_for(
        recipes, (), offloaded={s: ways[lag] for s, ways in recipes.reloads_of.items() if s in recipes.saved}
    )


def test_a_link_that_takes_no_time_hides_all_and_one_that_takes_long_hides_what_fits_in_the_pass() -> None:
    trace = layers(6)
    exposed = []
    for bandwidth in (1e12, 100.0, 10.0, 1.0):
        recipes = Recipes(trace, Link("disk", bandwidth, bandwidth, least_bytes=1))
        copying = Timeline(trace, recipes).copying(all_offloaded(recipes, 2))
        assert copying.exposed_seconds <= copying.copy_seconds
        assert copying.exposed_seconds >= copying.copy_seconds - 2 * trace.pass_seconds
        exposed.append(copying.exposed_seconds)
    assert exposed == sorted(exposed)
    assert exposed[0] < 1e-6


def test_what_is_copied_at_once_is_waited_for_longest_and_takes_least() -> None:
    trace = layers(6)
    recipes = Recipes(trace, Link("disk", 100.0, 100.0, least_bytes=1))
    timeline = Timeline(trace, recipes)
    peaks = []
    for lag in range(len(PREFETCH_DISTANCES)):
        found = timeline.evaluate(all_offloaded(recipes, lag))
        peaks.append(found.peak_bytes)
    assert peaks == sorted(peaks)
    seconds = [timeline.seconds(all_offloaded(recipes, lag)) for lag in range(len(PREFETCH_DISTANCES))]
    assert max(seconds[1:]) < seconds[0]


# -- what may be offloaded -------------------------------------------------------------------------------------------------------


def test_what_cannot_run_again_can_be_offloaded_and_what_backward_writes_cannot() -> None:
    w = Writer()
    weight = w.before(5)
    a = w.one((weight,), 100, rerunnable=False)  # event 0
    kept = w.save(a)
    b = w.one((a,), 100, random=True)  # 1
    drawn_once = w.save(b)
    c = w.one((b,), 30)  # 2
    written = w.save(c)
    w.run((c,), writes=(b,))  # 3
    w.backward()
    g = w.one((c,), 7)
    w.run((w.unpack(written), g), writes=(c,))
    w.run((w.unpack(drawn_once), g), (7,))
    w.run((w.unpack(kept), g), (7,))
    recipes = Recipes(w.trace(), FAST)
    assert a not in recipes.rebuildable
    assert set(recipes.reloads_of) == {a, b}
    # After the last write, never after the first.
    assert {recipes.reloads[r].ready for r in recipes.reloads_of[b]} == {3}


def test_sizes_that_values_decide_have_no_place_below() -> None:
    w = Writer()
    a = w.one((w.before(5),), 100, by_values=True)
    save = w.save(a)
    w.backward()
    w.one((w.unpack(save),), 5)
    assert not Recipes(w.trace(), FAST).reloads_of


def test_small_storages_stay() -> None:
    recipes = Recipes(layers(3), replace(FAST, least_bytes=200))
    assert {recipes.trace.storages[s].bytes for s in recipes.reloads_of} == {300}


# -- plans -------------------------------------------------------------------------------------------------------------------


@each_seed((1,), 12)
def test_offloading_allowed_is_never_slower_and_fits_where_nothing_did(seed: int) -> None:
    trace = network(seed, blocks=5, dispatch=0.001) if seed else layers(5)
    without, allowed = solvers(trace)
    assert allowed.smallest().peak <= without.smallest().peak
    low, high = allowed.smallest().peak, without.plain.peak
    before = float("inf")
    for fraction in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        budget = round(low + fraction * (high - low))
        found = allowed.solve(budget)
        assert found is not None
        assert found.peak <= budget
        assert found.seconds <= before + 1e-9
        before = found.seconds
        other = without.solve(budget)
        assert other is None or found.seconds <= other.seconds + 1e-9
        assert allowed.bound(budget) <= found.seconds + 1e-9


def test_a_free_link_is_used_instead_of_recomputing() -> None:
    trace = layers(6)
    without, allowed = solvers(trace, FAST)
    budget = (without.smallest().peak + without.plain.peak) // 2
    found, other = allowed.solve(budget), without.solve(budget)
    assert found is not None
    assert other is not None
    assert found.evaluation.copying.offloaded
    assert found.seconds < 1e-3 < other.seconds


@pytest.mark.parametrize("tiers", [1, 2])
@each_seed(3, 25)
def test_no_plan_of_any_kind_is_below_the_bound_and_few_are_faster_than_ours(seed: int, tiers: int) -> None:
    """Every way to keep, recompute or offload, to any tier that has the capacity, at every lag, in one window."""
    chance = random.Random(seed)
    trace = drawn(seed, forward=7, most_saved=4, plain_operations=True)
    link = Link("disk", chance.choice((10.0, 100.0, 1e4)), chance.choice((10.0, 100.0, 1e4)), least_bytes=1)
    if tiers == 2:
        link = chain(Link("host", 1e4, 1e4, least_bytes=1), link, chance.choice((0, 1, 2)) * ALIGNMENT_BYTES)
    _, solver = solvers(trace, link)
    recipes, timeline = solver.recipes, solver.timeline
    saved = sorted(recipes.saved & (recipes.rebuildable | recipes.reloads_of.keys()))
    plans = []
    for lag in range(len(PREFETCH_DISTANCES)):
        for ways in product(range(2 + tiers), repeat=len(saved)):
            dropped = [s for s, way in zip(saved, ways, strict=True) if way == 1]
            offloaded = {
                s: recipes.reloads_of[s][(way - 2) * len(PREFETCH_DISTANCES) + lag]
                for s, way in zip(saved, ways, strict=True)
                if way >= 2 and s in recipes.reloads_of
            }
            recomputations = recomputations_for(recipes, dropped, offloaded=offloaded)
            if not timeline.fits_lower_tiers(recomputations):
                continue
            found = timeline.evaluate(recomputations)
            plans.append((found.peak_bytes, found.extra_seconds))
    for budget in sorted({peak for peak, _ in plans})[::5]:
        best = min((seconds for peak, seconds in plans if peak <= budget), default=None)
        assert solver.bound(budget) <= min(seconds for peak, seconds in plans if peak <= budget) + 1e-9
        ours = solver.solve(budget)
        assert ours is not None
        assert best is not None
        assert ours.seconds <= best + 1e-9


@each_seed(1, 10)
def test_no_more_lies_below_than_there_is_room_for(seed: int) -> None:
    trace = network(seed, blocks=5)
    offloaded = []
    for places in (0, 1, 3, None):
        room = None if places is None else places * ALIGNMENT_BYTES
        solver = OffloadSolver(Timeline(trace, Recipes(trace, replace(FAST, free_bytes=room))))
        smallest, plain = solver.smallest().peak, solver.plain.peak
        for fraction in (0.0, 0.3, 0.7):
            found = solver.solve(round(smallest + fraction * (plain - smallest)))
            assert found is not None
            assert places is None or len(found.evaluation.copying.offloaded) <= places
            offloaded.append(len(found.evaluation.copying.offloaded))
    assert offloaded[:3] == [0, 0, 0]
    assert max(offloaded[-3:]) > 1


# -- two tiers ---------------------------------------------------------------------------------------------------------------

NEAR = Link("host", 1e9, 1e9, least_bytes=1)
FAR = Link("disk", 1e3, 1e3, least_bytes=1)


def offloaded_to_tiers(solver: OffloadSolver, budget: int) -> tuple[float, dict[str, frozenset[int]]]:
    """Seconds of the plan for a budget, and what it offloads to each tier."""
    found = solver.solve(budget)
    assert found is not None
    assert found.peak <= budget
    return found.seconds, {link.tier: link.offloaded for link in found.evaluation.copying.links}


def with_room(trace: Trace, free_bytes: int | None, far: Link) -> OffloadSolver:
    return OffloadSolver(Timeline(trace, Recipes(trace, chain(NEAR, far, free_bytes))))


@pytest.mark.parametrize("places", [1, 3])
def test_what_the_nearer_tier_has_no_room_for_goes_to_the_next_and_what_is_read_soonest_stays(places: int) -> None:
    trace = layers(6)
    solver = with_room(trace, places * ALIGNMENT_BYTES, FAR)
    smallest = solver.smallest()
    seconds, offloaded = offloaded_to_tiers(solver, (solver.plain.peak + smallest.peak) // 2)
    assert len(offloaded["host"]) == places
    assert len(offloaded["disk"]) >= 1
    uses = solver.timeline.unpack_uses
    assert max(uses[s][0][0] for s in offloaded["host"]) < min(uses[s][0][0] for s in offloaded["disk"])
    near = OffloadSolver(Timeline(trace, Recipes(trace, replace(NEAR, free_bytes=places * ALIGNMENT_BYTES))))
    assert seconds < offloaded_to_tiers(near, (solver.plain.peak + smallest.peak) // 2)[0]


@each_seed((5,), 8)
def test_more_room_and_a_tier_more_are_never_slower(seed: int) -> None:
    """But for the little by which a plan may be from the bound when the search ends."""
    trace = network(seed, blocks=4, dispatch=0.001)
    rooms = [with_room(trace, n * ALIGNMENT_BYTES, (SLOW, FAR)[seed // 2 % 2]) for n in (0, 1, 3, 100)]
    low, high = max(solver.smallest().peak for solver in rooms), rooms[0].plain.peak
    for fraction in (0.0, 0.5):
        budget = round(low + fraction * (high - low))
        seconds = [offloaded_to_tiers(solver, budget)[0] for solver in rooms]
        assert all(more <= less + CLOSE * trace.pass_seconds for less, more in pairwise(seconds))
        assert all(solver.bound(budget) <= took + 1e-9 for solver, took in zip(rooms, seconds, strict=True))
        for solver, took in zip(rooms, seconds, strict=True):
            fewer = solver.without_last_tier.solve(budget)
            assert fewer is None or took <= fewer.seconds + 1e-9


def test_a_disk_that_takes_longer_than_recomputing_is_left_alone() -> None:
    trace = layers(6)
    snail = Link("disk", 1e-3, 1e-3, least_bytes=1)
    solver = with_room(trace, 2 * ALIGNMENT_BYTES, snail)
    near = OffloadSolver(Timeline(trace, Recipes(trace, replace(NEAR, free_bytes=2 * ALIGNMENT_BYTES))))
    low, high = near.smallest().peak, near.plain.peak
    for fraction in (0.1, 0.5, 0.8):
        seconds, offloaded = offloaded_to_tiers(solver, round(low + fraction * (high - low)))
        assert offloaded.keys() <= {"host"}
        assert seconds <= offloaded_to_tiers(near, round(low + fraction * (high - low)))[0]


@each_seed(1, 4)
def test_no_tier_holds_more_than_it_has_room_for(seed: int) -> None:
    trace = network(seed, blocks=4)
    near, far = seed % 3, (seed + 1) % 4
    solver = with_room(trace, near * ALIGNMENT_BYTES, replace(FAR, free_bytes=far * ALIGNMENT_BYTES))
    smallest, plain = solver.smallest().peak, solver.plain.peak
    for fraction in (0.0, 0.3, 0.7):
        _, offloaded = offloaded_to_tiers(solver, round(smallest + fraction * (plain - smallest)))
        assert len(offloaded.get("host", ())) <= near
        assert len(offloaded.get("disk", ())) <= far


def test_a_storage_with_reloads_from_two_tiers_is_copied_down_once() -> None:
    trace = layers(3)
    recipes = Recipes(trace, chain(NEAR, FAR, None))
    storage = next(s for s in sorted(recipes.reloads_of) if s in recipes.saved)
    near, far = recipes.reloads_of[storage][0], recipes.reloads_of[storage][len(PREFETCH_DISTANCES)]
    event = Timeline(trace, recipes).unpack_uses[storage][0][0]
    recomputations = {event: [near, far]}
    assert recipes.copied_down(recomputations)[storage].tier == int(
        recipes.reloads[far].gone_by >= recipes.reloads[near].gone_by
    )
    assert len(compile_script(recipes, recomputations).swaps) == 1


# -- scripts and plans -------------------------------------------------------------------------------------------------------


@each_seed(20)
def test_a_script_names_places_apart_and_moments_in_order_and_survives_json(seed: int) -> None:
    trace = network(seed, blocks=4)
    recipes = Recipes(trace, chain(NEAR, SLOW, None) if seed % 2 else SLOW)
    recomputations = offloading_plan(recipes, random.Random(seed))
    script = compile_script(recipes, recomputations)
    assert Script.from_json(script.to_json()) == script
    copying = Timeline(trace, recipes).copying(recomputations)
    assert script.swaps.keys() == copying.offloaded
    assert {link.tier for link in copying.links} == script.lower_bytes.keys()
    for link in copying.links:
        ends = 0
        own = [swap for swap in script.swaps.values() if swap.tier == link.tier]
        assert {s for s, swap in script.swaps.items() if swap in own} == link.offloaded
        for swap in sorted(own, key=lambda s: s.offset):
            assert swap.offset >= ends
            ends = swap.offset + swap.bytes
            assert swap.begin <= swap.gone_by
        assert script.lower_bytes[link.tier] <= link.lower_bytes


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda s: s["swaps"].clear(), "is to come back, but was not copied down"),
        (lambda s: next(iter(s["swaps"].values())).__setitem__(3, 10**6), "cannot be copied down by operation"),
        (lambda s: next(iter(s["swaps"].values())).__setitem__(2, -1), "cannot be copied down by operation"),
        (lambda s: next(iter(s["swaps"].values())).__setitem__(4, "attic"), "is to go to 'attic', tiers are host and"),
        (lambda s: [v.__setitem__(0, 0) for v in s["swaps"].values()], "overlaps another"),
        (
            lambda s: s["swaps"].update({"1000000": [1 << 40, 1, 0, 0, "disk"]}),
            "storage 1000000 is made by no operation",
        ),
    ],
)
def test_a_script_edited_into_nonsense_is_refused(edit: object, sentence: str) -> None:
    recipes = Recipes(layers(4), SLOW)
    data = compile_script(recipes, all_offloaded(recipes, 1)).to_json()
    edit(data)  # type: ignore[operator]
    with pytest.raises(ValueError, match=sentence):
        Script.from_json(data)


def test_a_plan_says_what_is_offloaded_and_how_much_of_it_hides() -> None:
    trace = layers(6)
    search = Planning(TraceBundle.of(trace, lower_tier=FAST))
    plan = search.plan((search.smallest()[0] + search.plain_peak()) // 2)
    assert plan.script.swaps
    assert plan.prediction.copy_seconds > 0
    hidden = 1 - plan.prediction.exposed_seconds / plan.prediction.copy_seconds
    assert 0 < hidden <= 1
    assert f"of which {100 * hidden:.0f} % overlap with computing" in plan.explain()
    below = sum(m.swapped_bytes for m in plan.by_module)
    assert below == sum(swap.bytes for swap in plan.script.swaps.values())
    assert plan.from_json(plan.to_json()) == plan


def test_a_plan_says_of_each_tier_what_lies_there_and_how_much_of_the_copying_hides() -> None:
    trace = layers(6)
    link = chain(NEAR, FAR, ALIGNMENT_BYTES)
    search = Planning(TraceBundle.of(trace, lower_tier=link))
    plan = search.plan((search.smallest()[0] + search.plain_peak()) // 2)
    tiers = plan.prediction.tiers
    assert [use.tier for use in tiers] == ["host", "disk"]
    for use in tiers:
        assert use.bytes == sum(swap.bytes for swap in plan.script.swaps.values() if swap.tier == use.tier)
        assert 0 <= use.exposed_seconds <= use.copy_seconds
        assert f"  {in_places([use.tier])}: {format_bytes(use.bytes)}, " in plan.explain()
        assert f"{100 * use.hidden_share:.0f} % overlap" in plan.explain()
    assert sum(use.copy_seconds for use in tiers) == pytest.approx(plan.prediction.copy_seconds)
    assert sum(use.exposed_seconds for use in tiers) == pytest.approx(plan.prediction.exposed_seconds)
    assert plan.from_json(plan.to_json()) == plan
