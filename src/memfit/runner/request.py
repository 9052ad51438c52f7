"""What a run is: a command, where it runs, how many bytes it will take, and what it may not exceed. A value: frozen, JSON both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

_TUPLES: Final = ("command", "resume_command", "rank_bytes")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One run.

    Attributes:
        name: unique within a runner; a name that is known is not run a second time. Also the name of its folder.
        command: program and arguments.
        folder: working folder; "" for the runner's own.
        environment: variables that are set in addition to the runner's own environment.
        inherits: whether it gets the runner's own environment; else `environment` is all that it has, and its guard has none.
        peak_bytes: predicted peak on each device and tier that is named: {"cpu": 8 << 30} or {"cuda:0": ..., "host": ...}.
        rank_bytes: predicted peak of each of its ranks, each of which takes a device of the kind `device` for itself; the runner chooses which, all or none.
            Of a run in one process one number; empty where `peak_bytes` says all.
        device: kind of the devices that ranks take: "cuda" for any of "cuda:0", "cuda:1" and so on. A device whose name is the kind alone ("cpu", the
            computer's memory) may be shared by several ranks.
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
        lease: file that says until when the run may go on (`memfit.runner.guard.write_lease`), after which it is stopped; "" for no limit.
    """

    name: str
    command: tuple[str, ...]
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    inherits: bool = True
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    rank_bytes: tuple[int, ...] = ()
    device: str = "cpu"
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
    lease: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in _TUPLES}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunRequest:
        """Inverse of `to_json`."""
        return cls(**{**data, **{name: tuple(data.get(name, ())) for name in _TUPLES}})
