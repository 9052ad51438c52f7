"""What a dispatch mode takes on this computer: the unit of the engine's own time."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from memfit.capture import cost_table
from memfit.capture.cost_table import CostTable
from memfit.capture.host_time import mode_seconds


def test_only_what_the_mode_adds_is_counted() -> None:
    ticks = itertools.count()
    assert mode_seconds(lambda: float(next(ticks))) == 0.0  # by this clock both take one second


def test_nothing_is_drawn_and_no_mode_is_left_on() -> None:
    before = torch.get_rng_state()
    assert mode_seconds(lambda: 0.0) == 0.0
    assert torch.equal(before, torch.get_rng_state())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_it_is_timed_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([7e-6])
    monkeypatch.setattr(cost_table, "mode_seconds", lambda _: next(times))
    table = CostTable(torch.device("cpu"), tmp_path)
    assert table.mode_seconds() == 7e-6
    assert table.mode_seconds() == 7e-6
    monkeypatch.setattr(cost_table, "_KNOWN", {})  # as another process
    assert CostTable(torch.device("cpu"), tmp_path).mode_seconds() == 7e-6
