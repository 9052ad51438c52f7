"""Forward and backward of one streamed step: layer outer, micro-batch inner, with the next layer being loaded while one computes.

forward     layer l computes for each micro-batch, without a graph, while layer l+1 is read into the other slot
backward    layer l runs again with a graph, micro-batch after micro-batch; its gradients add up in the slot
update      the optimizer steps layer l, and writes it back, while layer l-1 is in backward
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from memfit.batches import Batch
from memfit.errors import EngineError
from memfit.step.program import StepProgram
from memfit.streaming.gradients import SlotGradients
from memfit.streaming.graph_cuts import Pass
from memfit.streaming.interleaving import Interleaving
from memfit.streaming.layers import Layer, intercepted
from memfit.streaming.overlap import timed
from memfit.streaming.placement import LayerPlacement
from memfit.streaming.updates import Updates
from memfit.streaming.watch import Watch


def forward(
    placement: LayerPlacement,
    program: StepProgram,
    parts: Sequence[Batch],
    weights: Sequence[float | None],
    passes: Sequence[Pass],
    watch: Watch,
    *,
    check_finite: bool,
) -> list[Tensor]:
    """Forward of all micro-batches, and backward through what comes after the layers; `passes` know then what the layers were called with.

    Returns:
        The unweighted losses, detached.

    Raises:
        EngineError: the layers are not called in order, or cannot be called a second time; or the lower tier failed.
        NonFiniteLossError: as asked for by `check_finite`.
    """
    layers, measured = placement.layers, placement.measured
    interleaving = Interleaving(placement.device)
    present: list[Pass] = []  # whose turn it is

    def body(part: Batch, weight: float | None, way: Pass) -> Tensor:
        present[:] = [way]
        return program.forward_backward(part, weight, watch.forward(), check_finite=check_finite)

    def called(layer: Layer, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        way = present[0]
        _check_order(placement, layer, way)
        interleaving.wait()
        present[:] = [way]
        watch.goes_on()
        if way is passes[0]:
            placement.arrive(layer)
            if layer.number + 1 < len(layers):
                placement.fetch(layers[layer.number + 1])
        if layer.number == 0:
            measured.tokens += _rows(args, kwargs)
        with timed(measured.forward_seconds, layer.number):
            return way.through(layer.path, layer.module, own, args, kwargs)

    with intercepted(layers, called):
        losses: list[Tensor] = interleaving.run(
            [functools.partial(body, *each) for each in zip(parts, weights, passes, strict=True)],
            watch,
        )
    for way in passes:
        if len(way.calls) < len(layers):
            raise EngineError(
                f"the forward ended without calling {layers[len(way.calls)].path}: layer streaming needs the blocks of {placement.path!r} to be "
                "called once each, in their order. Plan without streaming, or stream other blocks"
            )
    return losses


def _check_order(placement: LayerPlacement, layer: Layer, way: Pass) -> None:
    done = len(way.calls)
    if layer.number != done:
        instead = f"where {placement.layers[done].path} was next" if layer.number > done else "a second time"
        raise EngineError(
            f"the model called {layer.path} {instead}: layer streaming needs the blocks of {placement.path!r} to be called once each, in their order. "
            "Plan without streaming, or stream other blocks"
        )


def backward(
    placement: LayerPlacement,
    gradients: SlotGradients,
    updates: Updates,
    passes: Sequence[Pass],
    watch: Watch,
    *,
    clips: bool,
) -> None:
    """Backward through the layers, the last one first; each is updated when its gradients are whole."""
    needed = [layer for layer in placement.layers if any(way.calls[layer.number].wanted for way in passes)]
    for layer in reversed(needed):
        placement.arrive(layer)
        gradients.begin(layer, placement.slot_of(layer).views(layer.gradients, gradients=True))
        with timed(placement.measured.backward_seconds, layer.number):
            for way in passes:
                way.calls[layer.number].return_through(watch.forward())
        updates.after_backward(layer, gradients.finish(layer), clips=clips)
        # The job before lets go of the slot's layer, so the next one may be read into it.
        following = [other for other in needed if other.number < layer.number and other.number % 2 == layer.number % 2]
        if following:
            placement.fetch(following[-1])
    for way in passes:
        way.finished()


def _rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Tokens, or whatever a block sees many of: all dimensions of its first floating-point input but the last."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return value.numel() // max(1, value.shape[-1])
    return 0
