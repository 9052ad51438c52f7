"""Seconds and hidden bytes: what kernels allocate out of sight is measured, kept on disk, and never in the way."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit.capture import cost_table, reference_work, timing
from memfit.capture.arguments import build
from memfit.capture.calls import CallSpec
from memfit.capture.capture import capture, capture_real
from memfit.capture.captured import Captured
from memfit.capture.cost_table import CostTable
from memfit.capture.costs import COLD_SHARE, Cost, with_costs
from memfit.capture.fresh_memory import FreshMemory
from memfit.capture.host_time import HostTime
from memfit.capture.reference_work import COLD_RUNS, LOOKS, QUIET, RUNS, ReferenceWork
from memfit.capture.roofline import estimated_costs, work_of
from memfit.capture.source import StepSource
from memfit.hardware.efficiency import Kind, Work, work_seconds
from memfit.hardware.machine import known_machine
from memfit.meter import metered
from memfit.planning import planning_of
from memfit.values.trace import Phase
from models import case
from models.outcome import measured_peak

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.measured_seconds,
    pytest.mark.usefixtures("one_thread"),
    # torch hides this warning of its own, but not where warnings are errors; then no capture would be a fake one.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def captured_chain() -> Captured:
    return capture(StepSource(small.chain(1), small.rows(16), small.squared_error, small.adamw))


def cost_of(captured: Captured, name: str, folder: Path) -> Cost:
    table = CostTable(CPU, folder).measure(captured.calls)
    (cost,) = {op.key: table[op.key] for op in captured.trace.operations if op.name.split(".")[1] == name}.values()
    return cost


def test_every_operation_is_measured(tmp_path: Path) -> None:
    captured = captured_chain()
    table = CostTable(CPU, tmp_path).measure(captured.calls)
    assert set(table) == set(captured.calls)
    assert all(c.measured and 0 <= c.seconds < 1 for c in table.values())
    trace = with_costs(captured, table, seconds_are="measured", device="here")
    assert trace.device == "here"
    # On a busy computer one of these small ones may take long enough to be timed with cold caches as well.
    costs = [table[op.key] for op in trace.operations]
    warm = [cost.seconds for cost in costs]
    cold = [cost.seconds if cost.cold_seconds is None else cost.cold_seconds for cost in costs]
    assert [op.seconds for op in trace.operations] == [
        w + COLD_SHARE * (c - w) for w, c in zip(warm, cold, strict=True)
    ]
    assert trace.plain_step_seconds > 0


def test_made_bytes_are_those_of_the_results(tmp_path: Path) -> None:
    captured = captured_chain()
    table = CostTable(CPU, tmp_path).measure(captured.calls)
    for op in captured.trace.operations:
        sizes = tuple(captured.trace.storages[s].bytes for s in op.makes)
        if op.name != "aten.mse_loss.default":
            assert table[op.key].made_bytes == sizes, op.name


def test_a_loss_that_keeps_its_summands_is_put_right(tmp_path: Path) -> None:
    """Torch's mean squared error lies in the storage of what was averaged; its fake kernel gives four bytes."""
    captured = captured_chain()
    trace = with_costs(captured, CostTable(CPU, tmp_path).measure(captured.calls), seconds_are="measured", device="")
    real = capture_real(StepSource(small.chain(1), small.rows(16), small.squared_error, small.adamw)).trace
    assert [s.bytes for s in trace.storages] == [s.bytes for s in real.storages]
    assert [s.bytes for s in captured.trace.storages] != [s.bytes for s in real.storages]
    assert any("allocates more on this computer" in note for note in trace.notes)


class Scattering(nn.Module):
    """Copies of a small tensor, after work on larger ones."""

    def forward(self, x: Tensor) -> Tensor:
        corner = (2 * x)[:4, :4].contiguous()
        return sum(  # type: ignore[return-value]
            each.square().sum()
            for each in (
                torch.diagonal_scatter(corner, corner[0]),
                torch.select_scatter(corner, corner[0], 0, 0),
                torch.slice_scatter(corner, corner[:2], 0, 0, 2),
            )
        )


def test_copies_of_a_storage_are_as_large_as_it_is_in_the_step(tmp_path: Path) -> None:
    captured = capture(StepSource(Scattering(), torch.randn(64, 64, requires_grad=True)))
    table = CostTable(CPU, tmp_path).measure(captured.calls)
    for op in captured.trace.operations:
        if op.name.endswith("_scatter.default"):
            (made,) = op.makes
            assert table[op.key].made_bytes == (captured.trace.storages[made].bytes,), op.name


