"""The optimal persistent schedule of a chain, by rotor's dynamic program (Beaumont et al. 2019).

Where we differ from the paper: the gradient of what a stage reads counts during its backward, besides that of what it makes; a forward sweep needs memory for
the operations it consists of, not for those up to the end of the chain; the loss gradient does not exist before the first backward. So bytes are those of
`simulate_chain` exactly, but for slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from memfit.errors import InfeasibleError
from memfit.planner.baselines.chain import Chain, ChainOperation, ChainSchedule, OperationKind, schedule_of


class _Needs:
    """Bytes that single operations and sweeps need, besides value s, when stages s to t are all that is left to do.

    The gradient of value t + 1 is held meanwhile, unless t is the last stage: then nothing has gone backward yet.
    """

    def __init__(self, chain: Chain, besides_saved: Sequence[tuple[int, int]] | None = None) -> None:
        self.stages = chain.stages
        self.besides_saved = besides_saved
        self.value = [chain.value_bytes(i) for i in range(len(chain.stages) + 1)]
        self.gradient = [chain.gradient_bytes(i) for i in range(len(chain.stages) + 1)]
        # Forward of a stage whose input is held for later anyway, and of one whose input is dropped afterwards.
        self.first = np.array([stage.output_bytes + stage.forward_overhead_bytes for stage in chain.stages])
        self.inner = self.first + np.array(self.value[:-1])

    def incoming_gradient(self, t: int) -> int:
        return self.gradient[t + 1] if t + 1 < len(self.stages) else 0

    def keep_all(self, s: int, t: int) -> int:
        """Forward of stage s keeping all, and, when all after it is done, its backward."""
        stage = self.stages[s]
        if self.besides_saved is not None:
            forward, backward = self.besides_saved[s]
        else:
            forward = stage.forward_overhead_bytes
            backward = self.gradient[s + 1] + self.gradient[s] + stage.backward_overhead_bytes
        forward += self.incoming_gradient(t)
        return stage.saved_bytes + max(forward, backward)

    def sweeps(self, s: int, t: int) -> npt.NDArray[np.int64]:
        """Forward from s, keeping its input only, to value s + 1, ..., to value t."""
        moments = self.inner[s:t].copy()
        moments[:1] = self.first[s]
        return np.maximum.accumulate(moments) + self.incoming_gradient(t)


def smallest_chain_bytes(chain: Chain) -> int:
    """The least bytes in which a persistent schedule runs the chain, its input counted in. O(L^3) time, exact."""
    needs, length = _Needs(chain), len(chain.stages)
    value = np.array(needs.value)
    # least[s, t]: bytes for stages s to t, besides value s.
    least = np.zeros((length + 1, length + 1), dtype=np.int64)
    for s in reversed(range(length)):
        for t in range(s, length):
            rest = least[s + 1, t] if s < t else 0
            best = max(needs.keep_all(s, t), chain.stages[s].saved_bytes + rest)
            if s < t:
                right = value[s + 1 : t + 1] + least[s + 1 : t + 1, t]
                best = min(best, np.maximum(np.maximum(needs.sweeps(s, t), right), least[s, s:t]).min())
            least[s, t] = best
    return chain.input_bytes + int(least[0, length - 1])


def rotor_schedule(chain: Chain, memory_bytes: int, slots: int = 500) -> ChainSchedule:
    """The fastest persistent schedule that fits, after Beaumont et al. 2019.

    Persistent: a value that was kept once stays until the backward of the stage that reads it. Dropping one and making
    it again can be faster, in theory and seldom.

    Dynamic program over (first stage, last stage, memory slots): O(L^3 S) time, O(L^2 S) memory for L stages and S
    slots. The first stage either keeps all, or only its input while the sweep goes on to some value that is kept; what
    is after that value is then done with less memory, and what is before it starts again from the input.

    Args:
        chain: of up to a few hundred stages: 18 bytes x L^2 S are needed meanwhile (24 MB for 60 stages, 360 slots).
        memory_bytes: the peak allowed, the input of the chain counted in.
        slots: into how many units memory is cut. Sizes are rounded up, so a schedule that fits within one slot per size
            held may be missed; exact from a slot per byte on, and slots finer than bytes are not used.

    Returns:
        The schedule; its peak is at most memory_bytes, its seconds include one forward and backward of every stage.

    Raises:
        InfeasibleError: nothing fits; `minimum_bytes` is what would, with slots fine enough.
    """
    if slots < 1:
        raise ValueError(f"Memory cannot be cut into {slots} slots.")
    capacity_bytes = memory_bytes - chain.input_bytes
    slots = min(slots, max(1, capacity_bytes))
    table = RotorTable(chain, capacity_bytes, slots) if capacity_bytes >= 0 else None
    if table is None or np.isinf(table.seconds[slots]):
        least = smallest_chain_bytes(chain)
        too_coarse = f" {slots} slots are too coarse: take more." if memory_bytes >= least else ""
        raise InfeasibleError(
            f"{memory_bytes} bytes in {slots} slots are too little for this chain: the smallest schedule needs {least} "
            f"bytes.{too_coarse}",
            budget_bytes=memory_bytes,
            minimum_bytes=least,
        )
    schedule = schedule_of(chain, [operation for operation, _ in table.operations(slots)])
    assert schedule.peak_bytes <= memory_bytes, "rounding sizes up to slots cannot make a schedule larger"
    return schedule


def _in_slots(size_bytes: int, capacity_bytes: int, slots: int) -> int:
    """Bytes rounded up to slots of capacity_bytes / slots; what does not fit anyway, to one slot more than there are."""
    return -(-size_bytes * slots // max(1, capacity_bytes)) if size_bytes <= capacity_bytes else slots + 1


_KEEP_ALL = 0
"""A choice: the first stage keeps all. -1: nothing fits. Otherwise the value that the sweep goes on to and is kept."""

NESTED: Final = -2
"""A choice for a single stage: do it as the chain of smaller stages that it is."""


class RotorTable:
    """Rotor's dynamic program, run once for all amounts of memory up to one.

    Args:
        chain: of up to a few hundred stages.
        capacity_bytes: the most memory asked for, the input of the chain not counted in.
        slots: into how many units that is cut.
        nested: for each stage, the cost at 0 to `slots` slots of doing it alone as a chain of its own; None: it is whole.
        besides_saved: for each stage, what a forward that keeps all and its backward need besides what is saved; None: as for any chain, its
            overheads, and for backward both gradients.
    """

    def __init__(
        self,
        chain: Chain,
        capacity_bytes: int,
        slots: int,
        nested: Sequence[npt.NDArray[np.float64] | None] | None = None,
        besides_saved: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.chain, self.capacity_bytes, self.slots = chain, capacity_bytes, slots
        self._choice, self._cost = _rotor_choices(chain, capacity_bytes, slots, nested, besides_saved)

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """The least seconds in 0, 1, ... slots; infinite where nothing fits."""
        return self._cost

    def operations(self, slots: int) -> list[tuple[ChainOperation, int]]:
        """The fastest schedule in so many slots. The second of each pair: slots for a stage that is done nested, else 0."""
        return _rotor_operations(self.chain, self._choice, self.capacity_bytes, self.slots, slots)


def _rotor_choices(
    chain: Chain,
    capacity_bytes: int,
    slots: int,
    nested: Sequence[npt.NDArray[np.float64] | None] | None = None,
    besides_saved: Sequence[tuple[int, int]] | None = None,
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float64]]:
    """What to do first with stages s to t in m slots, besides value s: choice[s, t, m]; and the cost of the whole chain in m slots."""
    needs, length = _Needs(chain, besides_saved), len(chain.stages)
    value_slots = [_in_slots(size, capacity_bytes, slots) for size in needs.value]
    saved_slots = [_in_slots(stage.saved_bytes, capacity_bytes, slots) for stage in chain.stages]
    forward = np.cumsum([0.0] + [stage.forward_seconds for stage in chain.stages])
    cost = np.full((length, length, slots + 1), np.inf)
    # after[t, k]: the cost of stages k to t when value k must fit too. Transposed for the inner loop to read in order.
    after = np.full((length, length, slots + 1), np.inf)
    choice = np.full((length, length, slots + 1), -1, dtype=np.int16)
    every_m = np.arange(slots + 1)
    # s: first stage, t: last stage, k: value kept next, m: slots.
    for s in reversed(range(length)):
        stage, saved = chain.stages[s], saved_slots[s]
        for t in range(s, length):
            best = np.full(slots + 1, np.inf)
            rest = cost[s + 1, t, : slots + 1 - saved] if s < t else 0.0
            best[saved:] = stage.forward_seconds + stage.backward_seconds + rest
            best[: _in_slots(needs.keep_all(s, t), capacity_bytes, slots)] = np.inf
            what = np.full(slots + 1, _KEEP_ALL, dtype=np.int16)
            alone = nested[s] if nested is not None and s == t else None
            if alone is not None:
                better = alone < best
                best[better] = alone[better]
                what[better] = NESTED
            if s < t:
                options = after[t, s + 1 : t + 1] + cost[s, s:t]
                options += (forward[s + 1 : t + 1] - forward[s])[:, None]
                # In slots as `_in_slots` counts them: a sweep may need more than there is.
                sweeps = needs.sweeps(s, t)
                sweep_slots = -(-np.minimum(sweeps, capacity_bytes + 1) * slots // max(1, capacity_bytes))
                options[every_m < sweep_slots[:, None]] = np.inf
                k = options.argmin(axis=0)
                swept = options[k, every_m]
                better = swept < best
                best[better] = swept[better]
                what[better] = k[better] + s + 1
            what[np.isinf(best)] = -1
            cost[s, t], choice[s, t] = best, what
            if s:
                after[t, s, value_slots[s] :] = best[: slots + 1 - value_slots[s]]
    return choice, cost[0, -1].copy()


def _rotor_operations(
    chain: Chain, choice: npt.NDArray[np.int16], capacity_bytes: int, slots: int, memory_slots: int
) -> list[tuple[ChainOperation, int]]:
    operations: list[tuple[ChainOperation, int]] = []
    # Either an operation to write down, or stages s to t to be done in m slots. A stack: long chains nest deep.
    to_do: list[ChainOperation | tuple[int, int, int]] = [(0, len(chain.stages) - 1, memory_slots)]
    while to_do:
        task = to_do.pop()
        if isinstance(task, ChainOperation):
            operations.append((task, 0))
            continue
        s, t, m = task
        k = int(choice[s, t, m])
        assert k != -1, "a part of a schedule that fits does not fit"
        if k == NESTED:
            operations += [
                (ChainOperation(OperationKind.FORWARD_ALL, s), m),
                (ChainOperation(OperationKind.BACKWARD, s), m),
            ]
        elif k == _KEEP_ALL:
            operations.append((ChainOperation(OperationKind.FORWARD_ALL, s), 0))
            to_do.append(ChainOperation(OperationKind.BACKWARD, s))
            if s < t:
                to_do.append((s + 1, t, m - _in_slots(chain.stages[s].saved_bytes, capacity_bytes, slots)))
        else:
            operations.append((ChainOperation(OperationKind.FORWARD_CHECKPOINT, s), 0))
            operations += [(ChainOperation(OperationKind.FORWARD_NONE, i), 0) for i in range(s + 1, k)]
            to_do.append((s, k - 1, m))
            to_do.append((k, t, m - _in_slots(chain.value_bytes(k), capacity_bytes, slots)))
    return operations
