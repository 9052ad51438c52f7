"""What each distinct call costs, and a trace with these costs filled in: seconds, workspace, and bytes that fake kernels do not show."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch

from memfit import dispatch
from memfit.capture.calls import ResultLayouts
from memfit.capture.captured import Captured
from memfit.capture.generator_states import GENERATOR_STATE
from memfit.capture.present_machine import device_name
from memfit.errors import InputError
from memfit.values.machine import Link
from memfit.values.trace import BEFORE_STEP, Category, Storage, Trace, digest


@dataclass(frozen=True, slots=True)
class Cost:
    """One kind of operation.

    Attributes:
        seconds: of one run.
        workspace_bytes: allocated while it runs and freed before it returns.
        made_bytes: of the storages it returns, in order; None when not measured.
        layouts: of the tensors it returns, as in `CallSpec`; None when not measured.
        measured: run on the device, not estimated.
    """

    seconds: float
    workspace_bytes: int = 0
    made_bytes: tuple[int, ...] | None = None
    layouts: ResultLayouts | None = None
    measured: bool = True


def cache_folder() -> Path:
    """Where measured costs are kept: MEMFIT_CACHE_DIR, or memfit's folder in the user's cache."""
    base = os.environ.get("MEMFIT_CACHE_DIR")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memfit"


def with_costs(
    captured: Captured,
    costs: Mapping[str, Cost],
    *,
    seconds_are: str,
    device: str,
    allocation_bytes: int = 1,
    other_bytes: int = 0,
) -> Trace:
    """The trace with seconds and workspace filled in, and hidden bytes in opaque outputs put right.

    Args:
        captured: the trace and its calls.
        costs: of each call.
        seconds_are, device: for the record.
        allocation_bytes: what the device's allocator rounds up to (512 on CUDA).
        other_bytes: held on the device besides what the trace knows (libraries' workspaces, the user's other tensors).
    """
    trace = captured.trace
    storages: list[Storage] = list(trace.storages)
    drawn = [list(sizes) for sizes in trace.drawn_bytes]
    operations = []
    notes = list(trace.notes)
    for op in trace.operations:
        if op.name == GENERATOR_STATE:
            operations.append(op)
            continue
        cost = costs[op.key]
        hidden = 0
        if cost.made_bytes is not None and len(cost.made_bytes) > len(op.makes):
            # The fake kernel gives one storage twice where the real one makes two (a fused RNN's bias gradients).
            hidden = max(0, sum(cost.made_bytes) - sum(storages[s].bytes for s in op.makes))
        operations.append(replace(op, seconds=cost.seconds, workspace_bytes=cost.workspace_bytes + hidden))
        if cost.made_bytes is None or trace.source != "fake" or len(cost.made_bytes) != len(op.makes):
            continue
        for s, size in zip(op.makes, cost.made_bytes, strict=True):
            if size > storages[s].bytes:
                storages[s] = replace(storages[s], bytes=size)
                for sizes in drawn:
                    sizes[s] = max(sizes[s], size)
                note = f"{op.name} returns more memory than its fake kernel shows; measured bytes are used"
                if note not in notes:
                    notes.append(note)
    if allocation_bytes > 1:
        storages = [replace(s, bytes=-(-s.bytes // allocation_bytes) * allocation_bytes) for s in storages]
        drawn = [[-(-size // allocation_bytes) * allocation_bytes for size in sizes] for sizes in drawn]
    if other_bytes:
        storages.append(Storage(other_bytes, Category.OTHER, "", BEFORE_STEP, len(trace.events)))
        for sizes in drawn:
            sizes.append(other_bytes)
    return replace(
        trace,
        operations=tuple(operations),
        storages=tuple(storages),
        seconds_are=seconds_are,
        device=device,
        notes=tuple(notes),
        drawn_bytes=tuple(map(tuple, drawn)),
    )


def other_bytes(device: torch.device, known: Iterable[torch.Tensor]) -> int:
    """Bytes that the CUDA allocator has handed out for other things than these tensors: cuBLAS's workspace, whatever else the process holds; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    held = sum(
        -(-s.nbytes() // 512) * 512 for s in dispatch.storages_of(t for t in known if t.device == device).values()
    )
    return max(0, torch.cuda.memory_allocated(device) - held)


LINK_BYTES: Final = 64 << 20  # of a measured copy: what is shorter says more about caches than about the link
LINK_PIECE_BYTES: Final = 8 << 20  # of a storage, as models have them
LINK_ROUNDS: Final = 3  # the first makes the file's blocks; what else the disk does can only add
LINK_FORMAT: Final = 1


def lower_tier(device: torch.device, folder: Path) -> Link:
    """The link to the tier below a present device, measured once and kept on disk: a GPU's to pinned host memory, a CPU's to the disk of a folder.

    Args:
        device: from which.
        folder: on the disk that a CPU swaps to; kept apart by disk, as each has its own speed.
    """
    disk = 0 if device.type == "cuda" else folder.stat().st_dev
    identity = digest(device_name(device), device.type, disk, torch.__version__, LINK_FORMAT)
    path = cache_folder() / "links" / f"{identity}.json"
    with suppress(OSError, ValueError, TypeError):
        return Link(**json.loads(path.read_text()))
    link = _host_link(device) if device.type == "cuda" else _disk_link(folder)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(link)))
        temporary.replace(path)
    return link


def _disk_link(folder: Path) -> Link:
    """Bandwidths of the disk itself: written through to it, and read with nothing of it in memory.

    The page cache may be faster for as long as there is memory to spare, which is not what somebody has who swaps.
    """
    piece = memoryview(bytearray(os.urandom(1 << 20) * (LINK_PIECE_BYTES >> 20)))
    offsets = range(0, LINK_BYTES, LINK_PIECE_BYTES)
    try:
        with tempfile.TemporaryFile(prefix="memfit-link-", dir=folder, buffering=0) as opened:
            file = opened.fileno()
            os.posix_fallocate(file, 0, LINK_BYTES)
            down, up = [], []
            for _ in range(LINK_ROUNDS):
                begin = time.perf_counter()
                for offset in offsets:
                    os.pwrite(file, piece, offset)
                os.fdatasync(file)
                down.append(time.perf_counter() - begin)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                begin = time.perf_counter()
                for offset in offsets:
                    os.preadv(file, [piece], offset)
                up.append(time.perf_counter() - begin)
            times = []
            for _ in range(10):
                start = time.perf_counter()
                worker = threading.Thread(target=os.pwrite, args=(file, piece[:1], 0))
                worker.start()
                worker.join()
                times.append(time.perf_counter() - start)
    except OSError as error:
        raise InputError(
            f"the disk to swap to cannot be measured: {folder} does not take {LINK_BYTES >> 20} MiB ({error.strerror}): set MEMFIT_SWAP_DIR to another folder"
        ) from error
    return Link("disk", LINK_BYTES / min(down), LINK_BYTES / min(up), sorted(times)[len(times) // 2])


def _host_link(device: torch.device) -> Link:
    below = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    above = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)

    def seconds(target: torch.Tensor, source: torch.Tensor) -> float:
        times = []
        for _ in range(4):  # the first sets things up
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            torch.cuda.synchronize(device)
            times.append(float(start.elapsed_time(end)) / 1e3)
        return min(times)

    latency = seconds(below[:1], above[:1])
    return Link("host", LINK_BYTES / seconds(below, above), LINK_BYTES / seconds(above, below), latency)
