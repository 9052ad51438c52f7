"""What a step changes besides parameters, gradients and optimizer state (buffers, plain attributes, generators, the scale of gradients): saved and restored.

Used wherever a step may be undone: in the engine's transaction, and in the rehearsal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from memfit.step.attributes import PlainValues
from memfit.step.buffers import Buffers
from memfit.step.device import device_of
from memfit.step.generators import GeneratorStates
from memfit.techniques.autocast.precision import Scaling


class Guard:
    """Saves buffers, plain attributes, generators and gradient scale when it is made, to be restored later.

    Args:
        model: whose buffers.
        copies: of the buffers that forward writes in place, filled here (`BufferCopies`).
        scaling: of the gradients, where they are scaled.
    """

    def __init__(
        self,
        model: nn.Module,
        copies: Mapping[str, torch.Tensor] | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        self._buffers = Buffers(model, copies or {})
        self._values = PlainValues(model)
        self._generators = GeneratorStates(device_of(model))
        self._scaling = scaling
        self._scale: dict[str, Any] | None = None if scaling is None else scaling.state()

    def put_back(self) -> None:
        """Restore what was saved."""
        self._buffers.put_back()
        self._values.put_back()
        self._generators.put_back()
        if self._scaling is not None and self._scale is not None:
            self._scaling.set_state(self._scale)
