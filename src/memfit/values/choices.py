"""The few discrete choices around the actions of a plan, and which of them cannot stand together. A value: frozen, torch-free, JSON both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

WEIGHTINGS: Final = ("whole", "samples", "sum", "tokens", "next_tokens", "filled")  # kinds of `batches.weightings`
VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "precision": ("full", "bf16", "fp16"),
    "state_format": ("32bit", "8bit"),
    "state_place": ("device", "host", "disk"),
    "update": ("after", "in_backward"),
}


@dataclass(frozen=True, slots=True)
class Choices:
    """How a step is run; what plain PyTorch does is the default of each.

    Attributes:
        micro_batches: parts in which the batch is run, gradients accumulated.
        micro_batch_size: samples in the largest part; 0 where nobody has counted yet.
        weights: how the parts' losses add up to the batch's: "whole" or one of `batches.weightings`.
        precision: "full" (every operation as the model asks), or "bf16" or "fp16" (forward and loss under autocast, fp16 with a gradient scaler).
        state_format: of the optimizer's state: "32bit" (as the optimizer keeps it) or "8bit" (block-wise).
        state_place: where the optimizer's state lies between updates: "device", "host" or "disk".
        update: "after" backward, or "in_backward" (each parameter as soon as its gradient is whole, which is then let go).
        frozen: patterns of the modules that are not trained.
        loss_chunks: parts in which the rows of the loss head are taken, one after the other; 1 for all at once.
        streamed: path of the repeated blocks whose parameters lie on the lower tier; "" for none.
        unforced: modules whose outputs want no gradient though a hook says so, since nothing below them is trained (`step.freeze`).
    """

    micro_batches: int = 1
    micro_batch_size: int = 0
    weights: str = "whole"
    precision: str = "full"
    state_format: str = "32bit"
    state_place: str = "device"
    update: str = "after"
    frozen: tuple[str, ...] = ()
    loss_chunks: int = 1
    streamed: str = ""
    unforced: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choices:
        """From `dataclasses.asdict`, perhaps edited by hand.

        Raises:
            ValueError, KeyError, TypeError: a field that is missing, unknown, or of a value there is not.
        """
        choices = cls(**{**data, **{name: tuple(map(str, data[name])) for name in ("frozen", "unforced")}})
        for name, least in (("micro_batches", 1), ("micro_batch_size", choices.micro_batches > 1), ("loss_chunks", 1)):
            value = getattr(choices, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}")
        if str(choices.weights).partition(":")[0] not in WEIGHTINGS:
            raise ValueError(f"weights is {choices.weights!r}")
        for name, values in VALUES.items():
            if getattr(choices, name) not in values:
                raise ValueError(f"{name} is {getattr(choices, name)!r}")
        if not isinstance(choices.streamed, str):
            raise ValueError(f"streamed is {choices.streamed!r}")  # noqa: TRY004 - what is wrong with a file is a value
        return choices

    def told_apart(self) -> Iterator[tuple[str, Any]]:
        """Fields that differ from plain PyTorch's, but for the micro-batches and what follows from the others."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default and field.name not in {
                "micro_batches",
                "micro_batch_size",
                "weights",
                "unforced",
            }:
                yield field.name, value


PLAIN: Final = Choices()


def conflict(choices: Choices, *, clips: bool = False) -> str | None:
    """Why these choices cannot stand together; None when they can.

    Args:
        choices: to be looked at.
        clips: whether the step clips the global gradient norm.
    """
    if choices.update == "in_backward":
        if clips:
            return "clipping needs the norm of all gradients before any parameter is updated, so nothing can be updated inside backward"
        if choices.precision == "fp16":
            return "the gradient scaler must see all gradients before any parameter is updated, so nothing can be updated inside backward"
    if choices.loss_chunks > 1 and choices.precision == "fp16":
        return "in fp16 gradients are scaled before they are rounded, and a loss head in chunks makes its own before backward brings the scale: take bf16"
    if choices.streamed:
        if choices.precision == "fp16":
            return "streaming updates a layer while others are in backward, the gradient scaler must see all gradients before: take bf16"
        if choices.state_format == "8bit":
            return "streamed layers bring their own optimizer state along, in 32 bits"
        if choices.state_place != "device":
            return "streaming moves the optimizer's state of the layers itself"
        if choices.update == "in_backward":
            return "streaming updates behind backward by itself"
        if choices.loss_chunks > 1:
            return "streaming runs the loss head with its own cut of the graph, as a whole"
    return None


def in_words(choices: Choices) -> str:
    """What differs from plain PyTorch, in a few words; "" where nothing does."""
    words = {
        "precision": f"{choices.precision} autocast",
        "state_format": "8-bit optimizer state",
        "state_place": f"optimizer state on the {choices.state_place}",
        "update": "update inside backward",
        "frozen": f"{', '.join(choices.frozen)} frozen",
        "loss_chunks": f"loss head in {choices.loss_chunks} chunks",
        "streamed": f"layers of {choices.streamed} streamed",
    }
    return ", ".join(words[name] for name, _ in choices.told_apart())
