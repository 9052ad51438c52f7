"""Steps that are begun anew under another plan where their forward takes a path that the one in force does not know."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

from torch import nn

from memfit.batches import LossFunction
from memfit.engine.history import History
from memfit.engine.new_paths import Learner, NewPathError, PathWatch
from memfit.engine.plan_table import PlanTable
from memfit.engine.transaction import Transactions
from memfit.values.plan import Plan
from memfit.values.report import StepRecord


class Steps:
    """The steps of one engine.

    Args:
        model, loss_fn: of the engine.
        plans, transactions, history: of the engine; what happens is noted there.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        plans: PlanTable,
        transactions: Transactions,
        history: History,
    ) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._plans, self._transactions, self._history = plans, transactions, history

    def taken(
        self,
        plan: Plan,
        signature: str,
        learner: Learner | None,
        take: Callable[[Plan, PathWatch | None], StepRecord],
        learn: Callable[[], None],
    ) -> StepRecord:
        """Take a step: under this plan, under the others of its shape where forward leaves it, and under a new one where it leaves all.

        Args:
            plan: to begin with.
            signature: of the batch.
            learner: of the engine.
            take: takes the step under a plan. Where the watch ends its forward it raises, and everything is as before it.
            learn: looks at the step as it is when it begins, and adds what comes of it to the plans.
        """
        begun_anew: list[str] = []
        left: list[Plan] = []
        ended_bytes = 0  # the largest peak of a forward that was ended
        while True:
            others = self._others(signature, (plan, *left))
            watch = self._watch(plan, signature, learner, known=bool(others))
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
                learn()
                others = self._others(signature, left)
            plan = others[0] if others else plan
            self._history.tell_divergence(begun_anew[-1], begun_anew=True, stacklevel=5)
        self._plans.was_right(signature, plan)
        return self._history.began_anew(tuple(begun_anew), ended_bytes) if begun_anew else record

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
            or plan.script.plain
            or not (known or self._plans.would_learn(signature))
            or any(parameter.grad is not None for parameter in self._model.parameters())
            or not learner.can_begin_anew(plan)
        ):
            return None
        return PathWatch(self._model, self._loss_fn, self._transactions.buffers.copies)
