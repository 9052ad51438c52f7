"""Mixed precision: forward and loss under autocast, and for fp16 a gradient scaler around backward and update.

Both are torch's own (Micikevicius et al. 2018, "Mixed Precision Training"): parameters, gradients and optimizer state stay as the model has them, and
what autocast casts (weights too, kept until its region ends) are operations and storages like any other, seen where operations are dispatched.
The numbers are those of the loop that torch documents: `autocast`, `scale(loss).backward()`, `unscale_`, clip, `step`, `update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from memfit.errors import NonFiniteLossError

FORMATS: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Each skipped step halves the scale. It starts at 2**16, so by then gradients that are scaled down 16,000 times still overflow.
MOST_SKIPPED: Final = 30


def autocast(precision: str, device_type: str) -> AbstractContextManager[object]:
    """The region in which forward and loss run; one for each micro-batch.

    Args:
        precision: "full" for none, or a name in `FORMATS`.
        device_type: "cpu" or "cuda".
    """
    return nullcontext() if precision == "full" else torch.autocast(device_type, FORMATS[precision])


def why_not_scaled(model: torch.nn.Module) -> str | None:
    """Why fp16 cannot be had: gradients of parameters that are fp16 themselves cannot be unscaled, as nothing wider holds them; None when it can."""
    halves = (n for n, p in model.named_parameters() if p.requires_grad and p.dtype is torch.float16)
    name = next(halves, None)
    if name is None:
        return None
    return f"it keeps parameters in 32 bits and casts them in forward, and {name} is fp16 already (model.float() converts it)"


class Scaling:
    """torch's gradient scaler, with what a step that happens whole or not at all needs of it.

    Args:
        device: where the gradients are.

    Attributes:
        scaler: for people who keep their own loop.
        skipped_in_a_row: steps skipped since the last one taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scaler = self._fresh()
        self.skipped_in_a_row = 0

    def _fresh(self, state: Mapping[str, Any] | None = None) -> torch.amp.GradScaler:
        scaler = torch.amp.GradScaler(self.device.type)
        if state is not None:
            scaler.load_state_dict(dict(state))
        scaler.scale(
            torch.zeros((), device=self.device)
        )  # it makes its tensors at the first call: before a step, not in it
        return scaler

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once all micro-batches are added up and before they are clipped."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer unless a gradient is infinite or no number, and adjust the scale; whether it stepped."""
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        taken = self.scaler.get_scale() >= before  # it falls when, and only when, a step is skipped
        self.skipped_in_a_row = 0 if taken else self.skipped_in_a_row + 1
        return taken

    def check_hope(self) -> None:
        """See that skipping is not all that happens.

        Raises:
            NonFiniteLossError: too many steps in a row were skipped.
        """
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise NonFiniteLossError(
                f"{self.skipped_in_a_row} steps in a row were skipped, since gradients overflow in fp16 even at a scale of "
                f"{self.scaler.get_scale():.3g}; parameters and optimizer are as before them. Use bf16 or full precision, "
                "or look for values in the batch that are infinite or no numbers"
            )

    def tensors(self) -> list[torch.Tensor]:
        """What the scaler keeps from step to step."""
        kept = (self.scaler._scale, self.scaler._growth_tracker)  # noqa: SLF001 - torch hands out their values only
        return [tensor for tensor in kept if tensor is not None]

    def state(self) -> dict[str, Any]:
        """Plain values, for a snapshot."""
        return {"scaler": self.scaler.state_dict(), "skipped_in_a_row": self.skipped_in_a_row}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`, from any point of a step: a new scaler knows of no gradients unscaled already."""
        self.scaler = self._fresh(state["scaler"])
        self.skipped_in_a_row = state["skipped_in_a_row"]
