"""From a setting of the choices to the model as one rank has it. torch's engines are imported only here, where one is asked for: they take a while."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import InputError
from memfit.sharding.sharded import ShardedModel
from memfit.techniques.sharding import is_one_unit, way_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Classes of torch by name, as some of them take long to import.
_WRAPPERS: Final = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
}


def group_of(setting: str) -> dist.ProcessGroup:
    """The ranks of this run.

    Raises:
        InputError: there are none.
    """
    _, ranks, _ = way_of(setting)
    if not dist.is_initialized():
        raise InputError(
            f"the plan is for {ranks} ranks, and this process belongs to no group: start it with torchrun --nproc-per-node {ranks} and call "
            "torch.distributed.init_process_group, or run memfit train with --nproc"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def follow_device(device: torch.device) -> None:
    """Make a rank's GPU its process's current one, through which torch sends objects and waits in barriers; else all ranks would do so on the first GPU.

    Args:
        device: of this rank's model.

    Raises:
        InputError: the group of this run sends no tensors that lie there.
    """
    backends = dist.get_backend_config()
    if f"{device.type}:" not in backends:
        raise InputError(
            f"the model is on {device}, and the process group of this run sends tensors of other devices alone ({backends}): move the model to this rank's GPU "
            'before memfit is called, or make the group with torch.distributed.init_process_group("gloo") to train on CPUs'
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that another engine shares out: its messages would meet those of memfit's own, or those of ranks that only wait for the plan.

    Raises:
        InputError: it is one, or a part of it is.
    """
    for path, module in model.named_modules():
        engine = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)
        if engine is not None:
            raise InputError(
                f"{path or 'the model'} is shared out by {_WRAPPERS[engine]} already, and memfit shares the model out itself: hand it over as it was before; "
                f'fixed={{"sharding": ...}} says which way, "data" for DistributedDataParallel and "zero3" for FSDP'
            )


def mesh_of(group: dist.ProcessGroup, device_type: str, name: str | None = None) -> DeviceMesh:
    """The group as a mesh of one dimension, which may have a name."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type, mesh_dim_names=None if name is None else (name,))


def shard(
    model: nn.Module,
    setting: str,
    group: dist.ProcessGroup,
    mesh: DeviceMesh | None = None,
    *,
    synchronised: bool = True,
) -> ShardedModel:
    """Share a model out among the ranks of a group.

    Args:
        model: whole, the same on every rank (rank 0's is sent to the others by data parallelism; `fully_shard` takes each rank's own part of its own).
        setting: of the choices, as "zero3/4".
        group: of as many ranks.
        mesh: of the group; made here when None.
        synchronised: as for `DataParallel`.

    Raises:
        InputError: the group is of another size, or the model cannot be sharded so.
    """
    way, ranks, _ = way_of(setting)
    if group.size() != ranks:
        raise InputError(
            f"the plan is for {ranks} ranks and this run has {group.size()}: start as many processes (torchrun --nproc-per-node {ranks}), or plan again"
        )
    if way in {"data", "zero1"}:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # torch's optimizers in TorchScript, which are imported along
            from memfit.sharding.data_parallel import DataParallel

        return DataParallel(model, group, synchronised=synchronised, shards_state=way == "zero1")
    from memfit.sharding.fully_sharded import FullySharded, checked

    checked(model)
    mesh = mesh if mesh is not None else mesh_of(group, next(model.parameters()).device.type)
    return FullySharded(model, group, mesh, reshards=way == "zero3", one_unit=is_one_unit(setting))
