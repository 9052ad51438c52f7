"""Planned pipelines over gloo processes: gradients, losses and parameters of the undivided model, and the predicted peak of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import memfit
from memfit.pipelining import stages
from memfit.planner.cut_costs import cost_of
from pipelining import running
from sharding import steps

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 0.005  # the promise; what is found is some bytes


def planned(
    build: Callable[[], steps.Built], ranks: int, setting: str, optimizer: str, share: float = 1.0, **named: Any
) -> memfit.Plan:
    """A plan for a rank's part of the batch, in this share of the fullest rank's bytes with everything kept."""

    def plan(budget: int) -> memfit.Plan:
        model, sample, loss_fn = build()
        own = steps.part_of(sample, 0, ranks)
        fixed = {"sharding": setting, **named.get("fixed", {})}
        more = {**named, "fixed": fixed}
        return memfit.plan(model, own, loss_fn, budget, running.OPTIMIZERS[optimizer], devices=ranks, **more)

    roomy = plan(1 << 40)
    return roomy if share == 1.0 else plan(int(share * roomy.prediction.peak_bytes))


def compared(
    ranks: int, build: Callable[[], steps.Built], optimizer: str, plans: Sequence[memfit.Plan]
) -> list[list[running.Ran]]:
    """Gradients within 1e-6, and losses and parameters after three steps; peaks as predicted."""
    clip_norm = plans[0].clip_norm
    gradients, losses, parameters = running.undivided(build, optimizer, clip_norm)
    ran = running.together(ranks, running.run, [plan.to_json() for plan in plans], build, optimizer)
    for number, plan in enumerate(plans):
        seen: set[str] = set()
        for rank in range(ranks):
            of_rank = ran[rank][number]
            assert of_rank.losses == pytest.approx(losses, rel=1e-5), plan.choices
            for name, gradient in of_rank.gradients.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-6, msg=f"{plan.choices} {name}")
            for name, parameter in of_rank.parameters.items():
                torch.testing.assert_close(parameter, parameters[name], rtol=0, atol=1e-6, msg=f"{plan.choices} {name}")
            predicted = plan.prediction.ranks[rank].peak_bytes
            assert abs(predicted - of_rank.peak_bytes) <= CLOSE * of_rank.peak_bytes, (
                plan.choices,
                [(r.peak_bytes, each[number].peak_bytes) for r, each in zip(plan.prediction.ranks, ran, strict=True)],
            )
            assert 0 <= of_rank.waiting < 1
            seen |= of_rank.gradients.keys()
        assert seen == gradients.keys()
        whole = ran[0][number].whole
        assert whole.keys() == build()[0].state_dict().keys()
        assert not any(each[number].whole for each in ran[1:])
        for name, value in whole.items():
            if name in parameters:
                torch.testing.assert_close(value, parameters[name], rtol=0, atol=1e-6)
    return ran


def test_two_ranks_train_as_one_device_does_and_hold_what_is_predicted() -> None:
    plans = [
        planned(running.tied, 2, "1f1b/2", "sgd", 0.9, clip_norm=0.1, fixed={"micro_batches": 4}),
        planned(running.tied, 2, "gpipe/2", "sgd", clip_norm=0.1, fixed={"micro_batches": 2}),
    ]
    assert any(script.recomputations for script in plans[0].pipeline.scripts), "something is to be run again"
    compared(2, running.tied, "sgd", plans)


@pytest.mark.parametrize("ends", [pytest.param((1, 4), marks=pytest.mark.slow), (2, 4)])
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_what_a_schedule_holds_of_what_it_has_sent_is_predicted_to_the_byte(
    schedule: str, ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's GPipe holds all that it sends to the end of the step. Cuts that other seconds would not choose."""

    def cut(parts: Any, line: Any, micro_batches: int, schedule: Any, stages: int | None = None) -> Any:
        assert stages == len(ends)
        return cost_of(parts, line, ends, micro_batches, schedule)

    monkeypatch.setattr(stages, "cut_parts", cut)
    plan = planned(running.sequential, 2, f"{schedule}/2", "adamw", fixed={"micro_batches": 4})
    ran = running.together(2, running.run, [plan.to_json()], running.sequential, "adamw")
    assert plan.pipeline is not None
    assert plan.pipeline.ends == ends
    assert [of_rank[0].peak_bytes for of_rank in ran] == [rank.peak_bytes for rank in plan.prediction.ranks]


BUILDS = [running.sequential, running.decoder, running.tied, running.encoder_decoder, running.resnet]


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_two_stages_of_every_model(build: Callable[[], steps.Built]) -> None:
    plans = [
        planned(build, 2, f"{schedule}/2", "sgd", share, fixed={"micro_batches": 4})
        for schedule in ("gpipe", "1f1b")
        for share in (1.0, 0.95)
    ]
    compared(2, build, "sgd", plans)


def test_pipelines_beside_each_other_sum_their_gradients() -> None:
    plans = [planned(running.tied, 4, "1f1b/2x2", "sgd", clip_norm=0.1, fixed={"micro_batches": 2})]
    compared(4, running.tied, "sgd", plans)


@pytest.mark.slow
@pytest.mark.parametrize("build", [running.tied, running.encoder_decoder])
def test_four_stages_and_two_of_two(build: Callable[[], steps.Built]) -> None:
    plans = [
        planned(build, 4, setting, "sgd", fixed={"micro_batches": 4}) for setting in ("1f1b/4", "gpipe/4", "1f1b/2x2")
    ]
    compared(4, build, "sgd", plans)
