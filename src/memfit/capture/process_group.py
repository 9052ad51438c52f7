"""A process group of many ranks in one process, for capturing what one of them does: torch's fake process group.

It sends nothing, so values are meaningless; operations, shapes and lifetimes are those of a rank.

Two things stand between it and DistributedDataParallel on fake tensors, whose C++ reads what Python sees as fake: the indices by which it rebuilds its
buckets are tensors of integers, so those are real; and it waits for a future that has the tensors that were sent, where the fake group's has nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.errors import CaptureError
from memfit.sharding.ways import mesh_of
from memfit.techniques.sharding import way_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_INDICES: Final = (torch.int32, torch.int64)


@contextmanager
def fake_group(ranks: int, rank: int) -> Iterator[dist.ProcessGroup]:
    """A group of so many ranks, of which this process is one.

    Where a default group is there already (a run of torchrun), all of its processes have to come here together.

    Raises:
        CaptureError: this torch was built without torch.distributed, or the group that is there is of another size.
    """
    if not dist.is_available():
        raise CaptureError(
            "this build of torch has no torch.distributed, so a step of several ranks cannot be captured"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        if dist.get_world_size() != ranks or dist.get_rank() != rank:
            raise CaptureError(
                f"rank {rank} of {ranks} cannot be captured inside of rank {dist.get_rank()} of {dist.get_world_size()}: plan in a process without a group"
            )
        group = dist.new_group(backend="fake")
        assert group is not None
        try:
            yield group
        finally:
            dist.destroy_process_group(group)
        return
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_mesh(setting: str, device_type: str) -> Iterator[DeviceMesh]:
    """The ranks of a setting of sharding ("zero3/4@1": rank 1 of 4) as a mesh of one dimension."""
    _, ranks, rank = way_of(setting)
    with fake_group(ranks, rank) as group:
        yield mesh_of(group, device_type)


class OnFakeTensors(TorchDispatchMode):
    """What DistributedDataParallel needs to run on fake tensors, above their mode and below what records."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") in _INDICES:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is torch.ops.c10d.allreduce_.default:
            future: Any = torch.futures.Future()
            future.set_result(list(result[0]))
            return result[0], torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
        return result
