"""Asks `memfit.train.plan_server`, in a process of its own, whether a trial fits."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from memfit.errors import InputError

_IDLE_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Fit:
    """What is known of a trial before it starts.

    Attributes:
        fits: whether there is a plan.
        budget_bytes: that the plan was made for.
        peak_bytes: predicted, on the device; of several ranks, that of the fullest.
        rank_bytes: predicted, of each rank; empty where there is one.
        tiers: bytes on lower tiers, by name.
        minimum_bytes: the smallest budget that would do, where there is no plan; None where none was found.
        step_seconds: predicted.
        snapshot_bytes: that a snapshot takes at least, where there is a plan.
        device: "cpu" or "cuda".
        message: why there is no plan.
        error: kind of the error where it could not be told; "" where it could.
    """

    fits: bool
    budget_bytes: int = 0
    peak_bytes: int = 0
    tiers: Mapping[str, int] | None = None
    minimum_bytes: int | None = None
    step_seconds: float = 0.0
    device: str = "cpu"
    message: str = ""
    error: str = ""
    rank_bytes: tuple[int, ...] = ()
    snapshot_bytes: int = 0

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Predicted, of every rank, also where there is one."""
        return tuple(self.rank_bytes) or (self.peak_bytes,)


class Planner:
    """The other end of the plan server; it is started with the first question, and again when it was lost."""

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        self._environment = dict(environment or {})  # beside this process's own
        self._process: subprocess.Popen[str] | None = None
        self.questions = 0
        self.idle: Callable[[], None] = lambda: None  # called while an answer is awaited

    def ask(self, config: Mapping[str, Any], plan: Path | None = None) -> Fit:
        """Whether a run fits.

        Args:
            config: of the run.
            plan: file for the plan.

        Raises:
            InputError: the process that plans was lost twice; what it said is in its log.
        """
        self.questions += 1
        question = json.dumps({"config": config, "plan": None if plan is None else str(plan)}) + "\n"
        for _ in range(2):
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(question)
                process.stdin.flush()
                while not select.select([process.stdout], [], [], _IDLE_SECONDS)[0]:
                    self.idle()
                answer = process.stdout.readline()
            except OSError:
                answer = ""
            if answer:
                return Fit(**{"fits": False, **json.loads(answer)})
            self.close()
        raise InputError(f"the process that plans has died twice over one trial: what it said is in {self._log}")

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "memfit.train.plan_server"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, **self._environment},
                    start_new_session=True,
                )
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue
        self._process.kill()
        self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
