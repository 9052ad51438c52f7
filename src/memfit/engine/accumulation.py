"""Micro-batches: how a plan splits a batch, the share of each in the loss, and the running totals of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch
from memfit.errors import BatchError
from memfit.sharding.sharded import ShardedModel
from memfit.step.program import non_finite
from memfit.values.plan import Plan
from memfit.values.report import StepRecord

# Of a step: how many micro-batches this rank has and what they count for, and in return the same of all ranks.
Told = Callable[[int, int], list[list[int]]]


def micro_batches_of(plan: Plan, batch: Batch) -> list[Batch]:
    """The micro-batches that a plan runs a batch in; a smaller batch than planned may be fewer. What the plan divides is divided, and nothing else.

    Raises:
        BatchError: something that the plan divides is longer than a micro-batch and not as long as the batch, as in ragged batches.
    """
    if plan.choices.micro_batches == 1:
        return [batch]
    total, most = batches.size(batch), plan.choices.micro_batch_size
    whole = batches.undivided(plan.signature)
    for name, leaf in batches.named_leaves(batch).items():
        if name not in whole and leaf.dim() and leaf.shape[0] not in {total, min(leaf.shape[0], most)}:
            raise BatchError(
                f"{name!r} has a length of {leaf.shape[0]} in a batch of {total} samples, and both were as long in the sample, so the plan counts on dividing "
                'it, which cannot be done here: plan with fixed={"micro_batches": 1}, or with a sample in which they differ as in the data. It has not run'
            )
    return batches.split(batch, batches.micro_batch_sizes(total, -(-total // most)), whole)


def weighted_micro_batches(plan: Plan, batch: Batch) -> list[tuple[Batch, float]] | None:
    """The micro-batches of a batch and the share of each in its loss; None where it is run whole.

    One in which nothing counts (all its labels are masked) is left out: its own mean is 0/0.
    """
    split = micro_batches_of(plan, batch)
    if len(split) == 1:
        return None
    shares = batches.shares(split, plan.choices.weights) or [1.0 / len(split)] * len(split)
    return [(micro_batch, share) for micro_batch, share in zip(split, shares, strict=True) if share != 0.0]


def weighted_on_ranks(plan: Plan, split: Sequence[Batch], ranks: int, told: Told) -> list[tuple[Batch, float]]:
    """This rank's micro-batches of a step, each with its weight: its share in the loss of all ranks' micro-batches, times the number of ranks.

    Gradients are averaged over ranks; so the mean of these weights is what makes it the mean over samples, or tokens, of all. Every rank runs as many
    micro-batches, as the others wait for its part in collectives: a rank that has fewer repeats one with a weight of 0, as one has in which nothing counts.

    Args:
        plan: of the step.
        split: this rank's micro-batches.
        ranks: how many there are.
        told: `Agreement.counts`, asked once in a step.

    Raises:
        BatchError: nothing in the whole batch counts; all ranks raise it.
    """
    how = plan.choices.weights
    summed = how == "sum"
    counts = [] if summed else [batches.counted(micro_batch, how) for micro_batch in split]
    of_ranks = told(len(split), sum(counts))
    repeated = [(split[0], 0.0)] * (max(number for number, _ in of_ranks) - len(split))
    if summed:  # over all ranks
        return [*repeated, *((micro_batch, float(ranks)) for micro_batch in split)]
    total = sum(counted for _, counted in of_ranks)
    if not total:
        raise BatchError(
            f"nothing in the batches of all {ranks} ranks counts for the loss (it is weighted by {how}): nothing was changed"
        )
    own = [(micro_batch, ranks * count / total) for micro_batch, count in zip(split, counts, strict=True)]
    return [*repeated, *own]


@dataclass(slots=True)
class Accumulated:
    """Running totals over the micro-batches of a step.

    Attributes:
        loss: weighted.
        micro_batches: run.
        recomputations: operations run again.
        divergences: of forwards from the plan.
        last: loss of the last one, a tensor as in the capture; it must be freed before the next one's forward.
        waiting: the share of the passes in which this rank of a pipeline waited for others.
        unit, counted: where the total is not known in advance: what the first micro-batch counts for, and all so far.
    """

    loss: float = 0.0
    micro_batches: int = 0
    recomputations: int = 0
    divergences: list[str] = field(default_factory=list)
    last: torch.Tensor | None = None
    waiting: float | None = None
    unit: int = 0
    counted: int = 0

    def add_uncounted(self, micro_batches: Iterable[Batch], how: str, run: Callable[[Batch, float], None]) -> None:
        """Run micro-batches weighted in units of the first one, since the total is not known yet; those in which nothing counts are left out.

        Args:
            micro_batches: those of one batch of a loader.
            how: what the loss averages over (`Choices.weights`).
            run: forward and backward of a micro-batch, with its weight.
        """
        for micro_batch in micro_batches:
            count = batches.counted(micro_batch, how)
            self.unit = self.unit or count
            self.counted += count
            if count:
                run(micro_batch, count / self.unit)

    def divide(self, model: nn.Module, how: str) -> None:
        """All have been run in units of the first one: divide loss and gradients by what they count for, once.

        Raises:
            BatchError: nothing in them counts.
        """
        if not self.counted:
            raise BatchError(
                f"{self.micro_batches or 'no'} micro-batches were handed over, and nothing in them counts for the loss (it is weighted by {how}): "
                "nothing was changed"
            )
        share = 1.0 if how == "sum" else self.unit / self.counted  # a sum stays a sum
        self.loss *= share
        if share != 1.0:
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], share)

    def agree(self, sharded: ShardedModel, *, check_finite: bool) -> None:
        """All micro-batches of this rank have been run: the loss becomes that of all ranks. All of them have to call it.

        Args:
            sharded: the model as this rank has it.
            check_finite: where the loss of a rank is NaN or infinite, all of them raise.

        Raises:
            NonFiniteLossError: as asked for.
            EngineError: a rank lacks a gradient, or has failed; all of them raise.
        """
        own, agreement = self.loss, sharded.agreement
        finite = not check_finite or math.isfinite(own)
        self.loss, trouble = agreement.losses(own, finite=finite, lacking=sharded.lacking)
        if trouble is None:
            return
        rank, lacking = trouble
        if lacking is not None:
            sharded.raise_lacking(rank, lacking)
        if rank == agreement.rank:
            raise non_finite(f"the loss of this rank, {rank}, is {own}")
        raise non_finite(f"the loss of rank {rank} is infinite or no number")

    def record(self, *, skipped: bool) -> StepRecord:
        """Of the step; its number and its seconds are not known here."""
        return StepRecord(
            0,
            self.loss,
            0.0,
            self.micro_batches,
            recomputations=self.recomputations,
            divergences=tuple(self.divergences),
            skipped=skipped,
            waiting=self.waiting,
        )
