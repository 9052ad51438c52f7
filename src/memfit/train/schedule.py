"""The learning rate by step.

torch's LambdaLR would do, but it replaces `optimizer.step` by a counting copy, which must then be the one that is
called, and it has state to save. The schedules here are closed-form: a rate follows from the number of the step, so a
resumed run has it without being told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from memfit.integrations.deepspeed.training import RateSchedule
from memfit.train.config import ScheduleConfig


def factor(schedule: ScheduleConfig, total_steps: int, step: int) -> float:
    """Share of the full learning rate in a step (from 0).

    It is never zero in a step that is taken: warm-up starts at 1/warmup_steps, and what falls to zero reaches it after
        the last step.
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return 1.0 - done if schedule.name == "linear" else (1.0 + math.cos(math.pi * done)) / 2


class Rates:
    """Sets the learning rates of an optimizer, whose present ones are the full ones."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, total_steps: int) -> None:
        self._optimizer, self._schedule, self._total_steps = optimizer, schedule, total_steps
        self._full = [float(group["lr"]) for group in optimizer.param_groups]

    def set(self, step: int) -> float:
        """Rates for a step (from 0), before it is taken; returns the first group's."""
        share = factor(self._schedule, self._total_steps, step)
        for group, full in zip(self._optimizer.param_groups, self._full, strict=True):
            group["lr"] = full * share
        return float(self._optimizer.param_groups[0]["lr"])

    def release(self) -> None:
        """Put the full rates back."""
        for group, full in zip(self._optimizer.param_groups, self._full, strict=True):
            group["lr"] = full


class MovedRates:
    """The same as `Rates` for a schedule that knows only how to go on: it is made anew to go back.

    Args:
        optimizer: whose present settings are those the schedule begins with.
        make: the schedule on an optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, make: Callable[[torch.optim.Optimizer], RateSchedule]) -> None:
        self._optimizer, self._make = optimizer, make
        moved = ("lr", "betas", "momentum")
        self._full: list[dict[str, Any]] = [{k: g[k] for k in moved if k in g} for g in optimizer.param_groups]
        self._schedule, self._taken = make(optimizer), 0

    def set(self, step: int) -> float:
        """See `Rates`."""
        if step < self._taken:
            self.release()
            self._schedule, self._taken = self._make(self._optimizer), 0
        while self._taken < step:
            self._schedule.step()
            self._taken += 1
        self._schedule.set()  # a snapshot that was loaded meanwhile has brought the rates of its own step
        return float(self._optimizer.param_groups[0]["lr"])

    def release(self) -> None:
        """Put the settings it began with back."""
        for group, full in zip(self._optimizer.param_groups, self._full, strict=True):
            group.update(full)
