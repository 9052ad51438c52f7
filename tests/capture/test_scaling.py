"""Models that fake tensors cannot run are captured at two small sizes and scaled: to the bytes of a direct capture."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit.capture import scaling as module
from memfit.capture.capture import capture, capture_real
from memfit.capture.comparing import forward_names
from memfit.capture.confirmation import trustworthy
from memfit.capture.samples import rows_of
from memfit.capture.scaling import scaled
from memfit.capture.source import StepSource
from memfit.errors import CaptureError
from memfit.techniques.choices import BASELINE, Choices
from memfit.values.trace import Trace
from models import case

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch hides this warning of its own, but not where warnings are errors; then no capture would be a fake one.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class ThroughNumpy(nn.Module):
    """Looks at values in numpy, as no fake tensor allows, and takes no other way because of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 48), nn.Linear(48, 32)
        self.norm = nn.BatchNorm1d(48)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        scale = float(np.abs(h.detach().numpy()).max())
        y: Tensor = self.last(h / max(scale, 1.0))
        return y


def thirteen() -> tuple[Tensor, Tensor]:
    return small.rows(13)


def everywhere_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL_STEP_BYTES", 0)


def bytes_by_kind(trace: Trace) -> list[tuple[int, str, int, int]]:
    return [(s.bytes, str(s.category), s.birth, s.death) for s in trace.storages]


