"""How a model is divided among the ranks of pipelines: stages, what crosses between them, what each runs again. Values: frozen, torch-free, JSON both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memfit.units import format_bytes, format_seconds
from memfit.values.script import Script
from memfit.values.stages import Cut


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor that goes from a stage to the next one, for one micro-batch; where it has a gradient, that comes back.

    Attributes:
        part: path of the module that made it.
        shape: of it.
        dtype: by torch's name, as "float32".
        bytes: of its elements.
        gradient: whether one comes back.
    """

    part: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    gradient: bool


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Stages for ranks. Each run of as many ranks as the cut has devices is a pipeline, whose stages go round its ranks; pipelines are replicas of each other.

    Attributes:
        cut: the stages, their schedule, and what a step of them takes.
        parts: paths of the modules that are called one after the other.
        parameters: of each stage, the names of those that it has; a tied one is on several.
        everywhere: names of those that every stage has, since the forward reads them between parts.
        messages: behind each stage but the last, what crosses.
        scripts: of each stage, what its forwards drop and run again.
        replicas: pipelines beside each other, each with its own part of the batch; their gradients are summed once a step.
        draws: forward draws random numbers (dropout); each rank draws its own.
    """

    cut: Cut
    parts: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]
    everywhere: tuple[str, ...]
    messages: tuple[tuple[Message, ...], ...]
    scripts: tuple[Script, ...]
    replicas: int = 1
    draws: bool = False

    @property
    def stages(self) -> int:
        """Of a pipeline."""
        return len(self.cut.stages)

    @property
    def length(self) -> int:
        """Ranks of a pipeline."""
        return len(self.cut.devices)

    @property
    def ranks(self) -> int:
        """Of all pipelines."""
        return self.length * self.replicas

    @property
    def ends(self) -> tuple[int, ...]:
        """Of each stage, the part before which it ends."""
        return tuple(stage.end for stage in self.cut.stages)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank has, in the order in which forward runs them."""
        return tuple(range(rank % self.length, self.stages, self.length))

    def named(self, stage: int) -> str:
        """A stage by its first and last part."""
        one = self.cut.stages[stage]
        first, last = self.parts[one.first], self.parts[one.end - 1]
        return first if first == last else f"{first} to {last}"

    def in_words(self) -> list[str]:
        """A line for each stage."""
        lines = []
        for number, (stage, script) in enumerate(zip(self.cut.stages, self.scripts, strict=True)):
            again = f", {script.recomputations} operations run again for each" if script.recomputations else ""
            sent = (
                f"; sends {format_bytes(sum(message.bytes for message in self.messages[number]))}"
                if number < len(self.messages)
                else ""
            )
            forward, backward = format_seconds(stage.forward_seconds), format_seconds(stage.backward_seconds)
            lines.append(
                f"  stage {number}: {self.named(number)}; {forward} forward and {backward} backward a micro-batch{again}{sent}"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "cut": self.cut.to_json(),
            "parts": list(self.parts),
            "parameters": [list(names) for names in self.parameters],
            "everywhere": list(self.everywhere),
            "messages": [[asdict(message) for message in behind] for behind in self.messages],
            "scripts": [script.to_json() for script in self.scripts],
            "replicas": self.replicas,
            "draws": self.draws,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PipelinePlan:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: these are not the fields of one, or do not fit together.
        """
        made = cls(
            Cut.from_json(data["cut"]),
            tuple(map(str, data["parts"])),
            tuple(tuple(map(str, names)) for names in data["parameters"]),
            tuple(map(str, data["everywhere"])),
            tuple(tuple(Message(**{**m, "shape": tuple(m["shape"])}) for m in behind) for behind in data["messages"]),
            tuple(Script.from_json(script) for script in data["scripts"]),
            int(data["replicas"]),
            bool(data["draws"]),
        )
        ends = made.ends
        if not (len(ends) == len(made.parameters) == len(made.scripts) == len(made.messages) + 1) or made.replicas < 1:
            raise ValueError(f"a pipeline of {len(ends)} stages with {len(made.scripts)} scripts")
        if list(ends) != sorted(set(ends)) or ends[-1] != len(made.parts):
            raise ValueError(f"stages end before parts {list(ends)} of {len(made.parts)}")
        if made.stages % made.length or [
            stage.device for stage in made.cut.stages
        ] != made.stages // made.length * list(made.cut.devices):
            raise ValueError(
                f"its stages are on devices {[stage.device for stage in made.cut.stages]}, which do not go round"
            )
        return made
