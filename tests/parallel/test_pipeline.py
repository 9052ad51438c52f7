"""Pipelines over gloo processes, compared with the undivided model. One launch for each number of processes: starting them takes longest."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from memfit.capture.capture import capture
from memfit.capture.part_calls import find_part_calls
from memfit.capture.source import StepSource
from memfit.errors import BatchError, InputError, NonFiniteLossError
from memfit.parallel.pipeline import Pipeline, StageEnds, check_cut, equal_micro_batches, holders_of
from memfit.planner.model_parts import part_calls
from memfit.step.part_calls import PartCalls
from memfit.step.program import StepProgram
from memfit.values.stages import Schedule
from parallel.stage_models import built, rows
from parallel.stage_processes import run_ranks

GPIPE, ONE_ONE, INTERLEAVED = Schedule.GPIPE, Schedule.ONE_FORWARD_ONE_BACKWARD, Schedule.INTERLEAVED
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "": None,
}
Case = tuple[str, Schedule, tuple[int, ...], int, str, "float | None"]
CASES: dict[int, list[Case]] = {
    2: [
        ("sequential", GPIPE, (2, 4), 4, "sgd", None),
        ("decoder", ONE_ONE, (3, 7), 4, "sgd", 0.1),
        ("decoder", GPIPE, (1, 7), 2, "", None),
        ("tied", ONE_ONE, (4, 7), 4, "sgd", 0.1),
        ("tied", GPIPE, (4, 7), 4, "adamw", None),
        ("encoder_decoder", ONE_ONE, (6, 8), 4, "adamw", None),
        ("resnet", GPIPE, (3, 6), 8, "sgd", None),
        ("decoder", INTERLEAVED, (2, 3, 5, 7), 4, "sgd", 0.1),
    ],
    4: [
        ("sequential", ONE_ONE, (1, 2, 3, 4), 4, "", None),
        ("tied", ONE_ONE, (2, 3, 5, 7), 8, "sgd", 0.1),
        ("encoder_decoder", GPIPE, (2, 4, 6, 8), 4, "sgd", 0.1),
    ],
}


def _cut(name: str, micro_batches: int) -> PartCalls:
    model, batch, loss_fn, how = built(name)
    parts, _ = equal_micro_batches(batch, micro_batches, how)
    trace = capture(StepSource(model, parts[0], loss_fn, None)).trace
    return find_part_calls(model, parts[0], loss_fn, [call.module for call in part_calls(trace)])


def _steps(world: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor], list[float]]]:
    """In a rank: of each case its gradients, its parameters after three steps, the losses."""
    found = []
    for name, schedule, ends, micro_batches, optimizer, clip_norm in CASES[world]:
        model, batch, loss_fn, how = built(name)
        calls = _cut(name, micro_batches)
        cut = StageEnds(ends, schedule, micro_batches)
        pipeline = Pipeline(model, loss_fn, calls, cut, OPTIMIZERS[optimizer], clip_norm=clip_norm, weights=how)
        pipeline.forward_backward(batch)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        pipeline.clear()
        losses = [pipeline.step(batch) for _ in range(3)]
        # What is read between parts is on every rank, and trained on those that use it.
        trained = {id(p) for p in pipeline.parameters}
        after = {n: p.detach().clone() for n, p in model.named_parameters() if id(p) in trained}
        found.append((gradients, after, losses))
    return found


def _undivided(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    name, _, _, _, optimizer, clip_norm = case
    model, batch, loss_fn, _ = built(name)
    make = OPTIMIZERS[optimizer]
    program = StepProgram(model, loss_fn, make(model.parameters()) if make else None, clip_norm)
    program.forward_backward(batch)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    program.clear()
    losses = []
    for _ in range(3):
        losses.append(program.forward_backward(batch).item())
        program.update()
        program.clear()
    return gradients, {n: p.detach().clone() for n, p in model.named_parameters()}, losses


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_pipelines_train_as_the_undivided_model(world: int) -> None:
    by_rank = run_ranks(_steps, world, world)
    for index, case in enumerate(CASES[world]):
        gradients, parameters, losses = _undivided(case)
        seen: set[str] = set()
        trained: set[str] = set()
        for rank in range(world):
            mine, after, told = by_rank[rank][index]
            assert told == pytest.approx(losses, abs=1e-6)
            for name, gradient in mine.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-6, msg=f"{case}, {name}")
            for name, parameter in after.items():
                # AdamW divides by the root of a gradient's square, which multiplies rounding where a gradient is nearly nothing.
                close = 1e-6 if case[4] != "adamw" else 1e-4
                torch.testing.assert_close(parameter, parameters[name], rtol=0, atol=close, msg=f"{case}, {name}")
            seen |= mine.keys()
            trained |= after.keys()
        assert seen == gradients.keys()
        assert trained == parameters.keys()


def _troubles() -> list[str]:
    """In a rank: what is refused there, and that training goes on after it."""
    model, batch, loss_fn, how = built("decoder")
    calls = _cut("decoder", 4)
    pipeline = Pipeline(model, loss_fn, calls, StageEnds((3, 7), ONE_ONE, 4), OPTIMIZERS["sgd"], weights=how)
    told = []
    before = [p.detach().clone() for p in pipeline.parameters]
    scale = model.norm.weight if "norm.weight" in dict(model.named_parameters()) else None
    if scale is not None:
        kept = scale.detach().clone()
        scale.data.fill_(math.inf)
    for bad in (batch, {name: t[:6] for name, t in batch.items()}, {**batch, "labels": batch["labels"] * 0 - 100}):
        try:
            pipeline.step(bad)
        except (NonFiniteLossError, BatchError) as error:
            told.append(f"{type(error).__name__}: {error}")
        if scale is not None:
            scale.data.copy_(kept)
    assert all(torch.equal(a, b) for a, b in zip(before, pipeline.parameters, strict=True))
    pipeline.step(batch)
    return told


@pytest.mark.slow
def test_what_one_rank_finds_stops_all_of_them() -> None:
    for told in run_ranks(_troubles, 2):
        assert "the loss is nan" in told[0] or "the loss is inf" in told[0]
        assert "6 samples does not divide into 4 micro-batches" in told[1]
        assert "nothing in the batch counts for the loss" in told[2]


def test_a_cut_for_other_ranks_or_places_is_refused() -> None:
    calls = _cut("decoder", 4)
    with pytest.raises(InputError, match="cut into 3 stages for the schedule 1f1b and there are 2 ranks"):
        check_cut(calls, StageEnds((2, 4, 7), ONE_ONE, 4), 2)
    with pytest.raises(InputError, match="the model has 7 parts"):
        check_cut(calls, StageEnds((2, 6), ONE_ONE, 4), 2)
    refused = PartCalls(calls.calls, calls.needs, calls.outside, calls.read_between, ("", "a reason", *[""] * 5))
    with pytest.raises(InputError, match="cannot be cut after words: a reason"):
        check_cut(refused, StageEnds((1, 7), ONE_ONE, 4), 2)


def test_tied_weights_are_held_by_both_of_their_ranks() -> None:
    model, *_ = built("tied")
    holders = holders_of(model, _cut("tied", 4), StageEnds((2, 4, 7), ONE_ONE, 4), 3)
    assert holders["words.weight"] == (0, 2)
    assert holders["blocks.1.out.weight"] == (1,)


def test_micro_batches_count_for_their_tokens() -> None:
    _, batch, _, how = built("decoder")
    parts, weights = equal_micro_batches(batch, 4, how)
    counted = [int((part["labels"] != -100).sum()) for part in parts]
    assert weights == [count / sum(counted) for count in counted]
    assert len(set(counted)) > 1
    with pytest.raises(BatchError, match="does not divide into 3"):
        equal_micro_batches(rows(), 3, "samples")
