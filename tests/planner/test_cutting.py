"""The cut of a chain into stages, compared with every cut there is."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from itertools import combinations, permutations, product

import pytest

from memfit.errors import InfeasibleError, InputError
from memfit.hardware.machine import known_machine
from memfit.hardware.topology import PeerLink, Topology
from memfit.planner import cutting
from memfit.planner.baselines.equal_parameters import equal_parameter_ends
from memfit.planner.cut_costs import cost_of
from memfit.planner.cutting import cut
from memfit.planner.schedules import Action, Order, rank_orders, simulate
from memfit.values.stages import Cut, Line, Part, Parts, Recompute, Schedule, Shared, StageDevice
from sweeps import each_seed

GPIPE, ONE_ONE, INTERLEAVED = Schedule.GPIPE, Schedule.ONE_FORWARD_ONE_BACKWARD, Schedule.INTERLEAVED


def _chain(rng: random.Random, most: int) -> Parts:
    parts = tuple(
        Part(
            f"block.{i}",
            float(rng.randint(1, 20)),
            float(rng.randint(1, 40)),
            rng.randint(0, 50),
            rng.randint(0, 9),
            rng.randint(0, 9),
            rng.randint(0, 9),
            float(rng.choice([0, 0, 3])),
            "a reason" if rng.random() < 0.15 else "",
        )
        for i in range(rng.randint(2, most))
    )
    shared = (Shared("tied", rng.randint(1, 30), (0, len(parts) - 1)),) if rng.random() < 0.4 else ()
    menus: dict[tuple[int, int], tuple[Recompute, ...]] = {}
    for first, end in combinations(range(len(parts) + 1), 2):
        if rng.random() < 0.5:
            kept = sum(part.kept_bytes for part in parts[first:end])
            full = Recompute(kept, kept + 5)
            menus[first, end] = (
                full,
                Recompute(kept // 2, kept // 2 + 6, float(rng.randint(1, 9))),
                Recompute(kept // 4, kept // 4 + 9, 20.0),
            )
    return Parts(parts, shared, rng.randint(0, 5), menus)


def _line(rng: random.Random, most: int) -> Line:
    number = rng.randint(1, most)
    devices = tuple(StageDevice(rng.randint(60, 600), rng.choice([0.5, 1.0, 1.0, 2.0])) for _ in range(number))
    peers = tuple(
        PeerLink(a, b, rng.choice([0.5, 1.0, 4.0]), rng.choice([0.0, 1.0])) for a, b in combinations(range(number), 2)
    )
    return Line(devices, peers if rng.random() < 0.6 else ())


def _every_cut(
    parts: Parts,
    line: Line,
    micro_batches: int,
    schedule: Schedule,
    per_device: int,
    *,
    any_order: bool,
    stages: int | None,
) -> tuple[float, float]:
    """The least seconds of a step, and of the slowest device for a micro-batch, by looking at everything; from the definitions alone."""
    best = slowest = float("inf")
    total = len(parts.parts)
    for number in [stages] if stages else range(1, len(line.devices) + 1):
        try:
            orders = rank_orders(schedule, number, micro_batches, per_device)
        except InputError:
            continue
        for devices in permutations(range(len(line.devices)), number) if any_order else [tuple(range(number))]:
            for inner in combinations(range(1, total), number * per_device - 1):
                ends = (*inner, total)
                if not all(parts.may_end(end) for end in ends):
                    continue
                ranges = list(zip((0, *inner), ends, strict=True))
                costs = [parts.stage(*one) for one in ranges]
                where = [devices[s % number] for s in range(len(ranges))]
                for ways in product(*(cost.menu for cost in costs)):
                    if not _fit(parts, line, orders, ranges, ways, devices):
                        continue
                    forward = [c.forward_seconds / line.devices[d].speed for c, d in zip(costs, where, strict=True)]
                    backward = [
                        (c.backward_seconds + w.extra_seconds) / line.devices[d].speed
                        for c, w, d in zip(costs, ways, where, strict=True)
                    ]
                    crossing = [
                        line.message_seconds(a, b, parts.parts[end - 1].boundary_bytes)
                        for a, b, end in zip(where, where[1:], ends, strict=False)
                    ]
                    played = simulate(orders, partial(_seconds, forward, backward), crossing)
                    update = dict.fromkeys(devices, 0.0)
                    load = dict.fromkeys(devices, 0.0)
                    for s, d in enumerate(where):
                        update[d] += costs[s].update_seconds / line.devices[d].speed
                        load[d] += forward[s] + backward[s]
                    best = min(best, played.seconds + max(update.values()))
                    slowest = min(slowest, max(load.values()))
    return best, slowest


def _seconds(forward: Sequence[float], backward: Sequence[float], action: Action) -> float:
    return (backward if action.backward else forward)[action.stage]


def _fit(
    parts: Parts,
    line: Line,
    orders: Sequence[Order],
    ranges: Sequence[tuple[int, int]],
    ways: Sequence[Recompute],
    devices: Sequence[int],
) -> bool:
    """Whether every device has the bytes, walking through what it runs."""
    for rank, device in enumerate(devices):
        mine = range(rank, len(ranges), len(devices))
        state = parts.fixed_bytes + sum(part.state_bytes for s in mine for part in parts.parts[slice(*ranges[s])])
        for tied in parts.shared:
            state += tied.bytes * any(ranges[s][0] <= p < ranges[s][1] for s in mine for p in tied.parts)
        held = 0
        for action in orders[rank]:
            way = ways[action.stage]
            held -= way.kept_bytes if action.backward else 0
            if state + held + way.pass_bytes > line.devices[device].bytes:
                return False
            held += 0 if action.backward else way.kept_bytes
    return True


@each_seed(40, 600)
def test_a_cut_is_the_best_of_all_cuts(seed: int) -> None:
    rng = random.Random(seed)
    parts, line = _chain(rng, 6 if seed % 10 else 12), _line(rng, 3 if seed % 10 else 4)
    if not seed % 10:
        parts = Parts(parts.parts, parts.shared, parts.fixed_bytes)
    schedule = rng.choice([GPIPE, ONE_ONE])
    micro_batches = rng.randint(1, 6)
    any_order = rng.random() < 0.3
    _compare(parts, line, micro_batches, schedule, 1, any_order=any_order)


@each_seed([0, 43, 87], 88)
def test_chains_of_every_length_on_unequal_devices(seed: int) -> None:
    """From 2 to 12 parts on 1 to 4 devices, no two of which have the same bytes, speed or links, under both schedules."""
    length, number = 2 + seed // 8, 1 + seed // 2 % 4
    schedule = (GPIPE, ONE_ONE)[seed % 2]
    rng = random.Random(2000 + seed)
    parts = tuple(
        Part(
            f"block.{i}", rng.uniform(1, 20), rng.uniform(1, 40), rng.randint(0, 50), rng.randint(1, 9), rng.randint(0, 9),
            rng.randint(1, 9), rng.uniform(0, 3),
        )
        for i in range(length)
    )  # fmt: skip
    sizes, speeds = rng.sample(range(40, 700), number), rng.sample([0.25, 0.5, 1.0, 2.0, 3.0], number)
    pairs = list(combinations(range(number), 2))
    rates = rng.sample([0.25, 0.5, 1.0, 2.0, 4.0, 8.0], len(pairs))
    peers = tuple(PeerLink(a, b, rate, rng.choice([0.0, 1.0])) for (a, b), rate in zip(pairs, rates, strict=True))
    devices = tuple(StageDevice(size, speed) for size, speed in zip(sizes, speeds, strict=True))
    chain = Parts(parts, (), 0, recompute=length < 7)
    _compare(chain, Line(devices, peers), rng.randint(1, 6), schedule, 1, any_order=length < 8)


@each_seed(12, 200)
def test_interleaved_stages_are_the_best_of_all(seed: int) -> None:
    rng = random.Random(1000 + seed)
    parts, line = _chain(rng, 6), _line(rng, 2)
    _compare(parts, line, 2 * rng.randint(1, 3), INTERLEAVED, 2, any_order=rng.random() < 0.3)


@each_seed(40, 400)
def test_a_search_that_ends_early_takes_what_fits_or_says_what_is_lacking(seed: int) -> None:
    """In the order of seconds it may not have come to a cut that fits, of which it hears when it looks for what lacks least."""
    rng = random.Random(2000 + seed)
    parts, line = _chain(rng, 6), _line(rng, 2)
    schedule, per_device = rng.choice([(INTERLEAVED, 2), (ONE_ONE, 1), (GPIPE, 1)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cutting, "MOST_NODES", rng.choice([0, 2, 6]))
        found = _cut_or_error(parts, line, schedule, per_device)
    if isinstance(found, Cut):
        assert all(peak <= line.devices[d].bytes for d, peak in zip(found.devices, found.peak_bytes, strict=True))
    elif found is not None:
        assert (found.minimum_bytes or 0) > (found.budget_bytes or 0)


def _cut_or_error(parts: Parts, line: Line, schedule: Schedule, per_device: int) -> Cut | InfeasibleError | None:
    try:
        return cut(parts, line, 4, schedule, per_device=per_device)
    except InfeasibleError as error:
        return error
    except InputError:
        return None


def _compare(
    parts: Parts, line: Line, micro_batches: int, schedule: Schedule, per_device: int, *, any_order: bool
) -> None:
    best, slowest = _every_cut(parts, line, micro_batches, schedule, per_device, any_order=any_order, stages=None)
    if best == float("inf"):
        with pytest.raises((InfeasibleError, InputError)):
            cut(parts, line, micro_batches, schedule, per_device=per_device, any_order=any_order)
        return
    found = cut(parts, line, micro_batches, schedule, per_device=per_device, any_order=any_order)
    assert found.step_seconds == pytest.approx(best, rel=1e-12)
    assert found.bound_seconds == found.step_seconds
    assert all(peak <= line.devices[d].bytes for d, peak in zip(found.devices, found.peak_bytes, strict=True))
    balanced = cut(
        parts, line, micro_batches, schedule, per_device=per_device, any_order=any_order, objective="slowest"
    )
    assert balanced.slowest_seconds == pytest.approx(slowest, rel=1e-12)


def _equal(blocks: int, kept: int = 4) -> Parts:
    return Parts(tuple(Part(f"block.{i}", 1.0, 2.0, 10, kept, 1) for i in range(blocks)))


def test_large_chains_are_cut_in_seconds_and_say_how_much_may_be_missing() -> None:
    rng = random.Random(0)
    parts = Parts(tuple(Part(str(i), rng.uniform(1, 3), rng.uniform(2, 6), 10, 4, 1) for i in range(50)))
    line = Line((StageDevice(10_000),) * 6)
    found = cut(parts, line, 16, stages=6)
    assert 0.97 * found.step_seconds <= found.bound_seconds <= found.step_seconds
    assert found.step_seconds < cost_of(parts, line, equal_parameter_ends(parts, 6), 16).step_seconds


@pytest.mark.parametrize("schedule", [GPIPE, ONE_ONE])
def test_equal_blocks_are_cut_into_equal_stages_however_many_ties_there_are(schedule: Schedule) -> None:
    found = cut(_equal(48), Line((StageDevice(10_000),) * 8), 8, schedule, stages=8)
    assert [stage.end - stage.first for stage in found.stages] == [6] * 8
    assert found.step_seconds == 18 * (8 + 7)
    assert found.bound_seconds >= 0.9 * found.step_seconds


def test_the_first_stage_of_1f1b_has_most_in_flight_so_it_gets_fewer_blocks() -> None:
    found = cut(_equal(6, 8), Line((StageDevice(75),) * 2), 8, ONE_ONE)
    assert [stage.end - stage.first for stage in found.stages] == [
        2,
        4,
    ]  # three in the first would take 30 + 2 * 24 + 1 bytes
    assert found.peak_bytes == (20 + 2 * 16 + 1, 40 + 32 + 1)


def test_gpipe_needs_more_bytes_than_1f1b() -> None:
    line = Line((StageDevice(90),) * 2)
    assert cut(_equal(6), line, 8, ONE_ONE)
    with pytest.raises(InfeasibleError, match="lacks least, device [01] has 90 B and needs") as caught:
        cut(_equal(6), line, 8, GPIPE, stages=2)
    more = Line((StageDevice(int(caught.value.minimum_bytes or 0)),) * 2)
    assert cut(_equal(6), more, 8, GPIPE, stages=2)


def test_a_faster_device_gets_more_blocks_and_a_slow_link_is_avoided() -> None:
    found = cut(_equal(9), Line((StageDevice(1000), StageDevice(1000, 2.0))), 32, stages=2)
    assert [stage.end - stage.first for stage in found.stages] == [3, 6]
    parts = tuple(Part(str(i), 1.0, 2.0, 1, 1, 0, 1000 if i % 2 else 1) for i in range(8))
    devices = (StageDevice(1000),) * 2
    slow = cut(Parts(parts), Line(devices, (PeerLink(0, 1, 100.0),)), 8, stages=2)
    assert slow.stages[0].end % 2 == 1


def test_recomputing_is_taken_where_the_bytes_ask_for_it() -> None:
    menus = {(0, 2): (Recompute(40, 45), Recompute(8, 30, 1.0)), (2, 4): (Recompute(40, 45), Recompute(8, 30, 1.0))}
    parts = Parts(
        tuple(Part(str(i), 1.0, 2.0, 10, 20, 5, cut_after="" if i == 1 else "no") for i in range(4)), menus=menus
    )
    found = cut(parts, Line((StageDevice(70),) * 2), 4, stages=2)
    assert [stage.recompute.extra_seconds for stage in found.stages] == [1.0, 0.0]  # the last stage has one in flight


def test_a_cut_of_ones_own_is_judged_alike() -> None:
    rng = random.Random(7)
    parts, line = _equal(9), Line((StageDevice(500), StageDevice(500, 2.0)))
    best = cut(parts, line, 8, stages=2)
    assert cost_of(parts, line, [stage.end for stage in best.stages], 8).step_seconds == best.step_seconds
    by_hand = cost_of(parts, line, equal_parameter_ends(parts, 2), 8)
    assert by_hand.step_seconds > best.step_seconds
    sizes = Parts(tuple(Part(str(i), 1, 1, rng.randint(1, 50)) for i in range(9)))
    ends = equal_parameter_ends(sizes, 3)
    largest = max(sizes.stage(a, b).state_bytes for a, b in zip((0, *ends), ends, strict=False))
    assert largest == min(
        max(sizes.stage(a, b).state_bytes for a, b in ((0, i), (i, j), (j, 9))) for i, j in combinations(range(1, 9), 2)
    )


def test_cuts_go_to_json_and_back() -> None:
    made = cut(_equal(6), Line((StageDevice(500),) * 2), 4, INTERLEAVED, per_device=2, stages=2)
    assert Cut.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert 0 < made.bubble < 1


def test_lines_come_from_a_topology() -> None:
    topology = Topology((known_machine("t4"), known_machine("v100")), (), (PeerLink(0, 1, 1e9),))
    line = Line.of(topology, [10, 20])
    assert [device.bytes for device in line.devices] == [10, 20]
    assert line.devices[1].speed == pytest.approx(15.7 / 8.1)
    with pytest.raises(InputError, match="3 budgets for 2 devices"):
        Line.of(topology, [1, 2, 3])


def test_bad_input_is_told() -> None:
    line = Line((StageDevice(100),) * 2)
    with pytest.raises(InputError, match="the model has 1: take fewer devices"):
        cut(_equal(1), line, 2, stages=2)
    with pytest.raises(InputError, match="3 stages for 2 devices"):
        cut(_equal(4), line, 2, stages=3)
    with pytest.raises(InputError, match="give their order"):
        cut(_equal(9), Line((StageDevice(100),) * 7), 8, any_order=True)
    with pytest.raises(InputError, match="must be more than 0"):
        StageDevice(0)
    never = Parts(tuple(Part(str(i), 1.0, 1.0, cut_after="no") for i in range(3)))
    with pytest.raises(InputError, match="cut at 0 of the 2 boundaries between its parts; at others, most often, no"):
        cut(never, line, 2, stages=2)
    once = Parts((Part("0", 1.0, 1.0), *never.parts))
    with pytest.raises(InputError, match="into 4 stages: it may be cut at 1 of the 3 boundaries"):
        cut(once, line, 2, Schedule.INTERLEAVED, stages=2, per_device=2)
    apart = Line((StageDevice(100),) * 3, (PeerLink(0, 1, 1e9),))
    with pytest.raises(InputError, match="no link joins these devices"):
        cut(_equal(9), apart, 3, stages=3)
