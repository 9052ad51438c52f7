"""Several ranks fit one model: the first one plans, all follow its plan, and one real step of them together proves it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from memfit import batches
from memfit.applying import apply
from memfit.batches import Batch, LossFunction
from memfit.engine.engine import Engine
from memfit.errors import BatchError, EngineError, InfeasibleError, InputError, MemfitError
from memfit.planning import PlansAgain, origin_of
from memfit.progress import Progress, tell
from memfit.rehearsal import REPAIR_ROUNDS, less_by, no_smaller_plan, rehearse, repaired, run_alike, still_above
from memfit.sharding.agreement import Agreement
from memfit.sharding.collectives import backends_for
from memfit.sharding.process_exit import leave_group_at_exit
from memfit.sharding.same_step import FirstLoss, check_same_loss
from memfit.sharding.ways import follow_device
from memfit.step.device import device_of
from memfit.step.program import OptimizerFactory
from memfit.techniques.sharding import way_of
from memfit.units import format_bytes
from memfit.values.plan import Plan
from memfit.values.report import MeasuredRank, Rehearsal

_WHOLE: Final = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# What torchrun sets, and torch.distributed reads.
_MEETING: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SENT_BYTES: Final = 16 << 20  # of one rank's sample, at most


def place() -> tuple[int, int] | None:
    """This process's rank and the number of ranks, as its process group or, where it has none yet, the environment tells them; None where it is alone.

    Raises:
        InputError: the environment makes it one of several that cannot meet.
    """
    if dist.is_available() and dist.is_initialized():
        return (dist.get_rank(), dist.get_world_size()) if dist.get_world_size() > 1 else None
    rank, ranks, host, port = (os.environ.get(name, "") for name in _MEETING)
    if not (rank.isdecimal() and ranks.isdecimal()) or int(ranks) < 2:
        return None
    if not host or not port.isdecimal() or int(rank) >= int(ranks):
        told = ", ".join(f"{name}={value}" for name, value in zip(_MEETING, (rank, ranks, host, port), strict=True))
        raise InputError(
            f"the environment says that this process is one of {ranks}, and not where they meet ({told}): start all of them with torchrun, which sets these, "
            "or set them (ranks from 0 on, and an address and a free port of rank 0's computer); to train in this process alone, unset RANK and WORLD_SIZE"
        )
    return int(rank), int(ranks)


def refuse_one_device() -> None:
    """Refuse a plan for one device in one rank of several, whose gradients nobody would add up.

    Raises:
        InputError: the process is one of several in a group, or that torchrun has started to become one.
    """
    there = place()
    if there is not None:
        rank, ranks = there
        raise InputError(
            f"this process is rank {rank} of {ranks}, and memfit.fit without devices= fits one device: call memfit.fit(..., devices={ranks}) in all of them, "
            "or memfit.apply with a plan made for devices="
        )


def check_world(number: int) -> tuple[int, int]:
    """This process's rank and the number of ranks, where they are as many as the devices that are planned for.

    Raises:
        InputError: they are not.
    """
    there = place()
    if there is None or there[1] != number:
        run = "this process is alone" if there is None else f"this run has {there[1]} ranks"
        raise InputError(
            f"there are {number} devices to train on, and {run}: start one process for each (torchrun --nproc-per-node {number})"
        )
    return there


def join_group(device: torch.device) -> None:
    """Meet the other ranks where the environment says, until this process ends.

    Args:
        device: on which this rank computes.

    Raises:
        EngineError: they were not met: the port is in use, the address is another computer's, or one did not come in time.
    """
    try:
        dist.init_process_group(backends_for(device))
        leave_group_at_exit()
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        rank, ranks, host, port = (os.environ.get(name, "?") for name in _MEETING)
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise EngineError(
            f"rank {rank} of {ranks} has not met the others at {host}:{port} ({reason}): see that all {ranks} were started, each with a rank of its own, that "
            "rank 0 runs at that address, and that nothing else listens on the port; or let torchrun find a free one (--rdzv-backend c10d --rdzv-endpoint "
            "localhost:0)"
        ) from error


def fit_together(
    make: Callable[[Sequence[Batch]], Plan],
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
        make: makes the plan, given what `samples_of_others` gives; called on rank 0 alone, while the others wait for it.
        model: the same on every rank.
        sample: this rank's part of a batch.
        loss_fn, optimizer: as for `memfit.fit`.
        lower_tier, progress: as for `memfit.fit`.

    Raises:
        EngineError: the other ranks were not met.
        InputError: the plan is for another number of ranks; on all ranks.
        BatchError: one rank's sample is not as planned; on all ranks, naming that one.
        InfeasibleError: one rank measured more than the budget, and there is no plan that much smaller; on all ranks, naming that one.
    """
    if not dist.is_initialized():
        join_group(device_of(model))
    follow_device(device_of(model))
    others = samples_of_others(sample)
    made = planned_together(lambda: make(others))
    check_plan(made, dist.get_world_size())
    engine = apply(made, model, loss_fn, optimizer, lower_tier=lower_tier)
    rehearsed_together(engine, sample, progress)
    return engine


