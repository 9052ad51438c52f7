"""Arenas give back the bytes they were given, and hold a storage exactly as long as its copy is under way."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from memfit.storage import files
from memfit.storage.arenas import DiskArena


def test_bytes_come_back_as_they_went(tmp_path: Path) -> None:
    arena = DiskArena(1 << 20, tmp_path)
    storages = [torch.randint(0, 255, (n,), dtype=torch.uint8).untyped_storage() for n in (1, 4095, 4096, 70001)]
    offsets = [0, 4096, 8192, 12288]
    for copy in [arena.copy_down(s, o) for s, o in zip(storages, offsets, strict=True)]:
        copy.wait()
    back = [torch.zeros(s.nbytes(), dtype=torch.uint8).untyped_storage() for s in storages]
    for copy in [arena.copy_up(s, o) for s, o in zip(back, offsets, strict=True)]:
        copy.wait()
    assert [bytes(s) for s in back] == [bytes(s) for s in storages]
    arena.close()


def test_a_copy_holds_its_storage_until_it_is_done_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    write = files.write_whole

    def gated(file: int, memory: memoryview, offset: int) -> None:
        gate.wait()
        write(file, memory, offset)

    monkeypatch.setattr(files, "write_whole", gated)
    arena = DiskArena(1 << 16, tmp_path)
    tensor = torch.arange(100)
    arena.copy_down(tensor.untyped_storage(), 0)  # nobody waits for it
    expected = bytes(tensor.untyped_storage())
    del tensor
    gate.set()
    arena.settle()
    back = torch.zeros(100, dtype=torch.int64)
    arena.copy_up(back.untyped_storage(), 0).wait()
    assert bytes(back.untyped_storage()) == expected
