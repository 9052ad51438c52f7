"""Freezing: parts of the model that are not trained, named by the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from memfit.errors import InputError
from memfit.techniques.technique import Offer, StepFacts, Subject, Technique


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """A module or parameter that is not trained.

    Attributes:
        path: from the model's root.
        parameters: numbers in it.
        bytes: of these parameters.
    """

    path: str
    parameters: int
    bytes: int


class Freezing(Technique):
    """Setting: patterns of module paths (`freezing.freeze`); set by `freeze=`, never weighed."""

    name = "frozen"
    baseline = ()
    sizes_state = True
    page = "techniques/freezing.md"
    unsaid: ClassVar[Mapping[str, str]] = {
        "deepspeed": "what is frozen ({setting}): set requires_grad to false in the script"
    }
    pinned = False

    def words(self, setting: tuple[str, ...]) -> str:
        """As in: embeddings frozen."""
        return f"{', '.join(setting)} frozen"

    def asked_by(self, setting: tuple[str, ...]) -> str:
        """The argument."""
        del setting
        return "freeze"

    def claim(self, without: StepFacts, used: StepFacts, setting: tuple[str, ...]) -> tuple[int, str]:
        """Gradients and state; the activations below the lowest trained parameter are left out of it."""
        del setting
        lost = without.gradient_bytes + without.state_bytes - used.gradient_bytes - used.state_bytes
        return lost, "gradients and optimizer state of what is frozen"

    def offer(self, subject: Subject) -> Offer:
        """Nothing: what is frozen is the user's to say."""
        del subject
        return Offer()

    def check(self, setting: Any) -> None:
        """Refused: it has an argument of its own."""
        raise InputError(f"fixed frozen={setting!r}: what is frozen is named by freeze=[...]")


FREEZING = Freezing()