def test_fake_tensors_cannot_run_it() -> None:
    with pytest.raises(CaptureError, match="fake tensors cannot run this model"):
        capture(StepSource(ThroughNumpy(), thirteen(), small.squared_error))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_scaled_bytes_are_those_of_a_direct_capture(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere_small(monkeypatch)
    model, sample = ThroughNumpy(), thirteen() if micro_batches == 1 else small.rows(26)
    found = scaled(StepSource(model, sample, small.squared_error, small.adamw), Choices(micro_batches), why="a test")
    direct = capture_real(StepSource(model, sample, small.squared_error, small.adamw), Choices(micro_batches))
    assert found.trace.source == "scaled"
    assert found.trace.events == direct.trace.events
    assert bytes_by_kind(found.trace) == bytes_by_kind(direct.trace)
    assert found.trace.choices.micro_batch_size == direct.trace.choices.micro_batch_size == 13
    assert found.trace.micro_batches == micro_batches
    assert found.trace.signature == direct.trace.signature
    assert any("captured for real at 2 and 4 samples and scaled: a test" in note for note in found.trace.notes)


def test_scaled_calls_are_those_of_a_direct_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere_small(monkeypatch)
    model, sample = ThroughNumpy(), thirteen()
    found = scaled(StepSource(model, sample, small.squared_error), BASELINE, why="")
    direct = capture_real(StepSource(model, sample, small.squared_error))
    assert set(found.calls) == {op.key for op in found.trace.operations}
    for one, other in zip(found.trace.operations, direct.trace.operations, strict=True):
        a, b = found.calls[one.key], direct.calls[other.key]
        assert (a.func, a.made_bytes, a.written) == (b.func, b.made_bytes, b.written)
        assert a.args == b.args
        assert (one.shape, one.same_layout) == (other.shape, other.same_layout)


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_models_that_need_no_scaling_agree_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere_small(monkeypatch)
    model, sample, loss_fn = case(name).build()
    found = scaled(StepSource(model, sample, loss_fn, small.adamw), BASELINE, why="")
    direct = capture_real(StepSource(model, sample, loss_fn, small.adamw))
    assert bytes_by_kind(found.trace) == bytes_by_kind(direct.trace)


def test_a_small_step_is_captured_whole() -> None:
    found = scaled(StepSource(ThroughNumpy(), thirteen(), small.squared_error), BASELINE, why="a test")
    assert found.trace.source == "real"
    assert found.trace.notes[-1] == "captured for real: a test"


def test_the_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere_small(monkeypatch)
    model = ThroughNumpy()
    before = small.state_of(model)
    scaled(StepSource(model, thirteen(), small.squared_error, small.adamw, clip_norm=1.0), BASELINE, why="")
    assert small.same(small.state_of(model), before)
    assert all(p.grad is None for p in model.parameters())


class Unrolled(nn.Module):
    """One operation for each sample: nothing can be scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.inner(row) for row in x])


def test_a_model_that_runs_other_operations_for_more_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere_small(monkeypatch)
    with pytest.raises(
        CaptureError, match=r"other operations for 2 samples than for 4, so its step cannot be predicted \(why\)"
    ):
        scaled(StepSource(Unrolled(), thirteen(), small.squared_error), BASELINE, why="why")


class Steps(Unrolled):
    """Likewise, and most of what it makes is gone at once, as in a solver that takes as many steps as the values ask for."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(100):
                x = x * 0.99
        return super().forward(x)


@pytest.mark.parametrize("limit", [600_000, 10_000])
def test_where_nothing_can_be_scaled_what_the_step_holds_decides(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL_STEP_BYTES", limit)
    source = StepSource(Steps(), small.rows(100), small.squared_error)
    whole = capture_real(source)
    made = sum(s.bytes for s in whole.trace.storages if s.category not in ("parameter", "gradient"))
    assert made > 1_000_000
    if limit == 10_000:  # the batch alone has as many
        with pytest.raises(CaptureError, match="so its step cannot be predicted"):
            scaled(source, BASELINE, why="")
        return
    found = scaled(source, BASELINE, why="a test")
    assert bytes_by_kind(found.trace) == bytes_by_kind(whole.trace)
    assert found.trace.notes[-1] == "captured for real: a test"


class Squares(nn.Module):
    """Bytes grow with the square of the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return torch.softmax(h @ h.t(), -1) @ h


def test_bytes_that_are_not_affine_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere_small(monkeypatch)
    monkeypatch.setattr(module, "SMALL_SIZES", (20, 40, 30))
    sample = small.rows(60)
    found = scaled(StepSource(Squares(), sample, small.squared_error), BASELINE, why="")
    assert any("storages are not affine in the number of samples" in note for note in found.trace.notes)


# -- which way is taken ----------------------------------------------------------------------------------------------------


def test_a_fake_capture_that_the_model_confirms_is_taken() -> None:
    found = trustworthy(StepSource(small.chain(2), small.rows(16), small.squared_error, small.adamw))
    assert found.trace.source == "fake"
    assert found.trace.notes == ()


class TellsFakeFromReal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x)
        return h if type(h) is not Tensor else torch.tanh(h)


def test_a_fake_capture_that_the_model_belies_is_not_taken() -> None:
    model = TellsFakeFromReal()
    assert not [
        o for o in capture(StepSource(model, small.rows(16), small.squared_error)).trace.operations if "tanh" in o.name
    ]
    found = trustworthy(StepSource(model, small.rows(16), small.squared_error, small.adamw))
    assert found.trace.source == "real"
    assert [o for o in found.trace.operations if o.name == "aten.tanh.default"]
    assert any("runs other operations than the fake one" in note for note in found.trace.notes)


def test_plans_of_models_that_cannot_be_faked_hold() -> None:
    model, sample = ThroughNumpy(), small.rows(200)
    made = small.plan_at(0.1, model, sample)
    assert made.source == "real"
    engine = memfit.apply(made, model)
    engine.step(sample)
    record = engine.step(sample, meter=True)
    assert record.divergences == ()
    assert record.peak_bytes == pytest.approx(made.prediction.peak_bytes, rel=0.005)


# -- samples ---------------------------------------------------------------------------------------------------------------


def test_the_emptiest_and_the_fullest_samples_are_among_the_few() -> None:
    ids = torch.ones(6, 5, dtype=torch.int64)
    ids[2, 1:] = 0
    ids[4, 3:] = 0
    batch: dict[str, Any] = {"ids": ids, "number": torch.arange(6), "scale": 2.0}
    few = rows_of(batch, 2)
    assert sorted((few["ids"] != 0).sum(1).tolist()) == [1, 5]
    assert 2 in few["number"].tolist()
    assert few["scale"] == 2.0


def test_equal_samples_are_taken_in_order() -> None:
    few = rows_of((torch.arange(12.0).view(6, 2), torch.full((6,), 7)), 3)
    assert few[0][:, 0].tolist() == [0.0, 2.0, 4.0]
    assert torch.equal(rows_of(torch.arange(3), 10), torch.arange(3))


def test_samples_of_the_least_and_the_largest_class_are_among_the_few() -> None:
    """A loss may leave one out, or count a class that is less than all others (-100)."""
    few = rows_of((torch.arange(12.0).view(6, 2), torch.tensor([3, 3, 5, 3, -100, 3])), 2)
    assert few[1].tolist() == [5, -100]


class TableForTheBatch(nn.Module):
    """Picks rows by a table made for the whole batch, so two samples of it will not do."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.register_buffer("rows", torch.randperm(count))

    def forward(self, x: Tensor) -> Tensor:
        picked: Tensor = self.inner(x).index_select(0, self.rows)
        return picked


def test_a_model_that_needs_the_whole_batch_is_looked_at_whole() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    model, x = TableForTheBatch(16), torch.randn(16, 8)
    captured = trustworthy(StepSource(model, x, loss))
    assert captured.trace.source == "fake"
    with pytest.raises(IndexError):  # what fails on the whole batch is the user's own error
        trustworthy(StepSource(TableForTheBatch(32), x, loss))


def tables(entries: int | None) -> nn.Module:
    """A model with a table built once for each shape, in a cache that all models share."""

    @functools.lru_cache(maxsize=entries)
    def table(length: int, width: int) -> Tensor:
        return torch.arange(width).float().cos().repeat(length, 1)

    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small.chain(3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x * table(*x.shape))
            return y

    return Tabled()


@pytest.mark.alternate(0)
@pytest.mark.parametrize("used", [False, True], ids=["new", "used before"])
@pytest.mark.parametrize("entries", [1, None])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_what_is_cached_for_each_shape_is_there_in_the_first_step(
    micro_batches: int, entries: int | None, *, used: bool
) -> None:
    model, sample = tables(entries), small.rows(64)
    if used:
        for count in (2, 4, 64):
            small.squared_error(model, small.rows(count))
    plain = memfit.plan(
        model, sample, small.squared_error, 1 << 40, small.adamw, fixed={"micro_batches": micro_batches}
    )
    made = memfit.replan(plain, memfit.smallest_budget(plain))
    engine = memfit.apply(made, model)
    for _ in range(3):
        record = engine.step(sample)
        assert record.divergences == ()
        assert record.recomputations > 0


def test_numbers_of_parts_that_are_weighed_one_after_the_other_are_captured_alike() -> None:
    """The second capture takes no first pass where the first one needed none, and has to build its table."""
    model, sample = tables(None), small.rows(64)
    for count in (2, 64):
        small.squared_error(model, small.rows(count))
    first = trustworthy(StepSource(model, sample, small.squared_error, small.adamw))
    assert first.graded is not None
    second = trustworthy(StepSource(model, sample, small.squared_error, small.adamw), Choices(2), believed=first)
    assert forward_names(first.trace) == forward_names(second.trace)
