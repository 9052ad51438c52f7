"""Give a model on the meta device its tensors, one module at a time, so that a model that does not fit is never in memory as a whole.

The parameters stay the same objects, so whatever holds them (tied weights, an optimizer) goes on holding them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from memfit.errors import InputError

Fill = Callable[[str, nn.Module], None]
"""Called with the path of a module and the module, whose own tensors are there with any contents: gives them theirs."""


def reset(path: str, module: nn.Module) -> None:
    """Fill a module as its constructor does, by `reset_parameters`.

    Raises:
        InputError: it has none.
    """
    if not callable(again := getattr(module, "reset_parameters", None)):
        raise InputError(
            f"{path or 'the model'} ({type(module).__name__}) is on the meta device and has no reset_parameters(): hand a function fill(path, module) "
            "that gives its tensors their values"
        )
    again()


def from_tensors(tensors: Mapping[str, Tensor]) -> Fill:
    """Fill by name from a mapping that reads a tensor when asked: `torch.load(file, mmap=True)`, or a view of a safetensors file."""

    def fill(path: str, module: nn.Module) -> None:
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        for name, tensor in own.items():
            full = f"{path}.{name}" if path else name
            if full not in tensors:
                raise InputError(
                    f"there is no tensor named {full!r} to fill the model with: hand one that has them all"
                )
            with torch.no_grad():
                tensor.copy_(tensors[full])

    return fill


def filled(model: nn.Module, fill: Fill, device: torch.device) -> Iterator[str]:
    """Walk the modules in the order of `named_modules`; the path of each, once its own tensors are there.

    Tensors that are not on the meta device stay as they are.
    """
    for path, module in model.named_modules():
        parameters = [p for p in module.parameters(recurse=False) if p.device.type == "meta"]
        buffers = {n: b for n, b in module.named_buffers(recurse=False) if b.device.type == "meta"}
        absent = [nn.Parameter(torch.empty_like(p, device=device), p.requires_grad) for p in parameters]
        for parameter, made in zip(parameters, absent, strict=True):
            torch.utils.swap_tensors(parameter, made)
        module._buffers.update((n, torch.empty_like(b, device=device)) for n, b in buffers.items())  # noqa: SLF001 - as Module.to_empty does
        if parameters or buffers:
            try:
                fill(path, module)
            except BaseException:  # what has no values yet must not look as if it had
                for parameter, made in zip(parameters, absent, strict=True):
                    torch.utils.swap_tensors(parameter, made)
                module._buffers.update(buffers)  # noqa: SLF001
                raise
        yield path
