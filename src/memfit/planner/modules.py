"""Modules as a trace tells them: when each ran, what flows out of it, which are repeated blocks.

A trace holds the path of the module in which each operation ran and nothing else of the model; that is enough, and serves a trace from a file too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from memfit.planner.recipes import Recipes
from memfit.values.trace import BEFORE_STEP, Category, Trace

ALIKE: Final = 0.5  # blocks share this part of their operations: the first of a stage often has a few more
FINER: Final = 0.5  # blocks within blocks are taken where they hold this part of the operations


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One run of a module in forward.

    Attributes:
        path: of the module.
        first, last: events of its first and its last operation.
    """

    path: str
    first: int
    last: int


def module_calls(trace: Trace) -> dict[str, list[ModuleCall]]:
    """Every run of every module in forward, by path, in order; what runs again at once, with nothing between, counts as one (see `repeats`)."""
    spans: dict[str, list[list[int]]] = {}
    around: dict[str, tuple[str, ...]] = {"": ()}
    before: tuple[str, ...] = ()
    for event, op in enumerate(trace.events[: trace.forward_events]):
        if op < 0:
            continue
        module = trace.operations[op].module
        if module not in around:
            parts = module.split(".")
            around[module] = tuple(".".join(parts[: i + 1]) for i in range(len(parts)))
        for path in around[module]:
            if path in before:
                spans[path][-1][1] = event
            else:
                spans.setdefault(path, []).append([event, event])
        before = around[module]
    return {path: [ModuleCall(path, first, last) for first, last in runs] for path, runs in spans.items()}


def repeats(trace: Trace, call: ModuleCall) -> list[ModuleCall]:
    """The runs of a module that are one stretch of operations: as many as the same operations read the same parameters again."""
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
    # The shortest period, from the longest border (Knuth, Morris and Pratt 1977).
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


def flowing_out(recipes: Recipes, call: ModuleCall) -> set[int]:
    """Storages that a call makes or writes and that later operations read."""
    return {
        s for s in _made_in(recipes.trace, call) if s in recipes.recipe_of and recipes.last_reads.get(s, -1) > call.last
    }


def repeated_blocks(trace: Trace) -> list[ModuleCall]:
    """The runs of the blocks that a model repeats, in order: children of one list, alike, each reading what comes of the one before it.

    Of blocks within blocks the outer ones are taken, unless the inner ones are most of them (stages of layers).
    """
    families: dict[str, list[ModuleCall]] = defaultdict(list)
    for path, runs in module_calls(trace).items():
        holder, _, name = path.rpartition(".")
        kind = name.rstrip("0123456789")
        if kind != name:
            families[f"{holder}.{kind}"] += [call for run in runs for call in repeats(trace, run)]
    found: list[list[ModuleCall]] = []
    for family in families.values():
        family.sort(key=lambda call: call.first)
        row = family[:1]
        for call in family[1:]:
            if _alike(trace, row[-1], call) and _goes_on(trace, row[-1], call):
                row.append(call)
            else:
                found.append(row)
                row = [call]
        found.append(row)
    found = sorted((row for row in found if len(row) > 1), key=lambda row: (row[0].first, -row[-1].last))
    return sorted(_outermost(found), key=lambda call: call.first)


def _outermost(rows: list[list[ModuleCall]]) -> list[ModuleCall]:
    """Of rows of blocks that lie in one another, those to take."""
    taken: list[ModuleCall] = []
    while rows:
        outer, rest = rows[0], rows[1:]
        inner = [row for row in rest if any(b.first <= row[0].first and row[-1].last <= b.last for b in outer)]
        rows = [row for row in rest if row[-1].last < outer[0].first or row[0].first > outer[-1].last]
        finer = _outermost(inner)
        most = sum(b.last - b.first + 1 for b in finer) >= FINER * sum(b.last - b.first + 1 for b in outer)
        taken += finer if most else outer
    return taken


def _alike(trace: Trace, one: ModuleCall, other: ModuleCall) -> bool:
    """Whether two runs of neighbours in a list do much the same; modules outside lists (`layer1`, `layer2`) must have parameters of one size too."""
    a, b = _operations_in(trace, one), _operations_in(trace, other)
    if not one.path.rpartition(".")[2].isdigit() and _parameter_sizes(trace, one) != _parameter_sizes(trace, other):
        return False
    return len(a & b) >= ALIKE * len(a | b)


def _operations_in(trace: Trace, call: ModuleCall) -> set[tuple[str, str]]:
    operations = (trace.operations[op] for op in trace.events[call.first : call.last + 1] if op >= 0)
    return {(op.module.removeprefix(call.path), op.name) for op in operations}


def _parameter_sizes(trace: Trace, call: ModuleCall) -> list[int]:
    operations = (trace.operations[op] for op in trace.events[call.first : call.last + 1] if op >= 0)
    read = {s for op in operations for s in op.reads if trace.storages[s].category is Category.PARAMETER}
    return sorted(trace.storages[s].bytes for s in read)


def _made_in(trace: Trace, call: ModuleCall) -> set[int]:
    operations = (trace.operations[op] for op in trace.events[call.first : call.last + 1] if op >= 0)
    return {s for op in operations for s in (*op.makes, *op.writes)}


def _goes_on(trace: Trace, one: ModuleCall, other: ModuleCall) -> bool:
    """Whether the second reads what the first made, or what came of it in between."""
    come = _made_in(trace, one)
    for event in range(one.last + 1, other.last + 1):
        op = trace.events[event]
        if op >= 0 and not come.isdisjoint(trace.operations[op].reads):
            if event >= other.first:
                return True
            come |= {*trace.operations[op].makes, *trace.operations[op].writes}
    return False


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a module path matches: `*` stands for one name in a path, `**` for any number, `[0-3]` as in a shell; leading names may be left out."""
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
