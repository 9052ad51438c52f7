"""What training shows of a step that planning had not seen: a path of forward, or larger sizes, added to the trace that was planned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from memfit.capture.comparing import path_taken, same_operations
from memfit.values.trace import BEFORE_STEP, Category, Storage, Trace

# Planning takes longer the more is known, so what was learnt longest ago is forgotten.
MOST_PATHS: Final = 16
MOST_DRAWS: Final = 12


def with_seen(known: Trace, seen: Trace) -> Trace:
    """The known trace, its paths and sizes with those of a capture made later; the known one itself where that shows nothing new.

    Args:
        known: what was planned from.
        seen: the same step captured again, from another state of the model and its generators.
    """
    everything = (known, *known.paths, seen, *seen.paths)
    state = max(trace.bytes_of(Category.OPTIMIZER_STATE) for trace in everything)
    buffers, buffer_bytes = _changed_buffers(everything)
    paths: list[Trace] = []
    new = False
    for number, trace in enumerate(everything):
        later = number > len(known.paths)
        alone = _with_state(replace(trace, paths=(), first=None), state)
        alone = replace(alone, changed_buffers=buffers, changed_buffer_bytes=buffer_bytes)
        same = next((n for n, path in enumerate(paths) if path_taken(path) == path_taken(alone)), None)
        if same is None:
            new = new or later
            paths.append(alone)
        elif (larger := _larger(paths[same], alone)) is not None:
            new = True
            paths[same] = larger
    if not new:
        return known
    if len(paths) > MOST_PATHS:  # the oldest of those that were not seen before training go first
        paths = [paths[0], *paths[1 - MOST_PATHS :]]
    longest = max(paths, key=lambda path: path.forward_operations)
    others = tuple(replace(path, notes=()) for path in paths if path is not longest)
    return replace(longest, paths=others, first=known.first, notes=known.notes)


def as_seen(path: Trace, seen: Trace) -> Trace:
    """One path that is known, alone and in no other sizes than those in which a capture shows it.

    Args:
        path: with all that is known of it.
        seen: the capture; where it shows another path, the sizes are those of the last draw that is known.
    """
    sizes = _draws(path)[-1]
    shown = next((each for each in (seen, *seen.paths) if same_path(each, path)), None)
    if shown is not None and len(shown.storages) <= len(path.storages):
        # What is more of them is state that other paths have made (`_with_state`).
        sizes = (*_draws(shown)[-1], *sizes[len(shown.storages) :])
    storages = tuple(replace(s, bytes=size) for s, size in zip(path.storages, sizes, strict=True))
    return replace(path, storages=storages, drawn_bytes=(), paths=(), first=None)


def same_path(one: Trace, other: Trace) -> bool:
    """Whether the forwards of two captures run the same operations."""
    return path_taken(one) == path_taken(other)


def same_sizes(one: Trace, other: Trace) -> bool:
    """Whether two captures show the same path in the same sizes, under the same draws."""
    sizes = [(_draws(each), each.changed_buffer_bytes) for each in (one, other)]
    return same_path(one, other) and sizes[0] == sizes[1]


def writes_for_good(trace: Trace) -> bool:
    """Whether forward writes into a storage that was there before the step and is no buffer's: such a forward cannot be undone."""
    written = {trace.storages[s] for operation in trace.in_forward() for s in operation.writes}
    return any(s.birth == BEFORE_STEP and s.category is not Category.BUFFER for s in written)


def _larger(known: Trace, seen: Trace) -> Trace | None:
    """The known path with the sizes of this capture as further draws; None where it runs other operations, or is within a draw that is known."""
    if not same_operations(known, seen):
        return None
    more = tuple(sizes for sizes in _draws(seen) if not any(_within(sizes, other) for other in _draws(known)))
    return replace(known, drawn_bytes=_largest_and_last((*known.drawn_bytes, *more))) if more else None


def _largest_and_last(draws: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Without the draws than which a later one is larger everywhere, and at most so many, the last ones."""
    kept = [
        sizes for number, sizes in enumerate(draws) if not any(_within(sizes, later) for later in draws[number + 1 :])
    ]
    return tuple(kept[-MOST_DRAWS:])


def _within(sizes: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether nothing is larger in one draw than in the other."""
    return all(a <= b for a, b in zip(sizes, others, strict=True))


def _draws(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Bytes of every storage, under each draw."""
    return (tuple(storage.bytes for storage in trace.storages), *trace.drawn_bytes)


def _changed_buffers(traces: Sequence[Trace]) -> tuple[tuple[str, ...], int]:
    """The buffers that any of these paths writes, and the bytes of their copies, there in every step; at most so many where no path writes all."""
    names, total = set[str](), 0
    for trace in sorted(traces, key=lambda trace: -len(trace.changed_buffers)):
        if not names.issuperset(trace.changed_buffers):
            names.update(trace.changed_buffers)
            total += trace.changed_buffer_bytes
    return tuple(sorted(names)), total


def _with_state(trace: Trace, state_bytes: int) -> Trace:
    """With as much optimizer state as any path has: what one path trains keeps its state on all."""
    missing = state_bytes - trace.bytes_of(Category.OPTIMIZER_STATE)
    if missing <= 0:
        return trace
    end = len(trace.events)
    storages = (*trace.storages, Storage(missing, Category.OPTIMIZER_STATE, "", BEFORE_STEP, end))
    return replace(trace, storages=storages, drawn_bytes=tuple((*row, missing) for row in trace.drawn_bytes))