class Convolution(nn.Module):
    """One convolution whose kernel reorders its input and weight into blocks first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(13, 24, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y.sum()


def test_the_workspace_of_a_convolution_is_counted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 13, 20, 20)
    cost = cost_of(capture(StepSource(Convolution(), x)), "convolution", tmp_path)
    model = Convolution()
    with torch.no_grad():
        model.inner(x)
        with metered([x, *model.parameters()]) as reading:
            y = model.inner(x)
    assert cost.workspace_bytes == reading.peak_bytes - reading.base_bytes - y.untyped_storage().nbytes()
    if not torch.backends.mkldnn.is_available():
        pytest.skip("without oneDNN this convolution may need no workspace")
    assert cost.workspace_bytes > 0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(24, 24, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)[0]
        return y.square().mean()


def test_the_hidden_workspace_of_a_fused_rnn_is_counted(tmp_path: Path) -> None:
    x = torch.randn(6, 30, 24)
    captured = capture(StepSource(Recurrent(), x))
    fused = [op for op in captured.trace.operations if op.name == "aten.mkldnn_rnn_layer.default"]
    if not fused:
        pytest.skip("this torch has no fused RNN on the CPU")
    table = CostTable(CPU, tmp_path).measure(captured.calls)
    trace = with_costs(captured, table, seconds_are="measured", device="")
    real = capture_real(StepSource(Recurrent(), x)).trace
    mine = {op.name: [trace.storages[s].bytes for s in op.makes] for op in trace.operations}
    theirs = {op.name: [real.storages[s].bytes for s in op.makes] for op in real.operations}
    assert mine["aten.mkldnn_rnn_layer.default"] == theirs["aten.mkldnn_rnn_layer.default"]
    assert sum(mine["aten.mkldnn_rnn_layer.default"]) > sum(captured.trace.storages[s].bytes for s in fused[0].makes)
    assert table[fused[0].key].measured
    backward = next(op for op in captured.trace.operations if op.name == "aten.mkldnn_rnn_layer_backward.default")
    assert table[backward.key].measured


@pytest.mark.parametrize("name", ["resnet", "lstm"])
def test_predictions_with_hidden_bytes_are_close(name: str) -> None:
    model, sample, loss_fn = case(name).build()
    made = memfit.plan(model, sample, loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    assert made.source == "fake"
    engine = memfit.apply(made, model)
    engine.step(sample)
    assert engine.step(sample, meter=True).peak_bytes == pytest.approx(made.prediction.peak_bytes, rel=0.005)


class NormAlongChannels(nn.Module):
    """Convolution, and a layer norm over its channels: backward's fake kernel keeps the input's strides, the real one does not."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(32, 32, 1)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.convolution(x).transpose(1, 2)).transpose(1, 2)
        return out


class DepthwiseOnPoints(nn.Module):
    """Depthwise convolutions of maps of one point, channels last: strides of dimensions of size 1 choose the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.second = nn.Conv2d(64, 64, 3, padding=1, groups=64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        return nn.functional.gelu(self.second(nn.functional.gelu(self.first(x))))


@pytest.mark.slow
def test_statistics_of_batch_norm_are_as_wide_as_the_real_kernel_makes_them() -> None:
    """In 16 bits the fake kernel gives statistics of 16 bits; with those of the real one, of 32, backward takes another way, which needs a workspace."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(1), nn.Linear(32 * 30 * 30, 2)
        )

    sample = torch.randn(8, 3, 32, 32)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch).float().pow(2).mean()
        return out

    made = memfit.plan(build(), sample, loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 1, "precision": "bf16"})
    assert made.source == "fake"
    made = memfit.replan(made, memfit.smallest_budget(made))
    assert measured_peak(made, build(), sample, loss_fn, small.adamw) == pytest.approx(
        made.prediction.peak_bytes, rel=0.001
    )
    trace = planning_of(made).solver(1).trace
    backward = [o for o in trace.operations if o.name == "aten.native_batch_norm_backward.default"]
    assert backward
    assert all("float32[32]/[1]@5" in o.key for o in backward)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("model", "sample"),
    [
        (lambda: nn.Sequential(NormAlongChannels(), NormAlongChannels()), lambda: torch.randn(64, 32, 6)),
        (DepthwiseOnPoints, lambda: torch.randn(64, 64, 1, 1)),
    ],
    ids=["layer norm", "depthwise"],
)
def test_results_are_laid_out_as_the_real_kernels_do(
    model: Callable[[], nn.Module], sample: Callable[[], Tensor], micro_batches: int
) -> None:
    built, batch = model(), sample()
    fixed = {"micro_batches": micro_batches}
    made = memfit.plan(built, batch, lambda m, b: m(b).square().mean(), 1 << 30, small.adamw, fixed=fixed)
    assert made.source == "fake"
    engine = memfit.apply(made, built)
    engine.step(batch)
    assert engine.step(batch, meter=True).peak_bytes == made.prediction.peak_bytes


class Product(nn.Module):
    """A product of what a layer makes, of a kind."""

    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(1 + 0.1 * self.inner(x).tanh())


def one_zero(h: Tensor) -> Tensor:
    """With a zero in each row, made in the step."""
    return h * (torch.arange(32) != 3)


def zero_corner(h: Tensor) -> Tensor:
    """With one zero in all."""
    return h * (torch.arange(h.numel()) != 3).view_as(h)


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda h: h.prod(1),
    "prod of all": lambda h: h.prod(),
    "cumprod": lambda h: h.cumprod(1),
    "prod of zeros": lambda h: one_zero(h).prod(1),
    "prod of zeros down": lambda h: one_zero(h).prod(0, keepdim=True),
    "prod of all with a zero": lambda h: zero_corner(h).prod(),
    "prod of one factor each": lambda h: one_zero(h).unsqueeze(1).prod(1),
    "cumprod of zeros": lambda h: one_zero(h).cumprod(1),
}
EXACT = {"prod of zeros", "prod of zeros down", "prod of all with a zero"}


def planned_product(name: str) -> tuple[nn.Module, Tensor, memfit.Plan]:
    model, batch = Product(PRODUCTS[name]), torch.randn(512, 32)
    fixed = {"micro_batches": 1}
    return model, batch, memfit.plan(model, batch, lambda m, b: m(b).abs().mean(), 1 << 30, small.adamw, fixed=fixed)


@pytest.mark.alternate(0)
@pytest.mark.parametrize("name", PRODUCTS)
def test_of_products_the_plan_says_that_they_are_not_known_exactly(name: str) -> None:
    _, _, made = planned_product(name)
    assert any(note.startswith("backward of a product in the model") for note in made.notes), made.notes


