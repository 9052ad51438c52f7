"""The layers of a stream, and the groups of parameters that the optimizer steps together, with their offsets on the lower tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from memfit.storage.tiers import Tier
from memfit.streaming.packing import PackedLayout
from memfit.techniques.layer_streaming.blocks import own_parameters


@dataclass(slots=True, eq=False)
class ParameterGroup:
    """Parameters that the optimizer steps together, and where their state is.

    Attributes:
        parameters: all of which get gradients.
        like: layout of the parameters; each moment of the state takes as much.
        state: layout of the state; None before it has been written for the first time.
        keys: of each tensor of the state, whose and which.
        offset, size_bytes: reserved for the state on the lower tier; negative for nowhere.
        copy_offset: of a copy of the state, while steps are to be undone.
    """

    parameters: list[nn.Parameter]
    like: PackedLayout
    state: PackedLayout | None = None
    keys: list[tuple[nn.Parameter, str]] = field(default_factory=list)
    offset: int = -1
    size_bytes: int = 0
    copy_offset: int = -1


@dataclass(slots=True, eq=False)
class Layer:
    """One block and where it is on the lower tier.

    Attributes:
        number: in the order of forward.
        path, module: of the block.
        parameters: its own.
        weights, gradients: layouts of the parameters, and of those that get gradients.
        group: of those that get gradients.
        weights_offset, gradients_offset, copy_offset: on the lower tier; negative for nowhere.
    """

    number: int
    path: str
    module: nn.Module
    parameters: list[nn.Parameter]
    weights: PackedLayout
    weights_offset: int
    gradients: PackedLayout
    group: ParameterGroup
    gradients_offset: int = -1
    copy_offset: int = -1

    @property
    def trained(self) -> list[nn.Parameter]:
        """Of its own parameters, those that get gradients."""
        return self.group.parameters


def layers_of(model: nn.Module, paths: Sequence[str], tier: Tier) -> list[Layer]:
    """The blocks at these paths, each with space for its weights on the tier.

    Raises:
        InfeasibleError: the tier does not have the space.
    """
    layers = []
    for number, (path, parameters) in enumerate(own_parameters(model, paths).items()):
        trained = [p for p in parameters if p.requires_grad]
        weights, gradients = PackedLayout.of(parameters), PackedLayout.of(trained)
        offset = tier.reserve(weights.size_bytes)
        group = ParameterGroup(trained, gradients)
        layers.append(Layer(number, path, model.get_submodule(path), parameters, weights, offset, gradients, group))
    return layers


def in_groups(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[ParameterGroup]:
    """Parameters in groups of about this many bytes, so that the state of none is much larger than a block's, but for a single large parameter."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        own = parameter.numel() * parameter.element_size()
        if not groups or size + own > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += own
    return [ParameterGroup(held, PackedLayout.of(held)) for held in groups]


Called = Callable[[Layer, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
"""Told of a call of a layer's forward: the layer, its own forward, and what it was called with; returns what the call returns."""


@contextmanager
def intercepted(layers: Sequence[Layer], called: Called) -> Iterator[None]:
    """Calls of the layers' forwards go to `called` inside; the modules are put back whatever happens."""
    before = [layer.module.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            forward = layer.module.forward

            def instead(*args: Any, layer: Layer = layer, forward: Any = forward, **kwargs: Any) -> Any:
                return called(layer, forward, args, kwargs)

            layer.module.__dict__["forward"] = instead
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            if old is None:
                layer.module.__dict__.pop("forward", None)
            else:
                layer.module.__dict__["forward"] = old
