"""Choices: the techniques in use with their settings, and the number of micro-batches. A value: frozen, torch-free, JSON both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from memfit.techniques.accumulation import ACCUMULATION
from memfit.techniques.registry import BY_NAME, TECHNIQUES
from memfit.techniques.technique import Setting, Technique

WEIGHTINGS: Final = ("whole", "samples", "sum", "tokens", "next_tokens", "filled")  # kinds of `batches.weightings`


@dataclass(frozen=True, init=False, repr=False)
class Choices:
    """How a step is run, apart from what is done about each saved tensor. Without techniques, in one micro-batch, it is the step of plain PyTorch.

    The setting of each technique is an attribute under the technique's name, baseline or not: `choices.precision`.

    Args:
        micro_batches: in which the batch is run, gradients accumulated.
        micro_batch_size: samples in the largest one; 0 where that is not known yet.
        weights: how the micro-batches' losses add up to the batch's: "whole" or one of `batches.weightings`.
        unforced: modules whose outputs want no gradient though a hook says so, since nothing below them is trained (`techniques.freezing.freeze`).
        techniques: (name, setting) of those in use; what `settings` says goes first.
        settings: of techniques, by name; baselines are left out.

    Raises:
        TypeError: a setting of no technique.
    """

    micro_batches: int
    micro_batch_size: int
    weights: str
    unforced: tuple[str, ...]
    techniques: tuple[tuple[str, Setting], ...]

    def __init__(
        self,
        micro_batches: int = 1,
        micro_batch_size: int = 0,
        weights: str = "whole",
        unforced: tuple[str, ...] = (),
        techniques: tuple[tuple[str, Setting], ...] = (),
        **settings: Any,
    ) -> None:
        for name in settings:
            if name not in BY_NAME:
                raise TypeError(f"{name!r} is no technique: there is {', '.join(BY_NAME)}")
        chosen = {**dict(techniques), **settings}
        put = object.__setattr__  # as dataclasses do where they are frozen
        put(self, "micro_batches", micro_batches)
        put(self, "micro_batch_size", micro_batch_size)
        put(self, "weights", weights)
        put(self, "unforced", tuple(unforced))
        used = ((t.name, chosen[t.name]) for t in TECHNIQUES if chosen.get(t.name, t.baseline) != t.baseline)
        put(self, "techniques", tuple(used))

    @property
    def weights_in_words(self) -> str:
        """What the losses of micro-batches are weighted by, for people: "samples", "entries of labels that are not -100"."""
        kind, _, name = self.weights.partition(":")
        if name.isdigit():  # of a batch that is a tuple
            name = f"batch[{name}]"
        return {
            "sum": "nothing, as the loss is a sum",
            "tokens": f"entries of {name} that are not -100",
            "next_tokens": f"entries of {name}, from the second column on, that are not -100",
            "filled": f"nonzero entries of {name}",
        }.get(kind, kind)

    def __getattr__(self, name: str) -> Any:
        if name in BY_NAME:
            return dict(self.techniques).get(name, BY_NAME[name].baseline)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __repr__(self) -> str:
        told = {"micro_batches": self.micro_batches, "micro_batch_size": self.micro_batch_size, "weights": self.weights}
        more = {"unforced": self.unforced} if self.unforced else {}
        return f"Choices({', '.join(f'{n}={v!r}' for n, v in {**told, **dict(self.techniques), **more}.items())})"

    def but(self, **changes: Any) -> Choices:
        """The same with some settings changed, techniques' or the micro-batches'."""
        fields = ("micro_batches", "micro_batch_size", "weights", "unforced", "techniques")
        return Choices(**{**{name: getattr(self, name) for name in fields}, **changes})

    @property
    def used(self) -> Mapping[str, Any]:
        """Settings of the techniques in use, by name, in the order of `TECHNIQUES`."""
        return dict(self.techniques)

    @property
    def scales_gradients(self) -> bool:
        """Whether a gradient scaler goes with the step."""
        return bool(self.precision == "fp16")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        own = {name: getattr(self, name) for name in ("micro_batches", "micro_batch_size", "weights")}
        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in self.techniques}
        return {**own, "unforced": list(self.unforced), "techniques": settings}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choices:
        """From `to_json`, perhaps edited by hand.

        Raises:
            ValueError, KeyError, TypeError: a field that is missing, unknown, or of a value there is not.
        """
        unknown = set(data) - {"micro_batches", "micro_batch_size", "weights", "unforced", "techniques"}
        if unknown:
            raise ValueError(f"there is no {min(unknown)!r} among choices")
        settings = tuple((name, _read(name, value)) for name, value in dict(data["techniques"]).items())
        unforced = tuple(map(str, data["unforced"]))
        choices = cls(data["micro_batches"], data["micro_batch_size"], data["weights"], unforced, settings)
        for name, least in (("micro_batches", 1), ("micro_batch_size", choices.micro_batches > 1)):
            value = getattr(choices, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}")
        if str(choices.weights).partition(":")[0] not in WEIGHTINGS:
            raise ValueError(f"weights is {choices.weights!r}")
        return choices


def _read(name: str, value: Any) -> Setting:
    """A technique's setting as JSON has it."""
    technique = BY_NAME[name]
    if isinstance(technique.baseline, tuple):
        return tuple(map(str, value))
    known = technique.settings is None or value in technique.settings
    if not known or type(value) is not type(technique.baseline) or (isinstance(value, int) and value < 1):
        raise ValueError(f"{name} is {value!r}")
    setting: Setting = value
    return setting


BASELINE: Final = Choices()


def conflict(choices: Choices, *, clips: bool = False) -> str | None:
    """Why these choices cannot be combined; None when they can.

    Args:
        choices: to be looked at.
        clips: whether the step clips the global gradient norm.
    """
    used = choices.used
    for name, setting in used.items():
        reason = BY_NAME[name].conflict(setting, used, clips=clips)
        if reason is not None:
            return reason
    return None


def in_words(choices: Choices) -> str:
    """The techniques in use, in a few words; "" for none."""
    return ", ".join(BY_NAME[name].words(setting) for name, setting in choices.techniques)


def named(choices: Choices, number: int) -> str:
    """The techniques in use in this many micro-batches, in a few words."""
    words, batches = in_words(choices), ACCUMULATION.words(number)
    return f"{words}, {batches}" if words else batches


@contextmanager
def regions(choices: Choices, model: Any, device_type: str) -> Iterator[None]:
    """What forward and loss of a micro-batch run inside, for all techniques in use."""
    with ExitStack() as stack:
        for name, setting in choices.techniques:
            stack.enter_context(BY_NAME[name].region(model, setting, device_type))
        yield


def convert(choices: Choices, model: Any) -> None:
    """Convert the model permanently as the techniques in use require (`Technique.convert`)."""
    for name, setting in choices.techniques:
        BY_NAME[name].convert(model, setting)


def converting(choices: Choices) -> dict[str, Any]:
    """Settings of the techniques in use that change the model, by name."""
    return {name: value for name, value in choices.techniques if type(BY_NAME[name]).convert is not Technique.convert}


def sizing_state(choices: Choices) -> Choices:
    """The same choices with only the techniques that change the bytes of the optimizer's state (`Technique.sizes_state`)."""
    return Choices(techniques=tuple((name, value) for name, value in choices.techniques if BY_NAME[name].sizes_state))


def lasting(choices: Choices) -> dict[str, Any]:
    """Settings, baselines among them, that an engine keeps where it plans again (`Technique.lasting`)."""
    return {technique.name: getattr(choices, technique.name) for technique in TECHNIQUES if technique.lasting}
