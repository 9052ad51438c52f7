"""Recomputation placed by hand: the user says what is kept, in the words of torch's activation checkpointing; the rest is a plan like any other.

Searched plans decide storage by storage. Here forward is cut into *windows* where the user says: at the outputs of named modules, or around so many
repeated blocks at a time. In a window everything is dropped that can be rebuilt; what crosses from one window into another is held, so that a window is
rebuilt from its own inputs, once, when its backward comes. What follows the last window is not dropped: its backward comes at once.

Sources: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174 (2016), for the square root;
`torch.utils.checkpoint` for the units. Unlike both, a window runs again only what its backward reads, and what that takes.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from memfit.errors import InfeasibleError, InputError
from memfit.garbage import uncollected
from memfit.planner.baselines import sqrt_segments
from memfit.planner.prices import Solution, Solver
from memfit.planner.recipes import Recipes
from memfit.planner.schedule import reruns_for
from memfit.planner.search import SLACK_BYTES, Search, where
from memfit.planner.segments import boundaries_after, windows
from memfit.planner.timeline import Timeline
from memfit.plans import Plan
from memfit.trace import Category, Trace
from memfit.units import format_bytes

ALIKE: Final = 0.5  # blocks share this part of their operations: the first of a stage often has a few more
FINER: Final = 0.5  # blocks within blocks are taken where they hold this part of the operations
NAMED: Final = 3  # modules named in a note


@dataclass(frozen=True, slots=True)
class Placement:
    """What the user asked for; one of the three.

    Attributes:
        keep: patterns of the modules whose outputs are kept.
        every: blocks rebuilt together, or "sqrt" for about the square root of their number; 0 where it was not asked for.
        activation_bytes: what forward made may take at any moment; 0 where it was not asked for.
    """

    keep: tuple[str, ...] = ()
    every: int | str = 0
    activation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a module in forward.

    Attributes:
        path: of the module.
        first, last: events of its first and its last operation.
    """

    path: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Windows:
    """Forward cut by hand.

    Attributes:
        ends: events after which a window ends.
        dropped_in: numbers of the windows in which everything is dropped that can be.
        words: what stands in the plan's notes.
    """

    ends: tuple[int, ...]
    dropped_in: frozenset[int]
    words: str


def plan_by_hand(search: Search, placement: Placement) -> Plan:
    """The plan that does as the user said; its budget is what it takes.

    Raises:
        InputError: a pattern matches nothing, or there are no repeated blocks.
        InfeasibleError: so few bytes of activations cannot be reached.
    """
    number = search.fixed_micro_batches or 1
    solver = search.solver(number)
    trace = solver.trace
    if placement.activation_bytes:
        solution, activation_bytes = _within(solver, placement.activation_bytes)
        asked = format_bytes(placement.activation_bytes)
        notes = [
            f"placed by hand: what forward makes takes {format_bytes(activation_bytes)} at most, of {asked} asked for"
        ]
    else:
        cut = _kept_outputs(solver.recipes, placement.keep) if placement.keep else _units(trace, placement.every)
        solution, notes = _in_windows(solver, cut)
    weights = search.weights()[0] if trace.micro_batches > 1 else None
    budget = solution.peak + search.extra_bytes + (SLACK_BYTES if solution.reruns else 0)
    made = search.describe(budget, number, solution, weights or "whole")
    return replace(made, notes=(*made.notes, *notes))


# -- windows -----------------------------------------------------------------------------------------------------------------


@uncollected()
def _in_windows(solver: Solver, cut: _Windows) -> tuple[Solution, list[str]]:
    """Everything that can be rebuilt is dropped in the windows of the cut, and what the user should know of it."""
    recipes, trace = solver.recipes, solver.trace
    cuts = boundaries_after(recipes, cut.ends)
    window_of = windows(cuts, trace.forward_events)
    crossing = {s for boundary in cuts for s in boundary.storages}
    inside = {s for s in recipes.saved - crossing if window_of[trace.storages[s].birth] in cut.dropped_in}
    dropped = inside & recipes.rebuildable
    held = crossing - recipes.saved
    reruns = reruns_for(recipes, dropped, window_of, held)
    solution = Solution(reruns, solver.timeline.evaluate(reruns), frozenset(dropped), frozenset(held), 1)
    notes = [f"placed by hand: {cut.words}"]
    by_module: dict[str, int] = defaultdict(int)
    for s in inside - dropped:
        by_module[trace.storages[s].module] += trace.storages[s].bytes
    if by_module:
        notes.append(
            f"{format_bytes(sum(by_module.values()))} could not be dropped, as what makes them must not run twice: in {_some(by_module)}"
        )
    return solution, notes


