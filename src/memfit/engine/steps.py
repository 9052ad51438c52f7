"""Steps that are begun anew under another plan where their forward takes a path that the one in force does not know."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

from torch import nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.engine.history import History
from memfit.engine.new_paths import Learner, NewPathError, PathWatch
from memfit.engine.plan_table import PlanTable
from memfit.engine.transaction import Transactions
from memfit.step.guard import Deciding
from memfit.units import format_seconds
from memfit.values.plan import Plan
from memfit.values.report import StepRecord

MOST_LOOKS_IN_A_STEP: Final = 4  # a forward that is another one each time it is run would be looked at for ever
OFTEN: Final = 8, 0.1  # steps planned anew from which on the user is told what it costs, and their share of all


class Trained(Protocol):
    """What of an engine is needed here."""

    model: nn.Module
    loss_fn: LossFunction | None
    plan: Plan

    def gathered(self) -> AbstractContextManager[nn.Module]:
        """The whole model is there inside."""

    def arrange_for(self, plan: Plan) -> None:
        """Have what a plan needs besides the model."""

    def has_gradients(self) -> bool:
        """Whether a parameter has one, as none has between steps."""


def _kept_where_left(plan: Plan) -> int:
    """For sorting: where forward leaves it, a plan of calls keeps one call, a plan of operations all from there on, a plan that drops nothing everything."""
    return 2 if plan.script.plain else 0 if plan.script.calls else 1


class Steps:
    """The steps of one engine.

    Args:
        engine: whose.
        plans, transactions, history: of the engine; what happens is noted there.
    """

    def __init__(self, engine: Trained, plans: PlanTable, transactions: Transactions, history: History) -> None:
        self._engine = engine
        self._plans, self._transactions, self._history = plans, transactions, history
        self._planned_anew, self._planning_seconds, self._told = 0, 0.0, False

    def taken(
        self,
        plan: Plan,
        batch: Batch,
        signature: str,
        learner: Learner | None,
        take: Callable[[Plan, PathWatch | None], StepRecord],
    ) -> StepRecord:
        """Take a step: under this plan, under the others of its shape where forward leaves it, and under a new one where it leaves all.

        Args:
            plan: to begin with.
            batch: of the step.
            signature: of the batch.
            learner: of the engine.
            take: takes the step under a plan. Where the watch ends its forward it raises, and everything is as before it.
        """
        begun_anew: list[str] = []
        left: list[Plan] = []
        ended_bytes = 0  # the largest peak of a forward that was ended
        looks = 0
        # Forward would not be ended where it leaves such a plan: one is tried under which it is.
        if learner is not None and not learner.can_begin_anew(plan):
            plan = next((each for each in self._plans.of(signature) if learner.can_begin_anew(each)), plan)
        while True:
            others = self._others(signature, (plan, *left))
            may_end = looks < MOST_LOOKS_IN_A_STEP
            watch = self._watch(plan, signature, learner, known=bool(others)) if may_end else None
            if watch is None and left:
                plan = min((plan, *left), key=_kept_where_left)
            try:
                record = take(plan, watch)
                break
            except NewPathError as ended:
                begun_anew.append(str(ended))
            reading = self._history.reading
            ended_bytes = max(ended_bytes, reading.peak_bytes if reading is not None else 0)
            gc.collect()  # a cycle may hold what the forward had made
            left.append(plan)
            if not others:
                self._plans.note_divergence(signature)
                assert learner is not None, "nothing ends a forward without one"
                assert watch is not None, "nor without a watch"
                self._learn(batch, signature, learner, undone=True, outgrown=watch.outgrown)
                looks += 1
                others = self._others(signature, left)
            plan = others[0] if others else plan
            self._history.tell_divergence(begun_anew[-1], begun_anew=True, stacklevel=4)
        self._plans.step_taken(signature)
        if not record.divergences:
            self._plans.was_right(signature, plan)
        elif watch is None and others:  # it may well be the next best's path
            self._plans.was_right(signature, others[0])
        self._planned_anew += looks > 0
        if begun_anew:
            record = self._history.began_anew(tuple(begun_anew), ended_bytes)
            self._tell_costs()
        return record

    def _tell_costs(self) -> None:
        """Once, where many steps have to be planned anew, what that costs."""
        steps, (least, share) = self._history.steps, OFTEN
        if self._told or self._planned_anew <= least or self._planned_anew < share * steps:
            return
        self._told = True
        total = self._planning_seconds + sum(record.seconds for record in self._history.records)
        warnings.warn(
            f"{self._planned_anew} of {steps} steps took a path, or sizes, that no plan knew, and were planned anew to stay in the budget: that took "
            f"{format_seconds(self._planning_seconds)} of {format_seconds(total)} of training. A larger budget needs fewer plans "
            "(docs/limits.md, paths that never end)",
            stacklevel=4,
        )

    def _others(self, signature: str, tried: Sequence[Plan]) -> list[Plan]:
        """Plans of the shape that were not tried yet."""
        return [each for each in self._plans.of(signature) if all(each is not one for one in tried)]

    def _watch(self, plan: Plan, signature: str, learner: Learner | None, *, known: bool) -> PathWatch | None:
        """What ends a forward that leaves the plan, where the step can then be begun anew; None where it runs to its end.

        Args:
            plan: that is followed.
            signature: of the batch.
            learner: of the engine.
            known: there are other plans for the shape, not tried yet.
        """
        if (
            learner is None
            or (plan.script.plain and not plan.script.most_calls)
            or not (known or self._plans.would_learn(signature, undone=True))
            or self._engine.has_gradients()
            or not learner.can_begin_anew(plan)
        ):
            return None
        sizes = learner.sizes_of(plan) if known or self._plans.watches_sizes(signature) else ()
        several = len(self._plans.of(signature)) > 1
        buffers = self._transactions.buffers.copies
        return PathWatch(self._engine.model, self._engine.loss_fn, buffers, sizes, several=several)

    def learn_after(self, batch: Batch, signature: str, learner: Learner | None, before: Deciding | None) -> None:
        """Learn what a step was that has diverged and run to its end, where that is due.

        Args:
            batch: of the step, or a part of it.
            signature: of the batch that is planned for.
            learner: of the engine.
            before: what decided the path of the step, as it was when that began.
        """
        if learner is None or before is None or not self._plans.wants_to_learn(signature):
            return
        with before.again():
            self._learn(batches.repeated(batch, batches.planned_size(signature)), signature, learner)
        # Where no step can be begun anew under another of several plans, the path that was taken last is the likeliest.
        self._plans.was_right(signature, self._plans.of(signature)[-1])

    def _learn(
        self, batch: Batch, signature: str, learner: Learner, *, undone: bool = False, outgrown: bool = False
    ) -> None:
        """Look at a step that has diverged, as it is when it begins, and from now on follow plans that know its path, too."""
        known = self._plans.of(signature)
        began = time.perf_counter()
        with self._engine.gathered():
            made = self._plans.learnt(
                batch, signature, self._engine.plan.budget_bytes, learner, undone=undone, outgrown=outgrown
            )
        self._planning_seconds += time.perf_counter() - began
        if made is not known:
            for plan in made:
                self._engine.arrange_for(plan)
            self._plans.add_paths(signature, made)
