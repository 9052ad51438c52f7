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
from defined_costs import defined_costs
from memfit.errors import BatchError, InfeasibleError, InputError, NonFiniteLossError

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


@pytest.fixture(scope="module")
def planned() -> memfit.Plan:
    with defined_costs():  # which are those of single tests otherwise
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


Rows = tuple[Tensor, Tensor]


def many_tensors(parameters: Any) -> torch.optim.Optimizer:
    """Its update takes more than a backward of small batches."""
    return torch.optim.Adam(parameters, lr=1e-2, foreach=True)


def fresh(sample: Rows, count: int) -> Iterator[Rows]:
    """The batches of a step, each made when it is asked for."""
    size = len(sample[0]) // count
    for start in range(0, size * count, size):
        yield sample[0][start : start + size].clone(), sample[1][start : start + size].clone()


@pytest.mark.parametrize(
    ("samples", "fixed", "share", "how"),
    [
        pytest.param(512, {}, 1.0, {}, id="nothing dropped"),
        pytest.param(512, {}, 0.7, {}, id="recomputation"),
        pytest.param(512, {"micro_batches": 8}, 0.95, {}, id="each divided"),
        pytest.param(16, {}, 1.0, {"optimizer": many_tensors, "clip_norm": 1.0}, id="peak in the update"),
    ],
)
def test_batches_made_one_after_the_other_take_what_is_predicted(
    samples: int, fixed: dict[str, Any], share: float, how: dict[str, Any]
) -> None:
    model, sample = small.chain(4), small.rows(samples)
    given: dict[str, Any] = {"optimizer": small.adamw, **how}
    plain = memfit.plan(model, sample, small.squared_error, "1GiB", fixed=fixed, loader_batches=4, **given)
    made = plain if share == 1.0 else memfit.replan(plain, round(share * plain.prediction.peak_bytes))
    assert made.script.plain == (share == 1.0)
    assert made.choices.micro_batches == fixed.get("micro_batches", 4)
    engine = memfit.apply(made, model)
    engine.accumulate(fresh(sample, 4))  # the first step makes the optimizer's state
    record = engine.accumulate(fresh(sample, 4), meter=True)
    assert record.divergences == ()
    assert record.peak_bytes == made.prediction.peak_bytes
    assert (record.recomputations > 0) == (share < 1.0)


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_batches_in_a_list_take_what_is_predicted_for_all_of_them(share: float) -> None:
    model, sample = small.chain(4), small.rows(512)
    plain = memfit.plan(model, sample, small.squared_error, "1GiB", small.adamw, fixed={"micro_batches": 4})
    made = memfit.replan(plain, round(share * plain.prediction.peak_bytes))
    engine, window = memfit.apply(made, model), list(fresh(sample, 4))
    engine.accumulate(window)
    assert engine.accumulate(window, meter=True).peak_bytes == made.prediction.peak_bytes


def test_more_batches_than_planned_take_no_more_bytes() -> None:
    sample = (torch.randn(64, 16), torch.randn(64, 4))
    model = nn.Linear(16, 4)

    def loss_fn(model: nn.Module, batch: Rows) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    plan = memfit.plan(model, sample, loss_fn, "1GiB", sgd, loader_batches=2)
    engine = memfit.apply(plan, model)
    peaks = [
        engine.accumulate((tuple(t[:32].clone() for t in sample) for _ in range(n)), meter=True).peak_bytes
        for n in (2, 7)
    ]
    assert peaks[0] == peaks[1]
    assert peaks[0] is not None
    assert peaks[0] <= plan.prediction.peak_bytes


def test_a_list_under_a_plan_for_one_batch_at_a_time_is_refused() -> None:
    model, sample = small.chain(2), small.rows(64)
    made = memfit.plan(model, sample, small.squared_error, "1GiB", small.adamw, loader_batches=4)
    engine = memfit.apply(made, model)
    before = small.state_of(model)
    with pytest.raises(
        BatchError, match=r"a list of 4 batches holds 16.0 KiB on the device at once, and the plan counts 4.00 KiB"
    ):
        engine.accumulate(list(fresh(sample, 4)))
    assert small.same(small.state_of(model), before)
    assert engine.accumulate([next(fresh(sample, 4))]).micro_batches == 1


