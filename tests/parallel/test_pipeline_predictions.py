"""What a pipeline plan predicts of each rank, compared with what the meter measures in it; and that planned stages give the numbers of the undivided model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfit.errors import InfeasibleError
from memfit.meter import metered
from memfit.pipelining import PipelinePlan, plan_pipeline, start
from memfit.step.program import StepProgram
from memfit.values.stages import Line, Schedule, StageDevice
from parallel.stage_models import MODELS, built
from parallel.stage_processes import run_ranks

GPIPE, ONE_ONE = Schedule.GPIPE, Schedule.ONE_FORWARD_ONE_BACKWARD
SAMPLES, MICRO_BATCHES = 32, 4
AMPLE = 1 << 40
CLOSE = 0.005  # the promise; what is found is some bytes
Case = tuple[str, Schedule, float]
QUICK: list[Case] = [("decoder", ONE_ONE, 0.85)]
MORE: list[Case] = [
    (name, schedule, share)
    for name in ("sequential", "decoder", "tied", "encoder_decoder", "resnet")
    for schedule in (GPIPE, ONE_ONE)
    for share in (1.0, 0.9)
    if (name, schedule) != ("sequential", GPIPE)
]
MISSED: list[Case] = [("sequential", GPIPE, 1.0)]


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def _built(name: str) -> tuple[Any, Any, Any, str]:
    _, batch, loss_fn, weights = MODELS[name]
    return built(name)[0], batch(SAMPLES), loss_fn, weights


def _plan(name: str, schedule: Schedule, budget: int, stages: int) -> PipelinePlan:
    model, batch, loss_fn, how = _built(name)
    line = Line((StageDevice(budget),) * stages)
    return plan_pipeline(
        model, batch, loss_fn, line, MICRO_BATCHES, _adamw, schedule=schedule, stages=stages, weights=how
    )


def _tight(name: str, schedule: Schedule, share: float, stages: int) -> PipelinePlan:
    """A plan in this share of the fullest rank's bytes with everything kept; the smallest that fits from there on."""
    ample = _plan(name, schedule, AMPLE, stages)
    if share == 1.0:
        return ample
    peak = max(rank.peak_bytes for rank in ample.ranks)
    for part in (share, (1 + share) / 2):
        try:
            return _plan(name, schedule, int(part * peak), stages)
        except InfeasibleError:
            continue
    return ample


def _measured(cases: list[tuple[Case, PipelinePlan]]) -> list[tuple[int, list[float]]]:
    """In a rank: of each case its peak in a step, and the losses."""
    found = []
    for (name, _, _), plan in cases:
        model, batch, loss_fn, _ = _built(name)
        pipeline = start(plan, model, loss_fn, _adamw)
        losses = [pipeline.step(batch) for _ in range(2)]
        with metered(pipeline.present(batch)) as reading:
            losses.append(pipeline.step(batch))
        found.append((reading.peak_bytes, losses))
    return found


def _undivided_losses(name: str) -> list[float]:
    model, batch, loss_fn, _ = _built(name)
    program = StepProgram(model, loss_fn, _adamw(model.parameters()))
    losses = []
    for _ in range(3):
        losses.append(program.forward_backward(batch).item())
        program.update()
        program.clear()
    return losses


@pytest.mark.parametrize(
    ("cases", "stages"),
    [
        pytest.param(QUICK, 2, id="quick"),
        pytest.param(MORE, 2, id="two", marks=pytest.mark.slow),
        pytest.param([c for c in MORE if c[0] in {"decoder", "tied"}], 4, id="four", marks=pytest.mark.slow),
        pytest.param(
            MISSED,
            2,
            id="missed",
            marks=[
                pytest.mark.slow,
                pytest.mark.xfail(reason="240 of 17,776 bytes of rank 0 are missing, not explained", strict=True),
            ],
        ),
    ],
)
def test_the_predicted_peak_of_each_rank_is_the_measured_one(cases: list[Case], stages: int) -> None:
    planned = [(case, _tight(*case, stages)) for case in cases]
    by_rank = run_ranks(_measured, stages, planned, limit_seconds=600)
    rows = []
    for index, (case, plan) in enumerate(planned):
        for rank in plan.ranks:
            measured, losses = by_rank[rank.rank][index]
            rows.append((case, rank.rank, rank.peak_bytes, measured))
            assert losses == pytest.approx(_undivided_losses(case[0]), abs=2e-5)
    for case, number, predicted, measured in rows:
        assert abs(predicted - measured) <= CLOSE * measured, (
            f"{case}, rank {number}: {predicted} predicted, {measured} measured; all: {rows}"
        )
    if cases is QUICK:
        assert any(not script.plain for script in planned[0][1].scripts), "something is to be recomputed"


def test_a_budget_below_every_cut_is_told_with_what_lacks() -> None:
    with pytest.raises(InfeasibleError, match=r"device [01] has .* and needs"):
        _plan("decoder", ONE_ONE, 50_000, 2)


@pytest.mark.slow
def test_more_stages_need_fewer_bytes_on_each_device() -> None:
    one, two = (max(rank.peak_bytes for rank in _plan("decoder", ONE_ONE, AMPLE, number).ranks) for number in (1, 2))
    assert one > two
