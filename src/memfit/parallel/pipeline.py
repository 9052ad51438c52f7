"""A pipeline step on several ranks: torch's own schedules over the stages of a model that was cut, then one update for all.

Built on `torch.distributed.pipelining` (stages built by hand, static shapes): schedules, buffers and messages are its own. What it leaves to its user is here:
a stage is the model's own forward, micro-batches count for their tokens, a parameter of several stages gets the sum of their gradients, the gradient is
clipped by the norm over all stages, and a loss that is not finite stops all ranks before the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.errors import BatchError, InputError, NonFiniteLossError
from memfit.parallel.stage_module import StageModule, leave_to_other_stages
from memfit.step.device import device_of
from memfit.step.part_calls import PartCalls
from memfit.step.program import OptimizerFactory, model_tensors, state_tensors
from memfit.values.stages import Schedule

AroundForward = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class StageEnds:
    """Where a model is cut.

    Attributes:
        ends: of each stage, the call of a part before which it ends; stage s is on rank s modulo the number of ranks.
        schedule, micro_batches: how a step runs them.
    """

    ends: tuple[int, ...]
    schedule: Schedule
    micro_batches: int

    def range_of(self, stage: int) -> tuple[int, int]:
        """The calls of a stage."""
        return (self.ends[stage - 1] if stage else 0), self.ends[stage]


class _InTurn(nn.Module):
    """A stage whose micro-batches come in their order."""

    def __init__(self, stage: StageModule, around: AroundForward) -> None:
        super().__init__()
        self.stage = stage
        self._around = around
        self._parts: Sequence[Batch] = ()
        self._weights: Sequence[float] = ()
        self._next = 0

    def begin(self, parts: Sequence[Batch], weights: Sequence[float]) -> None:
        self._parts, self._weights, self._next = parts, weights, 0

    def forward(self, *received: Tensor) -> Any:
        index, self._next = self._next, self._next + 1
        with self._around():
            result = self.stage(self._parts[index], *received)
        return result * self._weights[index] if self.stage.is_last else result


class Pipeline:
    """This rank's stages of a model, ready to train.

    Args:
        model: whole, with the same values on every rank. Parameters and buffers that only other ranks use are taken out of it.
        loss_fn: as for `memfit.plan`.
        calls: of the model's parts, for one micro-batch.
        cut: where it is cut, and the schedule.
        optimizer: makes one of this rank's parameters; None to compute gradients only.
        clip_norm: largest norm of the gradient of the whole model.
        weights: what micro-batches count for, in the words of `batches.weightings`.
        around: for each stage of this rank, what its forwards run in (the follower of a plan); None for nothing.
        group: of the ranks; None for all.
        device: None for the model's.

    Attributes:
        stages: of this rank.
        shared: names of the parameters that other ranks have too, with those ranks.

    Raises:
        InputError: the cut is for another number of ranks, or is at a place where the model cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        calls: PartCalls,
        cut: StageEnds,
        optimizer: OptimizerFactory | None,
        *,
        clip_norm: float | None = None,
        weights: str = "samples",
        around: Sequence[AroundForward] | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.cut, self.clip_norm, self.group = model, cut, clip_norm, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.device = device or device_of(model)
        self._weights = weights
        check_cut(calls, cut, self.world)
        mine = range(self.rank, len(cut.ends), self.world)
        holders = holders_of(model, calls, cut, self.world)
        self.shared = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        self._groups = self._groups_of(set(self.shared.values()))
        own = {name: p for name, p in model.named_parameters() if self.rank in holders.get(name, ())}
        self._trained = {name: p for name, p in own.items() if p.requires_grad}
        leave_to_other_stages(model, calls, [cut.range_of(stage) for stage in mine])
        self.parameters = list(self._trained.values())
        self.optimizer = optimizer(iter(self.parameters)) if optimizer is not None else None
        self.stages = [StageModule(model, loss_fn, calls, *cut.range_of(stage)) for stage in mine]
        self._in_turn = [
            _InTurn(stage, around)
            for stage, around in zip(self.stages, around or [nullcontext] * len(mine), strict=True)
        ]
        self._schedule = self._scheduled(list(mine))

    def _groups_of(self, several: set[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        # Every rank makes every group, in one order.
        return {ranks: dist.new_group([self._global(r) for r in ranks]) for ranks in sorted(several)}

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _scheduled(self, mine: Sequence[int]) -> Any:
        def examples(metas: Sequence[Any]) -> tuple[Tensor, ...]:
            return tuple(meta.empty("meta").requires_grad_(meta.requires_grad) for meta in metas)

        made = [
            PipelineStage(
                turn,
                number,
                len(self.cut.ends),
                self.device,
                input_args=examples(turn.stage.received),
                output_args=(torch.empty((), device="meta", requires_grad=True),)
                if turn.stage.is_last
                else examples(turn.stage.sent),
                group=self.group,
            )
            for number, turn in zip(mine, self._in_turn, strict=True)
        ]
        self._pipeline_stages = made
        how: dict[str, Any] = {"loss_fn": lambda output, _: output, "scale_grads": False}
        if self.cut.schedule is Schedule.INTERLEAVED:
            return ScheduleInterleaved1F1B(made, self.cut.micro_batches, **how)  # type: ignore[arg-type]
        kind = ScheduleGPipe if self.cut.schedule is Schedule.GPIPE else Schedule1F1B
        return kind(made[0], self.cut.micro_batches, **how)

    def step(self, batch: Batch) -> float:
        """One optimizer step over the whole batch, which every rank is given alike; its loss.

        Raises:
            BatchError: the batch does not divide into equal micro-batches, or nothing in it counts for the loss.
            NonFiniteLossError: on every rank; nothing was changed.
        """
        loss = self.forward_backward(batch)
        if not math.isfinite(loss):
            self.clear()
            raise NonFiniteLossError(
                f"the loss is {loss}: no rank has taken the step, and parameters and optimizers are as before it. Look at the batch and the learning rate"
            )
        self.update()
        self.clear()
        return loss

    def forward_backward(self, batch: Batch) -> float:
        """Gradients of the whole batch, of this rank's parameters, summed over the ranks that share them; and the loss."""
        parts, weights = equal_micro_batches(batch, self.cut.micro_batches, self._weights)
        for turn in self._in_turn:
            turn.begin(parts, weights)
        losses: list[Tensor] = []
        last = any(stage.is_last for stage in self.stages)
        target = torch.zeros(self.cut.micro_batches) if last else None
        self._schedule.step(target=target, losses=losses if last else None, return_outputs=False)
        loss = torch.stack([one.detach() for one in losses]).sum() if last else torch.zeros((), device=self.device)
        loss = loss.to(torch.float32)
        dist.broadcast(loss, self._global((len(self.cut.ends) - 1) % self.world), group=self.group)
        self._sum_shared()
        return float(loss)

    def _sum_shared(self) -> None:
        for name, ranks in sorted(self.shared.items()):
            parameter = self._trained.get(name)
            if parameter is not None and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self._groups[ranks])

    def present(self, batch: Batch) -> list[Tensor]:
        """What is there on this rank before a step and counts: its part of the model, optimizer state, the batch, buffers for messages."""
        buffers = [
            info.buffer
            for stage in self._pipeline_stages
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in infos
            if isinstance(info.buffer, Tensor)
        ]
        state = state_tensors(self.optimizer) if self.optimizer is not None else []
        model = [*self.model.parameters(), *self.model.buffers(), *model_tensors(self.model)]
        return [*model, *state, *batches.leaves(batch), *buffers]

    def update(self) -> None:
        """Clip by the norm over all ranks, and step this rank's optimizer."""
        if self.clip_norm is not None:
            mine = [p for name, p in self._trained.items() if self.rank == self.shared.get(name, (self.rank,))[0]]
            norm = torch.nn.utils.get_total_norm([p.grad for p in mine if p.grad is not None]).to(self.device)
            squared = norm.float().square()
            dist.all_reduce(squared, group=self.group)
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, squared.sqrt())
        if self.optimizer is not None:
            self.optimizer.step()

    def clear(self) -> None:
        """Let go of the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


def check_cut(calls: PartCalls, cut: StageEnds, ranks: int) -> None:
    """Raise InputError where a model cannot be run so."""
    if len(cut.ends) % ranks or (cut.schedule is not Schedule.INTERLEAVED and len(cut.ends) != ranks):
        raise InputError(
            f"the model is cut into {len(cut.ends)} stages for the schedule {cut.schedule} and there are {ranks} ranks: cut it for as many as there are"
        )
    if list(cut.ends) != sorted(set(cut.ends)) or not cut.ends or cut.ends[-1] != len(calls.calls):
        raise InputError(
            f"stages end before parts {list(cut.ends)}, and the model has {len(calls.calls)} parts: ends rise to that number"
        )
    for end in cut.ends[:-1]:
        if calls.refused[end]:
            raise InputError(f"the model cannot be cut after {calls.calls[end - 1].path}: {calls.refused[end]}")


def holders_of(model: nn.Module, calls: PartCalls, cut: StageEnds, ranks: int) -> dict[str, tuple[int, ...]]:
    """Of each parameter that some stage uses, by name, the ranks that do."""
    found: dict[str, set[int]] = {}
    for stage in range(len(cut.ends)):
        for name in calls.parameters(model, *cut.range_of(stage)):
            found.setdefault(name, set()).add(stage % ranks)
    return {name: tuple(sorted(holding)) for name, holding in found.items()}


def equal_micro_batches(batch: Batch, number: int, how: str) -> tuple[list[Batch], list[float]]:
    """The batch in so many micro-batches of one size, and what each counts for."""
    size = batches.size(batch)
    if size % number:
        raise BatchError(
            f"a batch of {size} samples does not divide into {number} micro-batches of one size, which a pipeline needs: take a multiple of {number}"
        )
    parts = batches.split(batch, [size // number] * number)
    weights = batches.shares(parts, how)
    if weights is None:
        raise BatchError(f"nothing in the batch counts for the loss (weighted by {how}): the step was not taken")
    return parts, weights
