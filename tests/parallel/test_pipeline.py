"""Pipelines over gloo processes, compared with the undivided model. One launch for each number of processes: starting them takes longest."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules

from memfit.batches import Batch, leaves
from memfit.capture.capture import capture
from memfit.capture.part_calls import find_part_calls
from memfit.capture.source import StepSource
from memfit.errors import BatchError, InputError, NonFiniteLossError
from memfit.parallel import schedule as schedule_module
from memfit.parallel.pipeline import (
    Division,
    Pipeline,
    check_calls,
    check_ranks,
    equal_micro_batches,
    mesh_of_pipelines,
)
from memfit.parallel.schedule import MESSAGES_ARE_RELEASED, StageEnds
from memfit.planner.model_parts import part_calls
from memfit.sharding.receiving import receive_ahead
from memfit.step.part_calls import PartCalls
from memfit.step.program import StepProgram
from memfit.values.stages import Schedule
from parallel import batch_parts
from parallel.stage_models import built, rows
from parallel.stage_processes import run_ranks
from sharding.ranks import on_ranks
from sharding.steps import part_of

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
    model, batch, loss_fn, _ = built(name)
    one = equal_micro_batches(batch, micro_batches)[0]
    trace = capture(StepSource(model, one, loss_fn, None)).trace
    return find_part_calls(model, one, loss_fn, [call.module for call in part_calls(trace)])


class _Trained:
    """A pipeline with an optimizer."""

    def __init__(self, name: str, cut: StageEnds, world: int, optimizer: str, clip_norm: float | None = None) -> None:
        self.model, _, loss_fn, how = built(name)
        calls, model = _cut(name, cut.micro_batches), self.model

        def look(micro_batch: Batch) -> PartCalls:
            return find_part_calls(model, micro_batch, loss_fn, [call.path for call in calls.calls])

        division = Division.of(model, calls, cut, how)
        self.pipeline = Pipeline(model, loss_fn, look, division, mesh_of_pipelines("cpu", world))
        make, self._clip_norm = OPTIMIZERS[optimizer], clip_norm
        self._optimizer = None if make is None else make(iter(self.pipeline.trainable()))

    def part(self, batch: Batch) -> Batch:
        return part_of(batch, self.pipeline.stage, self.pipeline.ranks)

    def forward_backward(self, batch: Batch) -> float:
        own = self.part(batch)
        self.pipeline.prepare(own)
        return self.pipeline.forward_backward(own, lambda _: nullcontext()).loss

    def step(self, batch: Batch) -> float:
        try:
            loss = self.forward_backward(batch)
            if self._clip_norm is not None:
                self.pipeline.clip(self._clip_norm)
            if self._optimizer is not None:
                self._optimizer.step()
            return loss
        finally:
            self.pipeline.clear(accumulates=True)


def _steps(world: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor], list[float]]]:
    """In a rank: of each case its gradients, its parameters after three steps, the losses."""
    found = []
    for name, schedule, ends, micro_batches, optimizer, clip_norm in CASES[world]:
        _, batch, _, _ = built(name)
        cut = StageEnds(ends, schedule, micro_batches, len(next(iter(leaves(batch)))) // micro_batches)
        trained = _Trained(name, cut, world, optimizer, clip_norm)
        trained.forward_backward(batch)
        gradients = {n: p.grad.clone() for n, p in trained.model.named_parameters() if p.grad is not None}
        trained.pipeline.clear(accumulates=True)
        losses = [trained.step(batch) for _ in range(3)]
        # What is read between parts is on every rank, and trained on those that use it.
        after = {n: p.detach().clone() for n, p in trained.pipeline.named().items()}
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


@pytest.mark.parametrize("strided", [False, True])
def test_a_rank_begins_with_its_own_samples_before_the_others_are_there(*, strided: bool) -> None:
    """And what it writes into them is not what it has sent. What is not contiguous is copied to be sent, so there all are waited for."""
    first, second = on_ranks(2, batch_parts.put_together, strided, limit=60.0)
    whole = torch.arange(20.0).view(5, 4)
    of_both = whole + 200
    changed = torch.cat([-of_both[:3], of_both[3:]])
    assert first == [whole.tolist(), changed.tolist()]
    assert second == [(whole + 100).tolist(), of_both.tolist()]


def _received_in_two_steps() -> list[list[str]]:
    """In a rank: of each step, in order, the messages that are begun to be received ahead, those that torch's schedule receives, and forwards."""
    _, batch, _, _ = built("sequential")
    trained = _Trained("sequential", StageEnds((2, 4), ONE_ONE, 4, 2), 2, "sgd")
    own = trained.part(batch)
    told: list[str] = []

    def ahead(*args: Any) -> Any:
        told.append("ahead")
        return receive_ahead(*args)

    def by_torch(ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        if desc is not None:  # those without one are torch's own, by which ranks get to know each other
            told.extend("by torch" for op in ops if op.op is dist.irecv)
        return batched(ops, desc)

    @contextmanager
    def forward(_: int) -> Iterator[None]:
        told.append("forward")
        yield

    batched = schedules._batch_p2p
    found = []
    with (
        mock.patch.object(schedule_module, "receive_ahead", ahead),
        mock.patch.object(schedules, "_batch_p2p", by_torch),
    ):
        for _ in range(2):
            trained.pipeline.prepare(own)
            trained.pipeline.forward_backward(own, forward)
            trained.pipeline.clear(accumulates=True)
            found.append(told.copy())
            told.clear()
    return found


@pytest.mark.skipif(MESSAGES_ARE_RELEASED, reason="each message has memory of its own, from when it is received")
def test_a_stage_receives_before_it_computes_so_that_none_waits_for_it_to_be_through() -> None:
    """Once there is memory for the messages, which torch's schedule makes in the first step."""
    (_, second_of_0), (first_of_1, second_of_1) = run_ranks(_received_in_two_steps, 2)
    assert sorted(first_of_1) == ["by torch"] * 4 + ["forward"] * 4
    assert second_of_1 == ["ahead"] * 4 + ["forward"] * 4
    # Gradients come later, and nothing is to keep the first stage from computing.
    assert second_of_0 == ["forward"] + ["ahead"] * 4 + ["forward"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_pipelines_train_as_the_undivided_model(world: int) -> None:
    by_rank = run_ranks(_steps, world, world)
    for index, case in enumerate(CASES[world]):
        gradients, parameters, losses = _undivided(case)
        seen: set[str] = set()
        trained: set[str] = set()
        for rank in range(world):
            mine, after, told = by_rank[rank][index]
            # Relative: at a loss of 14 two neighbouring numbers of 32 bits are 1e-6 apart.
            assert told == pytest.approx(losses, rel=1e-6)
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
    _, batch, _, _ = built("decoder")
    trained = _Trained("decoder", StageEnds((3, 7), ONE_ONE, 4, 2), 2, "sgd")
    told = []
    model, pipeline = trained.model, trained.pipeline
    before = [p.detach().clone() for p in pipeline.trainable()]
    scale = model.norm.weight if "norm.weight" in dict(model.named_parameters()) else None
    if scale is not None:
        kept = scale.detach().clone()
        scale.data.fill_(math.inf)
    shorter = {name: t[:, :5] if pipeline.stage else t for name, t in batch.items()}
    for bad in (batch, shorter, {**batch, "labels": batch["labels"] * 0 - 100}):
        try:
            trained.step(bad)
        except (NonFiniteLossError, BatchError) as error:
            told.append(f"{type(error).__name__}: {error}")
        if scale is not None:
            scale.data.copy_(kept)
    assert all(torch.equal(a, b) for a, b in zip(before, pipeline.trainable(), strict=True))
    losses = [trained.forward_backward(batch)]
    pipeline.clear(accumulates=True)
    # Fewer samples: fewer micro-batches, or smaller ones.
    for samples in (6, 3, 2):
        few = {name: t[-samples:] for name, t in batch.items()}
        losses.append(trained.forward_backward(few))
        pipeline.clear(accumulates=True)
    return [*told, *map(str, losses)]


@pytest.mark.slow
def test_what_one_rank_finds_stops_all_of_them_and_smaller_batches_are_taken() -> None:
    model, batch, loss_fn, _ = built("decoder")
    losses = [loss_fn(model, {name: t[-n:] for name, t in batch.items()}).item() for n in (8, 6, 3, 2)]
    for told in run_ranks(_troubles, 2):
        assert "the loss is nan" in told[0] or "the loss is inf" in told[0]
        assert (
            "differ in more than their number of samples ([ids int64[4, 6], labels int64[4, 6]], [ids int64[4, 5]"
            in told[1]
        )
        assert "nothing in the batches of all 2 ranks counts for the loss" in told[2]
        assert list(map(float, told[3:])) == pytest.approx(losses, rel=1e-6)


def _silent(said: str) -> str:
    """In a rank: a step; then the other rank computes nothing until this one has given up."""
    _, batch, _, _ = built("sequential")
    trained = _Trained("sequential", StageEnds((2, 4), GPIPE, 2, 4), 2, "sgd")
    trained.step(batch)
    trained.pipeline.wait_at_most(timedelta(seconds=1))
    trained.step(batch)
    own = trained.part(batch)
    try:
        trained.pipeline.prepare(own)
        if trained.pipeline.stage:
            trained.pipeline.forward_backward(own, lambda _: nullcontext())
            return "it has not waited"
        for _ in range(400):
            if Path(said).exists():
                return "the other rank has given up"
            time.sleep(0.1)
        return "the other rank waits"
    except RuntimeError as error:
        Path(said).touch()
        return str(error)


def test_a_rank_waits_for_messages_of_another_stage_as_long_as_it_was_told(tmp_path: Path) -> None:
    silent, waited = run_ranks(_silent, 2, str(tmp_path / "said"), together=False)
    assert silent == "the other rank has given up"
    # gloo's words for it: of the message that waited longest, or of another one on the same pair of ranks, which it closes.
    assert "Timed out" in waited or "Application timeout" in waited


def test_a_cut_for_other_ranks_or_places_is_refused() -> None:
    model, *_ = built("decoder")
    calls = _cut("decoder", 4)
    with pytest.raises(InputError, match="cut into 3 stages for the schedule 1f1b and there are 2 ranks"):
        check_ranks(StageEnds((2, 4, 7), ONE_ONE, 4), 2)
    with pytest.raises(InputError, match="the model has 7 parts"):
        check_calls(calls, Division.of(model, calls, StageEnds((2, 6), ONE_ONE, 4)))
    refused = replace(calls, refused=("", "a reason", *[""] * 5))
    with pytest.raises(InputError, match="cannot be cut after words: a reason"):
        check_calls(refused, Division.of(model, calls, StageEnds((1, 7), ONE_ONE, 4)))


def test_tied_weights_are_held_by_both_of_their_ranks() -> None:
    model, *_ = built("tied")
    holders = Division.of(model, _cut("tied", 4), StageEnds((2, 4, 7), ONE_ONE, 4)).holders(3)
    assert holders["words.weight"] == (0, 2)
    assert holders["blocks.1.out.weight"] == (1,)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(BatchError, match="does not divide into 3"):
        equal_micro_batches(rows(), 3)
