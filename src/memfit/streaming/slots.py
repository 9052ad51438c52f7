"""Slots on the device, which layers take by turns: buffers as large as the largest of them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from memfit.streaming.packing import PackedLayout


@dataclass(slots=True, eq=False)
class Slot:
    """Space on the device for one layer.

    Attributes:
        weights, gradients: flat uint8 buffers.
        layer: number of the layer whose weights are in it, or on their way into it; None for none.
        loading: the job that brings them.
    """

    weights: Tensor
    gradients: Tensor
    layer: int | None = None
    loading: Future[None] | None = None
    _views: dict[tuple[PackedLayout, bool], list[Tensor]] = field(default_factory=dict)

    def views(self, layout: PackedLayout, *, gradients: bool = False) -> list[Tensor]:
        """Of one layer's tensors; layers of one layout share them."""
        key = (layout, gradients)
        if key not in self._views:
            self._views[key] = layout.views(self.gradients if gradients else self.weights)
        return self._views[key]
