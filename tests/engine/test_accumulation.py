"""A step over micro-batches is the step over all their samples: each counts for what the loss averages over, and everything else happens once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
import small
from memfit.errors import BatchError, InputError, NonFiniteLossError

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (5, 10, 60, 125)  # a mean of means is off by more than the gradient itself here
VOCABULARY, WIDTH = 50, 16
Tokens = dict[str, Tensor]


class Tagger(nn.Module):
    """Token ids (batch, tokens) to logits; the loss averages over tokens whose label is not masked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, VOCABULARY))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.layers(self.embed(input_ids))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def texts(lengths: tuple[int, ...] = LENGTHS, longest: int = max(LENGTHS)) -> Tokens:
    """A text of each length, padded; labels depend on the length, so that weights matter."""
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(1, VOCABULARY, (len(lengths), longest), generator=generator)
    labels = torch.full_like(ids, -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = row % VOCABULARY
    return {"input_ids": ids, "labels": labels}


def cut(batch: Tokens, sizes: tuple[int, ...]) -> Iterator[Tokens]:
    start = 0
    for size in sizes:
        yield {name: tensor[start : start + size].clone() for name, tensor in batch.items()}
        start += size


def gradient_of(model: nn.Module, batches: list[Tokens]) -> Tensor:
    """Of the mean of the batches' own losses: what a loop that divides by their number gets."""
    for batch in batches:
        (model(**batch)["loss"] / len(batches)).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def step_of(model: nn.Module, before: list[Tensor]) -> Tensor:
    """The gradient that a step of plain SGD has followed."""
    moved = zip(before, model.parameters(), strict=True)
    return torch.cat([((old - new.detach()) / 0.5).flatten() for old, new in moved])


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.fixture
def planned() -> memfit.Plan:
    return memfit.plan(Tagger(), texts(), None, "1GiB", sgd, fixed={"micro_batches": 4})


def test_micro_batches_of_unequal_lengths_count_by_their_tokens(planned: memfit.Plan) -> None:
    model = Tagger()
    whole = gradient_of(model, [texts()])
    naive = gradient_of(model, list(cut(texts(), (1, 1, 1, 1))))
    before = [p.detach().clone() for p in model.parameters()]

    record = memfit.apply(planned, model).step(texts())

    assert planned.choices.weights == "tokens:labels"
    assert record.micro_batches == 4
    assert difference(step_of(model, before), whole) < 1e-5
    assert difference(naive, whole) > 0.5  # the trap is one


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 1, 2), (3, 1)])
def test_a_loaders_micro_batches_make_the_step_of_the_whole(planned: memfit.Plan, sizes: tuple[int, ...]) -> None:
    model = Tagger()
    whole = gradient_of(model, [texts()])
    expected = float(model(**texts())["loss"].detach())
    before = [p.detach().clone() for p in model.parameters()]

    record = memfit.apply(planned, model).accumulate(cut(texts(), sizes))

    assert record.loss == pytest.approx(expected, rel=1e-5)
    assert record.micro_batches == 4  # what is larger than a micro-batch of the plan is split
    assert difference(step_of(model, before), whole) < 1e-5


def test_a_last_window_of_fewer_micro_batches_is_a_mean_over_what_is_in_it(planned: memfit.Plan) -> None:
    model = Tagger()
    rest = texts((7, 90))
    whole = gradient_of(model, [rest])
    before = [p.detach().clone() for p in model.parameters()]
    engine = memfit.apply(planned, model)

    record = engine.accumulate(cut(rest, (1, 1)))

    assert difference(step_of(model, before), whole) < 1e-5
    before = [p.detach().clone() for p in model.parameters()]
    whole = gradient_of(model, [rest])
    assert engine.step(rest).micro_batches == record.micro_batches == 2
    assert difference(step_of(model, before), whole) < 1e-5


def test_one_micro_batch_alone_is_bit_equal_to_a_plain_step(planned: memfit.Plan) -> None:
    one, other = Tagger(), Tagger()
    alone = texts((60,))
    memfit.apply(planned, one).accumulate([alone])
    optimizer = sgd(other.parameters())
    other(**alone)["loss"].backward()
    optimizer.step()
    assert small.same(small.state_of(one), small.state_of(other))


def test_micro_batches_that_do_not_count_change_nothing(planned: memfit.Plan) -> None:
    one, other = Tagger(), Tagger()
    masked = texts((5,))
    masked["labels"][:] = -100
    memfit.apply(planned, one).accumulate([masked, texts((10,)), masked])
    memfit.apply(planned, other).accumulate([texts((10,))])
    assert small.same(small.state_of(one), small.state_of(other))


