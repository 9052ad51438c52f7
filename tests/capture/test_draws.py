"""Sizes that values decide, drawn or computed: the capture notices, the plan says so, and steps under other draws stay inside the budget."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit import dispatch
from memfit.capture import draws
from memfit.capture.capture import capture_real
from memfit.capture.confirmation import trustworthy
from memfit.capture.draws import OTHER_DRAWS
from memfit.capture.source import StepSource
from memfit.capture.values_read import asks_for_counts
from memfit.planning import planning_of
from memfit.values.trace import Trace

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, HIDDEN = 96, 32


class Jittered(nn.Module):
    """One of four experts for each token, chosen by scores with noise, as in Switch Transformer; without noise, by the scores alone."""

    def __init__(self, *, noise: float = 0.5, dropout: float = 0.0) -> None:
        super().__init__()
        self.noise = noise
        self.gate = nn.Linear(HIDDEN, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN)) for _ in range(4)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        for _ in range(2):
            scored = rows * torch.empty_like(rows).uniform_(1 - self.noise, 1 + self.noise) if self.noise else rows
            chosen = self.gate(scored).argmax(-1)
            out = torch.zeros_like(rows)
            for number, expert in enumerate(self.experts):
                where = (chosen == number).nonzero().squeeze(-1)
                out = out.index_add(0, where, expert(rows[where]))
            rows = rows + out
        out = self.dropout(rows)
        return out.view_as(x)


class Skipping(nn.Module):
    """A layer is left out by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            if torch.rand(()).item() > 0.5:
                x = torch.tanh(layer(x))
        return self.inner[0](x) if x.requires_grad is False else x


def sample() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, TOKENS, HIDDEN), torch.randn(8, TOKENS, HIDDEN)


def traced(model: nn.Module) -> Trace:
    return trustworthy(StepSource(model, sample(), small.squared_error, small.adamw)).trace


def test_sizes_that_draws_decide_are_seen() -> None:
    torch.manual_seed(0)
    model = Jittered()
    trace = traced(model)
    longest = tuple(s.bytes for s in trace.storages)
    assert len({longest, *trace.drawn_bytes}) == 1 + OTHER_DRAWS
    own = capture_real(StepSource(model, sample(), small.squared_error, small.adamw)).trace
    assert trace.drawn_bytes[-1] == tuple(s.bytes for s in own.storages)
    assert any("values decide how large some results are (aten.nonzero.default in the model)" in n for n in trace.notes)


def test_sizes_that_the_parameters_decide_are_told_and_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(draws, "LATER_STEPS", ())
    trace = traced(Jittered(noise=0.0))
    assert trace.sized_by_values
    assert trace.drawn_bytes == ()
    assert any("values decide how large some results are" in note for note in trace.notes)


class Redrawing(nn.Module):
    """Draws its features anew in every fifth forward, as performer-pytorch does: it counts its calls in a buffer."""

    calls: Tensor
    features: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("features", torch.randn(HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        if self.calls >= 4:
            self.features.copy_(torch.randn(HIDDEN, HIDDEN))
            self.calls.zero_()
        self.calls += 1
        y: Tensor = torch.tanh(self.inner(x)) @ self.features
        return y


def test_what_forward_does_every_so_often_by_a_count_in_a_buffer_is_another_path() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Redrawing(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), Redrawing())
    before = copy.deepcopy(model.state_dict())
    most = memfit.plan(model, sample(), small.squared_error, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    plan = memfit.replan(most, memfit.smallest_budget(most))
    assert any("not every forward runs the same operations: 2 paths" in note for note in plan.notes)
    engine = memfit.apply(plan, model, small.squared_error, small.adamw)
    records = [engine.step(sample(), meter=True) for _ in range(11)]
    assert not any(record.begun_anew or record.divergences for record in records)
    assert max(record.peak_bytes or 0 for record in records) <= plan.budget_bytes


class Penalised(nn.Module):
    """A loss with a gradient penalty in every fourth call, by a count in an attribute, as StyleGAN2 has one every sixteen steps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        lazily = self.calls % 4 == 0
        x = batch[0].detach().requires_grad_(lazily)
        y = model(x)
        loss: Tensor = y.mean()
        if lazily:
            loss = loss + torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().mean()
        return loss


class WithItsLoss(nn.Module):
    """Counts in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = curved()
        self.loss = Penalised()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.inner, (x, y))
        return loss


def curved() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Softplus(), nn.Linear(HIDDEN, HIDDEN), nn.Softplus())


