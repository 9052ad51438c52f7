"""The batch of a pipeline, put together from the parts that its ranks hand in: each rank is sent what its stages read, and nothing else."""

from __future__ import annotations

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

    @property
    def samples(self) -> int:
        """Of all ranks."""
        return sum(self._sizes)

    def together(self, batch: Batch) -> Batch:
        """What this rank's stages need of the batch of all ranks, with ELSEWHERE in the place of other tensors. All ranks of the pipeline have to call it.

        Args:
            batch: this rank's part. Tensors without its length in front stay as they are.
        """
        own, ranks = self._sizes[self._pipeline.rank()], frozenset(range(len(self._sizes)))
        leaves, structure = batches.flattened(batch)
        self._divided = {place for place, leaf in enumerate(leaves) if batches.counts_samples(leaf, own)}
        works: list[dist.Work | None] = []
        between: list[dist.P2POp] = []
        for place in sorted(self._divided):
            leaf = leaves[place]
            reading = self._readers(place)
            if reading == ranks:
                leaves[place] = self._sent_to_all(leaf, works)
            else:
                leaves[place] = self._sent_to(reading, leaf, between)
        if between:
            works += dist.batch_isend_irecv(between)
        for work in works:
            if work is not None:
                work.wait()
        return batches.rebuilt(leaves, structure)

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

    def _sent_to_all(self, part: Tensor, works: list[dist.Work | None]) -> Tensor:
        whole, parts = self._parts(part)
        works += [
            dist.broadcast(each, self._global(rank), group=self._pipeline, async_op=True)
            for rank, each in enumerate(parts)
        ]
        return whole

    def _sent_to(self, reading: Collection[int], part: Tensor, between: list[dist.P2POp]) -> Any:
        mine = self._pipeline.rank()
        whole, parts = self._parts(part) if mine in reading else (ELSEWHERE, [])
        own = parts[mine] if parts else part.contiguous().view(torch.uint8)
        for rank in range(len(self._sizes)):
            if rank == mine:
                continue
            # Two ranks come to their messages in one order: by leaf, and of one leaf there is one each way.
            if rank in reading:
                between.append(dist.P2POp(dist.isend, own, self._global(rank), self._pipeline))
            if parts:
                between.append(dist.P2POp(dist.irecv, parts[rank], self._global(rank), self._pipeline))
        return whole
