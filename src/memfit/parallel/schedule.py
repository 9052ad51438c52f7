"""One of torch's pipeline schedules over this rank's stages, for batches of one shape: its buffers, its micro-batches, and how long it computes and waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from memfit.batches import Batch
from memfit.parallel.stage_module import StageModule
from memfit.sharding.pipelined import AroundForward
from memfit.step.device import device_of
from memfit.values.stages import Schedule

# Received into memory of their own, which is let go of when their micro-batch is through; before that torch had memory for all of them throughout.
MESSAGES_ARE_RELEASED: Final = torch.torch_version.TorchVersion(torch.__version__) >= "2.15"

Region = Callable[[], AbstractContextManager[object]]
Arrived = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class StageEnds:
    """Where a model is cut, and how a step runs it.

    Attributes:
        ends: of each stage, the call of a part before which it ends; stage s is on rank s modulo the number of ranks.
        schedule, micro_batches: how a step runs them.
        micro_batch_size: samples in a micro-batch.
    """

    ends: tuple[int, ...]
    schedule: Schedule
    micro_batches: int
    micro_batch_size: int = 1

    def range_of(self, stage: int) -> tuple[int, int]:
        """The calls of a stage."""
        return (self.ends[stage - 1] if stage else 0), self.ends[stage]

    def in_micro_batches(self, number: int) -> StageEnds:
        """The same for a smaller batch: 1F1B needs as many micro-batches as there are stages, and GPipe with fewer holds no more."""
        few = self.schedule is Schedule.ONE_FORWARD_ONE_BACKWARD and number < len(self.ends)
        return replace(self, micro_batches=number, schedule=Schedule.GPIPE if few else self.schedule)


class _Weighted(torch.autograd.Function):
    """A loss that counts for a share of the whole: as it is, and its gradient that much of what it would be."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: float) -> Tensor:
        """The loss."""
        ctx.weight = weight
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Its share."""
        return gradients[0] * ctx.weight, None


class _InTurn(nn.Module):
    """A stage whose micro-batches come in their order."""

    def __init__(self, stage: StageModule, position: int, region: Region) -> None:
        super().__init__()
        self.stage = stage
        self._position, self._region = position, region
        self._parts: Sequence[Batch] = ()
        self._weights: Sequence[float] = ()
        self._around: AroundForward | None = None
        self._arrived: Arrived | None = None
        self._next = 0

    def begin(
        self,
        parts: Sequence[Batch],
        weights: Sequence[float],
        around: AroundForward | None,
        arrived: Arrived | None,
    ) -> None:
        self._parts, self._weights, self._around, self._arrived, self._next = parts, weights, around, arrived, 0

    def end(self) -> None:
        """Let go of them."""
        self.begin((), (), None, None)

    def wait(self) -> None:
        """Until the next micro-batch is there."""
        assert self._arrived is not None, "it was begun"
        self._arrived(self._next)

    def forward(self, *received: Tensor) -> Any:
        assert self._around is not None, "it was begun"
        index, self._next = self._next, self._next + 1
        with self._around(self._position), self._region():
            result = self.stage(self._parts[index], *received)
        return _Weighted.apply(result, self._weights[index]) if self.stage.is_last else result  # type: ignore[no-untyped-call]


class _TimedStage(PipelineStage):
    """torch's stage, with the seconds in which it computes; on a GPU those in which the host hands it work."""

    busy_seconds = 0.0

    submod: _InTurn  # as torch calls it

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.submod.wait()
        started = time.perf_counter()
        try:
            return super().forward_one_chunk(*args, **kwargs)
        finally:
            self.busy_seconds += time.perf_counter() - started

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            given = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            if bwd_chunk_id in self.bwd_cache:
                self.bwd_cache[bwd_chunk_id] = tuple(map(alone, self.bwd_cache[bwd_chunk_id]))
            return given
        finally:
            self.busy_seconds += time.perf_counter() - started


class Running:
    """This rank's part of a schedule.

    Args:
        stages: of this rank, by number.
        ends: the schedule.
        group: the ranks of the pipeline.
        region: makes what the forward of a micro-batch runs inside.

    Attributes:
        busy_seconds, seconds: of the last step, in which something was computed here, and until this rank was through.
    """

    def __init__(
        self, stages: Mapping[int, StageModule], ends: StageEnds, group: dist.ProcessGroup, region: Region = nullcontext
    ) -> None:
        self.busy_seconds = self.seconds = 0.0
        self._number = ends.micro_batches
        self._is_last = any(stage.is_last for stage in stages.values())
        self._in_turn = [_InTurn(stage, position, region) for position, stage in enumerate(stages.values())]
        device = device_of(next(iter(stages.values())).model)
        self._stages = [
            _TimedStage(
                turn,
                number,
                len(ends.ends),
                device,
                input_args=_examples(turn.stage.received),
                output_args=(torch.empty((), device="meta", requires_grad=True),)
                if turn.stage.is_last
                else _examples(turn.stage.sent),
                group=group,
            )
            for number, turn in zip(stages, self._in_turn, strict=True)
        ]
        how: dict[str, Any] = {"loss_fn": lambda output, _: output, "scale_grads": False}
        self._schedule: Any
        if ends.schedule is Schedule.INTERLEAVED:
            self._schedule = ScheduleInterleaved1F1B(self._stages, ends.micro_batches, **how)  # type: ignore[arg-type]
        else:
            kind = ScheduleGPipe if ends.schedule is Schedule.GPIPE else Schedule1F1B
            self._schedule = kind(self._stages[0], ends.micro_batches, **how)

    def step(
        self,
        micro_batches: Mapping[int, Sequence[Batch]],
        weights: Sequence[float],
        around: AroundForward,
        arrived: Arrived,
    ) -> float:
        """Forward and backward of all micro-batches.

        Args:
            micro_batches: of each stage, by number; as many as the schedule is for.
            weights: what the loss of each counts for.
            around: as for `PipelinedModel.forward_backward`.
            arrived: waits until a micro-batch is there, by its number.

        Returns:
            The sum of the weighted losses, where the last stage is here; else 0.
        """
        for turn, parts in zip(self._in_turn, micro_batches.values(), strict=True):
            turn.begin(parts, weights, around, arrived)
        for stage in self._stages:
            stage.busy_seconds = 0.0
        losses: list[Tensor] = []
        # Nothing is compared with it; it tells torch's schedule that there is a loss.
        target = torch.zeros(self._number, device="meta") if self._is_last else None
        started = time.perf_counter()
        self._schedule.step(target=target, losses=losses if self._is_last else None, return_outputs=False)
        self.seconds = time.perf_counter() - started
        self.busy_seconds = sum(stage.busy_seconds for stage in self._stages)
        for turn in self._in_turn:
            turn.end()
        # The mean of no labels is no number, and counts for nothing.
        return sum(weight * float(loss.detach()) for loss, weight in zip(losses, weights, strict=False) if weight)

    def buffers(self) -> list[Tensor]:
        """For messages, of all micro-batches; made in the first step."""
        return [
            info.buffer
            for stage in self._stages
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in infos
            if isinstance(info.buffer, Tensor)
        ]


def alone(gradient: Any) -> Any:
    """What is sent, without the rest of a larger tensor that it is a part of (one half of what a `cat` is given back): it is held until it is gone."""
    part = isinstance(gradient, Tensor) and gradient.untyped_storage().nbytes() > gradient.nbytes
    return gradient.clone() if part else gradient


def _examples(metas: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(meta.empty("meta").requires_grad_(meta.requires_grad) for meta in metas)
