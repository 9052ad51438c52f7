"""A few samples of a batch, for what is looked at with real tensors before a step is believed."""

from __future__ import annotations

from typing import Final

from memfit import batches
from memfit.batches import Batch

SHORT_TOKENS: Final = 16


def rows_of(sample: Batch, count: int) -> Batch:
    """A few samples that show the batch's variety: those with the most and the fewest nonzero integers come first, or those of the least and largest class."""
    total = batches.size(sample)
    order = list(range(total))
    of_samples = [
        leaf
        for leaf in batches.leaves(sample)
        if batches.counts_samples(leaf, total) and not leaf.is_floating_point() and leaf.device.type != "meta"
    ]
    for leaf in sorted(of_samples, key=lambda leaf: leaf.dim() == 1):
        ranks = leaf.tolist() if leaf.dim() == 1 else (leaf.reshape(total, -1) != 0).sum(1).tolist()
        by_rank = sorted(range(total), key=lambda i: ranks[i])
        if ranks[by_rank[0]] != ranks[by_rank[-1]]:
            order = [by_rank[0], by_rank[-1], *by_rank[1:-1]]
            break
    return batches.rows(sample, sorted(order[:count]))


def shortened(sample: Batch) -> Batch | None:
    """The samples cut to a few tokens, where every tensor with a second dimension is of integers and equally long; None elsewhere."""
    total = batches.size(sample)
    wide = [t for t in batches.leaves(sample) if t.dim() > 1 and t.shape[0] == total]
    lengths = {int(t.shape[1]) for t in wide}
    if len(lengths) != 1 or any(t.is_floating_point() or t.dim() != 2 for t in wide):
        return None
    if lengths.pop() < 4 * SHORT_TOKENS:
        return None
    return batches.map_tensors(
        lambda t: t[:, :SHORT_TOKENS].contiguous() if t.dim() == 2 and t.shape[0] == total else t, sample
    )
