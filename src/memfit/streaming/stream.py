"""A model whose repeated blocks are offloaded to a lower tier and loaded one at a time: training, evaluation, and access to its parameters.

Parameters, gradients and optimizer state of a block are on the device only while the block is in use. The order is that of L2L (Pudipeddi et al. 2020,
arXiv 2002.05645): layer outer, micro-batch inner, so that a layer's weights come once in forward and once in backward, however many micro-batches there are
(`passes`, `updates`).

What is not in the blocks (embeddings, head) keeps its parameters and gradients on the device; its optimizer state is on the lower tier too, and comes in
groups no larger than a block or its own largest parameter.

Results are those of plain PyTorch, to the bit: one micro-batch draws the same random numbers, and several add up in the order of accumulation. Three things
are not bit-equal with several micro-batches: those after the first draw dropout masks from generators of their own (`interleaving`); a parameter that is used
both before and after the blocks (tied embeddings) adds up its gradients in another order; and so does one that blocks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memfit.batches import Batch
from memfit.errors import EngineError, InputError
from memfit.step.device import device_of
from memfit.step.program import StepProgram
from memfit.storage.tiers import Tier, nearest_tier
from memfit.streaming import passes as streamed
from memfit.streaming.gradients import SlotGradients
from memfit.streaming.graph_cuts import Pass
from memfit.streaming.initialisation import Fill, filled, reset
from memfit.streaming.layers import Layer, in_groups, intercepted, layers_of
from memfit.streaming.optimizer_state import StreamedState
from memfit.streaming.overlap import Measured, Overlap, overlap
from memfit.streaming.placement import LayerPlacement
from memfit.streaming.updates import Updates
from memfit.streaming.watch import NO_WATCH, Watch
from memfit.techniques.layer_streaming.blocks import Blocks, blocks_at, own_to


class LayerStream:
    """Offloads the blocks of a model to the lower tier, and runs optimizer steps on them.

    From here until `close`, the parameters of the blocks are empty on the device. `gathered` loads all of them, `reading` one block at a time for a forward
    without gradients.

    Args:
        model: any module; the user's own object.
        path: of the blocks (`Choices.streamed`); None for the largest family.
        tier: to offload to; None for host memory with a GPU and an unnamed file with the CPU. Closed with the stream.
        fill: gives modules on the meta device their values, one after the other, so that no more than one block is in memory.
        device: to train a model on the meta device on; None for the device of the rest of the model, or the CPU.

    Attributes:
        blocks: that are streamed.
        layers: the same, with where each is on the tier.
        resident: parameters that are not in the blocks and stay on the device.
        tier: to which the blocks are offloaded.

    Raises:
        InputError: there are no such blocks.
        InfeasibleError: the lower tier does not have the space.
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
        self.device = device or device_of(model)
        self.tier = tier if tier is not None else nearest_tier(self.device)
        self.layers: list[Layer] = layers_of(model, self.blocks.paths, self.tier)
        self._placement = LayerPlacement(self.layers, self.blocks.path, self.tier, self.device)
        self._put_down(fill)
        moved = {id(p) for layer in self.layers for p in layer.parameters}
        self.resident = [p for p in model.parameters() if id(p) not in moved]
        most_bytes = max(layer.weights.size_bytes for layer in self.layers)
        resident = in_groups([p for p in self.resident if p.requires_grad], most_bytes)
        self._state = StreamedState([*(layer.group for layer in self.layers), *resident], self._placement)
        self._updates = Updates(self._placement, self._state, resident)
        self._placement.make_slots()
        self._gradients = SlotGradients(self.layers)

    def _put_down(self, fill: Fill) -> None:
        """Take the blocks to the tier, those on the meta device as soon as they have their values."""
        model, placement = self.model, self._placement
        last = {[m for m, _ in model.named_modules() if own_to([m], layer.path)][-1]: layer for layer in self.layers}
        empty = {id(p) for p in model.parameters() if p.device.type == "meta"}
        there: list[Layer] = []
        for done in filled(model, fill, self.device):
            if done not in last:
                continue
            layer = last[done]
            if any(id(p) in empty for p in layer.parameters):
                placement.put_down(layer)
            else:  # the model's own values: none is freed before all are written
                placement.write(layer.weights, layer.weights_offset, layer.parameters)
                there.append(layer)
        placement.synchronise()
        for layer in there:
            placement.hide(layer)

    def buffers(self) -> dict[str, list[Tensor]]:
        """The stream's own buffers on the device, by category: "parameter", "gradient", "optimizer_state"."""
        return {
            "parameter": [slot.weights for slot in self._placement.slots],
            "gradient": [slot.gradients for slot in self._placement.slots],
            "optimizer_state": [] if self._state.slot is None else [self._state.slot],
        }

    @property
    def updating(self) -> bool:
        """Whether a step has begun to change parameters; if it fails after that, some of them have changed."""
        return self._updates.begun

    @property
    def measured(self) -> Measured:
        """Seconds of the last step."""
        return self._placement.measured

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Offload the state of an optimizer before the first step, and reserve space on the lower tier for state that it has not made yet.

        Raises:
            InfeasibleError: the lower tier does not have the space; the state is where it was.
        """
        self._state.adopt(optimizer)

    def step(
        self,
        program: StepProgram,
        parts: Sequence[Batch],
        weights: Sequence[float | None],
        *,
        check_finite: bool = False,
        watch: Watch = NO_WATCH,
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
        placement, updates = self._placement, self._updates
        if self._state.optimizer is not program.optimizer:
            self.adopt(program.optimizer)
        updates.begin(watch, changing)
        placement.measure_anew()
        passes = [Pass(self.device) for _ in parts]
        try:
            losses = streamed.forward(placement, program, parts, weights, passes, watch, check_finite=check_finite)
            clips = program.clip_norm is not None
            streamed.backward(placement, self._gradients, updates, passes, watch, clips=clips)
            updates.finish(program, self.resident, self.layers)
            placement.worker.drain()
        except BaseException:
            placement.worker.settle()
            placement.forget_slots()
            self._gradients.forget()
            for layer in self.layers:
                for parameter in layer.parameters:
                    parameter.grad = None
            raise
        finally:
            updates.end()
        if self._state.slot is None:
            # Not before: in the first step each group's state is there by itself, as the optimizer makes it.
            self._state.make_slot()
        return losses

    def hiding(self) -> Overlap:
        """Whether the transfers of the last step overlapped with its computation; its `str` is a sentence.

        On CUDA, kernels that still run when a layer is left are not in its seconds.
        """
        return overlap(self.measured)

    # -- between steps -------------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, *, on_host: bool = False, changed: bool = True) -> Iterator[nn.Module]:
        """Inside the block all parameters and all optimizer state are on the device: to save them, load others, or inspect them.

        Takes as many bytes as the model does without streaming.

        Args:
            on_host: load them to host memory instead; parameters that are not in the blocks stay on the device.
            changed: write them back to the lower tier at the end; with False, changes made inside are lost.
        """
        self._gather(torch.device("cpu") if on_host else self.device)
        try:
            yield self.model
        finally:
            self._placement.forget_slots()
            if changed:
                for layer in self.layers:
                    self._placement.put_down(layer)
                if self._state.optimizer is not None:
                    self.adopt(self._state.optimizer)
                    self._placement.synchronise()
            else:
                for layer in self.layers:
                    self._placement.hide(layer)
                self._state.leave_all_empty()

    def _gather(self, device: torch.device) -> None:
        self._placement.gather(device)
        self._state.gather(device)
        self._placement.synchronise()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo steps taken inside: weights and state on the lower tier are copied before and restored at the end. The caller restores everything else."""
        self._placement.save_copies()
        with self._state.put_back():
            try:
                yield
            finally:
                self._placement.worker.settle()
                self._placement.put_back_copies()

    @contextmanager
    def reading(self) -> Iterator[nn.Module]:
        """Inside, the model can be called without gradients: each block is loaded when it is called, the next one while it computes.

        Raises:
            EngineError: a block was called with gradients enabled.
        """

        def called(layer: Layer, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if torch.is_grad_enabled():
                raise EngineError(
                    f"{layer.path} was called with gradients on outside of a step, and its parameters are on the lower tier: train with the engine's step, "
                    "evaluate under torch.no_grad()"
                )
            self._placement.arrive(layer)
            following = self.layers[(layer.number + 1) % len(self.layers)]
            if following.number % 2 != layer.number % 2:
                self._placement.fetch(following)
            return own(*args, **kwargs)

        with intercepted(self.layers, called):
            yield self.model

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every parameter, those of the blocks loaded one block at a time: a value is valid until the next is asked for."""
        self._placement.worker.drain()
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter in self.resident:
            yield names[id(parameter)], parameter.detach()
        for layer in self.layers:
            self._placement.arrive(layer)
            for parameter in layer.parameters:
                yield names[id(parameter)], parameter.detach()

    def close(self, *, restore: bool = True) -> None:
        """End streaming.

        Args:
            restore: put parameters and optimizer state back on the device; without, they are gone.
        """
        if restore and self.layers:
            self._gather(self.device)
        self._gradients.close()
        self.layers = []
        self._placement.worker.close()
        self.tier.close()
