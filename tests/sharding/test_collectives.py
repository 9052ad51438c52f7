"""What a backend allocates for a collective is what the recorder books, and bytes on the links are those of a ring."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from memfit.meter import metered
from memfit.sharding.collectives import collective_of, workspace_bytes
from memfit.values.trace import Collective
from sharding.ranks import on_ranks

NUMBERS = 1 << 12


def measured(rank: int) -> dict[str, int]:
    """Bytes above the arguments at the peak of each, the least of five."""
    ranks = dist.get_world_size()
    part, whole = torch.zeros(NUMBERS), torch.zeros(NUMBERS * ranks)
    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(part),
        "broadcast": lambda: dist.broadcast(part, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    found: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(5):
            with metered() as reading:
                call()
            found[name] = min(found.get(name, 1 << 40), reading.peak_bytes)
    return found


def test_gloo_allocates_what_is_booked_for_it() -> None:
    part, whole = torch.zeros(NUMBERS), torch.zeros(NUMBERS * 2)
    c10d = torch.ops.c10d
    booked = {
        "all_reduce": workspace_bytes(c10d.allreduce_.default, ([part],), "gloo"),
        "broadcast": workspace_bytes(c10d.broadcast_.default, ([part],), "gloo"),
        "all_gather": workspace_bytes(c10d._allgather_base_.default, (whole, part), "gloo"),
        "reduce_scatter": workspace_bytes(c10d._reduce_scatter_base_.default, (part, whole), "gloo"),
    }
    assert on_ranks(2, measured) == [booked, booked]
    assert booked["all_gather"] == 4 * NUMBERS * 2


def test_a_rank_sends_its_part_of_a_ring() -> None:
    part, whole = torch.zeros(25), torch.zeros(100)
    four, c10d = (0, 1, 2, 3), torch.ops.c10d
    assert collective_of(c10d._allgather_base_.default, (whole, part), four) == Collective("all_gather", 300, four)
    assert collective_of(c10d._reduce_scatter_base_.default, (part, whole), four) == Collective(
        "reduce_scatter", 300, four
    )
    assert collective_of(c10d.allreduce_.default, ([whole],), four) == Collective("all_reduce", 600, four)
    assert collective_of(c10d.broadcast_.default, ([whole],), four) == Collective("broadcast", 400, four)
    assert collective_of(torch.ops.aten.mm.default, (whole, part), four) is None