def _kept_outputs(recipes: Recipes, patterns: Sequence[str]) -> _Windows:
    """A window ends where an output of a matching module is made."""
    trace = recipes.trace
    calls = module_calls(trace)
    ends: dict[int, str] = {}
    unseen: list[str] = []
    for pattern in patterns:
        matches = matcher(pattern)
        found = [path for path in calls if matches(path)]
        if not found:
            raise InputError(f"keep={pattern!r} matches no module that runs in forward; {_nearest(pattern, calls)}")
        for path in found:
            made = [call for run in calls[path] for call in repeats(trace, run) if flowing_out(recipes, call)]
            ends |= {call.last: path for call in made}
            if not made:
                unseen.append(path)
    if not ends:
        raise InputError(
            f"keep={list(patterns)!r} matches {_some(unseen)}, but nothing that they make is read by other modules, so there is nothing to keep: "
            "name modules whose outputs go on through the model"
        )
    last = max(ends)
    words = (
        f"the outputs of {_some(dict.fromkeys(ends.values()))} are kept, and what goes around them; nothing is dropped after {ends[last]}, "
        "as its backward comes at once"
    )
    if unseen:
        words += f"; {_some(unseen)} make nothing that other modules read"
    return _Windows(tuple(sorted(ends)), frozenset(range(len(ends))), words)


def _units(trace: Trace, every: int | str) -> _Windows:
    """Windows of so many blocks; what lies between blocks is left alone."""
    blocks = repeated_blocks(trace)
    if not blocks:
        raise InputError(
            f"every={every!r} needs repeated blocks, and this model has none (modules of one list, alike, each reading what the one before it made): "
            'name the modules whose outputs are kept, keep=["..."]'
        )
    firsts = sqrt_segments(len(blocks)) if every == "sqrt" else tuple(range(0, len(blocks), int(every)))
    bounds = (*firsts, len(blocks))
    units = [(blocks[a].first, blocks[b - 1].last) for a, b in zip(bounds, bounds[1:], strict=False)]
    ends = sorted({event for first, last in units for event in (first - 1, last)})
    number = {event: i for i, event in enumerate(ends)}
    words = (
        f"of {len(blocks)} blocks ({_some(dict.fromkeys(block.path for block in blocks))}), {max(b - a for a, b in zip(bounds, bounds[1:], strict=False))} at a "
        "time are rebuilt from what goes into them"
    )
    return _Windows(tuple(ends), frozenset(number[last] for _, last in units), words)


# -- modules, as the trace tells them ----------------------------------------------------------------------------------------


def module_calls(trace: Trace) -> dict[str, list[Call]]:
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
    return {path: [Call(path, first, last) for first, last in runs] for path, runs in spans.items()}