@pytest.mark.parametrize("by_model", [True, False])
def test_what_forward_does_every_so_often_by_a_count_in_an_attribute_is_another_path(*, by_model: bool) -> None:
    """The three forwards that were looked at are alike: the fourth took up to 2.5 times the budget, and no word was said of it."""
    torch.manual_seed(0)
    model, loss_fn = (WithItsLoss(), None) if by_model else (curved(), Penalised())
    most = memfit.plan(model, sample(), loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    assert (model.loss if by_model else loss_fn).calls == 0
    assert any("not every forward runs the same operations: 2 paths" in note for note in most.notes)
    for plan in (most, memfit.replan(most, memfit.smallest_budget(most))):
        (own, own_loss), (other, other_loss) = (copy.deepcopy((model, loss_fn)) for _ in range(2))
        plain = small.adamw(other.parameters())
        engine = memfit.apply(plan, own, own_loss, small.adamw)
        for _ in range(9):
            record = engine.step(sample(), meter=True)
            loss = other(*sample()) if other_loss is None else other_loss(other, sample())
            plain.zero_grad()
            loss.backward()
            plain.step()
            assert record.loss == loss.item()
            assert not record.begun_anew
            assert not record.divergences
            assert (record.peak_bytes or 0) <= plan.prediction.peak_bytes


def test_only_a_model_that_counts_is_looked_at_for_many_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(draws, "first_other_forward", lambda _, most: asked.append(most))
    traced(nn.Sequential(Skipping(), nn.BatchNorm1d(TOKENS)))
    assert asked == []
    trustworthy(StepSource(WithItsLoss(), sample(), None, small.adamw))
    assert asked == [draws.COUNTED_FORWARDS]


def test_a_count_that_nobody_asks_for_is_not_waited_for() -> None:
    assert not asks_for_counts(traced(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(TOKENS))))


def test_random_numbers_that_decide_values_only_are_no_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(draws, "LATER_STEPS", ())
    assert traced(Jittered(noise=0.0, dropout=0.5)).drawn_bytes == ()
    dropped = traced(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.5), nn.Linear(HIDDEN, HIDDEN)))
    assert not dropped.sized_by_values
    assert dropped.notes == ()


def test_operations_that_chance_decides_are_told() -> None:
    torch.manual_seed(3)
    trace = traced(Skipping())
    assert trace.drawn_bytes == () or len(trace.drawn_bytes) < OTHER_DRAWS
    assert any("random numbers, drawn anew in each step, decide which operations run" in note for note in trace.notes)


def test_a_capture_under_other_draws_leaves_the_generator_alone() -> None:
    torch.manual_seed(0)
    model, batch = Jittered(), sample()
    before = torch.get_rng_state()
    trustworthy(StepSource(model, batch, small.squared_error))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.alternate(0)
@pytest.mark.filterwarnings("ignore:a forward differed from the plan and was ended there")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_steps_under_other_draws_stay_inside_the_budget(share: float) -> None:
    """A draw may be larger than those that were tried: then the step begins anew, under a plan that knows it."""
    torch.manual_seed(0)
    model, batch = Jittered(), sample()
    plain = memfit.plan(model, batch, small.squared_error, 1 << 40, None, fixed={"micro_batches": 1})
    search = planning_of(plain)
    least = search.smallest()[0]
    made = memfit.replan(plain, round(least + share * (search.plain_peak() - least)))
    assert made.prediction.varies_bytes > 0
    assert "decide how large some results are: over 6 draws" in made.explain()
    engine = memfit.apply(made, model)
    peaks = []
    for seed in range(20, 32):
        torch.manual_seed(seed)
        record = engine.step(batch, meter=True)
        assert all("values have decided on larger sizes than are known" in told for told in record.divergences)
        assert record.peak_bytes is not None
        peaks.append(record.peak_bytes)
    assert len(set(peaks)) > 1
    assert max(peaks) <= made.budget_bytes
    assert max(peaks) >= made.prediction.peak_bytes - 2 * made.prediction.varies_bytes


