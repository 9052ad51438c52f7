"""A trainer's step that several ranks run: planned on one for all, shared out by torch's engines, and where the trainer's loop has to let them in.

The trainer has launched the ranks and made their group; it does not wrap the model. What its loop does between forward and update is done here as the engine
of the plan does it: gradients are brought together in the last backward, clipped by the norm of all of them, and let go after the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from memfit import api
from memfit.batches import Batch, LossFunction
from memfit.capture.trace_source import TraceSource, machine_of
from memfit.devices import plan_sharded, several_devices
from memfit.engine.engine import Engine
from memfit.errors import InputError
from memfit.progress import Progress
from memfit.ranks import planned_together, rehearsed_together
from memfit.sharding.sharded import ShardedModel
from memfit.step.program import OptimizerFactory
from memfit.values.plan import Plan
from memfit.values.request import Request
from memfit.window import Window, plan_window


def ranks_here() -> int:
    """How many processes train together; 1 where this one is alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def refuse_alone(sharding: str) -> None:
    """Refuse a way of sharing the step out in a process that is alone.

    Raises:
        InputError: it is.
    """
    if ranks_here() == 1:
        raise InputError(
            f"fixed sharding={sharding!r}: this process is alone, so there is nobody to share the step out with: start several (torchrun "
            "--nproc-per-node 2, or accelerate launch --num_processes 2), or leave it out"
        )


def plan_window_on_ranks(window: Window, request: Request, progress: Progress | None = None) -> Plan:
    """The fastest way of sharing a window's step out among the ranks of this group, made on rank 0 and told to all.

    Args:
        window: of this rank; of as many batches, of the same shapes, on every rank.
        request: whose budget is that of each rank.
        progress: as for `memfit.plan`.

    Raises:
        InfeasibleError, SplitError, CaptureError, InputError: as for `plan_sharded`; on all ranks.
    """

    def made() -> Plan:
        devices = several_devices(ranks_here(), machine_of(window.model, None))
        source = TraceSource(
            window.model, window.sample, window.loss_fn, window.make_optimizer, request.clip_norm, progress=progress
        )
        return plan_sharded(source, request, devices, lambda asked: plan_window(window, asked, progress, devices))

    # As JSON on rank 0, too: what the plan was made from would keep the whole model beside its shards.
    return Plan.from_json(planned_together(made).to_json())


def fit_on_ranks(
    plan: Plan,
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction,
    optimizer: OptimizerFactory,
    progress: Progress | None = None,
    loader_batches: int = 1,
) -> Engine:
    """The engine of a plan for the ranks of this group, and a step of all of them under the meter.

    Args:
        plan: of `plan_window_on_ranks`.
        model: the same on every rank.
        sample: this rank's.
        loss_fn: the trainer's own forward and loss.
        optimizer: makes one like the trainer's over what this rank has.
        progress: as for `memfit.plan`.
        loader_batches: batches like the sample that a step takes one after the other.

    Raises:
        BatchError, InfeasibleError: as for `memfit.fit`; on all ranks.
    """
    engine = api.apply(plan, model, loss_fn, optimizer)
    rehearsed_together(engine, sample, progress, loader_batches)
    return engine


class SharedStep:
    """The step in progress of a model that is shared out, in a trainer's loop.

    Args:
        sharded: the model as this rank has it.
        accumulates: a step has several micro-batches.
    """

    def __init__(self, sharded: ShardedModel, *, accumulates: bool) -> None:
        self.sharded = sharded
        self._accumulates = accumulates
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Forward and backward of a micro-batch run inside."""
        with self.sharded.micro_batch(last=last), self.sharded.telling_of_failure():
            yield
        if last:
            self.sharded.collect()

    def updated(self) -> None:
        """After the update: the gradients are let go.

        Those that are views of buckets stay; they are out of sight until the trainer has cleared gradients, since it would free them.
        """
        self.sharded.clear(accumulates=self._accumulates)
        self._gradients = [(p, p.grad) for p in self.sharded.parameters() if p.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def cleared(self) -> None:
        """The trainer has cleared gradients."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []


def in_turns(sharded: ShardedModel, own: Sequence[int | None]) -> list[int | None]:
    """What all ranks counted of their micro-batches, in the order in which a sampler deals them out: the first of each rank, then the second of each."""
    of_all = sharded.agreement.of_all(list(own))
    return [of_one[number] for number in range(len(own)) for of_one in of_all]


def own_of(sharded: ShardedModel, all_of_them: Sequence[float]) -> list[float]:
    """Of values in that order, this rank's."""
    return list(all_of_them[sharded.agreement.rank :: sharded.ranks])
