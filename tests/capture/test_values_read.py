"""Values of the batch that decide which operations run, or how large results are: micro-batches that forward tells apart are captured each."""

from __future__ import annotations

import queue
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
import small
from memfit.batches import map_tensors, split
from memfit.capture import values_read
from memfit.capture.confirmation import trustworthy
from memfit.capture.source import StepSource
from memfit.techniques.choices import BASELINE
from models.padded import LENGTH, Padded, loss_of, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 8
RISING = tokens([40, 42, 45, 50, 55, 60, LENGTH, LENGTH])
FALLING = tokens([LENGTH, LENGTH, 60, 55, 50, 45, 42, 40])


class Looking(Padded):
    """Looks at its parameters, too, which on fake tensors have no values."""

    def forward(self, tokens: Tensor, filled: Tensor) -> Tensor:
        assert not self.embed.weight.isnan().any()
        return super().forward(tokens, filled)


@pytest.mark.alternate(0)
@pytest.mark.parametrize(
    ("kind", "order", "micro_batches"),
    [
        (Padded, "full last", ROWS),
        (Looking, "full first", ROWS // 2),
        *(
            pytest.param(kind, order, parts, marks=pytest.mark.slow)
            for kind, order, parts in product([Padded, Looking], ["full last", "full first"], [ROWS, ROWS // 2])
            if (kind is Padded, order == "full last", parts == ROWS) not in {(True,) * 3, (False,) * 3}
        ),
    ],
)
def test_micro_batches_with_and_without_padding_hold_what_is_predicted(
    kind: type[Padded], order: str, micro_batches: int
) -> None:
    """In halves of four rows all have padding in one of two parts; one row, or two full ones, have none."""
    batch = RISING if order == "full last" else FALLING
    fixed = {"micro_batches": micro_batches}
    with pytest.raises(memfit.InfeasibleError) as needed:
        memfit.plan(kind(), batch, loss_of, "1KiB", small.adamw, fixed=fixed)
    budget = needed.value.minimum_bytes
    assert budget is not None
    engine = memfit.fit(kind(), batch, loss_of, budget, small.adamw, fixed=fixed)
    assert (engine.plan.source == "fake") is (kind is Padded)
    assert any("values of the batch" in note for note in engine.plan.notes)
    rehearsal = engine.rehearsal
    assert rehearsal is not None
    assert rehearsal.measured_peak_bytes == rehearsal.predicted_peak_bytes
    plain = Padded()
    optimizer = small.adamw(plain.parameters())
    for _ in range(2):
        record = engine.step(batch, meter=True)
        assert record.divergences == record.begun_anew == ()
        assert record.peak_bytes is not None
        assert record.peak_bytes <= rehearsal.predicted_peak_bytes
        optimizer.zero_grad()
        loss = loss_of(plain, batch)
        loss.backward()
        optimizer.step()
        assert record.loss == pytest.approx(loss.item(), rel=1e-5)
    assert engine.model.forwards < 100


def test_micro_batches_that_are_read_alike_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = StepSource(Padded(), tokens([40] * ROWS), loss_of, small.adamw)
    captured = trustworthy(source, BASELINE.but(micro_batches=4))
    assert captured.trace.paths == ()
    assert not any("values of the batch" in note for note in captured.trace.notes)

    def never(*_: Any) -> Any:
        raise AssertionError("nothing is looked at")

    monkeypatch.setattr(values_read, "_readings", never)
    chain = StepSource(small.chain(), small.rows(ROWS), small.squared_error, small.adamw)
    assert values_read.other_samples(chain, BASELINE.but(micro_batches=4), captured=trustworthy(chain)) == ([], "")


def test_a_look_ends_where_the_last_value_is_read() -> None:
    source = StepSource(model := Padded(), RISING, loss_of, small.adamw)
    choices = BASELINE.but(micro_batches=ROWS)
    captured = trustworthy(source, choices)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    samples, told = values_read.other_samples(source, choices, captured)
    assert told == ""
    assert seen == []
    assert model.forwards == 0
    assert [bool(filled.all()) for _, filled in samples] == [False]  # the last one is full
    assert all(t.shape == s.shape for t, s in zip(samples[0], RISING, strict=True))
    assert samples[0][0].unique(dim=0).shape[0] == 1  # one row over and over
    assert len(captured.trace.paths) == 1


@pytest.mark.alternate(1)
@pytest.mark.parametrize("kind", [Padded, Looking])
def test_a_whole_batch_of_one_kind_of_row_is_planned_for_before_it_comes(kind: type[Padded]) -> None:
    """Half of the rows are full, so of eight drawn by chance all are in one batch of 256."""
    half, full = tokens([40, 42, 45, 50, *[LENGTH] * 4]), tokens([LENGTH] * ROWS)
    whole: Any = {"fixed": {"micro_batches": 1}}
    plan = memfit.plan(kind(), half, loss_of, 1 << 50, small.adamw, **whole)
    assert any("values of the batch" in note for note in plan.notes)
    engine = memfit.fit(kind(), half, loss_of, memfit.smallest_budget(plan), small.adamw, **whole)
    plain = Padded()
    optimizer = small.adamw(plain.parameters())
    for batch in (half, full, half):
        optimizer.zero_grad()
        expected = loss_of(plain, batch)
        expected.backward()
        optimizer.step()
        record = engine.step(batch, meter=True)
        assert record.divergences == record.begun_anew == ()
        assert record.loss == expected.item()
        assert record.peak_bytes is not None
        assert record.peak_bytes <= engine.plan.prediction.peak_bytes
    for batch in (full, half):  # in a loop of one's own nothing is begun anew
        with engine.forward(batch=batch) as follower:
            loss = loss_of(engine.model, batch)
        loss.backward()
        assert follower is not None
        assert follower.divergence is None


# Of eight rows drawn by chance all are full in one batch of 2,500 where three of eight are, and in one of 65,000 where two are.
@pytest.mark.parametrize(("full", "planned"), [(0, False), (2, False), (3, True), (7, True), (8, False)])
def test_a_kind_of_batch_that_is_unlikely_to_come_is_not_planned_for(*, full: int, planned: bool) -> None:
    batch = tokens([40] * (ROWS - full) + [LENGTH] * full)
    trace = trustworthy(StepSource(Padded(), batch, loss_of, small.adamw)).trace
    assert bool(trace.paths) is planned
    # Where the rows tell nothing of the other kind of batch, the plan says so.
    assert any("one answer in all of the sample" in note for note in trace.notes) is (full in {0, ROWS})


@pytest.mark.parametrize("micro_batches", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_each_batch_of_a_loader_may_have_padding_or_none(micro_batches: int) -> None:
    """One at a time they are in memory, and nothing of a step can be begun anew."""
    batch = tokens([40] * ROWS + [LENGTH] * ROWS)
    named: Any = {"loader_batches": 2, "fixed": {"micro_batches": micro_batches}}
    with pytest.raises(memfit.InfeasibleError) as needed:
        memfit.plan(Padded(), batch, loss_of, "1KiB", small.adamw, **named)
    budget = needed.value.minimum_bytes
    assert budget is not None
    plan = memfit.plan(Padded(), batch, loss_of, budget, small.adamw, **named)
    engine = memfit.apply(plan, Padded(), loss_of, small.adamw)
    for halves in (split(batch, [ROWS] * 2), split(batch, [ROWS] * 2)[::-1]):
        record = engine.accumulate((map_tensors(torch.clone, half) for half in halves), meter=True)
        assert record.divergences == ()
        assert record.peak_bytes is not None
        assert record.peak_bytes <= plan.prediction.peak_bytes


def test_a_loss_that_is_noted_tells_no_micro_batches_apart() -> None:
    """Reading it is no operation on fake tensors, so the step is captured for real; it is another one each time and decides nothing."""
    noted: queue.SimpleQueue[float] = queue.SimpleQueue()  # a list would be put back after each look

    def noting(model: nn.Module, batch: Any) -> Tensor:
        loss = small.squared_error(model, batch)
        noted.put(loss.item())
        return loss

    source = StepSource(small.chain(), small.rows(ROWS), noting, small.adamw)
    choices = BASELINE.but(micro_batches=4)
    captured = trustworthy(source, choices)
    assert captured.trace.source != "fake"
    assert values_read.other_samples(source, choices, captured) == ([], "")
    assert len({noted.get() for _ in range(noted.qsize())}) > 1


class Chosen(nn.Module):
    """Works on the labelled rows only, of which every micro-batch has another number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = small.chain()

    def forward(self, x: Tensor, labelled: Tensor) -> Tensor:
        return self.layers(x[labelled])


def test_the_micro_batch_with_the_most_rows_sets_the_peak() -> None:
    x, y = small.rows(64)
    # Of four parts the second is all labelled (then gradients are there already), the last has one row.
    labelled = torch.tensor([False] * 10 + [True] * 22 + [False] * 31 + [True])
    batch = {"x": x, "labelled": labelled, "y": y}

    def loss_fn(model: nn.Module, part: Any) -> Tensor:
        return functional.mse_loss(model(part["x"], part["labelled"]), part["y"][part["labelled"]], reduction="sum")

    fixed = {"micro_batches": 4}
    engine = memfit.fit(Chosen(), batch, loss_fn, 1 << 40, small.adamw, fixed=fixed)
    assert engine.plan.script.plain
    assert any(note.startswith("values of the batch decide how large") for note in engine.plan.notes)
    rehearsal = engine.rehearsal
    assert rehearsal is not None
    assert rehearsal.measured_peak_bytes == rehearsal.predicted_peak_bytes == engine.plan.prediction.peak_bytes


class Packed(nn.Module):
    """A recurrent layer over texts that are packed by their lengths, which decide how many operations it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.head = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(
            self.read(packed)[0], batch_first=True, total_length=len(tokens[0])
        )
        return functional.cross_entropy(self.head(states).flatten(0, 1), tokens.flatten(), reduction="sum") / len(
            tokens
        )


@pytest.mark.alternate(0)
@pytest.mark.parametrize("lengths", [[2, 2, 9, 9], [9, 9, 2, 2], [3, 7, 4, 5]])
def test_micro_batches_of_packed_texts_run_as_planned(lengths: list[int]) -> None:
    torch.manual_seed(0)
    batch = {"tokens": torch.randint(20, (4, 9)), "lengths": torch.tensor(lengths)}
    fixed = {"micro_batches": 2}
    plan = memfit.plan(Packed(), batch, None, "1GiB", small.adamw, fixed=fixed)
    for budget in (memfit.smallest_budget(plan), "1GiB"):
        plan = memfit.replan(plan, budget)
        engine = memfit.apply(plan, Packed(), optimizer=small.adamw)
        for _ in range(2):
            record = engine.step(batch, meter=True)
            assert not record.divergences
            assert record.peak_bytes is not None
            assert record.peak_bytes <= plan.prediction.peak_bytes
