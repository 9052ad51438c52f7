"""Rules of thumb: where to cut a chain into segments that are recomputed together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

from memfit.planner.baselines.chain import ChainOperation, OperationKind


def store_all(length: int) -> tuple[int, ...]:
    """One segment: plain training, nothing recomputed."""
    return every_block(length)[:1]


def every_block(length: int) -> tuple[int, ...]:
    """A segment for each stage, as `gradient_checkpointing=True` does with the blocks of a transformer."""
    if length < 1:
        raise ValueError(f"A chain of {length} stages has no segments.")
    return tuple(range(length))


def sqrt_segments(length: int) -> tuple[int, ...]:
    """First stages of about sqrt(length) segments of about equal length, after Chen et al. 2016."""
    num_segments = round(sqrt(len(every_block(length))))
    return tuple(k * length // num_segments for k in range(num_segments))


def segment_operations(length: int, first_stages: Sequence[int]) -> tuple[ChainOperation, ...]:
    """Keep the input of each segment only, and run a segment again, keeping all, when its backward comes.

    The last segment keeps all at once, since its backward comes at once, as in `torch.utils.checkpoint_sequential`.

    Args:
        length: stages of the chain.
        first_stages: of each segment, increasing; the first is 0.
    """
    bounds = (*first_stages, length)
    if bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(f"Segments must start at 0 and then at increasing stages below {length}, not {first_stages}.")
    segments = [range(a, b) for a, b in pairwise(bounds)]
    operations = []
    for segment in segments[:-1]:
        operations.append(ChainOperation(OperationKind.FORWARD_CHECKPOINT, segment[0]))
        operations += [ChainOperation(OperationKind.FORWARD_NONE, i) for i in segment[1:]]
    for segment in reversed(segments):
        operations += [ChainOperation(OperationKind.FORWARD_ALL, i) for i in segment]
        operations += [ChainOperation(OperationKind.BACKWARD, i) for i in reversed(segment)]
    return tuple(operations)