def test_draws_go_along_with_a_trace_and_a_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trace = memfit.record(Jittered(), sample(), small.squared_error, None, micro_batches=1).trace
    trace.save(tmp_path / "trace")
    again = Trace.load(tmp_path / "trace")
    assert again == trace
    plain = memfit.replan(again, 1 << 40).prediction.peak_bytes
    smallest = memfit.smallest_budget(again)
    # Where the peak of a plan lies, and so whether it depends on the draw, depends on what the plan drops, and that on measured seconds.
    plans = (memfit.replan(again, smallest + (plain - smallest) * part // 8) for part in range(8))
    made = next(plan for plan in plans if plan.prediction.varies_bytes > 0)
    made.save(tmp_path / "plan")
    assert memfit.Plan.load(tmp_path / "plan") == made


def test_an_index_of_booleans_is_sized_by_values_and_one_of_numbers_is_not() -> None:
    index = torch.ops.aten.index.Tensor
    x = torch.randn(4, 3)
    assert dispatch.is_sized_by_values(index, (x, [torch.tensor([True, False, True, True])]))
    assert dispatch.is_sized_by_values(index, (x, [None, torch.tensor([True, False, True])]))
    assert not dispatch.is_sized_by_values(index, (x, [torch.tensor([0, 2])]))
    assert dispatch.is_sized_by_values(torch.ops.aten.nonzero.default, (x,))
    assert not dispatch.is_sized_by_values(torch.ops.aten.mm.default, (x, x))


class DrawsThenLooks(nn.Module):
    """Python reads a number after others have been drawn, which decide nothing: of what was made of them, or of the batch alone.

    Args:
        looks_at: "drawn", "batch", or the way on which what was drawn gets there: "written" into a buffer, "filled" into memory made empty.
    """

    def __init__(self, looks_at: str = "drawn") -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.looks_at = looks_at
        self.register_buffer("noted", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.linear(x), 0.5)
        seen = h if self.looks_at == "drawn" else x
        if self.looks_at == "written":
            seen = self.noted.copy_(h.detach()[0, 0]) * 2
        if self.looks_at == "filled":
            seen = torch.empty(HIDDEN).fill_(1.0)
        return h.tanh() if bool(seen.isfinite().all()) else h


@pytest.fixture
def further(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The draws, beside the first, for which a step is captured."""
    made: list[Any] = []
    drawing = draws._drawing

    def noted(draw: Any) -> Any:
        made.append(draw)
        return drawing(draw)

    monkeypatch.setattr(draws, "_drawing", noted)
    return made


@pytest.mark.parametrize("looks_at", ["drawn", "written", "filled"])
def test_a_forward_that_reads_what_was_drawn_is_drawn_for_again(further: list[Any], looks_at: str) -> None:
    torch.manual_seed(0)
    trustworthy(StepSource(DrawsThenLooks(looks_at), sample(), small.squared_error, small.adamw))
    assert further


def test_a_forward_that_reads_the_batch_is_not_drawn_for_again(further: list[Any]) -> None:
    torch.manual_seed(0)
    trustworthy(StepSource(DrawsThenLooks("batch"), sample(), small.squared_error, small.adamw))
    assert not further


def test_a_forward_that_was_steady_in_one_way_is_not_drawn_for_in_another(further: list[Any]) -> None:
    torch.manual_seed(0)
    model = DrawsThenLooks("filled")
    first = trustworthy(StepSource(model, sample(), small.squared_error, small.adamw))
    assert first.steady
    alone = len(further)
    second = trustworthy(StepSource(model, sample(), small.squared_error), others=[first])
    assert len(further) == alone > 0
    assert second.trace.notes == first.trace.notes
    jittered = trustworthy(StepSource(Jittered(), sample(), small.squared_error, small.adamw))
    assert not jittered.steady


class SampledWithoutReplacement(nn.Module):
    """Draws numbers until it has as many different ones as it wants, as a sampler of negative edges does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tensor(random.sample(range(4096), 500)) % len(x)
        y: Tensor = self.inner(x[rows]).relu()
        return y


def test_numbers_drawn_until_they_differ_are_drawn_at_the_ends_too() -> None:
    plan = memfit.plan(SampledWithoutReplacement(), torch.randn(64, HIDDEN), lambda m, x: m(x).mean(), "1GiB")
    assert plan.prediction.peak_bytes > 0


class Keeping(nn.Module):
    """Goes on with the rows that a learnt score keeps: no random number decides how many, but parameters do, which steps change."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.up, self.down = nn.Linear(16, 1), nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 16) to (kept, 16)."""
        scores = self.score(x)[:, 0]
        y: torch.Tensor = self.down(torch.relu(self.up(x[scores > 0] * scores[scores > 0, None])))
        return y


def test_sizes_that_parameters_decide_are_those_of_the_first_steps() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(64, 16), Keeping()

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(x) - 3.0).square().mean()
        return loss

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = memfit.plan(model, x, loss_of, "1GiB", sgd, fixed={"micro_batches": 1})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert any("of the first steps the peak of this plan lay between" in note for note in plan.notes)
    engine = memfit.apply(plan, model)
    peaks = [engine.step(x, meter=True).peak_bytes for _ in range(5)]
    assert max(peaks) > peaks[0]
    assert plan.prediction.peak_bytes == max(peaks[n] for n in (0, 1, 2, 4))
