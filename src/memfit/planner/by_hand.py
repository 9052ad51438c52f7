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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from memfit.errors import InfeasibleError, InputError
from memfit.garbage import uncollected
from memfit.planner.baselines.segment_rules import sqrt_segments
from memfit.planner.description import describe, where
from memfit.planner.found import Found
from memfit.planner.modules import matcher, module_calls, outputs_read_later, repeated_blocks, repeats
from memfit.planner.recipes import Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planner.segments import boundaries_after, windows
from memfit.planner.solution import Solution
from memfit.planner.solver import Solver
from memfit.planner.solvers import Solvers
from memfit.planner.timeline import Timeline
from memfit.units import format_bytes, parse_bytes
from memfit.values.plan import Plan
from memfit.values.request import Budget
from memfit.values.trace import Trace

NAMED: Final = 3  # modules named in a note
_PRODUCTS: Final = ("aten.mm.", "aten.addmm.")
_ATTENTION: Final = ("aten._scaled_dot_product_", "aten._flash_attention_", "aten._efficient_attention_")


@dataclass(frozen=True, slots=True)
class RecomputePlacement:
    """Where the user wants recomputation; exactly one of the three is set.

    Attributes:
        keep: patterns of the modules whose outputs are kept.
        every: blocks recomputed together, or "sqrt" for about the square root of their number; 0 where not set.
        activation_bytes: limit on activations at any moment; 0 where not set.
    """

    keep: tuple[str, ...] = ()
    every: int | str = 0
    activation_bytes: int = 0

    @classmethod
    def of(
        cls, keep: str | Sequence[str] | None, every: int | str | None, activation_bytes: Budget | None
    ) -> RecomputePlacement:
        """From the arguments of `memfit.recompute`.

        Raises:
            InputError: not exactly one of the three, or one that means nothing.
        """
        asked = {"keep": keep, "every": every, "activation_bytes": activation_bytes}
        given = [name for name, value in asked.items() if value is not None]
        if len(given) != 1:
            raise InputError(
                f"recompute was given {' and '.join(given) or 'nothing to go by'}: exactly one of keep (module paths), every "
                '("block", a number of blocks, "sqrt") and activation_bytes is needed'
            )
        if keep is not None:
            patterns = (keep,) if isinstance(keep, str) else tuple(keep)
            if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
                raise InputError(f'keep={keep!r}: module paths are needed, such as ["encoder.layer.*"]')
            return cls(keep=patterns)
        if every is not None:
            number = 1 if every == "block" else every
            if number != "sqrt" and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise InputError(f'every={every!r}: "block", "sqrt" or a number of blocks from 1 on is needed')
            return cls(every=number)
        assert activation_bytes is not None
        return cls(activation_bytes=parse_bytes(activation_bytes))


@dataclass(frozen=True, slots=True)
class _Windows:
    """Forward divided into windows where the user said.

    Attributes:
        ends: events after which a window ends.
        dropped_in: numbers of the windows in which everything is dropped that can be.
        words: for the plan's notes.
    """

    ends: tuple[int, ...]
    dropped_in: frozenset[int]
    words: str


def plan_by_hand(solvers: Solvers, placement: RecomputePlacement) -> Plan:
    """The plan that does as the user said; its budget is what it takes.

    Raises:
        InputError: a pattern matches nothing, or there are no repeated blocks.
        InfeasibleError: so few bytes of activations cannot be reached.
        MissingTrace: as for `Solvers.of`.
    """
    number, candidate = solvers.baseline_number, solvers.bundle.candidates[0]
    solver = solvers.baseline
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
    made = describe(solvers, solvers.budget_for(solver, solution), Found(candidate, number, solver, solution))
    return replace(made, notes=(*made.notes, *notes))