def repeats(trace: Trace, call: Call) -> list[Call]:
    """The runs of a module that are one stretch of operations: as many as the same operations read the same parameters again."""
    events = [e for e in range(call.first, call.last + 1) if trace.events[e] >= 0]
    operations = [trace.operations[trace.events[e]] for e in events]
    weights = [
        tuple(s for s in op.reads if trace.storages[s].category is Category.PARAMETER and trace.storages[s].birth < 0)
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
    return [Call(call.path, events[i], events[i + period - 1]) for i in range(0, len(events), period)]


def flowing_out(recipes: Recipes, call: Call) -> set[int]:
    """Storages that a call makes or writes and that later operations read."""
    return {
        s for s in _made_in(recipes.trace, call) if s in recipes.recipe_of and recipes.last_reads.get(s, -1) > call.last
    }


def repeated_blocks(trace: Trace) -> list[Call]:
    """The runs of the blocks that a model repeats, in order: children of one list, alike, each reading what comes of the one before it.

    Of blocks within blocks the outer ones are taken, unless the inner ones are most of them (stages of layers).
    """
    families: dict[str, list[Call]] = defaultdict(list)
    for path, runs in module_calls(trace).items():
        holder, _, name = path.rpartition(".")
        kind = name.rstrip("0123456789")
        if kind != name:
            families[f"{holder}.{kind}"] += [call for run in runs for call in repeats(trace, run)]
    found: list[list[Call]] = []
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


def _outermost(rows: list[list[Call]]) -> list[Call]:
    """Of rows of blocks that lie in one another, those to take."""
    taken: list[Call] = []
    while rows:
        outer, rest = rows[0], rows[1:]
        inner = [row for row in rest if any(b.first <= row[0].first and row[-1].last <= b.last for b in outer)]
        rows = [row for row in rest if row[-1].last < outer[0].first or row[0].first > outer[-1].last]
        finer = _outermost(inner)
        most = sum(b.last - b.first + 1 for b in finer) >= FINER * sum(b.last - b.first + 1 for b in outer)
        taken += finer if most else outer
    return taken


def _alike(trace: Trace, one: Call, other: Call) -> bool:
    """Whether two runs of neighbours in a list do much the same; modules outside lists (`layer1`, `layer2`) must have parameters of one size too."""
    a, b = _operations_in(trace, one), _operations_in(trace, other)
    if not one.path.rpartition(".")[2].isdigit() and _parameter_sizes(trace, one) != _parameter_sizes(trace, other):
        return False
    return len(a & b) >= ALIKE * len(a | b)


def _operations_in(trace: Trace, call: Call) -> set[tuple[str, str]]:
    operations = (trace.operations[op] for op in trace.events[call.first : call.last + 1] if op >= 0)
    return {(op.module.removeprefix(call.path), op.name) for op in operations}


def _parameter_sizes(trace: Trace, call: Call) -> list[int]:
    operations = (trace.operations[op] for op in trace.events[call.first : call.last + 1] if op >= 0)
    read = {s for op in operations for s in op.reads if trace.storages[s].category is Category.PARAMETER}
    return sorted(trace.storages[s].bytes for s in read)


def _made_in(trace: Trace, call: Call) -> set[int]:
    operations = (trace.operations[op] for op in trace.events[call.first : call.last + 1] if op >= 0)
    return {s for op in operations for s in (*op.makes, *op.writes)}


def _goes_on(trace: Trace, one: Call, other: Call) -> bool:
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


def _nearest(pattern: str, paths: Iterable[str]) -> str:
    """The paths most like a pattern, numbers in them left open as the user would."""
    known = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in paths))
    return f"the nearest are: {', '.join(difflib.get_close_matches(pattern, known, NAMED, 0.0))}"


def _some(names: Iterable[str]) -> str:
    """A few names and how many more there are."""
    names = [name or "(model)" for name in names]
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


# -- a budget for activations ------------------------------------------------------------------------------------------------


def _within(solver: Solver, activation_bytes: int) -> tuple[Solution, int]:
    """The fastest plan found in which what forward makes never takes more, and what it takes; all else, however large, does not count."""
    trace, managed = solver.trace, set(solver.recipes.managed)
    # The same step with sizes only where forward made something. The recipes are those of the whole step, so a plan for one is a plan for the other.
    storages = tuple(st if s in managed else replace(st, bytes=0) for s, st in enumerate(trace.storages))
    operations = tuple(replace(op, workspace_bytes=0) for op in trace.operations)
    alone = Solver(Timeline(replace(trace, storages=storages, operations=operations), solver.recipes))
    found = alone.solve(activation_bytes)
    if found is None:
        smallest = alone.smallest()
        phase, module, operation = where(trace, smallest.evaluation.peak_event)
        raise InfeasibleError(
            f"activation_bytes={activation_bytes} is too little: the smallest plan found holds {format_bytes(smallest.peak)} ({smallest.peak} bytes) "
            f"of what forward makes, set in {phase} by {module or 'an operation outside any module'} ({operation}). Allow as much, or take a smaller batch",
            budget_bytes=activation_bytes,
            minimum_bytes=smallest.peak,
            moment=f"{phase}: {operation}",
            module=module,
        )
    return replace(found, evaluation=solver.timeline.evaluate(found.reruns)), found.peak
