"""The largest batch, and the longest samples, that fit into a number of bytes without dividing the batch: found on captures, nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture.trace_source import TraceSource
from memfit.errors import BatchError, CaptureError, InputError
from memfit.lower_tiers import requested
from memfit.offers import planning_for
from memfit.planner.timeline import Recomputations, Timeline
from memfit.progress import Progress, tell
from memfit.step.given import check_sample
from memfit.step.program import OptimizerFactory, default_optimizer
from memfit.values.request import Budget
from memfit.values.trace import Trace

MOST_SAMPLES: Final = 1 << 16
MOST_POSITIONS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size that fits.

    Attributes:
        size: samples of a batch, or positions (tokens) of a sample; 0 where not even one fits.
        needed_bytes: of the smallest plan at that size; of size 1 where that does not fit.
        limited: there was nothing larger to try: the size is the most that was asked for, or that the model takes.
    """

    size: int
    needed_bytes: int
    limited: bool = False


def largest_batch(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    budget: Budget = "80%",
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    most: int = MOST_SAMPLES,
    progress: Progress | None = None,
    **constraints: Any,
) -> Largest:
    """The largest batch that fits as a whole, by whatever recomputation, offloading and other techniques the constraints leave open.

    Accumulated over micro-batches any batch is possible whose parts fit; this is the largest part, and the largest batch of models that do not divide theirs.

    Args:
        model, sample, loss_fn, budget, optimizer, progress: as for `memfit.plan`. The samples of `sample` are repeated or left out; one will do.
        most: samples beyond which nothing is tried.
        constraints: host_budget, disk_budget, allow, freeze, fixed, clip_norm and device, as for `memfit.plan`.

    Raises:
        InputError, BudgetError, CaptureError: as for `memfit.plan`.
    """
    return _largest(
        _Sized(model, loss_fn, optimizer, budget, constraints, progress, "batch"), sample, batches.repeated, most
    )


def largest_length(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    budget: Budget = "80%",
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    most: int | None = None,
    progress: Progress | None = None,
    **constraints: Any,
) -> Largest:
    """The longest samples that fit at the sample's number of samples, the batch undivided.

    Args:
        model, loss_fn, budget, optimizer, progress: as for `memfit.plan`.
        sample: as for `memfit.plan`, of sequences: every tensor of integers with two dimensions or more has positions along dimension 1.
        most: positions beyond which nothing is tried; None for what the model's configuration says (`max_position_embeddings`).
        constraints: as for `largest_batch`.

    Raises:
        InputError, BudgetError, CaptureError: as for `memfit.plan`; or the sample has no positions along dimension 1.
    """
    taken = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    most = most or (taken if isinstance(taken, int) else MOST_POSITIONS)
    return _largest(_Sized(model, loss_fn, optimizer, budget, constraints, progress, "length"), sample, of_length, most)


def of_length(sample: Batch, length: int) -> Batch:
    """The samples repeated or cut along dimension 1 to so many positions.

    Raises:
        BatchError: not all tensors with a dimension 1 agree on how many positions there are.
    """
    have = length_of(sample)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != have:
            return tensor
        return tensor.index_select(1, torch.arange(length, device=tensor.device) % have)

    return batches.map_tensors(cut, sample)


def length_of(sample: Batch) -> int:
    """Positions of each sample.

    Raises:
        BatchError: as for `of_length`.
    """
    lengths = {int(t.shape[1]) for t in batches.leaves(sample) if t.dim() > 1 and not t.is_floating_point()}
    if len(lengths) != 1:
        raise BatchError(
            "the batch has no one length along dimension 1: largest_length is for sequences whose tensors of integers are [samples, positions]"
        )
    return lengths.pop()


@dataclass(frozen=True, slots=True)
class _Sized:
    """What stays the same while sizes are tried."""

    model: nn.Module
    loss_fn: LossFunction | None
    optimizer: OptimizerFactory | None
    budget: Budget
    constraints: Mapping[str, Any]
    progress: Progress | None
    what: str

    def needed(self, sample: Batch, size: int) -> int:
        """Bytes of the smallest plan with this sample."""
        tell(self.progress, f"trying a {self.what} of {size}", 0.5)
        fixed = {"micro_batches": 1, **(self.constraints.get("fixed") or {})}
        request = requested(self.model, **{**self.constraints, "fixed": fixed})
        source = TraceSource(self.model, sample, self.loss_fn, self.optimizer, request.clip_norm, request.device)
        return planning_for(source, request).smallest()[0]

    def capacity(self) -> int:
        """The budget in bytes."""
        known = {name: self.constraints[name] for name in ("device",) if name in self.constraints}
        request = requested(self.model, budget=self.budget, **known)
        assert request.budget is not None
        return request.budget.bytes


def _largest(sized: _Sized, sample: Batch, resized: Callable[[Batch, int], Batch], most: int) -> Largest:
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise InputError(f"most={most!r}: a whole number of at least 1 is needed")
    check_sample(sample)
    capacity = sized.capacity()
    start = min(most, batches.size(sample) if sized.what == "batch" else length_of(sample))
    return search_largest(lambda size: sized.needed(resized(sample, size), size), capacity, start, most)