def samples_of_others(sample: Batch) -> list[Batch]:
    """On rank 0 its sample with what another rank's has of whole numbers and truth values, for each of those that differ from its own; none elsewhere.

    Such are tokens, masks and lengths, by which forward may run other operations: those of padding, which rank 0's own part may have none of.

    Args:
        sample: of this rank; all ranks call this.
    """
    leaves = batches.leaves(sample)
    whole = [leaf.detach().cpu() if leaf.dtype in _WHOLE and leaf.layout is torch.strided else None for leaf in leaves]
    if sum(leaf.nbytes for leaf in whole if leaf is not None) > SENT_BYTES:
        whole = []
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(whole, gathered, dst=0)
    found = []
    for each in gathered or ():
        if len(each) == len(whole) and all(map(_laid_out_alike, each, whole)) and not all(map(_equal, each, whole)):
            found.append(_with(sample, each))
    return found


def _laid_out_alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is None or other is None or torch.equal(one, other)


def _with(sample: Batch, sent: Sequence[torch.Tensor | None]) -> Batch:
    """The sample with these tensors in place of its own, where there are some."""
    parts = iter(sent)

    def of(own: torch.Tensor) -> torch.Tensor:
        part = next(parts)
        return own if part is None else part.to(own.device)

    return batches.map_tensors(of, sample)


def planned_together(make: Callable[[], Plan]) -> Plan:
    """The plan of rank 0, on all ranks of the group.

    Args:
        make: called on rank 0 alone.

    Raises:
        MemfitError: what rank 0 raised; on all ranks. Another error of the user's own code is raised there, and named on the others.
    """
    told: list[Any] = [None]
    made: Plan | None = None
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            made = make()
            told = [made.to_json()]
        except MemfitError as error:
            told = [error]
        except Exception as error:  # noqa: BLE001 - raised again below, when the others know
            failed = error
            reason = (str(error).strip().splitlines() or [""])[0]
            told = [
                EngineError(
                    f"rank 0 plans for all, and model, loss or optimizer failed there ({type(error).__name__}: {reason}): see what it says"
                )
            ]
    dist.broadcast_object_list(told, src=0)
    if failed is not None:
        raise failed
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
    _rehearsed(engine, sample, engine.sharded.agreement, origin_of(engine.plan), progress, loader_batches)


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


