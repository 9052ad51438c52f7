"""Schedules on chains: optima against exhaustive search, rules against optima, everything against the simulator."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import pairwise
from math import comb, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import InfeasibleError
from memfit.planner.baselines.brute_force import brute_force_chain
from memfit.planner.baselines.chain import (
    Chain,
    ChainOperation,
    ChainSchedule,
    ChainStage,
    OperationKind,
    simulate_chain,
)
from memfit.planner.baselines.revolve import RevolveKind, revolve_cost, revolve_schedule
from memfit.planner.baselines.rotor import rotor_schedule, smallest_chain_bytes
from memfit.planner.baselines.segment_rules import every_block, segment_operations, sqrt_segments, store_all

LETTERS = {
    OperationKind.FORWARD_NONE: "n",
    OperationKind.FORWARD_CHECKPOINT: "c",
    OperationKind.FORWARD_ALL: "a",
    OperationKind.BACKWARD: "B",
}


def picture(schedule: ChainSchedule) -> str:
    return " ".join(f"{LETTERS[kind]}{stage}" for kind, stage in schedule.operations)


def operations(text: str) -> list[ChainOperation]:
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    return [ChainOperation(kinds[word[0]], int(word[1:])) for word in text.split()]


def uniform_chain(length: int, saved_bytes: int = 4) -> Chain:
    stage = ChainStage(1.0, 2.0, output_bytes=1, saved_bytes=saved_bytes, gradient_bytes=1)
    return Chain((stage,) * length, input_bytes=1)


def exact(chain: Chain, memory_bytes: int) -> ChainSchedule:
    return rotor_schedule(chain, memory_bytes, slots=max(1, memory_bytes))


def transformer_chain(num_blocks: int, seed: int = 0) -> Chain:
    # Bytes and seconds of a block of 384 x 2,048 tokens in float16, with noise; then the head.
    rng = random.Random(seed)
    mib = 1 << 20
    stages = [
        ChainStage(
            forward_seconds=10e-3 * rng.uniform(0.9, 1.1),
            backward_seconds=20e-3 * rng.uniform(0.9, 1.1),
            output_bytes=6 * mib,
            saved_bytes=6 * mib + rng.randrange(60, 120) * mib,
            gradient_bytes=6 * mib,
            forward_overhead_bytes=24 * mib,
            backward_overhead_bytes=48 * mib,
        )
        for _ in range(num_blocks)
    ]
    return Chain((*stages, ChainStage(5e-3, 10e-3, 4, 4 + 100 * mib, 4, 0, 100 * mib)), 6 * mib)


@st.composite
def chains(draw: st.DrawFn, max_stages: int = 5) -> Chain:
    def stage() -> ChainStage:
        output_bytes = draw(st.integers(0, 4))
        return ChainStage(
            forward_seconds=draw(st.integers(0, 5)),
            backward_seconds=draw(st.integers(0, 5)),
            output_bytes=output_bytes,
            saved_bytes=output_bytes + draw(st.integers(0, 8)),
            gradient_bytes=draw(st.integers(0, 4)),
            forward_overhead_bytes=draw(st.integers(0, 4)),
            backward_overhead_bytes=draw(st.integers(0, 4)),
        )

    length = draw(st.integers(1, max_stages))
    return Chain(tuple(stage() for _ in range(length)), draw(st.integers(0, 4)), draw(st.integers(0, 4)))


def plain(chain: Chain) -> ChainSchedule:
    everything = segment_operations(len(chain.stages), store_all(len(chain.stages)))
    return ChainSchedule(everything, *simulate_chain(chain, everything))


# ----------------------------------------------------------------------------------------------------------- simulator


def test_simulator_counts_inputs_results_and_overhead_at_once() -> None:
    first = ChainStage(1.0, 10.0, output_bytes=2, saved_bytes=5, gradient_bytes=2, forward_overhead_bytes=7)
    loss = ChainStage(3.0, 30.0, output_bytes=1, saved_bytes=1, gradient_bytes=1, backward_overhead_bytes=4)
    chain = Chain((first, loss), input_bytes=100, input_gradient_bytes=50)
    # Forward of the first: 100 + 5 + 7. Backward of the loss: 100 + 5 + 1, gradients 1 + 2, overhead 4. Backward of
    # the first: 100 + 5, gradients 2 + 50.
    assert simulate_chain(chain, operations("a0 a1 B1 B0")) == (157, 44.0)
    # Now the first saves only 2 at first, so the loss has 100 + 2 + 1, 1 + 2, 4; then 2 + 100 + 5 + 50 as before.
    assert simulate_chain(chain, operations("c0 a1 B1 a0 B0")) == (157, 45.0)
    assert simulate_chain(Chain(chain.stages, 100), operations("c0 a1 B1 a0 B0")) == (114, 45.0)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("a1", r"Operation 0, FORWARD_ALL of stage 1: value 1 is not in memory"),
        ("n0 c0", r"Operation 1, FORWARD_CHECKPOINT of stage 0: value 0 is not in memory"),
        ("c0 c0", r"Operation 1, FORWARD_CHECKPOINT of stage 0: value 1 is in memory already"),
        ("a0 n1", r"FORWARD_NONE of stage 1: value 1 belongs to what stage 0 saved"),
        ("a0 a1 B1", r"BACKWARD of stage 1: the gradient in memory is that of value 3"),
        ("c0 c1 B2", r"BACKWARD of stage 2: what it saves is not in memory"),
        ("a0 a1 a2 B2 a2", r"FORWARD_ALL of stage 2: its backward is done"),
        ("a0 a1 a2 B2 B1", r"ends before the backward of stage 0"),
        ("a3", r"Operation 0: the chain has no stage 3"),
    ],
)
def test_simulator_refuses_what_cannot_run(schedule: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_chain(uniform_chain(3), operations(schedule))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"forward_seconds": -1.0}, "forward_seconds is -1.0"), ({"output_bytes": 9}, "counts the output of 9 bytes in")],
)
def test_impossible_stages_are_refused(changes: dict[str, float], message: str) -> None:
    fields = {"forward_seconds": 1.0, "backward_seconds": 1.0, "output_bytes": 1, "saved_bytes": 2, "gradient_bytes": 1}
    with pytest.raises(ValueError, match=message):
        ChainStage(**(fields | changes))  # type: ignore[arg-type]


def test_impossible_chains_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        Chain((), 1)
    with pytest.raises(ValueError, match="Negative bytes: -1 of input"):
        Chain(uniform_chain(1).stages, -1)


# ------------------------------------------------------------------------------------------------------- rules of thumb


def test_rules_as_pictures() -> None:
    chain = uniform_chain(4)
    shown = {
        rule.__name__: picture(ChainSchedule(segment_operations(4, rule(4)), 0, 0.0))
        for rule in (store_all, sqrt_segments, every_block)
    }
    assert shown == {
        "store_all": "a0 a1 a2 a3 B3 B2 B1 B0",
        "sqrt_segments": "c0 n1 a2 a3 B3 B2 a0 a1 B1 B0",
        "every_block": "c0 c1 c2 a3 B3 a2 B2 a1 B1 a0 B0",
    }
    assert simulate_chain(chain, operations(shown["store_all"])).seconds == 4 * 3.0
    assert simulate_chain(chain, operations(shown["every_block"])).seconds == 4 * 3.0 + 3.0


@given(length=st.integers(1, 400))
def test_sqrt_segments_are_about_as_many_as_long(length: int) -> None:
    starts = sqrt_segments(length)
    sizes = [b - a for a, b in pairwise((*starts, length))]
    assert starts[0] == 0
    assert abs(len(sizes) - length**0.5) <= 0.5
    assert max(sizes) - min(sizes) <= 1
    assert abs(max(sizes) - length**0.5) <= 1.5


@pytest.mark.parametrize("starts", [(1,), (0, 0), (0, 5), (0, 2, 1)])
def test_segments_that_do_not_cover_the_chain_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Segments must start at 0"):
        segment_operations(5, starts)


def test_an_empty_chain_has_no_segments() -> None:
    with pytest.raises(ValueError, match="0 stages"):
        sqrt_segments(0)


# --------------------------------------------------------------------------------------------------------------- rotor


@settings(max_examples=60, deadline=None)
@given(chain=chains(), data=st.data())
def test_rotor_equals_exhaustive_search(chain: Chain, data: st.DataObject) -> None:
    least = smallest_chain_bytes(chain)
    memory_bytes = data.draw(st.integers(least, max(least, plain(chain).peak_bytes)), label="memory_bytes")
    rotor = exact(chain, memory_bytes)
    assert rotor.peak_bytes <= memory_bytes
    assert rotor.seconds == brute_force_chain(chain, memory_bytes).seconds
    assert rotor.seconds >= brute_force_chain(chain, memory_bytes, persistent=False).seconds


@settings(max_examples=60, deadline=None)
@given(chain=chains())
def test_smallest_chain_bytes_is_where_schedules_begin(chain: Chain) -> None:
    least = smallest_chain_bytes(chain)
    assert exact(chain, least).peak_bytes == least
    for solve in (exact, brute_force_chain):
        with pytest.raises(InfeasibleError, match=f"{least - 1} bytes") as caught:
            solve(chain, least - 1)
        assert caught.value.minimum_bytes == least
        assert caught.value.budget_bytes == least - 1


@settings(deadline=None)
@given(chain=chains(max_stages=9), slots=st.integers(1, 40), factor=st.floats(1.0, 3.0))
def test_rounding_to_slots_never_breaks_the_budget(chain: Chain, slots: int, factor: float) -> None:
    memory_bytes = int(factor * smallest_chain_bytes(chain))
    try:
        schedule = rotor_schedule(chain, memory_bytes, slots)
    except InfeasibleError as error:
        assert "too coarse" in str(error)  # noqa: PT017 - allowed, not required
        return
    assert schedule.peak_bytes <= memory_bytes
    assert simulate_chain(chain, schedule.operations) == (schedule.peak_bytes, schedule.seconds)


@settings(deadline=None)
@given(chain=chains(max_stages=9))
def test_rotor_is_never_slower_than_a_rule_in_the_same_bytes(chain: Chain) -> None:
    for rule in (store_all, sqrt_segments, every_block):
        rival = simulate_chain(chain, segment_operations(len(chain.stages), rule(len(chain.stages))))
        assert exact(chain, rival.peak_bytes).seconds <= rival.seconds


@settings(deadline=None)
@given(chain=chains(max_stages=7))
def test_more_memory_is_never_slower(chain: Chain) -> None:
    least = smallest_chain_bytes(chain)
    seconds = [
        exact(chain, memory_bytes).seconds for memory_bytes in range(max(least, chain.input_bytes + 1), least + 30)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_rotor_beats_both_rules_on_a_transformer() -> None:
    chain = transformer_chain(24)
    length = len(chain.stages)
    optimum = plain(chain)
    for rule in (every_block, sqrt_segments):
        rival = simulate_chain(chain, segment_operations(length, rule(length)))
        rotor = rotor_schedule(chain, rival.peak_bytes)
        assert optimum.seconds < rotor.seconds <= rival.seconds
    assert rotor.seconds < rival.seconds  # Than the square root; nothing is faster than every block in its bytes.
    assert rotor_schedule(chain, optimum.peak_bytes + 1000).seconds <= 1.02 * optimum.seconds


def test_rotor_schedules_as_pictures() -> None:
    chain = uniform_chain(5)
    shown = {memory_bytes: picture(exact(chain, memory_bytes)) for memory_bytes in (23, 16, 12, 9, 8)}
    assert shown == {
        23: "a0 a1 a2 a3 a4 B4 B3 B2 B1 B0",
        16: "a0 c1 n2 a3 a4 B4 B3 a1 a2 B2 B1 B0",
        12: "c0 c1 c2 c3 a4 B4 a3 B3 a2 B2 a1 B1 a0 B0",
        9: "c0 n1 c2 n3 a4 B4 c2 a3 B3 a2 B2 c0 a1 B1 a0 B0",
        8: "c0 n1 n2 n3 a4 B4 c0 n1 n2 a3 B3 c0 n1 a2 B2 c0 a1 B1 a0 B0",
    }


def test_a_chain_of_a_hundred_stages_with_little_memory_needs_no_recursion() -> None:
    chain = uniform_chain(100, saved_bytes=20)
    schedule = rotor_schedule(chain, smallest_chain_bytes(chain), slots=50)
    assert schedule.peak_bytes == smallest_chain_bytes(chain)


def test_no_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="0 slots"):
        rotor_schedule(uniform_chain(2), 100, slots=0)


# ------------------------------------------------------------------------------------------------------------- revolve


@cache
def least_advances(length: int, slots: int) -> float:
    """By definition: advance to a middle, reverse what is after it with a slot less, then what is before it."""
    if length <= 1:
        return 0
    if slots == 0:
        return inf
    return min(m + least_advances(length - m, slots - 1) + least_advances(m, slots) for m in range(1, length))


@pytest.mark.parametrize("slots", range(1, 8))
def test_revolve_cost_equals_that_of_all_middles(slots: int) -> None:
    for length in range(40):
        assert revolve_cost(length, slots) == least_advances(length, slots)


def test_revolve_cost_in_known_cases() -> None:
    assert revolve_cost(10, 3) == 15  # Each step at most twice: binomial(5, 3) = 10 is the longest such chain.
    assert revolve_cost(56, 5) == 3 * 56 - comb(8, 2)  # binomial(8, 5) = 56: three times.
    assert [revolve_cost(n, 1) for n in range(6)] == [n * (n - 1) // 2 for n in range(6)]  # Always from the start.
    assert revolve_cost(100, 100) == revolve_cost(100, 99) == 99  # A slot for every state.


@given(length=st.integers(0, 120), slots=st.integers(1, 12))
def test_revolve_schedule_runs_in_its_slots_at_its_cost(length: int, slots: int) -> None:
    in_hand, to_reverse = 0, length
    in_slots: set[int] = set()
    runs: Counter[int] = Counter()
    for kind, start, stop in revolve_schedule(length, slots):
        if kind is RevolveKind.RELEASE:
            in_slots.remove(start)
            continue
        assert start in in_slots | {in_hand}
        match kind:
            case RevolveKind.SNAPSHOT:
                assert start == in_hand
                assert start not in in_slots
                in_slots.add(start)
                assert len(in_slots) <= slots
            case RevolveKind.ADVANCE:
                assert start < stop
                runs.update(range(start, stop))
                in_hand = stop
            case RevolveKind.BACKWARD:
                to_reverse -= 1
                assert start == to_reverse
                in_hand = -1  # Recording a step leaves its tape in hand, not a state.
    assert to_reverse == 0
    assert not in_slots
    assert runs.total() == revolve_cost(length, slots)
    repeats = max(runs.values(), default=0)
    assert length <= comb(slots + repeats, slots)


def test_revolve_takes_more_slots_than_levels_of_recursion() -> None:
    advances = [action for action in revolve_schedule(5000, 4000) if action.kind is RevolveKind.ADVANCE]
    assert sum(action.stop - action.start for action in advances) == revolve_cost(5000, 4000)


@pytest.mark.parametrize(("length", "slots"), [(-1, 1), (3, 0)])
def test_revolve_refuses_what_makes_no_sense(length: int, slots: int) -> None:
    with pytest.raises(ValueError, match=f"{length} steps with {slots} slots"):
        revolve_schedule(length, slots)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("length", [2, 3, 5, 8, 11])
def test_rotor_finds_revolve_where_the_models_agree(length: int, slots: int) -> None:
    # What a step records is so large that only one record fits. Rotor holds the state in hand too, hence one byte more.
    record_bytes = 3 * length
    stage = ChainStage(1.0, 0.0, output_bytes=1, saved_bytes=record_bytes, gradient_bytes=0)
    rotor = exact(Chain((stage,) * length, input_bytes=1), slots + 1 + record_bytes)
    assert rotor.seconds == length + revolve_cost(length, slots)
