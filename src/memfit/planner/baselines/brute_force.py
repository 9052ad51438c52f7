"""The fastest schedule of a short chain, by trying everything: an oracle for tests."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

from memfit.errors import InfeasibleError
from memfit.planner.baselines.chain import (
    Chain,
    ChainOperation,
    ChainSchedule,
    Memory,
    OperationKind,
    initial_memory,
    obstacle,
    operation_seconds,
    run,
    schedule_of,
)
from memfit.planner.baselines.rotor import smallest_chain_bytes


def brute_force_chain(chain: Chain, memory_bytes: int, *, persistent: bool = True) -> ChainSchedule:
    """The fastest schedule of all that fit: shortest path over everything that can be in memory. For tests.

    Args:
        chain: of a few stages; the number of states grows like 6 to the number of stages.
        memory_bytes: the peak allowed, the input of the chain counted in.
        persistent: only schedules in which a value kept once stays until the backward of the stage that reads it.

    Raises:
        InfeasibleError: nothing fits; `minimum_bytes` is what a persistent schedule needs.
    """
    start = (initial_memory(chain), 0)  # Second: values kept once, as bits.
    seconds = {start: 0.0}
    reached_by: dict[tuple[Memory, int], tuple[tuple[Memory, int], ChainOperation]] = {}
    ticket = count()  # Breaks ties: states need no order.
    queue = [(0.0, next(ticket), start)]
    every_operation = [ChainOperation(kind, i) for kind in OperationKind for i in range(len(chain.stages))]
    while queue and chain.input_bytes <= memory_bytes:
        so_far, _, state = heappop(queue)
        memory, kept = state
        if so_far > seconds[state]:
            continue
        if memory.gradient == 0:
            operations = []
            while state != start:
                state, operation = reached_by[state]
                operations.append(operation)
            return schedule_of(chain, operations[::-1])
        for operation in every_operation:
            kind, i = operation
            if obstacle(memory, operation) or (kind is OperationKind.FORWARD_NONE and kept >> i & 1):
                continue
            after, peak_bytes = run(chain, memory, operation)
            if peak_bytes > memory_bytes:
                continue
            keeps = persistent and kind in {OperationKind.FORWARD_CHECKPOINT, OperationKind.FORWARD_ALL}
            successor = (after, (kept | 1 << i if keeps else kept) & after.values)
            total = so_far + operation_seconds(chain, operation)
            if total < seconds.get(successor, float("inf")):
                seconds[successor] = total
                reached_by[successor] = (state, operation)
                heappush(queue, (total, next(ticket), successor))
    raise InfeasibleError(
        f"No schedule runs this chain in {memory_bytes} bytes.",
        budget_bytes=memory_bytes,
        minimum_bytes=smallest_chain_bytes(chain),
    )
