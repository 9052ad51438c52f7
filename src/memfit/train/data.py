"""Samples, their order, and batches that can be taken up again at any position.

`torch.utils.data.DataLoader` draws its order from the global generator and cannot say where it is, so a run that stops
in mid-epoch cannot go on bit-equal. Here the order of an epoch depends on the seed and the epoch alone, and a position
is two numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import torch

from memfit.batches import Batch, map_tensors
from memfit.errors import InputError
from memfit.train.readers import Array

_CPU: Final = torch.device("cpu")


class Samples(Protocol):
    """Something to learn from."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        """The samples of these numbers as one batch, on the CPU; `epoch` is for what is drawn anew each time."""


class ArraySamples:
    """Named arrays with samples along their first dimension; a batch is a dict of tensors."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        # numpy's memory, not torch's: the data is no part of a budget.
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def batch(self, indices: Sequence[int], epoch: int) -> dict[str, torch.Tensor]:  # noqa: ARG002 - nothing is drawn
        """See `Samples`."""
        return {name: torch.from_numpy(array[list(indices)]) for name, array in self._arrays.items()}


class ItemSamples:
    """A user's dataset with length and items, stacked as torch's DataLoader does."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:  # noqa: ARG002 - what an item draws is its own affair
        """See `Samples`."""
        return torch.utils.data.default_collate([self._dataset[i] for i in indices])


class Position(NamedTuple):
    """Where in the data a run is: `used` samples of epoch `epoch` have been used."""

    epoch: int = 0
    used: int = 0


@dataclass(frozen=True)
class Batches:
    """Samples in batches, shuffled anew each epoch.

    Attributes:
        samples: what to take them from.
        size: samples in a batch; the last one of an epoch may be smaller.
        seed: of the order; None leaves the samples in theirs.
        device: where batches are put.
        rank, ranks: of so many ranks the one that takes its own part of every batch; positions and sizes are those of whole batches.
        drop_last: a smaller last batch is left out of each epoch.
    """

    samples: Samples
    size: int
    seed: int | None = 0
    device: torch.device = _CPU
    rank: int = 0
    ranks: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError(f"a batch of {self.size} samples is none")
        if len(self.samples) < 1:
            raise InputError("the data holds no samples")

    def of_rank(self, rank: int, ranks: int) -> Batches:
        """The same batches in the same order, of each the part of this rank: parts do not overlap, and the first ranks take what does not divide.

        Raises:
            InputError: a batch has fewer samples than there are ranks.
        """
        check_ranks(self.size, ranks)
        last = self._trained_on % self.size
        if 0 < last < ranks:
            raise InputError(
                f"the last batch of an epoch of {len(self.samples)} samples has {last}, and each of {ranks} ranks needs one: leave it out "
                "(data.drop_last: true), or take fewer ranks, or another fit.global_batch"
            )
        return replace(self, rank=rank, ranks=ranks)

    def order(self, epoch: int) -> list[int]:
        """Numbers of the samples in the order of this epoch."""
        if self.seed is None:
            return list(range(len(self.samples)))
        generator = torch.Generator().manual_seed(seed_of(f"{self.seed} {epoch}"))
        return torch.randperm(len(self.samples), generator=generator).tolist()

    @property
    def _trained_on(self) -> int:
        """Samples of an epoch in batches that are not left out; all of them where they fill no batch."""
        count = len(self.samples)
        return count - count % self.size if self.drop_last and count > self.size else count

    @property
    def count(self) -> int | None:
        """Samples of an epoch; None where that is not known (`memfit.train.stream`)."""
        return len(self.samples)

    def some(self, parts: int) -> list[Batch]:
        """Single samples from so many places, to compare data by."""
        count = len(self.samples)
        return [self.samples.batch([number], 0) for number in sorted({count * part // parts for part in range(parts)})]

    def mark(self) -> None:
        """Nothing is needed besides a position to find the next sample again."""

    @property
    def per_epoch(self) -> int:
        """Batches in an epoch."""
        return -(-self._trained_on // self.size)

    def sample(self) -> Batch:
        """A batch as large as any, to plan with."""
        return next(self.start())[0]

    def start(
        self,
        position: Position = Position(),  # noqa: B008 - immutable
        mark: Mapping[str, Any] | None = None,  # noqa: ARG002 - a position is enough
    ) -> Iterator[tuple[Batch, Position]]:
        """Batches without end from a position on, each with the position after it; `mark` is what `mark` gave there."""
        epoch, used = position
        while True:
            order = self.order(epoch)[: self._trained_on]
            while used < len(order):
                chosen = order[used : used + self.size]
                used += len(chosen)
                after = Position(epoch, used) if used < len(order) else Position(epoch + 1, 0)
                own = chosen[part_of_rank(len(chosen), self.rank, self.ranks)]
                yield on_device(self.samples.batch(own, epoch), self.device), after
            epoch, used = epoch + 1, 0

    def once(self) -> Iterator[Batch]:
        """Every sample once, in the data's own order, as for an evaluation."""
        for first in range(0, len(self.samples), self.size):
            chosen = range(first, min(first + self.size, len(self.samples)))
            yield on_device(self.samples.batch(chosen, 0), self.device)


def seed_of(words: str) -> int:
    """A seed for a generator of torch, the same for the same words everywhere."""
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4])


def check_ranks(samples: int, ranks: int) -> None:
    """Check that a batch has a sample for every rank.

    Args:
        samples: in it.
        ranks: among which it is divided.

    Raises:
        InputError: it has not.
    """
    if samples < ranks:
        raise InputError(
            f"a batch has {samples} samples for {ranks} ranks, and each needs one: take fewer ranks, or another fit.global_batch"
        )


def part_of_rank(samples: int, rank: int, ranks: int) -> slice:
    """Of a batch's samples those of a rank: parts do not overlap, and the first ranks take what does not divide."""
    share, more = divmod(samples, ranks)
    first = rank * share + min(rank, more)
    return slice(first, first + share + (rank < more))


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch where it is trained."""
    return batch if device.type == "cpu" else map_tensors(lambda tensor: tensor.to(device), batch)
