"""A step of a rank that has stages of the model: every micro-batch passes through all stages and back, each followed as the stage's script says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from memfit.batches import Batch
from memfit.engine.accumulation import Accumulated
from memfit.engine.compiled import CompiledScript
from memfit.engine.executor import Executor
from memfit.sharding.pipelined import PipelinedModel
from memfit.step.device import device_of
from memfit.step.generators import own_stream
from memfit.values.plan import Plan


class PipelinedStep:
    """The steps of one rank.

    Args:
        model: as this rank has it.
        plan: with its stages.
        executor: makes what follows a script.
    """

    def __init__(self, model: PipelinedModel, plan: Plan, executor: Executor) -> None:
        self._model, self._executor = model, executor
        self._total = Accumulated()
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Run the same stages as another plan for them says."""
        assert plan.pipeline is not None, "a model that is divided is planned so"
        mine = plan.pipeline.stages_of(self._model.agreement.rank)
        self._draws = plan.pipeline.draws
        self._compiled = [CompiledScript(plan.pipeline.scripts[stage]) for stage in mine]

    def prepare(self, batch: Batch) -> None:
        """As `PipelinedModel.prepare`."""
        self._model.prepare(batch)

    def drawing(self) -> AbstractContextManager[None]:
        """A step runs inside, where it draws random numbers those of this rank.

        Ranks that were seeded alike, as they are where each makes the whole model, would drop the same elements in every stage and in every replica.
        """
        if not self._draws:
            return nullcontext()
        return own_stream(self._model.agreement.rank, device_of(self._model.model))

    def run(self, batch: Batch) -> Accumulated:
        """Forward and backward of the whole batch."""
        self._total = Accumulated()
        passed = self._model.forward_backward(batch, self._followed)
        total = self._total
        total.loss, total.micro_batches, total.waiting = passed.loss, passed.micro_batches, passed.waiting
        return total

    @contextmanager
    def _followed(self, position: int) -> Iterator[None]:
        compiled = self._compiled[position]
        follower = self._executor.follower(compiled)
        if follower is None:
            yield
            return
        with follower.following():
            yield
        # No follower is kept: it would keep what backward lets go of.
        if follower.divergence is not None:
            self._total.divergences.append(follower.divergence)
        else:
            self._total.recomputations += compiled.script.recomputations
