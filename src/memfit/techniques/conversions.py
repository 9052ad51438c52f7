"""Which models techniques have converted permanently, and how: a new plan keeps the conversion, and a plan for the model as it was before still applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from memfit.techniques.choices import Choices, converting


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done to a model.

    Attributes:
        settings: of the techniques that converted it, by name.
        before, after: digests of the model.
    """

    settings: Mapping[str, Any]
    before: str
    after: str


_OF: Final[WeakKeyDictionary[Any, Conversion]] = WeakKeyDictionary()


def remember(model: Any, choices: Choices, before: str, after: str) -> None:
    """Note that a model was converted under these choices; nothing where none of them converts."""
    settings = converting(choices)
    if settings:
        _OF[model] = Conversion(settings, before, after)


def conversion_of(model: Any, digest: str) -> Conversion | None:
    """How a model was converted; None where it was not, or has been changed since, as its present digest shows."""
    found = _OF.get(model)
    return found if found is not None and found.after == digest else None
