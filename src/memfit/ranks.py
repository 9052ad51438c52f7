"""Several ranks fit one model: the first one plans, all follow its plan, and one real step of them together proves it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from memfit.applying import apply
from memfit.batches import Batch, LossFunction
from memfit.engine.engine import Engine
from memfit.errors import BatchError, InfeasibleError, InputError, MemfitError
from memfit.progress import Progress, tell
from memfit.rehearsal import rehearse
from memfit.sharding.agreement import Agreement
from memfit.sharding.collectives import backend_for
from memfit.step.device import device_of
from memfit.step.program import OptimizerFactory
from memfit.techniques.sharding import way_of
from memfit.units import format_bytes
from memfit.values.plan import Plan


def place() -> tuple[int, int] | None:
    """This process's rank and the number of ranks, as torchrun tells them in the environment; None where it is alone."""
    told = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
    if not all(told) or not (told[0].isdecimal() and told[1].isdecimal()) or int(told[1]) < 2:
        return None
    return int(told[0]), int(told[1])


def refuse_one_device() -> None:
    """Refuse a plan for one device in one rank of several, whose gradients nobody would add up.

    Raises:
        InputError: the process is one of several in a group.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise InputError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()}, and memfit.fit without devices= fits one device: call "
            f"memfit.fit(..., devices={dist.get_world_size()}) in all of them, or memfit.apply with a plan made for devices="
        )


def check_world(number: int) -> tuple[int, int]:
    """This process's rank and the number of ranks, where they are as many as the devices that are planned for.

    Raises:
        InputError: they are not.
    """
    there = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else place()
    if there is None or there[1] != number:
        run = "this process is alone" if there is None else f"this run has {there[1]} ranks"
        raise InputError(
            f"there are {number} devices to train on, and {run}: start one process for each (torchrun --nproc-per-node {number})"
        )
    return there


def fit_together(
    make: Callable[[], Plan],
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    *,
    lower_tier: str | Path | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Join the ranks of this run where they have no group yet, hand them the plan of the first one, and rehearse one step together.

    Args:
        make: makes the plan; called on rank 0 alone, while the others wait for it.
        model: the same on every rank.
        sample: this rank's part of a batch.
        loss_fn, optimizer: as for `memfit.fit`.
        lower_tier, progress: as for `memfit.fit`.

    Raises:
        InputError: the plan is for another number of ranks; on all ranks.
        BatchError: one rank's sample is not as planned; on all ranks, naming that one.
        InfeasibleError: one rank measured more than the budget; on all ranks, naming that one.
    """
    if not dist.is_initialized():
        there = place()
        assert there is not None, "whoever comes here has checked"
        if there[0] == 0:
            found = make()  # where this fails, torchrun ends the others
            make = lambda: found  # noqa: E731 - what was made, told to the others as any other plan
        dist.init_process_group(backend_for(device_of(model)))
    made = planned_together(make)
    check_plan(made, dist.get_world_size())
    engine = apply(made, model, loss_fn, optimizer, lower_tier=lower_tier)
    rehearsed_together(engine, sample, progress)
    return engine


def planned_together(make: Callable[[], Plan]) -> Plan:
    """The plan of rank 0, on all ranks of the group.

    Args:
        make: called on rank 0 alone.

    Raises:
        MemfitError: what rank 0 raised; on all ranks.
    """
    told: list[Any] = [None]
    made: Plan | None = None
    if dist.get_rank() == 0:
        try:
            made = make()
            told = [made.to_json()]
        except MemfitError as error:
            told = [error]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], MemfitError):
        raise told[0]
    return Plan.from_json(told[0]) if made is None else made


def rehearsed_together(
    engine: Engine, sample: Batch, progress: Progress | None = None, loader_batches: int = 1
) -> None:
    """One metered step of all ranks, which leaves everything as it was.

    Args:
        engine: of a plan for as many ranks.
        sample: this rank's part of a batch.
        progress: as for `memfit.fit`.
        loader_batches: as for `rehearse`.

    Raises:
        BatchError, InfeasibleError: as for `fit_together`.
    """
    assert engine.sharded is not None
    _check_sample(engine, sample, engine.sharded.agreement)
    tell(progress, "rehearsing one step", 0.0)
    engine.rehearsal = replace(rehearse(engine, sample, loader_batches), rounds=1)
    _check_peaks(engine, engine.sharded.agreement)


def check_plan(plan: Plan, ranks: int) -> None:
    """Check that a plan is for as many ranks.

    Raises:
        InputError: it is not.
    """
    planned = way_of(plan.choices.sharding)[1] if plan.choices.sharding else 1
    if planned != ranks:
        raise InputError(
            f"the plan is for {planned} rank{'s' if planned != 1 else ''}, and {ranks} were started: start as many as it is for, or plan for "
            f"devices={ranks}"
        )


def _check_sample(engine: Engine, sample: Batch, agreement: Agreement) -> None:
    found: BatchError | None = None
    try:
        engine.plan_for(sample)
    except BatchError as error:
        found = error
    rank = agreement.first(concerned=found is not None)
    if found is not None:
        raise found
    if rank is not None:
        raise BatchError(f"the sample of rank {rank} is not as the plan has it: no rank has begun")


def _check_peaks(engine: Engine, agreement: Agreement) -> None:
    assert engine.rehearsal is not None
    budget = engine.plan.budget_bytes
    measured = engine.rehearsal.measured_peak_bytes
    most = agreement.largest(measured)
    rank = agreement.first(concerned=measured == most)
    if most > budget:
        raise InfeasibleError(
            f"the rehearsal measured a peak of {format_bytes(most)} on rank {rank}, {format_bytes(most - budget)} above the budget of "
            f"{format_bytes(budget)}: no rank has begun. Plan again for that much less, or give a larger budget",
            budget_bytes=budget,
            minimum_bytes=most,
        )