@pytest.mark.alternate(1)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_take_no_more_than_is_predicted_and_what_is_predicted_where_there_are_zeros(name: str) -> None:
    """Autograd takes a formula by whether the input holds a zero, and a third one while a dispatch mode watches."""
    model, batch, made = planned_product(name)
    engine = memfit.apply(made, model)
    engine.step(batch)
    measured = engine.step(batch, meter=True).peak_bytes
    assert measured is not None
    assert measured <= made.prediction.peak_bytes
    if name in EXACT:
        assert measured == made.prediction.peak_bytes


# -- the file --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that are measured."""
    names: list[str] = []
    measure = timing.KernelTimer.measure

    def noted(self: timing.KernelTimer, wanted: Mapping[str, CallSpec], *arguments: Any) -> dict[str, Cost]:
        names.extend(str(call.func) for call in wanted.values())
        return measure(self, wanted, *arguments)

    monkeypatch.setattr(timing.KernelTimer, "measure", noted)
    busy_for(monkeypatch, 1.0)
    return names


def in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this one knows of costs is forgotten, but for the files."""
    monkeypatch.setattr(cost_table, "_KNOWN", {})


def test_costs_are_measured_once_and_read_back(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = captured_chain()
    first = CostTable(CPU, tmp_path)
    measured = first.measure(captured.calls)
    assert len(timed) == len(captured.calls)
    assert first.measure(captured.calls) == measured
    assert len(timed) == len(captured.calls)
    timed.clear()
    in_another_process(monkeypatch)
    second = CostTable(CPU, tmp_path)
    assert second.measure(captured.calls) == measured
    assert timed == []
    assert sorted(p.suffix for p in first.path.parent.iterdir()) == [".jsonl"]


def test_of_cold_caches_a_step_meets_a_share_and_a_table_keeps_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = captured_chain()
    measured = dict.fromkeys(captured.calls, Cost(1e-3, cold_seconds=3e-3))
    busy_for(monkeypatch, 1.0)
    as_known(monkeypatch)
    monkeypatch.setattr(timing.KernelTimer, "measure", lambda *_: measured)
    CostTable(CPU, tmp_path).measure(captured.calls)
    in_another_process(monkeypatch)
    costs = CostTable(CPU, tmp_path).measure(captured.calls)
    assert costs == measured
    trace = with_costs(captured, costs, seconds_are="measured", device="here")
    kernels = [op for op in trace.operations if op.key in costs and op.times == 1.0]
    assert kernels
    assert all(op.seconds == pytest.approx(1e-3 + COLD_SHARE * 2e-3) for op in kernels)


def test_two_processes_that_write_one_table_lose_nothing(tmp_path: Path, timed: list[str]) -> None:
    captured = captured_chain()
    keys = list(captured.calls)
    parts = [{key: captured.calls[key] for key in keys[start::2]} for start in (0, 1)]
    tables = [CostTable(CPU, tmp_path) for _ in parts]
    tables[1]._known = cost_table._KnownCosts(tables[1].path)  # as another process has it
    costs = {key: cost for table, part in zip(tables, parts, strict=True) for key, cost in table.measure(part).items()}
    assert len(timed) == len(keys)
    with tables[0].path.open("ab") as file:
        file.write(b'\n["half of a li')  # of a process that was killed
    later = CostTable(CPU, tmp_path)
    later._known = cost_table._KnownCosts(later.path)
    later._known.read()
    assert later.measure(captured.calls) == costs
    assert len(timed) == len(keys)


def test_what_is_known_is_timed_once_more_beside_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is timed later takes a tenth longer, which says nothing of the calls that were not timed before."""
    wide = nn.Sequential(nn.Linear(32, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 32))
    known, other = (
        capture(StepSource(wide, small.rows(rows), small.squared_error, small.adamw)).calls for rows in (1024, 2048)
    )
    asked: list[set[str]] = []

    def takes(factor: float) -> None:
        def measure(_: timing.KernelTimer, wanted: dict[str, Any], __: object) -> dict[str, Cost]:
            asked.append(set(wanted))
            return {key: Cost(factor * 1e-3, cold_seconds=factor * 2e-3) for key in wanted}

        monkeypatch.setattr(timing.KernelTimer, "measure", measure)

    busy_for(monkeypatch, 1.0)
    as_known(monkeypatch)
    takes(1.0)
    CostTable(CPU, tmp_path).measure(known)
    in_another_process(monkeypatch)
    takes(1.1)
    table = CostTable(CPU, tmp_path)
    table.measure(known)
    assert len(asked) == 1
    found = table.measure(other).values()
    assert all(cost.seconds == pytest.approx(1e-3) and cost.cold_seconds == pytest.approx(2e-3) for cost in found)
    beside = asked[-1] & known.keys()
    assert len(beside) == cost_table.MOST_BESIDE
    assert asked[-1] - beside == other.keys() - known.keys()


