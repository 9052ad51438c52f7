"""Forward and backward of one micro-batch, as a plan's script says."""

from __future__ import annotations

from torch import nn

from memfit.batches import Batch
from memfit.engine.accumulation import Accumulated
from memfit.engine.activation_offloading import LowerTiers
from memfit.engine.call_follower import CallFollower
from memfit.engine.called_modules import UnfollowedForward
from memfit.engine.compiled import CompiledScript
from memfit.engine.follower import Follower
from memfit.engine.new_paths import PathWatch
from memfit.step.device import device_of
from memfit.step.fingerprint import has_fingerprint
from memfit.step.loss_value import LossValue
from memfit.step.program import StepProgram


class Executor:
    """Runs micro-batches.

    Args:
        lower_tiers: where to offload to, for plans that do.
        model: whose forward is followed.
    """

    def __init__(self, lower_tiers: LowerTiers, model: nn.Module) -> None:
        self._lower_tiers = lower_tiers
        self._model = model
        self._device = device_of(model).type

    def follower(
        self, compiled: CompiledScript, *, retain: bool = False, watch: PathWatch | None = None
    ) -> Follower | CallFollower | UnfollowedForward | None:
        """What follows a script through a forward (that of the first one where the model is as before it); None where there is nothing to follow.

        Args:
            compiled: the script.
            retain: backward may run more than once.
            watch: ends the forward where it leaves the plan; None to keep what is not planned.
        """
        first = compiled.first is not None and has_fingerprint(self._model, compiled.first[1])
        if first and compiled.first is not None:
            compiled = compiled.first[0]
        if compiled.script.plain:
            if watch is None or not compiled.script.most_calls:
                return None
            return UnfollowedForward(compiled.script, self._model, watch.diverged)
        sizes = None if watch is None or first else watch.sizes(only=not compiled.calls)
        if compiled.calls:
            return CallFollower(compiled, self._model, retain=retain, watch=watch, sizes=sizes, device=self._device)
        return Follower(
            compiled,
            retain=retain,
            lower_tiers=self._lower_tiers,
            model=self._model,
            diverged=None if watch is None else watch.diverged,
            sizes=sizes,
            everything=watch is not None and watch.several,
            device=self._device,
        )

    def forward_backward(
        self,
        program: StepProgram,
        compiled: CompiledScript,
        micro_batch: Batch,
        weight: float | None,
        total: Accumulated,
        *,
        updates: bool = False,
        watch: PathWatch | None = None,
        last: bool = True,
    ) -> None:
        """One micro-batch.

        Args:
            program: the step.
            compiled: the script to follow.
            micro_batch: on the device.
            weight: its share of the loss; None for the whole.
            total: of the step so far, added to.
            updates: parameters are updated inside its backward.
            watch: as for `follower`.
            last: of the step.
        """
        total.last = None
        follower, value = self.follower(compiled, watch=watch), LossValue()
        try:
            # In fp16 an infinite loss is an overflow like any other: its gradients are not finite, so the step is skipped.
            total.last = program.forward_backward(
                micro_batch,
                weight,
                follower.following() if follower is not None else None,
                check_finite=program.scaling is None and program.sharded is None,
                after_forward=None if watch is None else watch.forward_ended,
                around_backward=program.updating() if updates else None,
                last=last,
                value=value,
            )
        finally:
            if follower is not None:
                follower.end()
        if weight != 0.0:
            total.loss += value.read() * (1.0 if weight is None else weight)
        total.micro_batches += 1
        if follower is not None:
            total.recomputations += follower.recomputations
            if follower.divergence is not None:
                total.divergences.append(follower.divergence)
