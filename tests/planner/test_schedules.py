"""Orders of pipeline schedules, micro-batches in flight, and a step played through."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from memfit.errors import InputError
from memfit.planner.schedules import Action, in_flight, moments, rank_orders, simulate, textbook_bubble
from memfit.values.stages import Schedule

GPIPE, ONE_ONE, INTERLEAVED = Schedule.GPIPE, Schedule.ONE_FORWARD_ONE_BACKWARD, Schedule.INTERLEAVED


def _torch_order(schedule: Schedule, ranks: int, micro_batches: int, per_rank: int) -> list[list[Action]]:
    """What torch runs on each rank, without any process group: of interleaved stages its list, of the others its loop over a stage that only notes.

    (The lists of the others, for drawing, are not what they run: that of 1F1B begins at micro-batch 1 on the last stage.)
    """
    if schedule is not INTERLEAVED:
        return [_run(schedule, ranks, rank, micro_batches) for rank in range(ranks)]
    made: Any = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)  # type: ignore[type-abstract]
    made._n_microbatches, made.n_local_stages, made.pp_group_size = micro_batches, per_rank, ranks
    made.microbatches_per_round = micro_batches // max(1, micro_batches // ranks)
    kinds = {"FORWARD": False, "FULL_BACKWARD": True}
    return [
        [
            Action(kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in made._calculate_single_rank_operations(rank)
            if action is not None
        ]
        for rank in range(ranks)
    ]


def _run(schedule: Schedule, ranks: int, rank: int, micro_batches: int) -> list[Action]:
    ran: list[Action] = []
    stage = MagicMock(stage_index=rank, has_backward=True)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    stage.forward_one_chunk.side_effect = lambda index, *_, **__: ran.append(Action(False, rank, index))
    stage.backward_one_chunk.side_effect = lambda index, **_: ran.append(Action(True, rank, index))
    kind: Any = {GPIPE: ScheduleGPipe, ONE_ONE: Schedule1F1B}[schedule]
    made = kind.__new__(kind)
    made._stage, made._n_microbatches, made._num_stages, made._has_backward = stage, micro_batches, ranks, True
    made.scale_grads = False
    made._finalize_gradients = True  # of torch 2.15
    empty: list[Any] = [()] * micro_batches
    made._check_inputs = lambda *_: (empty, empty)
    made._initialize_stage = made._maybe_compute_loss = made._maybe_get_loss = made._update_losses = lambda *_: None
    made._step_microbatches(empty, empty)
    return ran


@pytest.mark.parametrize(
    ("schedule", "per_rank"), [(GPIPE, 1), (ONE_ONE, 1), (INTERLEAVED, 2), (INTERLEAVED, 3)], ids=str
)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_orders_are_those_that_torch_runs(schedule: Schedule, per_rank: int, ranks: int, rounds: int) -> None:
    ours = [list(order) for order in rank_orders(schedule, ranks, ranks * rounds, per_rank)]
    assert ours == _torch_order(schedule, ranks, ranks * rounds, per_rank)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [5, 6, 9])
def test_micro_batches_in_flight(ranks: int, micro_batches: int) -> None:
    for stage in range(ranks):
        assert in_flight(rank_orders(GPIPE, ranks, micro_batches)[stage], stage) == micro_batches
        assert in_flight(rank_orders(ONE_ONE, ranks, micro_batches)[stage], stage) == min(micro_batches, ranks - stage)


def test_equal_stages_wait_as_the_textbook_says() -> None:
    for schedule in (GPIPE, ONE_ONE):
        for ranks, micro_batches in ((2, 4), (4, 4), (4, 16)):
            played = simulate(
                rank_orders(schedule, ranks, micro_batches), lambda action: 2.0 if action.backward else 1.0
            )
            assert played.bubble == pytest.approx(textbook_bubble(ranks, micro_batches))
    halves = rank_orders(INTERLEAVED, 4, 8, 2)
    interleaved = simulate(halves, lambda action: 1.0 if action.backward else 0.5)
    whole = simulate(rank_orders(ONE_ONE, 4, 8), lambda action: 2.0 if action.backward else 1.0)
    assert interleaved.bubble < whole.bubble


@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_the_longest_path_through_its_order(seed: int) -> None:
    rng = random.Random(seed)
    schedule = rng.choice([GPIPE, ONE_ONE])
    ranks, micro_batches = rng.randint(1, 4), rng.randint(4, 7)
    forward = [rng.randint(1, 9) for _ in range(ranks)]
    backward = [rng.randint(1, 9) for _ in range(ranks)]
    crossing = [rng.randint(0, 5) for _ in range(ranks - 1)]
    orders = rank_orders(schedule, ranks, micro_batches)
    # Relaxed until nothing changes, from what must come before what. A message begins after the one before it on its link.
    ends = {action: 0.0 for order in orders for action in order}
    sent = dict.fromkeys(ends, 0.0)

    def length(action: Action) -> float:
        return (backward if action.backward else forward)[action.stage]

    for _ in range(4 * ranks * micro_batches):
        for order in orders:
            for before, action in zip((None, *order[:-1]), order, strict=True):
                source = Action(action.backward, action.stage + (1 if action.backward else -1), action.micro_batch)
                start = max(ends[before] if before else 0.0, sent.get(source, 0.0))
                ends[action] = start + length(action)
                to = action.stage - 1 if action.backward else action.stage
                previous = Action(action.backward, action.stage, action.micro_batch - 1)
                if 0 <= to < ranks - 1:
                    sent[action] = max(ends[action], sent.get(previous, 0.0)) + crossing[to]
    played = simulate(orders, length, crossing)
    assert played.seconds == max(ends.values())
    if schedule is GPIPE:
        machines = [*forward, *crossing], [*backward, *crossing]
        assert played.seconds == sum(sum(times) + (micro_batches - 1) * max(times) for times in machines)


def test_moments_leave_out_what_others_contain() -> None:
    (order, _) = rank_orders(ONE_ONE, 2, 5)
    assert moments(order) == ((0, ((0, 1),)),)  # one more in flight while one runs


def test_schedules_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match="at least as many micro-batches as stages"):
        rank_orders(ONE_ONE, 4, 3)
    with pytest.raises(InputError, match="need the schedule interleaved"):
        rank_orders(GPIPE, 2, 4, 2)
    with pytest.raises(InputError, match="take a multiple of 4"):
        rank_orders(INTERLEAVED, 4, 9, 2)
    with pytest.raises(InputError, match="each must be 1 or more"):
        rank_orders(GPIPE, 2, 0)