def test_known_calls_that_do_not_agree_say_nothing_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them met page faults when they were timed first, and by now do not; the others take as long as before."""
    wide = nn.Sequential(nn.Linear(32, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 32))
    known, other = (
        capture(StepSource(wide, small.rows(rows), small.squared_error, small.adamw)).calls for rows in (1024, 2048)
    )
    factors: Iterator[float] = itertools.repeat(1.0)

    def measure(_: timing.KernelTimer, wanted: dict[str, Any], __: object) -> dict[str, Cost]:
        return {key: Cost(next(factors) * 1e-3) for key in wanted}

    busy_for(monkeypatch, 1.0)
    as_known(monkeypatch)
    monkeypatch.setattr(timing.KernelTimer, "measure", measure)
    CostTable(CPU, tmp_path).measure(known)
    in_another_process(monkeypatch)
    table = CostTable(CPU, tmp_path)
    table.measure(known)
    factors = itertools.chain([0.25, 0.5, 0.25, 0.5], itertools.repeat(1.0))
    assert all(cost.seconds == pytest.approx(1e-3) for cost in table.measure(other).values())


def test_a_few_calls_say_nothing_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = captured_chain().calls
    few = dict(list(calls.items())[: cost_table.FEWEST_BESIDE - 1])
    factors = iter((1.0, 1.1))

    def measure(_: timing.KernelTimer, wanted: dict[str, Any], __: object) -> dict[str, Cost]:
        factor = next(factors)
        return {key: Cost(factor * 1e-3) for key in wanted}

    busy_for(monkeypatch, 1.0)
    monkeypatch.setattr(timing.KernelTimer, "measure", measure)
    CostTable(CPU, tmp_path).measure(few)
    found = CostTable(CPU, tmp_path).measure(calls)
    assert all(found[key].seconds == pytest.approx(1.1e-3) for key in calls.keys() - few.keys())


def test_only_what_is_new_is_measured(tmp_path: Path, timed: list[str]) -> None:
    CostTable(CPU, tmp_path).measure(captured_chain().calls)
    timed.clear()
    wider = capture(
        StepSource(nn.Sequential(small.chain(1), nn.Softplus()), small.rows(16), small.squared_error, small.adamw)
    )
    CostTable(CPU, tmp_path).measure(wider.calls)
    assert timed == ["aten.softplus.default", "aten.softplus_backward.default"]


def test_another_number_of_threads_is_another_table(tmp_path: Path) -> None:
    one = CostTable(CPU, tmp_path).path
    torch.set_num_threads(2)
    assert CostTable(CPU, tmp_path).path != one


def busy_for(monkeypatch: pytest.MonkeyPatch, *slowdowns: float, stalls: bool = False) -> None:
    """The machine is as busy as these say, one for each time that somebody looks; then as the last one says. Threads wait for each other where it `stalls`."""
    left = list(slowdowns)

    def seconds(work: ReferenceWork, *, now: bool = False) -> float:
        work.least_seconds, work.stalls = 1.0, stalls
        return QUIET * (left.pop(0) if len(left) > 1 else left[0])

    monkeypatch.setattr(ReferenceWork, "seconds", seconds)


def as_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are not timed to see how busy the machine is; the reference work tells."""
    monkeypatch.setattr(timing.KernelTimer, "seconds_now", lambda *_: {})