def test_a_loader_of_single_samples_is_fitted_and_counts_by_tokens() -> None:
    """One sample does not show what a loss averages over; all of a step do."""
    model = Tagger()
    whole = gradient_of(model, [texts()])
    before = [p.detach().clone() for p in model.parameters()]
    engine = memfit.fit(model, texts(), None, "1GiB", sgd, loader_batches=4)
    assert engine.plan.choices.weights == "tokens:labels"
    assert engine.rehearsal is not None
    assert engine.rehearsal.measured_peak_bytes == engine.plan.prediction.peak_bytes
    engine.accumulate(cut(texts(), (1, 1, 1, 1)))
    assert difference(step_of(model, before), whole) < 1e-5


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ({"loader_batches": 3}, "the sample has 8 samples, which are to be as many batches of one size"),
        ({"loader_batches": 0}, "loader_batches=0: the sample has 8 samples"),
        ({"loader_batches": 4, "fixed": {"micro_batches": 6}}, "there is any multiple of 4 up to 8"),
        ({"loader_batches": 4, "fixed": {"update": "in_backward"}}, "does not know which batch is the last"),
    ],
)
def test_a_step_that_cannot_be_so_many_batches_is_refused(named: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        memfit.plan(small.chain(1), small.rows(8), small.squared_error, "1GiB", small.adamw, **named)


@pytest.mark.slow
def test_ways_out_of_a_step_of_several_batches_lead_to_plans() -> None:
    def planned_in(budget: int | str, **named: Any) -> memfit.Plan:
        model, sample = small.chain(4), small.rows(512)
        return memfit.plan(model, sample, small.squared_error, budget, small.adamw, loader_batches=4, **named)

    fixed = {"micro_batches": 4}
    least = memfit.smallest_budget(planned_in("1GiB", fixed=fixed))
    with pytest.raises(InfeasibleError) as refused:
        planned_in(least - 2000, fixed=fixed)
    told = [remedy for remedy in refused.value.remedies if remedy.arguments is not None]
    assert {"budget", "micro_batches"} <= {remedy.kind for remedy in told}
    for remedy in told:
        made = planned_in(**{"budget": least - 2000, "fixed": fixed, **(remedy.arguments or {})})
        engine = memfit.apply(made, small.chain(4))
        assert engine.accumulate(fresh(small.rows(512), 4)).micro_batches == made.choices.micro_batches


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
        (
            "larger",
            BatchError,
            r"the plan is for batches up to .* the samples of all batches of a step \(with loader_batches=n it is divided by n\)",
        ),
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


def test_a_list_of_samples_that_the_plan_cannot_divide_is_refused() -> None:
    """All of one length in the sample, so that dividing them looks right; the budget would be exceeded where the first one alone is divided."""

    def loss_fn(model: nn.Module, batch: tuple[list[Tensor], list[Tensor]]) -> Tensor:
        losses = [functional.mse_loss(model(x), y) for x, y in zip(*batch, strict=True)]
        return torch.stack(losses).mean()

    def sets(*lengths: int) -> tuple[list[Tensor], list[Tensor]]:
        return [torch.randn(n, small.WIDTH) for n in lengths], [torch.randn(n, small.WIDTH) for n in lengths]

    model = small.chain(1)
    plan = memfit.plan(model, sets(40, 40, 40), loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 2})
    engine = memfit.apply(plan, model)
    ragged, before = sets(35, 30, 12), small.state_of(model)
    with pytest.raises(BatchError, match=r"'0\.1' has a length of 30 in a batch of 35 samples"):
        engine.step(ragged)
    assert small.same(small.state_of(model), before)
    assert engine.step(sets(36, 20, 12)).micro_batches == 2


def test_what_a_plan_does_not_divide_stays_whole_where_a_batch_is_as_long() -> None:
    weights, plain = torch.rand(4) + 0.5, nn.Linear(small.WIDTH, 4)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, labels, weights = batch
        return (functional.cross_entropy(model(x), labels, reduction="none") * weights[labels]).mean()

    def batch(samples: int) -> tuple[Tensor, ...]:
        return small.rows(samples)[0], torch.arange(samples) % 4, weights

    plan = memfit.plan(plain, batch(16), loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 8})
    with torch.no_grad():
        loss = loss_fn(plain, batch(4)).item()
    record = memfit.apply(plan, plain).step(batch(4))  # as many samples as there are classes
    assert record.micro_batches == 2
    assert record.loss == pytest.approx(loss, rel=1e-6)
