"""The plans that an engine follows, by the signature of the batches that they are for.

A batch falls under the plan of its own signature, or under the tightest one that it fits within. A shape whose forward diverged from the plan it fell
under gets a plan of its own; one whose forward diverged from its own plan is captured again, to learn the path that it took.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from memfit import batches
from memfit.batches import Batch
from memfit.engine.compiled import CompiledScript
from memfit.errors import CaptureError, InfeasibleError
from memfit.units import format_bytes
from memfit.values.plan import Plan

MOST_LOOKS: Final = (
    5  # at a shape whose forward goes on to diverge: after 1, 2, 4, ... divergences, as each look is a capture
)


class PlanTable:
    """Plans by signature, each with its script compiled."""

    def __init__(self) -> None:
        self._plans: dict[str, Plan] = {}
        self._compiled: dict[str, CompiledScript] = {}
        self._diverged: set[str] = set()
        self._unknown: Counter[str] = Counter()  # divergences from a shape's own plan, since the last look
        self._looks: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, plan: Plan) -> None:
        """From now on the plan for batches of its signature."""
        self._plans[plan.signature] = plan
        self._compiled[plan.signature] = CompiledScript(plan.script)

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()
        self._compiled.clear()

    def compiled(self, plan: Plan) -> CompiledScript:
        """The script of a plan that was added."""
        return self._compiled[plan.signature]

    def plan_for(self, signature: str, first: Plan) -> Plan:
        """The plan that batches of this signature fall under; the one with the smallest peak when several do.

        Args:
            signature: of a batch.
            first: named in the error.

        Raises:
            BatchError: no plan is for such a batch.
        """
        if signature in self._plans:
            return self._plans[signature]
        fitting = [plan for each, plan in self._plans.items() if batches.fits_within(signature, each)]
        if not fitting:
            raise batches.larger_than_planned(signature, first.signature)
        return min(fitting, key=lambda plan: plan.prediction.peak_bytes)

    # -- shapes that diverge -------------------------------------------------------------------------------------------------

    def note_divergence(self, signature: str) -> None:
        """A forward of such a batch was not as planned: the next one gets a plan of its own; where it has one, that learns what the next one does."""
        if signature not in self._plans:
            self._diverged.add(signature)
        else:
            self._unknown[signature] += 1

    def wants_own_plan(self, signature: str) -> bool:
        """Whether the next batch of this signature is to get a plan of its own."""
        return signature in self._diverged and signature not in self._plans

    def wants_to_learn(self, signature: str) -> bool:
        """Whether the step that has just diverged is to be captured, for the path that it took."""
        looks = self._looks[signature]
        return looks < MOST_LOOKS and self._unknown[signature] >= 1 << looks

    def own_plan(self, batch: Batch, signature: str, known: Plan, planner: Callable[[Batch], Plan]) -> Plan:
        """A plan for this very shape; the one it falls under where none can be made. Not added yet.

        Args:
            batch: of the shape.
            signature: of the batch.
            known: the plan that it falls under.
            planner: makes a plan for a batch.
        """
        self._diverged.discard(signature)
        try:
            return planner(batch)
        except (CaptureError, InfeasibleError) as error:
            warnings.warn(f"no plan of its own for batches [{signature}]: {error}", stacklevel=4)
            return replace(known, signature=signature)

    def learnt(self, batch: Batch, signature: str, known: Plan, learner: Callable[[Batch, Plan], Plan]) -> Plan:
        """The plan of a shape after a look at a step that diverged from the one it had. Not added yet.

        Args:
            batch: of that step; the model and the generators are as they were when it began.
            signature: of the batch.
            known: the plan of the shape so far, returned where nothing new was seen or the step cannot be captured.
            learner: makes a plan that also knows what this step does.
        """
        self._looks[signature] += 1
        self._unknown[signature] = 0
        try:
            made = learner(batch, known)
        except CaptureError as error:
            warnings.warn(f"the path that a step took cannot be learnt: {error}", stacklevel=4)
            return known
        if made.budget_bytes > known.budget_bytes:
            more = format_bytes(made.prediction.peak_bytes - known.budget_bytes)
            warnings.warn(
                f"no plan for the path that a step took fits in the budget: the smallest, which is followed from now on, takes {more} more",
                stacklevel=4,
            )
        return made
