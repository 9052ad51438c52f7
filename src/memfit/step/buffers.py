"""Buffers of a model, which forward may write or replace: noted and put back, and those that a state dict leaves out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from memfit.errors import EngineError
from memfit.step.modules import every_module, modules_of


def norm_statistics(model: nn.Module) -> tuple[str, ...]:
    """Names of the running statistics of normalisation layers in training: what is known to change in forward without a capture."""
    return tuple(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, _NormBase) and module.training
        for name, _ in module.named_buffers(recurse=False)
    )


class BufferCopies:
    """Copies of the buffers that forward writes in place: allocated once, so that they exist before a step, and filled before each step.

    Attributes:
        copies: by the buffer's name in the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.copies: dict[str, torch.Tensor] = {}

    def add(self, names: tuple[str, ...]) -> None:
        """Keep copies of these buffers too.

        Raises:
            EngineError: the model does not have one of them.
        """
        buffers = dict(self._model.named_buffers())
        for name in names:
            if name not in buffers:
                raise EngineError(
                    f"the plan says that forward writes the buffer {name!r}, which this model does not have: plan again for it"
                )
            if name not in self.copies:
                self.copies[name] = buffers[name].clone()


class Buffers:
    """The buffers that a model has now, to be put back later: the tensors themselves, and what is in those that there are copies for.

    Args:
        model: whose.
        copies: filled here, by the names of the buffers; of other buffers only which tensors they are is noted.
    """

    def __init__(self, model: nn.Module, copies: Mapping[str, torch.Tensor]) -> None:
        some = any(module._buffers for module in every_module(model))  # noqa: SLF001 - as below
        self._places = [
            (f"{path}.{name}" if path else name, module, name, buffer)
            for path, module in (modules_of(model) if some else {}).items()
            for name, buffer in module._buffers.items()  # noqa: SLF001 - named_buffers leaves out the ones that are None
        ]
        self._copies = copies
        noted = self._by_path()
        for path, copy in copies.items():
            as_large_as(copy, noted[path])
        if copies:  # in one call, as some models have hundreds
            torch._foreach_copy_(list(copies.values()), [noted[path] for path in copies])

    def put_back(self) -> None:
        """Have the model's buffers be the same tensors, with what was in them."""
        for _, module, name, buffer in self._places:
            module._buffers[name] = buffer  # noqa: SLF001 - where forward put another tensor in its place
        noted = self._by_path()
        with torch.no_grad():
            for path, copy in self._copies.items():
                as_large_as(noted[path], copy).copy_(copy)

    def _by_path(self) -> dict[str, torch.Tensor]:
        return {path: buffer for path, _, _, buffer in self._places if buffer is not None} if self._copies else {}


def as_large_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor, resized where the other has another shape: a forward may resize a buffer (an observer, whose first batch tells its channels)."""
    return tensor if tensor.shape == like.shape else tensor.resize_(like.shape)


def further_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that `state_dict` leaves out: a forward pass may still have changed them."""
    there = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in there}


def set_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `further_buffers`."""
    for path, saved in buffers.items():
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        there = getattr(module, name)
        if isinstance(there, torch.Tensor) and (there.shape, there.dtype) == (saved.shape, saved.dtype):
            there.copy_(saved)  # in place: others may look at the same tensor
        else:
            setattr(module, name, saved.to(there.device if isinstance(there, torch.Tensor) else "cpu"))
