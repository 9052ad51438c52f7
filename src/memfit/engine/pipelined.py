"""A step of a rank that has a stage of the model: every micro-batch passes through all stages and back, each followed as the stage's script says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memfit.batches import Batch
from memfit.engine.accumulation import Accumulated
from memfit.engine.compiled import CompiledScript
from memfit.engine.executor import Executor
from memfit.sharding.pipelined import PipelinedModel
from memfit.values.plan import Plan


class PipelinedStep:
    """The steps of one rank.

    Args:
        model: as this rank has it.
        plan: with its stages.
        executor: makes what follows a script.
    """

    def __init__(self, model: PipelinedModel, plan: Plan, executor: Executor) -> None:
        assert plan.pipeline is not None, "a model that is divided is planned so"
        _, stage = plan.pipeline.place_of(model.agreement.rank)
        self._model, self._executor = model, executor
        self._compiled = CompiledScript(plan.pipeline.scripts[stage])
        self._total = Accumulated()

    def prepare(self, batch: Batch) -> None:
        """As `PipelinedModel.prepare`."""
        self._model.prepare(batch)

    def run(self, batch: Batch) -> Accumulated:
        """Forward and backward of the whole batch."""
        self._total = Accumulated()
        passed = self._model.forward_backward(batch, self._followed)
        total = self._total
        total.loss, total.micro_batches, total.waiting = passed.loss, passed.micro_batches, passed.waiting
        return total

    @contextmanager
    def _followed(self, _: int) -> Iterator[None]:
        follower = self._executor.follower(self._compiled)
        if follower is None:
            yield
            return
        with follower.following():
            yield
        # No follower is kept: it would keep what backward lets go of.
        if follower.divergence is not None:
            self._total.divergences.append(follower.divergence)
        else:
            self._total.recomputations += self._compiled.script.recomputations
