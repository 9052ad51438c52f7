"""Calls of modules that can be made a second time as a whole: one recipe for all that backward reads of what ran in them.

The other recipes run single operations again, so that nothing runs in vain; but the engine has to follow forward for them, operation by operation. A call
that is made again is not followed: its arguments are kept, nothing that autograd saves in it is, and when backward asks for the first of it, the module is
called again, up to the last tensor that is asked for. That is what `torch.utils.checkpoint` does with a block, or with several in a row. On modules of small
operations it is the faster of the two, in bytes it is the coarser one.

A call is made again only where that has no other effect than the first one: its operations are functions of its arguments, of parameters and of buffers that
nothing writes meanwhile; it writes into nothing that was there before but running statistics, which the engine puts back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final, TypeVar

from memfit.planner.modules import calls_of_blocks
from memfit.values.trace import BEFORE_STEP, Category, ModuleCall, Operation, Phase, Trace

# What calls cost beside the kernels that run in them, in multiples of what the engine takes to run one operation again: to make a row of them again at all;
# for each call of a module, to note its arguments and to put it under hooks; what lies between the operations of forward (Python, autograd), which they meet a
# second time; and for each tensor that autograd saves.
ROW: Final = 6.4
CALL: Final = 3.9
OPERATION: Final = 0.64
TENSOR: Final = 0.19

Call = TypeVar("Call")

_BATCH_NORMS: Final = (
    "aten.native_batch_norm.",
    "aten._native_batch_norm_legit.",
    "aten.cudnn_batch_norm.",
    "aten.miopen_batch_norm.",
    "aten._batch_norm_with_update.",
)
_COUNTERS: Final = frozenset({"aten.add_.Tensor", "aten.add_.Scalar"})
_CASTS: Final = frozenset({"aten._to_copy.default", "aten.to.dtype"})
_ASKED_AGAIN: Final = frozenset({"aten._local_scalar_dense.default"})  # asking for a number has no effect


@dataclass(frozen=True, slots=True)
class RepeatableCalls:
    """Calls, one right after the other, that can be made again together.

    Attributes:
        calls: which, in `Trace.calls`.
        makes: storages that they make and that autograd saves in them alone.
        saves: numbers of the saves that lie in these.
        inputs: storages made before them in forward that their arguments lie in.
        operations: how many of their operations run again; those after the last of the saves do not.
        random: whether one of these draws random numbers.
        buffers: names of the running statistics that are put back.
        peak_bytes: largest number of bytes above what was live before they are made again.
        begin: event of the first operation.
        last: event of the last one that runs again.
    """

    calls: tuple[ModuleCall, ...]
    makes: tuple[int, ...]
    saves: tuple[int, ...]
    inputs: tuple[int, ...]
    operations: int
    random: bool
    buffers: tuple[str, ...]
    peak_bytes: int
    begin: int
    last: int

    @property
    def begins_with(self) -> int:
        """Number of their first operation in forward."""
        return self.calls[0].operations[0]

    @property
    def ends_before(self) -> int:
        """Number of the first operation in forward after them."""
        return self.calls[-1].operations[1]

    @property
    def saves_between(self) -> tuple[int, int]:
        """Of all tensors that autograd saves in them, the number of the first, and that of the first after them."""
        return self.calls[0].saves[0], self.calls[-1].saves[1]


def repeatable_calls(trace: Trace, managed: frozenset[int]) -> list[RepeatableCalls]:
    """The calls of repeated blocks, of the modules right inside them, and of 2, 4, 8 and so on blocks in a row, that can be made again.

    Args:
        trace: the step.
        managed: storages that operations of forward make.

    Returns:
        In the order in which they began, of those that begin with the same call the longest first.
    """
    if trace.paths or trace.sized_by_values or trace.before or trace.choices.streamed or _updates_in_backward(trace):
        return []
    facts = _Facts(trace, managed)
    # What is made again is counted from where it is known which path forward takes.
    early = {call.module for call in trace.calls if call.operations[0] <= trace.shared_operations}
    early = early if trace.shared_operations else set()
    rows = [
        row
        for row in _rows(calls_of_blocks(trace))
        if all(call.repeatable and call.module not in early for call in row)
    ]
    found = [again for row in rows if (again := facts.repeatable(row)) is not None]
    return sorted(found, key=lambda again: (again.begins_with, -again.ends_before))


def _rows(calls: Sequence[ModuleCall]) -> Iterator[tuple[ModuleCall, ...]]:
    """Each call alone, and blocks right after each other by powers of two."""
    for call in calls:
        yield (call,)
    outer = outermost(calls, lambda call: call.operations)
    length = 2
    while length <= len(outer):
        for first in range(0, len(outer), length):
            row = outer[first : first + length]
            joined = all(a.operations[1] == b.operations[0] and a.saves[1] == b.saves[0] for a, b in pairwise(row))
            if len(row) > 1 and joined:
                yield tuple(row)
        length *= 2


def is_batch_norm(operation: Operation) -> bool:
    """Whether it may write running statistics, which its schema does not say."""
    return operation.name.startswith(_BATCH_NORMS)


def statistics_written(trace: Trace) -> dict[int, int]:
    """The running statistics that batch norms in forward write, and the event of the last one that does: what others have read of them before is gone."""
    return {
        s: event
        for event in trace.events_in_forward
        if is_batch_norm(trace.operations[trace.events[event]])
        for s in trace.operations[trace.events[event]].reads
        if trace.storages[s].category is Category.BUFFER and trace.storages[s].birth == BEFORE_STEP
    }


def outermost(calls: Iterable[Call], operations: Callable[[Call], tuple[int, int]]) -> list[Call]:
    """The calls that are not inside another.

    Args:
        calls: in the order in which they began, outer ones before inner ones.
        operations: of a call, the number of its first operation, and that of the first after it.
    """
    found: list[Call] = []
    end = 0
    for call in calls:
        first, until = operations(call)
        if first >= end:
            found.append(call)
            end = until
    return found


def _updates_in_backward(trace: Trace) -> bool:
    within = (trace.operations[e] for e in trace.events[: trace.pass_events] if e >= 0)
    return any(operation.phase is Phase.OPTIMIZER for operation in within)


class _Facts:
    """What of a trace is asked for each row of calls."""

    def __init__(self, trace: Trace, managed: frozenset[int]) -> None:
        self._trace, self._managed = trace, managed
        self._events = trace.events_in_forward
        self._written: dict[int, list[int]] = defaultdict(list)  # events that write each storage
        self._statistics_written = statistics_written(trace)
        self._last_read: dict[int, int] = {}  # in forward
        for event, op in enumerate(trace.events[: trace.pass_events]):
            if op >= 0:
                for s in trace.operations[op].writes:
                    self._written[s].append(event)
        for event in self._events:
            self._last_read.update(dict.fromkeys(trace.operations[trace.events[event]].reads, event))
        self._saves: dict[int, list[int]] = defaultdict(list)
        for number, save in enumerate(trace.saves):
            self._saves[save.storage].append(number)
        self._born: list[int] = sorted(
            (s for s, storage in enumerate(trace.storages) if 0 <= storage.birth < trace.forward_events),
            key=lambda s: trace.storages[s].birth,
        )
        self._births = [trace.storages[s].birth for s in self._born]

    def repeatable(self, calls: tuple[ModuleCall, ...]) -> RepeatableCalls | None:
        """What making these calls again takes; None where they cannot be made again, or nothing is gained by it."""
        trace = self._trace
        first, until = calls[0].operations[0], calls[-1].operations[1]
        begin, end = self._events[first], self._events[until - 1]
        born = self._born[bisect_right(self._births, begin - 1) : bisect_right(self._births, end)]
        inside = range(calls[0].saves[0], calls[-1].saves[1])
        makes = frozenset(s for s in born if s in self._managed and self._is_saved_in(s, inside, end))
        saves = tuple(number for number in inside if trace.saves[number].storage in makes)
        asked = [number for number in saves if trace.saves[number].unpacks]
        if not asked:
            return None
        last = max(trace.saves[number].packed for number in asked)
        operations = [event for event in self._events[first:until] if event <= last]
        if not operations or not self._has_no_other_effect(calls, operations, frozenset(born), end):
            return None
        buffers = self._statistics(calls, operations)
        if buffers is None:
            return None
        names, copies = buffers
        random = any(trace.operations[trace.events[event]].random for event in operations)
        given = dict.fromkeys(s for call in calls for s in call.arguments)
        return RepeatableCalls(
            calls,
            tuple(s for s in born if s in makes),
            saves,
            tuple(s for s in given if s in self._managed and trace.storages[s].birth < begin),
            len(operations),
            random,
            names,
            copies + (trace.rng_state_bytes if random else 0) + self._peak(operations, born, saves),
            begin,
            operations[-1],
        )

    def _is_saved_in(self, storage: int, inside: range, end: int) -> bool:
        """Whether backward reads it in these saves alone, each once, and nothing writes it after the calls."""
        saves = self._saves.get(storage, ())
        return (
            bool(saves)
            and all(number in inside for number in saves)
            and all(len(self._trace.saves[number].unpacks) <= 1 for number in saves)
            and all(event >= self._trace.forward_events for n in saves for event, _ in self._trace.saves[n].unpacks)
            and max(self._written.get(storage, (-1,))) <= end
        )

    def _has_no_other_effect(
        self, calls: Sequence[ModuleCall], operations: Sequence[int], born: frozenset[int], end: int
    ) -> bool:
        trace = self._trace
        given = {s for call in calls for s in call.arguments}
        for event in operations:
            operation = trace.operations[trace.events[event]]
            if operation.collective is not None or not (operation.rerunnable or operation.name in _ASKED_AGAIN):
                return False
            if operation.name in _COUNTERS and operation.writes and self._are_buffers(operation.writes):
                continue
            if any(s not in born for s in operation.writes):
                return False
            for s in operation.reads:
                if s in born:
                    continue
                # What is not among the arguments is found by the module itself: it must be there still, and unchanged.
                if (s in self._managed and s not in given) or any(e >= operations[0] for e in self._written.get(s, ())):
                    return False
                if not is_batch_norm(operation) and self._statistics_written.get(s, -1) >= operations[0]:
                    return False
        # What leaves the calls otherwise than by their last result (a list of the loss function's) would be there twice.
        escaped = (s for s in born if self._last_read.get(s, -1) > end and s not in calls[-1].results)
        return all(map(self._is_cast_of_parameter, escaped))

    def _are_buffers(self, storages: Sequence[int]) -> bool:
        return all(self._trace.storages[s].category is Category.BUFFER for s in storages)

    def _is_cast_of_parameter(self, storage: int) -> bool:
        """Whether autocast made it of a parameter; it keeps such casts until it ends."""
        trace = self._trace
        operation = trace.operations[trace.events[trace.storages[storage].birth]]
        return operation.name in _CASTS and all(
            trace.storages[s].category is Category.PARAMETER for s in operation.reads
        )

    def _statistics(self, calls: Sequence[ModuleCall], operations: Sequence[int]) -> tuple[tuple[str, ...], int] | None:
        """Names of the running statistics that the calls write, and the bytes of a copy; None where they are not all of batch norms."""
        trace = self._trace
        inner = tuple(f"{call.module}." if call.module else "" for call in calls)
        names = tuple(name for name in trace.changed_buffers if name.startswith(inner))
        if not names:
            return (), 0
        found: set[int] = set()
        for event in operations:
            operation = trace.operations[trace.events[event]]
            norm = is_batch_norm(operation)
            if norm or operation.name in _COUNTERS:
                found.update(
                    s
                    for s in (operation.reads if norm else operation.writes)
                    if trace.storages[s].category is Category.BUFFER and trace.storages[s].birth == BEFORE_STEP
                )
        # A norm after the last operation that runs again is not among these, and its statistics are put back all the same.
        return (names, sum(trace.storages[s].bytes for s in found)) if len(found) == len(names) else None

    def _peak(self, operations: Sequence[int], born: Sequence[int], saves: Iterable[int]) -> int:
        """Largest number of bytes that the calls hold while they are made again."""
        trace, last = self._trace, operations[-1]
        comes, goes = lives_again(trace, born, last, saves)
        level = peak = 0
        for event in sorted({*comes, *goes, *operations}):
            level += sum(trace.storages[s].bytes for s in comes[event])
            code = trace.events[event]
            peak = max(peak, level + (trace.operations[code].workspace_bytes if code >= 0 else 0))
            level -= sum(trace.storages[s].bytes for s in goes[event])
        return peak


def lives_again(
    trace: Trace, born: Iterable[int], last: int, saves: Iterable[int]
) -> tuple[defaultdict[int, list[int]], defaultdict[int, list[int]]]:
    """Which storages come, and after it go, at each event while calls are made again: what is asked for stays, the rest goes as in forward.

    Args:
        trace: of the step.
        born: storages that are made in the calls.
        last: event of the last operation that runs again.
        saves: numbers of what the calls are made again for. What a graph saves that is let go before backward is not asked for.
    """
    asked = {trace.saves[number].storage for number in saves if trace.saves[number].unpacks}
    comes: defaultdict[int, list[int]] = defaultdict(list)
    goes: defaultdict[int, list[int]] = defaultdict(list)
    for s in born:
        storage = trace.storages[s]
        if storage.birth <= last:
            comes[storage.birth].append(s)
            if s not in asked and storage.death < last:
                goes[storage.death].append(s)
    return comes, goes


def seconds_of(again: RepeatableCalls, trace: Trace) -> float:
    """What making calls again takes, the engine's own time included."""
    first = again.begins_with
    operations = trace.operations[first : first + again.operations]
    seconds = sum(operation.seconds for operation in operations)
    factor = fmean(operation.host_factor for operation in operations) if operations else 1.0
    begin, end = again.saves_between
    own = ROW + CALL * len(again.calls) + OPERATION * again.operations + TENSOR * (end - begin)
    return seconds + trace.recomputed_seconds * own * factor
