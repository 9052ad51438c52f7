"""The samples of one optimizer step in another trainer's loop: the largest that will come, how a batch may be divided, what each part counts for."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Final

from memfit import batches
from memfit.batches import Batch
from memfit.errors import InputError

# Of the trainer, told to it and not to the plan.
FIXED: Final[Mapping[str, Any]] = {"precision": "full", "state_place": "device", "streamed": "", "update": "after"}
# Of a kind of micro-batch, in an epoch; what is rarer is not planned for.
LEAST_EXPECTED: Final = 0.01
_ENTRIES: Final = 8
_PATIENCE_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class OtherBatches:
    """Batches as large as the largest one, in which values may decide otherwise than in that: whether there is padding, say.

    Attributes:
        alike: the largest sample over and over, so that nothing is padded; None where the collator makes it another shape.
        padded: the largest batch with the smallest sample of the data in it; None likewise.
        sizes: how many samples of the data have which size.
        together: samples that are padded to one length, of which micro-batches are parts; None where each micro-batch is collated by itself.
    """

    alike: Batch | None
    padded: Batch | None
    sizes: Mapping[int, int]
    together: int | None = None

    def of(self, samples: int) -> tuple[Batch, ...]:
        """Those like which a micro-batch of so many samples is likely to come, were samples drawn by chance."""
        together = samples if self.together is None else self.together
        padded = sum(self.sizes.values()) / together - self._alike(together)
        found = (
            self.alike if self._alike(samples) >= LEAST_EXPECTED else None,
            self.padded if padded >= LEAST_EXPECTED else None,
        )
        return tuple(batch for batch in found if batch is not None)

    def _alike(self, samples: int) -> float:
        """Of as many samples each: how many batches of samples of one size are drawn in an epoch."""
        total = sum(self.sizes.values())
        return sum((number / total) ** samples for number in self.sizes.values()) * total / samples

    def changed(self, change: Callable[[Batch], Batch]) -> OtherBatches:
        """These after a change."""
        return replace(
            self,
            alike=None if self.alike is None else change(self.alike),
            padded=None if self.padded is None else change(self.padded),
        )


def batches_of(loader: Any, count: int) -> tuple[Batch, OtherBatches]:
    """A batch of so many samples of a loader's dataset that is as large as any, collated as the loader does; and others that may come.

    Raises:
        InputError: the data is a stream.
    """
    return largest_in(loader)(count)


def largest_in(loader: Any) -> Callable[[int], tuple[Batch, OtherBatches]]:
    """Look through a loader's dataset, once for batches of any number of samples: what gives those of `batches_of`.

    In the largest are the samples that are longest somewhere, then the largest.

    Raises:
        InputError: the data is a stream.
    """
    data = loader.dataset
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise InputError(
            "the training data is a stream, so the largest batch in it is not known: give one of the largest shape that will come, sample=..."
        )
    longest: dict[tuple[str, int], tuple[int, int]] = {}
    sizes: list[int] = []
    began, told = time.monotonic(), False
    for index in range(len(data)):
        if not told and time.monotonic() - began > _PATIENCE_SECONDS:
            told = True
            warnings.warn(
                f"the training data is looked through for its longest samples, {index} of {len(data)} in {_PATIENCE_SECONDS:.0f}"
                " s: a batch of the largest shape that will come, sample=..., spares that",
                stacklevel=2,
            )
        shapes = dict(_shapes(data[index]))
        sizes.append(sum(math.prod(shape) for shape in shapes.values()))
        for name, shape in shapes.items():
            for dimension, length in enumerate(shape):
                if length > longest.get((name, dimension), (0, 0))[0]:
                    longest[name, dimension] = length, index
    leading = dict.fromkeys(index for _, index in longest.values())
    rest = sorted(set(range(len(data))) - set(leading), key=lambda index: -sizes[index])

    def collated(indices: Sequence[int]) -> Batch:
        return loader.collate_fn([data[index] for index in indices])

    def of(count: int) -> tuple[Batch, OtherBatches]:
        chosen = [*leading, *rest][:count]
        largest = collated(chosen)
        if min(sizes) == max(sizes):
            return largest, OtherBatches(None, None, {})
        others = (
            collated([max(chosen, key=sizes.__getitem__)] * len(chosen)),
            collated([*chosen[:-1], sizes.index(min(sizes))]),
        )
        signature = batches.signature(largest)
        alike, padded = (other if batches.signature(other) == signature else None for other in others)
        return largest, OtherBatches(alike, padded, Counter(sizes))

    return of


def off_device(batch: Batch) -> Batch:
    """The batch in host memory: what planning looks at is not to count as what the process holds on its device."""
    return batches.map_tensors(lambda tensor: tensor.cpu(), batch)


def _shapes(sample: Any, name: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """What of a sample has a length, before it is collated: tensors and arrays, lists, texts, also in one another."""
    shape = getattr(sample, "shape", None)
    if shape is not None:
        yield name, tuple(shape)
    elif isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from _shapes(value, f"{name}.{key}")
    elif isinstance(sample, (tuple, list)):
        if isinstance(sample, list):
            yield name, (len(sample),)
        # Few are entries of their own, such as an input and its label; many are alike, such as words.
        few = len(sample) <= _ENTRIES
        for place, value in enumerate(sample):
            if not isinstance(value, (int, float)):
                yield from _shapes(value, f"{name}.{place if few else '*'}")
    elif isinstance(sample, Sized):
        yield name, (len(sample),)


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
