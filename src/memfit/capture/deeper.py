"""The trace of a model with many blocks that are alike, from traces of it with four, five and six of them.

With one block more every table of a trace has some rows more, next to rows that are alike but for the numbers in them (storages, events, places in a path).
Those numbers grow by the same steps from block to block and from trace to trace, or not at all. What has grown so over three traces is written down for as
many blocks as there are; where anything has not, there is no such trace, and the whole model is to be captured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from memfit.garbage import uncollected
from memfit.values.trace import Category, ModuleCall, Operation, Phase, Save, Storage, Trace

# Of the three traces: the second to the last of the shortest are like those between in all longer ones.
BLOCKS: Final = (4, 5, 6)
_NUMBER: Final = re.compile(r"\d+")
_BEHIND: Final = (64, 8, 1)  # rows that have to agree behind rows that came in; fewer where others come in soon
_ONCE_A_STEP: Final = (Phase.CLIP, Phase.OPTIMIZER)
_OF_THE_STEP: Final = (
    "choices", "device", "seconds_are", "source", "signature", "notes", "rng_state_bytes", "changed_buffers", "changed_buffer_bytes", "clip_norm",
    "transfer_seconds", "waited_seconds", "torch_version", "in_flight", "shared_operations",
)  # fmt: skip


class _NotAlikeError(Exception):
    """The traces do not grow by the same rows."""


def deeper(traces: Sequence[Trace], blocks: int) -> Trace | None:
    """The trace with so many blocks; None where the given ones do not tell.

    Its `model`, and the host's seconds beside kernels, are those of the last given trace.

    Args:
        traces: with `BLOCKS` blocks, of the same step.
        blocks: of the whole model; at least as many.
    """
    first = traces[0]
    if any(getattr(trace, name) != getattr(first, name) for trace in traces for name in _OF_THE_STEP):
        return None
    if any(trace.paths or trace.first or trace.before or trace.drawn_bytes or trace.gathered for trace in traces):
        return None
    try:
        with uncollected():
            return _deeper(traces, blocks - BLOCKS[0])
    except _NotAlikeError:
        return None


def _deeper(traces: Sequence[Trace], more: int) -> Trace:
    storages = _Table([[_storage(s) for s in trace.storages] for trace in traces])
    operations = _Table([[_operation(o) for o in trace.operations] for trace in traces])
    saves = _Table([[_save(s, trace) for s in trace.saves] for trace in traces])
    events = _Table([[_event(code, trace) for code in trace.events] for trace in traces])
    calls = _Table([[_call(c) for c in trace.calls] for trace in traces])
    last = traces[-1]
    kinds = [_told_apart(trace, storages.order(copies).tolist()) for copies, trace in enumerate(traces)]
    made = operations.extended(more, last.operations, _operation_with)
    for place, row in enumerate(made):
        if row.phase in _ONCE_A_STEP:
            like = [trace.operations[len(trace.operations) - len(made) + place] for trace in traces]
            made[place] = _once_a_step(like, kinds, more)
    (ends,) = _extrapolated([[(trace.forward_events, trace.pass_events)] for trace in traces], more)
    return replace(
        last,
        events=tuple(events.extended(more, last.events, lambda _, numbers: numbers[0])),
        operations=tuple(made),
        storages=tuple(storages.extended(more, last.storages, _storage_with)),
        saves=tuple(saves.extended(more, last.saves, _save_with)),
        calls=tuple(calls.extended(more, last.calls, _call_with)),
        forward_events=ends[0],
        pass_events=ends[1],
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a table: what is the same in rows that are alike, and the numbers that are not."""

    kind: Hashable
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Repeated:
    """Rows that each block adds: where those of the first one begin in the shortest trace, and how many they are."""

    start: int
    rows: int


