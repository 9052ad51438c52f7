"""Known optima and rules on chains: the rivals our plans must beat, and oracles for tests.

A chain is the only shape for which optimal recomputation is known, and what every rule of thumb assumes. Two models:

* `Stage`, `Chain`: stages of different seconds and bytes, as in rotor. `rotor_schedule` is optimal among persistent
  schedules, `brute_force_chain` tries all on short chains, `segment_operations` follows rules (`every_block`,
  `sqrt_segments`, `store_all`), and `simulate_chain` says what any list of operations comes to.
* Revolve's: equal steps and equal states, counted instead of measured. `revolve_cost`, `revolve_schedule`.

Stages count from 0. Stage i reads value i and makes value i + 1; value 0 is the input of the chain. All bytes are
bytes, all times seconds; parameters, their gradients and optimizer state are not part of a chain.

Sources: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory", Inria RR-9302 (2019), ACM TOMS (2024), https://hal.science/hal-02352969, for
rotor. Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000), https://doi.org/10.1145/347837.347846. Chen,
Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174 (2016), for the square root.
Where we differ from rotor: the gradient of what a stage reads counts during its backward, beside that of what it makes;
a forward sweep needs room for the operations it consists of, not for those up to the end of the chain; the loss
gradient does not exist before the first backward. So bytes are those of `simulate_chain` exactly, but for slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count, pairwise
from math import comb, sqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.errors import InfeasibleError


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a chain.

    Attributes:
        forward_seconds: time of its forward, the same whatever is kept of it.
        backward_seconds: time of its backward.
        output_bytes: the value it makes.
        saved_bytes: all that its backward needs besides its input; the output is counted in.
        gradient_bytes: the gradient of the value it makes.
        forward_overhead_bytes: alive only while its forward runs.
        backward_overhead_bytes: alive only while its backward runs, besides both gradients and what was saved.
    """

    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    saved_bytes: int
    gradient_bytes: int
    forward_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be zero or more.")
        if self.saved_bytes < self.output_bytes:
            raise ValueError(f"saved_bytes ({self.saved_bytes}) counts the output of {self.output_bytes} bytes in.")


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages that read each other's outputs, the last of which makes the loss.

    Attributes:
        stages: in order of execution.
        input_bytes: value 0, in memory from the start until the backward of stage 0.
        input_gradient_bytes: the gradient of value 0; zero where none is wanted.
    """

    stages: tuple[Stage, ...]
    input_bytes: int
    input_gradient_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("A chain needs at least one stage.")
        if self.input_bytes < 0 or self.input_gradient_bytes < 0:
            raise ValueError(
                f"Negative bytes: {self.input_bytes} of input, {self.input_gradient_bytes} of its gradient."
            )

    def value_bytes(self, i: int) -> int:
        """Bytes of value i, what stage i reads."""
        return self.stages[i - 1].output_bytes if i else self.input_bytes

    def gradient_bytes(self, i: int) -> int:
        """Bytes of the gradient of value i."""
        return self.stages[i - 1].gradient_bytes if i else self.input_gradient_bytes


class OperationKind(StrEnum):
    """What a schedule can do with a stage; the names are rotor's F_none, F_ck, F_all and B."""

    FORWARD_NONE = "forward, drop the input"
    FORWARD_CHECKPOINT = "forward, keep the input"
    FORWARD_ALL = "forward, keep the input and all that backward needs"
    BACKWARD = "backward, drop the input and what was saved"


class Operation(NamedTuple):
    """One operation of a schedule."""

    kind: OperationKind
    stage: int


class ChainRun(NamedTuple):
    """What running a schedule takes, the input of the chain counted in."""

    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChainSchedule:
    """A schedule and what it takes, as `simulate_chain` finds it."""

    operations: tuple[Operation, ...]
    peak_bytes: int
    seconds: float


class _Memory(NamedTuple):
    """What is in memory between operations. Sets of small numbers are bits of an integer."""

    values: int  # Values held by themselves, not as the output among what a stage saved.
    saved: int  # Stages of which all that backward needs is held.
    gradient: int  # The value whose gradient is held.
    held_bytes: int


def _initial(chain: Chain) -> _Memory:
    return _Memory(values=1, saved=0, gradient=len(chain.stages), held_bytes=chain.input_bytes)