def _rehearsed(
    engine: Engine,
    sample: Batch,
    agreement: Agreement,
    planning: PlansAgain | None,
    progress: Progress | None,
    loader_batches: int,
) -> None:
    """Rehearse; where a rank measures more than the budget, all follow a plan for less, which the first rank makes of the traces that it has.

    Nothing is captured for it, as that needs a process group of its own. Where those traces do not give a plan that is smaller by as much, all ranks raise.

    Args:
        engine, sample: of this rank.
        agreement: of all ranks.
        planning: of the engine's plan; None on the other ranks, and where the plan was made by another process.
        progress: as for `memfit.fit`.
        loader_batches: as for `rehearse`.

    Raises:
        InfeasibleError: as for `fit_together`.
    """
    made = engine.plan
    budget_bytes = target = made.budget_bytes
    known = None if planning is None else planning.as_captured(made)
    for number in range(1, REPAIR_ROUNDS + 1):
        tell(progress, "rehearsing one step", 0.0)
        assert engine.sharded is not None
        engine.loss_by = loss = FirstLoss(engine.sharded.gathered()) if number == 1 else None
        rehearsal = rehearse(engine, sample, loader_batches)
        engine.loss_by = None
        if loss is not None:
            _check_same_loss(engine, sample, agreement, loss.digest, loader_batches)
        own = MeasuredRank(rehearsal.predicted_peak_bytes, rehearsal.measured_peak_bytes, rehearsal.waiting)
        engine.rehearsal = replace(rehearsal, rounds=number, ranks=tuple(agreement.of_all(own)))
        peaks = [rank.measured_peak_bytes or 0 for rank in engine.rehearsal.ranks]
        most = max(peaks)
        where = f" on rank {peaks.index(most)}"
        if most <= budget_bytes:
            return
        if number == REPAIR_ROUNDS:
            raise still_above(most, budget_bytes, where)
        # A plan may take less than it was planned for, and one for a little less than that be the same plan.
        target = less_by(min(target, engine.plan.prediction.peak_bytes), most, budget_bytes)
        again: tuple[Plan | None, InfeasibleError | None] | None = None
        if agreement.rank == 0:
            again = _smaller(known, target, made, replace(engine.rehearsal, measured_peak_bytes=most), where)
        smaller, error = agreement.told(again)
        if error is not None:
            raise error
        assert smaller is not None, "one of the two"
        engine.replace_plan(repaired(made, smaller, most - budget_bytes, target))


def _check_same_loss(engine: Engine, sample: Batch, agreement: Agreement, digest: str, loader_batches: int) -> None:
    """Check that all ranks compute their loss by the same operations: where those of their own samples differ, each takes a step with rank 0's.

    Args:
        engine, sample: of this rank.
        agreement: of all ranks.
        digest: of this rank's loss of its own sample.
        loader_batches: as for `rehearse`.

    Raises:
        InputError: they do not; on all ranks.
    """
    if len(set(agreement.of_all(digest))) == 1:
        return
    own = batches.leaves(sample)
    sent = agreement.told([leaf.detach().cpu() for leaf in own] if agreement.rank == 0 else None)
    if agreement.first(concerned=len(own) != len(sent)) is not None:
        return  # samples that are put together otherwise may be computed otherwise
    assert engine.sharded is not None
    loss = FirstLoss(engine.sharded.gathered())
    run_alike(engine, _with(sample, sent), loader_batches, loss)
    check_same_loss(dict(enumerate(agreement.of_all(loss.digest))))


def _smaller(
    known: PlansAgain | None, target: int, made: Plan, fullest: Rehearsal, where: str
) -> tuple[Plan | None, InfeasibleError | None]:
    """A plan that takes so much less, or why there is none.

    Args:
        known: makes it; None where the plan was made by another process.
        target: bytes to plan for.
        made: the plan that took too much.
        fullest: the rehearsal of the rank that measured most, which `where` names.
    """
    budget_bytes, peak = made.budget_bytes, fullest.measured_peak_bytes
    if known is None:
        return None, InfeasibleError(
            f"the rehearsal measured a peak of {format_bytes(peak)}{where}, {format_bytes(peak - budget_bytes)} above the budget of "
            f"{format_bytes(budget_bytes)}, and the plan was made by another process, so no smaller one can be made here: no rank has begun. Leave the plan "
            "out (--plan), so that it is made here and again for less, or give a larger budget",
            budget_bytes=budget_bytes,
            minimum_bytes=peak,
        )
    try:
        return known.plan(target), None
    except InfeasibleError as error:
        return None, no_smaller_plan(error, fullest, budget_bytes, where)
