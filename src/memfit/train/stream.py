"""Data that is read while it is trained on, sample after sample, without a length: batches in the order in which it comes.

A run that goes on reads the stream again from the start of its epoch, up to where it was. Whether what comes there is what came before is not believed: a
snapshot notes a digest of the last batch, and a stream that gives another one is refused. A reader's own state would be faster to go back to, but where it
shuffles in a buffer the samples in that are lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memfit.batches import Batch
from memfit.errors import ConfigError, InputError, SnapshotError
from memfit.step import process_generators
from memfit.train.data import Position, check_ranks, on_device, part_of_rank

Collate = Callable[
    [Sequence[Any], int, int], Batch
]  # samples, epoch, number of the first one in it -> a batch on the CPU


def is_stream(data: Any) -> bool:
    """Whether data can be iterated alone, and has no items by number."""
    if isinstance(data, torch.utils.data.IterableDataset):
        return True
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


@dataclass(frozen=True, slots=True)
class Stream:
    """What is read while it is trained on.

    Attributes:
        samples: see `StreamBatches`.
        collate: makes a batch of them.
    """

    samples: Iterable[Any]
    collate: Collate


class Readable:
    """What is begun anew each time it is iterated.

    Args:
        read: begins to read.
    """

    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return self._read()


def collated(samples: Sequence[Any], epoch: int, first: int) -> Batch:  # noqa: ARG001 - what a sample draws is its own affair
    """Samples stacked as torch's DataLoader does."""
    return torch.utils.data.default_collate(list(samples))


