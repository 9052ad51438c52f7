"""Modules, found from the trace alone: when each was called, which of its outputs are read later, which are repeated blocks.

Of the model a trace has only the path of the module in which each operation ran. That is enough, and also works for a trace from a file.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memfit.values import trace as trace_values
from memfit.values.trace import BEFORE_STEP, Category, Trace

if TYPE_CHECKING:
    from memfit.planner.recipes import Recipes

LEAST_SHARED: Final = 0.5  # two blocks are alike if they share this fraction of their operations: the first of a stage often has a few more
LEAST_INNER: Final = 0.5  # blocks within blocks are taken where they have this fraction of the operations


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module in forward.

    Attributes:
        path: of the module.
        first, last: events of its first and last operation.
    """

    path: str
    first: int
    last: int


def module_calls(trace: Trace) -> dict[str, list[ModuleCall]]:
    """The calls of every module in forward, by path, in order. Calls with no operation between them count as one (see `repeats`)."""
    spans: dict[str, list[list[int]]] = {}
    around: dict[str, tuple[str, ...]] = {"": ()}
    before: tuple[str, ...] = ()
    for event in trace.events_in_forward:
        module = trace.operations[trace.events[event]].module
        if module not in around:
            parts = module.split(".")
            around[module] = tuple(".".join(parts[: i + 1]) for i in range(len(parts)))
        for path in around[module]:
            if path in before:
                spans[path][-1][1] = event
            else:
                spans.setdefault(path, []).append([event, event])
        before = around[module]
    return {path: [ModuleCall(path, first, last) for first, last in calls] for path, calls in spans.items()}


def repeats(trace: Trace, call: ModuleCall) -> list[ModuleCall]:
    """The calls in one stretch of a module's operations: one for each time that the same operations read the same parameters."""
    events = [e for e in range(call.first, call.last + 1) if trace.events[e] >= 0]
    operations = [trace.operations[trace.events[e]] for e in events]
    weights = [
        tuple(
            s
            for s in op.reads
            if trace.storages[s].category is Category.PARAMETER and trace.storages[s].birth == BEFORE_STEP
        )
        for op in operations
    ]
    tokens = [(op.name, op.module, read) for op, read in zip(operations, weights, strict=True)]
    # The shortest period of the tokens, from their longest border (Knuth, Morris and Pratt 1977).
    border = [0] * len(tokens)
    for i in range(1, len(tokens)):
        k = border[i - 1]
        while k and tokens[i] != tokens[k]:
            k = border[k - 1]
        border[i] = k + (tokens[i] == tokens[k])
    period = len(tokens) - border[-1]
    if len(tokens) % period or not any(weights[:period]):
        return [call]
    return [ModuleCall(call.path, events[i], events[i + period - 1]) for i in range(0, len(events), period)]


def outputs_read_later(recipes: Recipes, call: ModuleCall) -> set[int]:
    """Storages that a call makes or writes and that operations of forward after it read."""
    return {
        s
        for s in _written_in(recipes.trace, call)
        if s in recipes.recipe_of and recipes.last_reads.get(s, -1) > call.last
    }


def repeated_blocks(trace: Trace) -> list[ModuleCall]:
    """The calls of the blocks that a model repeats, in order: numbered siblings, each depending on the one before it, of one kind or of several in turn.

    Of blocks within blocks the outer ones are taken, unless the inner ones have most of the operations (stages of layers).
    """
    siblings: dict[str, list[ModuleCall]] = defaultdict(list)
    for path, stretches in module_calls(trace).items():
        parent, _, name = path.rpartition(".")
        stem = name.rstrip("0123456789")
        if stem != name:
            siblings[f"{parent}.{stem}"] += [call for stretch in stretches for call in repeats(trace, stretch)]
    found: list[list[ModuleCall]] = []
    for calls in siblings.values():
        calls.sort(key=lambda call: call.first)
        kinds = _kinds(trace, calls)
        often = Counter(kinds)
        in_turn = [often[kind] > 1 and _holds_modules(trace, call) for kind, call in zip(kinds, calls, strict=True)]
        row: list[ModuleCall] = []
        for number, call in enumerate(calls):
            fits = row and (_alike(trace, row[-1], call) or (in_turn[number - 1] and in_turn[number]))
            if not (fits and _depends_on(trace, call, row[-1])):
                found.append(row)
                row = []
            row.append(call)
        found.append(row)
    found = sorted((row for row in found if len(row) > 1), key=lambda row: (row[0].first, -row[-1].last))
    return sorted(_outermost(found), key=lambda call: call.first)


