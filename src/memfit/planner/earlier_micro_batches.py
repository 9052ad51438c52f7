"""By how many bytes earlier micro-batches exceed the last one, where parameters are updated inside backward.

With an update inside backward the trace is of the last micro-batch, in which gradients are freed by their updates. Earlier micro-batches run the same
operations without updates, so no gradient is freed: in the first each is alive from when it is made, in all others from the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memfit.planner.columns import add_span
from memfit.values.trace import BEFORE_STEP, Category, Operation, Phase, Trace


def held_more(trace: Trace, last_events: Mapping[int, int], workspace: Any) -> Any:
    """Bytes by which a micro-batch before the last holds more than the last, at each event; it depends on no plan.

    Args:
        trace: of the last micro-batch.
        last_events: of each storage, the last at which it is there when nothing is dropped.
        workspace: bytes of the operation of each event.
    """
    events = len(trace.events)
    more = np.zeros(events + 2, dtype=np.int64)
    updates = [False] * events
    if trace.micro_batches > 1:
        for event, op in enumerate(trace.events[: trace.pass_events]):
            updates[event] = op >= 0 and trace.operations[op].phase is Phase.OPTIMIZER
    if not any(updates):
        return more[: events + 1]
    # Of a gradient: the event from which on it is there besides what is added to it, where nothing was there before.
    first: dict[int, int] = {}
    for event, op in enumerate(trace.events[: trace.pass_events]):
        if op >= 0 and not updates[event]:
            operation = trace.operations[op]
            handed_over = _hands_over(trace, last_events, operation, event)
            first.update((s, event + handed_over) for s in operation.writes)
    for s, storage in enumerate(trace.storages):
        if storage.birth == BEFORE_STEP and storage.category is Category.GRADIENT:
            start = first.get(s, 0) if trace.micro_batches == 2 else 0
            add_span(more, start, trace.pass_events - 1, storage.bytes)
            add_span(more, 0, last_events[s], -storage.bytes)
        elif storage.birth >= 0 and updates[min(storage.birth, events - 1)]:
            add_span(more, storage.birth, last_events[s], -storage.bytes)
    more = np.cumsum(more)[: events + 1]
    more[:events] -= np.where(updates, workspace[:events], 0)
    return np.maximum(more, 0)


def _hands_over(trace: Trace, last_events: Mapping[int, int], addition: Operation, event: int) -> bool:
    """Whether autograd, with nothing to add to, takes what is added as it is: when that lies as the gradient does, and nothing else holds it."""
    return addition.same_layout and all(
        trace.storages[s].birth >= trace.forward_events and last_events[s] == event
        for s in addition.reads
        if s not in addition.writes
    )