def _obstacle(memory: _Memory, operation: Operation) -> str | None:
    """Why this operation cannot run now; None if it can."""
    kind, i = operation
    by_itself = memory.values >> i & 1
    if not (by_itself or (i and memory.saved >> (i - 1) & 1)):
        return f"value {i} is not in memory"
    if kind is OperationKind.BACKWARD:
        if memory.gradient != i + 1:
            return f"the gradient in memory is that of value {memory.gradient}"
        return None if memory.saved >> i & 1 else "what it saves is not in memory"
    if i >= memory.gradient:
        return "its backward is done"
    if (memory.values >> (i + 1) | memory.saved >> i) & 1:
        return f"value {i + 1} is in memory already"
    if kind is OperationKind.FORWARD_NONE and not by_itself:
        return f"value {i} belongs to what stage {i - 1} saved, so it cannot be dropped"
    return None


def _run(chain: Chain, memory: _Memory, operation: Operation) -> tuple[_Memory, int]:
    """The memory after an operation that can run, and the bytes at its fullest moment."""
    kind, i = operation
    stage = chain.stages[i]
    values, saved, gradient, held = memory
    match kind:
        case OperationKind.BACKWARD:
            # The gradient of the loss is made by whoever starts backward, so it is not held before.
            made = chain.gradient_bytes(i) + (stage.gradient_bytes if gradient == len(chain.stages) else 0)
            peak = held + made + stage.backward_overhead_bytes
            held += made - stage.gradient_bytes - stage.saved_bytes
            if values >> i & 1:
                held -= chain.value_bytes(i)
            return _Memory(values & ~(1 << i), saved & ~(1 << i), i, held), peak
        case OperationKind.FORWARD_ALL:
            held += stage.saved_bytes
            return _Memory(values, saved | 1 << i, gradient, held), held + stage.forward_overhead_bytes
        case _:
            held += stage.output_bytes
            peak = held + stage.forward_overhead_bytes
            values |= 1 << (i + 1)
            if kind is OperationKind.FORWARD_NONE:
                values &= ~(1 << i)
                held -= chain.value_bytes(i)
            return _Memory(values, saved, gradient, held), peak


def simulate_chain(chain: Chain, operations: Iterable[Operation]) -> ChainRun:
    """Run a schedule on the model of the chain.

    Every operation holds its inputs, its results and its overhead at once, beside all that is held for later.

    Raises:
        ValueError: an operation lacks what it needs or makes what is there, or the backward of a stage never runs.
    """
    memory = _initial(chain)
    peak_bytes, seconds = memory.held_bytes, 0.0
    for number, operation in enumerate(operations):
        if not 0 <= operation.stage < len(chain.stages):
            raise ValueError(f"Operation {number}: the chain has no stage {operation.stage}.")
        obstacle = _obstacle(memory, operation)
        if obstacle:
            raise ValueError(f"Operation {number}, {operation.kind.name} of stage {operation.stage}: {obstacle}.")
        memory, moment_bytes = _run(chain, memory, operation)
        peak_bytes = max(peak_bytes, moment_bytes)
        seconds += _seconds(chain, operation)
    if memory.gradient:
        raise ValueError(f"The schedule ends before the backward of stage {memory.gradient - 1}.")
    return ChainRun(peak_bytes, seconds)


def _seconds(chain: Chain, operation: Operation) -> float:
    stage = chain.stages[operation.stage]
    return stage.backward_seconds if operation.kind is OperationKind.BACKWARD else stage.forward_seconds


def _schedule(chain: Chain, operations: Sequence[Operation]) -> ChainSchedule:
    return ChainSchedule(tuple(operations), *simulate_chain(chain, operations))


# ------------------------------------------------------------------------------------------------------- rules of thumb


def store_all(length: int) -> tuple[int, ...]:
    """One segment: plain training, nothing recomputed."""
    return every_block(length)[:1]


def every_block(length: int) -> tuple[int, ...]:
    """A segment for each stage, as `gradient_checkpointing=True` does with the blocks of a transformer."""
    if length < 1:
        raise ValueError(f"A chain of {length} stages has no segments.")
    return tuple(range(length))


