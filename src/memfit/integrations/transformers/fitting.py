"""A Trainer fitted into a budget: its arguments set, its losses followed, its steps noted.

Where it takes hold, and why there. The samples in a micro-batch and the micro-batches in a step are Trainer's arguments, so they are set there before
`train()`, and loader, schedule and resuming follow by themselves. The engine watches forward and loss, which is what `Trainer.compute_loss` is: one method that
subclasses override and that training and evaluation both go through. The trainer's own (bound) method is called inside: were only the model's forward followed,
a loss taken outside of it (label smoothing, `compute_loss_func`) would be kept plain. Both are attributes of this one trainer; no class is changed.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, overload

import torch
from torch import nn

from memfit import api, batches
from memfit.batches import Batch
from memfit.engine import Engine
from memfit.errors import InfeasibleError, InputError
from memfit.integrations.adapter import Adapter, TrainerStep, left_whole
from memfit.integrations.ranks import in_turns, own_of, ranks_here
from memfit.integrations.transformers.refused import refuse
from memfit.integrations.transformers.sample import ITEMS, makes_own_sizes, window_given, windows_of
from memfit.integrations.transformers.several_ranks import TrainerOnRanks, check_saving, prepared
from memfit.integrations.window import OtherBatches, divisors_of, off_device, parts_weights
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.step.program import own_optimizer
from memfit.values.request import Budget

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise InputError(
        "memfit.transformers needs transformers and accelerate: pip install 'memfit[transformers]'"
    ) from error

OF_TRAINER: Final[Mapping[str, str]] = {
    "bf16": "TrainingArguments(bf16=True) is how Trainer is told so; the plan is made for it",
    "fp16": "Accelerate would scale the gradients, which the plan for Trainer does not count; TrainingArguments(bf16=True) is planned for",
    "in_backward": "the update is Trainer's, after backward",
}


class FitToMemory(Adapter, TrainerCallback):  # type: ignore[misc]  # transformers has no types that mypy follows
    """Keeps a Trainer inside its budget; `fit` makes one, adds it to the trainer and attaches it.

    The integration with Lightning has a class of the same name on purpose: each is its trainer's callback for the same thing.

    Args:
        budget, sample, host_budget, disk_budget, allow, fixed, meter, progress: as for `fit`.

    Attributes:
        engine: with the plan, the rehearsal, and a record of every step; None before `attach`.
        notes: what was set in the trainer's arguments, and what follows from it.
    """

    TRAINER = "Trainer"
    ENTRY = "memfit.transformers.fit"
    CHOICES = ("loss_chunks", "micro_batches", "sharding", "state_format")

    notes: tuple[str, ...] = ()
    _divisor = 1  # micro-batches that one of the user's batches has become
    _window: Sequence[Any] = ()  # micro-batches of the step
    _weights: Sequence[float] = ()  # of their losses in the step's
    _divides = False
    _place: int  # of the micro-batch whose training_step runs, in the step; -1 before the first
    _losses_taken: int  # in that training_step
    _told = False  # that a training_step takes several losses

    def _no_plan(self) -> InputError:
        return InputError(
            "FitToMemory does not know its trainer, which callbacks are not told: call memfit.transformers.fit(trainer, budget=...) in place of "
            "passing it in callbacks=, or its attach(trainer)"
        )

    # -- before training -----------------------------------------------------------------------------------------------------

    def attach(self, trainer: Trainer) -> None:
        """Plan for this trainer's step, rehearse it, and set the trainer's arguments. Parameters and generators are left as they were.

        Raises:
            InputError: a setting of the trainer is incompatible with a plan, or the trainer is attached already.
            InfeasibleError, SplitError, BudgetError, CaptureError: as for `memfit.fit`.
        """
        if self.engine is not None or "compute_loss" in vars(trainer):
            raise InputError(
                "this trainer or callback has been fitted already: make the trainer anew to plan for another budget"
            )
        refuse(trainer)
        args = trainer.args
        # As train() does; once is enough. With bf16, autocast.
        model = prepared(trainer) if ranks_here() > 1 else trainer.accelerator.prepare_model(trainer.model)
        model.train()
        given, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
        self._own_loss: Callable[..., Any] = trainer.compute_loss
        self._own_batches: Callable[..., Any] = trainer.get_batch_samples
        self._trainer = trainer
        window, others, by_rows = self._largest()
        own_sizes = makes_own_sizes(trainer)
        whole = own_sizes or by_rows
        possible = [1] if whole else divisors_of(given)  # equal parts, as Trainer's loader makes them
        asked = self._divisor_asked(accumulated, given, possible)
        # With a last batch left out, smaller ones would leave out less.
        weighed = [1] if args.dataloader_drop_last and asked is None else possible
        try:
            step = self._step_of(model, trainer.create_optimizer(), accumulated, weighed, window, others)
            engine = self._fit(step, asked)
        except InfeasibleError as refused:
            instead = "Let it take the size from the arguments"
            if not own_sizes:
                instead = "Lower per_device_train_batch_size, and raise gradient_accumulation_steps by as much"
            raise left_whole(refused, whole, instead) if whole else refused from None
        self._divisor = engine.plan.choices.micro_batches // accumulated
        trainer.training_step = self._placing(trainer.training_step)
        if self._shared is None:
            trainer.optimizer = engine.optimizer
        else:
            check_saving(trainer, engine)
            TrainerOnRanks(
                trainer,
                engine,
                self._shared,
                lambda: self._place + 1 == len(self._window) - 1,
                self._divisor,
            )
        trainer.compute_loss = self.compute_loss
        trainer.get_batch_samples = self.get_batch_samples
        if self.meter:
            trainer.train = self._closing(trainer.train)
        self._set(trainer, given)

    def _closing(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Trainer's own, after which no meter runs: callbacks are not told of what ends a step half way."""

        @functools.wraps(train)
        def closing(*args: Any, **named: Any) -> Any:
            try:
                return train(*args, **named)
            finally:
                self._stop_meter()

        return closing

    def _largest(self) -> tuple[Batch, OtherBatches | None, str]:
        """The largest batch of a step, others that may come, and why their rows do not divide them; "" where they do."""
        if self.sample is None:
            return windows_of(self._trainer)
        window, by_rows = window_given(self._trainer, self.sample)
        return window, None, by_rows

    def _step_of(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accumulated: int,
        divisors: Sequence[int],
        window: Batch,
        others: OtherBatches | None,
    ) -> TrainerStep:
        """The trainer's step, over these batches."""
        trainer = self._trainer
        sample = self._sample(trainer, window)
        if others is not None:
            others = others.changed(lambda other: off_device(self._sample(trainer, other)))
        # The norm is computed even where nothing is clipped: it is logged.
        given = trainer.args.max_grad_norm
        norm = given if given and given > 0 else math.inf
        return TrainerStep(
            model, sample, partial(self._loss, trainer), optimizer, accumulated, divisors, norm, others=others
        )

    def _plan_between_steps(self) -> None:
        """Plan as when the trainer was attached, in as many micro-batches: Trainer's loader runs already.

        Raises:
            InputError: the optimizer's state is in 8 bits.
            MemfitError: as for `attach`.
        """
        engine, divisor = self._planned, self._divisor
        optimizer = engine.optimizer
        if optimizer is None or isinstance(own_optimizer(optimizer), ChunkedOptimizer):
            raise InputError(
                "the optimizer's state is in 8 bits, which is laid out for the parameters that were trained before"
            )
        accumulated = self._trainer.args.gradient_accumulation_steps // divisor
        window, others, _ = self._largest()
        self._fit(self._step_of(engine.model, optimizer, accumulated, [divisor], window, others), divisor)

    def _placing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """The trainer's `training_step`, which may take several losses of its micro-batch: it alone tells which one that is."""

        @functools.wraps(own)
        def training_step(*args: Any, **named: Any) -> Any:
            self._place, self._losses_taken = self._place + 1, 0
            return own(*args, **named)

        return training_step

    def _refuse_choices(self) -> None:
        super()._refuse_choices()
        for name in self.allow:
            if name in OF_TRAINER:
                raise InputError(f"allow={list(self.allow)!r}: {name!r} is not for a Trainer: {OF_TRAINER[name]}")

    def _sample(self, trainer: Trainer, window: Batch) -> Batch:
        """The window as the engine is given it: with Trainer's count of what losses are divided by."""
        _, items = self._own_batches(iter([window]), 1, trainer.args.device)
        self._divides = self._trainer_divides(items)
        inputs = dict(trainer._prepare_inputs(dict(window)))  # noqa: SLF001 - what training_step calls; brings it to the device
        return inputs if items is None else {**inputs, ITEMS: torch.as_tensor(items)}

    def _loss(self, trainer: Trainer, _: nn.Module, batch: Batch) -> torch.Tensor:
        """Trainer's own loss, as `loss_fn` of the plan. The trainer is an argument, so that what it notes (metrics) is put back after planning."""
        inputs = dict(batch)
        items = inputs.pop(ITEMS, None)
        with trainer.compute_loss_context_manager():
            loss: torch.Tensor = self._own_loss(trainer.model, inputs, num_items_in_batch=items)
        return loss

    def _losses_held(self, micro_batches: int) -> int:
        """With Trainer's running loss, which each micro-batch makes anew, and the loss before Trainer divides it."""
        return super()._losses_held(micro_batches) + (micro_batches > 1) + self._divides

    def _set(self, trainer: Trainer, given: int) -> None:
        args, size = trainer.args, given // self._divisor
        notes = []
        if self._divisor > 1:
            accumulated = args.gradient_accumulation_steps * self._divisor
            notes.append(
                f"per_device_train_batch_size {given} -> {size}, gradient_accumulation_steps {args.gradient_accumulation_steps} -> {accumulated}: "
                "the same samples in a step, equal up to the order of additions"
            )
            args.per_device_train_batch_size, args.gradient_accumulation_steps = size, accumulated
            trainer._train_batch_size = args.train_batch_size  # noqa: SLF001 - Trainer reads its own copy
        if args.per_device_eval_batch_size > size:
            notes.append(
                f"per_device_eval_batch_size {args.per_device_eval_batch_size} -> {size}: without gradients such a batch takes less than a training step"
            )
            args.per_device_eval_batch_size = size
        if args.eval_accumulation_steps is None and trainer.compute_metrics is not None:
            notes.append("eval_accumulation_steps None -> 1: predictions wait in the host's memory")
            args.eval_accumulation_steps = 1
        self.notes = tuple(notes)
        self._settled = args.per_device_train_batch_size, args.gradient_accumulation_steps

    # -- in training ---------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the trainer's arguments are those that were planned for."""
        engine = self._planned
        have = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if have != self._settled:
            raise InputError(
                f"the arguments say {have[0]} x {have[1]} samples a step, the plan was made for {self._settled[0]} x {self._settled[1]}: "
                "call memfit.transformers.fit after they are set"
            )
        engine.steps = state.global_step

    def _new_step(self) -> None:
        super()._new_step()
        self._place, self._losses_taken = -1, 0

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Trainer's own; what each of the micro-batches counts for is noted."""
        window, items = self._own_batches(epoch_iterator, num_batches, device)
        self._new_step()
        self._window = list(window)
        plan = self.plan
        how = plan.choices.weights
        counts: list[int | None] = [None] * len(window)
        if self._divisor > 1 and how != "sum":
            counts = [batches.counted(part, how) for part in window]
        weights = parts_weights(counts, self._divisor) if self._shared is None else self._on_ranks(counts)
        # Trainer divides by the number of micro-batches what is not divided by the number of items, and there were fewer.
        self._divides = self._trainer_divides(items)
        times = len(window) / -(-len(window) // self._divisor) if self._divides and window else 1.0
        self._weights = [weight * times for weight in weights]
        return window, items

    def _on_ranks(self, counts: Sequence[int | None]) -> list[float]:
        """The same where the parts of one of the user's batches are on several ranks: a sampler deals out micro-batches in turns."""
        assert self._shared is not None
        if self._divisor == 1:
            return parts_weights(counts, 1)
        sharded = self._shared.sharded
        return own_of(sharded, parts_weights(in_turns(sharded, counts), self._divisor))

    def _trainer_divides(self, items: Any) -> bool:
        """Whether Trainer takes a mean over micro-batches, as its `training_step` decides it."""
        trainer = self._trainer
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
        return not scaled

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - Trainer's own signature
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Trainer's own, inside the engine when training."""
        if not model.training or not torch.is_grad_enabled():
            return self._own_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **kwargs)
        batch = inputs if num_items_in_batch is None else {**inputs, ITEMS: torch.as_tensor(num_items_in_batch)}
        self._check(batch, self.plan.choices.micro_batch_size)
        self._losses_taken += 1
        if self._losses_taken > 1:
            self._tell_of_several()
        weight = self._weights[self._place] if 0 <= self._place < len(self._weights) else 1.0
        with self._following(batch):
            found = self._own_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **kwargs)
        loss, outputs = found if return_outputs else (found, None)
        if weight == 0.0:  # nothing in it counts: a mean of nothing is 0/0
            # Other ranks wait for the gradients of this one, which are zero.
            empty = loss.new_zeros(loss.shape, requires_grad=True) if self._shared is None else loss.nan_to_num() * 0.0
            loss = empty
        elif weight != 1.0:
            loss = loss * weight
        if self._losses_taken == 1:
            self._note_loss(loss)
        return (loss, outputs) if return_outputs else loss

    def _tell_of_several(self) -> None:
        """Once, that a step holds more than was planned for."""
        if not self._told:
            self._told = True
            divided = (
                f" It runs for each of the {self._divisor} parts of a batch by itself; fixed={{'micro_batches': "
                f"{len(self._window) // self._divisor}}} keeps batches whole."
                if self._divisor > 1
                else ""
            )
            warnings.warn(
                f"{type(self._trainer).__name__}.training_step takes several losses of a batch, and the plan is for one forward and one backward: the peak may "
                f"be above the budget. What compute_loss runs is planned for as a whole: take them there where that can be.{divided}",
                stacklevel=4,
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock and the meter; plan anew where another callback has changed what is trained."""
        self._plan_anew(self._planned.model, self._plan_between_steps)
        self._start_step(self._window)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The update is over, and Trainer is about to clear gradients."""
        if self._shared is not None:
            self._shared.updated()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step is over: gradients are gone."""
        if self._shared is not None:
            self._shared.cleared()
        self._end_step(state.global_step, divided_by=len(self._window) if self._divides and self._window else 1)


@overload
def fit(trainer: nn.Module, budget: Budget = "80%", *, sample: Batch, **named: Any) -> Engine: ...
@overload
def fit(trainer: Trainer, budget: Budget = "80%", **named: Any) -> FitToMemory: ...
def fit(trainer: Any, budget: Budget = "80%", **named: Any) -> Any:
    """Fit a Trainer into a budget: two lines before `trainer.train()`.

    What is set: `per_device_train_batch_size` and `gradient_accumulation_steps` (their product stays), `per_device_eval_batch_size`, and where metrics are
    computed `eval_accumulation_steps`. Fewer parts are taken where they are as fast; in one, losses are Trainer's own bit for bit.

    Args:
        trainer: any Trainer, made as ever and not trained yet; with PEFT models, too. Or a model without one, for a loop of your own: as `memfit.fit`,
            which wants `sample`.
        budget: bytes that a step may hold in all, as for `memfit.plan`.
        named: of a Trainer: `sample`, a batch of the largest shape that will come, of as many samples as a step takes (None: the training data is
            looked through); `host_budget` and `disk_budget` as for `memfit.plan`, for activations, as the optimizer's state stays on the device;
            `allow`, ["8bit"] for the optimizer's state; `fixed`, such as {"micro_batches": 4}; `meter`, to measure the peak of each step (slower);
            `progress`. Of a model: those of `memfit.fit`.

    Returns:
        The callback that was added: `.plan`, `.engine.rehearsal`, `.engine.records`, `.notes`. Of a model: the engine.

    Raises:
        InputError: a setting of the trainer is incompatible with a plan; the message says which and why.
        InfeasibleError, SplitError, BudgetError, CaptureError: as for `memfit.fit`.
    """
    if isinstance(trainer, nn.Module):
        if named.get("sample") is None:
            raise InputError(
                "a model alone does not tell its batches: give sample=..., one whole batch of the largest shape, or a Trainer"
            )
        trainer.train()
        return api.fit(trainer, named.pop("sample"), budget=budget, **named)
    if not isinstance(trainer, Trainer):
        raise InputError(f"a transformers.Trainer or a model is needed, this is a {type(trainer).__name__}")
    callback = FitToMemory(budget, **named)
    callback.attach(trainer)
    trainer.add_callback(callback)
    return callback


__all__ = ["FitToMemory", "fit"]
