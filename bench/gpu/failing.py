"""A step that runs out of memory on the GPU, and what `memfit doctor --oom` reads from the message and from the snapshot of this allocator."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu.setting import Setting, adamw, bert

from memfit import oom

GIB = 1 << 30
SNAPSHOT = Path(tempfile.gettempdir()) / "memfit-bench-snapshot.pickle"


def failing(setting: Setting) -> Iterator[dict[str, Any]]:
    """Six of BERT-large's layers with a batch that does not fit in 4 GiB; the allocator's own figures at that moment beside what is read."""
    if setting.device.type != "cuda":
        yield {"not_run": "the CPU has no memory snapshots"}
        return
    total = torch.cuda.get_device_properties(0).total_memory
    model, sample = bert(setting, *((32, 64) if setting.tiny else (64, 256)), layers=6)
    limit = torch.cuda.memory_reserved() + (64 << 20) if setting.tiny else 4 * GIB
    torch.cuda.memory._record_memory_history(max_entries=20000)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    optimizer = adamw(model.parameters())
    try:
        while True:
            model(**sample).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError as error:
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.memory._dump_snapshot(str(SNAPSHOT))
        message = str(error)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.set_per_process_memory_fraction(1.0)
    text = SNAPSHOT.with_suffix(".txt")
    text.write_text(message)
    there = {"allocated_bytes": allocated, "reserved_bytes": reserved, "limit_bytes": limit}
    for path in (text, SNAPSHOT):
        yield {"file": path.suffix, "size": path.stat().st_size, "there": there, "read": oom.facts(oom.read(path))}
    yield {"message": message}
