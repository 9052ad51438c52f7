"""What this computer takes beside the kernels: the unit of the engine's own time, and what cold caches add."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from memfit.capture import cost_table
from memfit.capture.capture import capture
from memfit.capture.cost_table import CostTable
from memfit.capture.costs import with_costs
from memfit.capture.host_time import CACHE_BYTES, HostTime, host_time, shares_evicted
from memfit.capture.reference_work import ReferenceWork
from memfit.capture.source import StepSource
from memfit.techniques.choices import BASELINE
from memfit.values.trace import Trace

pytestmark = pytest.mark.measured_seconds

CPU = torch.device("cpu")
KNOWN = HostTime(7e-6, 20e-6, 60e-6)


def test_only_what_the_mode_adds_is_counted() -> None:
    ticks = itertools.count()
    assert host_time(lambda: float(next(ticks))) == HostTime(0.0, 0.0, 0.0)  # by this clock everything takes one second


def test_nothing_is_drawn_and_no_mode_is_left_on() -> None:
    before = torch.get_rng_state()
    assert host_time(lambda: 0.0) == HostTime(0.0, 0.0, 0.0)
    assert torch.equal(before, torch.get_rng_state())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_it_is_timed_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([KNOWN])
    monkeypatch.setattr(cost_table, "host_time", lambda _: next(times))
    monkeypatch.setattr(ReferenceWork, "slowdown", lambda _: 1.0)
    table = CostTable(CPU, tmp_path)
    assert table.host_time() == KNOWN
    assert table.host_time() == KNOWN
    monkeypatch.setattr(cost_table, "_KNOWN", {})  # as another process
    assert CostTable(CPU, tmp_path).host_time() == KNOWN


def _priced(width: int, table: CostTable, host: HostTime) -> tuple[Trace, Trace]:
    """Captured as it is and with what the computer takes beside the kernels: two products with a view between them."""
    model = nn.Sequential(nn.Linear(64, width), nn.Unflatten(1, (1, width)), nn.Linear(width, 1))
    captured = capture(StepSource(model, torch.ones(64, 64), lambda m, x: m(x).sum(), None), BASELINE)
    costs = table.measure(captured.calls)
    alone, beside = (
        with_costs(captured, costs, seconds_are="measured", device="", host=each)
        for each in (HostTime(0.0, 0.0, 0.0), host)
    )
    return alone, beside


def test_what_follows_a_large_kernel_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_table, "host_time", lambda _: KNOWN)
    table = CostTable(CPU, tmp_path)
    for width in (64, 1 << 15):
        alone, beside = _priced(width, table, KNOWN)
        shares = shares_evicted(beside)
        added = [b.seconds - a.seconds for a, b in zip(alone.operations, beside.operations, strict=True)]
        # Operations are short here, so each is timed with warm caches; or long, and then with cold ones, too.
        assert all(
            seconds in (0.0, pytest.approx(share * KNOWN.cold_operation))
            for seconds, share in zip(added, shares, strict=True)
        )
        factors = [op.host_factor for op in beside.operations]
        assert factors == [KNOWN.factor_in(share) for share in shares]
        if width == 64:
            assert max(factors) < 1.01
        else:
            assert max(added) > 0.1 * KNOWN.cold_operation
            assert max(factors) > 1.5


def test_a_view_leaves_the_caches_as_they_are(tmp_path: Path) -> None:
    _, trace = _priced(1 << 15, CostTable(CPU, tmp_path), KNOWN)
    shares = shares_evicted(trace)
    views = [n for n, op in enumerate(trace.operations[:-1]) if not op.makes and not op.writes]
    assert views
    assert all(shares[n + 1] == shares[n] for n in views)
    # What the first product reads and makes: rows of 64 numbers, 64 x width weights, and as many results.
    product = next(n for n, op in enumerate(trace.operations) if op.name == "aten.addmm.default")
    touched = 4 * (64 * 64 + 64 * (1 << 15) + (1 << 15) + 64 * (1 << 15))
    assert shares[product + 1] == pytest.approx(touched / CACHE_BYTES, rel=0.01)
