"""Parameters and optimizer state of several ranks on a shared disk: `torch.distributed.checkpoint`, by the names of parameters.

Every tensor is saved as the whole that it is a part of, so it can be loaded into other parts: by more ranks or fewer, sharded in another way, or one device.
What is no part of a whole (8-bit state, whose blocks lie within a rank's shard; state factored over rows and columns) is handed back, for each rank to keep.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import SnapshotError
from memfit.sharding.sharded import ShardedModel
from memfit.step.optimizer_state import set_optimizer

State = Mapping[str, Any]


class Parts:
    """A model's parameters and its optimizer as this process has them.

    Args:
        model: the user's.
        optimizer: that steps it; None for none.
        sharded: the model as this one of several ranks has it; None on one device.

    Attributes:
        parameters: what is here between steps, by name.
        group: of the ranks; None on one device.
        shards: whether a parameter here is a part of one.
        lacks: whether some parameters are on other ranks alone.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, sharded: ShardedModel | None = None
    ) -> None:
        self._model, self._sharded = model, sharded
        self.parameters = dict(model.named_parameters()) if sharded is None else sharded.named()
        self.optimizer = optimizer if sharded is None or optimizer is None else sharded.stepped(optimizer)
        self.group = None if sharded is None else sharded.group
        self.shards = sharded is not None and sharded.shards_parameters
        self.lacks = sharded is not None and sharded.lacks_parameters

    def placed(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """As `ShardedModel.placed`."""
        return part if self._sharded is None else self._sharded.placed(name, part)

    def part_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This process's part of what belongs to a whole parameter."""
        return whole if self._sharded is None else self._sharded.part_of(name, whole)

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters as torch is to save them, or to load into them."""
        return {_of_model(name): self.placed(name, part.detach()) for name, part in self.parameters.items()}

    def names(self) -> list[str]:
        """Of the parameters that the optimizer steps here, as its state dict numbers them; empty for one that is not the model's but a loss's."""
        if self.optimizer is None:
            return []
        name_of = {id(parameter): name for name, parameter in self.parameters.items()}
        return [name_of.get(id(p), "") for group in self.optimizer.param_groups for p in group["params"]]


class _Size(NamedTuple):
    size: torch.Size


@dataclass(slots=True)
class Apart:
    """Optimizer state that is no part of a whole tensor.

    Attributes:
        shapes: of this rank's part of each parameter.
        state: by the parameter's name.
    """

    shapes: dict[str, list[int]] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


def tensors_of(parts: Parts) -> tuple[dict[str, torch.Tensor], Apart]:
    """What is saved together, and what each rank keeps for itself."""
    together, apart = parts.weights(), Apart()
    if parts.optimizer is None:
        return together, apart
    saved = parts.optimizer.state_dict()["state"]
    for number, name in enumerate(parts.names()):
        state = saved.get(number, {})
        if not state:
            continue
        part = parts.parameters[name]
        if not all(_is_part(value, part) or _is_number(value) for value in state.values()):
            apart.shapes[name], apart.state[name] = list(part.shape), dict(state)
            continue
        for key, value in state.items():
            together[_of_state(name, key)] = value if _is_number(value) else parts.placed(name, value)
    return together, apart


def save(parts: Parts, folder: Path) -> Apart:
    """Write what all ranks have together into a folder; all ranks have to call it. The files may not be on the disk yet.

    Returns:
        What this rank has to keep by itself.

    Raises:
        torch.distributed.checkpoint.CheckpointException: on all ranks, where one could not write.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class Writer(FileSystemWriter):
        """Says what the disk said, which `torch.save` turns into a RuntimeError about positions."""

        def write_data(self, *arguments: Any) -> Any:
            try:
                return super().write_data(*arguments)
            except RuntimeError as error:
                before = error.__context__
                raise before if isinstance(before, OSError) else error  # noqa: B904 - it is told to other ranks, without what led to it

    together, apart = tensors_of(parts)
    state_dict_saver.save(
        together,
        storage_writer=Writer(folder, sync_files=False),
        process_group=parts.group,
        no_dist=parts.group is None,
    )
    return apart


def load(parts: Parts, folder: Path, apart: Mapping[int, Apart]) -> None:
    """Load into parameters and optimizer, whatever parts of them were saved.

    Args:
        parts: to load into.
        folder: that `save` has written.
        apart: what each of the ranks that saved has kept by itself.

    Raises:
        SnapshotError: it is of another model or optimizer, or of parts that this rank does not have.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(folder)
    there = reader.read_metadata().state_dict_metadata
    weights = parts.weights()
    _check_shapes(weights, there, lacks=parts.lacks)
    state = _empty_state(parts, there)
    wanted = weights | {
        _of_state(n, k): parts.placed(n, v) if v.ndim else v for n, s in state.items() for k, v in s.items()
    }
    with warnings.catch_warnings():
        # Each rank reads by itself, so that none waits for one that fails.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        state_dict_loader.load(wanted, storage_reader=reader, no_dist=True)
    if parts.optimizer is None:
        return
    for name in parts.names():
        if name not in state and (found := _kept(name, parts, apart)) is not None:
            state[name] = found
    groups = parts.optimizer.state_dict()["param_groups"]
    numbered = {number: state[name] for number, name in enumerate(parts.names()) if name in state}
    set_optimizer(parts.optimizer, {"state": numbered, "param_groups": groups})


def load_whole(parts: Parts, weights: State, state: Mapping[str, State]) -> None:
    """Load this rank's parts of whole tensors, as one process has saved them.

    Args:
        parts: to load into.
        weights: by name.
        state: of the optimizer, by the parameter's name.

    Raises:
        SnapshotError: they are of another model, or of a form that has no parts.
    """
    here = parts.weights()
    there = {_of_model(name): value for name, value in weights.items()}
    _check_shapes(here, {key: _Size(value.shape) for key, value in there.items() if key in here})
    with torch.no_grad():
        for name, part in parts.parameters.items():
            part.copy_(parts.part_of(name, weights[name]))
    if parts.optimizer is None:
        return
    numbered = {}
    for number, name in enumerate(parts.names()):
        saved = state.get(name, {})
        if not saved:
            continue
        whole = weights[name].shape
        if parts.shards and not all(
            _is_number(v) or (v.shape == whole and v.is_floating_point()) for v in saved.values()
        ):
            raise SnapshotError(
                f"the optimizer's state of {name} was saved by one process in a form that cannot be shared out (8-bit blocks, rows and columns): go on "
                "with one process, or start anew from the weights"
            )
        numbered[number] = {k: v if _is_number(v) else parts.part_of(name, v) for k, v in saved.items()}
    set_optimizer(parts.optimizer, {"state": numbered, "param_groups": parts.optimizer.state_dict()["param_groups"]})


def _empty_state(parts: Parts, there: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors for the optimizer's state that was saved as parts of wholes."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name in (each for each in parts.names() if each in parts.parameters):
        part, prefix = parts.parameters[name], _of_state(name, "")
        for key in (k for k in there if k.startswith(prefix)):
            about = there[key]
            whole = list(about.size) == list(parts.placed(name, part.detach()).shape) and part.ndim
            shape = part.shape if whole else about.size
            empty = torch.empty(shape, dtype=about.properties.dtype, device=part.device if whole else "cpu")
            found.setdefault(name, {})[key.removeprefix(prefix)] = empty
    return found


def _kept(name: str, parts: Parts, apart: Mapping[int, Apart]) -> dict[str, Any] | None:
    """A parameter's state among what ranks have kept by themselves; None where none has any.

    Raises:
        SnapshotError: it is of other parts than this rank has.
    """
    holders = [rank for rank, each in apart.items() if name in each.state]
    if not holders:
        return None
    own = dist.get_rank(parts.group) if parts.shards else holders[0]
    shape = list(parts.parameters[name].shape)
    ranks = dist.get_world_size(parts.group) if parts.shards else len(apart)
    if own not in holders or len(apart) != ranks or apart[own].shapes[name] != shape:
        raise SnapshotError(
            f"the optimizer's state of {name} was saved by {len(apart)} rank{'s' if len(apart) != 1 else ''} in a form that is of their own parts of it alone "
            "(8-bit blocks, rows and columns): go on with as many ranks in the same way, or start anew from the weights"
        )
    return apart[own].state[name]


def _check_shapes(weights: Mapping[str, torch.Tensor], there: Mapping[str, Any], *, lacks: bool = False) -> None:
    for key, tensor in weights.items():
        name = key.removeprefix(_of_model(""))
        if key not in there:
            raise SnapshotError(f"the snapshot is of another model: it has no parameter {name}")
        if list(there[key].size) != list(tensor.shape):
            saved, here = list(there[key].size), list(tensor.shape)
            raise SnapshotError(f"the snapshot is of another model: {name} is {saved} there and {here} here")
    more = next((key for key in there if key.startswith(_of_model("")) and key not in weights), None)
    if more is not None and not lacks:
        raise SnapshotError(
            f"the snapshot is of another model: the one here has no parameter {more.removeprefix(_of_model(''))}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _is_part(value: Any, part: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == part.shape and value.is_floating_point()


def _of_model(name: str) -> str:
    return f"model/{name}"


def _of_state(name: str, key: str) -> str:
    return f"optimizer/{name}/{key}"
