"""The loss head in a trace: where it is, how large its logits are, and whether computing them a few rows at a time is worth trying."""

from __future__ import annotations

from typing import Final

from memfit.planner.timeline import Timeline
from memfit.techniques.technique import LossHead
from memfit.values.trace import Phase, Trace

PRODUCTS: Final = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.linear.default"})
LOSSES: Final = frozenset({"aten.nll_loss_forward.default"})


def head_of(timeline: Timeline) -> LossHead | None:
    """The head whose loss is taken last, where a matrix product makes the logits; None where there is none."""
    trace = timeline.trace
    logs = _last_logs(trace)
    if logs is None:
        return None
    event, rows, classes, size = logs
    storages, operations = trace.storages, trace.operations
    maker = {s: op for op in trace.events[: event + 1] if op >= 0 for s in operations[op].makes}
    # Back from the logarithms to the product, through casts and copies.
    source = operations[trace.events[event]].reads[0]
    while source in maker and operations[maker[source]].name not in PRODUCTS:
        reads = operations[maker[source]].reads
        if len(reads) != 1:
            return None
        source = reads[0]
    if source not in maker:
        return None
    # And on from there: all that is made of the logits and as large, up to the products of backward.
    first = storages[source].birth
    large = {source}
    for op in trace.events[first : trace.pass_events]:
        if op >= 0 and operations[op].name not in PRODUCTS and not large.isdisjoint(operations[op].reads):
            large |= {s for s in operations[op].makes if storages[s].bytes >= size // 2}
    seconds = sum(
        operations[op].seconds
        for op in trace.events[: trace.pass_events]
        if op >= 0 and not large.isdisjoint((*operations[op].reads, *operations[op].makes))
    )
    size_bytes = sum(storages[s].bytes for s in large)
    return LossHead(rows, classes, size_bytes, first, max(timeline.plain_end[s] for s in large), seconds)


def _last_logs(trace: Trace) -> tuple[int, int, int, int] | None:
    """Event, rows, classes and bytes of the last logarithms of probabilities that a loss reads."""
    read: set[int] = set()
    for event in range(trace.forward_events - 1, -1, -1):
        op = trace.events[event]
        if op < 0:
            continue
        operation = trace.operations[op]
        if operation.name in LOSSES:
            read.add(operation.reads[0])
        elif operation.name == "aten._log_softmax.default" and not read.isdisjoint(operation.makes):
            if len(operation.shape) != 2 or operation.phase is not Phase.FORWARD:
                return None
            return event, *operation.shape, trace.storages[operation.makes[0]].bytes
    return None


def sets_peak(timeline: Timeline, head: LossHead) -> bool:
    """Whether the step is fullest in the head: as plain PyTorch runs it, or when all that can be dropped is."""
    moments = (timeline.plain().peak_event, int(timeline.floor().argmax()))
    return any(head.first <= moment <= head.last for moment in moments)
