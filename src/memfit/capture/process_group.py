"""A process group of many ranks in one process, for capturing what one of them does: torch's fake process group.

It sends nothing, so values are meaningless; operations, shapes and lifetimes are those of a rank.

Two things stand between it and DistributedDataParallel on fake tensors, whose C++ reads what Python sees as fake: the indices by which it rebuilds its
buckets are tensors of integers, so those are real; and it waits for a future that has the tensors that were sent, where the fake group's has nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from memfit.dispatch import DispatchMode
from memfit.errors import CaptureError
from memfit.sharding.ways import mesh_of
from memfit.techniques.sharding import way_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_INDICES: Final = (torch.int32, torch.int64)


@contextmanager
def fake_group(ranks: int, rank: int) -> Iterator[dist.ProcessGroup]:
    """A group of so many ranks, of which this process is one, whatever it is in a run of its own.

    Raises:
        CaptureError: this torch was built without torch.distributed, or the run that this process belongs to has fewer ranks.
    """
    if not dist.is_available():
        raise CaptureError(
            "this build of torch has no torch.distributed, so a step of several ranks cannot be captured"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        group = _beside_the_run(ranks, rank, FakeStore())
        try:
            yield group
        finally:
            dist.destroy_process_group(group)
        return
    said_by = sys.excepthook  # torch puts one in its place that begins each line with the rank, and leaves it there
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    sys.excepthook = said_by
    try:
        default = dist.group.WORLD
        assert default is not None
        yield default
    finally:
        dist.destroy_process_group()


# One name for the group of every capture, and one for its mesh: what torch keeps of a mesh from one use to the next (how tensors are laid out anew, by the name
# of the group) is then never taken for a mesh of the run, which may have the same ranks.
_NAME: Final = "memfit-capture"


def _beside_the_run(ranks: int, rank: int, store: Any) -> dist.ProcessGroup:
    """A fake group in a process that belongs to a real one, which goes on as it is and whose other ranks need not know.

    `torch.distributed.new_group` would wait for all of them, and give this process its own rank. What is made here is torch's group all the same, under which
    the ranks of the run have other places: this process that of the rank which is captured.
    """
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    here, there = dist.get_rank(), dist.get_world_size()
    if ranks > there:
        raise CaptureError(
            f"a step of {ranks} ranks cannot be captured in a run of {there}: plan in a process without a group"
        )
    # By place in the group; the rest of the run does not matter.
    places = [other for other in range(there) if other != here]
    places.insert(rank, here)
    places = places[:ranks]
    group: dist.ProcessGroup
    group, _ = _new_process_group_helper(
        ranks,
        rank,
        places,
        dist.Backend(dist.Backend.FAKE),
        store,
        group_name=_NAME,  # type: ignore[arg-type]  # a kind of text in newer versions
        timeout=timedelta(minutes=1),
    )
    _world.pg_group_ranks[group] = {number: place for place, number in enumerate(places)}
    return group


@contextmanager
def fake_mesh(setting: str, device_type: str) -> Iterator[DeviceMesh]:
    """The ranks of a setting of sharding ("zero3/4@1": rank 1 of 4) as a mesh of one dimension."""
    _, ranks, rank = way_of(setting)
    with fake_group(ranks, rank) as group:
        yield mesh_of(group, device_type, _NAME)


class OnFakeTensors(DispatchMode):
    """What DistributedDataParallel needs to run on fake tensors, above their mode and below what records."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = random.Random().getstate()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") in _INDICES:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        with self._other_numbers() if func.namespace == "c10d" else nullcontext():
            result = func(*args, **kwargs)
        if func is torch.ops.c10d.allreduce_.default:
            future: Any = torch.futures.Future()
            future.set_result(list(result[0]))
            return result[0], torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
        return result

    @contextmanager
    def _other_numbers(self) -> Iterator[None]:
        """Each collective on fake tensors is named by a number from Python's generator, of which forward is to find its own."""
        before = random.getstate()
        random.setstate(self._numbers)
        try:
            yield
        finally:
            self._numbers = random.getstate()
            random.setstate(before)
