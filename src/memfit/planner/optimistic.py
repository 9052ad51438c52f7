"""Optimistic bounds: the most a technique could save and the least it could cost, so that hopeless candidates are never captured.

Each technique says its own (`Technique.bound`), from numbers that are worked out here from a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from memfit.hardware.machine import Link
from memfit.planner.columns import add_span
from memfit.planner.head import head_of
from memfit.planner.solver import Solver
from memfit.planner.timeline import Timeline
from memfit.planner.transfers import block_seconds, state_transfers
from memfit.techniques.technique import OptimisticBound, StepFacts, StreamingFacts
from memfit.values.bundle import StreamedLayer
from memfit.values.trace import Category, Phase, Trace

_OF_ANY_BATCH: Final = frozenset({Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE})


def step_facts(timeline: Timeline, link: Link | None = None, layers: Sequence[StreamedLayer] = ()) -> StepFacts:
    """What a trace says of its step in the numbers that techniques ask for.

    Args:
        timeline: of the trace.
        link: to the nearest lower tier; None for none.
        layers: that could be streamed, and last what is in no block.
    """
    trace = timeline.trace
    parameter_bytes, gradient_bytes = trace.bytes_of(Category.PARAMETER), trace.bytes_of(Category.GRADIENT)
    state_bytes = trace.bytes_of(Category.OPTIMIZER_STATE)
    return StepFacts(
        micro_batches=trace.micro_batches,
        pass_events=trace.pass_events,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        state_bytes=state_bytes,
        activation_bytes=trace.bytes_of(Category.ACTIVATION),
        # Gradients have the type of their parameters; those of a sharded step may be there twice, whole and in part.
        frozen_bytes=parameter_bytes if trace.choices.sharding else max(0, parameter_bytes - gradient_bytes),
        update_temporary_bytes=_update_temporary_bytes(timeline),
        step_seconds=trace.plain_step_seconds,
        update_seconds=sum(o.seconds for o in trace.operations if o.phase is Phase.OPTIMIZER),
        head=head_of(timeline),
        state_transfer_seconds=None if link is None else state_transfers(state_bytes, link).waited_seconds,
        streaming=None if link is None or not layers else _streaming(trace, link, layers),
    )


def _update_temporary_bytes(timeline: Timeline) -> int:
    trace = timeline.trace
    floor = timeline.floor_with_offloading()[trace.pass_events :]
    held = sum(trace.bytes_of(category) for category in _OF_ANY_BATCH)
    return max(0, int(floor.max()) - held) if len(floor) else 0


def _streaming(trace: Trace, link: Link, layers: Sequence[StreamedLayer]) -> StreamingFacts:
    again = trace.micro_batches * sum(block_seconds(trace, [layer.path for layer in layers[:-1]])[0])
    weights = sum(layer.weight_bytes for layer in layers)
    moved = sum(layer.state_bytes for layer in layers)
    busy = link.in_seconds(2 * weights + moved) + link.out_seconds(weights + moved)
    # The two last layers need not come twice; with two layers none does.
    once = link.in_seconds(sum(sorted(layer.weight_bytes for layer in layers)[-2:]))
    return StreamingFacts(again, busy - once)


def least_bytes(solver: Solver) -> int:
    """Bytes that are held when the optimizer updates, whatever is recomputed or offloaded and however the batch is split."""
    trace = solver.trace
    if not trace.pass_events:  # streamed layers: updates are among all micro-batches' events, beside what these hold
        return _of_any_batch_bytes(solver)
    floor = solver.timeline.floor_with_offloading()[trace.pass_events :]
    if not len(floor):
        return trace.bytes_before_step
    return int(floor.max()) - _left_bytes(solver)


def _of_any_batch_bytes(solver: Solver) -> int:
    """The most that is there at one moment of what does not depend on the batch."""
    timeline = solver.timeline
    changes = np.zeros(timeline.events + 2, dtype=np.int64)
    for number, storage in enumerate(solver.trace.storages):
        if storage.category in _OF_ANY_BATCH:
            add_span(changes, max(storage.birth, 0), timeline.last_end[number], storage.bytes)
    return int(np.cumsum(changes).max())


def floor_left(solver: Solver, bounds: Sequence[OptimisticBound]) -> int:
    """Bytes that every plan for a step takes at least at some moment once techniques with these bounds have been added; 0 where that is not known."""
    everywhere = saved_together([bound for bound in bounds if bound.within is None])
    if everywhere is None:
        return 0
    floor = solver.timeline.floor_with_offloading() - everywhere
    floor[solver.trace.pass_events :] -= _left_bytes(solver)
    for bound in bounds:
        if bound.within is not None:
            first, last = bound.within
            floor[first : last + 1] -= floor[first : last + 1] if bound.saved_bytes is None else bound.saved_bytes
    return max(0, int(floor.max()))


def saved_together(bounds: Iterable[OptimisticBound]) -> int | None:
    """The most that several techniques save at any moment; None where that is not known of one of them."""
    every = list(bounds)
    if any(bound.saved_bytes is None for bound in every):
        return None
    state = max((bound.saved_bytes or 0 for bound in every if bound.of_state), default=0)
    return state + sum(bound.saved_bytes or 0 for bound in every if not bound.of_state)


def _left_bytes(solver: Solver) -> int:
    """Of what is there in the update, what may be less where the batch is divided or forward runs in other types."""
    trace, timeline = solver.trace, solver.timeline
    # The batch, and what forward leaves behind (an output among attributes, say), may be smaller where the batch is divided.
    return sum(
        storage.bytes
        for number, storage in enumerate(trace.storages)
        if storage.category not in _OF_ANY_BATCH and storage.birth < trace.pass_events <= timeline.last_end[number]
    )
