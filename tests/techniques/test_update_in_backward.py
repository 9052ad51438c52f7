"""Updating inside backward is updating after it, bit for bit; and what cannot be updated there is refused before training."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfit
import small
from memfit import api
from memfit.errors import EngineError, InputError, NonFiniteLossError
from memfit.optimizers.lion import Lion
from memfit.planning import planning_of
from memfit.techniques.choices import Choices
from memfit.techniques.update_in_backward.updating import why_not_in_backward
from models import case
from step import ways
from sweeps import at_night, by_turns

pytestmark = pytest.mark.usefixtures("one_thread")

INSIDE = Choices(update="in_backward")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "lion": lambda p: Lion(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def both(
    way: Choices, build: Callable[[], Any], optimizer: Any = small.adamw, budget: int = 1 << 50, **named: Any
) -> tuple[tuple[list[float], nn.Module], tuple[list[float], nn.Module]]:
    """Losses and model after a few steps, run this way and plainly."""
    model, sample, loss_fn = build()
    plan = ways.planned(way, model, sample, loss_fn, optimizer, budget, fixed={"micro_batches": 1}, **named)
    plain = ways.planned(Choices(), model, sample, loss_fn, optimizer, **named, fixed={"micro_batches": 1})
    return ways.trained(plan, build), ways.trained(plain, build)


def assert_same(pair: tuple[tuple[list[float], nn.Module], tuple[list[float], nn.Module]]) -> None:
    (losses, model), (expected, plain) = pair
    assert losses == expected
    assert small.same([*model.parameters(), *model.buffers()], [*plain.parameters(), *plain.buffers()])


def chain() -> tuple[nn.Module, Any, Any]:
    return small.chain(3, batch_norm=True, dropout=0.1), small.rows(32), small.squared_error


@pytest.mark.alternate(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_the_bits_of_an_update_after_backward(name: str) -> None:
    assert_same(both(INSIDE, chain, OPTIMIZERS[name]))


@pytest.mark.alternate(1)
@pytest.mark.parametrize(
    "name",
    at_night(
        ["gpt_tied", "gpt_dropout", "twice", "amp_gpt", "checkpointed", "frozen", "bert_eager", "lstm"],
        {"amp_gpt", "bert_eager"},
    ),
)
def test_models_give_the_bits_of_an_update_after_backward(name: str) -> None:
    """Tied weights and a module called twice among them: their gradient is whole after the last of its uses."""
    assert_same(both(INSIDE, case(name).build))


@pytest.mark.parametrize(
    "way",
    [
        INSIDE,
        pytest.param(Choices(update="in_backward", state_format="8bit", state_place="disk"), marks=pytest.mark.slow),
    ],
)
def test_recomputation_reads_no_parameter_after_its_update(way: Choices) -> None:
    build = case("gpt_dropout").build
    model, sample, loss_fn = build()
    plan = ways.planned(way, model, sample, loss_fn, small.adamw, fixed={"micro_batches": 1})
    least = api.replan(plan, memfit.smallest_budget(plan))
    assert least.script.recomputations
    losses, trained = ways.trained(least, build)
    after = Choices(state_format=way.state_format)
    expected, plain = ways.trained(
        ways.planned(after, model, sample, loss_fn, small.adamw, fixed={"micro_batches": 1}), build
    )
    assert losses == expected
    assert small.same(list(trained.parameters()), list(plain.parameters()))


def test_of_several_micro_batches_the_last_one_updates() -> None:
    def build() -> Any:
        return small.chain(3), small.rows(30), small.squared_error

    model, sample, loss_fn = build()
    runs = []
    for way in (INSIDE, Choices()):
        plan = ways.planned(way, model, sample, loss_fn, small.adamw, fixed={"micro_batches": 3})
        assert plan.choices.micro_batches == 3
        runs.append(ways.trained(plan, build))
        if way is INSIDE:
            assert ways.peak_of(plan, build()[0], sample, loss_fn) == plan.prediction.peak_bytes
    assert_same((runs[0], runs[1]))


class LargestLast(nn.Module):
    """Backward comes last to the largest parameter, when all other gradients are there or, in the last micro-batch, none is."""

    def __init__(self, *, lies_as_its_gradient: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows = torch.randn(2000, 32) if lies_as_its_gradient else torch.randn(32, 2000).t()
        self.largest = nn.Parameter(rows)
        self.rest = small.chain(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(nn.functional.embedding(x, self.largest))  # type: ignore[no-any-return]


class WideBelow(nn.Module):
    """Backward holds most at its end, where it is at no parameter that is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(3200))
        self.rest = small.chain(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest((x.repeat(1, 3200) * self.scale).tanh().unflatten(1, (32, -1)).mean(2))  # type: ignore[no-any-return]


def mean_of_squares(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


HELD: dict[str, Callable[[], Any]] = {
    "chain": lambda: (small.chain(3), small.rows(60), small.squared_error),
    "largest last": lambda: (LargestLast(lies_as_its_gradient=True), torch.arange(24).view(12, 2), mean_of_squares),
    "copied": lambda: (LargestLast(lies_as_its_gradient=False), torch.arange(24).view(12, 2), mean_of_squares),
    "wide below": lambda: (WideBelow(), torch.randn(12, 1), mean_of_squares),
}


@pytest.mark.alternate(0)
@pytest.mark.parametrize(("name", "micro_batches", "fused"), by_turns(HELD, [2, 3], [True, False]))
def test_several_micro_batches_hold_what_is_predicted_to_the_byte(
    name: str, micro_batches: int, *, fused: bool
) -> None:
    """Gradients add up and stay in all but the last; in the last each goes with its update, which takes memory of its own if it is not fused."""

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, fused=fused, foreach=False)

    model, sample, loss_fn = HELD[name]()
    plan = ways.planned(INSIDE, model, sample, loss_fn, optimizer, fixed={"micro_batches": micro_batches})
    least = api.replan(plan, memfit.smallest_budget(plan))
    for made in (plan, least):
        assert ways.peak_of(made, HELD[name]()[0], sample, loss_fn) == made.prediction.peak_bytes
        bands = made.prediction.categories_at_peak
        assert sum(bands.values()) + planning_of(plan).extra_bytes == made.prediction.peak_bytes


class Routed(nn.Module):
    """An expert that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.expert = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        return self.expert(x) if x.shape[0] == 4 else x  # type: ignore[no-any-return]


def test_what_only_an_earlier_micro_batch_used_is_updated_too() -> None:
    from memfit.step.program import StepProgram

    results = []
    for update in ("in_backward", "after"):
        model = Routed()
        program = StepProgram(
            model, lambda m, x: m(x).square().mean(), small.adamw(model.parameters()), choices=Choices(update=update)
        )
        program.forward_backward(torch.ones(4, 8), 0.5)
        program.forward_backward(
            torch.ones(2, 8), 0.5, around_backward=program.updating() if program.updates_in_backward else None
        )
        program.update()
        program.clear()
        results.append([p.detach() for p in model.parameters()])
    assert small.same(*results)


def test_gradients_are_let_go_one_by_one() -> None:
    made = engine()
    assert made.optimizer is not None
    there: list[int] = []
    for p in made.model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: there.append(sum(q.grad is not None for q in made.model.parameters()))
        )
    made.step(small.rows(32))
    assert there
    assert max(there) == 1


def test_a_schedule_between_steps_is_followed() -> None:
    results = []
    for way in (INSIDE, Choices()):
        model, sample, loss_fn = chain()
        made = memfit.apply(ways.planned(way, model, sample, loss_fn, small.adamw), model)
        assert made.optimizer is not None
        schedule = torch.optim.lr_scheduler.ExponentialLR(
            made.optimizer, 0.5
        )  # warns when its optimizer has not stepped
        torch.manual_seed(1)
        losses = []
        for _ in range(4):
            losses.append(made.step(sample).loss)
            schedule.step()
        results.append((losses, model))
    assert_same((results[0], results[1]))


# ---------------------------------------------------------------------------------------------------------------- failures


def engine(way: Choices = INSIDE) -> memfit.Engine:
    model, sample, loss_fn = chain()
    return memfit.apply(ways.planned(way, model, sample, loss_fn, small.adamw, fixed={"micro_batches": 1}), model)


def test_a_loss_that_is_no_number_changes_nothing() -> None:
    made = engine()
    made.step(small.rows(32))
    before = small.state_of(made.model, made.optimizer)
    x, y = small.rows(32)
    with pytest.raises(NonFiniteLossError):
        made.step((x * float("nan"), y))
    assert small.same(small.state_of(made.model, made.optimizer), before)
    made.step((x, y))


@pytest.mark.parametrize("place", [0, -1])
def test_a_failure_in_backward_is_half_way_once_something_was_updated(place: int) -> None:
    """Backward goes from the last parameters to the first; before any of them was updated a failure changes nothing."""
    made = engine()
    made.step(small.rows(32))
    before = small.state_of(made.model, made.optimizer)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    last = list(made.model)[place]  # type: ignore[call-overload]
    hook = last.register_full_backward_pre_hook(lambda *_: fail(torch.empty(0)))
    if place == -1:
        with pytest.raises(ZeroDivisionError):
            made.step(small.rows(32))
        assert small.same(small.state_of(made.model, made.optimizer), before)
        hook.remove()
        made.step(small.rows(32))
        return
    with pytest.raises(EngineError, match="half way"):
        made.step(small.rows(32))
    hook.remove()
    with pytest.raises(EngineError, match="half way"):
        made.step(small.rows(32))


def test_an_interrupt_waits_until_the_update_is_whole() -> None:
    made = engine()
    first = next(made.model.parameters())
    hook = list(made.model.parameters())[-1].register_hook(lambda _: os.kill(os.getpid(), signal.SIGINT))
    before = first.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        made.step(small.rows(32))
    hook.remove()
    assert not torch.equal(first, before)
    assert made.steps == 1
    made.step(small.rows(32))


def test_hooks_are_gone_after_a_step() -> None:
    made = engine()
    made.step(small.rows(32))
    small.squared_error(made.model, small.rows(32)).backward()
    assert all(p.grad is not None for p in made.model.parameters())


# ---------------------------------------------------------------------------------------------------------------- refusals


def refused(build: Callable[[], Any], optimizer: Any = small.adamw, **named: Any) -> pytest.ExceptionInfo[InputError]:
    model, sample, loss_fn = build()
    with pytest.raises(InputError) as caught:
        ways.planned(INSIDE, model, sample, loss_fn, optimizer, **named)
    return caught


def test_an_optimizer_that_may_couple_parameters_is_refused() -> None:
    def lbfgs(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters)

    refused(chain, lbfgs).match("LBFGS is not known to update each parameter by itself")
    assert why_not_in_backward(small.adamw(small.chain().parameters())) is None


def test_a_gradient_that_grows_after_it_was_used_is_refused() -> None:
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(self.shared, x, use_reentrant=True)
            return x

    refused(lambda: (Reentrant(), small.rows(8), small.squared_error)).match(
        "is added to more than once in one backward"
    )


def test_a_parameter_that_backward_reads_after_its_update_is_refused() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).tanh()
            x = nn.functional.linear(
                x, self.second.weight.detach()
            )  # its backward reads the weight and waits for nothing
            return self.second(x)  # type: ignore[no-any-return]

    refused(lambda: (Detached(), small.rows(8), small.squared_error)).match("again after its gradient is whole")
