"""One training step under a plan in the loop of another library's trainer: what these integrations share.

The trainer keeps its loop: data, backward, clipping, update, schedule, logging, saving. An integration says where in that loop a step begins and ends, which
call is forward and loss, and which settings of the trainer are incompatible. The rest is here: what a user may ask for, the plan and its rehearsal, the check
that a batch is as planned, divergences from the plan, the meter, the record of each step. `window` plans for the batches of one step.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from memfit import api, batches
from memfit.batches import Batch, LossFunction
from memfit.capture.values_read import rows_alone
from memfit.engine.engine import Engine
from memfit.errors import InfeasibleError, InputError, MemfitError
from memfit.integrations.ranks import SharedStep, fit_on_ranks, plan_window_on_ranks, ranks_here, refuse_alone
from memfit.integrations.window import FIXED, OtherBatches
from memfit.lower_tiers import requested
from memfit.meter import metered
from memfit.optimizers.alike import alike
from memfit.progress import Progress
from memfit.values.plan import Plan
from memfit.values.report import StepRecord
from memfit.values.request import Budget
from memfit.window import Window, plan_window


@dataclass(frozen=True, slots=True)
class TrainerStep:
    """The optimizer step of a trainer, as it will run.

    Attributes:
        model: in training mode.
        sample: the samples of a whole step; or one of its batches where `one_by_one`.
        loss_fn: the trainer's own forward and loss.
        optimizer: the trainer's own.
        accumulated: batches in a step.
        divisors: numbers of micro-batches that each batch may be divided into, rising, whatever the user has said.
        clip_norm: global gradient norm that is clipped to; infinite where the norm is only computed, None where it is not.
        one_by_one: the batches of a step come one after the other; else all are there when it begins.
        why_whole: why this trainer cannot have a batch divided, perhaps known once a loss has been taken; "" where it can.
        others: batches that may come besides `sample`; None where they are not known.
    """

    model: nn.Module
    sample: Batch
    loss_fn: LossFunction
    optimizer: torch.optim.Optimizer
    accumulated: int
    divisors: Sequence[int]
    clip_norm: float | None
    one_by_one: bool = False
    why_whole: Callable[[], str] = str
    others: OtherBatches | None = None


def left_whole(refused: InfeasibleError, why: str, instead: str) -> InfeasibleError:
    """The same refusal, with why no batch is divided and what may be done instead."""
    return InfeasibleError(f"{refused}. Batches are left whole: {why}. {instead}", **refused.facts)


def _trained_in(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


class Adapter:
    """The base class of integrations with a trainer: the user's request, the engine that follows the plan, and the step in progress.

    A subclass is a callback of one trainer. It calls `_fit` before training; then in each step `_new_step`, `_start_step`, for each micro-batch `_check`,
    `_following` and `_note_loss`, and `_end_step`; `_stop_meter` when a step ends half way.

    Args:
        budget, host_budget, disk_budget, allow, progress: as for `memfit.plan`.
        sample: a batch of the largest shape that will come; None where the training data can be looked through.
        fixed: choices that are the user's, of those in `CHOICES`.
        meter: measure the peak of each step (slower).
        others: none; what `memfit.fit` takes besides is the trainer's to say.

    Attributes:
        TRAINER: its name in messages.
        ENTRY: what users call to give a sample.
        CHOICES: what `fixed` may say; the rest is set in the trainer.
        SETTLED: choices that the trainer makes for every plan, besides those in `window.FIXED`.
        ON_RANKS: choices that it makes besides where there are several ranks.
        ALLOWS: whether users can say `allow=`.
        engine: with the plan, the rehearsal, and a record of every step; None before there is a plan.
    """

    TRAINER: ClassVar[str]
    ENTRY: ClassVar[str]
    CHOICES: ClassVar[tuple[str, ...]]
    SETTLED: ClassVar[Mapping[str, Any]] = {}
    ON_RANKS: ClassVar[Mapping[str, Any]] = {}
    ALLOWS: ClassVar[bool] = True

    def __init__(
        self,
        budget: Budget = "80%",
        *,
        sample: Batch | None = None,
        host_budget: Budget | None = None,
        disk_budget: Budget | None = None,
        allow: Sequence[str] = (),
        fixed: Mapping[str, Any] | None = None,
        meter: bool = False,
        progress: Progress | None = None,
        **others: Any,
    ) -> None:
        if others:
            raise InputError(
                f"{', '.join(others)}: no argument of a plan for {self.TRAINER}, whose own optimizer, loss and frozen parameters it is made for; there is "
                "budget, sample, host_budget, disk_budget, allow, fixed, meter, progress"
            )
        self.budget = budget
        self.sample = sample
        self.host_budget = host_budget
        self.disk_budget = disk_budget
        self.allow = allow
        self.fixed = dict(fixed or {})
        self.meter = meter
        self.progress = progress
        self.engine: Engine | None = None
        self._trained: list[bool] = []
        self._shared_step: SharedStep | None = None
        self._refuse_choices()
        self._new_step()

    @property
    def plan(self) -> Plan:
        """The plan that training follows."""
        return self._planned.plan

    @property
    def _planned(self) -> Engine:
        if self.engine is None:
            raise self._no_plan()
        return self.engine

    @abstractmethod
    def _no_plan(self) -> InputError:
        """The error for access to the plan before there is one."""

    # -- before training -----------------------------------------------------------------------------------------------------

    def _refuse_choices(self) -> None:
        if isinstance(self.allow, str):
            raise InputError(f"allow={self.allow!r} is a word: give a list of them, allow=[{self.allow!r}]")
        for name in self.fixed:
            if name not in self.CHOICES:
                raise InputError(
                    f"fixed={self.fixed!r}: {name!r} is no choice of a plan for {self.TRAINER}, which has {', '.join(map(repr, self.CHOICES))}; what "
                    "else a step does is for the trainer to say"
                )

    def _divisor_asked(self, accumulated: int, samples: int, possible: Sequence[int]) -> int | None:
        """Micro-batches in each of the trainer's batches, where `fixed` says how many a step has; None where the plan is to choose.

        Args:
            accumulated: batches in a step.
            samples: in a batch.
            possible: numbers of micro-batches that a batch may be divided into.

        Raises:
            InputError: so many cannot be had.
        """
        asked = self.fixed.get("micro_batches")
        if asked is None:
            return None
        whole = isinstance(asked, int) and not isinstance(asked, bool)
        if not whole or asked % accumulated or asked // accumulated not in possible:
            numbers = [accumulated * divisor for divisor in possible]
            some = f"any multiple of {accumulated} up to {numbers[-1]}" if isinstance(possible, range) else numbers
            raise InputError(
                f"fixed micro_batches={asked!r}: a step of this trainer is {accumulated} x {samples} samples, and each batch of {samples} is divided alike: "
                f"there is {str(some).strip('[]')}"
            )
        return int(asked // accumulated)

    def _fit(self, step: TrainerStep, asked: int | None = None) -> Engine:
        """Plan for this step and rehearse it; the trainer's own optimizer goes into the engine.

        Args:
            step: that is planned for.
            asked: micro-batches of each batch, where the user has said it.

        Raises:
            InfeasibleError, SplitError, BudgetError, CaptureError, InputError: as for `memfit.fit`.
        """
        window = Window(
            step.model,
            step.sample,
            step.loss_fn,
            alike(step.optimizer, step.model),
            accumulated=step.accumulated,
            divisors=step.divisors if asked is None else [asked],
            others=() if asked is None else step.divisors,
            one_by_one=step.one_by_one,
            why_whole=step.why_whole,
            allows=self.ALLOWS,
            losses_held=self._losses_held,
            # Where the data is not known, a batch may be like any sample that was shown.
            other_samples=(lambda _: rows_alone(step.sample)) if step.others is None else step.others.of,
        )
        if "sharding" in self.fixed:
            refuse_alone(str(self.fixed["sharding"]))
        self._trained = _trained_in(step.model)
        settled = {**FIXED, **self.SETTLED, **(self.ON_RANKS if ranks_here() > 1 else {})}
        request = requested(
            step.model,
            sharers=ranks_here(),
            budget=self.budget,
            host_budget=self.host_budget,
            disk_budget=self.disk_budget,
            allow=self.allow,
            fixed=self.fixed,
            clip_norm=step.clip_norm,
        ).settling(**{name: value for name, value in settled.items() if name not in self.fixed})
        loader_batches = step.accumulated if step.one_by_one else 1
        if ranks_here() > 1:
            made = plan_window_on_ranks(window, request, self.progress)
            assert window.make_optimizer is not None
            engine = fit_on_ranks(
                made, step.model, step.sample, step.loss_fn, window.make_optimizer, self.progress, loader_batches
            )
        else:
            made = plan_window(window, request, self.progress)
            engine = api.apply(made, step.model, step.loss_fn, step.optimizer)
            api.rehearsed(engine, step.sample, self.progress, loader_batches=loader_batches)
        self.engine = engine
        return engine

    def _plan_anew(self, model: nn.Module, plan: Callable[[], None]) -> None:
        """Plan again where other parameters are trained since (a callback has frozen or freed layers); where no plan fits, the one before it stays.

        Args:
            model: of the plan.
            plan: makes the new one and its engine, between two steps.
        """
        trained, before = _trained_in(model), self._planned
        if trained == self._trained or before.sharded is not None:
            return
        try:
            plan()
        except MemfitError as error:
            self.engine, self._trained = before, trained
            warnings.warn(
                f"other parameters are trained from here on than those that were planned for, and no plan for them is found, so that steps may be above the "
                f"budget: {error}",
                stacklevel=3,
            )
            return
        now = self._planned
        now.records, now.steps = before.records, before.steps

    @property
    def _shared(self) -> SharedStep | None:
        """The step of several ranks; None where this process trains alone."""
        engine = self._planned
        if engine.sharded is None:
            return None
        if self._shared_step is None:
            self._shared_step = SharedStep(engine.sharded, accumulates=engine.plan.choices.micro_batches > 1)
        return self._shared_step

    # -- in training ---------------------------------------------------------------------------------------------------------

    def _new_step(self) -> None:
        """Reset what was noted of the step before."""
        self._noted: torch.Tensor | None = None
        self._micro_batches = 0
        self._divergences: list[str] = []
        self._metering = ExitStack()
        self._started = 0.0

    def _start_step(self, present: Batch) -> None:
        """Start the clock and the meter; `present` are the step's batches that are on the device already."""
        engine = self._planned
        engine.learn_diverged()  # before the meter, whose profiler it would end
        self._started = time.perf_counter()
        if self.meter:
            engine.reading = self._metering.enter_context(metered(engine.present(present), engine.device))

    def _check(self, batch: Batch, most: int | None = None) -> None:
        """Check that a batch is no larger than the plan's.

        Args:
            batch: as it goes into forward.
            most: samples it may have; None where the planned signature says it all.

        Raises:
            BatchError: it is larger; nothing has run.
        """
        have, planned = batches.signature(batch), self.plan.signature
        if not batches.fits_within(have, planned) or (most is not None and batches.size(batch) > most):
            again = f"give {self.ENTRY} a sample of the largest shape that will come"
            raise batches.larger_than_planned(have, planned, most, again)

    @contextmanager
    def _following(self, batch: Batch | None = None) -> Iterator[None]:
        """Forward and loss of one micro-batch run inside, as planned; a divergence is recorded and warned of.

        Args:
            batch: as it goes into forward, from which a path that the plan does not know is learnt; None where `loss_fn` of the plan is not for it.
        """
        with self._planned.forward(batch) as follower:
            yield
        self._micro_batches += 1
        if follower is not None and follower.divergence is not None:
            self._divergences.append(follower.divergence)
            # From here through contextlib and the callback to the trainer that called it.
            self._planned.tell_divergence(follower.divergence, stacklevel=6)

    def _losses_held(self, micro_batches: int) -> int:
        """How many losses are held beside a step of so many micro-batches: the sum of those that are noted."""
        del micro_batches
        return 1

    def _note_loss(self, loss: torch.Tensor) -> None:
        """A loss, of which the step's is the sum."""
        if self._noted is None:
            # A copy: some kernels return a number with a large storage.
            self._noted = loss.detach().to(torch.promote_types(loss.dtype, torch.float32), copy=True)
        else:
            self._noted += loss.detach()

    def _end_step(self, step: int, *, divided_by: int = 1) -> None:
        """Record the step, which is over and whose gradients are freed.

        Args:
            step: its number, as the trainer counts.
            divided_by: what the sum of the losses is divided by.
        """
        engine = self._planned
        self._stop_meter()
        engine.steps = step
        peak = engine.reading.peak_bytes if self.meter and engine.reading is not None else None
        loss = math.nan if self._noted is None else float(self._noted) / divided_by
        if engine.sharded is not None:
            loss = engine.sharded.agreement.mean(loss)
        seconds = time.perf_counter() - self._started
        engine.records.append(
            StepRecord(step, loss, seconds, self._micro_batches, peak, 0, tuple(self._divergences)),
        )

    def _stop_meter(self) -> None:
        """Stop the meter if it runs, whatever ended the step."""
        self._metering.close()