class _Table:
    """One table in three traces.

    Raises:
        _NotAlikeError: it does not grow by rows that are alike.
    """

    def __init__(self, tables: Sequence[list[_Row]]) -> None:
        self._numbers = [[row.numbers for row in table] for table in tables]
        numbers: dict[Hashable, int] = {}
        kinds = [
            np.array([numbers.setdefault(row.kind, len(numbers)) for row in table], dtype=np.int64) for table in tables
        ]
        self.repeated = _grown(kinds[0], kinds[1])
        for copies, found in enumerate(kinds):
            order = self.order(copies)
            if len(order) != len(found) or not np.array_equal(kinds[0][order], found):
                raise _NotAlikeError

    def order(self, more: int) -> Any:
        """Of each row with so many blocks more, the row of the shortest table that it is like."""
        parts, at = [], 0
        for each in self.repeated:
            parts.append(np.arange(at, each.start))
            at = each.start + each.rows
            parts.append(np.tile(np.arange(each.start, at), more + 1))
        parts.append(np.arange(at, len(self._numbers[0])))
        return np.concatenate(parts)

    def extended(self, more: int, rows: Sequence[Any], made: Callable[[Any, tuple[int, ...]], Any]) -> list[Any]:
        """The table with so many blocks more.

        Args:
            more: blocks.
            rows: of the longest given trace.
            made: a row like one of those with other numbers.
        """
        out: list[Any] = []
        places = [0, 0, 0]  # in the three tables
        row_of = np.full(len(self._numbers[0]), -1)
        row_of[self.order(2)[::-1]] = np.arange(len(rows))[::-1]  # the first that is like it

        def fixed(until: int) -> None:
            count = until - places[0]
            found = _extrapolated([table[p : p + count] for table, p in zip(self._numbers, places, strict=True)], more)
            out.extend(made(rows[row_of[places[0] + i]], numbers) for i, numbers in enumerate(found))
            for k in range(3):
                places[k] += count

        for each in self.repeated:
            fixed(each.start)
            found = _repeated(
                [
                    table[p : p + each.rows * (k + 1)]
                    for k, (table, p) in enumerate(zip(self._numbers, places, strict=True))
                ],
                each.rows,
                more,
            )
            out.extend(made(rows[row_of[each.start + i % each.rows]], numbers) for i, numbers in enumerate(found))
            for k in range(3):
                places[k] += each.rows * (k + 1)
        fixed(len(self._numbers[0]))
        return out


def _grown(shorter: Any, longer: Any) -> list[_Repeated]:
    """Where rows have come in, and how many."""
    found: list[_Repeated] = []
    i = j = 0
    while True:
        same = min(len(shorter) - i, len(longer) - j)
        differ = (shorter[i : i + same] != longer[j : j + same]).nonzero()[0]
        step = int(differ[0]) if len(differ) else same
        i, j = i + step, j + step
        if j == len(longer):
            if i != len(shorter):
                raise _NotAlikeError
            return found
        found_rows = (_came_in(shorter[i : i + behind_it], longer, j) for behind_it in _BEHIND)
        rows = next((each for each in found_rows if each), 0)
        if not rows:
            raise _NotAlikeError
        before = found[-1].start + found[-1].rows if found else 0
        # Where rows repeat so often, one block stays behind: the last often differs in when its results go, the first in what it gets.
        spare = i - 2 * rows >= before and np.array_equal(longer[j - 2 * rows : j], longer[j - rows : j + rows])
        start = i - (1 + spare) * rows
        if start < before:
            raise _NotAlikeError
        found.append(_Repeated(start, rows))
        j += rows


def _came_in(after: Any, longer: Any, at: int) -> int:
    """How many rows came in here: as few as repeat the rows before them, with what was here before behind them; 0 where none do."""
    for rows in range(1, min(at, len(longer) - at) + 1):
        behind = longer[at + rows : at + rows + len(after)]
        if (
            len(behind) == len(after)
            and (not len(after) or behind[0] == after[0])
            and (len(after) or at + rows == len(longer))
            and np.array_equal(behind, after)
            and np.array_equal(longer[at : at + rows], longer[at - rows : at])
        ):
            return rows
    return 0


def _flat(rows: Sequence[tuple[int, ...]]) -> Any:
    return np.array([number for row in rows for number in row], dtype=np.int64)


