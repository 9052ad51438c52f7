"""A Lightning Trainer kept inside a budget: planned for when training starts, `training_step` followed, steps noted.

Where it takes hold, and why there. Lightning has module, optimizer and loader ready at `on_train_start`, so the plan is made there, of the step as it will run.
In automatic optimization `training_step` is forward and loss and nothing else; an attribute of this one module runs it inside the engine, and goes
when training ends.

A batch is not divided here. Lightning clears gradients between `training_step` and backward, so what a part of a batch had added before would be lost, and its
loader belongs to the user: where smaller batches would fit, the error says which.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from memfit import api, batches
from memfit.batches import Batch
from memfit.engine import Engine
from memfit.errors import BatchError, InfeasibleError, InputError, SplitError
from memfit.lightning.refused import refuse
from memfit.meter import metered
from memfit.plans import Plan
from memfit.report import StepRecord
from memfit.searching import Budget
from memfit.step.optimizers import alike
from memfit.tracing import Progress
from memfit.train import state
from memfit.train.window import FIXED, divisors_of, largest_samples, plan_window
from memfit.units import format_bytes

try:
    from lightning.pytorch import Callback
    from torchmetrics import Metric
except ImportError as error:
    raise InputError("memfit.lightning needs lightning: pip install 'memfit[lightning]'") from error


Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class FitToMemory(Callback):  # type: ignore[misc]  # lightning is not followed by mypy
    """Keeps a Lightning Trainer inside a budget: one line in its callbacks.

    Args:
        budget: bytes that a step may hold in all, as for `memfit.plan`.
        sample: a batch of the loader's, of the largest shape that will come; None: the training data is looked through.
        host_budget: room on the tier below that activations may be swapped to.
        fixed: {"loss_chunks": n}; the rest is Lightning's to say.
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
        fixed: Mapping[str, Any] | None = None,
        meter: bool = False,
        progress: Progress | None = None,
    ) -> None:
        for name in fixed or {}:
            if name != "loss_chunks":
                raise InputError(
                    f"fixed={dict(fixed or {})!r}: {name!r} is for Lightning to say; for its Trainer there is 'loss_chunks'"
                )
        self.budget = budget
        self.sample = sample
        self.host_budget = host_budget
        self.fixed = fixed or {}
        self.meter = meter
        self.progress = progress
        self.engine: Engine | None = None
        self._new_step()

    def _new_step(self) -> None:
        self._losses: list[torch.Tensor] = []
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
            InfeasibleError, BudgetError, CaptureError: as for `memfit.fit`.
        """
        refuse(trainer, pl_module)
        accumulated = trainer.accumulate_grad_batches
        generators = state.generators()
        try:
            batch = self._batch(trainer)
            own_step = pl_module.training_step
            with _unlogged(pl_module):
                engine = self._fitted(trainer, pl_module, own_step, batch, accumulated)
        finally:
            state.set_generators(generators)
        self.engine = engine
        engine.steps = trainer.global_step

        @functools.wraps(own_step)
        def followed(*args: Any, **named: Any) -> Any:
            return self._followed(pl_module, own_step, args, named)

        pl_module.training_step = followed

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

    def _fitted(self, trainer: Any, module: Any, own_step: Any, batch: Batch, accumulated: int) -> Engine:
        size = batches.size(batch)
        takes_index = len(inspect.signature(own_step).parameters) > 1
        if "dataloader_iter" in inspect.signature(own_step).parameters:
            raise InputError(
                "training_step(dataloader_iter) draws its batches itself, so the batch of a step is not known: let it take the batch"
            )

        def loss_fn(_: nn.Module, part: Batch) -> torch.Tensor:
            with trainer.precision_plugin.train_step_context():
                return _loss_in(own_step(part, 0) if takes_index else own_step(part))

        optimizer = trainer.optimizers[0]
        norm = trainer.gradient_clip_val if str(trainer.gradient_clip_algorithm or "norm").endswith("norm") else None
        whole = batches.map_tensors(
            lambda t: torch.cat([t] * accumulated) if accumulated > 1 and t.dim() and t.shape[0] == size else t, batch
        )

        def planned(divisor: int) -> Plan:
            return plan_window(
                module,
                whole,
                loss_fn,
                self.budget,
                alike(optimizer, module),
                accumulated=accumulated,
                divisors=[divisor],
                host_budget=self.host_budget,
                allow=(),
                fixed={**FIXED, "state_format": "32bit", **self.fixed},
                clip_norm=norm or None,
                progress=self.progress,
            )

        try:
            made = planned(1)
        except InfeasibleError as refused:
            raise _with_smaller_batches(refused, size, accumulated, planned) from None
        engine = api.apply(made, module, loss_fn, optimizer)
        api.rehearsed(engine, whole, self.progress)
        for each in module.modules():
            if isinstance(each, Metric):
                each.reset()  # of what the rehearsal put in
        return engine

    # -- in training ---------------------------------------------------------------------------------------------------------

    def _followed(self, module: Any, own_step: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        batch = args[0] if args else next(iter(named.values()))
        plan = self.plan
        have = batches.signature(batch)
        if batches.size(batch) > plan.choices.micro_batch_size or not batches.fits_within(have, plan.signature):
            raise BatchError(
                f"a batch is [{have}], the plan is for {plan.choices.micro_batch_size} samples of batches up to [{plan.signature}]: give FitToMemory a "
                "sample of the largest shape that will come, or cut the data down to it"
            )
        calls: list[Call] = []
        with _unlogged(module, calls), self._engine.forward() as follower:
            output = own_step(*args, **named)
        while calls:  # a moment later, still inside Lightning's own call of training_step
            name, logged, options = calls.pop(0)
            getattr(module, name)(*logged, **options)
        if output is not None:
            self._losses.append(_loss_in(output).detach().clone())  # some kernels return a number with a large storage
        if follower is not None and follower.departure is not None:
            self._departures.append(follower.departure)
            self._engine.tell_departure(follower.departure, stacklevel=4)
        return output

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
        record = StepRecord(engine.steps, loss, seconds, len(self._losses), peak, 0, tuple(self._departures))
        engine.records.append(record)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The module is the user's again."""
        self._release(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """As when training ends."""
        self._metering.close()
        self._release(pl_module)

    def _release(self, module: Any) -> None:
        if self.engine is not None:
            vars(module).pop("training_step", None)


def _loss_in(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


@contextmanager
def _unlogged(module: Any, calls: list[Call] | None = None) -> Iterator[None]:
    """What `training_step` logs is collected in `calls`, or let go: logging copies, and the plan knows of no copies."""
    names = ("log", "log_dict")

    def note(of: str, *args: Any, **named: Any) -> None:
        if calls is not None:
            calls.append((of, args, named))

    for name in names:
        vars(module)[name] = functools.partial(note, name)
    try:
        yield
    finally:
        for name in names:
            vars(module).pop(name, None)


def _with_smaller_batches(
    refused: InfeasibleError, size: int, accumulated: int, planned: Callable[[int], Plan]
) -> InfeasibleError:
    """The same refusal, with the smaller batches that would do, where there are any."""
    for divisor in divisors_of(size)[1:]:
        try:
            made = planned(divisor)
        except (InfeasibleError, SplitError):
            continue
        return InfeasibleError(
            f"{refused}. Lightning's batches are its loader's, so memfit does not divide them: DataLoader(batch_size={size // divisor}) and "
            f"Trainer(accumulate_grad_batches={accumulated * divisor}) are the same samples a step and take {format_bytes(made.prediction.peak_bytes)}",
            budget_bytes=refused.budget_bytes,
            minimum_bytes=refused.minimum_bytes,
            moment=refused.moment,
            module=refused.module,
            remedies=refused.remedies,
        )
    return refused
