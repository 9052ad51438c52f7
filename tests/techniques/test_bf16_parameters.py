"""Parameters in bf16 train as a loop by hand does, in the bytes that were predicted; rounding keeps the mean; a run goes on with the same random bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit import api
from memfit.errors import InputError, PlanFileError
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.techniques.bf16_parameters.rounding import RoundedStochastically, round_stochastically
from memfit.techniques.choices import Choices, conflict
from step import ways
from sweeps import by_turns

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = 512  # of the weights of a layer
FIXED: dict[str, Any] = {"parameters": "bf16", "micro_batches": 1}


def chain() -> tuple[nn.Module, Any, Any]:
    return small.chain(2, dropout=0.1), small.rows(32), small.squared_error


def with_batch_norm() -> tuple[nn.Module, Any, Any]:
    return small.chain(2, batch_norm=True), small.rows(32), small.squared_error


def planned(build: Callable[[], Any] = chain, optimizer: Any = small.adamw, **fixed: Any) -> memfit.Plan:
    model, sample, loss_fn = build()
    return memfit.plan(model, sample, loss_fn, 1 << 50, optimizer, fixed={**FIXED, **fixed})


def bits(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


# -- rounding ----------------------------------------------------------------------------------------------------------------


def test_the_mean_of_many_draws_is_the_number() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, generator=generator)
    draws, total = 4000, torch.zeros(64, dtype=torch.float64)
    into, scratch = torch.empty(64, dtype=torch.bfloat16), torch.empty(64)
    for _ in range(draws):
        round_stochastically(values, into, scratch, generator)
        total += into.double()
    spacing = torch.exp2(values.abs().log2().floor() - 7).double()  # between neighbours in bf16
    deviation = spacing / 2 / math.sqrt(draws)  # of the mean, at most
    assert ((total / draws - values.double()).abs() < 5 * deviation).all()
    assert ((into.double() - values.double()).abs() < spacing).all()


def test_what_bf16_has_is_kept_and_what_is_no_number_stays_none() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf])
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert odd.isnan().all()
    values = torch.cat([exact, odd])
    into = torch.empty(10, dtype=torch.bfloat16)
    for seed in range(20):
        round_stochastically(values, into, torch.empty(10), torch.Generator().manual_seed(seed))
        assert torch.equal(into[:6].float(), exact)
        assert into[6:].isnan().all()


def test_small_updates_move_the_mean_where_rounding_to_nearest_stands_still() -> None:
    def weights_after(steps: int, make: Callable[[nn.Parameter], torch.optim.Optimizer]) -> Tensor:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = make(weight)
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach().double()

    def sgd(weight: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD([weight], lr=1e-4)

    def rounded(weight: nn.Parameter) -> torch.optim.Optimizer:
        return ChunkedOptimizer(sgd(weight), state_format=RoundedStochastically())

    assert (weights_after(100, sgd) == 1).all()
    found = weights_after(100, rounded)
    # Each step is a draw with a deviation of at most half the spacing, 2**-8 below 1 (2**-7 above), and they add up.
    assert found.mean().item() == pytest.approx(1 - 100 * 1e-4, abs=5 * 2**-8 * math.sqrt(100) / 2 / math.sqrt(4096))


# -- a step ------------------------------------------------------------------------------------------------------------------


def by_hand(build: Callable[[], Any], optimizer: Any, steps: int = 4) -> tuple[list[float], nn.Module]:
    """The loop written out: convert, autocast, compute the update in fp32, round; the first update in two halves, as the moments are made in it."""
    model, (x, y), _ = build()
    for module in model.modules():
        if not isinstance(module, nn.BatchNorm1d):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
    generator = torch.Generator().manual_seed(3)
    own: dict[tuple[nn.Parameter, int], dict[str, Tensor]] = {}
    in_fp32 = [p for p in model.parameters() if p.dtype is torch.float32]
    ordinary = optimizer(in_fp32) if in_fp32 else None
    torch.manual_seed(3)

    def rounded(values: Tensor) -> Tensor:
        noise = torch.randint(0, 1 << 16, values.shape, generator=generator, dtype=torch.int32)
        return ((values.view(torch.int32) + noise) >> 16 << 16).view(torch.float32).bfloat16()

    def update(parameter: nn.Parameter, first: int, last: int) -> None:
        assert parameter.grad is not None
        values = parameter.detach().flatten()[first:last].float()
        values.grad = parameter.grad.flatten()[first:last].float()
        stepper = optimizer([values])
        for start in range(first, last, HALF) if (parameter, first) in own else ():
            for name, value in own[parameter, start].items():
                have = stepper.state[values].get(name)
                stepper.state[values][name] = (
                    value.clone()
                    if not value.dim()
                    else value.float()
                    if have is None
                    else torch.cat([have, value.float()])
                )
        stepper.step()
        found = {k: rounded(v) if v.dim() else v for k, v in stepper.state[values].items()}
        for start in range(first, last, HALF):
            part = slice(start - first, start - first + HALF)
            own[parameter, start] = {k: v[part] if v.dim() else v for k, v in found.items()}
        parameter.data.view(-1)[first:last] = rounded(values)

    losses = []
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if ordinary is not None:
            ordinary.step()
        for parameter in model.parameters():
            if parameter.dtype is torch.bfloat16:
                count = parameter.numel()
                for start in range(0, count, HALF if step == 0 else count):
                    update(parameter, start, min(count, start + (HALF if step == 0 else count)))
        model.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("build", [chain, with_batch_norm])
def test_a_step_is_that_of_a_loop_by_hand(build: Callable[[], Any]) -> None:
    losses, model = ways.trained(planned(build), build)
    expected, hand = by_hand(build, small.adamw)
    assert losses == expected
    assert small.same(bits(model), bits(hand))
    assert {p.dtype for p in model.parameters()} >= {torch.bfloat16}


@pytest.mark.alternate(1)
@pytest.mark.parametrize(
    ("fixed", "fraction"),
    by_turns([{}, {"update": "in_backward"}, {"state_place": "disk"}, {"micro_batches": 2}], [1.0, 0.5, 0.0]),
    ids=str,
)
def test_the_predicted_peak_is_the_measured_one_and_results_stay(fixed: dict[str, Any], fraction: float) -> None:
    plain = planned(**fixed)
    smallest = memfit.smallest_budget(plain)
    plan = api.replan(plain, round(smallest + fraction * (plain.prediction.peak_bytes - smallest)))
    model, sample, loss_fn = chain()
    assert ways.peak_of(plan, model, sample, loss_fn) == plan.prediction.peak_bytes <= plan.budget_bytes
    same_batch = planned(micro_batches=fixed.get("micro_batches", 1))
    (losses, one), (expected, other) = ways.trained(plan, chain), ways.trained(same_batch, chain)
    if "update" not in fixed:  # inside backward the parameters come in another order, and draw other bits
        assert losses == expected
        assert small.same(bits(one), bits(other))


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)],
    ids=["sgd", "momentum"],
)
def test_other_optimizers_are_predicted_too(optimizer: Any) -> None:
    plan = planned(optimizer=optimizer)
    model, sample, loss_fn = chain()
    assert ways.peak_of(plan, model, sample, loss_fn) == plan.prediction.peak_bytes


def test_frozen_parts_are_in_16_bits_and_stay_as_they_are() -> None:
    model, sample, loss_fn = chain()
    plan = memfit.plan(model, sample, loss_fn, 1 << 50, small.adamw, freeze=["0"], fixed=FIXED)
    before = model[0].weight.detach().bfloat16()  # type: ignore[index]
    assert ways.peak_of(plan, model, sample, loss_fn) == plan.prediction.peak_bytes
    assert torch.equal(model[0].weight, before)  # type: ignore[index]


def test_a_run_goes_on_from_its_state_dicts_bit_for_bit() -> None:
    plan = planned()
    through = ways.run(plan, chain, steps=6)
    first = ways.run(plan, chain, steps=3)
    assert first.optimizer is not None
    drawn = torch.get_rng_state()
    weights, state = first.model.state_dict(), first.optimizer.state_dict()
    assert {v.dtype for v in state["state"][0].values() if v.dim()} == {torch.bfloat16}
    again = memfit.apply(plan, chain()[0])
    assert again.optimizer is not None
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(state)
    torch.set_rng_state(drawn)
    for _ in range(3):
        again.step(small.rows(32))
    assert small.same(bits(through.model), bits(again.model))


def test_a_saved_plan_and_a_second_engine_are_for_the_same_model(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    loaded = memfit.Plan.load(tmp_path / "plan.json")
    assert loaded.choices == plan.choices
    model, sample, loss_fn = chain()
    parameters = list(model.parameters())
    memfit.apply(plan, model).step(sample)
    engine = memfit.apply(loaded, model, loss_fn, small.adamw)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    engine.step(sample)
    assert engine.step(sample, meter=True).peak_bytes == plan.prediction.peak_bytes
    with pytest.raises(PlanFileError):
        memfit.apply(planned(parameters="full"), model)


def test_a_model_that_was_converted_is_planned_for_as_it_is() -> None:
    model, sample, loss_fn = chain()
    memfit.apply(planned(), model)
    plan = memfit.plan(model, sample, loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    assert plan.choices.parameters == "bf16"
    assert ways.peak_of(plan, model, sample, loss_fn) == plan.prediction.peak_bytes


# -- what is said ------------------------------------------------------------------------------------------------------------


def test_it_is_taken_only_where_it_is_allowed_and_tells_what_it_does() -> None:
    model, sample, loss_fn = chain()
    plain = memfit.plan(model, sample, loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    least = memfit.smallest_budget(plain)
    tight = memfit.plan(
        model, sample, loss_fn, least - 1, small.adamw, allow=["bf16_parameters"], fixed={"micro_batches": 1}
    )
    assert tight.choices.parameters == "bf16"
    told = tight.explain()
    assert "this model in bf16, with this optimizer computed in 32 bits and rounded stochastically" in told
    assert "half of parameters, gradients and optimizer state" in told


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"precision": "bf16"}, "run under bf16 autocast already"),
        ({"precision": "fp16"}, "run under bf16 autocast already"),
        ({"state_format": "8bit"}, "keep their optimizer state in bf16"),
        ({"streamed": "layers"}, "streamed layers bring their optimizer state along"),
    ],
    ids=str,
)
def test_what_it_cannot_stand_with_is_said(other: dict[str, Any], why: str) -> None:
    assert why in (conflict(Choices(parameters="bf16", **other)) or "")


def test_an_optimizer_that_does_not_update_element_by_element_is_refused() -> None:
    def adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters)

    with pytest.raises(InputError, match="parameters of Adafactor are not rounded stochastically: only"):
        planned(optimizer=adafactor)
    with pytest.raises(InputError, match="this optimizer was made with 8bit state"):
        planned(optimizer=lambda p: memfit.AdamW8bit(p, lr=1e-3))
