"""Layer streaming: the repeated blocks of a model lie on the lower tier and come to the device one at a time.

Parameters, gradients and optimizer state of a block are on the device only while it is their turn. The order is that of L2L (Pudipeddi et al. 2020,
arXiv 2002.05645): layer outer, micro-batch inner, so that a layer's weights come once in forward and once in backward, however many micro-batches there are.

    forward     layer l computes for each micro-batch, without a graph, while layer l+1 is read into the other slot
    backward    layer l runs again with a graph, micro-batch after micro-batch; its gradients add up in the slot
    update      the optimizer steps layer l, and writes it back, while layer l-1 is in backward

What is not in the blocks (embeddings, head) keeps its parameters and gradients on the device; its optimizer state is on the lower tier too, and comes in
parts no larger than a block or its own largest parameter.

Results are those of plain PyTorch, to the bit: one micro-batch draws the same random numbers, and several add up in the order of accumulation. Three things
are not bit-equal with several micro-batches: those after the first draw dropout masks from generators of their own (`strands`); a parameter that is used both
before and after the blocks (tied embeddings) adds up its gradients in another order; and so does one that blocks share.

The optimizer is the user's one object. It steps one layer at a time, with only that layer's parameters in its groups; elementwise and per-tensor
optimizers cannot tell the difference, one that counts steps in its groups can, and is refused.
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from memfit import dispatch
from memfit.batches import Batch
from memfit.errors import EngineError, InputError
from memfit.optimizers.elementwise import MOMENTS
from memfit.step.filling import Fill, filled, reset
from memfit.step.gates import Pass
from memfit.step.hiding import Hiding, Measured, hiding
from memfit.step.program import StepProgram
from memfit.step.slots import Layout, Slot, Worker
from memfit.step.strands import Strands
from memfit.step.tiers import NoTier, Tier, tier_below
from memfit.techniques.layer_streaming.blocks import Blocks, blocks_at, own_parameters, own_to

STAYS_BYTES: Final = 64  # state tensors up to this size (step counts) are not worth moving


@dataclass(slots=True, eq=False)
class _Unit:
    """Parameters that the optimizer steps together, and where their state lies."""

    parameters: list[nn.Parameter]
    like: Layout  # of the parameters; each moment of the state takes as much
    state: Layout | None = None  # None before it has been written for the first time
    keys: list[tuple[nn.Parameter, str]] = field(default_factory=list)
    offset: int = -1
    size_bytes: int = 0
    copy_offset: int = -1


@dataclass(slots=True, eq=False)
class _Layer:
    """One block and where it lies."""

    number: int
    path: str
    module: nn.Module
    parameters: list[nn.Parameter]
    weights: Layout
    weights_offset: int
    gradients: Layout
    unit: _Unit
    gradients_offset: int = -1
    copy_offset: int = -1

    @property
    def trained(self) -> list[nn.Parameter]:
        """Of its own parameters, those that get gradients."""
        return self.unit.parameters


class Watch:
    """Is told which part of a streamed step runs; this one does nothing about it."""

    def forward(self) -> AbstractContextManager[object]:
        """Entered for each stretch of forward: that of a micro-batch, and of a block that runs again. Backward follows it."""
        return nullcontext()

    def goes_on(self) -> None:
        """A micro-batch goes on with its forward after others had their turn."""

    def update(self) -> AbstractContextManager[object]:
        """Entered for each update of the optimizer."""
        return nullcontext()

    def leave_thread(self) -> None:
        """The step goes on in another thread: called in the one that stops."""

    def enter_thread(self) -> None:
        """Called in the one that goes on."""


WATCHED_BY_NOBODY: Final = Watch()


class LayerStream:
    """Takes the blocks of a model to the lower tier, and runs optimizer steps with them there.

    From here until `close`, the parameters of the blocks are empty on the device. `gathered` brings all of them there, `reading` one block at a time
    for a forward without gradients.

    Args:
        model: any module; the user's own object.
        path: of the blocks (`Choices.streamed`); None for the largest family.
        tier: where they go; None for host memory below a GPU and a temporary file below the CPU. Closed with the stream.
        fill: gives modules on the meta device their values, one after the other, so that no more than one block is ever there.
        device: of a model on the meta device; None for where the rest of it is, or the CPU.

    Attributes:
        blocks: that are streamed.
        updating: whether a step has begun to change parameters; when it fails then, it has changed some.

    Raises:
        InputError: there are no such blocks.
        InfeasibleError: the lower tier has no room.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | None = None,
        tier: Tier | None = None,
        *,
        fill: Fill = reset,
        device: torch.device | None = None,
    ) -> None:
        self.model = model
        self.blocks: Blocks = blocks_at(model, path)
        present = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
        self.device = device or present
        self.tier = tier if tier is not None else tier_below(self.device)
        self.updating = False
        self._worker = Worker(self.device, inline=isinstance(self.tier, NoTier))
        self._strands = Strands(self.device)
        self._away: dict[torch.dtype, Tensor] = {}
        self._shown: dict[int, _Layer] = {}  # by slot, the layer whose parameters point into it
        self._state_slot: Tensor | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._views: dict[int, Tensor] = {}  # of the gradients of the layer in backward, by parameter
        self._graded: set[int] = set()
        self._norms: dict[int, Tensor] = {}  # of gradients, by parameter, while a step that clips is under way
        self._aside: dict[int, set[int]] = {}  # by layer, the parameters whose gradients wait on the lower tier
        self.layers: list[_Layer] = []
        for number, (where, parameters) in enumerate(own_parameters(model, self.blocks.paths).items()):
            trained = [p for p in parameters if p.requires_grad]
            weights = Layout.of(parameters)
            offset = self.tier.reserve(weights.size_bytes)
            gradients = Layout.of(trained)
            self.layers.append(
                _Layer(
                    number,
                    where,
                    model.get_submodule(where),
                    parameters,
                    weights,
                    offset,
                    gradients,
                    _Unit(trained, gradients),
                )
            )
        self.measured = self._nothing_measured()
        last = {[m for m, _ in model.named_modules() if own_to([m], layer.path)][-1]: layer for layer in self.layers}
        empty = {id(p) for p in model.parameters() if p.device.type == "meta"}
        there: list[_Layer] = []
        for done in filled(model, fill, self.device):
            if done not in last:
                continue
            if any(id(p) in empty for p in last[done].parameters):
                self._put_down(last[done])
            else:  # the model's own values: none is let go before all are written
                self._write(last[done].weights, last[done].weights_offset, last[done].parameters)
                there.append(last[done])
        self._sync()
        for layer in there:
            self._unshow(layer)
        moved = {id(p) for layer in self.layers for p in layer.parameters}
        self.resident = [p for p in model.parameters() if id(p) not in moved]
        most_bytes = max(layer.weights.size_bytes for layer in self.layers)
        self._resident_units = _in_units([p for p in self.resident if p.requires_grad], most_bytes)
        self._slots = [self._slot(), self._slot()]
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._take_gradient) for layer in self.layers for p in layer.trained
        ]

    def _slot(self) -> Slot:
        def flat(size_bytes: int) -> Tensor:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

        return Slot(
            flat(max(layer.weights.size_bytes for layer in self.layers)),
            flat(max(layer.gradients.size_bytes for layer in self.layers)),
        )

    def buffers(self) -> dict[str, list[Tensor]]:
        """What the stream itself holds on the device, by what it is for: "parameter", "gradient", "optimizer_state"."""
        return {
            "parameter": [slot.weights for slot in self._slots],
            "gradient": [slot.gradients for slot in self._slots],
            "optimizer_state": [] if self._state_slot is None else [self._state_slot],
        }

    # -- a step --------------------------------------------------------------------------------------------------------------

    def step(
        self,
        program: StepProgram,
        parts: Sequence[Batch],
        weights: Sequence[float | None],
        *,
        check_finite: bool = False,
        watch: Watch = WATCHED_BY_NOBODY,
        changing: Callable[[], object] = lambda: None,
    ) -> list[Tensor]:
        """One optimizer step, update included.

        Args:
            program: of this stream's model, with an optimizer over its parameters.
            parts: the micro-batches.
            weights: of each, as in `StepProgram.forward_backward`.
            check_finite: raise before anything is changed when a loss is NaN or infinite.
            watch: entered around the parts of the step.
            changing: called just before parameters begin to change; what fails later leaves some of them changed.

        Returns:
            The unweighted losses, detached.

        Raises:
            InputError: no optimizer, or one that cannot step a layer at a time.
            EngineError: the blocks are not called in order, or cannot be called a second time; or the lower tier failed.
            NonFiniteLossError: as asked for by `check_finite`.
        """
        if program.optimizer is None:
            raise InputError(
                "layer streaming keeps gradients only until the optimizer has used them, and there is no optimizer: give one, or plan without streaming"
            )
        if self._optimizer is not program.optimizer:
            self.adopt(program.optimizer)
        self.updating = False
        self._norms.clear()
        self._aside.clear()
        self.measured = self._nothing_measured()
        passes = [Pass(self.device) for _ in parts]
        try:
            losses = self._forward(program, parts, weights, passes, watch, check_finite=check_finite)
            self._backward(passes, watch, changing, clips=program.clip_norm is not None)
            self._update_all(program, watch, changing)
            self._worker.drain()
        except BaseException:
            self._worker.settle()
            for slot in self._slots:  # what was on its way into them did not arrive
                slot.layer = slot.loading = None
            self._views = {}
            for layer in self.layers:
                for parameter in layer.parameters:
                    parameter.grad = None
            raise
        if self._state_slot is None:
            # Not before: in the first step each unit's state is there by itself, as the optimizer makes it.
            self._make_state_slot()
        return losses

    def _forward(
        self,
        program: StepProgram,
        parts: Sequence[Batch],
        weights: Sequence[float | None],
        passes: Sequence[Pass],
        watch: Watch,
        *,
        check_finite: bool,
    ) -> list[Tensor]:
        present: list[Pass] = []  # whose turn it is

        def body(part: Batch, weight: float | None, way: Pass) -> Tensor:
            present[:] = [way]
            return program.forward_backward(part, weight, watch.forward(), check_finite=check_finite)

        def called(layer: _Layer, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            way = present[0]
            self._in_order(layer, way)
            self._strands.wait()
            present[:] = [way]
            watch.goes_on()
            if way is passes[0]:
                self._arrive(layer)
                if layer.number + 1 < len(self.layers):
                    self._fetch(self.layers[layer.number + 1])
            if layer.number == 0:
                self.measured.tokens += _rows(args, kwargs)
            with self._timed(self.measured.forward_seconds, layer):
                return way.through(layer.path, layer.module, forward, args, kwargs)

        with self._intercepted(called):
            losses: list[Tensor] = self._strands.run(
                [functools.partial(body, *each) for each in zip(parts, weights, passes, strict=True)],
                watch,
            )
        for way in passes:
            if len(way.calls) < len(self.layers):
                raise EngineError(
                    f"the forward ended without calling {self.layers[len(way.calls)].path}: layer streaming needs the blocks of {self.blocks.path!r} to be "
                    "called once each, in their order. Plan without streaming, or stream other blocks"
                )
        return losses

    def _in_order(self, layer: _Layer, way: Pass) -> None:
        done = len(way.calls)
        if layer.number != done:
            instead = f"where {self.layers[done].path} was next" if layer.number > done else "a second time"
            raise EngineError(
                f"the model called {layer.path} {instead}: layer streaming needs the blocks of {self.blocks.path!r} to be called once each, in their order. "
                "Plan without streaming, or stream other blocks"
            )

    def _backward(self, passes: Sequence[Pass], watch: Watch, changing: Callable[[], object], *, clips: bool) -> None:
        needed = [layer for layer in self.layers if any(way.calls[layer.number].wanted for way in passes)]
        for layer in reversed(needed):
            self._arrive(layer)
            views = self._slot_of(layer).views(layer.gradients, gradients=True)
            self._views = {id(p): view for p, view in zip(layer.trained, views, strict=True)}
            self._graded.clear()
            with self._timed(self.measured.backward_seconds, layer):
                for way in passes:
                    way.calls[layer.number].return_through(watch.forward())
            graded = [p for p in layer.trained if id(p) in self._graded]
            for parameter in graded:
                parameter.grad = self._views[id(parameter)]
            self._views = {}
            if graded and clips:
                self._reserve_gradients(layer)
                self._worker.submit(functools.partial(self._set_aside, layer, graded), self.measured.behind_seconds)
            elif graded:
                self._begin_changing(changing)
                self._behind(functools.partial(self._update_layer, layer, watch))
            # The job before lets go of the slot's layer, so the next one may be read into it.
            following = [
                other for other in needed if other.number < layer.number and other.number % 2 == layer.number % 2
            ]
            if following:
                self._fetch(following[-1])

        for way in passes:
            way.finished()

    def _take_gradient(self, parameter: Tensor) -> None:
        """Add up in the slot: at first a copy, then what accumulation does in place."""
        view = self._views.get(id(parameter))
        grad = parameter.grad
        if view is None or grad is None:
            return  # not in a step: somebody's own backward while all is gathered
        if grad.layout is not torch.strided:
            raise EngineError(
                "a streamed block gives a sparse gradient, which has no room in its slot: build it with sparse=False"
            )
        if id(parameter) in self._graded:
            view.add_(grad)
        else:
            self._graded.add(id(parameter))
            view.copy_(grad)
        parameter.grad = None

    # -- updates -------------------------------------------------------------------------------------------------------------

    def _begin_changing(self, changing: Callable[[], object]) -> None:
        if not self.updating:
            changing()
            self.updating = True

    def _behind(self, update: Callable[[], None]) -> None:
        """Have an update done beside the computation; here and now when it takes memory of its own, which would add to the computation's by chance."""
        assert self._optimizer is not None, "a step has one"
        if all(group.get("fused") for group in self._optimizer.param_groups):
            self._worker.submit(update, self.measured.behind_seconds)
        else:
            self._worker.drain()
            started = time.perf_counter()
            update()
            self.measured.behind_seconds.append(time.perf_counter() - started)

    def _set_aside(self, layer: _Layer, graded: list[nn.Parameter]) -> None:
        """Gradients that wait for the norm of all go to the lower tier."""
        self._note_norms(graded)
        self._aside[layer.number] = {id(p) for p in graded}
        self.tier.write(layer.gradients_offset, self._slot_of(layer).gradients[: layer.gradients.size_bytes])
        for parameter in graded:
            parameter.grad = None

    def _note_norms(self, graded: Sequence[nn.Parameter]) -> None:
        if graded:
            grads = [p.grad for p in graded if p.grad is not None]
            norms = torch._foreach_norm(grads, 2.0)  # noqa: SLF001 - what torch.nn.utils calls, for the same bits
            self._norms.update((id(p), norm) for p, norm in zip(graded, norms, strict=True))

    def _update_all(self, program: StepProgram, watch: Watch, changing: Callable[[], object]) -> None:
        """What backward has not updated already: everything when the norm of all gradients had to be known, else what is not in the blocks."""
        graded = [p for p in self.resident if p.grad is not None]
        clip_norm = program.clip_norm
        norm: Tensor | None = None
        if clip_norm is not None:
            self._worker.drain()
            self._note_norms(graded)
            # As `torch.nn.utils.clip_grad_norm_` does: the norm of each gradient, then the norm of those in the order of the parameters.
            in_order = [self._norms[id(p)] for p in program.trainable() if id(p) in self._norms]
            if in_order:
                norm = torch.linalg.vector_norm(torch.stack(in_order), 2.0)
        self._begin_changing(changing)
        if clip_norm is not None and norm is not None:
            for layer in reversed(self.layers):
                if layer.number in self._aside:
                    self._arrive(layer)
                    self._behind(functools.partial(self._update_aside, layer, watch, clip_norm, norm))
            with watch.update():
                torch.nn.utils.clip_grads_with_norm_(graded, clip_norm, norm)
        for unit in self._resident_units:
            self._behind(functools.partial(self._update_unit, unit, watch))

    def _update_aside(self, layer: _Layer, watch: Watch, clip_norm: float, norm: Tensor) -> None:
        graded = self._aside.pop(layer.number)
        slot = self._slot_of(layer)
        self.tier.read(layer.gradients_offset, slot.gradients[: layer.gradients.size_bytes])
        views = slot.views(layer.gradients, gradients=True)
        for parameter, view in zip(layer.trained, views, strict=True):
            parameter.grad = view if id(parameter) in graded else None
        with watch.update():
            torch.nn.utils.clip_grads_with_norm_(layer.trained, clip_norm, norm)
        self._update_layer(layer, watch)

    def _update_layer(self, layer: _Layer, watch: Watch) -> None:
        self._update_unit(layer.unit, watch)
        self.tier.write(layer.weights_offset, self._slot_of(layer).weights[: layer.weights.size_bytes])

    def _update_unit(self, unit: _Unit, watch: Watch) -> None:
        """Step the optimizer on these parameters alone."""
        optimizer = self._optimizer
        assert optimizer is not None, "a step has one"
        brought = self._bring_state(unit)
        own = {id(p) for p in unit.parameters}
        everything = optimizer.param_groups
        alone = [{**group, "params": [p for p in group["params"] if id(p) in own]} for group in everything]
        alone = [group for group in alone if group["params"]]
        before = [{k: v for k, v in group.items() if k != "params"} for group in alone]
        optimizer.param_groups = alone
        try:
            with watch.update():
                optimizer.step()
        finally:
            optimizer.param_groups = everything
        for old, new in zip(before, alone, strict=True):
            for name, value in new.items():
                if name != "params" and not isinstance(value, Tensor) and value != old.get(name):
                    raise EngineError(
                        f"{type(optimizer).__name__} keeps {name!r} from step to step for all its parameters together, and streamed layers are stepped "
                        "one by one: use  an optimizer that keeps its state by parameter, or plan without streaming"
                    )
        for parameter in unit.parameters:
            parameter.grad = None
        self._send_state(unit, brought)

    def _bring_state(self, unit: _Unit) -> list[Tensor]:
        """The unit's state in the slot for it; none before its first update, which makes it anew."""
        if unit.state is None:
            return []
        assert self._optimizer is not None, "a step has one"
        if self._state_slot is None:
            self._make_state_slot()
        flat = self._state_of(unit.state)
        self.tier.read(unit.offset, flat)
        views = unit.state.views(flat)
        for (parameter, key), view in zip(unit.keys, views, strict=True):
            self._optimizer.state[parameter][key] = view
        return views

    def _send_state(self, unit: _Unit, brought: Sequence[Tensor] = ()) -> None:
        """Write the unit's state to the lower tier, and send it away."""
        assert self._optimizer is not None, "a step has one"
        keys = [
            (parameter, key)
            for parameter in unit.parameters
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.numel() * value.element_size() > STAYS_BYTES
        ]
        tensors = [self._optimizer.state[parameter][key] for parameter, key in keys]
        if unit.state is not None and keys == unit.keys and all(map(operator.is_, tensors, brought)):
            self.tier.write(unit.offset, self._state_of(unit.state))
        elif keys:
            unit.state, unit.keys = Layout.of(tensors), keys
            self._reserve_state(unit, unit.state.size_bytes)
            if self._state_slot is not None and unit.state.size_bytes > self._state_slot.numel():
                self._state_slot = None
            self._write(unit.state, unit.offset, tensors)
        self._send_away(keys)

    def _send_away(self, keys: Sequence[tuple[nn.Parameter, str]]) -> None:
        """Leave empty tensors where state was that lies on the lower tier."""
        for parameter, key in keys:
            assert self._optimizer is not None, "there is no state without one"
            self._optimizer.state[parameter][key] = self._empty(self._optimizer.state[parameter][key].dtype)

    def _make_state_slot(self) -> None:
        largest = max((unit.state.size_bytes for unit in self._units() if unit.state is not None), default=0)
        self._state_slot = torch.empty(largest, dtype=torch.uint8, device=self.device)

    def _state_of(self, layout: Layout) -> Tensor:
        assert self._state_slot is not None, "made after the first step"
        return self._state_slot[: layout.size_bytes]

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer: state that it has already goes to the lower tier, and what it will make has its room there from now on.

        Of optimizers in `elementwise.MOMENTS`; of others nobody knows how much that is, so they take it in their first step.

        Raises:
            InfeasibleError: the lower tier has no room; state is where it was.
        """
        if type(optimizer) in MOMENTS:
            count = max(len(MOMENTS[type(optimizer)](group)) for group in optimizer.param_groups)
            for unit in self._units():
                self._reserve_state(unit, count * unit.like.size_bytes)
        self._optimizer = optimizer
        for unit in self._units():
            unit.state, unit.keys = None, []
            self._send_state(unit)

    def _reserve_state(self, unit: _Unit, size_bytes: int) -> None:
        if size_bytes > unit.size_bytes:
            unit.offset, unit.size_bytes = self.tier.reserve(size_bytes), size_bytes

    def _units(self) -> Iterator[_Unit]:
        yield from (layer.unit for layer in self.layers)
        yield from self._resident_units

    # -- where things are ----------------------------------------------------------------------------------------------------

    def _slot_of(self, layer: _Layer) -> Slot:
        return self._slots[layer.number % 2]

    def _fetch(self, layer: _Layer) -> None:
        """Have the layer's weights read into its slot, if they are not there; after all jobs submitted before."""
        slot = self._slot_of(layer)
        if slot.layer == layer.number:
            return
        slot.layer = layer.number
        slot.loading = self._worker.submit(
            functools.partial(self.tier.read, layer.weights_offset, slot.weights[: layer.weights.size_bytes]),
            self.measured.read_seconds,
        )

    def _arrive(self, layer: _Layer) -> None:
        """Wait for the layer, and let its parameters be what is in its slot."""
        self._fetch(layer)
        slot = self._slot_of(layer)
        if slot.loading is not None:
            started = time.perf_counter()
            slot.loading.result()
            slot.loading = None
            self.measured.waited_seconds += time.perf_counter() - started
        shown = self._shown.get(layer.number % 2)
        if shown is layer:
            return
        if shown is not None:
            self._unshow(shown)
        for parameter, view in zip(layer.parameters, slot.views(layer.weights), strict=True):
            parameter.data = view
        self._shown[layer.number % 2] = layer

    def _put_down(self, layer: _Layer) -> None:
        """Write the parameters to the lower tier, wherever they are, and empty them."""
        self._write(layer.weights, layer.weights_offset, layer.parameters)
        self._sync()
        self._unshow(layer)

    def _unshow(self, layer: _Layer) -> None:
        for parameter in layer.parameters:
            parameter.data = self._empty(parameter.dtype)

    def _empty(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._away:
            self._away[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return self._away[dtype]

    def _write(self, layout: Layout, offset: int, tensors: Sequence[Tensor]) -> None:
        for (start, *_), tensor in zip(layout.places, tensors, strict=True):
            dense = tensor.detach() if dispatch.is_dense(tensor) else tensor.detach().contiguous()
            self.tier.write(offset + start, dense)

    def _reserve_gradients(self, layer: _Layer) -> None:
        if layer.gradients_offset < 0:
            layer.gradients_offset = self.tier.reserve(layer.gradients.size_bytes)

    @contextmanager
    def _intercepted(self, called: Callable[..., Any]) -> Iterator[None]:
        """Calls of the blocks' forwards go to `called(layer, forward, args, kwargs)` inside; the modules are put back whatever happens."""
        before = [layer.module.__dict__.get("forward") for layer in self.layers]
        try:
            for layer in self.layers:
                forward = layer.module.forward

                def instead(*args: Any, layer: _Layer = layer, forward: Any = forward, **kwargs: Any) -> Any:
                    return called(layer, forward, args, kwargs)

                layer.module.__dict__["forward"] = instead
            yield
        finally:
            for layer, old in zip(self.layers, before, strict=True):
                if old is None:
                    layer.module.__dict__.pop("forward", None)
                else:
                    layer.module.__dict__["forward"] = old

    @contextmanager
    def _timed(self, seconds: list[float], layer: _Layer) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds[layer.number] += time.perf_counter() - started

    def _nothing_measured(self) -> Measured:
        largest = max(self.layers, key=lambda layer: layer.weights.size_bytes)
        count = sum(math.prod(shape) for _, shape, _, _ in largest.weights.places)
        return Measured(len(self.layers), weight_bytes=largest.weights.size_bytes, parameters=count)

    # -- beside steps --------------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, *, on_host: bool = False, changed: bool = True) -> Iterator[nn.Module]:
        """All parameters and all of the optimizer's state on the device, for as long as the block lasts: to save them, load others, or look at them.

        Takes as many bytes as the model does without streaming.

        Args:
            on_host: in the host's memory instead; what is not in the blocks keeps its parameters on the device.
            changed: what is changed inside goes back to the lower tier; without, what lies there stays as it is.
        """
        self._gather(torch.device("cpu") if on_host else self.device)
        try:
            yield self.model
        finally:
            for slot in self._slots:
                slot.layer = slot.loading = None
            if changed:
                for layer in self.layers:
                    self._put_down(layer)
                if self._optimizer is not None:
                    self.adopt(self._optimizer)
                    self._sync()
            else:
                for layer in self.layers:
                    self._unshow(layer)
                for unit in self._units():
                    self._send_away(unit.keys)

    def _gather(self, device: torch.device) -> None:
        self._worker.drain()
        for layer in self.layers:
            flat = torch.empty(layer.weights.size_bytes, dtype=torch.uint8, device=device)
            self.tier.read(layer.weights_offset, flat)
            for parameter, view in zip(layer.parameters, layer.weights.views(flat), strict=True):
                parameter.data = view
        for unit in self._units():
            if unit.state is not None and self._optimizer is not None:
                flat = torch.empty(unit.state.size_bytes, dtype=torch.uint8, device=device)
                self.tier.read(unit.offset, flat)
                for (parameter, key), view in zip(unit.keys, unit.state.views(flat), strict=True):
                    self._optimizer.state[parameter][key] = view
        self._sync()
        self._shown.clear()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Steps inside leave no trace on the lower tier: weights and state are copied there and put back at the end. The caller looks after the rest."""
        self._worker.drain()
        for layer in self.layers:
            if layer.copy_offset < 0:
                layer.copy_offset = self.tier.reserve(layer.weights.size_bytes)
            self._arrive(layer)
            self.tier.write(layer.copy_offset, self._slot_of(layer).weights[: layer.weights.size_bytes])
            self._sync()
        before = [(unit, unit.state, unit.keys, unit.offset) for unit in self._units()]
        for unit in self._units():
            if unit.state is not None:
                unit.copy_offset = self.tier.reserve(unit.state.size_bytes)
                self._copy_state(unit.state, unit.offset, unit.copy_offset)
        try:
            yield
        finally:
            self._worker.settle()
            for layer in self.layers:
                self._arrive(layer)
                flat = self._slot_of(layer).weights[: layer.weights.size_bytes]
                self.tier.read(layer.copy_offset, flat)
                self.tier.write(layer.weights_offset, flat)
                self._sync()
            for unit, state, keys, offset in before:
                unit.state, unit.keys = state, keys
                if state is not None:
                    unit.offset = offset
                    self._copy_state(state, unit.copy_offset, offset)

    def _copy_state(self, layout: Layout, source: int, target: int) -> None:
        if self._state_slot is None:
            self._make_state_slot()
        flat = self._state_of(layout)
        self.tier.read(source, flat)
        self.tier.write(target, flat)
        self._sync()

    @contextmanager
    def reading(self) -> Iterator[nn.Module]:
        """The model can be called inside, without gradients: each block comes to the device when it is called, the next one while it computes.

        Raises:
            EngineError: in the block, when it is called with gradients on.
        """

        def called(layer: _Layer, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if torch.is_grad_enabled():
                raise EngineError(
                    f"{layer.path} was called with gradients on outside of a step, and its parameters are on the lower tier: train with the engine's step, "
                    "evaluate under torch.no_grad()"
                )
            self._arrive(layer)
            following = self.layers[(layer.number + 1) % len(self.layers)]
            if following.number % 2 != layer.number % 2:
                self._fetch(following)
            return forward(*args, **kwargs)

        with self._intercepted(called):
            yield self.model

    def hiding(self) -> Hiding:
        """Whether the transfers of the last step hid behind its computation; its `str` is a sentence.

        On CUDA, kernels that still run when a layer is left are not in its seconds.
        """
        return hiding(self.measured)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every parameter, those of the blocks from the lower tier one block at a time: valid until the next one is asked for."""
        self._worker.drain()
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter in self.resident:
            yield names[id(parameter)], parameter.detach()
        for layer in self.layers:
            self._arrive(layer)
            for parameter in layer.parameters:
                yield names[id(parameter)], parameter.detach()

    def close(self, *, restore: bool = True) -> None:
        """End streaming.

        Args:
            restore: put parameters and optimizer state back on the device; without, they are gone.
        """
        if restore and self.layers:
            self._gather(self.device)
        for hook in self._hooks:
            hook.remove()
        self.layers, self._hooks = [], []
        self._worker.close()
        self.tier.close()

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _in_units(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[_Unit]:
    """Parameters in units of about this many bytes, so that the state of none is much larger than a block's, but for a single large parameter."""
    units: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        own = parameter.numel() * parameter.element_size()
        if not units or size + own > most_bytes:
            units.append([])
            size = 0
        units[-1].append(parameter)
        size += own
    return [_Unit(held, Layout.of(held)) for held in units]


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens, or whatever a block sees many of: all dimensions of its first floating-point input but the last."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return value.numel() // max(1, value.shape[-1])
    return 0
