"""A snapshot of CUDA's allocator, read without executing anything in it.

A snapshot is a pickle of plain containers, and a pickle may name any function to be called when it is read. This reader knows no names at all, so a file
that somebody sends can be opened.

The format is that of `torch.cuda.memory._snapshot` (2.13; older ones lack some keys): `segments`, each what one cudaMalloc gave, with its `blocks`, and
`device_traces`, for each device the allocator's last actions, "oom" among them. Stacks begin with the innermost frame.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from memfit.errors import InputError
from memfit.oom.failure import Failure, Holder
from memfit.oom.stacks import Frame, stage, where

LIVE: Final = "active_allocated"
MOST_HOLDERS: Final = 10
OWN_POOL: Final = (0, 0)  # the allocator's own; others belong to CUDA graphs and the like


class _Plain(pickle.Unpickler):
    """Reads numbers, text and containers of them, and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        """Refuse every name."""
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and a snapshot holds plain data only")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse what lies outside of the file."""
        raise pickle.UnpicklingError(f"it refers to {pid!r} outside of the file")


def read_snapshot(stream: IO[bytes], path: Path) -> Failure:
    """What a snapshot tells.

    Args:
        stream: of the file.
        path: for messages.

    Raises:
        InputError: it is damaged, or something else.
    """
    try:
        content = _Plain(stream).load()
    except Exception as error:  # on damaged bytes pickle raises nearly anything
        raise InputError(f"{path} is no readable memory snapshot: {error}") from error
    try:
        return of_snapshot(content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"{path} is no memory snapshot of torch.cuda.memory._dump_snapshot ({type(error).__name__}: {error})"
        ) from error


def of_snapshot(content: Any) -> Failure:
    """What a snapshot's content tells.

    Args:
        content: what `torch.cuda.memory._snapshot()` or `torch.cuda.memory_snapshot()` (segments only) returned.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: it has another form.
    """
    segments: Sequence[Mapping[str, Any]] = content if isinstance(content, list) else content["segments"]
    traces: Sequence[Sequence[Mapping[str, Any]]] = (
        [] if isinstance(content, list) else content.get("device_traces", [])
    )
    settings = {} if isinstance(content, list) else content.get("allocator_settings", {})
    device, at = _failed(traces)
    if device is None:
        device = _fullest(segments)
    mine = [segment for segment in segments if segment.get("device", 0) == device]
    blocks = [block for segment in mine for block in segment["blocks"]]
    reserved = sum(segment["total_size"] for segment in mine)
    live = [block for block in blocks if block["state"] == LIVE]
    allocated = sum(block["size"] for block in live)
    event = traces[device][at] if at is not None else None
    frames = _frames(event) if event is not None else ()
    gaps = [
        block["size"]
        for segment in mine
        for block in segment["blocks"]
        if block["state"] == "inactive" and tuple(segment.get("segment_pool_id", OWN_POOL)) == OWN_POOL
    ]
    return Failure(
        "snapshot",
        device=f"cuda:{device}",
        kind="allocation" if event is not None else "none",
        evidence="" if event is None else "an allocation failed (oom)",
        wanted_bytes=None if event is None else int(event["size"]),
        free_bytes=None if event is None else _free(event),
        allocated_bytes=allocated,
        unallocated_bytes=reserved - allocated,
        private_bytes=sum(
            block["size"]
            for segment in mine
            if tuple(segment.get("segment_pool_id", OWN_POOL)) != OWN_POOL
            for block in segment["blocks"]
            if block["state"] == LIVE
        ),
        largest_gap_bytes=max(gaps, default=0),
        expandable=bool(settings.get("expandable_segments")) or any(s.get("is_expandable") for s in mine),
        freed_after_bytes=0 if at is None else _freed(traces[device][at + 1 :]),
        stage=stage(frames),
        where=where(frames),
        holders=_holders(live),
        times=sum(entry["action"] == "oom" for trace in traces for entry in trace) or 1,
    )


def _failed(traces: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[int | None, int | None]:
    """Device and place of the last failed allocation in the traces."""
    found: tuple[int | None, int | None] = (None, None)
    latest = -1
    for device, trace in enumerate(traces):
        for at, entry in enumerate(trace):
            if entry["action"] == "oom" and (found[0] is None or entry.get("time_us", 0) >= latest):
                found, latest = (device, at), entry.get("time_us", 0)
    return found


def _fullest(segments: Iterable[Mapping[str, Any]]) -> int:
    """The device of which most is held."""
    held: dict[int, int] = defaultdict(int)
    for segment in segments:
        held[segment.get("device", 0)] += segment["total_size"]
    return max(held, key=lambda device: held[device], default=0)


def _free(event: Mapping[str, Any]) -> int | None:
    # In place of the address, which an allocation that failed has none of; some versions write it there.
    free = event.get("device_free", event.get("addr"))
    return None if free is None else int(free)


def _freed(after: Iterable[Mapping[str, Any]]) -> int:
    """Bytes that were freed after the failure, less those allocated."""
    freed = 0
    for entry in after:
        if entry["action"] == "free_completed":
            freed += entry["size"]
        elif entry["action"] == "alloc":
            freed -= entry["size"]
    return max(0, freed)


def _frames(entry: Mapping[str, Any]) -> tuple[Frame, ...]:
    frames = entry.get("frames")
    if frames is None:  # before 2.1 a block kept a history
        history = entry.get("history") or [{}]
        frames = history[0].get("frames", ())
    return tuple(Frame(str(f["filename"]), int(f["line"]), str(f["name"])) for f in frames)


def _holders(live: Iterable[Mapping[str, Any]]) -> tuple[Holder, ...]:
    """Live allocations by the place that made them, the largest first."""
    held: dict[tuple[str, str], list[int]] = defaultdict(list)
    for block in live:
        frames = _frames(block)
        held[where(frames), stage(frames)].append(block["size"])
    holders = [Holder(place, sum(sizes), len(sizes), part) for (place, part), sizes in held.items()]
    holders.sort(key=lambda holder: (-holder.bytes, holder.where, holder.stage))
    return tuple(holders[:MOST_HOLDERS])
