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