def sqrt_segments(length: int) -> tuple[int, ...]:
    """First stages of about sqrt(length) segments of about equal length, after Chen et al. 2016."""
    num_segments = round(sqrt(len(every_block(length))))
    return tuple(k * length // num_segments for k in range(num_segments))


def segment_operations(length: int, first_stages: Sequence[int]) -> tuple[Operation, ...]:
    """Keep the input of each segment only, and run a segment again, keeping all, when its backward comes.

    The last segment keeps all at once, since its backward comes at once, as in `torch.utils.checkpoint_sequential`.

    Args:
        length: stages of the chain.
        first_stages: of each segment, increasing; the first is 0.
    """
    bounds = (*first_stages, length)
    if bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(f"Segments must start at 0 and then at increasing stages below {length}, not {first_stages}.")
    segments = [range(a, b) for a, b in pairwise(bounds)]
    operations = []
    for segment in segments[:-1]:
        operations.append(Operation(OperationKind.FORWARD_CHECKPOINT, segment[0]))
        operations += [Operation(OperationKind.FORWARD_NONE, i) for i in segment[1:]]
    for segment in reversed(segments):
        operations += [Operation(OperationKind.FORWARD_ALL, i) for i in segment]
        operations += [Operation(OperationKind.BACKWARD, i) for i in reversed(segment)]
    return tuple(operations)


# ---------------------------------------------------------------------------------------------------------------- rotor


class _Needs:
    """Bytes that single operations and sweeps need, beside value s, when stages s to t are all that is left to do.

    The gradient of value t + 1 is held meanwhile, unless t is the last stage: then nothing has gone backward yet.
    """

    def __init__(self, chain: Chain, beside_saved: Sequence[tuple[int, int]] | None = None) -> None:
        self.stages = chain.stages
        self.beside_saved = beside_saved
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
        if self.beside_saved is not None:
            forward, backward = self.beside_saved[s]
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
    # least[s, t]: bytes for stages s to t, beside value s.
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
    room_bytes = memory_bytes - chain.input_bytes
    slots = min(slots, max(1, room_bytes))
    table = RotorTable(chain, room_bytes, slots) if room_bytes >= 0 else None
    if table is None or np.isinf(table.seconds[slots]):
        least = smallest_chain_bytes(chain)
        too_coarse = f" {slots} slots are too coarse: take more." if memory_bytes >= least else ""
        raise InfeasibleError(
            f"{memory_bytes} bytes in {slots} slots are too little for this chain: the smallest schedule needs {least} "
            f"bytes.{too_coarse}",
            budget_bytes=memory_bytes,
            minimum_bytes=least,
        )
    schedule = _schedule(chain, [operation for operation, _ in table.operations(slots)])
    assert schedule.peak_bytes <= memory_bytes, "rounding sizes up to slots cannot make a schedule larger"
    return schedule


def _in_slots(size_bytes: int, room_bytes: int, slots: int) -> int:
    """Bytes rounded up to slots of room_bytes / slots; what does not fit anyway, to one slot more than there are."""
    return -(-size_bytes * slots // max(1, room_bytes)) if size_bytes <= room_bytes else slots + 1


_KEEP_ALL = 0
"""A choice: the first stage keeps all. -1: nothing fits. Otherwise the value that the sweep goes on to and is kept."""

NESTED: Final = -2
"""A choice for a single stage: do it as the chain of smaller stages that it is."""


class RotorTable:
    """Rotor's dynamic program, run once for all amounts of memory up to one.

    Args:
        chain: of up to a few hundred stages.
        room_bytes: the most memory asked for, the input of the chain not counted in.
        slots: into how many units that is cut.
        nested: for each stage, the cost at 0 to `slots` slots of doing it alone as a chain of its own; None: it is whole.
        beside_saved: for each stage, what a forward that keeps all and its backward need besides what is saved; None: as for any chain, its
            overheads, and for backward both gradients.
    """

    def __init__(
        self,
        chain: Chain,
        room_bytes: int,
        slots: int,
        nested: Sequence[npt.NDArray[np.float64] | None] | None = None,
        beside_saved: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.chain, self.room_bytes, self.slots = chain, room_bytes, slots
        self._choice, self._cost = _rotor_choices(chain, room_bytes, slots, nested, beside_saved)

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """The least seconds in 0, 1, ... slots; infinite where nothing fits."""
        return self._cost

    def operations(self, slots: int) -> list[tuple[Operation, int]]:
        """The fastest schedule in so many slots. The second of each pair: slots for a stage that is done nested, else 0."""
        return _rotor_operations(self.chain, self._choice, self.room_bytes, self.slots, slots)


def _rotor_choices(
    chain: Chain,
    room_bytes: int,
    slots: int,
    nested: Sequence[npt.NDArray[np.float64] | None] | None = None,
    beside_saved: Sequence[tuple[int, int]] | None = None,
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float64]]:
    """What to do first with stages s to t in m slots, beside value s: choice[s, t, m]; and the cost of the whole chain in m slots."""
    needs, length = _Needs(chain, beside_saved), len(chain.stages)
    value_slots = [_in_slots(size, room_bytes, slots) for size in needs.value]
    saved_slots = [_in_slots(stage.saved_bytes, room_bytes, slots) for stage in chain.stages]
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
            best[: _in_slots(needs.keep_all(s, t), room_bytes, slots)] = np.inf
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
                sweep_slots = -(-np.minimum(sweeps, room_bytes + 1) * slots // max(1, room_bytes))
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
    chain: Chain, choice: npt.NDArray[np.int16], room_bytes: int, slots: int, memory_slots: int
) -> list[tuple[Operation, int]]:
    operations: list[tuple[Operation, int]] = []
    # Either an operation to write down, or stages s to t to be done in m slots. A stack: long chains nest deep.
    to_do: list[Operation | tuple[int, int, int]] = [(0, len(chain.stages) - 1, memory_slots)]
    while to_do:
        task = to_do.pop()
        if isinstance(task, Operation):
            operations.append((task, 0))
            continue
        s, t, m = task
        k = int(choice[s, t, m])
        assert k != -1, "a part of a schedule that fits does not fit"
        if k == NESTED:
            operations += [(Operation(OperationKind.FORWARD_ALL, s), m), (Operation(OperationKind.BACKWARD, s), m)]
        elif k == _KEEP_ALL:
            operations.append((Operation(OperationKind.FORWARD_ALL, s), 0))
            to_do.append(Operation(OperationKind.BACKWARD, s))
            if s < t:
                to_do.append((s + 1, t, m - _in_slots(chain.stages[s].saved_bytes, room_bytes, slots)))
        else:
            operations.append((Operation(OperationKind.FORWARD_CHECKPOINT, s), 0))
            operations += [(Operation(OperationKind.FORWARD_NONE, i), 0) for i in range(s + 1, k)]
            to_do.append((s, k - 1, m))
            to_do.append((k, t, m - _in_slots(chain.value_bytes(k), room_bytes, slots)))
    return operations


def brute_force_chain(chain: Chain, memory_bytes: int, *, persistent: bool = True) -> ChainSchedule:
    """The fastest schedule of all that fit: shortest path over everything that can be in memory. For tests.

    Args:
        chain: of a few stages; the number of states grows like 6 to the number of stages.
        memory_bytes: the peak allowed, the input of the chain counted in.
        persistent: only schedules in which a value kept once stays until the backward of the stage that reads it.

    Raises:
        InfeasibleError: nothing fits; `minimum_bytes` is what a persistent schedule needs.
    """
    start = (_initial(chain), 0)  # Second: values kept once, as bits.
    seconds = {start: 0.0}
    reached_by: dict[tuple[_Memory, int], tuple[tuple[_Memory, int], Operation]] = {}
    ticket = count()  # Breaks ties: states need no order.
    queue = [(0.0, next(ticket), start)]
    every_operation = [Operation(kind, i) for kind in OperationKind for i in range(len(chain.stages))]
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
            return _schedule(chain, operations[::-1])
        for operation in every_operation:
            kind, i = operation
            if _obstacle(memory, operation) or (kind is OperationKind.FORWARD_NONE and kept >> i & 1):
                continue
            after, peak_bytes = _run(chain, memory, operation)
            if peak_bytes > memory_bytes:
                continue
            keeps = persistent and kind in {OperationKind.FORWARD_CHECKPOINT, OperationKind.FORWARD_ALL}
            successor = (after, (kept | 1 << i if keeps else kept) & after.values)
            total = so_far + _seconds(chain, operation)
            if total < seconds.get(successor, float("inf")):
                seconds[successor] = total
                reached_by[successor] = (state, operation)
                heappush(queue, (total, next(ticket), successor))
    raise InfeasibleError(
        f"No schedule runs this chain in {memory_bytes} bytes.",
        budget_bytes=memory_bytes,
        minimum_bytes=smallest_chain_bytes(chain),
    )


# -------------------------------------------------------------------------------------------------------------- revolve


class RevolveKind(StrEnum):
    """What a revolve schedule does next. The state in hand is what the last advance made, or one read from its slot."""

    ADVANCE = "from state `start`, in hand or in a slot, run forward to state `stop`"
    SNAPSHOT = "put the state in hand into a slot"
    BACKWARD = "from state `start`, in hand or in a slot, run step `start` recording it, and go backward through it"
    RELEASE = "free the slot of state `start`"


class RevolveAction(NamedTuple):
    """One action; `stop` differs from `start` for an advance only. Step i leads from state i to state i + 1."""

    kind: RevolveKind
    start: int
    stop: int


def revolve_cost(length: int, slots: int) -> int:
    """The least forward steps that going backward through equal steps takes besides recording each once.

    This is t(l, s) of Griewank and Walther 2000: r l - binomial(s + r, r - 1), where r, the most often that any step is
    run, is the least with l <= binomial(s + r, s).

    Conventions: slots hold states, and the initial state takes one of them, so there is at least one. The state in hand
    and the record of the step being reversed are not counted. Each step is run once more, recording, when it is
    reversed: evaluations in all are cost + length. So even with a slot for every state the cost is length - 1.

    Args:
        length: number of steps, zero or more.
        slots: states that can be held, the initial one among them.
    """
    repeats = _repeats(length, slots)
    return repeats * length - _binomial(slots + 1, repeats - 1)


def _binomial(slots: int, repeats: int) -> int:
    """beta(s, r) = binomial(s + r, s): the longest chain reversible with s slots and no step run more than r times."""
    return comb(slots + repeats, slots) if repeats >= 0 else 0


def _repeats(length: int, slots: int) -> int:
    if length < 0 or slots < 1:
        raise ValueError(f"{length} steps with {slots} slots: steps cannot be negative, and the input needs a slot.")
    repeats, reach = 0, 1
    while reach < length:
        repeats += 1
        reach = reach * (slots + repeats) // repeats
    return repeats


def revolve_schedule(length: int, slots: int) -> tuple[RevolveAction, ...]:
    """Actions that go backward through equal steps with `revolve_cost(length, slots)` forward steps.

    At the start state 0 is in hand. Conventions as for the cost; never more than `slots` states are in slots.
    """
    _repeats(length, slots)
    actions: list[RevolveAction] = []

    def act(kind: RevolveKind, start: int, stop: int | None = None) -> None:
        actions.append(RevolveAction(kind, start, start if stop is None else stop))

    # An action to write down, or (a, b, s): go backward from state b to state a, with state a in hand or in a slot and
    # s slots, that one counted in. A stack: there may be more slots than Python has levels of recursion.
    to_do: list[RevolveAction | tuple[int, int, int]] = [(0, length, slots)]
    if length > 1:
        act(RevolveKind.SNAPSHOT, 0)
        to_do.insert(0, RevolveAction(RevolveKind.RELEASE, 0, 0))
    while to_do:
        task = to_do.pop()
        if isinstance(task, RevolveAction):
            actions.append(task)
            continue
        a, b, s = task
        if b - a <= 1:
            if a < b:
                act(RevolveKind.BACKWARD, a)
            continue
        # Any middle in a certain interval is optimal (section 2 of the paper); this is the earliest.
        repeats = _repeats(b - a, s)
        middle = a + max(1, _binomial(s, repeats - 2), b - a - _binomial(s - 1, repeats))
        act(RevolveKind.ADVANCE, a, middle)
        to_do.append((a, middle, s))
        if b - middle > 1:
            act(RevolveKind.SNAPSHOT, middle)
            to_do.append(RevolveAction(RevolveKind.RELEASE, middle, middle))
        to_do.append((middle, b, s - 1))
    return tuple(actions)
