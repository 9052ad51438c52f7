"""The optimizer's part of a streamed step: it steps one group of parameters at a time, while the layer before is in backward.

The optimizer is the user's one object. It steps one layer at a time, with only that layer's parameters in its groups; elementwise and per-tensor
optimizers cannot tell the difference, one that counts steps in its groups can, and is refused.

With clipping, the norm of all gradients must be known before the first update: gradients wait on the lower tier, and every layer comes once more.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from memfit.errors import EngineError
from memfit.step.program import StepProgram
from memfit.streaming.layers import Layer, ParameterGroup
from memfit.streaming.optimizer_state import StreamedState
from memfit.streaming.placement import LayerPlacement
from memfit.streaming.watch import NO_WATCH, Watch


class Updates:
    """Updates of one stream.

    Args:
        placement: of the layers.
        state: of the optimizer.
        resident: what is trained but not in the layers.

    Attributes:
        begun: whether the step has begun to change parameters; if it fails after that, some of them have changed.
    """

    def __init__(self, placement: LayerPlacement, state: StreamedState, resident: Sequence[ParameterGroup]) -> None:
        self.begun = False
        self._placement, self._state, self._resident = placement, state, resident
        self._watch = NO_WATCH
        self._changing: Callable[[], object] = lambda: None
        self._norms: dict[int, Tensor] = {}  # of gradients, by parameter, while a step that clips is under way
        self._aside: dict[int, set[int]] = {}  # by layer, the parameters whose gradients wait on the lower tier

    def begin(self, watch: Watch, changing: Callable[[], object]) -> None:
        """A step begins.

        Args:
            watch: entered around each update.
            changing: called just before parameters begin to change.
        """
        self.begun = False
        self._watch, self._changing = watch, changing
        self._norms.clear()
        self._aside.clear()

    def end(self) -> None:
        """The step is over: its watch is not called any more."""
        self._watch, self._changing = NO_WATCH, lambda: None

    def after_backward(self, layer: Layer, graded: list[nn.Parameter], *, clips: bool) -> None:
        """A layer's gradients are complete: update it while others compute or, with clipping, offload them until the global norm is known."""
        if graded and clips:
            self._placement.reserve_gradients(layer)
            seconds = self._placement.measured.behind_seconds
            self._placement.worker.submit(functools.partial(self._set_aside, layer, graded), seconds)
        elif graded:
            self._begin_changing()
            self._while_computing(functools.partial(self._update_layer, layer))

    def finish(self, program: StepProgram, resident: Sequence[nn.Parameter], layers: Sequence[Layer]) -> None:
        """Update what backward has not updated: everything with clipping, otherwise the parameters that are not in the layers."""
        graded = [p for p in resident if p.grad is not None]
        clip_norm = program.clip_norm
        norm: Tensor | None = None
        if clip_norm is not None:
            self._placement.worker.drain()
            self._note_norms(graded)
            # As `torch.nn.utils.clip_grad_norm_` does: the norm of each gradient, then the norm of those in the order of the parameters.
            in_order = [self._norms[id(p)] for p in program.trainable() if id(p) in self._norms]
            if in_order:
                norm = torch.linalg.vector_norm(torch.stack(in_order), 2.0)
        self._begin_changing()
        if clip_norm is not None and norm is not None:
            for layer in reversed(layers):
                if layer.number in self._aside:
                    self._placement.arrive(layer)
                    self._while_computing(functools.partial(self._update_aside, layer, clip_norm, norm))
            with self._watch.update():
                torch.nn.utils.clip_grads_with_norm_(graded, clip_norm, norm)
        for group in self._resident:
            self._while_computing(functools.partial(self._update_group, group))

    def _begin_changing(self) -> None:
        if not self.begun:
            self._changing()
            self.begun = True

    def _while_computing(self, update: Callable[[], None]) -> None:
        """Let the worker do an update. One that allocates memory is done at once: beside computation, the peak would depend on timing."""
        optimizer, worker = self._state.optimizer, self._placement.worker
        assert optimizer is not None, "a step has one"
        seconds = self._placement.measured.behind_seconds
        if all(group.get("fused") for group in optimizer.param_groups):
            worker.submit(update, seconds)
        else:
            worker.drain()
            started = time.perf_counter()
            update()
            seconds.append(time.perf_counter() - started)

    def _set_aside(self, layer: Layer, graded: list[nn.Parameter]) -> None:
        """Offload gradients that wait for the global norm to the lower tier."""
        self._note_norms(graded)
        self._aside[layer.number] = {id(p) for p in graded}
        self._placement.tier.write(layer.gradients_offset, self._placement.gradients_in_slot(layer))
        for parameter in graded:
            parameter.grad = None

    def _note_norms(self, graded: Sequence[nn.Parameter]) -> None:
        if graded:
            grads = [p.grad for p in graded if p.grad is not None]
            norms = torch._foreach_norm(grads, 2.0)  # noqa: SLF001 - what torch.nn.utils calls, for the same bits
            self._norms.update((id(p), norm) for p, norm in zip(graded, norms, strict=True))

    def _update_aside(self, layer: Layer, clip_norm: float, norm: Tensor) -> None:
        graded = self._aside.pop(layer.number)
        self._placement.tier.read(layer.gradients_offset, self._placement.gradients_in_slot(layer))
        views = self._placement.slot_of(layer).views(layer.gradients, gradients=True)
        for parameter, view in zip(layer.trained, views, strict=True):
            parameter.grad = view if id(parameter) in graded else None
        with self._watch.update():
            torch.nn.utils.clip_grads_with_norm_(layer.trained, clip_norm, norm)
        self._update_layer(layer)

    def _update_layer(self, layer: Layer) -> None:
        self._update_group(layer.group)
        self._placement.tier.write(layer.weights_offset, self._placement.weights_in_slot(layer))

    def _update_group(self, group: ParameterGroup) -> None:
        """Step the optimizer on these parameters alone."""
        optimizer = self._state.optimizer
        assert optimizer is not None, "a step has one"
        brought = self._state.bring(group)
        own = {id(p) for p in group.parameters}
        everything = optimizer.param_groups
        alone = [{**each, "params": [p for p in each["params"] if id(p) in own]} for each in everything]
        alone = [each for each in alone if each["params"]]
        before = [{k: v for k, v in each.items() if k != "params"} for each in alone]
        optimizer.param_groups = alone
        try:
            with self._watch.update():
                optimizer.step()
        finally:
            optimizer.param_groups = everything
        for old, new in zip(before, alone, strict=True):
            for name, value in new.items():
                if name != "params" and not isinstance(value, Tensor) and value != old.get(name):
                    raise EngineError(
                        f"{type(optimizer).__name__} keeps {name!r} from step to step for all its parameters together, and streamed layers are stepped "
                        "one by one: use an optimizer that keeps its state by parameter, or plan without streaming"
                    )
        for parameter in group.parameters:
            parameter.grad = None
        self._state.send(group, brought)
