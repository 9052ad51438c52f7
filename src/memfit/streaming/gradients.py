"""Gradients of the layer in backward: they are accumulated in the layer's slot, not in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from memfit.errors import EngineError
from memfit.streaming.layers import Layer


class SlotGradients:
    """Moves each gradient of the layers into the layer's slot as soon as autograd has computed it.

    Args:
        layers: whose parameters are hooked, until `close`.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._views: dict[int, Tensor] = {}  # of the gradients of the layer in backward, by parameter
        self._graded: set[int] = set()
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for layer in layers for p in layer.trained]

    def begin(self, layer: Layer, views: Sequence[Tensor]) -> None:
        """The layer's backward begins; its gradients go to these views of its slot."""
        self._views = {id(p): view for p, view in zip(layer.trained, views, strict=True)}
        self._graded.clear()

    def _take(self, parameter: Tensor) -> None:
        """Add up in the slot: at first a copy, then what accumulation does in place."""
        view = self._views.get(id(parameter))
        grad = parameter.grad
        if view is None or grad is None:
            return  # Not in a step: a backward of the user's while all parameters are gathered.
        if grad.layout is not torch.strided:
            raise EngineError(
                "a streamed block gives a sparse gradient, which does not fit into its buffer on the device: build it with sparse=False"
            )
        if id(parameter) in self._graded:
            view.add_(grad)
        else:
            self._graded.add(id(parameter))
            view.copy_(grad)
        parameter.grad = None

    def finish(self, layer: Layer) -> list[nn.Parameter]:
        """The layer has been through backward: its parameters that got gradients, which are now where the slot has them."""
        graded = [p for p in layer.trained if id(p) in self._graded]
        for parameter in graded:
            parameter.grad = self._views[id(parameter)]
        self.forget()
        return graded

    def forget(self) -> None:
        """No layer is in backward."""
        self._views = {}

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
