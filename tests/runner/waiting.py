"""Waiting for runs to end."""

from __future__ import annotations

import time

from memfit.runner import End
from memfit.runner.runs import Runs


def until_over(runner: Runs, *names: str, seconds: float = 60.0) -> dict[str, End]:
    """How these have ended."""
    ends: dict[str, End] = {}
    deadline = time.monotonic() + seconds
    while not set(names) <= set(ends):
        ends |= dict(runner.poll(0.2))
        assert time.monotonic() < deadline, f"{ends}, {runner.running}, {runner.waiting}"
    return ends
