"""Mixed precision: forward and loss under autocast, and for fp16 a gradient scaler around backward and update.

Both are torch's own (Micikevicius et al. 2018, "Mixed Precision Training"): parameters, gradients and optimizer state stay as the model has them, and
what autocast casts (weights too, kept until its region ends) are operations and storages like any other, seen where operations are dispatched.
The numbers are those of the loop that torch documents: `autocast`, `scale(loss).backward()`, `unscale_`, clip, `step`, `update`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from memfit.errors import NonFiniteLossError

Agree = Callable[[Iterable[torch.Tensor]], None]

FORMATS: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Each skipped step halves the scale (under torch's rule). It starts at 2**16, so by then gradients that are scaled down 16,000 times still overflow.
MOST_SKIPPED: Final = 30


def autocast(precision: str, device_type: str, *, cache: bool = True) -> AbstractContextManager[object]:
    """The region in which forward and loss run; one for each micro-batch.

    Args:
        precision: "full" for none, or a name in `FORMATS`.
        device_type: "cpu" or "cuda".
        cache: casts of weights are kept for a second use in the region.
    """
    return (
        nullcontext() if precision == "full" else torch.autocast(device_type, FORMATS[precision], cache_enabled=cache)
    )


def why_not_scaled(model: torch.nn.Module) -> str | None:
    """Why fp16 cannot be had: gradients of parameters that are fp16 themselves cannot be unscaled, as nothing wider holds them; None when it can."""
    halves = (n for n, p in model.named_parameters() if p.requires_grad and p.dtype is torch.float16)
    name = next(halves, None)
    if name is None:
        return None
    return f"it keeps parameters in 32 bits and casts them in forward, and {name} is fp16 already (model.float() converts it)"


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How the scale moves where it does not move in torch's way: as in DeepSpeed, whose configurations say it (deepspeed/runtime/fp16/loss_scaler.py).

    Attributes:
        initial: the scale of the first step.
        constant: it stays so; the others do not count then.
        window: steps without overflow after which it doubles, and again after as many.
        least: below which it does not fall.
        hysteresis: the how manieth overflow halves it first; those before are only skipped.
        refilled: a step without overflow makes `hysteresis` count anew; else only a scale that doubles does.
    """

    initial: float
    constant: bool = False
    window: int = 1000
    least: float = 1.0
    hysteresis: int = 1
    refilled: bool = False


@dataclass(slots=True)
class _Course:
    """Where a scale is under its rule.

    Attributes:
        steps: so far, skipped ones too.
        last_overflow: number of the last step that overflowed.
        left: of the hysteresis.
    """

    steps: int = 0
    last_overflow: int = -1
    left: int = 1

    def next(self, rule: ScaleRule, scale: float, *, overflowed: bool) -> float:
        """The scale after a step."""
        if overflowed:
            if rule.hysteresis == 1 or self.left == 1:
                scale = max(scale / 2.0, rule.least)
            else:
                self.left -= 1
            self.last_overflow = self.steps
        else:
            if rule.refilled:
                self.left = rule.hysteresis
            stable = self.steps - self.last_overflow - 1
            if stable > 0 and stable % rule.window == 0:
                self.left = rule.hysteresis
                scale *= 2.0
        self.steps += 1
        return scale


class _OfRanks(torch.amp.GradScaler):
    """What overflows on one rank is left out on all: a shard that overflowed is on one rank alone, and the others would step."""

    agree: Agree | None = None

    def _unscale_grads_(self, *given: Any) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(*given)
        if self.agree is not None:
            self.agree(found.values())
        return found


class Scaling:
    """torch's gradient scaler, with what a step that happens whole or not at all needs of it.

    Args:
        device: where the gradients are.
        agree: of several ranks; each value becomes the largest that a rank has.

    Attributes:
        scaler: for people who keep their own loop.
        skipped_in_a_row: steps skipped since the last one taken.
    """

    def __init__(self, device: torch.device, agree: Agree | None = None) -> None:
        self.device = device
        self._agree = agree
        self.rule: ScaleRule | None = None
        self._course = _Course()
        self.scaler = self._fresh()
        self.skipped_in_a_row = 0

    def follow(self, rule: ScaleRule) -> None:
        """Begin with the scale of a rule, and move it as that says from now on."""
        self.rule, self._course = rule, _Course(left=rule.hysteresis)
        self.scaler, self.skipped_in_a_row = self._fresh(), 0

    def _fresh(self, state: Mapping[str, Any] | None = None) -> torch.amp.GradScaler:
        kind = self.device.type
        scaler = _OfRanks(kind) if self.rule is None else _OfRanks(kind, self.rule.initial)
        scaler.agree = self._agree
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
        if self.rule is None:
            self.scaler.step(optimizer)
            self.scaler.update()
            taken = self.scaler.get_scale() >= before  # it falls when, and only when, a step is skipped
        else:
            found = self.scaler._found_inf_per_device(optimizer)  # noqa: SLF001 - known since `unscale`, told to nobody
            taken = not any(value.item() for value in found.values())
            self.scaler.step(optimizer)
            following = before if self.rule.constant else self._course.next(self.rule, before, overflowed=not taken)
            self.scaler.update(following)
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
        course = self._course
        kept = {"scaler": self.scaler.state_dict(), "skipped_in_a_row": self.skipped_in_a_row}
        return kept if self.rule is None else {**kept, "course": (course.steps, course.last_overflow, course.left)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`, from any point of a step: a new scaler knows of no gradients unscaled already."""
        if self.rule is not None and "course" in state:  # of a run without a rule there is only a scale to go on from
            self._course = _Course(*state["course"])
        self.scaler = self._fresh(state["scaler"])
        self.skipped_in_a_row = state["skipped_in_a_row"]
