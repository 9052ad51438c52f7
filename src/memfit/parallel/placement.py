"""Model parallelism in one process: each stage of a model on a device of its own, the forward as it is written.

A part is given its arguments on its own device; autograd brings gradients back the same way. What the model computes between its parts (a skip that is added, a
loss of its own) is computed on the device of the stage that runs. What the model returns comes back to where the batch is, so that a loss function finds it
beside the labels. One device computes at a time: this is for memory; a pipeline is for time, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from memfit.errors import InputError
from memfit.step.part_calls import Forward, PartCalls, parts_at, taken_over

Device = torch.device | str


def place(model: nn.Module, calls: PartCalls, ends: Sequence[int], devices: Sequence[Device]) -> None:
    """Move the parts of each stage to its device, and what is in no part to the first one.

    Args:
        model: whole.
        calls: of its parts.
        ends: of each stage, the call before which it ends.
        devices: of each stage.

    Raises:
        InputError: not as many devices as stages.
    """
    where = device_of_parts(model, calls, ends, devices)
    in_parts = {id(module) for path in where for module in model.get_submodule(path).modules()}
    for path, device in where.items():
        model.get_submodule(path).to(device)
    for module in model.modules():
        if id(module) not in in_parts:
            own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)  # noqa: SLF001 - `Module.to` would move all modules below, too
            for tensor in (tensor for table in own for tensor in table.values() if tensor is not None):
                tensor.data = tensor.data.to(devices[0])


def device_of_parts(
    model: nn.Module, calls: PartCalls, ends: Sequence[int], devices: Sequence[Device]
) -> dict[str, torch.device]:
    """The device of each part, by the path of its module: that of its stage, or of an earlier part with which it shares a tensor (tied weights).

    Args, Raises: as for `place`.
    """
    if len(devices) != len(ends):
        raise InputError(f"{len(ends)} stages and {len(devices)} devices: give one device for each stage")
    found: dict[str, torch.device] = {}
    homes: dict[int, torch.device] = {}
    for position, call in enumerate(calls.calls):
        if call.path in found:
            continue
        tensors = list(_tensors(model.get_submodule(call.path)))
        there = next((homes[id(tensor)] for tensor in tensors if id(tensor) in homes), None)
        found[call.path] = _stage_device(position, ends, devices) if there is None else there
        homes |= dict.fromkeys(map(id, tensors), found[call.path])
    return found


@contextmanager
def placed(model: nn.Module, calls: PartCalls, ends: Sequence[int], devices: Sequence[Device]) -> Iterator[None]:
    """Inside, the forward goes from device to device. The model is placed before, and the batch on the first device.

    Calls that backward makes again (activation checkpoints) are no calls of a step.
    """
    forward = _Forward(device_of_parts(model, calls, ends, devices), calls, ends, devices)
    with taken_over(parts_at(model, forward.where), forward.called), taken_over({"": model}, forward.whole):
        yield


class _Forward:
    """How far a forward has come.

    Attributes:
        where: the device of each part.
        inside: a part runs.
        device: of the stage that runs, where something between parts is computed.
    """

    def __init__(
        self, where: Mapping[str, torch.device], calls: PartCalls, ends: Sequence[int], devices: Sequence[Device]
    ) -> None:
        self.where, self.inside = where, False
        self._paths = [call.path for call in calls.calls]
        self._devices = [_stage_device(position, ends, devices) for position in range(len(self._paths))]
        self._first = self.device = torch.device(devices[0])
        self._position = 0
        self._running = False

    def whole(self, _: str, own: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model is called."""
        if self._running or _in_backward():
            return own(*args, **kwargs)
        self._running = True
        try:
            with _BetweenParts(self):
                result = own(*args, **kwargs)
        finally:
            self._running = False
        return _moved(result, self._first)

    def called(self, path: str, own: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A part is."""
        if self.inside:
            return own(*args, **kwargs)
        self.inside = True
        try:
            result = own(*_moved(args, self.where[path]), **_moved(dict(kwargs), self.where[path]))
        finally:
            self.inside = False
        if _in_backward():
            return result
        # Where the forward before this one ended early, this one begins anew.
        position = next(n for n in (self._position, *range(len(self._paths))) if self._paths[n] == path)
        self._position = (position + 1) % len(self._paths)
        # A loss function may call the parts itself, and not the model.
        self.device = self._devices[position] if self._position or self._running else self._first
        return _moved(result, self.device)


class _BetweenParts(TorchFunctionMode):
    """What runs between parts finds its tensors on one device: that of the stage that runs, or of the tensor that is written."""

    def __init__(self, forward: _Forward) -> None:
        super().__init__()
        self._forward = forward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._forward.inside:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if len({tensor.device for tensor in tensors if tensor.ndim}) > 1:
                written = _written(func, args, kwargs)
                device = self._forward.device if written is None else written.device
                args, kwargs = _moved((args, kwargs), device)
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """What a function of torch writes into, by its name; None where nothing is."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
    found = args[0] if in_place and args else kwargs.get("out")
    return found if isinstance(found, torch.Tensor) else None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0  # noqa: SLF001 - as nothing public tells


def _stage_device(position: int, ends: Sequence[int], devices: Sequence[Device]) -> torch.device:
    return torch.device(devices[next(stage for stage, end in enumerate(ends) if position < end)])


def _moved(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) and leaf.device != device else leaf, tree
    )


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
