"""memfit among its rivals: plans at any budget for one model, each an arrangement like the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

import memfit
from memfit.planning import planning_of

from .arrangement import adamw
from .subjects import Subject

CHOICES: Final[Mapping[str, dict[str, int] | None]] = {"recompute only": {"micro_batches": 1}, "free choice": None}
"""The whole batch at once, bit-equal to plain; and micro-batches too, equal up to the order of additions."""


class Ours:
    """One model, planned for at many budgets. All plans share model and optimizer, so that a dozen of them cost no more memory than one.

    Args:
        subject: the model.
        optimizer: makes the optimizer.
    """

    def __init__(self, subject: Subject, optimizer: Callable[[Any], Any] = adamw) -> None:
        self.subject = subject
        self.model, self.sample, self.loss_fn = subject.build()
        self.factory = optimizer
        self.optimizer = optimizer(p for p in self.model.parameters() if p.requires_grad)
        self._state = [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]
        self._base: dict[str, memfit.Plan] = {}

    def base(self, choice: str) -> memfit.Plan:
        """The plan that drops nothing; captured on first use."""
        if choice not in self._base:
            self._base[choice] = memfit.plan(
                self.model, self.sample, self.loss_fn, 1 << 50, self.factory, fixed=CHOICES[choice]
            )
        return self._base[choice]

    def plan(self, choice: str, budget: int) -> tuple[memfit.Plan | None, float]:
        """A plan and the wall seconds it took; None where nothing fits."""
        base = self.base(choice)
        begin = time.perf_counter()
        try:
            made = memfit.replan(base, budget)
        except memfit.InfeasibleError:
            made = None
        return made, time.perf_counter() - begin

    def smallest(self, choice: str) -> int:
        """The smallest budget there is a plan for."""
        return int(memfit.smallest_budget(self.base(choice)))

    def solver(self) -> Any:
        """The solver for the whole batch."""
        return planning_of(self.base("recompute only")).solver(1)

    def arranged(self, plan: memfit.Plan) -> Planned:
        """The model as the plan has it, parameters and buffers as they were built."""
        with torch.no_grad():
            for tensor, value in zip((*self.model.parameters(), *self.model.buffers()), self._state, strict=True):
                tensor.copy_(value)
        return Planned(self, plan)


class Planned:
    """A step under a plan."""

    def __init__(self, ours: Ours, plan: memfit.Plan) -> None:
        self.plan, self.sample, self.optimizer = plan, ours.sample, ours.optimizer
        self.engine = memfit.apply(plan, ours.model, ours.loss_fn, ours.optimizer)
        self.divergences: set[str] = set()

    def step(self) -> None:
        """One step of the engine."""
        self.divergences.update(self.engine.step(self.sample).divergences)

    def present(self) -> list[Tensor]:
        """What the engine counts as there before a step."""
        return list(self.engine.present(self.sample))
