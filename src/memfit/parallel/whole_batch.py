"""The batch of a pipeline, put together from the parts that its ranks hand in: each rank is sent what its stages read, and nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memfit import batches
from memfit.batches import Batch
from memfit.step.absent import ELSEWHERE, only


class WholeBatch:
    """Batches of one shape.

    Args:
        pipeline: the ranks of it.
        sizes: samples in the part of each.

    Attributes:
        read: of each stage, the places of the tensors of the batch that it reads (`PartCalls.leaves_read`); None while all of them are sent to all ranks.
    """

    def __init__(self, pipeline: dist.ProcessGroup, sizes: Sequence[int]) -> None:
        self.read: Sequence[Collection[int]] | None = None
        self._pipeline = pipeline
        self._sizes = sizes
        self._divided: set[int] = set()  # places of tensors that count samples
        self._starts = [0, *itertools.accumulate(sizes)]  # of each rank's part, the first of its samples
        # Messages with the sample before which each has to be there: those to come, and those that are begun.
        self._to_come: list[tuple[int, dist.P2POp]] = []
        self._on_their_way: list[tuple[int, dist.Work | None]] = []

    @property
    def samples(self) -> int:
        """Of all ranks."""
        return sum(self._sizes)

    def together(self, batch: Batch) -> Batch:
        """What this rank's stages need of the batch of all ranks, with ELSEWHERE in the place of other tensors. All ranks of the pipeline have to call it.

        Only this rank's own part is there when it returns: `wait` before others are read, and before this rank's part is changed. Others may wait for it until
        `begin`.

        Args:
            batch: this rank's part. Tensors without its length in front stay as they are.
        """
        own, ranks = self._sizes[self._pipeline.rank()], frozenset(range(len(self._sizes)))
        leaves, structure = batches.flattened(batch)
        self._divided = {place for place, leaf in enumerate(leaves) if batches.counts_samples(leaf, own)}
        self._on_their_way, self._to_come = [], []
        copied = not all(leaves[place].is_contiguous() for place in self._divided)
        for place in sorted(self._divided):
            leaf = leaves[place]
            reading = self._readers(place)
            leaves[place] = self._sent_to_all(leaf) if reading == ranks else self._sent_to(reading, leaf)
        if copied:  # for sending, which is in no prediction of what follows
            self.wait()
        return batches.rebuilt(leaves, structure)

    def begin(self) -> None:
        """Send and receive what is not on its way yet."""
        if not self._to_come:
            return
        starts, messages = zip(*self._to_come, strict=True)
        works = dist.batch_isend_irecv(list(messages))
        # NCCL has one piece of work for all of them.
        self._on_their_way += zip(starts if len(works) == len(starts) else [0] * len(works), works, strict=True)
        self._to_come = []

    def wait(self, samples: int | None = None) -> None:
        """Until so many of the first samples of the whole batch are there; without a number until all are, and all that this rank sends is sent."""
        end = math.inf if samples is None else samples
        if any(start < end for start, _ in self._to_come):
            self.begin()
        later: list[tuple[int, dist.Work | None]] = []
        for start, work in self._on_their_way:
            if start >= end:
                later.append((start, work))
            elif work is not None:
                work.wait()
        self._on_their_way = later

    def of_stage(self, stage: int, micro_batch: Batch) -> Batch:
        """What one of this rank's stages reads of a micro-batch: it was captured so, and what is made of the rest (a mask, say) is in no prediction."""
        assert self.read is not None, "all ranks have said what their stages read"
        leaves, _ = batches.flattened(micro_batch)
        undivided = set(range(len(leaves))) - self._divided
        return only(micro_batch, undivided.union(self.read[stage]))

    def _readers(self, place: int) -> frozenset[int]:
        """The ranks whose stages read this leaf."""
        ranks = range(len(self._sizes))
        if self.read is None:
            return frozenset(ranks)
        return frozenset(stage % len(ranks) for stage, places in enumerate(self.read) if place in places)

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._pipeline, rank)

    def _parts(self, part: Tensor) -> tuple[Tensor, list[Tensor]]:
        """A tensor for the whole, with this rank's part in its place; and the parts of all ranks in it, as bytes, since backends know few types."""
        whole = part.new_empty((self.samples, *part.shape[1:]))
        parts = list(whole.split(list(self._sizes)))
        parts[self._pipeline.rank()].copy_(part)
        return whole, [each.view(torch.uint8) for each in parts]

    def _sent_to_all(self, part: Tensor) -> Tensor:
        whole, parts = self._parts(part)
        # What is sent is the rank's own tensor: a stage may write its copy in the whole while it is on its way.
        parts[self._pipeline.rank()] = part.contiguous().view(torch.uint8)
        for rank, each in enumerate(parts):
            work = dist.broadcast(each, self._global(rank), group=self._pipeline, async_op=True)
            self._on_their_way.append((self._needed_from(rank), work))
        return whole

    def _sent_to(self, reading: Collection[int], part: Tensor) -> Any:
        mine = self._pipeline.rank()
        whole, parts = self._parts(part) if mine in reading else (ELSEWHERE, [])
        own = part.contiguous().view(torch.uint8)
        for rank in range(len(self._sizes)):
            if rank == mine:
                continue
            # Two ranks come to their messages in one order: by leaf, and of one leaf there is one each way.
            if rank in reading:
                send = dist.P2POp(dist.isend, own, self._global(rank), self._pipeline)
                self._to_come.append((self._needed_from(mine), send))
            if parts:
                receive = dist.P2POp(dist.irecv, parts[rank], self._global(rank), self._pipeline)
                self._to_come.append((self._needed_from(rank), receive))
        return whole

    def _needed_from(self, rank: int) -> int:
        """The sample before which a rank's part has to be there; of this one's, which is only sent, none."""
        return self.samples if rank == self._pipeline.rank() else self._starts[rank]