@pytest.mark.parametrize(
    ("factor", "looked", "number", "expected"),
    [
        (1.3, 1.0, None, 1.3),
        (0.9, 1.5, None, 0.9),
        (1.3, 1.5, cost_table.FEWEST_BESIDE - 1, 1.5),  # too few tell nothing
        (50.0, 1.5, None, 1.5),  # which is how long a thread waits
    ],
)
def test_costs_are_as_long_as_the_longest_calls_take_now(
    factor: float,
    looked: float,
    number: int | None,
    expected: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What slows the reference work does not slow them, and the other way round."""
    calls = captured_chain().calls
    asked = dict(itertools.islice(calls.items(), number))
    monkeypatch.setattr(timing.KernelTimer, "measure", lambda _, wanted, __: dict.fromkeys(wanted, Cost(1e-3)))
    busy_for(monkeypatch, 1.0)
    as_known(monkeypatch)
    CostTable(CPU, tmp_path).measure(calls)
    in_another_process(monkeypatch)
    busy_for(monkeypatch, looked)
    monkeypatch.setattr(timing.KernelTimer, "seconds_now", lambda _, wanted: dict.fromkeys(wanted, factor * 1e-3))
    table = CostTable(CPU, tmp_path)
    for which in (asked, calls):  # one number for all that is asked for later
        assert [cost.seconds for cost in table.measure(which).values()] == pytest.approx([expected * 1e-3] * len(which))


def test_how_slow_a_computer_is_is_told_by_what_the_longest_calls_take_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the median of few of them it was told a tenth too low: products are slowed less than what goes through memory."""
    calls = captured_chain().calls
    known = {key: (number + 2) * 1e-3 for number, key in enumerate(calls)}
    factors = {key: 3.0 if number % 3 else 1.0 for number, key in enumerate(calls)}
    monkeypatch.setattr(cost_table, "MOST_NOW", 5)
    monkeypatch.setattr(timing.KernelTimer, "measure", lambda _, wanted, __: {key: Cost(known[key]) for key in wanted})
    busy_for(monkeypatch, 1.0)
    as_known(monkeypatch)
    CostTable(CPU, tmp_path).measure(calls)
    in_another_process(monkeypatch)
    timed = []

    def now(_: timing.KernelTimer, wanted: dict[str, Any]) -> dict[str, float]:
        timed.extend(wanted)
        return {key: factors[key] * known[key] for key in wanted}

    monkeypatch.setattr(timing.KernelTimer, "seconds_now", now)
    table = CostTable(CPU, tmp_path)
    found = table.measure(calls)
    longest = sorted(calls, key=lambda key: -known[key])[:5]
    assert timed == longest
    expected = sum(factors[key] * known[key] for key in longest) / sum(known[key] for key in longest)
    assert 1.0 < expected < 3.0
    assert table.slowdown == pytest.approx(expected)
    assert {key: cost.seconds for key, cost in found.items()} == pytest.approx(
        {key: expected * seconds for key, seconds in known.items()}
    )


def test_a_malloc_that_keeps_everything_has_another_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that were timed there met no page faults, which they do elsewhere."""
    elsewhere = CostTable(CPU, tmp_path).path
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    assert CostTable(CPU, tmp_path).path != elsewhere


def test_a_computer_whose_threads_wait_for_each_other_for_a_moment_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference_work, "PAUSE_SECONDS", 0.0)
    busy_for(monkeypatch, *[200.0] * (2 * LOOKS), 1.3)
    assert ReferenceWork(time.process_time).slowdown() == pytest.approx(1.3)
    busy_for(monkeypatch, 6.0, 5.0)  # for longer than anybody waits
    assert ReferenceWork(time.process_time).slowdown() == pytest.approx(5.0)
    busy_for(monkeypatch, *[2.0] * LOOKS, 1.0)
    assert ReferenceWork(time.process_time).slowdown() == pytest.approx(2.0)


def test_what_was_timed_on_a_busy_machine_is_timed_again_when_it_is_quiet(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = captured_chain().calls
    busy_for(monkeypatch, 2.0)
    first = CostTable(CPU, tmp_path)
    taken = first.measure(calls)
    assert [cost.slowdown for cost in taken.values()] == pytest.approx([2.0] * len(calls))
    assert len(timed) == len(calls)
    busy_for(monkeypatch, 1.0)
    assert first.measure(calls) == taken
    assert CostTable(CPU, tmp_path).measure(calls) == taken  # within one process costs stay
    timed.clear()
    in_another_process(monkeypatch)
    busy_for(monkeypatch, 1.9)
    still = CostTable(CPU, tmp_path).measure(calls)  # about as busy
    assert timed == []
    assert {key: cost.seconds / 1.9 for key, cost in still.items()} == pytest.approx(
        {key: cost.seconds / 2.0 for key, cost in taken.items()}
    )
    in_another_process(monkeypatch)
    busy_for(monkeypatch, 1.05)
    again = CostTable(CPU, tmp_path).measure(calls)
    assert [cost.slowdown for cost in again.values()] == pytest.approx([1.05] * len(calls))
    assert len(timed) == len(calls)
    timed.clear()
    in_another_process(monkeypatch)
    assert CostTable(CPU, tmp_path).measure(calls) == again
    assert timed == []


def test_a_computer_that_was_busy_from_the_beginning_is_found_out_when_it_is_quiet(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing to compare with, the first process takes a busy computer for a quiet one."""

    def takes(seconds: float, slower: float) -> None:
        in_another_process(monkeypatch)
        timed.clear()

        def looked(work: ReferenceWork, *, now: bool = False) -> float:
            work.least_seconds = min(work.least_seconds, seconds)
            return seconds

        monkeypatch.setattr(ReferenceWork, "seconds", looked)
        monkeypatch.setattr(timing.KernelTimer, "_run_seconds", lambda *_: 1e-3 * slower)

    calls = captured_chain().calls
    takes(2.0, 2.0)
    taken = CostTable(CPU, tmp_path).measure(calls)
    assert {(cost.seconds, cost.slowdown) for cost in taken.values()} == {(2e-3, 1.0)}
    takes(1.95, 2.0)  # as busy: a reference work that wavers is no reason to doubt
    assert CostTable(CPU, tmp_path).measure(calls) == taken
    assert timed == []
    takes(1.0, 1.0)
    again = CostTable(CPU, tmp_path).measure(calls)
    assert len(timed) == len(calls)
    assert {(cost.seconds, cost.slowdown) for cost in again.values()} == {(1e-3, 1.0)}
    takes(1.0, 1.0)
    assert CostTable(CPU, tmp_path).measure(calls) == again
    assert timed == []


def test_costs_are_the_same_on_a_machine_that_is_slower_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = captured_chain().calls
    looks = itertools.cycle([1.0, 1.0, 1.7, 1.7, 1.7])
    slower = [1.0]

    def seconds(work: ReferenceWork, *, now: bool = False) -> float:
        work.least_seconds, slower[0] = 1.0, next(looks)
        return QUIET * slower[0]

    monkeypatch.setattr(ReferenceWork, "seconds", seconds)
    monkeypatch.setattr(timing.KernelTimer, "_run_seconds", lambda *_: 1e-3 * slower[0])
    table = CostTable(CPU, tmp_path)
    taken = table.measure(calls)
    assert table._known.slowdown == pytest.approx(1.7)  # at most of the looks
    for cost in taken.values():
        assert cost.seconds == pytest.approx(1.7e-3, rel=0.3)
    in_another_process(monkeypatch)
    busy_for(monkeypatch, 1.0)
    slower[0] = 1.0
    for cost in CostTable(CPU, tmp_path).measure(calls).values():
        assert cost.seconds == pytest.approx(1e-3, rel=0.3)


def test_a_run_that_got_new_pages_from_the_system_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, runs = [0], itertools.count()

    def seconds(*_: Any) -> float:
        """Every other run gets new pages, and takes twenty times as long."""
        slow = next(runs) % 2 == 0
        pages[0] += slow
        return 20e-3 if slow else 1e-3

    busy_for(monkeypatch, 1.0)
    monkeypatch.setattr(timing, "page_faults", lambda: pages[0])
    monkeypatch.setattr(timing, "fresh_memory", lambda _: FreshMemory(1e-6, 4096.0))
    monkeypatch.setattr(timing.KernelTimer, "_run_seconds", seconds)
    for cost in CostTable(CPU, tmp_path).measure(captured_chain().calls).values():
        assert cost.seconds == pytest.approx(1e-3)

    def always(*_: Any) -> float:
        pages[0] += 5000
        return 20e-3

    in_another_process(monkeypatch)
    monkeypatch.setattr(timing.KernelTimer, "_run_seconds", always)
    captured = captured_chain()
    costs = CostTable(CPU, tmp_path / "other").measure(captured.calls)
    assert all(cost.seconds == pytest.approx(15e-3) and cost.faults == 5000 for cost in costs.values())
    host = replace(HostTime.same_after_all(0.0), fault=2e-6)  # slower than when they were timed
    trace = with_costs(captured, costs, seconds_are="measured", device="here", host=host)
    kernels = [op for op in trace.operations if op.key in costs and op.times == 1.0]
    assert kernels
    assert all(op.seconds == pytest.approx(25e-3) for op in kernels)  # as it will be in training
    of_a_pass = sum(op.phase is not Phase.OPTIMIZER for op in kernels)
    assert 0 < of_a_pass < len(kernels)
    assert trace.fresh_memory_seconds == pytest.approx(10e-3 * of_a_pass)


@pytest.mark.parametrize("faults_each", [1, 0], ids=["from the system", "in a hole"])
def test_a_large_block_comes_from_the_system_in_a_step_whether_it_did_when_it_was_timed(
    faults_each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = StepSource(nn.Linear(1, 10240), torch.ones(1024, 1), lambda model, x: model(x).square().sum(), None)
    captured, met = capture(wide), [0]
    pages = {
        key: sum(size for size in call.made_bytes if size >= 32 << 20) // 4096 for key, call in captured.calls.items()
    }
    assert {0, 10240} <= set(pages.values())

    def seconds(_: Any, call: CallSpec, *__: Any) -> float:
        (large,) = {pages[key] for key, each in captured.calls.items() if each is call}
        met[0] += faults_each * large
        return 1e-3 + 1e-6 * faults_each * large

    busy_for(monkeypatch, 1.0)
    monkeypatch.setattr(timing, "page_faults", lambda: met[0])
    monkeypatch.setattr(timing, "fresh_memory", lambda _: FreshMemory(1e-6, 4096.0))
    monkeypatch.setattr(timing, "PROFILED_SECONDS", math.inf)
    monkeypatch.setattr(timing.KernelTimer, "_run_seconds", seconds)
    costs = CostTable(CPU, tmp_path).measure(captured.calls)
    assert {key: cost.faults for key, cost in costs.items()} == pages
    assert all(cost.seconds == pytest.approx(1e-3) for cost in costs.values())


def test_runs_in_which_threads_wait_for_each_other_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a crowded computer two runs of three on several threads take a scheduler's time slice, and the reference work's shortest run does not."""
    runs = itertools.cycle([16e-3, 17e-3, 1e-3])
    busy_for(monkeypatch, 1.0, stalls=True)
    as_known(monkeypatch)
    monkeypatch.setattr(timing, "page_faults", lambda: 0)
    monkeypatch.setattr(timing, "MEASURE_SECONDS", math.inf)  # so that each time three runs and more are taken
    monkeypatch.setattr(timing.KernelTimer, "_run_seconds", lambda *_: next(runs))
    monkeypatch.setattr(timing, "PROFILED_SECONDS", math.inf)
    for cost in CostTable(CPU, tmp_path).measure(captured_chain().calls).values():
        assert cost.seconds == pytest.approx(1e-3)


def test_what_was_timed_while_threads_waited_is_timed_again_when_they_do_not(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = captured_chain().calls
    for waiting, seconds in ((True, 16e-3), (False, 1e-3)):
        in_another_process(monkeypatch)
        busy_for(monkeypatch, 1.0, stalls=waiting)
        monkeypatch.setattr(timing.KernelTimer, "_run_seconds", lambda *_, seconds=seconds: seconds)
        timed.clear()
        costs = CostTable(CPU, tmp_path).measure(calls)
        assert len(timed) == len(calls)
        assert [cost.seconds for cost in costs.values()] == pytest.approx([seconds] * len(calls))


def test_what_lies_around_kernels_is_timed_again_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for seconds, waiting in ((1e-3, True), (1e-5, False), (1e-4, False)):
        in_another_process(monkeypatch)
        busy_for(monkeypatch, 1.0, stalls=waiting)
        monkeypatch.setattr(cost_table, "host_time", lambda _, seconds=seconds: HostTime.same_after_all(seconds))
        taken.append(CostTable(CPU, tmp_path).host_time().mode)
    assert taken == pytest.approx([1e-3, 1e-5, 1e-5])


def test_the_reference_work_tells_that_most_of_its_runs_wait() -> None:
    looks = ([1.0, 1.0, 1.0, 1.0, 90.0], [1.0, 90.0, 90.0, 1.0, 90.0], [1.0, 90.0, 1.0, 90.0, 1.0])
    runs = ([5.0] * COLD_RUNS + look for look in looks)
    clock = itertools.accumulate(each for look in runs for taken in look for each in (1.0, taken))
    work = ReferenceWork(lambda: next(clock))
    assert [(work.seconds(now=True), work.stalls) for _ in looks] == [(1.0, False), (1.0, True), (1.0, False)]


def test_the_reference_work_takes_a_twentieth_of_what_it_is_timed_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its runs wait for each other's threads."""
    now = [0.0]

    def once(_: ReferenceWork) -> float:
        now[0] += 16e-3
        return 16e-3

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ReferenceWork, "_once", once)
    work, looked = ReferenceWork(time.process_time), 0.0
    while now[0] < 60.0:
        before = now[0]
        work.seconds()
        looked += now[0] - before
        now[0] += 16e-3
    assert looked < 0.06 * now[0]


def test_the_reference_work_knows_its_least_time() -> None:
    looks = (
        [9.0, 5.0, 3.0, 2.0, 3.0, 2.5, 3.0],
        [9.0, 9.0, 4.0, 5.0, 4.0, 4.0, 4.0],
        [3.0, 2.0, 1.0, 1.0, 1.0, 2.0, 1.0],
    )
    clock = itertools.accumulate(each for look in looks for taken in look for each in (1.0, taken))
    work = ReferenceWork(lambda: next(clock))
    assert work.seconds(now=True) == 3.0
    assert work.least_seconds == 3.0
    assert work.seconds() == 3.0  # a moment ago
    assert work.seconds(now=True) == 4.0
    assert work.least_seconds == 3.0
    assert work.seconds(now=True) == 1.0
    assert work.least_seconds == 1.0


def test_one_run_that_takes_two_thirds_makes_no_computer_a_slow_one() -> None:
    """As now and then on a virtual machine: by the shortest run all others are of a busy one."""
    looks = ([1.5, 1.5, 1.5, 1.0, 1.5, 1.5, 1.5], *([1.5] * RUNS,) * LOOKS)
    clock = itertools.accumulate(each for look in looks for taken in look for each in (1.0, taken))
    work = ReferenceWork(lambda: next(clock))
    work.seconds(now=True)
    assert work.slowdown() == 1.0


def test_a_quiet_computer_is_as_fast_as_it_is_though_the_reference_work_wavers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divided by that, costs came out several percent too short, and those that were taken apart each by another amount."""
    looks = itertools.cycle([1.0, 1.06, 1.14, 1.1])

    def seconds(work: ReferenceWork, *, now: bool = False) -> float:
        work.least_seconds = 1.0
        return next(looks)

    monkeypatch.setattr(ReferenceWork, "seconds", seconds)
    monkeypatch.setattr(timing.KernelTimer, "_run_seconds", lambda *_: 1e-3)
    for cost in CostTable(CPU, tmp_path).measure(captured_chain().calls).values():
        assert (cost.seconds, cost.slowdown) == (1e-3, 1.0)


def damaged(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.parent.mkdir(parents=True)
        path.write_text(content)

    return write


def a_file_where_the_folder_should_be(path: Path) -> None:
    path.parent.parent.mkdir(parents=True)
    path.parent.write_text("")


def a_folder_where_the_file_should_be(path: Path) -> None:
    path.mkdir(parents=True)


def a_folder_that_may_not_be_written(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.parent.chmod(0o500)


@pytest.mark.alternate(2)
@pytest.mark.parametrize(
    "trouble",
    [
        damaged(""),
        damaged("{"),
        damaged("[]"),
        damaged('{"a": 3}'),
        damaged('{"a": [1, 2]}'),
        damaged('["", "x"]\n["a", 3]\n'),
        damaged('["a", [0.1, 0, "x", 3, true, 1.0]]\n'),
        a_file_where_the_folder_should_be,
        a_folder_where_the_file_should_be,
        a_folder_that_may_not_be_written,
    ],
    ids=["empty", "half", "a list", "a number", "too short", "a word", "words", "no folder", "no file", "read-only"],
)
def test_a_cache_that_is_no_use_does_not_stop_a_plan(trouble: Callable[[Path], None], tmp_path: Path) -> None:
    path = CostTable(CPU, tmp_path / "cache").path
    trouble(path)
    captured = captured_chain()
    table = CostTable(CPU, tmp_path / "cache").measure(captured.calls)
    assert set(table) == set(captured.calls)
    path.parent.chmod(0o700)


def test_a_full_disk_does_not_stop_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "open", full)
    assert CostTable(CPU, tmp_path).measure(captured_chain().calls)


def test_operations_too_large_to_run_alone_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LARGEST_INPUT_BYTES", 2048)
    captured = captured_chain()
    table = CostTable(CPU, tmp_path).measure(captured.calls)
    large = {k for k, call in captured.calls.items() if call.input_bytes > 2048}
    assert large
    assert {k for k, c in table.items() if not c.measured} == large
    assert all(c.made_bytes is None for k, c in table.items() if k in large)
    lines = [json.loads(line) for line in CostTable(CPU, tmp_path).path.read_text().splitlines() if line]
    assert sum(bool(key) for key, _ in lines) == len(captured.calls)


def test_inputs_made_up_for_a_run_have_the_right_places() -> None:
    """Two arguments in one storage, one transposed, stay so."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        return (h[:4] @ h[2:6].t()).sum()

    captured = capture(StepSource(nn.Linear(8, 8), torch.randn(8, 8), loss))
    call = next(c for k, c in captured.calls.items() if k.startswith("aten.mm.default") and "[4, 8]" in k and "@0" in k)
    (a, b), _ = build(call, CPU)
    assert (a.shape, b.shape, b.stride()) == ((4, 8), (8, 4), (1, 8))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert b.storage_offset() - a.storage_offset() == 16
    assert bool(((a >= 0.25) & (a <= 0.75)).all())
    assert bool((a <= 1).all())


def test_arguments_in_different_places_of_one_storage_span_both() -> None:
    """As the halves of a gated layer do: what is moved would be counted half."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        first, second = model(x).view(-1).chunk(2)
        return (first * second).sum()

    captured = capture(StepSource(nn.Linear(8, 8), torch.randn(8, 8), loss))
    (call,) = {
        id(c): c for k, c in captured.calls.items() if k.startswith("aten.mul.Tensor") and "@1" not in k
    }.values()
    assert call.input_bytes == 8 * 8 * 4


# -- a device that is not here ---------------------------------------------------------------------------------------------


def test_an_absent_gpu_is_estimated_from_what_a_call_does() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y.sum()

    captured = capture(StepSource(nn.Linear(512, 2048, bias=False), torch.randn(1024, 512), loss))
    gpu = known_machine("a100")
    table = estimated_costs(captured.calls, gpu)
    key = next(op.key for op in captured.trace.operations if op.name == "aten.mm.default")
    flops, moved = 2 * 1024 * 512 * 2048, 4 * (1024 * 512 + 512 * 2048 + 1024 * 2048)
    assert table[key].seconds == pytest.approx(work_seconds(Work(Kind.PRODUCT, flops, moved, depth=512), gpu))
    view = next(op.key for op in captured.trace.operations if op.name == "aten.t.default")
    assert table[view].seconds == 0.0
    assert not any(c.measured for c in table.values())
    faster = estimated_costs(captured.calls, known_machine("h100"))
    assert faster[key].seconds < table[key].seconds


def work_in(model: nn.Module, image: Tensor, name: str) -> Work:
    """Of the first operation of this name in a step of the model on images."""

    def loss(model: nn.Module, image: Tensor) -> Tensor:
        y: Tensor = model(image)
        return y.float().sum()

    captured = capture(StepSource(model, image, loss))
    return work_of(
        captured.calls[next(op.key for op in captured.trace.operations if op.name == f"aten.{name}.default")]
    )


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolution_of_16_bits_pays_for_another_layout_than_channels_last(half: bool, channels_last: bool) -> None:  # noqa: FBT001 - a parameter
    dtype = torch.float16 if half else torch.float32
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = nn.Conv2d(4, 8, 3, padding=1, dtype=dtype, device="meta")
    model.weight = nn.Parameter(model.weight.contiguous(memory_format=layout))
    image = torch.empty(2, 4, 16, 16, dtype=dtype, device="meta").contiguous(memory_format=layout)
    for name in ("convolution", "convolution_backward"):
        work = work_in(model, image, name)
        assert work.kind is Kind.CONVOLUTION
        assert work.converted_bytes == (2 * work.moved_bytes if half and not channels_last else 0)


def test_groups_divide_the_arithmetic_of_both_passes() -> None:
    image = torch.empty(2, 32, 16, 16, device="meta", requires_grad=True)
    works = [
        [work_in(nn.Conv2d(32, 64, 3, groups=groups, device="meta"), image, name) for groups in (1, 8)]
        for name in ("convolution", "convolution_backward")
    ]
    for whole, grouped in works:
        assert grouped.kind is Kind.GROUPED
        assert grouped.group_channels == 4
        assert grouped.flops == whole.flops / 8
    assert works[0][0].flops == 2 * 2 * 64 * 14 * 14 * 32 * 9
    assert works[1][0].flops in (works[0][0].flops, 2 * works[0][0].flops)  # the image of a batch needs no gradient


def test_a_product_is_as_deep_as_its_sums_are_long() -> None:
    model = nn.Linear(96, 160, device="meta")
    rows = torch.empty(48, 96, device="meta")
    assert work_in(model, rows, "addmm").depth == 96
    assert work_in(model, rows, "mm").depth == 48  # the gradient of the weight


def test_products_in_tf32_are_as_torch_is_set() -> None:
    model, rows = nn.Linear(8, 8, device="meta"), torch.empty(8, 8, device="meta")
    try:
        for precision, tf32 in (("highest", False), ("high", True)):
            torch.set_float32_matmul_precision(precision)
            assert work_in(model, rows, "addmm").tf32 is tf32
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_plan_for_an_absent_gpu_says_that_its_seconds_are_estimated() -> None:
    made = memfit.plan(small.chain(2), small.rows(), small.squared_error, "1GiB", small.adamw, device="RTX 4090")
    assert made.prediction.seconds_are == "estimated"
    assert made.device == "rtx4090"
    assert made.prediction.step_seconds > 0
    whole = memfit.plan(small.chain(2), small.rows(), small.squared_error, "50%", small.adamw, device="rtx4090")
    assert whole.budget_bytes == known_machine("rtx4090").memory_bytes // 2


def test_half_precision_takes_the_faster_units() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y.float().sum()

    gpu = known_machine("h100")
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(2048, 2048, bias=False, dtype=dtype, device="meta")
        captured = capture(StepSource(model, torch.empty(2048, 2048, dtype=dtype, device="meta"), loss))
        key = next(op.key for op in captured.trace.operations if op.name == "aten.mm.default")
        seconds.append(estimated_costs(captured.calls, gpu)[key].seconds)
    assert seconds[1] < seconds[0] / 4


def test_a_file_that_another_process_wrote_takes_no_cost_away(tmp_path: Path, timed: list[str]) -> None:
    calls = captured_chain().calls
    first = CostTable(CPU, tmp_path)
    known = first.measure(calls)
    first.path.write_text("")
    timed.clear()
    assert CostTable(CPU, tmp_path).measure(calls) == known
    assert timed == []


def test_tables_of_one_process_know_what_each_has_measured(tmp_path: Path, timed: list[str]) -> None:
    calls = captured_chain().calls
    earlier, later = CostTable(CPU, tmp_path), CostTable(CPU, tmp_path)
    known = later.measure(calls)
    timed.clear()
    assert earlier.measure(calls) == known
    assert timed == []
