"""What a tracker begins with, and how it finds the run that it goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

NAME: Final = "run.json"
PROJECT: Final = "memfit"  # where the environment names no other

End = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Start:
    """What a tracker begins with.

    Attributes:
        folder: of this tracker alone.
        name: of the run, for people.
        settings: configuration and plan, as plain nested data.
        about: the plan in words; "" without one.
        step: optimizer steps taken before; 0 begins a new run.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    about: str
    step: int

    def known(self) -> str | None:
        """The library's name of the run to go on with; None when there is none."""
        if self.step == 0:
            return None
        try:
            run = json.loads((self.folder / NAME).read_text(encoding="utf-8"))["run"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return run if isinstance(run, str) else None

    def keep(self, run: str) -> None:
        """Note the library's name of the run, for who goes on with it."""
        (self.folder / NAME).write_text(json.dumps({"run": run}) + "\n", encoding="utf-8")


class OpenRun(Protocol):
    """An open run in one library."""

    look: str
    """The command that shows the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of one step."""

    def close(self, end: End) -> None:
        """End the run."""


def flat(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested data as ("fit.budget", value)."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
