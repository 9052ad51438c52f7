"""A hard limit on the memory of training, set by whoever starts the process: beyond it an allocation fails here, instead of taking what others were promised.

On a GPU it is torch's own limit on a process's share of the device; on a CPU the operating system's on writable memory (RLIMIT_DATA).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

from memfit.errors import ConfigError
from memfit.train.limit_variable import VARIABLE

# What a process takes beside the step: reading data, evaluation, snapshots, what the meter notes, buffers of the math library, stacks of threads; and what
# malloc keeps of freed memory, which grows with the step. MiniLM, with a peak of 422 MiB, takes 257 MiB so.
SLACK_BYTES: Final = 512 << 20
SLACK_SHARE: Final = 8  # an eighth of the limit


def enforce(model: torch.nn.Module, device: torch.device, read_bytes: int = 0) -> int | None:
    """Set the limit that the environment names, if it names one.

    Args:
        model: as it is before the first step; what it holds by now is part of the limit.
        device: that it is trained on.
        read_bytes: that are read at the start and freed again, as a snapshot's are.

    Returns:
        The limit in bytes of a step; None for none.

    Raises:
        ConfigError: the variable holds no number of bytes, nor one for each rank.
    """
    limit = _named()
    if limit is None:
        return None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        return limit
    present = _writable_bytes()
    if present is None:  # another system than Linux
        return None
    import resource

    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cpu")
    allowed = present - held + limit + limit // SLACK_SHARE + read_bytes + SLACK_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or allowed <= hard:
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
    return limit


def _named() -> int | None:
    """What the environment names for this process; None for nothing."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    each = text.split(",")
    if not all(size.isdecimal() and int(size) > 0 for size in each):
        raise ConfigError(f"{VARIABLE}={text!r} is not a number of bytes: write digits, or unset it")
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if len(each) not in {1, ranks}:
        raise ConfigError(
            f"{VARIABLE}={text!r} is for {len(each)} ranks, and there are {ranks}: give one number for all, or one for each"
        )
    return int(each[int(os.environ.get("RANK") or 0) if len(each) > 1 else 0])


def _writable_bytes() -> int | None:
    """Writable memory that this process has mapped, as the system counts it for the limit."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:")), None)
