"""Collectives run beside computing as far as what they read and write allows, and no gather begins before the last one is read."""

from __future__ import annotations

import pytest

from memfit.planner.overlap import overlapped
from memfit.techniques.choices import BASELINE
from memfit.values.trace import Category, Collective, Operation, Phase, Storage, Trace


def operation(
    name: str,
    seconds: float,
    reads: tuple[int, ...] = (),
    writes: tuple[int, ...] = (),
    phase: Phase = Phase.FORWARD,
    kind: str | None = None,
) -> Operation:
    sends = None if kind is None else Collective(kind, 1, (0, 1))
    return Operation(name, phase, "", reads, writes, (), seconds, 0, False, False, name, collective=sends)


def traced(*operations: Operation) -> Trace:
    storages = tuple(Storage(1, Category.ACTIVATION, "", 0, len(operations)) for _ in range(10))
    count = len(operations)
    events = tuple(range(count))
    return Trace(events, operations, storages, (), count, count, BASELINE, "cpu", "estimated", "fake", "", "")


def gather(storage: int, seconds: float) -> Operation:
    return operation("c10d._allgather_base_.default", seconds, (storage,), kind="all_gather")


def test_a_gather_runs_beside_what_comes_before_its_reader() -> None:
    first, second = operation("a", 2.0, (0,)), operation("b", 2.0, (1,))
    step = traced(gather(0, 1.0), first, gather(1, 1.5), second)
    played = overlapped(step)
    # The second gather begins when the first one's result has been read, at 3; its reader waits until 4.5.
    assert played.seconds == pytest.approx(1.0 + 2.0 + 1.5 + 2.0)
    copied = traced(gather(0, 1.0), operation("out", 0.0, (0,)), first, gather(1, 1.5), second)
    assert overlapped(copied).seconds == pytest.approx(1.0 + 2.0 + 2.0)
    assert overlapped(copied).waiting_seconds == pytest.approx(1.0)
    assert (played.computing_seconds, played.sending_seconds) == (4.0, 2.5)


def test_a_reduction_waits_for_its_gradient_and_the_update_for_it() -> None:
    backward = operation("b", 2.0, writes=(0,), phase=Phase.BACKWARD)
    reduce = operation("c10d._reduce_scatter_base_.default", 3.0, (0,), (1,), Phase.BACKWARD, "reduce_scatter")
    more = operation("c", 2.0, writes=(2,), phase=Phase.BACKWARD)
    after = operation("aten.div_.Tensor", 0.5, (1,), (1,), Phase.BACKWARD)
    update = operation("step", 1.0, (1,), (3,), Phase.OPTIMIZER)
    assert overlapped(traced(backward, reduce, after, more, update)).seconds == pytest.approx(2 + 3 + 0.5 + 1)


def test_without_collectives_a_step_takes_what_it_computes() -> None:
    step = traced(operation("a", 2.0), operation("b", 1.0))
    assert overlapped(step).seconds == overlapped(step).computing_seconds == 3.0
    assert overlapped(step, {1: (0,)}, lambda recipe: 0.25).seconds == 3.25