def _divided(numbers: Any, like: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    plain, out, at = numbers.tolist(), [], 0
    for row in like:
        out.append(tuple(plain[at : at + len(row)]))
        at += len(row)
    return out


def _extrapolated(tables: Sequence[list[tuple[int, ...]]], more: int) -> list[tuple[int, ...]]:
    """Numbers of rows that every trace has once."""
    a, b, c = map(_flat, tables)
    if not (len(a) == len(b) == len(c)) or not np.array_equal(b - a, c - b):
        raise _NotAlikeError
    return _divided(a + more * (b - a), tables[0])


def _repeated(tables: Sequence[list[tuple[int, ...]]], rows: int, more: int) -> list[tuple[int, ...]]:
    """Numbers of rows that a trace has once for each block, block after block."""
    (a,), (b, b1), (c, c1, c2) = ([_flat(table[i : i + rows]) for i in range(0, len(table), rows)] for table in tables)
    if len({len(each) for each in (a, b, b1, c, c1, c2)}) > 1:
        raise _NotAlikeError
    by_trace, by_block = b - a, b1 - b
    told = ((c, a + 2 * by_trace), (c1, c + by_block), (c2, c1 + by_block))
    if not all(np.array_equal(seen, said) for seen, said in told):
        raise _NotAlikeError
    found: list[tuple[int, ...]] = []
    for block in range(more + 1):
        found += _divided(a + more * by_trace + block * by_block, tables[0])
    return found


def _path(module: str) -> tuple[str, tuple[int, ...]]:
    return _NUMBER.sub("#", module), tuple(map(int, _NUMBER.findall(module)))


def _path_with(module: str, numbers: Sequence[int]) -> str:
    given = iter(numbers)
    return _NUMBER.sub(lambda _: str(next(given)), module)


def _storage(row: Storage) -> _Row:
    path, numbers = _path(row.module)
    return _Row((row.bytes, row.category, path, row.birth < 0), (row.birth, row.death, *numbers))


def _storage_with(row: Storage, numbers: tuple[int, ...]) -> Storage:
    return Storage(row.bytes, row.category, _path_with(row.module, numbers[2:]), numbers[0], numbers[1])


def _operation(row: Operation) -> _Row:
    path, numbers = _path(row.module)
    if row.phase in _ONCE_A_STEP:
        return _Row((row.name, row.phase, path), numbers)
    kind = (
        row.name, row.phase, path, row.key, row.seconds, row.workspace_bytes, row.random, row.rerunnable, row.outputs, row.wanted, row.by_values, row.shape,
        row.same_layout, row.collective, row.host_factor, row.times, len(row.reads), len(row.writes), len(row.makes),
    )  # fmt: skip
    return _Row(kind, (*row.reads, *row.writes, *row.makes, *numbers))


def _operation_with(row: Operation, numbers: tuple[int, ...]) -> Operation:
    if row.phase in _ONCE_A_STEP:
        return replace(row, module=_path_with(row.module, numbers))
    reads = len(row.reads)
    writes = reads + len(row.writes)
    makes = writes + len(row.makes)
    return replace(
        row, reads=numbers[:reads], writes=numbers[reads:writes], makes=numbers[writes:makes], module=_path_with(row.module, numbers[makes:])
    )  # fmt: skip


def _told_apart(trace: Trace, rows: Sequence[int]) -> list[Hashable]:
    """Of each storage what it is; of the optimizer's, which has several like each parameter, by the row of the shortest trace that it is like."""
    return [
        row if storage.category is Category.OPTIMIZER_STATE else _storage(storage).kind
        for storage, row in zip(trace.storages, rows, strict=True)
    ]


def _once_a_step(like: Sequence[Operation], kinds: Sequence[list[Hashable]], more: int) -> Operation:
    """An operation of the update, which takes the tensors of all blocks; `kinds` are those of each trace's storages."""
    last = like[-1]
    if len({(each.name, each.phase, each.random, each.rerunnable, each.shape, each.collective) for each in like}) > 1:
        raise _NotAlikeError

    def taken(name: str) -> tuple[int, ...]:
        tables = [[_Row(of[s], (s,)) for s in getattr(each, name)] for each, of in zip(like, kinds, strict=True)]
        return tuple(_Table(tables).extended(more, getattr(last, name), lambda _, numbers: numbers[0]))

    places = _Table([[_Row(out < 0, (out,)) for out in each.outputs] for each in like])
    a, b, c = (np.array([each.seconds, each.times, each.workspace_bytes]) for each in like)
    if not np.allclose(b - a, c - b, rtol=1e-6, atol=1e-15):
        raise _NotAlikeError
    seconds, times, workspace = (c + (more - 2) * (c - a) / 2).tolist()
    return replace(
        last, reads=taken("reads"), writes=taken("writes"), makes=taken("makes"), seconds=seconds, times=times, workspace_bytes=round(workspace),
        outputs=tuple(places.extended(more, last.outputs, lambda _, numbers: numbers[0])),
    )  # fmt: skip


def _save(row: Save, trace: Trace) -> _Row:
    unpacks = tuple(event for pair in row.unpacks for event in pair)
    return _Row((_made_by(row, trace), len(unpacks)), (row.storage, row.by, row.freed, row.packed, *unpacks))


def _made_by(row: Save, trace: Trace) -> Hashable:
    code = trace.events[row.by]
    return _operation(trace.operations[code]).kind if code >= 0 else None


def _save_with(_: Save, numbers: tuple[int, ...]) -> Save:
    storage, by, freed, packed, *unpacks = numbers
    return Save(storage, by, tuple(zip(unpacks[::2], unpacks[1::2], strict=True)), freed, packed)


def _event(code: int, trace: Trace) -> _Row:
    kind = _operation(trace.operations[code]).kind if code >= 0 else ("unpack", _made_by(trace.saves[~code], trace))
    return _Row(kind, (code,))


def _call(row: ModuleCall) -> _Row:
    path, numbers = _path(row.module)
    kind = path, row.number, row.repeatable, len(row.arguments), len(row.results)
    return _Row(kind, (*row.operations, *row.saves, *row.arguments, *row.results, *numbers))


def _call_with(row: ModuleCall, numbers: tuple[int, ...]) -> ModuleCall:
    arguments = 4 + len(row.arguments)
    results = arguments + len(row.results)
    return replace(
        row, module=_path_with(row.module, numbers[results:]), operations=(numbers[0], numbers[1]), saves=(numbers[2], numbers[3]),
        arguments=numbers[4:arguments], results=numbers[arguments:results],
    )  # fmt: skip


__all__ = ["BLOCKS", "deeper"]
