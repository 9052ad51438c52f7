"""Which optimizers update elementwise, so that their step may run on any part of a parameter, and what state each keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from memfit.optimizers.formats import SIGNED, UNSIGNED
from memfit.optimizers.lion import Lion

Group = dict[str, Any]
Kind = type[torch.optim.Optimizer]


def _adam(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _rmsprop(group: Group) -> tuple[str, ...]:
    more = (("momentum_buffer", group["momentum"] > 0), ("grad_avg", group["centered"]))
    return ("square_avg", *(name for name, there in more if there))


# The moments that each keeps for a parameter of a group. A subclass may keep others, so subclasses are not looked up here.
MOMENTS: Final[Mapping[type, Callable[[Group], tuple[str, ...]]]] = {
    torch.optim.AdamW: _adam,
    torch.optim.Adam: _adam,
    torch.optim.SGD: lambda group: ("momentum_buffer",) if group["momentum"] else (),
    Lion: lambda _: ("exp_avg",),
    torch.optim.NAdam: lambda _: ("exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: lambda _: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adamax: lambda _: ("exp_avg", "exp_inf"),
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: lambda _: ("square_avg", "acc_delta"),
}
# Those for which 8 bits are made: with moments of these names only.
IN_8_BITS: Final = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, Lion)
CODES: Final[Mapping[str, torch.dtype]] = {"exp_avg": SIGNED, "momentum_buffer": SIGNED, "exp_avg_sq": UNSIGNED}


def why_no_8bit(kind: Kind, groups: Sequence[Group]) -> str | None:
    """Why such an optimizer has no 8-bit state; None where it can have it."""
    known = "supported are AdamW and Adam (without amsgrad), SGD with momentum, and memfit's Lion"
    if kind not in IN_8_BITS:
        return f"{kind.__name__} has no 8-bit state: {known}"
    moments = {name for group in groups for name in MOMENTS[kind](group)}
    if not moments <= CODES.keys():
        return f"{kind.__name__} with amsgrad=True has no 8-bit state: {known}"
    if not moments:
        return f"{kind.__name__} without momentum keeps no state, so 8 bits would save nothing"
    return why_not_in_chunks(kind, groups, "it has no 8-bit state")


def why_not_there(kind: Kind, groups: Sequence[Group], place: str, device_kind: str) -> str | None:
    """Why such an optimizer's state cannot be offloaded to the "host" or the "disk" between updates; None where it can.

    Args:
        kind, groups: of the optimizer.
        place: "host" or "disk".
        device_kind: of the device that trains, "cuda" or "cpu": a plan may be for another one than the parameters are on.
    """
    reason = why_not_in_chunks(kind, groups, f"the state of {kind.__name__} stays on the device")
    if kind not in MOMENTS:
        return reason
    if place == "host" and device_kind == "cpu":
        return "the device is the CPU, whose memory is host memory: offload to the disk instead"
    if not any(MOMENTS[kind](group) for group in groups):
        return f"{kind.__name__} without momentum keeps no state that could be offloaded"
    return reason


def why_not_in_chunks(kind: Kind, groups: Sequence[Group], so: str) -> str | None:
    """Why such an optimizer's step cannot run on parts of a parameter; None where it can. `so` is what follows from its not being known."""
    if kind not in MOMENTS:
        names = ", ".join(sorted(known.__name__ for known in MOMENTS))
        return f"{so}: only {names} are known to update every element by itself"
    if any(group.get("differentiable") for group in groups):
        return f"{kind.__name__} with differentiable=True updates whole parameters"
    return None


def own_step(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer's step without what torch wraps around each (hooks, a profiler's range): those belong to the whole step."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", None) else step)(optimizer)
