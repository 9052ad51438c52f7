"""A Lightning Trainer kept inside a budget: planned for when training starts, `training_step` followed, steps noted.

Where it takes hold, and why there. Lightning has module, optimizer and loader ready at `on_train_start`, so the plan is made there, of the step as it will run.
In automatic optimization `training_step` is forward and loss and nothing else; the strategy calls it, in the trainer's precision. An attribute of this one
strategy runs it inside the engine, and goes when training ends.

A batch is divided there, too: of each part but the last, forward and backward run one after the other, both Lightning's own; the last part's loss, with
the value of the whole, goes back to Lightning, which runs its backward as ever. Lightning clears gradients between the two. They are clear by then (they are
let go before forward), so for a divided batch an attribute of this one module makes that a call which does nothing.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
from lightning.pytorch import Callback
from torch import nn
from torchmetrics import Metric

from memfit import batches
from memfit.batches import Batch
from memfit.engine.accumulation import weighted_micro_batches
from memfit.errors import BatchError, InfeasibleError, InputError
from memfit.integrations.adapter import Adapter, TrainerStep, left_whole
from memfit.integrations.lightning.logged import Calls, unlogged
from memfit.integrations.lightning.refused import refuse, refuse_strategy, why_not_divided
from memfit.integrations.lightning.several_ranks import (
    LightningOnRanks,
    as_call,
    refuse_beside_shards,
    refuse_shared_out,
)
from memfit.integrations.ranks import SharedStep, ranks_here
from memfit.integrations.window import OtherBatches, batches_of, off_device
from memfit.planner.solvers import doubled_up_to
from memfit.progress import Progress
from memfit.step.process_generators import generators_kept
from memfit.values.request import Budget

SMALLER_BATCHES: Final = (
    "A DataLoader of smaller ones, with accumulate_grad_batches as many times larger, takes the same samples in a step"
)


class FitToMemory(Adapter, Callback):  # type: ignore[misc]  # lightning is not followed by mypy
    """Keeps a Lightning Trainer inside a budget: one line in its callbacks.

    The integration with transformers has a class of the same name on purpose: each is its trainer's callback for the same thing.

    Args:
        budget: bytes that a step may hold in all, as for `memfit.plan`.
        sample: a batch of the loader's, of the largest shape that will come; None: the training data is looked through.
        host_budget, disk_budget: as for `memfit.plan`, for activations; the optimizer's state stays on the device.
        fixed: {"micro_batches": n}, parts in a whole step (those of all its batches), {"loss_chunks": n}, or on several ranks {"sharding": "data"},
            "zero1", "zero2" or "zero3"; the rest is Lightning's to say.
        meter: measure the peak of each step (slower).
        progress: as for `memfit.plan`.

    Attributes:
        engine: with the plan, the rehearsal, and a record of every step; None before training starts.
    """

    TRAINER = "Lightning"
    ENTRY = "FitToMemory"
    CHOICES = ("loss_chunks", "micro_batches", "sharding")
    SETTLED: ClassVar[Mapping[str, Any]] = {"state_format": "32bit"}
    ALLOWS = False

    _ranks: LightningOnRanks | None = None

    def __init__(
        self,
        budget: Budget = "80%",
        *,
        sample: Batch | None = None,
        host_budget: Budget | None = None,
        disk_budget: Budget | None = None,
        fixed: Mapping[str, Any] | None = None,
        meter: bool = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(
            budget, sample=sample, host_budget=host_budget, disk_budget=disk_budget, fixed=fixed, meter=meter, progress=progress
        )  # fmt: skip

    def _no_plan(self) -> InputError:
        return InputError(
            "FitToMemory plans when training starts: there is no plan before trainer.fit, and where ranks are processes that end with it (ddp_spawn, ddp_fork, "
            "ddp_notebook) none after it, so look at it in a callback's on_train_end, or take strategy='ddp'"
        )

    # -- before training -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse, before the strategy takes the module, what it would make of one that no plan can be made for.

        Raises:
            InputError: as `on_train_start`.
        """
        refuse_shared_out(pl_module)
        if stage == "fit":
            refuse_strategy(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Plan for the step of this trainer and rehearse it. Parameters and generators are left as they were, metrics are reset.

        Raises:
            InputError: a setting of the trainer is incompatible with a plan.
            InfeasibleError, SplitError, BudgetError, CaptureError: as for `memfit.fit`.
        """
        refuse(trainer, pl_module)
        if ranks_here() > 1:
            # Lightning has wrapped the module; from here on memfit brings the gradients together, with the same engine of torch's.
            trainer.strategy.model = pl_module
            gc.collect()  # the wrapper's buckets, which are in cycles
        accumulated = trainer.accumulate_grad_batches
        self._backward = ExitStack()
        with generators_kept(), unlogged(pl_module):
            self._plan_for(trainer, pl_module, *self._batches(trainer), accumulated)
        engine = self._planned
        engine.steps = trainer.global_step
        if engine.sharded is not None:
            refuse_beside_shards(trainer, engine)
            self._ranks = LightningOnRanks(trainer, engine)

        own_step = self._own_step(trainer, pl_module)

        @functools.wraps(own_step)
        def followed(*args: Any, **named: Any) -> Any:
            return self._followed(trainer, own_step, args, named)

        trainer.strategy.training_step = followed
        self._keep_gradients(trainer, pl_module)

    def _keep_gradients(self, trainer: Any, module: Any) -> None:
        """Where a batch is divided, nothing clears gradients between its parts."""
        sharded = self._planned.sharded is not None
        if self.plan.choices.micro_batches > (1 if sharded else trainer.accumulate_grad_batches):
            module.optimizer_zero_grad = _nothing
            if sharded:
                module.on_validation_model_zero_grad = _nothing  # gradients are what is sent, and stay
        else:
            vars(module).pop("optimizer_zero_grad", None)

    def _plan_between_steps(self, trainer: Any, module: Any) -> None:
        """Plan as when training began; what metrics have seen so far stays."""
        with _between_steps(trainer, module):
            self._plan_for(trainer, module, *self._batches(trainer), trainer.accumulate_grad_batches)
        self._keep_gradients(trainer, module)

    def _batches(self, trainer: Any) -> tuple[Batch, OtherBatches | None]:
        """The largest of the loader's, as `training_step` gets it, and others that may come."""
        loader = trainer.train_dataloader
        if self.sample is not None:
            batch, others = self.sample, None
        elif isinstance(loader, torch.utils.data.DataLoader) and loader.batch_size is not None:
            batch, others = batches_of(loader, loader.batch_size)
            others = replace(others, together=loader.batch_size)  # a batch is divided once it is collated
        else:
            raise InputError(
                f"the training data comes from a {type(loader).__name__} that cannot be looked through: give a batch of the largest shape that will come, "
                "FitToMemory(..., sample=...)"
            )
        if others is not None:
            others = others.changed(lambda other: off_device(self._as_handed_over(trainer, other)))
        return self._as_handed_over(trainer, batch), others

    def _as_handed_over(self, trainer: Any, batch: Batch) -> Batch:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)  # noqa: SLF001 - as the loop does
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _plan_for(self, trainer: Any, module: Any, batch: Batch, others: OtherBatches | None, accumulated: int) -> None:
        own_step = self._own_step(trainer, module)
        takes_index = len(inspect.signature(module.training_step).parameters) > 1
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise InputError(
                "training_step(dataloader_iter) draws its batches itself, so the batch of a step is not known: let it take the batch"
            )

        whole = why_not_divided(module)
        held: Any = None  # what Lightning holds to the end of the batch besides the loss

        def loss_fn(_: nn.Module, part: Batch) -> torch.Tensor:
            nonlocal whole, held
            held = None
            output = own_step(part, 0) if takes_index else own_step(part)
            held = _besides_the_loss(output)
            whole = whole or why_not_divided(module, output)
            return _loss_in(output)

        norm = trainer.gradient_clip_val if str(trainer.gradient_clip_algorithm or "norm").endswith("norm") else None
        size = batches.size(batch)
        step = TrainerStep(
            module,
            batch,
            loss_fn,
            trainer.optimizers[0],
            accumulated,
            doubled_up_to(size),
            norm or None,
            one_by_one=True,
            why_whole=lambda: whole,
            others=others,
        )
        asked = self._divisor_asked(accumulated, size, range(1, size + 1))  # any, as a batch is divided here
        try:
            self._fit(step, asked)
        except InfeasibleError as refused:
            raise left_whole(refused, whole, SMALLER_BATCHES) if whole else refused from None
        finally:
            held = None
        for each in module.modules():
            if isinstance(each, Metric):
                each.reset()  # of what the rehearsal put in

    def _losses_held(self, micro_batches: int) -> int:
        """With what a module that logs its loss holds: Lightning's sum of it and two counts, and of each part of a batch the loss and what it has logged."""
        return super()._losses_held(micro_batches) + 3 + (2 * micro_batches if micro_batches > 1 else 0)

    # -- in training ---------------------------------------------------------------------------------------------------------

    def _followed(self, trainer: Any, own_step: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        module, plan = trainer.lightning_module, self.plan
        batch, *rest = args  # Lightning's loop hands them over by position
        self._check(batch)
        counting = weighted_micro_batches(plan, batch)
        calls = Calls()

        def ran(part: Batch) -> Any:
            self._learn_diverged(trainer)
            with unlogged(module, calls), self._following(part):
                return own_step(part, *rest, **named)

        def ran_last(part: Batch) -> Any:
            """The part whose backward is left to Lightning."""
            if self._shared is not None:
                ends = not trainer.fit_loop._should_accumulate()  # noqa: SLF001 - by which Lightning itself decides
                self._backward.enter_context(self._shared.micro_batch(last=ends))
            return ran(part)

        if self._shared is not None and counting is not None:
            self._check_as_many_on_all(len(counting))
        output = (
            ran_last(batch) if counting is None else _added_up(trainer, counting, ran, ran_last, calls, self._shared)
        )
        if output is None and self._shared is not None:
            raise InputError(
                "training_step gave None, which leaves out a batch on this rank, and the others would wait for its gradients: give a loss of zero that "
                "depends on the parameters"
            )
        calls.log(module)  # a moment later, still inside Lightning's own call of training_step
        if output is not None:
            self._note_loss(_loss_in(output))
        return output

    def _learn_diverged(self, trainer: Any) -> None:
        """Learn the path that the forward before took, where the plan does not know it."""
        if self._planned.diverged is not None:
            with _between_steps(trainer, trainer.lightning_module):
                self._planned.learn_diverged()

    def _own_step(self, trainer: Any, module: Any) -> Callable[..., Any]:
        """The strategy's `training_step`; on several ranks called as the module, in whose hooks gradients are made ready to be sent."""
        own: Callable[..., Any] = trainer.strategy.training_step
        return own if ranks_here() == 1 else as_call(module, own)

    def _check_as_many_on_all(self, parts: int) -> None:
        """Check that every rank divides its batch into as many parts, as they wait for each other."""
        assert self._shared is not None
        agreement = self._shared.sharded.agreement
        most = agreement.largest(parts)
        rank = agreement.first(concerned=parts != most)
        if rank is not None:
            raise BatchError(
                f"the batch of rank {rank} is divided into fewer parts than that of others, which would wait for it: drop_last=True in the DataLoader, or "
                f'batches left whole, FitToMemory(..., fixed={{"micro_batches": 1}})'
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Let the gradients of the step before go: Lightning does it too, but only after the forward has run beside them."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        if self._shared is not None:
            self._shared.sharded.clear(accumulates=self.plan.choices.micro_batches > 1)
        else:
            for parameter in pl_module.parameters():
                parameter.grad = None
        self._plan_anew(pl_module, lambda: self._plan_between_steps(trainer, pl_module))
        self._new_step()
        self._learn_diverged(trainer)
        self._start_step(batch)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Of a step's last backward, the gradients are there."""
        if self.engine is not None:
            self._backward.close()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """On several ranks, parameters are gathered for validation as it goes."""
        if self._ranks is not None:
            self._ranks.begin_evaluation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """They are shared out again."""
        if self._ranks is not None:
            self._ranks.end_evaluation()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The step is over where this was the last of its batches."""
        accumulated = trainer.accumulate_grad_batches
        if (batch_idx + 1) % accumulated == 0 or trainer.is_last_batch:
            self._end_step(trainer.global_step, divided_by=accumulated)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove what was set on the module."""
        self._release(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """As when training ends."""
        self._stop_meter()
        self._release(trainer, pl_module)

    def _release(self, trainer: Any, module: Any) -> None:
        if self.engine is not None:
            vars(trainer.strategy).pop("training_step", None)
            vars(module).pop("optimizer_zero_grad", None)
            vars(module).pop("on_validation_model_zero_grad", None)
        if self._ranks is not None:
            self._ranks.release()
            self._ranks = None


@contextmanager
def _between_steps(trainer: Any, module: Any) -> Iterator[None]:
    """The module may be run inside as in planning: what it logs is let go, and what metrics have seen so far stays."""
    followed = vars(trainer.strategy).pop("training_step")
    metrics = [(each, _state_of(each)) for each in module.modules() if isinstance(each, Metric)]
    try:
        with generators_kept(), unlogged(module):
            yield
    finally:
        trainer.strategy.training_step = followed
        for each, state in metrics:
            vars(each).update(state)


def _added_up(
    trainer: Any,
    counting: Sequence[tuple[Batch, float]],
    ran: Callable[[Batch], Any],
    ran_last: Callable[[Batch], Any],
    calls: Calls,
    shared: SharedStep | None = None,
) -> torch.Tensor:
    """Forward of each part of a batch, and Lightning's backward of each but the last.

    Args:
        trainer: whose backward it is.
        counting: parts, and the share of each in the batch's loss.
        ran: `training_step` on a part.
        ran_last: on the last one.
        calls: what a part logs.
        shared: the step of several ranks, which send each other the gradients in the backward of the last part.

    Returns:
        The batch's loss, whose gradient is the last part's alone.
    """

    def loss_of(part: Batch, share: float, ran: Callable[[Batch], Any]) -> torch.Tensor:
        output = ran(part)
        if output is None:
            raise InputError(
                "training_step gave None for a part of a batch, and what the rest then counts for is not known: leave batches whole, "
                f'FitToMemory(..., fixed={{"micro_batches": {trainer.accumulate_grad_batches}}})'
            )
        loss = _loss_in(output)
        calls.end_part(trainer.lightning_module, loss.detach(), batches.size(part), share)
        return loss * share

    *first, last = counting
    before: list[torch.Tensor] = []
    for part, share in first:
        with nullcontext() if shared is None else shared.micro_batch(last=False):
            loss = loss_of(part, share, ran)
            trainer.strategy.backward(loss / trainer.accumulate_grad_batches, trainer.optimizers[0])
        before.append(loss.detach())
        del loss  # must not lie beside the next part's
    return sum(before, start=loss_of(*last, ran_last))


def _loss_in(output: Any) -> torch.Tensor:
    if isinstance(output, Mapping) and "loss" not in output:
        raise InputError(
            f"training_step returned a dictionary without 'loss' ({', '.join(map(str, output))}): name the loss so, or return it alone"
        )
    loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _state_of(metric: Metric) -> dict[str, Any]:
    """What a metric has seen, and how often it was updated."""
    names = [*metric.metric_state, "_update_count", "_computed"]
    return {name: copy.deepcopy(getattr(metric, name)) for name in names}


def _besides_the_loss(output: Any) -> dict[str, Any]:
    return {name: value for name, value in output.items() if name != "loss"} if isinstance(output, Mapping) else {}


def _nothing(*_: Any, **__: Any) -> None:
    """In place of `optimizer_zero_grad`: gradients were freed before the forward, and there are those of a batch's first parts since."""
