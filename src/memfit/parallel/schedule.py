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
from memfit.sharding.receiving import receive_ahead
from memfit.step.device import device_of
from memfit.values.stages import Schedule

# Received into memory of their own, which is let go of when their micro-batch is through; before that torch had memory for all of them throughout.
MESSAGES_ARE_RELEASED: Final = torch.torch_version.TorchVersion(torch.__version__) >= "2.15"

_TAG: Final = 8192  # of the first message; those of agreements (`memfit.sharding.agreement`), which may be of the same group, are below

Region = Callable[[], AbstractContextManager[object]]
Arrived = Callable[[int], None]
AfterFirst = Callable[[], None]


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


def _weighted(loss: Tensor, weight: float) -> Tensor:
    """A loss that counts for a share of the whole: as it is, and its gradient that much of what it would be."""
    loss.register_hook(lambda gradient: gradient * weight)
    return loss


@dataclass(slots=True)
class _Turns:
    """The micro-batches of a step; an attribute of a module takes longer to set.

    Attributes:
        parts, weights, around, arrived, after_first: as for `Running.step`, of one stage.
        next: the one that comes next.
    """

    parts: Sequence[Batch]
    weights: Sequence[float]
    around: AroundForward
    arrived: Arrived
    after_first: AfterFirst
    next: int = 0


class _InTurn(nn.Module):
    """A stage whose micro-batches come in their order.

    Attributes:
        turns: of the step, while it runs.
    """

    def __init__(self, stage: StageModule, position: int, region: Region) -> None:
        super().__init__()
        self.stage = stage
        self.turns: _Turns | None = None
        self._position, self._region = position, region

    def wait(self) -> None:
        """Until the next micro-batch is there."""
        assert self.turns is not None, "it was begun"
        self.turns.arrived(self.turns.next)

    def after_first(self) -> None:
        """The first forward has run."""
        assert self.turns is not None, "it was begun"
        self.turns.after_first()

    def forward(self, *received: Tensor) -> Any:
        turns = self.turns
        assert turns is not None, "it was begun"
        index, turns.next = turns.next, turns.next + 1
        with turns.around(self._position), self._region():
            result = self.stage(turns.parts[index], *received)
        return _weighted(result, turns.weights[index]) if self.stage.is_last else result


