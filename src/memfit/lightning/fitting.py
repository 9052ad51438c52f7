"""A Lightning Trainer kept inside a budget: planned for when training starts, `training_step` followed, steps noted.

Where it takes hold, and why there. Lightning has module, optimizer and loader ready at `on_train_start`, so the plan is made there, of the step as it will run.
In automatic optimization `training_step` is forward and loss and nothing else; the strategy calls it, in the trainer's precision. An attribute of this one
strategy runs it inside the engine, and goes when training ends.

A batch is divided there, too: of each part but the last, forward and backward run one after the other, both Lightning's own; the last part's loss, with
the value of the whole, goes back to Lightning, which runs its backward as ever. Lightning clears gradients between the two. They are clear by then (they are
let go before forward), so for a divided batch an attribute of this one module makes that a call which does nothing.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from lightning.pytorch import Callback
from torch import nn
from torchmetrics import Metric

from memfit import api, batches
from memfit.batches import Batch
from memfit.engine import Engine
from memfit.engine.engine import counting_parts
from memfit.errors import BatchError, InfeasibleError, InputError
from memfit.lightning.logged import Calls, unlogged
from memfit.lightning.refused import refuse, why_not_divided
from memfit.lower_tiers import requested
from memfit.meter import metered
from memfit.planner.solvers import doubled_up_to
from memfit.progress import Progress
from memfit.step.optimizers import alike
from memfit.train import state
from memfit.train.window import FIXED, Window, largest_samples, plan_window
from memfit.values.plan import Plan
from memfit.values.report import StepRecord
from memfit.values.request import Budget

CHOICES: Final = ("loss_chunks", "micro_batches")  # of a plan for Lightning, the user's to fix


class FitToMemory(Callback):  # type: ignore[misc]  # lightning is not followed by mypy
    """Keeps a Lightning Trainer inside a budget: one line in its callbacks.

    Args:
        budget: bytes that a step may hold in all, as for `memfit.plan`.
        sample: a batch of the loader's, of the largest shape that will come; None: the training data is looked through.
        host_budget, disk_budget: as for `memfit.plan`, for activations; the optimizer's state stays on the device.
        fixed: {"micro_batches": n}, parts in a whole step (those of all its batches), or {"loss_chunks": n}; the rest is Lightning's to say.
        meter: measure the peak of each step (slower).
        progress: as for `memfit.plan`.

    Attributes:
        engine: with the plan, the rehearsal, and a record of every step; None before training starts.
    """

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
        for name in fixed or {}:
            if name not in CHOICES:
                raise InputError(
                    f"fixed={dict(fixed or {})!r}: {name!r} is for Lightning to say; for its Trainer there is 'loss_chunks' and 'micro_batches'"
                )
        self.budget = budget
        self.sample = sample
        self.host_budget = host_budget
        self.disk_budget = disk_budget
        self.fixed = fixed or {}
        self.meter = meter
        self.progress = progress
        self.engine: Engine | None = None
        self._new_step()

    def _new_step(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._parts = 0
        self._departures: list[str] = []
        self._metering = ExitStack()
        self._started = 0.0

    @property
    def plan(self) -> Plan:
        """That training follows."""
        return self._engine.plan

    @property
    def _engine(self) -> Engine:
        if self.engine is None:
            raise InputError("FitToMemory plans when training starts: there is no plan before trainer.fit")
        return self.engine

    # -- before training -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Plan for the step of this trainer and rehearse it. Parameters and generators are left as they were, metrics are reset.

        Raises:
            InputError: the trainer does what a plan cannot stand beside.
            InfeasibleError, SplitError, BudgetError, CaptureError: as for `memfit.fit`.
        """
        refuse(trainer, pl_module)
        accumulated = trainer.accumulate_grad_batches
        generators = state.generators()
        try:
            batch = self._batch(trainer)
            with unlogged(pl_module):
                engine = self._fitted(trainer, pl_module, batch, accumulated)
        finally:
            state.set_generators(generators)
        self.engine = engine
        engine.steps = trainer.global_step

        own_step = trainer.strategy.training_step

        @functools.wraps(own_step)
        def followed(*args: Any, **named: Any) -> Any:
            return self._followed(trainer, own_step, args, named)

        trainer.strategy.training_step = followed
        if engine.plan.choices.micro_batches > accumulated:
            pl_module.optimizer_zero_grad = _nothing

    def _batch(self, trainer: Any) -> Batch:
        """One of the loader's, as `training_step` gets it."""
        loader = trainer.train_dataloader
        if self.sample is not None:
            batch = self.sample
        elif isinstance(loader, torch.utils.data.DataLoader) and loader.batch_size is not None:
            chosen = largest_samples(loader.dataset, loader.batch_size)
            batch = loader.collate_fn([loader.dataset[index] for index in chosen])
        else:
            raise InputError(
                f"the training data comes from a {type(loader).__name__} that cannot be looked through: give a batch of the largest shape that will come, "
                "FitToMemory(..., sample=...)"
            )
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)  # noqa: SLF001 - as the loop does
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _fitted(self, trainer: Any, module: Any, batch: Batch, accumulated: int) -> Engine:
        size = batches.size(batch)
        own_step = trainer.strategy.training_step
        takes_index = len(inspect.signature(module.training_step).parameters) > 1
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise InputError(
                "training_step(dataloader_iter) draws its batches itself, so the batch of a step is not known: let it take the batch"
            )

        whole = why_not_divided(module)

        def loss_fn(_: nn.Module, part: Batch) -> torch.Tensor:
            nonlocal whole
            output = own_step(part, 0) if takes_index else own_step(part)
            whole = whole or why_not_divided(module, output)
            return _loss_in(output)

        optimizer = trainer.optimizers[0]
        norm = trainer.gradient_clip_val if str(trainer.gradient_clip_algorithm or "norm").endswith("norm") else None
        try:
            window = Window(
                module,
                batch,
                loss_fn,
                alike(optimizer, module),
                accumulated=accumulated,
                divisors=self._divisors(size, accumulated),
                one_by_one=True,
                why_whole=lambda: whole,
            )
            request = requested(
                module,
                budget=self.budget,
                host_budget=self.host_budget,
                disk_budget=self.disk_budget,
                fixed={
                    **FIXED,
                    "state_format": "32bit",
                    **{n: v for n, v in self.fixed.items() if n != "micro_batches"},
                },
                clip_norm=norm or None,
            )
            made = plan_window(window, request, self.progress)
        except InfeasibleError as refused:
            raise _left_whole(refused, whole) if whole else refused from None
        engine = api.apply(made, module, loss_fn, optimizer)
        api.rehearsed(engine, batch, self.progress, loader_batches=accumulated)
        for each in module.modules():
            if isinstance(each, Metric):
                each.reset()  # of what the rehearsal put in
        return engine

    def _divisors(self, size: int, accumulated: int) -> list[int]:
        """Numbers of parts that a batch of so many samples may be divided into."""
        asked = self.fixed.get("micro_batches")
        if asked is None:
            return doubled_up_to(size)
        if (
            isinstance(asked, bool)
            or not isinstance(asked, int)
            or asked % accumulated
            or not 0 < asked <= accumulated * size
        ):
            raise InputError(
                f"fixed micro_batches={asked!r}: a step of this trainer is {accumulated} x {size} samples, and each of its batches is divided alike: a "
                f"multiple of {accumulated} up to {accumulated * size} is needed"
            )
        return [asked // accumulated]

    # -- in training ---------------------------------------------------------------------------------------------------------

    def _followed(self, trainer: Any, own_step: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        module, plan = trainer.lightning_module, self.plan
        batch, *rest = args  # Lightning's loop hands them over by position
        have = batches.signature(batch)
        if not batches.fits_within(have, plan.signature):
            raise BatchError(
                f"a batch is [{have}], the plan is for batches up to [{plan.signature}]: give FitToMemory a "
                "sample of the largest shape that will come, or cut the data down to it"
            )
        counting = counting_parts(plan, batch)
        calls = Calls()

        def ran(part: Batch) -> Any:
            with unlogged(module, calls), self._engine.forward() as follower:
                output = own_step(part, *rest, **named)
            self._note(follower)
            return output

        output = ran(batch) if counting is None else _added_up(trainer, counting, ran, calls)
        calls.log(module)  # a moment later, still inside Lightning's own call of training_step
        if output is not None:
            self._losses.append(_loss_in(output).detach().clone())  # some kernels return a number with a large storage
        return output

    def _note(self, follower: Any) -> None:
        """That a part has run, and whether as planned."""
        self._parts += 1
        if follower is not None and follower.departure is not None:
            self._departures.append(follower.departure)
            self._engine.tell_departure(follower.departure, stacklevel=5)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Let the gradients of the step before go: Lightning does it too, but only after the forward has run beside them."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        for parameter in pl_module.parameters():
            parameter.grad = None
        self._new_step()
        self._started = time.perf_counter()
        if self.meter:
            engine = self._engine
            engine.reading = self._metering.enter_context(metered(engine.present(batch), engine.device))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The step is over where this was the last of its batches."""
        accumulated = trainer.accumulate_grad_batches
        if (batch_idx + 1) % accumulated and not trainer.is_last_batch:
            return
        engine = self._engine
        self._metering.close()
        engine.steps = trainer.global_step
        peak = engine.reading.peak_bytes if self.meter and engine.reading is not None else None
        loss = sum(float(loss) for loss in self._losses) / accumulated if self._losses else math.nan
        seconds = time.perf_counter() - self._started
        record = StepRecord(engine.steps, loss, seconds, self._parts, peak, 0, tuple(self._departures))
        engine.records.append(record)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The module is the user's again."""
        self._release(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """As when training ends."""
        self._metering.close()
        self._release(trainer, pl_module)

    def _release(self, trainer: Any, module: Any) -> None:
        if self.engine is not None:
            vars(trainer.strategy).pop("training_step", None)
            vars(module).pop("optimizer_zero_grad", None)


def _added_up(
    trainer: Any, counting: Sequence[tuple[Batch, float]], ran: Callable[[Batch], Any], calls: Calls
) -> torch.Tensor:
    """Forward of each part of a batch, and Lightning's backward of each but the last.

    Args:
        trainer: whose backward it is.
        counting: parts, and the share of each in the batch's loss.
        ran: `training_step` on a part.
        calls: what a part logs.

    Returns:
        The batch's loss, whose gradient is the last part's alone.
    """

    def loss_of(part: Batch, share: float) -> torch.Tensor:
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
        loss = loss_of(part, share)
        trainer.strategy.backward(loss / trainer.accumulate_grad_batches, trainer.optimizers[0])
        before.append(loss.detach())
        del loss  # must not lie beside the next part's
    return sum(before, start=loss_of(*last))


def _loss_in(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _nothing(*_: Any, **__: Any) -> None:
    """In place of `optimizer_zero_grad`: gradients were let go before the forward, and there are those of a batch's first parts since."""


def _left_whole(refused: InfeasibleError, why: str) -> InfeasibleError:
    """The same refusal, with why no batch is divided."""
    return InfeasibleError(
        f"{refused}. Batches are left whole: {why}. A DataLoader of smaller ones, with accumulate_grad_batches as many times larger, takes the same samples "
        "in a step",
        budget_bytes=refused.budget_bytes,
        minimum_bytes=refused.minimum_bytes,
        moment=refused.moment,
        module=refused.module,
        remedies=refused.remedies,
    )
