"""What a step changes besides parameters, gradients and optimizer state (buffers, plain attributes, generators, the scale of gradients): saved and restored.

Used wherever a step may be undone, in the engine's transaction and in the rehearsal; and where a step that has happened is looked at again.
"""

from __future__ import annotations

import random
import weakref
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
from memfit.techniques.autocast.precision import Scaling


class Trained:
    """Which parameters of a model are trained, as it was when that was last asked for. Kept from step to step, as there are thousands."""

    def __init__(self, model: nn.Module) -> None:
        self._known = [(weakref.ref(p), p.requires_grad) for p in model.parameters()]

    def changes(self) -> tuple[int, int]:
        """How many are that were not, and how many no longer."""
        known = [(reference, p, before) for reference, before in self._known if (p := reference()) is not None]
        more = sum(p.requires_grad and not before for _, p, before in known)
        fewer = sum(before and not p.requires_grad for _, p, before in known)
        if more or fewer:
            self._known = [(reference, p.requires_grad) for reference, p, _ in known]
        return more, fewer

    def put_back(self) -> None:
        """Restore what has changed since."""
        for reference, before in self._known:
            parameter = reference()
            if parameter is not None and parameter.requires_grad != before:
                parameter.requires_grad_(before)


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
