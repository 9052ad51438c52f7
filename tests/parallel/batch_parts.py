"""Run on ranks: the batch of a pipeline, of which parts are late."""

from __future__ import annotations

import torch
import torch.distributed as dist

from memfit.parallel.whole_batch import WholeBatch

SIZES = (3, 2)  # samples of each rank


def put_together(rank: int, strided: bool) -> list[list[list[float]]]:  # noqa: FBT001 - handed to ranks by position
    """Three tensors of a batch, the first read by rank 0's stage, the second by rank 1's, the third by both.

    Rank 0 writes into its own rows while rank 1 has not begun yet.

    Args:
        rank: this one.
        strided: tensors are not contiguous.

    Returns:
        On each rank what its stages read.
    """
    assert dist.group.WORLD is not None, "joined"
    store = dist.distributed_c10d._get_default_store()
    whole = WholeBatch(dist.group.WORLD, SIZES)
    whole.read = [{0, 2}, {1, 2}]
    first = sum(SIZES[:rank])
    part = [torch.arange(20.0).view(5, 4)[first : first + SIZES[rank]] + 100 * place for place in range(3)]
    if strided:
        part = [each.t().contiguous().t() for each in part]
    if rank and not strided:
        store.wait(["rank 0 has begun"])
    batch = whole.together(part)
    whole.begin()
    if not rank:
        whole.wait(SIZES[0])
        batch[2][: SIZES[0]].neg_()
        store.set("rank 0 has begun", "")
    whole.wait()
    return [each.tolist() for each in batch if isinstance(each, torch.Tensor)]
