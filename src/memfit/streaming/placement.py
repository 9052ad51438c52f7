"""Where the layers are: all of them on the lower tier, and up to two in slots on the device, the next one being loaded while one computes."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from memfit import dispatch
from memfit.storage.queues import Worker
from memfit.storage.tiers import NoTier, Tier
from memfit.streaming.layers import Layer
from memfit.streaming.overlap import Measured
from memfit.streaming.packing import PackedLayout
from memfit.streaming.slots import Slot


class LayerPlacement:
    """Loads layers to the device and offloads them.

    A layer is *shown* when its parameters point into its slot; otherwise they are empty.

    Args:
        layers: whose weights have their space on the tier.
        path: of the module that holds them, for errors.
        tier: to which they are offloaded.
        device: on which they compute.

    Attributes:
        worker: does the transfers, in order, while the device computes.
        slots: on the device, once they are made; layers take them by turns.
        measured: seconds of the step under way, or of the last one.
    """

    def __init__(self, layers: Sequence[Layer], path: str, tier: Tier, device: torch.device) -> None:
        self.layers, self.path, self.tier, self.device = layers, path, tier, device
        self.worker = Worker(device, inline=isinstance(tier, NoTier))
        self.slots: tuple[Slot, ...] = ()
        self.measured = self._nothing_measured()
        self._away: dict[torch.dtype, Tensor] = {}
        self._shown: dict[int, Layer] = {}  # by slot

    def make_slots(self) -> None:
        """Allocate the slots for two layers on the device."""
        weights = max(layer.weights.size_bytes for layer in self.layers)
        gradients = max(layer.gradients.size_bytes for layer in self.layers)
        self.slots = tuple(Slot(self.flat(weights), self.flat(gradients)) for _ in range(2))

    def flat(self, size_bytes: int) -> Tensor:
        """A buffer on the device."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def measure_anew(self) -> None:
        """A step begins."""
        self.measured = self._nothing_measured()

    def _nothing_measured(self) -> Measured:
        largest = max(self.layers, key=lambda layer: layer.weights.size_bytes)
        count = sum(math.prod(shape) for _, shape, _, _ in largest.weights.places)
        return Measured(len(self.layers), weight_bytes=largest.weights.size_bytes, parameters=count)

    # -- on the device -------------------------------------------------------------------------------------------------------

    def slot_of(self, layer: Layer) -> Slot:
        """The slot that it takes when it comes."""
        return self.slots[layer.number % 2]

    def weights_in_slot(self, layer: Layer) -> Tensor:
        """Its weights on the device, as they are written to and read from the tier."""
        return self.slot_of(layer).weights[: layer.weights.size_bytes]

    def gradients_in_slot(self, layer: Layer) -> Tensor:
        """The same of its gradients."""
        return self.slot_of(layer).gradients[: layer.gradients.size_bytes]

    def fetch(self, layer: Layer) -> None:
        """Submit a job that loads the layer's weights into its slot, unless they are there."""
        slot = self.slot_of(layer)
        if slot.layer == layer.number:
            return
        slot.layer = layer.number
        slot.loading = self.worker.submit(
            functools.partial(self.tier.read, layer.weights_offset, self.weights_in_slot(layer)),
            self.measured.read_seconds,
        )

    def arrive(self, layer: Layer) -> None:
        """Wait for the layer's weights, and show it."""
        self.fetch(layer)
        slot = self.slot_of(layer)
        if slot.loading is not None:
            started = time.perf_counter()
            slot.loading.result()
            slot.loading = None
            self.measured.waited_seconds += time.perf_counter() - started
        shown = self._shown.get(layer.number % 2)
        if shown is layer:
            return
        if shown is not None:
            self.hide(shown)
        for parameter, view in zip(layer.parameters, slot.views(layer.weights), strict=True):
            parameter.data = view
        self._shown[layer.number % 2] = layer

    def forget_slots(self) -> None:
        """Treat the contents of the slots as invalid: layers are loaded again."""
        for slot in self.slots:
            slot.layer = slot.loading = None

    # -- on the tier ---------------------------------------------------------------------------------------------------------

    def put_down(self, layer: Layer) -> None:
        """Write the parameters to the lower tier, wherever they are, and empty them."""
        self.write(layer.weights, layer.weights_offset, layer.parameters)
        self.synchronise()
        self.hide(layer)

    def hide(self, layer: Layer) -> None:
        """Empty the parameters."""
        for parameter in layer.parameters:
            parameter.data = self.empty(parameter.dtype)

    def empty(self, dtype: torch.dtype) -> Tensor:
        """An empty tensor in place of one that is on the lower tier."""
        if dtype not in self._away:
            self._away[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return self._away[dtype]

    def write(self, layout: PackedLayout, offset: int, tensors: Sequence[Tensor]) -> None:
        """Tensors to a region of the tier."""
        for (start, *_), tensor in zip(layout.places, tensors, strict=True):
            dense = tensor.detach() if dispatch.is_dense(tensor) else tensor.detach().contiguous()
            self.tier.write(offset + start, dense)

    def reserve_gradients(self, layer: Layer) -> None:
        """Reserve space on the tier for gradients that wait there for the global norm."""
        if layer.gradients_offset < 0:
            layer.gradients_offset = self.tier.reserve(layer.gradients.size_bytes)

    # -- all of them ---------------------------------------------------------------------------------------------------------

    def gather(self, device: torch.device) -> None:
        """Load every layer's parameters to a device, into memory of their own; call `synchronise` before reading them."""
        self.worker.drain()
        for layer in self.layers:
            flat = torch.empty(layer.weights.size_bytes, dtype=torch.uint8, device=device)
            self.tier.read(layer.weights_offset, flat)
            for parameter, view in zip(layer.parameters, layer.weights.views(flat), strict=True):
                parameter.data = view
        self._shown.clear()

    def save_copies(self) -> None:
        """Copy all weights to further regions of the tier."""
        self.worker.drain()
        for layer in self.layers:
            if layer.copy_offset < 0:
                layer.copy_offset = self.tier.reserve(layer.weights.size_bytes)
            self.arrive(layer)
            self.tier.write(layer.copy_offset, self.weights_in_slot(layer))
            self.synchronise()

    def put_back_copies(self) -> None:
        """Inverse of `save_copies`."""
        for layer in self.layers:
            self.arrive(layer)
            flat = self.weights_in_slot(layer)
            self.tier.read(layer.copy_offset, flat)
            self.tier.write(layer.weights_offset, flat)
            self.synchronise()

    def synchronise(self) -> None:
        """Wait for the device, where copies to and from it are not done when they return."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
