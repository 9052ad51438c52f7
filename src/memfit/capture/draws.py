"""Other draws of the random numbers: where what is drawn in forward may decide sizes or operations, the step is captured under several.

Two kinds: draws at both ends of their range (`extreme_draws`), which run the most and the fewest blocks where each is left out by chance, and draws from
other seeds. Likewise samples of which forward reads other values (`values_read`). What ran the same operations in other sizes gives `Trace.drawn_bytes`; what
ran other operations is another path, `Trace.paths`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from memfit.batches import Batch
from memfit.capture import extreme_draws
from memfit.capture.captured import Captured
from memfit.capture.comparing import path_taken, same_forward, same_operations
from memfit.capture.real_forward import first_other_forward
from memfit.capture.source import StepSource
from memfit.capture.values_read import asks_for_counts
from memfit.step.generators import forked_generators
from memfit.step.process_generators import outside_torch_kept
from memfit.values.trace import Trace

# After so many forwards is the step captured as well, where the first one and the second differ.
LATER_FORWARDS: Final = (2, 3)
# So many forwards are looked at where they count something (their calls, say), in an attribute or in a buffer that they ask: one in so many may run other
# operations.
COUNTED_FORWARDS: Final = 32
# After so many steps is it captured as well, where values that are not drawn decide sizes: those of the parameters, which steps change.
LATER_STEPS: Final = (1, 2, 4)
# From so many seeds is it captured as well, where random numbers may decide sizes or operations.
OTHER_DRAWS: Final = 5
# How the names of operations begin that make tensors without values.
UNFILLED: Final = ("aten.empty", "aten.new_empty")


def with_other_draws(
    captured: Captured,
    again: Callable[[StepSource], Captured],
    source: StepSource,
    others: Iterable[Captured] = (),
    *,
    decides: bool = False,
    samples: Sequence[Batch] = (),
) -> Captured:
    """The capture with the sizes and the paths of other draws, later forwards and other micro-batches; and what the user should know of it.

    Args:
        captured: the step under one draw.
        again: captures a step in the same way, under the present state of the generators.
        source: the step.
        others: captures of the same step run in other ways.
        decides: Python code may decide by what forward draws (numbers drawn one by one, or from Python's or numpy's generator).
        samples: others of which forward reads other values, so that it may run other operations.
    """
    others = tuple(others)
    draws = decides or _draws_before_it_looks(captured.trace)
    if (draws or captured.counts) and any(c.steady and same_forward(c.trace, captured.trace) for c in others):
        draws, captured = False, replace(captured, counts=False)
    # In another number of micro-batches the same paths train the same: what was found out for one need not be found out again.
    known = frozenset[str]().union(*(other.receiving for other in others if other.trace.paths))
    if known > source.trained_elsewhere:
        source = replace(source, trained_elsewhere=known | source.trained_elsewhere)
    seen, failed, tried = _seen(captured, again, source, samples, draws=draws)
    longest = max(seen, key=_length)
    taken = _other_paths(longest, seen)
    trained = frozenset().union(*(each.receiving for each in (longest, *taken)))
    if taken and not trained <= source.trained_elsewhere and any(e.receiving != trained for e in (longest, *taken)):
        # What one path does not train has optimizer state all the same, from the steps that took another.
        seen, failed, tried = _seen(captured, again, replace(source, trained_elsewhere=trained), samples, draws=draws)
        longest = max(seen, key=_length)
        taken = _other_paths(longest, seen)
    trace = longest.trace
    own, *rest = seen
    drawn = [
        tuple(s.bytes for s in other.trace.storages)
        for other in (*rest, own)
        if same_operations(trace, other.trace) and not _same_sizes(trace, other.trace)
    ]
    if drawn and _same_sizes(trace, own.trace):
        drawn.append(tuple(s.bytes for s in own.trace.storages))
    notes = [
        note
        for note in (
            _sized_by_values(trace),
            _paths(len(taken), failed, tried, _reason(draws=draws, samples=bool(samples))),
        )
        if note
    ]
    paths = _alone(taken)
    first = _first_forward(captured, again, source) if not captured.repeats and not taken and not failed else None
    trace = replace(
        trace,
        drawn_bytes=tuple(drawn),
        notes=(*trace.notes, *notes),
        paths=paths,
        first=None if first is None else replace(first.trace, notes=(), calls=(), before=tuple(first.before.items())),
    )
    calls = _calls(*taken, *((first,) if first else ()), longest)
    return replace(longest, trace=trace, calls=calls, steady=not drawn and not taken and not failed)


def _of_samples(
    samples: Sequence[Batch], again: Callable[[StepSource], Captured], source: StepSource
) -> tuple[list[Captured], int]:
    """The step captured with each of these samples; how many could not be."""
    seen = []
    for sample in samples:
        # What fails cannot be captured, or is the user's own error: no step that was planned for.
        with suppress(Exception):
            seen.append(again(replace(source, sample=sample)))
    return seen, len(samples) - len(seen)


def _alone(taken: Iterable[Captured]) -> tuple[Trace, ...]:
    """Other paths as the longest one has them."""
    return tuple(replace(each.trace, notes=()) for each in taken)


def _calls(*captures: Captured) -> dict[str, Any]:
    """Of all of these, those of later ones where they have them, too."""
    return {key: call for each in captures for key, call in each.calls.items()}


def _seen(
    captured: Captured,
    again: Callable[[StepSource], Captured],
    source: StepSource,
    samples: Sequence[Batch],
    *,
    draws: bool,
) -> tuple[list[Captured], int, int]:
    """Captures under other draws, after more forwards, with other samples, this one first; how many failed; of how many forwards paths were looked at."""
    seen = [again(source)] if source.trained_elsewhere else [captured]
    failed, tried = 0, 1
    for forwards in _counted(captured, source) if captured.repeats else LATER_FORWARDS:
        tried += 1
        try:
            other = again(replace(source, forwards_before=forwards))
        except Exception:  # noqa: BLE001 - as below
            failed += 1
            continue
        if path_taken(other.trace) != path_taken(captured.trace):
            seen.append(other)
    shown, refused = _of_samples(samples, again, source)
    seen, failed, tried = [*seen, *shown], failed + refused, tried + len(samples)
    for draw in (*extreme_draws.End, *range(1, OTHER_DRAWS + 1)) if draws else ():
        tried += 1
        with _drawing(draw):
            try:
                other = again(source)
            except Exception:  # noqa: BLE001 - what this draw runs cannot be captured, or is the user's own error: no step that was planned for
                failed += 1
                continue
        if isinstance(draw, int) and all(_same_sizes(captured.trace, each.trace) for each in (*seen, other)):
            break  # what is drawn decides values only
        seen.append(other)
    return [*seen, *(_after_steps(captured, again, source) if not draws else ())], failed, tried


def _counted(captured: Captured, source: StepSource) -> tuple[int, ...]:
    """After how many forwards one runs other operations because of what it counts, in a buffer or an attribute; none where it counts nothing."""
    in_buffer = captured.trace.source == "real" and asks_for_counts(captured.trace)
    if source.forwards_before == 0 or source.on_meta or not (captured.counts or in_buffer):
        return ()
    try:
        found = first_other_forward(source, COUNTED_FORWARDS)
    except Exception:  # noqa: BLE001 - as below
        return ()
    return () if found is None else (found,)


def _after_steps(captured: Captured, again: Callable[[StepSource], Captured], source: StepSource) -> Iterator[Captured]:
    """The step in the sizes that it has after some of its kind, where values decide them. Where it runs other operations then, that is learnt in training."""
    trace = captured.trace
    by_values = any(operation.by_values for operation in trace.operations)
    if not by_values or trace.source != "real" or source.optimizer is None or source.steps_before:
        return
    for steps in LATER_STEPS:
        try:
            other = again(replace(source, steps_before=steps))
        except Exception:  # noqa: BLE001 - the user's own error, or a step that cannot be captured: none that was planned for
            return
        if same_operations(trace, other.trace):
            yield other


def _first_forward(captured: Captured, again: Callable[[StepSource], Captured], source: StepSource) -> Captured | None:
    """The step with the model's very first forward, where that alone runs other operations: it builds what later ones find.

    None where it does not, or where nothing that modules hold tells whether it has been run.
    """
    try:
        first = again(replace(source, forwards_before=0, trained_elsewhere=captured.receiving))
    except Exception:  # noqa: BLE001 - as above
        return None
    return first if first.before and path_taken(first.trace) != path_taken(captured.trace) else None


def _length(captured: Captured) -> tuple[int, int]:
    """By operations, then by bytes, so that what kernels need besides is measured of the largest."""
    return captured.trace.forward_operations, sum(storage.bytes for storage in captured.trace.storages)


def _other_paths(longest: Captured, seen: Iterable[Captured]) -> list[Captured]:
    """Those that take another path than the longest, each path once."""
    known, taken = [path_taken(longest.trace)], []
    for each in seen:
        path = path_taken(each.trace)
        if path not in known:
            known.append(path)
            taken.append(each)
    return taken


def _reason(*, draws: bool, samples: bool) -> str:
    """Why forward may take several paths."""
    if draws:
        return "random numbers, drawn anew in each step, decide which operations run"
    if samples:
        return "values of the batch (whether there is padding, say) decide which operations run"
    return "not every forward runs the same operations"


def _paths(others: int, failed: int, tried: int, why: str) -> str:
    """A note where forward takes several paths; empty where it takes one."""
    if not others and not failed:
        return ""
    paths = f"{1 + others} path{'s were' if others else ' was'} seen in {tried - failed} forwards"
    return f"{why}: {paths}" + (f"; {failed} more could not be captured" if failed else "")


@contextmanager
def _drawing(draw: extreme_draws.End | int) -> Iterator[None]:
    """What is captured inside draws at an end, or from a seed; all generators are left as they were."""
    with forked_generators(), outside_torch_kept():
        if isinstance(draw, extreme_draws.End):
            with extreme_draws.drawing(draw):
                yield
        else:
            torch.manual_seed(draw)
            random.seed(draw)
            np.random.seed(draw)  # noqa: NPY002 - models draw from the global one
            yield


def _same_sizes(one: Trace, other: Trace) -> bool:
    return same_operations(one, other) and [s.bytes for s in one.storages] == [s.bytes for s in other.storages]


def _sized_by_values(trace: Trace) -> str:
    """A note where values decide how large results are; empty where none do."""
    told: dict[str, str] = {}
    for operation in trace.operations:
        if operation.by_values:
            told.setdefault(operation.module, operation.name)
    if not told:
        return ""
    module, name = next(iter(told.items()))
    more = f" and in {len(told) - 1} more modules" if len(told) > 1 else ""
    return (
        f"values decide how large some results are ({name} in {module or 'the model'}{more}): bytes are those of this sample and these parameters, and "
        "other batches or later steps may hold more"
    )


def _draws_before_it_looks(trace: Trace) -> bool:
    """Whether values made of random numbers that forward draws decide sizes, or are read by Python, which may decide anything by them.

    What Python reads of the batch alone (is any token padding?) is no such value, whatever was drawn before.
    """
    drawn: set[int] = set()  # storages that may hold what was made of random numbers
    for operation in trace.in_forward():
        tainted = operation.random or not drawn.isdisjoint(operation.reads)
        if tainted and (operation.by_values or operation.name == "aten._local_scalar_dense.default"):
            return True
        # What is made empty may be filled by a kernel that no operation shows.
        if tainted or (drawn and operation.name.startswith(UNFILLED)):
            drawn.update(operation.makes, operation.writes)
    return False
