"""What a step changes besides parameters, gradients and optimizer state (buffers, plain attributes, generators, the scale of gradients): saved and restored.

Used wherever a step may be undone, in the engine's transaction and in the rehearsal; and where a step that has happened is looked at again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from memfit.step.attributes import PlainValues, held_by
from memfit.step.buffers import Buffers
from memfit.step.device import device_of
from memfit.step.generators import GeneratorStates
from memfit.step.modules import every_module
from memfit.techniques.autocast.precision import Scaling


class Trained:
    """Which parameters of a model are trained, as it was when that was last asked for. Kept from step to step, as there are thousands.

    By their places in modules: what has a weak reference cannot be moved by torch, which exchanges DTensors with others when a model is moved.
    """

    def __init__(self, model: nn.Module) -> None:
        found = {
            id(parameter): (module._parameters, name, parameter.requires_grad)  # noqa: SLF001 - without the paths, which take most of the time
            for module in every_module(model)
            for name, parameter in module._parameters.items()  # noqa: SLF001 - as above
            if parameter is not None
        }
        self._known = list(found.values())

    def changes(self) -> tuple[int, int]:
        """How many are that were not, and how many no longer."""
        now = [(parameter.requires_grad, before) for parameter, before in self._there()]
        more = sum(trained and not before for trained, before in now)
        fewer = sum(before and not trained for trained, before in now)
        if more or fewer:
            self._known = [
                (table, name, p.requires_grad) for table, name, _ in self._known if (p := table.get(name)) is not None
            ]
        return more, fewer

    def put_back(self) -> None:
        """Restore what has changed since."""
        for parameter, before in self._there():
            if parameter.requires_grad != before:
                parameter.requires_grad_(before)

    def _there(self) -> list[tuple[nn.Parameter, bool]]:
        return [(p, before) for table, name, before in self._known if (p := table.get(name)) is not None]


class Updated:
    """The parameters of a model that an optimizer updates. What takes the place of one in the model, or comes to it, is not updated, and PyTorch says nothing.

    Args:
        model: as the optimizer was made for it.
        optimizer: holds parameters, so that their ids stay theirs; None for none.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._there = _parameters(model)
        self._known = self._held() & self._there.keys()

    def changes(self, model: nn.Module) -> tuple[int, int, int]:
        """What has changed since this was last asked.

        Returns:
            How many are not the model's any more, how many have come to it that the optimizer does not hold, and how many have another type.
        """
        if not self._known:
            return 0, 0, 0
        there = _parameters(model)
        gone = len(self._known - there.keys())
        added = there.keys() - self._there.keys()
        if added:
            added = {id(each) for each in model.parameters() if each.requires_grad} & added - self._held()
        retyped = sum(self._there.get(name, dtype) != dtype for name, dtype in there.items())
        self._there, self._known = there, self._known & there.keys()
        return gone, len(added), retyped

    def _held(self) -> set[int]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return {id(each) for group in groups for each in group["params"]}


def _parameters(model: nn.Module) -> dict[int, torch.dtype]:
    """Types of a model's parameters, by identity."""
    every = (each for module in every_module(model) for each in module._parameters.values())  # noqa: SLF001 - without the paths
    return {id(each): each.dtype for each in every if each is not None}


class Deciding:
    """What may decide which path a forward takes, tensors apart: plain attributes of modules and the states of all generators, as they are when this is made.

    Args:
        model: whose modules.
        loss_fn: whose modules as well: losses note what they have seen.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._values = PlainValues(model, *(module for module in held_by(loss_fn) if module is not model))
        self._generators = GeneratorStates(device_of(model))
        self._outside = random.getstate(), np.random.get_state()  # noqa: NPY002 - models draw from the global one

    def put_back(self) -> None:
        """Restore what has changed."""
        self._values.put_back()
        self._generators.put_back()
        random.setstate(self._outside[0])
        np.random.set_state(self._outside[1])  # noqa: NPY002

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, all of it is as it was; afterwards as it is now."""
        now = Deciding(self._model, self._loss_fn)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


class Guard:
    """Saves buffers, plain attributes, generators and gradient scale when it is made, to be restored later.

    Args:
        model: whose buffers.
        copies: of the buffers that forward writes in place, filled here (`BufferCopies`).
        scaling: of the gradients, where they are scaled.
        loss_fn: as for `Deciding`.

    Attributes:
        deciding: which of it may decide the path of forward.
    """

    def __init__(
        self,
        model: nn.Module,
        copies: Mapping[str, torch.Tensor] | None = None,
        scaling: Scaling | None = None,
        loss_fn: Callable[..., Any] | None = None,
    ) -> None:
        self._buffers = Buffers(model, copies or {})
        self.deciding = Deciding(model, loss_fn)
        self._scaling = scaling
        self._scale: dict[str, Any] | None = None if scaling is None else scaling.state()

    def put_back(self) -> None:
        """Restore what was saved."""
        self._buffers.put_back()
        self.deciding.put_back()
        if self._scaling is not None and self._scale is not None:
            self._scaling.set_state(self._scale)
