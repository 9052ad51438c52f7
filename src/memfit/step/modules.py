"""The modules of a model, found quickly: every step looks through them, and `named_modules` takes milliseconds where there are thousands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_REMEMBERED = threading.local()  # of this thread: None where each look goes through the model


@contextmanager
def remembering_modules() -> Iterator[None]:
    """Inside, and until the model runs (`forget_modules`), modules are looked for once: what a step notes before that would look six times."""
    _REMEMBERED.found = {}
    try:
        yield
    finally:
        forget_modules()


def forget_modules() -> None:
    """The model runs now, and may get other modules."""
    _REMEMBERED.found = None


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """All modules by their paths, each once, in the order of `named_modules`: the model itself first, by the empty path. Not to be changed."""
    remembered: dict[nn.Module, dict[str, nn.Module]] | None = getattr(_REMEMBERED, "found", None)
    if remembered is None:
        return _looked_for(model)
    if model not in remembered:
        remembered[model] = _looked_for(model)
    return remembered[model]


def _looked_for(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        found[path] = module
        children = module._modules  # noqa: SLF001 - named_children keeps a set of its own for each module
        if children:
            front = f"{path}." if path else ""
            waiting += [(front + name, child) for name, child in reversed(children.items()) if child is not None]
    return found


def every_module(model: nn.Module) -> list[nn.Module]:
    """The same without their paths, which take most of the time to make."""
    if getattr(_REMEMBERED, "found", None) is not None:
        return list(modules_of(model).values())
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        found.append(module)
        children = module._modules  # noqa: SLF001 - as above
        if children:
            waiting += [child for child in reversed(children.values()) if child is not None]
    return found


def has_gradients(model: nn.Module) -> bool:
    """Whether a parameter has one."""
    return any(
        parameter is not None and parameter.grad is not None
        for module in every_module(model)
        for parameter in module._parameters.values()  # noqa: SLF001 - as above
    )


def let_go_of_gradients(model: nn.Module) -> None:
    """Of all parameters."""
    for module in every_module(model):
        for parameter in module._parameters.values():  # noqa: SLF001 - as above
            if parameter is not None:
                parameter.grad = None
