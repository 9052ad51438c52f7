"""Run the user's model without side effects: generators are restored, and the model's tensors are replaced for the time of the run.

Fake tensors allocate nothing; private copies leave the user's own untouched.

`torch.func.functional_call` does this for one call of one module; a step also holds closures over the model and an optimizer over its parameters, so the
tensors are exchanged inside the modules and put back at the end, together with every attribute that forward may have set.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.dispatch import has_storage, storage_key, written
from memfit.storage.raw_bytes import flat_storage

_HOLDERS: Final = (list, tuple, dict)


@contextmanager
def lent(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace every parameter, buffer and tensor attribute of the model by `make(tensor)` inside the block.

    One tensor used in several places (tied weights) stays one tensor. Everything is put back at exit, attributes set meanwhile included.
    """
    made: dict[int, torch.Tensor] = {}
    keep: list[torch.Tensor] = []

    def exchanged(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            keep.append(tensor)
            fresh = make(tensor)
            if isinstance(tensor, nn.Parameter) and fresh is not tensor:
                fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
            made[id(tensor)] = fresh
        return made[id(tensor)]

    before: list[tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    containers: list[tuple[Any, Any]] = []
    for module in _modules(model):
        containers += [(v, copy.copy(v)) for v in module.__dict__.values() if type(v) in (list, dict, set)]
        before.append((module, dict(module.__dict__), dict(module._parameters), dict(module._buffers)))
    try:
        for module, attributes, parameters, buffers in before:
            for name, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[name] = exchanged(parameter)  # type: ignore[assignment]
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = exchanged(buffer)
            for name, value in attributes.items():
                replaced = _exchange(value, exchanged)
                if replaced is not value:
                    module.__dict__[name] = replaced
        yield
    finally:
        for container, contents in containers:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)
        for module, attributes, parameters, buffers in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for table, original in ((module._parameters, parameters), (module._buffers, buffers)):
                table.clear()
                table.update(original)


def _modules(model: nn.Module) -> list[nn.Module]:
    """All modules, those in plain lists, tuples and mappings too: their parameters may be registered elsewhere, and it is they who compute."""
    found: dict[int, nn.Module] = {}
    looked_into: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        if isinstance(value, nn.Module):
            new = [module for module in value.modules() if id(module) not in found]
            found.update((id(module), module) for module in new)
            waiting += [v for module in new for v in module.__dict__.values() if type(v) in _HOLDERS]
        elif id(value) not in looked_into:
            looked_into.add(id(value))
            items = value.values() if type(value) is dict else value
            waiting += [v for v in items if isinstance(v, nn.Module) or type(v) in _HOLDERS]
    return list(found.values())


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[None]:
    """What a real forward writes into parameters (a momentum encoder's average, `p.data = ...`) is undone at exit, versions included.

    Only what is written is copied, at its first write: a copy of all parameters may be more than there is memory for.
    """
    before = [(parameter, parameter.detach(), parameter._version) for parameter in model.parameters()]
    watch = _CopiesAtWrite(storage_key(alias) for _, alias, _ in before if has_storage(alias))
    try:
        with watch:
            yield
    finally:
        for parameter, alias, version in before:
            if not has_storage(alias):
                continue
            if storage_key(parameter) != storage_key(alias):
                parameter.data = alias
            contents = watch.contents.get(storage_key(alias))
            if contents is not None:
                flat_storage(alias.untyped_storage()).copy_(contents)
            if parameter._version != version:
                torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))


class _CopiesAtWrite(TorchDispatchMode):
    """Copies the bytes of storages before an operation first writes into them.

    Attributes:
        contents: by storage, the bytes that were in it.
    """

    def __init__(self, storages: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = set(storages)
        self.contents: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written(func, args, kwargs or {}):
            key = storage_key(tensor) if has_storage(tensor) else None
            if key is not None and key in self._storages and key not in self.contents:
                self.contents[key] = flat_storage(tensor.untyped_storage()).clone()
        return func(*args, **(kwargs or {}))


def _exchange(value: Any, exchanged: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return exchanged(value)
    if type(value) in (list, tuple) and any(isinstance(v, torch.Tensor) for v in value):
        return type(value)(_exchange(v, exchanged) for v in value)
    if type(value) is list and any(type(v) in (list, tuple) for v in value):
        # torch.nn.RNNBase keeps its weights once more, in lists.
        return [_exchange(v, exchanged) for v in value]
    return value
