"""Techniques inside stages: the numbers of one device under the same technique, the predicted peak of each rank, and what is left out and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import memfit
from pipelining import running
from sharding import steps

pytestmark = pytest.mark.usefixtures("one_thread")

MICRO_BATCHES = 4


def planned(
    build: Callable[[], steps.Built], fixed: Any, share: float = 1.0, ranks: int = 2, **named: Any
) -> memfit.Plan:
    model, sample, loss_fn = build()
    own = steps.part_of(sample, 0, ranks)
    fixed = {"sharding": f"1f1b/{ranks}", "micro_batches": MICRO_BATCHES, **fixed}

    def plan(budget: int) -> memfit.Plan:
        return memfit.plan(model, own, loss_fn, budget, steps.adamw, devices=ranks, fixed=fixed, **named)

    roomy = plan(1 << 40)
    return roomy if share == 1.0 else memfit.replan(roomy, int(share * roomy.prediction.peak_bytes))


def on_one_device(
    build: Callable[[], steps.Built], fixed: Any, taken: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters under a plan for one device with the same techniques and micro-batches."""
    torch.manual_seed(1)
    model, sample, loss_fn = build()
    asked = {"micro_batches": MICRO_BATCHES, **fixed}
    plan = memfit.plan(model, sample, loss_fn, 1 << 40, steps.adamw, fixed=asked)
    engine = memfit.apply(plan, model)
    losses = [engine.step(sample).loss for _ in range(taken)]
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def compared(build: Callable[[], steps.Built], fixed: Any, *plans: memfit.Plan) -> None:
    """Losses and parameters are bit for bit those of one device, peaks those predicted."""
    ran = running.together(2, running.run, [plan.to_json() for plan in plans], build, "adamw")
    losses, parameters = on_one_device(build, fixed, 3)
    for number, plan in enumerate(plans):
        seen: set[str] = set()
        for rank in range(2):
            of_rank = ran[rank][number]
            assert of_rank.losses == pytest.approx(losses, rel=1e-6)
            for name, parameter in of_rank.parameters.items():
                assert torch.equal(parameter, parameters[name]), name
            seen |= of_rank.parameters.keys()
        assert seen == parameters.keys()
        assert running.as_predicted([of_rank[number].peak_bytes for of_rank in ran], plan), plan.choices


BOTH = {"precision": "bf16", "state_format": "8bit"}


@pytest.mark.parametrize(
    ("build", "fixed", "shares"),
    [
        (running.short_decoder, BOTH, (0.9,)),
        pytest.param(running.decoder, BOTH, (0.9,), marks=pytest.mark.slow),
        pytest.param(running.decoder, {"precision": "bf16"}, (1.0, 0.9), marks=pytest.mark.slow),
        pytest.param(running.decoder, {"state_format": "8bit"}, (1.0, 0.9), marks=pytest.mark.slow),
    ],
)
def test_stages_train_as_one_device_does_under_the_same_techniques(
    build: Callable[[], steps.Built], fixed: Any, shares: Sequence[float]
) -> None:
    plans = [planned(build, fixed, share) for share in shares]
    for name, setting in fixed.items():
        assert all(getattr(plan.choices, name) == setting for plan in plans)
    assert plans[-1].pipeline is not None
    assert any(script.recomputations for script in plans[-1].pipeline.scripts)
    compared(build, fixed, *plans)


def test_what_is_allowed_and_cannot_be_in_stages_is_told_with_its_reason() -> None:
    """Both that can be are weighed; state in 8 bits makes no step faster in which everything is kept, so no plan is made with it."""
    made = planned(running.sequential, {}, allow=["bf16", "8bit", "fp16", "in_backward"])
    told = "\n".join(made.rejected)
    for word in ("fp16", "in_backward"):
        assert (
            f"{word}: stages of a pipeline do not have it, of all that can be allowed they have 'bf16', '8bit'" in told
        )
    assert made.choices.state_format == "32bit"
    assert ("bf16 autocast" in told) == (made.choices.precision == "full")


def test_state_in_8_bits_is_taken_where_stages_fit_with_it_alone() -> None:
    roomy = planned(running.sequential, {})
    budget = memfit.smallest_budget(roomy) - 1
    model, sample, loss_fn = running.sequential()
    own = steps.part_of(sample, 0, 2)
    fixed = {"sharding": "1f1b/2", "micro_batches": MICRO_BATCHES}
    made = memfit.plan(model, own, loss_fn, budget, steps.adamw, devices=2, fixed=fixed, allow=["8bit"])
    assert made.choices.state_format == "8bit"
    assert made.prediction.peak_bytes <= budget


def test_a_plan_with_stages_is_planned_again_from_its_traces() -> None:
    """As it would be planned anew; down to the smallest budget, below which nothing fits."""
    roomy = planned(running.sequential, {})
    least = memfit.smallest_budget(roomy)
    budget = (least + roomy.prediction.peak_bytes) // 2
    again = memfit.replan(roomy, budget)
    assert again.budget_bytes == budget >= again.prediction.peak_bytes
    assert memfit.replan(again, least).prediction.peak_bytes <= least
    with pytest.raises(memfit.InfeasibleError):
        memfit.replan(roomy, least - 1)
    with pytest.raises(memfit.InputError, match="loaded from a file, or is a changed copy"):
        memfit.replan(memfit.Plan.from_json(roomy.to_json()), budget)