def calls_of_blocks(trace: Trace) -> list[trace_values.ModuleCall]:
    """The calls of repeated blocks, and of the modules right inside them, as capture has noted them; outer ones before inner ones."""
    blocks = {(block.path, trace.events[block.first]) for block in repeated_blocks(trace)}
    found: list[trace_values.ModuleCall] = []
    around: trace_values.ModuleCall | None = None
    for call in trace.calls:
        first, last = call.operations
        if around is not None and first >= around.operations[1]:
            around = None
        if first < last and (call.module, first) in blocks:
            around = call
            found.append(call)
        elif around is not None and last - first > 1 and call.module.rpartition(".")[0] == around.module:
            found.append(call)
    return found


def _outermost(rows: list[list[ModuleCall]]) -> list[ModuleCall]:
    """The blocks to take from rows of blocks, some of which are nested in blocks of others."""
    taken: list[ModuleCall] = []
    while rows:
        outer, rest = rows[0], rows[1:]
        inner = [row for row in rest if any(b.first <= row[0].first and row[-1].last <= b.last for b in outer)]
        rows = [row for row in rest if row[-1].last < outer[0].first or row[0].first > outer[-1].last]
        nested = _outermost(inner)
        most = sum(b.last - b.first + 1 for b in nested) >= LEAST_INNER * sum(b.last - b.first + 1 for b in outer)
        taken += nested if most else outer
    return taken


def _alike(trace: Trace, one: ModuleCall, other: ModuleCall) -> bool:
    """Whether two calls of siblings run much the same operations; siblings outside lists (`layer1`, `layer2`) must also have parameters of equal sizes."""
    a, b = _operations_in(trace, one), _operations_in(trace, other)
    if not one.path.rpartition(".")[2].isdigit() and _parameter_sizes(trace, one) != _parameter_sizes(trace, other):
        return False
    return len(a & b) >= LEAST_SHARED * len(a | b)


def _kinds(trace: Trace, calls: Sequence[ModuleCall]) -> list[int]:
    """Of each call, the number of the first that it is like."""
    firsts: list[int] = []
    found = []
    for number, call in enumerate(calls):
        first = next((n for n in firsts if _alike(trace, calls[n], call)), number)
        if first == number:
            firsts.append(number)
        found.append(first)
    return found


def _holds_modules(trace: Trace, call: ModuleCall) -> bool:
    """Whether it is more than one layer."""
    operations = (trace.operations[op] for op in trace.events[call.first : call.last + 1] if op >= 0)
    return any(operation.module.startswith(f"{call.path}.") for operation in operations)


def _operations_in(trace: Trace, call: ModuleCall) -> set[tuple[str, str]]:
    operations = (trace.operations[op] for op in trace.events[call.first : call.last + 1] if op >= 0)
    return {(op.module.removeprefix(call.path), op.name) for op in operations}


def _parameter_sizes(trace: Trace, call: ModuleCall) -> list[int]:
    operations = (trace.operations[op] for op in trace.events[call.first : call.last + 1] if op >= 0)
    read = {s for op in operations for s in op.reads if trace.storages[s].category is Category.PARAMETER}
    return sorted(trace.storages[s].bytes for s in read)


def _written_in(trace: Trace, call: ModuleCall) -> set[int]:
    """Storages that a call makes or writes in place."""
    operations = (trace.operations[op] for op in trace.events[call.first : call.last + 1] if op >= 0)
    return {s for op in operations for s in (*op.makes, *op.writes)}


def _depends_on(trace: Trace, later: ModuleCall, earlier: ModuleCall) -> bool:
    """Whether the later call reads what the earlier one wrote, or what was computed from it in between."""
    derived = _written_in(trace, earlier)
    for event in range(earlier.last + 1, later.last + 1):
        op = trace.events[event]
        if op >= 0 and not derived.isdisjoint(trace.operations[op].reads):
            if event >= later.first:
                return True
            derived |= {*trace.operations[op].makes, *trace.operations[op].writes}
    return False


def matcher(pattern: str) -> Callable[[str], bool]:
    """A test of module paths: `*` stands for one name in a path, `**` for any number, `[0-3]` as in a shell; leading names may be left out."""
    body = ""
    for token in re.findall(r"\*\*|\[!?[^\]]*\]|.", pattern, re.DOTALL):
        if token in {"*", "**", "?"}:
            body += {"*": "[^.]*", "**": ".*", "?": "[^.]"}[token]
        elif len(token) > 2:
            body += f"[{'^' if token[1] == '!' else ''}{re.escape(token[1 + (token[1] == '!') : -1]).replace(chr(92) + '-', '-')}]"
        else:
            body += re.escape(token)
    compiled = re.compile(rf"(?:.*\.)?{body}", re.DOTALL)
    return lambda path: compiled.fullmatch(path) is not None
