"""Tensors that are there before a step besides parameters, buffers and the batch, and count in it: the model's, and those of the loss function."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from memfit.step.absent import Absent
from memfit.step.attributes import values_of


def loss_tensors(loss_fn: Callable[..., Any] | None) -> list[torch.Tensor]:
    """Tensors that a loss function has besides its arguments: alone (class weights), in modules (a teacher), and the state of optimizers that it steps."""
    found: list[torch.Tensor] = []
    for value in values_of(loss_fn):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, torch.nn.Module):
            parameters = list(value.parameters())
            found += [*parameters, *value.buffers(), *model_tensors(value)]
            found += [p.grad for p in parameters if p.grad is not None]
        elif isinstance(value, torch.optim.Optimizer):  # a discriminator's, which the loss steps
            found += tensors_within(value.state.values())
    return found


def model_tensors(model: torch.nn.Module, *, hidden: bool = True) -> list[torch.Tensor]:
    """Tensors that modules hold as plain attributes, alone or in a list, tuple or dictionary: there before a step, and counted in it.

    So are those that hang on parameters (`hung_on`).

    Args:
        model: whose modules.
        hidden: also all tensors of modules that are held so, hidden from `parameters()` (a teacher in a list).
    """
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    found: list[torch.Tensor] = []

    def add(tensors: Iterable[torch.Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None and id(tensor) not in known and not isinstance(tensor, Absent):
                known.add(id(tensor))
                found.append(tensor)

    for parameter in model.parameters():
        add(hung_on(parameter))
    waiting = list(model.modules())
    seen = set(waiting)
    for module in waiting:  # grows
        for name, value in module.__dict__.items():
            if name in {"_parameters", "_buffers", "_modules"}:
                continue
            held = value.values() if isinstance(value, dict) else value
            for item in held if isinstance(value, (list, tuple, dict)) else (value,):
                if isinstance(item, torch.Tensor):
                    add((item,))
                elif hidden and isinstance(item, torch.nn.Module):
                    inner = [each for each in item.modules() if each not in seen]
                    seen.update(inner)
                    waiting += inner
                    for each in inner:
                        own = each._parameters.values()  # noqa: SLF001 - `parameters` would go through what is registered, too
                        add((*own, *each._buffers.values(), *(p.grad for p in own if p is not None)))  # noqa: SLF001 - as above
    return found


def hung_on(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Tensors in the attributes of a parameter: bitsandbytes keeps the scales of a packed weight so (`quant_state`)."""
    return tensors_within(vars(parameter).values())


def tensors_within(values: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors among these, in containers among them and in the attributes of objects, in order; not what modules hold, nor what memfit's own objects do."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = list(values)[::-1]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        # What an optimizer's state consists of comes first: it has thousands of each, in every step.
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            waiting += list(value.values())[::-1]
        elif isinstance(value, (torch.nn.Module, type)):
            continue
        elif isinstance(value, (list, tuple, set, deque)):
            waiting += list(value)[::-1]
        elif isinstance(value, Mapping):
            waiting += list(value.values())[::-1]
        elif not (callable(value) or type(value).__module__.startswith("memfit.")) and isinstance(
            getattr(value, "__dict__", None), dict
        ):
            waiting += list(vars(value).values())[::-1]
    return found