def test_only_one_micro_batch_is_there_at_a_time(planned: memfit.Plan) -> None:
    alive: list[Any] = []

    def loader() -> Iterator[Tokens]:
        for batch in cut(texts(), (1, 1, 1, 1)):
            assert all(reference() is None for reference in alive)
            alive.append(weakref.ref(batch["input_ids"]))
            yield batch
            del batch

    assert memfit.apply(planned, Tagger()).accumulate(loader()).micro_batches == 4
    assert len(alive) == 4


def test_accumulating_holds_no_more_than_was_predicted() -> None:
    model, sample = small.chain(4), small.rows(512)
    made = memfit.plan(model, sample, small.squared_error, "1GiB", small.adamw, fixed={"micro_batches": 4})
    half = memfit.replan(made, round(0.7 * made.prediction.peak_bytes))
    assert not half.script.plain
    engine = memfit.apply(half, model)

    def loader() -> Iterator[Any]:
        for start in range(0, 512, 128):
            yield tuple(t[start : start + 128] for t in sample)

    engine.accumulate(loader())
    record = engine.accumulate(loader(), meter=True)
    assert record.divergences == ()
    assert record.recomputations > 0
    assert record.peak_bytes is not None
    batch_bytes = sum(t.nbytes for t in sample)
    # The prediction counts the whole batch; here no part of it is made inside the step.
    assert record.peak_bytes == pytest.approx(half.prediction.peak_bytes - batch_bytes, rel=0.005)


def test_the_norm_is_clipped_once_on_the_whole_gradient() -> None:
    made = memfit.plan(Tagger(), texts(), None, "1GiB", sgd, fixed={"micro_batches": 4}, clip_norm=0.01)
    for take in ("step", "accumulate"):
        model = Tagger()
        whole = gradient_of(model, [texts()])
        before = [p.detach().clone() for p in model.parameters()]
        engine = memfit.apply(made, model)
        engine.step(texts()) if take == "step" else engine.accumulate(cut(texts(), (1, 1, 1, 1)))
        moved = step_of(model, before)
        assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)
        assert difference(moved, whole * (0.01 / whole.norm())) < 1e-3  # the step was read back from rounded parameters


def test_a_loss_that_sums_stays_a_sum() -> None:
    def summed(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().sum()

    model, sample = small.chain(1), small.rows(8)
    made = memfit.plan(model, sample, summed, "1GiB", sgd, fixed={"micro_batches": 2})
    assert made.choices.weights == "sum"
    expected = float(summed(model, sample).detach())
    engine = memfit.apply(made, model)
    record = engine.accumulate([tuple(t[:3] for t in sample), tuple(t[3:] for t in sample)])
    assert record.loss == pytest.approx(expected, rel=1e-5)


def test_a_plan_for_the_whole_batch_has_no_room_for_accumulation() -> None:
    engine = memfit.apply(memfit.plan(Tagger(), texts(), None, "1GiB", sgd, fixed={"micro_batches": 1}), Tagger())
    with pytest.raises(InputError, match="this plan runs the batch as a whole"):
        engine.accumulate([texts()])


def failing(how: str) -> Iterator[Tokens]:
    yield texts((5,))
    if how == "larger":
        yield texts((5,), 126)
    if how == "loader":
        raise OSError(how)


@pytest.mark.parametrize(
    ("how", "error", "sentence"),
    [
        ("larger", BatchError, "the plan is for batches up to"),
        ("loader", OSError, "loader"),
        ("none", BatchError, "no micro-batches were handed over"),
        ("all masked", BatchError, "nothing in them counts for the loss"),
        ("infinite", NonFiniteLossError, "the step was not taken"),
    ],
)
def test_what_goes_wrong_in_a_window_changes_nothing(
    planned: memfit.Plan, how: str, error: type[Exception], sentence: str
) -> None:
    model = Tagger()
    engine = memfit.apply(planned, model)
    window: Any = failing(how)
    if how == "none":
        window = []
    if how == "all masked":
        window = [{**texts((5,)), "labels": torch.full((1, max(LENGTHS)), -100)}]
    if how == "infinite":
        engine.accumulate([texts((5,))])
        model.embed.weight.data[0] = float("inf")  # no text of ours has a token 0, but for the second one here
        first, second = cut(texts((10, 20)), (1, 1))
        second["input_ids"][:] = 0
        window = [first, second]
    before = small.state_of(model, engine.optimizer)
    steps = engine.steps
    with pytest.raises(error, match=sentence):
        engine.accumulate(window)
    assert small.same(small.state_of(model, engine.optimizer), before)
    assert all(p.grad is None for p in model.parameters())
    assert engine.steps == steps
