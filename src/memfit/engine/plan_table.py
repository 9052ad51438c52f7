"""The plans that an engine follows, by the signature of the batches that they are for.

A batch falls under the plan of its own signature, or under the tightest one that it fits within. A shape whose forward diverged from the plan it fell
under gets a plan of its own; one whose forward diverged from its own plan is captured again, to learn the path that it took. Paths for which no one plan fits
have a plan each: a step begins under the one that was right most often of late, and is begun anew under another where it takes another path.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from memfit import batches
from memfit.batches import Batch
from memfit.engine.compiled import CompiledScript
from memfit.engine.new_paths import Learner
from memfit.errors import CaptureError, InfeasibleError
from memfit.units import format_bytes
from memfit.values.plan import Plan

# Looks at steps of one shape that have diverged and cannot be undone: each is a capture, which takes as long as planning does. The first ones are taken at
# once; those after them, and after a look that shows nothing new, are ever further apart. What can be begun anew is looked at whenever it leaves all paths.
MOST_LOOKS: Final = 16
PROMPT_LOOKS: Final = 8
MOST_PLANS: Final = 12  # of one shape: a step may have to try them all
FORGETTING: Final = 0.8  # what a step under a plan counts for after one more step


class PlanTable:
    """Plans by signature, each with its script compiled.

    Args:
        where: as for `History`.
    """

    def __init__(self, where: str = "") -> None:
        self._where = where
        self._plans: dict[str, Plan] = {}
        self._others: dict[str, list[Plan]] = {}  # for other paths of the same shape
        self._compiled: dict[int, tuple[Plan, CompiledScript]] = {}  # by the identity of the plan
        self._right: dict[int, float] = {}  # how often a plan was right of late
        self._diverged: set[str] = set()
        self._unknown: Counter[str] = Counter()  # divergences from a shape's own plan, since the last look
        self._looks: Counter[str] = Counter()
        self._vain: Counter[str] = Counter()  # looks in a row that have shown nothing new
        self._vain_for_sizes: Counter[str] = Counter()  # those at steps that were ended for their sizes
        self._unwatched: Counter[str] = Counter()  # steps that are not to be ended for their sizes

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, plan: Plan) -> None:
        """From now on the plan for batches of its signature."""
        self.add_paths(plan.signature, (plan,))

    def add_paths(self, signature: str, plans: Sequence[Plan]) -> None:
        """From now on the plans for batches of this signature, each for other paths; the first one is tried first."""
        for gone in self.of(signature):
            if all(gone is not plan for plan in plans):
                del self._compiled[id(gone)], self._right[id(gone)]
        self._plans[signature], self._others[signature] = plans[0], list(plans[1:])
        for plan in plans:
            if id(plan) not in self._compiled:
                self._compiled[id(plan)] = plan, CompiledScript(plan.script)
                self._right[id(plan)] = 0.0

    def clear(self) -> None:
        """Forget all plans."""
        for table in (self._plans, self._others, self._compiled, self._right):
            table.clear()

    def compiled(self, plan: Plan) -> CompiledScript:
        """The script of a plan that was added."""
        return self._compiled[id(plan)][1]

    def of(self, signature: str) -> tuple[Plan, ...]:
        """All plans for batches of exactly this signature, the one that is tried first at the front."""
        return (self._plans[signature], *self._others[signature]) if signature in self._plans else ()

    def was_right(self, signature: str, plan: Plan) -> None:
        """A step of such a batch has run under this plan. The one that was right most often of late is tried first, but not one that overlooks others."""
        plans = self.of(signature)
        if len(plans) == 1 or all(plan is not each for each in plans):
            return
        for each in plans:
            self._right[id(each)] = FORGETTING * self._right[id(each)] + (each is plan)
        first, *others = sorted(plans, key=lambda each: (_overlooks(each, plans), -self._right[id(each)]))
        self._plans[signature], self._others[signature] = first, others

    def plan_for(self, signature: str, first: Plan, *, again: str = batches.LARGEST_SHAPE) -> Plan:
        """The plan that batches of this signature fall under; the one with the smallest peak when several do.

        Args:
            signature: of a batch.
            first: named in the error.
            again: how a user would plan for larger ones.

        Raises:
            BatchError: no plan is for such a batch.
        """
        if signature in self._plans:
            return self._plans[signature]
        fitting = [plan for each, plan in self._plans.items() if batches.fits_within(signature, each)]
        if not fitting:
            raise batches.larger_than_planned(signature, first.signature, again=again)
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
        return self._is_due(signature, self._unknown[signature])

    def would_learn(self, signature: str, *, undone: bool = False) -> bool:
        """Whether a step that diverges now is to be captured.

        Args:
            signature: of its batch.
            undone: it can be begun anew: then the budget comes before the time that it takes, and only looks that show nothing new are put off.
        """
        divergences = self._unknown[signature] + 1
        if undone:
            return signature in self._plans and divergences >= 1 << self._vain[signature]
        return signature in self._plans and self._is_due(signature, divergences)

    def watches_sizes(self, signature: str) -> bool:
        """Whether a step may be ended for sizes that it will not fit with: not for some steps after a look that has shown none but known ones."""
        return not self._unwatched[signature]

    def step_taken(self, signature: str) -> None:
        """A step of such a batch is over."""
        self._unwatched[signature] -= self._unwatched[signature] > 0

    def _is_due(self, signature: str, divergences: int) -> bool:
        looks = self._looks[signature]
        patience = self._vain[signature] + max(0, looks - PROMPT_LOOKS)
        return looks < MOST_LOOKS and divergences >= 1 << patience

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

    def learnt(
        self,
        batch: Batch,
        signature: str,
        budget_bytes: int,
        learner: Learner,
        *,
        undone: bool = False,
        outgrown: bool = False,
    ) -> tuple[Plan, ...]:
        """The plans of a shape after a look at a step that diverged from all it had. Not added yet.

        Args:
            batch: of that step; the model and the generators are as they were when it began.
            signature: of the batch.
            budget_bytes: that the plans are to have.
            learner: makes plans that also know what this step does.
            undone: as for `would_learn`.
            outgrown: the step was ended for its sizes.

        Returns:
            The plans so far, the same tuple, where nothing new was seen or the step cannot be captured.
        """
        known = self.of(signature)
        self._looks[signature] += not undone
        self._unknown[signature] = 0
        vain = self._vain_for_sizes if outgrown else self._vain
        try:
            made = learner(batch, known)
        except CaptureError as error:
            vain[signature] += 1
            warnings.warn(f"{self._where}the path that a step took cannot be learnt: {error}", stacklevel=4)
            return known
        vain[signature] = vain[signature] + 1 if made is known else 0
        if outgrown:
            self._unwatched[signature] = 1 << vain[signature] if made is known else 0
        needed = max((p.budget_bytes for p in made if all(p is not k for k in known)), default=0)
        if needed > budget_bytes:
            more = format_bytes(needed - budget_bytes)
            warnings.warn(
                self._where
                + f"no plan for the path that a step took fits in the budget: the smallest, which is followed on that path from now on, takes {more} more",
                stacklevel=4,
            )
        return _without_the_oldest(made)


def _overlooks(plan: Plan, plans: Sequence[Plan]) -> bool:
    """Whether nothing tells, under a plan that drops nothing, that forward takes the path of another one: it counts calls of modules alone."""
    own = plan.script.most_calls
    return plan.script.plain and any(
        not each.script.plain and all(own.get(module, 0) >= number for module, number in each.script.most_calls.items())
        for each in plans
    )


def _without_the_oldest(plans: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """At most so many as a step may try: the first, and those that were made last."""
    return plans if len(plans) <= MOST_PLANS else (plans[0], *plans[1 - MOST_PLANS :])
