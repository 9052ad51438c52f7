"""The samples of one optimizer step in another trainer's loop: the largest that will come, how a batch may be divided, what each part counts for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Final

from memfit.batches import Batch
from memfit.errors import InputError

# Of the trainer, told to it and not to the plan.
FIXED: Final[Mapping[str, Any]] = {"precision": "full", "state_place": "device", "streamed": "", "update": "after"}


def largest_samples(data: Any, count: int) -> list[int]:
    """Indices of the samples of a dataset that make a batch as large as any: those that are longest somewhere, then the largest.

    Raises:
        InputError: the data is a stream.
    """
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise InputError(
            "the training data is a stream, so the largest batch in it is not known: give one of the largest shape that will come, sample=..."
        )
    longest: dict[tuple[str, int], tuple[int, int]] = {}
    sizes: list[int] = []
    for index in range(len(data)):
        shapes = dict(_shapes(data[index]))
        sizes.append(sum(math.prod(shape) for shape in shapes.values()))
        for name, shape in shapes.items():
            for dimension, length in enumerate(shape):
                if length > longest.get((name, dimension), (0, 0))[0]:
                    longest[name, dimension] = length, index
    leading = dict.fromkeys(index for _, index in longest.values())
    others = sorted(set(range(len(data))) - set(leading), key=lambda index: -sizes[index])
    return [*leading, *others][:count]


def largest_batch(loader: Any, count: int) -> Batch:
    """So many samples of a loader's dataset, in the order of `largest_samples`, collated as the loader does.

    Raises:
        InputError: the data is a stream.
    """
    return loader.collate_fn([loader.dataset[index] for index in largest_samples(loader.dataset, count)])


def _shapes(sample: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What of a sample has a length, before it is collated: tensors and arrays, lists, texts."""
    entries = sample.items() if isinstance(sample, Mapping) else enumerate(sample if isinstance(sample, tuple) else ())
    for name, value in entries:
        shape = getattr(value, "shape", None)
        if shape is not None:
            yield str(name), tuple(shape)
        elif isinstance(value, Sized):
            yield str(name), (len(value),)


def divisors_of(number: int) -> list[int]:
    """Rising."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def parts_weights(counts: Sequence[int | None], divisor: int) -> list[float]:
    """What each part's loss counts for among the parts of its batch.

    Args:
        counts: what each part's loss is a mean over; None where losses add up as they are.
        divisor: parts in a batch; the last batch of an epoch may have fewer.
    """
    weights: list[float] = []
    for start in range(0, len(counts), divisor):
        own = counts[start : start + divisor]
        total = sum(count or 0 for count in own)
        weights += [1.0 if count is None or not total else count / total for count in own]
    return weights
