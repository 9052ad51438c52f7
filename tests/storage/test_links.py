"""The link of each disk is measured once, and a disk that cannot be measured is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from memfit.errors import InputError
from memfit.hardware.machine import Link
from memfit.storage import links


@pytest.mark.measured_seconds
def test_the_link_is_measured_once_for_each_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "cache"))
    measured: list[Path] = []
    disk_link = links.disk_link

    def counted(folder: Path) -> Link:
        measured.append(folder)
        return disk_link(folder)

    monkeypatch.setattr(links, "disk_link", counted)
    first = links.nearest_link(torch.device("cpu"), tmp_path)
    assert links.nearest_link(torch.device("cpu"), tmp_path) == first
    assert len(measured) == 1
    assert first.tier == "disk"
    assert first.out_bandwidth > 1e5
    assert first.in_bandwidth > 1e5
    assert 0 < first.latency_seconds < 1


def test_a_disk_without_room_for_the_measurement_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"cannot be measured: .* does not take 64 MiB \(No space left on device\)"):
        links.disk_link(tmp_path)