def search_largest(
    needed: Callable[[int], int],
    capacity: int,
    start: int,
    most: int,
    *,
    every: int = 1,
    likely: Callable[[], int] = lambda: 0,
) -> Largest:
    """The largest size whose bytes fit, where more never takes less: guessed by the line through the two nearest sizes known.

    Args:
        needed: bytes of a size; a CaptureError stands for one that the model does not take.
        capacity: bytes that there are.
        start: the first to be tried.
        most: sizes above it are not tried.
        every: sizes are told apart no finer than this.
        likely: the largest size that a plan seen so far would fit at; 0 where that is not known. It is tried next, and then the one above it.
    """
    known: dict[int, int] = {}
    fits, too_large = 0, most + 1
    size, before_that = start, 0
    while True:
        try:
            known[size] = needed(size)
            inside = known[size] <= capacity
        except CaptureError:
            if size == start:
                raise
            inside = False
        before = too_large - fits
        fits, too_large = (max(fits, size), too_large) if inside else (fits, min(too_large, size))
        slow = too_large <= most and 2 * (too_large - fits) > before
        if too_large - fits <= max(1, every) or fits >= most:
            break
        said = likely()
        if fits < said < too_large or (fits == said != before_that):
            before_that = said
            size = min(max(said, fits + 1), too_large - 1)
            continue
        # What the smallest plan needs is no line: where that takes off less than half of what is open, the next is its middle.
        size = (fits + too_large) // 2 if slow else _next(known, capacity, fits, too_large, every)
    if fits == 0:
        return Largest(0, known.get(1, min(known.values())))
    return Largest(fits, known[fits], limited=fits >= most)


def _next(known: Mapping[int, int], capacity: int, fits: int, too_large: int, every: int) -> int:
    """Where the line says that the capacity is reached, strictly between what fits and what does not."""
    nearest = sorted(known, key=lambda size: abs(known[size] - capacity))[:2]
    if len(nearest) < 2:
        guess = 2 * nearest[0] if known[nearest[0]] <= capacity else nearest[0] // 2
    else:
        a, b = sorted(nearest)
        slope = (known[b] - known[a]) / (b - a)
        guess = int(a + (capacity - known[a]) / slope) if slope > 0 else 2 * b
        if guess == fits:
            guess = fits + every
    guess -= guess % every
    # What has been tried and failed for another reason leaves halves.
    return min(max(guess, fits + 1), too_large - 1)


class BytesBySize:
    """What a plan takes at other sizes than the one that it was made for: every moment lies on the line through two.

    Args:
        timelines: of the step in two sizes, of the same operations.
        sizes: these.
    """

    def __init__(self, timelines: Sequence[Timeline], sizes: Sequence[int]) -> None:
        self.timelines, self.sizes = timelines, sizes

    def largest(self, recomputations: Recomputations, capacity: int, most: int) -> int:
        """The largest size up to `most` at which the plan fits; 0 where it fits at none."""
        low, high = (timeline.evaluate(recomputations).levels for timeline in self.timelines)
        each = (high - low) / (self.sizes[1] - self.sizes[0])
        none = low - each * self.sizes[0]
        grows = each > 0
        if (none[~grows] > capacity).any():
            return 0
        limits = (capacity - none[grows]) / each[grows]
        return max(0, min(most, int(limits.min()))) if len(limits) else most


def of_the_same_operations(first: Trace, second: Trace) -> bool:
    """Whether two steps differ in sizes alone."""
    names = [[(op.name, op.phase) for op in trace.operations] for trace in (first, second)]
    return names[0] == names[1] and first.events == second.events and len(first.storages) == len(second.storages)


def between(first: Trace, second: Trace, sizes: Sequence[int], size: int) -> Trace:
    """The step of another size from those of two sizes: bytes and seconds of every storage and operation on the line through both.

    Sizes of tensors are affine in the number of samples, and so is what roofline models say of seconds but for the smallest operations.

    Args:
        first, second: of the same operations.
        sizes: theirs.
        size: that is asked for.

    Raises:
        CaptureError: they do not show the same operations.
    """
    if not of_the_same_operations(first, second):
        raise CaptureError("this model runs other operations for another size of batch")
    share = (size - sizes[0]) / (sizes[1] - sizes[0])

    def at(a: int, b: int) -> int:
        return max(0, -int(-(a + (b - a) * share) // 1))

    storages = tuple(
        replace(a, bytes=at(a.bytes, b.bytes)) for a, b in zip(first.storages, second.storages, strict=True)
    )
    operations = tuple(
        replace(
            a,
            seconds=max(0.0, a.seconds + (b.seconds - a.seconds) * share),
            workspace_bytes=at(a.workspace_bytes, b.workspace_bytes),
        )
        for a, b in zip(first.operations, second.operations, strict=True)
    )
    return replace(first, storages=storages, operations=operations)
