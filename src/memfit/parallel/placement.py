"""Model parallelism in one process: each stage of a model on a device of its own, the forward as it is written.

A part is given its arguments on its own device; autograd brings gradients back the same way. What the last part returns comes back to where the batch is, so
that the loss finds it beside the labels. One device computes at a time: this is for memory; a pipeline is for time, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit.errors import InputError
from memfit.step.part_calls import Forward, PartCalls, parts_at, taken_over


def place(model: nn.Module, calls: PartCalls, ends: Sequence[int], devices: Sequence[torch.device | str]) -> None:
    """Move the parts of each stage to its device, and what is in no part to the first one.

    Args:
        model: whole.
        calls: of its parts.
        ends: of each stage, the call before which it ends.
        devices: of each stage.

    Raises:
        InputError: not as many devices as stages, or a module or a parameter (tied weights) is used in stages on different devices.
    """
    if len(devices) != len(ends):
        raise InputError(f"{len(ends)} stages and {len(devices)} devices: give one device for each stage")
    where = device_of_parts(calls, ends, devices)
    homes: dict[int, torch.device] = {}
    for path, device in where.items():
        for tensor in _tensors(model.get_submodule(path)):
            if homes.setdefault(id(tensor), device) != device:
                raise InputError(
                    f"{path} shares a parameter with a part on {homes[id(tensor)]} and is on {device} itself: tied weights can be on one device only, so cut "
                    "such that their parts are on one stage"
                )
    in_parts = {id(module) for path in where for module in model.get_submodule(path).modules()}
    for path, device in where.items():
        model.get_submodule(path).to(device)
    for module in model.modules():
        if id(module) not in in_parts:
            own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)  # noqa: SLF001 - `Module.to` would move all modules below, too
            for tensor in (tensor for table in own for tensor in table.values() if tensor is not None):
                tensor.data = tensor.data.to(devices[0])


def device_of_parts(
    calls: PartCalls, ends: Sequence[int], devices: Sequence[torch.device | str]
) -> dict[str, torch.device]:
    """The device of each part, by the path of its module."""
    found: dict[str, torch.device] = {}
    for position, call in enumerate(calls.calls):
        device = torch.device(devices[next(stage for stage, end in enumerate(ends) if position < end)])
        if found.setdefault(call.path, device) != device:
            raise InputError(
                f"{call.path} is called in stages on {found[call.path]} and on {device}, and its parameters can be on one device only: cut elsewhere"
            )
    return found


@contextmanager
def placed(
    model: nn.Module, calls: PartCalls, ends: Sequence[int], devices: Sequence[torch.device | str]
) -> Iterator[None]:
    """Inside, calls of the model's parts are given their arguments on the part's own device. The model is placed before, and the batch on the first device.

    Calls that backward makes again (activation checkpoints) are no calls of a step.
    """
    where = device_of_parts(calls, ends, devices)
    last = len(calls.calls)
    position = 0
    depth = 0

    def called(path: str, own: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        nonlocal position, depth
        if depth:
            return own(*args, **kwargs)
        depth = 1
        try:
            result = own(*_moved(args, where[path]), **_moved(dict(kwargs), where[path]))
        finally:
            depth = 0
        if torch._C._current_graph_task_id() >= 0:  # noqa: SLF001 - in a backward, as nothing public tells
            return result
        # Where the forward before this one ended early, this one begins anew.
        position = 1 + next(n for n in (position, *range(last)) if calls.calls[n].path == path)
        if position == last:
            position = 0
            return _moved(result, torch.device(devices[0]))
        return result

    with taken_over(parts_at(model, where), called):
        yield


def _moved(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) and leaf.device != device else leaf, tree
    )


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
