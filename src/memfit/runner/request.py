"""What a run is: a command, where it runs, how many bytes it will take, and what it may not exceed. A value: frozen, JSON both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One run.

    Attributes:
        name: unique within a runner; a name that is known is not run a second time. Also the name of its folder.
        command: program and arguments.
        folder: working folder; "" for the runner's own.
        environment: variables that are set in addition to the runner's own environment.
        peak_bytes: predicted peak on each device and tier, by its name: {"cpu": 8 << 30} or {"cuda:0": ..., "host": ...}.
        memory_limit_bytes: of writable memory that the process may have in all (RLIMIT_DATA); None for no limit.
        seconds: after which it is stopped; None for no limit.
        silent_seconds: without a line of output or a change of `watched`, after which it is stopped; None for no limit.
        watched: file whose changes count as signs of life, besides output.
        grace_seconds: between the end signal (SIGTERM) and SIGKILL.
        outlives_runner: whether it goes on when the runner dies, to be found again by the next one; else it is killed with it.
        resume_command: in place of `command` where `resume_if` exists; empty where a run always starts from the beginning.
        resume_if: file that says there is something to go on from.
        restarts: how many times a run that was killed or lost is started again.
        alone: whether nothing else may run meanwhile.
    """

    name: str
    command: tuple[str, ...]
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    memory_limit_bytes: int | None = None
    seconds: float | None = None
    silent_seconds: float | None = None
    watched: str = ""
    grace_seconds: float = 10.0
    outlives_runner: bool = False
    resume_command: tuple[str, ...] = ()
    resume_if: str = ""
    restarts: int = 0
    alone: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "command": list(self.command), "resume_command": list(self.resume_command)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunRequest:
        """Inverse of `to_json`."""
        return cls(
            **{**data, "command": tuple(data["command"]), "resume_command": tuple(data.get("resume_command", ()))}
        )
