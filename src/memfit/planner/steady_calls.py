"""Where forward may take several paths: the calls of modules that run the same operations on each of them.

A plan for one path says what to do at the n-th operation, and is of no use on another. Within a *steady* call (a block that a path runs as it is or leaves
out) the n-th operation of the call is the same everywhere, so what is decided there, from what the call itself makes, holds on every path. The calls
taken are the largest: a whole encoder where chance decides nothing inside, else each of its blocks, else what is in them. Of a call that is not the same
everywhere, what it begins with on every path is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from memfit.values.trace import ModuleCall, Trace

Key = tuple[str, int]
"""Path of a module, and which of its calls."""
Form = tuple[object, ...]
"""What a call runs and saves; equal for calls that one script serves."""
Decision = tuple[int, int, tuple[tuple[int, ...], ...]]
"""A save of a call, which of its unpacks, and the operations of the call that run again before it, recipe by recipe."""


class SteadyCalls:
    """Of one path, the largest calls that are the same on all paths on which they happen.

    Args:
        trace: of the path.
        everything: that path and all others.

    Attributes:
        calls: in order; none lies in another.
    """

    def __init__(self, trace: Trace, everything: tuple[Trace, ...]) -> None:
        self.trace = trace
        happens: dict[Key, list[tuple[Trace, ModuleCall]]] = {}
        for path in everything:
            for call in path.calls:
                happens.setdefault((call.module, call.number), []).append((path, call))
        found: list[ModuleCall] = []
        end = 0
        for call in trace.calls:  # an outer call begins before the inner ones
            if call.operations[0] < end or call.operations[0] == call.operations[1]:
                continue
            paths = happens[call.module, call.number]
            steady = call if len({form(*each) for each in paths}) == 1 else _beginning(trace, call, paths)
            if steady is not None:
                found.append(steady)
                end = steady.operations[1]
        self.calls: tuple[ModuleCall, ...] = tuple(found)

    @cached_property
    def _begins(self) -> tuple[list[int], list[int]]:
        return [c.operations[0] for c in self.calls], [c.saves[0] for c in self.calls]

    def of_operation(self, number: int) -> int:
        """Which of the calls a forward operation is in; -1 for none."""
        at = bisect_right(self._begins[0], number) - 1
        return at if at >= 0 and number < self.calls[at].operations[1] else -1

    def of_save(self, number: int) -> int:
        """Which of the calls a save is in; -1 for none."""
        at = bisect_right(self._begins[1], number) - 1
        while at > 0 and self.calls[at].saves[0] == self.calls[at].saves[1]:
            at -= 1
        return at if at >= 0 and number < self.calls[at].saves[1] else -1

    @cached_property
    def forms(self) -> Mapping[Key, Form]:
        """Of each call, what it runs."""
        return {(c.module, c.number): form(self.trace, c) for c in self.calls}

    @cached_property
    def home(self) -> Mapping[int, int]:
        """Of each storage that is local to one of the calls, which."""
        trace = self.trace
        made = {
            s: self.of_operation(n)
            for n, op in enumerate(trace.operations[: trace.forward_operations])
            for s in op.makes
        }
        out = {s: call for s, call in made.items() if call >= 0}
        for number, op in enumerate(trace.operations[: trace.forward_operations]):
            here = self.of_operation(number)
            for s in (*op.reads, *op.writes):
                if out.get(s, here) != here:
                    del out[s]
        for number, save in enumerate(trace.saves):
            here = self.of_save(number)
            if out.get(save.storage, here) != here:
                del out[save.storage]
        return out


def _beginning(trace: Trace, call: ModuleCall, paths: Sequence[tuple[Trace, ModuleCall]]) -> ModuleCall | None:
    """The operations with which a call begins on every path, up to a call in it that is not the same on each; None where there are none."""
    begin, end = call.operations
    rows = [
        [(op.name, op.wanted, op.module, len(op.makes)) for op in path.operations[slice(*each.operations)]]
        for path, each in paths
    ]
    length = min(map(len, rows))
    length = next((n for n in range(length) if len({row[n] for row in rows}) > 1), length)
    for inner in trace.calls:
        if begin <= inner.operations[0] < begin + length < inner.operations[1] <= end and inner != call:
            length = inner.operations[0] - begin
    forms = {form(path, _stretch(path, each, length)) for path, each in paths}
    return _stretch(trace, call, length) if length and len(forms) == 1 else None


def _stretch(trace: Trace, call: ModuleCall, length: int) -> ModuleCall:
    """The first operations of a call, and the tensors that autograd saves for them."""
    end = call.operations[0] + length
    saves = 0
    for save in trace.saves[slice(*call.saves)]:
        # What the very first operation saves of its inputs is noted before any event.
        if save.by >= 0 and trace.events[save.by] >= end:
            break
        saves += 1
    return replace(call, operations=(call.operations[0], end), saves=(call.saves[0], call.saves[0] + saves))


def form(trace: Trace, call: ModuleCall) -> Form:
    """What a call runs and saves; results may be larger on one path than on another."""
    own = trace.operations[slice(*call.operations)]
    made = {s: (n, i) for n, op in enumerate(own) for i, s in enumerate(op.makes)}
    saves = trace.saves[slice(*call.saves)]
    return tuple((op.name, op.wanted, len(op.makes)) for op in own), tuple(
        (made.get(save.storage), len(save.unpacks)) for save in saves
    )


def sizes(trace: Trace, call: ModuleCall) -> tuple[int, ...]:
    """Bytes of all that a call makes, in order."""
    return tuple(trace.storages[s].bytes for op in trace.operations[slice(*call.operations)] for s in op.makes)
