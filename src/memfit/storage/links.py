"""Speed of the link from a device to its nearest lower tier: measured once for each GPU or disk, and cached on disk.

The disk that is measured is the disk that is used: callers pass the folder that `folders.offload_folder` returns, in which files are created.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import torch

from memfit.errors import InputError
from memfit.hardware.machine import Link
from memfit.identity import digest
from memfit.storage.folders import measured_once

MEASURED_BYTES: Final = 64 << 20  # of a measured copy: what is shorter says more about caches than about the link
PIECE_BYTES: Final = 8 << 20  # of a storage, as models have them
ROUNDS: Final = 3  # the first makes the file's blocks; what else the disk does can only add
FORMAT: Final = 2


def nearest_link(device: torch.device, folder: Path) -> Link:
    """The link from a device of this computer to its nearest lower tier, measured once and cached: a GPU's to pinned host memory, a CPU's to a disk.

    Args:
        device: from which.
        folder: that a CPU offloads to; folders of one disk have one link.

    Raises:
        InputError: the folder's disk cannot be measured.
        RuntimeError: torch's own, where the host cannot pin memory.
    """
    identity = digest(device.type, *_measured(device, folder), torch.__version__, FORMAT)
    return measured_once(
        Link, "links", identity, lambda: host_link(device) if device.type == "cuda" else disk_link(folder)
    )


def _measured(device: torch.device, folder: Path) -> tuple[object, ...]:
    """What identifies a link: the GPU's name, or the disk."""
    if device.type == "cuda":
        return (torch.cuda.get_device_name(device),)
    try:
        return folder.stat().st_dev, os.statvfs(folder).f_fsid
    except OSError as error:
        raise _unmeasurable(folder, error) from error


def _unmeasurable(folder: Path, error: OSError) -> InputError:
    return InputError(
        f"the disk to offload to cannot be measured: {folder} does not take {MEASURED_BYTES >> 20} MiB ({error.strerror}): name another folder "
        "(MEMFIT_OFFLOAD_DIR)"
    )


def disk_link(folder: Path) -> Link:
    """Bandwidths of the disk itself: written through to it, and read with nothing of it in memory.

    The page cache is faster as long as memory is free, but where a plan offloads, memory is not free.
    """
    piece = memoryview(bytearray(os.urandom(1 << 20) * (PIECE_BYTES >> 20)))
    offsets = range(0, MEASURED_BYTES, PIECE_BYTES)
    try:
        with tempfile.TemporaryFile(prefix="memfit-link-", dir=folder, buffering=0) as opened:
            file = opened.fileno()
            os.posix_fallocate(file, 0, MEASURED_BYTES)
            down, up = [], []
            for _ in range(ROUNDS):
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
        raise _unmeasurable(folder, error) from error
    return Link("disk", MEASURED_BYTES / min(down), MEASURED_BYTES / min(up), sorted(times)[len(times) // 2])


def host_link(device: torch.device) -> Link:
    """Bandwidths of copies to and from pinned host memory."""
    below = torch.empty(MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
    above = torch.empty(MEASURED_BYTES, dtype=torch.uint8, device=device)

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
    return Link("host", MEASURED_BYTES / seconds(below, above), MEASURED_BYTES / seconds(above, below), latency)