@dataclass
class StreamBatches:
    """Samples of a stream in batches; for what is alike see `memfit.train.data.Batches`.

    Attributes:
        stream: gives samples each time it is iterated; its `set_epoch`, where it has one, is called before. An iterator gives them once.
        size: samples in a batch; the last one of an epoch may be smaller.
        device: where batches are put.
        collate: makes a batch of samples.
        rank, ranks, drop_last: as in `Batches`. A last batch with fewer samples than ranks is left out in any case.
    """

    stream: Iterable[Any]
    size: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    collate: Collate = collated
    rank: int = 0
    ranks: int = 1
    drop_last: bool = False
    _first: list[Any] = field(default_factory=list)  # of an iterator: samples that were looked at and not used yet
    _mark: dict[str, Any] | None = None

    @property
    def count(self) -> None:
        """Not known."""

    @property
    def per_epoch(self) -> int:
        """Never known.

        Raises:
            ConfigError: always.
        """
        raise self.without_steps()

    def without_steps(self) -> ConfigError:
        """The error where a run does not say how many steps to take."""
        return ConfigError(
            "train.steps is missing: the data is a stream, of which it is not known how many steps an epoch has, so say how many to take"
        )

    def of_rank(self, rank: int, ranks: int) -> StreamBatches:
        """The same stream, of each batch the part of this rank.

        Raises:
            InputError: a batch has fewer samples than there are ranks.
        """
        check_ranks(self.size, ranks)
        return replace(self, rank=rank, ranks=ranks)

    def sample(self) -> Batch:
        """The first batch of this rank, to plan with; it is trained on all the same."""
        return self._batch(self._looked_at(), 0, 0)

    def some(self, parts: int) -> list[Batch]:  # noqa: ARG002 - the rest is not known
        """The first batch, to compare data by."""
        return [self.collate(self._looked_at(), 0, 0)]

    def _looked_at(self) -> list[Any]:
        """The samples of the first batch."""
        if not isinstance(self.stream, Iterator):
            samples = list(islice(self._begun(0), self.size))
        else:
            self._first += islice(self.stream, self.size - len(self._first))
            samples = self._first[: self.size]
        if not samples:
            raise InputError("the data holds no samples")
        self._check_every_rank_has_one(len(samples))
        return samples

    def _check_every_rank_has_one(self, samples: int) -> None:
        """Check the first batch of an epoch: where that is too small for the ranks, so is the epoch."""
        if samples < self.ranks:
            held = f"{samples} sample{'' if samples == 1 else 's'}"
            raise InputError(
                f"the stream holds {held} for {self.ranks} ranks, and each needs one: take fewer ranks, or more data"
            )

    def _begun(self, epoch: int) -> Iterator[Any]:
        """The samples of an epoch."""
        if isinstance(self.stream, Iterator):
            return self._once()
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)
        return iter(self.stream)

    def _once(self) -> Iterator[Any]:
        while self._first:
            yield self._first.pop(0)
        yield from self.stream

    def _batch(self, samples: Sequence[Any], epoch: int, first: int) -> Batch:
        """Of a batch's samples those of this rank, where they are trained on."""
        own = part_of_rank(len(samples), self.rank, self.ranks)
        return on_device(self.collate(samples[own], epoch, first + own.start), self.device)

    def start(
        self,
        position: Position = Position(),  # noqa: B008 - immutable
        mark: Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[Batch, Position]]:
        """Batches without end from a position on, each with the position after it.

        Args:
            position: where to go on.
            mark: what `mark` gave there; None at the beginning.

        Raises:
            SnapshotError: the stream does not give what it gave before that position.
            InputError: it has ended and cannot be begun anew, or an epoch has fewer samples than there are ranks.
        """
        if mark is not None:
            self._mark = dict(mark)
        return self._from(position, mark)

    def _from(self, position: Position, mark: Mapping[str, Any] | None) -> Iterator[tuple[Batch, Position]]:
        epoch, used = position
        samples = self._begun(epoch)
        if used:
            self._pass_over(samples, position, mark)
        while True:
            chosen = list(islice(samples, self.size))
            if not chosen:
                if not used or isinstance(self.stream, Iterator):
                    raise InputError(
                        f"the stream has ended after {used} samples of epoch {epoch + 1}, and steps are left: return what can be iterated anew "
                        "(an object whose __iter__ begins at its start, and no generator), or lower train.steps"
                    )
                epoch, used = epoch + 1, 0
                samples = self._begun(epoch)
                continue
            first, used = used, used + len(chosen)
            if first == 0:
                self._check_every_rank_has_one(used)
            self._mark = {"samples": len(chosen), "digest": _digest(chosen)}
            if len(chosen) < (self.size if self.drop_last and first else self.ranks):
                continue
            batch = self._batch(chosen, epoch, first)
            del chosen  # what a batch was made of takes no memory during the step
            yield batch, Position(epoch, used)

    def mark(self) -> dict[str, Any] | None:
        """What the batch that was made last is known by, for a snapshot; None before the first."""
        return self._mark

    def _pass_over(self, samples: Iterator[Any], position: Position, mark: Mapping[str, Any] | None) -> None:
        """Read up to a position, and compare the last batch before it."""
        before = process_generators.generators()
        last = 0 if mark is None else int(mark["samples"])
        there = sum(1 for _ in islice(samples, position.used - last))
        compared = list(islice(samples, last))
        process_generators.set_generators(before)  # what a stream draws in reading up to here, it drew before
        if there + len(compared) < position.used:
            raise SnapshotError(
                f"the stream ends after {there + len(compared)} samples of epoch {position.epoch + 1}, of which {position.used} were trained on: "
                "put the data back, or start a new run from the weights"
            )
        if mark is not None and _digest(compared) != mark["digest"]:
            raise SnapshotError(
                f"the stream does not give the samples that it gave before (of epoch {position.epoch + 1} those up to {position.used} were trained on), "
                "so it cannot be put where it was: have its order depend on nothing but its arguments and set_epoch, or start a new run from the weights"
            )


def _digest(samples: Sequence[Any]) -> str:
    found = hashlib.sha256()
    for leaf in pytree.tree_leaves(list(samples)):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(
                leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
                if leaf.dim()
                else repr(leaf.item()).encode()
            )
        elif hasattr(leaf, "tobytes"):  # an array of numpy
            found.update(leaf.tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()
