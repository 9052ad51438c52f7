"""What a rank with several stages of a pipeline holds, from what each of them holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.planner.schedules import rank_orders
from memfit.planner.stage_bytes import StageLevels, rank_peak, seconds_of
from memfit.values.stages import Schedule
from planner.traces import network


@pytest.mark.parametrize("per_rank", [1, 2, 3])
def test_what_stages_of_a_rank_share_is_taken_off_once(per_rank: int) -> None:
    """A batch of 30 bytes that each stage counts: all but one of them count it too often."""
    ranks, micro_batches = 2, 4
    order = rank_orders(Schedule.INTERLEAVED, ranks, micro_batches, per_rank)[0]
    own = StageLevels(100, 10, 7, 20, 35, 25, 15, 3, 5, 5)
    beside_batch = dict.fromkeys(range(0, ranks * per_rank, ranks), own)
    with_batch = dict.fromkeys(beside_batch, StageLevels(130, 10, 7, 20, 35, 25, 15, 3, 5, 5))
    alone, phase = rank_peak(order, Schedule.INTERLEAVED, beside_batch)
    shared_bytes = 30 * (per_rank - 1)
    assert rank_peak(order, Schedule.INTERLEAVED, with_batch, shared_bytes) == (alone + 30, phase)


def test_the_batch_that_ranks_have_put_together_is_gone_at_the_update() -> None:
    """The peak is in the update with or without it."""
    levels = StageLevels(130, 10, 7, 20, 35, 25, 500, 3, 5, 5)
    order = rank_orders(Schedule.ONE_FORWARD_ONE_BACKWARD, 2, 4)[0]
    assert rank_peak(order, Schedule.ONE_FORWARD_ONE_BACKWARD, {0: levels}, batch_bytes=30) == (610, "optimizer")


def test_an_optimizer_that_steps_all_parameters_at_once_does_so_over_the_stages_of_a_rank() -> None:
    """What it takes meanwhile is there for all of them, and of one that steps one after the other for one stage at a time."""
    one = StageLevels(100, 10, 7, 20, 35, 25, 500, 3, 5, 5)
    order = rank_orders(Schedule.INTERLEAVED, 2, 4, 2)[0]
    other = replace(one, update_bytes=300)
    assert rank_peak(order, Schedule.INTERLEAVED, {0: one, 2: other}) == (2 * 110 + 500, "optimizer")
    stages = {number: replace(each, updated_at_once=True) for number, each in ((0, one), (2, other))}
    assert rank_peak(order, Schedule.INTERLEAVED, stages) == (2 * 110 + 500 + 300, "optimizer")


# Of a first stage: of 7 bytes that it sends, the gradients of 10 that it received.
SENDS = StageLevels(1000, 0, 100, 200, 0, 0, 0, 10, 20, 7)


@pytest.mark.parametrize(
    ("schedule", "forward", "backward"),
    [
        # Outputs of all forwards; gradients of all backwards but the last one.
        (Schedule.GPIPE, 1000 + 3 * 100 + 200 + 3 * 7, 1000 + 300 + 3 * 10),
        # While the second forward of two runs, the first output; one gradient. Later two micro-batches are in flight beside it, and no output.
        (Schedule.ONE_FORWARD_ONE_BACKWARD, 1000 + 100 + 200 + 10, 1000 + 300 + 10),
        # Outputs of those in flight, to the end of their own backward; what waits is there throughout.
        (Schedule.INTERLEAVED, 1000 + 2 * (100 + 7) + 200 + 10 + 70, 1000 + 300 + 7 + 3 * 10 + 70),
    ],
)
def test_what_is_held_of_messages_that_are_released(schedule: Schedule, forward: int, backward: int) -> None:
    order = rank_orders(schedule, 2, 4)[0]

    def peak(levels: StageLevels) -> tuple[int, str]:
        return rank_peak(order, schedule, {0: replace(levels, arriving_bytes=70)}, messages_released=True)

    assert peak(SENDS) == (forward, "forward")
    assert peak(replace(SENDS, kept_bytes=0, forward_bytes=0, backward_bytes=300)) == (backward, "backward")


def test_what_a_last_stage_receives_its_losses_hold() -> None:
    """To the end, where its gradient is sent back."""
    last = replace(SENDS, sent_bytes=0, made_bytes=0, done_bytes=4)
    order = rank_orders(Schedule.GPIPE, 2, 4)[1]

    def peak(levels: StageLevels) -> int:
        return rank_peak(order, Schedule.GPIPE, {1: levels}, messages_released=True)[0]

    received = replace(last.receiving(10, 0, 4), kept_bytes=0, forward_bytes=0, backward_bytes=300)
    assert peak(received) == 1000 + 300 + 3 * (10 + 10 + 4)
    assert peak(replace(received, done_bytes=4)) == 1000 + 300 + 3 * (10 + 4)


def test_interleaved_stages_take_the_host_longer() -> None:
    trace = replace(network(2), python_seconds=0.01)
    forward, backward, update = seconds_of(trace, Schedule.ONE_FORWARD_ONE_BACKWARD)
    assert seconds_of(trace, Schedule.GPIPE) == (forward, backward, update)
    assert seconds_of(trace, Schedule.INTERLEAVED) == pytest.approx((forward + 1.5, backward + 1.5, update))
    # Where the host is ahead of a GPU, neither that nor what lies between operations takes time.
    ahead = replace(trace, python_seconds=0.0)
    less = seconds_of(ahead, Schedule.ONE_FORWARD_ONE_BACKWARD)
    assert seconds_of(ahead, Schedule.INTERLEAVED) == less
    assert (forward + backward - less[0] - less[1], update) == pytest.approx((trace.between_seconds, less[2]))