def every_block(solver: Solver, each: int = 1) -> Solution:
    """Repeated blocks rebuilt from what goes into them: torch's checkpoint around every block, or around each second, third, ... one.

    Args:
        solver: of the step.
        each: 1 for all of them; 2 for the second, the fourth and so on.

    Raises:
        InputError: the step has no repeated blocks.
    """
    cut = _units(solver.trace, 1)
    rebuilt = sorted(cut.dropped_in)[each - 1 :: each]
    return _in_windows(solver, replace(cut, dropped_in=frozenset(rebuilt)))[0]


def every_block_but_products(solver: Solver) -> Solution:
    """Every repeated block rebuilt from what goes into it, from its attention and from every second product of matrices, the first one among them.

    That is selective activation checkpointing by operation, as torchtitan has it (Liang et al. 2024, arXiv:2410.06511, section 2.1.3; `_get_custom_policy` of
    torchtitan/parallelisms/parallelize_llama.py, version of 2024-12).

    Raises:
        InputError: the step has no repeated blocks.
    """
    trace = solver.trace
    cut = _units(trace, 1)
    window_of = windows(boundaries_after(solver.recipes, cut.ends), trace.forward_events)
    products = dict.fromkeys(cut.dropped_in, 0)
    kept: set[int] = set()
    for event in trace.events_in_forward:
        if window_of[event] not in products:
            continue
        operation = trace.operations[trace.events[event]]
        if operation.name.startswith(_PRODUCTS):
            products[window_of[event]] += 1
        if operation.name.startswith(_ATTENTION) or (
            operation.name.startswith(_PRODUCTS) and products[window_of[event]] % 2
        ):
            kept.update(operation.makes)
    return _in_windows(solver, cut, frozenset(kept))[0]


# -- windows -----------------------------------------------------------------------------------------------------------------


@uncollected()
def _in_windows(solver: Solver, cut: _Windows, kept: frozenset[int] = frozenset()) -> tuple[Solution, list[str]]:
    """Everything that can be rebuilt is dropped in the windows of the cut, but for what is to be kept, and what the user should know of it."""
    recipes, trace = solver.recipes, solver.trace
    cuts = boundaries_after(recipes, cut.ends)
    window_of = windows(cuts, trace.forward_events)
    crossing = {s for boundary in cuts for s in boundary.storages} | (kept & set(recipes.managed))
    inside = {s for s in recipes.saved - crossing if window_of[trace.storages[s].birth] in cut.dropped_in}
    dropped = inside & recipes.rebuildable
    held = crossing - recipes.saved
    recomputations = recomputations_for(recipes, dropped, window_of, held)
    solution = Solution(
        recomputations, solver.timeline.evaluate(recomputations), frozenset(dropped), frozenset(held), 1
    )
    notes = [f"placed by hand: {cut.words}"]
    by_module: dict[str, int] = defaultdict(int)
    for s in sorted(inside - dropped):
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
            made = [call for run in calls[path] for call in repeats(trace, run) if outputs_read_later(recipes, call)]
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
    """Windows of so many blocks; operations between blocks are not dropped."""
    blocks = repeated_blocks(trace)
    if not blocks:
        raise InputError(
            f"every={'block' if every == 1 else every!r} needs repeated blocks, and this model has none (modules of one list, alike, each reading what the one "
            "before it made): "
            'name the modules whose outputs are kept, keep=["..."]'
        )
    firsts = sqrt_segments(len(blocks)) if every == "sqrt" else tuple(range(0, len(blocks), int(every)))
    bounds = (*firsts, len(blocks))
    units = [(blocks[a].first, blocks[b - 1].last) for a, b in pairwise(bounds)]
    ends = sorted({event for first, last in units for event in (first - 1, last)})
    number = {event: i for i, event in enumerate(ends)}
    most = max(b - a for a, b in pairwise(bounds))
    words = f"of {len(blocks)} blocks ({_some(dict.fromkeys(b.path for b in blocks))}), {most} at a time are rebuilt from what goes into them"
    return _Windows(tuple(ends), frozenset(number[last] for _, last in units), words)


# -- words -------------------------------------------------------------------------------------------------------------------


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
    return replace(found, evaluation=solver.timeline.evaluate(found.recomputations)), found.peak
