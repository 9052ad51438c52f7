"""What this computer takes beside the kernels: the unit of the engine's own time, and what cold caches add."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from memfit.capture import cost_table
from memfit.capture.capture import capture
from memfit.capture.cost_table import CostTable
from memfit.capture.costs import with_costs
from memfit.capture.fresh_memory import KEPT
from memfit.capture.host_time import BEFORE, ROWS, TOUCHED, HostTime, host_time, touched_since
from memfit.capture.reference_work import ReferenceWork
from memfit.capture.source import StepSource
from memfit.techniques.choices import BASELINE
from memfit.values.trace import Operation, Phase, Trace

pytestmark = pytest.mark.measured_seconds

CPU = torch.device("cpu")
NOTHING = HostTime.same_after_all(0.0)
KNOWN = HostTime(
    (7e-6, 8e-6, 12e-6, 21e-6),
    (0.0, 1e-4, 4e-4, 3e-3),
    (0.0, 1e-6, 3e-6, 9e-6, 20e-6, 30e-6, 40e-6, 60e-6),
    (0.0, 0.0, 1e-6, 2e-6, 3e-6, 3e-6, 3e-6, 4e-6),
)


def test_only_what_the_mode_adds_is_counted_nothing_is_drawn_and_no_mode_is_left_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rounds in ("ROUNDS", "COLD_ROUNDS", "PRODUCT_ROUNDS"):  # all alike by this clock
        monkeypatch.setattr(f"memfit.capture.host_time.{rounds}", 2)
    before = torch.get_rng_state()
    ticks = itertools.count()
    found = host_time(lambda: float(next(ticks)))  # by this clock everything takes one second
    assert replace(found, products=NOTHING.products) == NOTHING
    assert found.products == (0.0, *[1.0] * (len(ROWS) - 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_it_is_timed_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([KNOWN])
    monkeypatch.setattr(cost_table, "host_time", lambda _: next(times))
    monkeypatch.setattr(cost_table, "fresh_memory", lambda _: KEPT)
    monkeypatch.setattr(ReferenceWork, "slowdown", lambda _: 1.0)
    table = CostTable(CPU, tmp_path)
    assert table.host_time() == KNOWN
    assert table.host_time() == KNOWN
    monkeypatch.setattr(cost_table, "_KNOWN", {})  # as another process
    assert CostTable(CPU, tmp_path).host_time() == KNOWN


def test_between_two_it_is_between_their_seconds() -> None:
    kernel = Operation("", Phase.FORWARD, "", (), (), (0,), 0.0, 0, random=False, rerunnable=True, key="")
    view = replace(kernel, makes=())
    for number, seconds in enumerate(KNOWN.products):
        assert KNOWN.factor_after(seconds) * KNOWN.mode == pytest.approx(KNOWN.modes[number])
    assert KNOWN.factor_after(2.5e-4) * KNOWN.mode == pytest.approx((8e-6 + 12e-6) / 2)
    assert KNOWN.factor_after(60.0) * KNOWN.mode == pytest.approx(21e-6)
    for number, touched in enumerate(TOUCHED):
        assert KNOWN.added_after(touched, kernel) == pytest.approx(KNOWN.operations[number])
        assert KNOWN.added_after(touched, view) == pytest.approx(KNOWN.views[number])
    assert KNOWN.added_after(3 << 20, kernel) == pytest.approx((9e-6 + 20e-6) / 2)
    assert KNOWN.added_after(1 << 40, kernel) == 60e-6


def _priced(width: int, table: CostTable, host: HostTime) -> tuple[Trace, Trace]:
    """Captured as it is and with what the computer takes beside the kernels: two products with a view between them."""
    model = nn.Sequential(nn.Linear(64, width), nn.Unflatten(1, (1, width)), nn.Linear(width, 1))
    captured = capture(StepSource(model, torch.ones(64, 64), lambda m, x: m(x).sum(), None), BASELINE)
    costs = table.measure(captured.calls)
    alone, beside = (
        with_costs(captured, costs, seconds_are="measured", device="", host=each) for each in (NOTHING, host)
    )
    return alone, beside


def test_what_follows_a_long_kernel_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_table, "host_time", lambda _: KNOWN)
    table = CostTable(CPU, tmp_path)
    largest = []
    for width in (64, 1 << 15):
        alone, beside = _priced(width, table, KNOWN)
        added = [b.seconds - a.seconds for a, b in zip(alone.operations, beside.operations, strict=True)]
        # Operations are short here, so each is timed with warm caches; or long, and then with cold ones, too.
        assert all(
            seconds in (0.0, pytest.approx(KNOWN.added_after(since, operation)))
            for seconds, since, operation in zip(added, touched_since(beside), beside.operations, strict=True)
        )
        factors = [op.host_factor for op in beside.operations]
        seconds = [op.seconds for op in beside.operations]
        before = [sum(seconds[max(0, n - BEFORE) : n]) for n in range(len(seconds))]
        assert factors == [pytest.approx(KNOWN.factor_after(each)) for each in before]
        largest.append((max(added), max(factors)))
    (_, small), (added_at_most, large) = largest
    assert added_at_most > 10e-6
    assert large > 2 > small  # after a product of milliseconds, and of microseconds


def test_a_view_leaves_the_caches_as_they_are(tmp_path: Path) -> None:
    _, trace = _priced(1 << 15, CostTable(CPU, tmp_path), KNOWN)
    first, second, *_ = (n for n, op in enumerate(trace.operations) if op.name == "aten.addmm.default")
    between = trace.operations[first + 1 : second]
    assert between
    assert all(not op.makes and not op.writes for op in between)
    # What the first product reads and makes: rows of 64 numbers, 64 x width weights, a bias, and as many results; the views after it add nothing.
    touched = 4 * (64 * 64 + 64 * (1 << 15) + (1 << 15) + 64 * (1 << 15))
    assert touched_since(trace)[second] == pytest.approx(touched, rel=0.01)


def test_code_is_in_the_caches_where_an_operation_like_it_ran_a_moment_ago(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    captured = capture(StepSource(model, torch.ones(64, 64), lambda m, x: m(x).sum(), None), BASELINE)
    products = [n for n, op in enumerate(captured.trace.operations) if op.name == "aten.addmm.default"]
    since = [touched_since(captured.trace)[n] for n in products]
    # Before the first of its kind a whole step went by; then one product, which reads 64 x 64 numbers, as many weights and a bias, and makes as many.
    assert since == [TOUCHED[-1], *[pytest.approx(4 * (3 * 64 * 64 + 64), rel=0.05)] * 2]