class _TimedStage(PipelineStage):
    """torch's stage, with the seconds in which it computes; on a GPU those in which the host hands it work.

    Args:
        args, kwargs: of torch's stage.
        tag: of messages to stage 0, forward; of others more. None where nothing is received ahead.
    """

    busy_seconds = 0.0

    submod: _InTurn  # as torch calls it

    def __init__(self, *args: Any, tag: int | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tag = tag
        # By whether backward reads it, and by micro-batch.
        self._coming: dict[tuple[bool, int], list[dist.Work]] = {}

    def begin(self) -> None:
        """Begin to receive what forwards of the next step read; what backwards read follows the first forward, which is not to wait for that."""
        if not self._coming:
            self.receive_ahead(backward=False)

    def end(self) -> None:
        """A step is over, and all that was to come has come."""
        self._coming = {}

    def receive_ahead(self, *, backward: bool) -> None:
        """Begin to receive all messages of a step that forward or backward reads, each into the memory that there is for it.

        In the first step, which makes that memory, torch does. Its schedules begin when they are about to read a message, so that a stage that was through
        waited for one that still computed.
        """
        if self._tag is None:
            return
        ops_of = super().get_bwd_recv_ops if backward else super().get_fwd_recv_ops
        for number in self.grad_recv_info if backward else self.args_recv_info:
            ops = self._tagged(ops_of(number), self.stage_index, backward=backward)
            self._coming[backward, number] = [receive_ahead(op.tensor, op.group_peer, op.group, op.tag) for op in ops]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        coming = (False, fwd_chunk_id) in self._coming
        return [] if coming else self._tagged(super().get_fwd_recv_ops(fwd_chunk_id), self.stage_index)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        coming = (True, bwd_chunk_id) in self._coming
        return [] if coming else self._tagged(super().get_bwd_recv_ops(bwd_chunk_id), self.stage_index, backward=True)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._tagged(super().get_fwd_send_ops(fwd_chunk_id), self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._tagged(super().get_bwd_send_ops(bwd_chunk_id), self.stage_index - 1, backward=True)

    def _tagged(self, ops: list[dist.P2POp], receiver: int, *, backward: bool = False) -> list[dist.P2POp]:
        """Two ranks may send each other what several stages read, in an order that is not that in which it is read."""
        if self._tag is not None:
            for op in ops:
                op.tag = self._tag + 2 * receiver + backward
        return ops

    def _wait(self, number: int, *, backward: bool) -> None:
        for work in self._coming.get((backward, number), ()):
            work.wait()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._wait(fwd_chunk_id, backward=False)
        self.submod.wait()
        started = time.perf_counter()
        try:
            given = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            self.busy_seconds += time.perf_counter() - started
        if not fwd_chunk_id:
            self.receive_ahead(backward=True)
            self.submod.after_first()
        return given

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._wait(bwd_chunk_id, backward=True)
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
        number: of this among those that the pipeline has made. Its messages are its own: a step that failed may have left some that nobody receives.

    Attributes:
        busy_seconds, seconds: of the last step, in which something was computed here, and until this rank was through.
    """

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        ends: StageEnds,
        group: dist.ProcessGroup,
        region: Region = nullcontext,
        number: int = 0,
    ) -> None:
        self._tags = dist.get_backend(group) == dist.Backend.GLOO and not MESSAGES_ARE_RELEASED
        self.busy_seconds = self.seconds = 0.0
        self._number = ends.micro_batches
        self._is_last = any(stage.is_last for stage in stages.values())
        self._in_turn = [_InTurn(stage, position, region) for position, stage in enumerate(stages.values())]
        device = device_of(next(iter(stages.values())).model)
        self._stages = [
            _TimedStage(
                turn,
                stage,
                len(ends.ends),
                device,
                input_args=_examples(turn.stage.received),
                output_args=(torch.empty((), dtype=turn.stage.loss_type, device="meta", requires_grad=True),)
                if turn.stage.is_last
                else _examples(turn.stage.sent),
                group=group,
                tag=_TAG + 2 * len(ends.ends) * number if self._tags else None,
            )
            for stage, turn in zip(stages, self._in_turn, strict=True)
        ]
        how: dict[str, Any] = {"loss_fn": lambda output, _: output, "scale_grads": False}
        self._schedule: Any
        if ends.schedule is Schedule.INTERLEAVED:
            self._schedule = ScheduleInterleaved1F1B(self._stages, ends.micro_batches, **how)  # type: ignore[arg-type]
        else:
            kind = ScheduleGPipe if ends.schedule is Schedule.GPIPE else Schedule1F1B
            self._schedule = kind(self._stages[0], ends.micro_batches, **how)

    @property
    def any_order(self) -> bool:
        """Whether messages may be sent in another order than received: each has its tag, and torch has sent what it sends before the first step."""
        return self._tags and all(stage.args_recv_info for stage in self._stages)

    def begin(self) -> None:
        """Begin to receive what other stages send in the next step; may be called again where that has not been taken."""
        for stage in self._stages:
            stage.begin()

    def step(
        self,
        micro_batches: Mapping[int, Sequence[Batch]],
        weights: Sequence[float],
        around: AroundForward,
        arrived: Arrived,
        after_first: AfterFirst,
    ) -> float:
        """Forward and backward of all micro-batches.

        Args:
            micro_batches: of each stage, by number; as many as the schedule is for.
            weights: what the loss of each counts for.
            around: as for `PipelinedModel.forward_backward`.
            arrived: waits until a micro-batch is there, by its number.
            after_first: called when a first forward has run, of each stage: what need not be done before.

        Returns:
            The sum of the weighted losses, where the last stage is here; else 0.
        """
        for stage, turn, parts in zip(self._stages, self._in_turn, micro_batches.values(), strict=True):
            turn.turns = _Turns(parts, weights, around, arrived, after_first)
            stage.busy_seconds = 0.0
        losses: list[Tensor] = []
        # Nothing is compared with it; it tells torch's schedule that there is a loss.
        target = torch.zeros(self._number, device="meta") if self._is_last else None
        started = time.perf_counter()
        self._schedule.step(target=target, losses=losses if self._is_last else None, return_outputs=False)
        self.seconds = time.perf_counter() - started
        self.busy_seconds = sum(stage.busy_seconds for stage in self._stages)
        for stage, turn in zip(self._stages, self._in_turn, strict=True):
            stage.end()
            turn.turns = None
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
