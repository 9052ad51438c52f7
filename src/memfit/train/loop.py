"""The training loop: one engine step after another, and what belongs between them.

The schedule moves once per optimizer step that is taken; a step that is skipped because fp16 overflowed uses up its batch
and changes nothing else. The last, smaller batch of an epoch is used. A request to stop is obeyed between steps. Whatever
ends the run, the state on disk is that after a whole step, and a run resumed from it gives the same numbers as one that
never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from memfit.batches import Batch, LossFunction
from memfit.errors import InputError, NonFiniteLossError, SnapshotError
from memfit.meter import metered
from memfit.sharding.agreement import Agreement
from memfit.step import process_generators
from memfit.trackers import Tracker
from memfit.train import snapshots
from memfit.train.assemble import seed_all
from memfit.train.config import ScheduleConfig, TrainConfig
from memfit.train.data import Batches, Position, seed_of
from memfit.train.early_stopping import Best, EarlyStopping, EarlyStoppingConfig
from memfit.train.evaluate import Accuracy, evaluate
from memfit.train.generation import Generation
from memfit.train.interrupts import StopRequest, stop_requests
from memfit.train.live import RunState
from memfit.train.log import Log, SilentLog
from memfit.train.progress import Display, SilentDisplay
from memfit.train.saving import Saving
from memfit.train.schedule import MovedRates, Rates
from memfit.train.snapshot_folders import named
from memfit.train.snapshots import Moment, Snapshot
from memfit.train.state import Savable
from memfit.train.stream import StreamBatches
from memfit.train.watchdog import Watchdog
from memfit.units import format_bytes
from memfit.values.report import MeasuredRank, StepRecord


class Steps(Savable, Protocol):
    """An engine, as far as the loop needs it: `memfit.fit` makes one."""

    def step(self, batch: Batch, *, meter: bool = False) -> StepRecord:
        """One optimizer step."""

    def evaluating(self) -> AbstractContextManager[torch.nn.Module]:
        """The model can be called inside, without gradients."""

    def present(self, batch: Batch) -> list[torch.Tensor]:
        """Tensors that exist between steps and count against the budget, those of a batch among them."""


MakeRates = Callable[[torch.optim.Optimizer, int], Rates | MovedRates]


@dataclass(frozen=True, slots=True)
class RunOutput:
    """Where a run writes, and who is told of its steps.

    Attributes:
        folder: for the log and the snapshots.
        config: written into snapshots, for whoever finds one.
        display: shows progress.
        trackers: get what the log gets; whoever opened them closes them.
        together: with the other ranks of this run, of which rank 0 alone writes, but for snapshots; None for one process.
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    display: Display = field(default_factory=SilentDisplay)
    trackers: Sequence[Tracker] = ()
    together: Agreement | None = None

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes."""
        return self.together is None or self.together.rank == 0


@dataclass(frozen=True, slots=True)
class Validation:
    """What is evaluated during training; see `evaluate`.

    Attributes:
        batches: of the validation data.
        loss_fn: the engine's; None when the model returns its loss.
        weights: what the loss averages over.
    """

    batches: Batches
    loss_fn: LossFunction | None = None
    weights: str = "samples"


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        step: optimizer steps taken in all, those before a resume included.
        total_steps: steps there were to take.
        loss: of the last step; None when none was taken.
        validation_loss: of the last evaluation; None when there was none.
        peak_bytes: largest peak of a metered step; None when none was.
        snapshot: the last one written; None when nothing was left to do.
        signal: number of the signal that stopped it; None when it ran to its end.
        ranks: what each of several has shown since it was started; empty for one process.
        validation_accuracy: of the last evaluation of a classifier; None where there was none.
        best: the best evaluation, whose parameters the model has in the end; None without early stopping.
        stopped_early: why training ended before its last step; None where it did not.
    """

    step: int
    total_steps: int
    loss: float | None
    validation_loss: float | None
    peak_bytes: int | None
    snapshot: Path | None
    signal: int | None = None
    ranks: tuple[MeasuredRank, ...] = ()
    validation_accuracy: float | None = None
    best: Best | None = None
    stopped_early: str | None = None


def total_steps(settings: TrainConfig, batches: Batches | StreamBatches) -> int:
    """Optimizer steps of a whole run.

    Raises:
        ConfigError: they are not given, and the data is a stream.
    """
    return settings.steps if settings.steps is not None else (settings.epochs or 1) * batches.per_epoch


def train(
    engine: Steps,
    batches: Batches | StreamBatches,
    output: RunOutput,
    settings: TrainConfig | None = None,
    *,
    schedule: ScheduleConfig | MakeRates | None = None,
    validation: Validation | None = None,
    snapshot: Snapshot | None = None,
    early_stopping: EarlyStoppingConfig | None = None,
    generation: Generation | None = None,
) -> RunOutcome:
    """Train until all steps are taken, evaluations get no better, or a signal asks to stop.

    Args:
        engine: what `memfit.fit` or `memfit.apply` returned; the learning rates of its optimizer are the ones that the schedule scales.
        batches: to train on.
        output: folder for the log and the snapshots, and who is told of the steps.
        settings: how many steps, and how often to save, log, evaluate and meter. `settings.out` is not used.
        schedule: of the learning rate; or a function that makes the rates from the optimizer and the total number of steps.
        validation: data to evaluate on; None for no evaluation.
        snapshot: where to continue; None starts from the beginning.
        early_stopping: when to end before the last step; then the model goes back to the best evaluation, unless a signal has stopped the run.
        generation: what the model writes on the way; None for nothing.

    Raises:
        InputError: the engine has no optimizer; the metric of early stopping is one that the model does not give.
        NonFiniteLossError: the loss is NaN or infinite; a snapshot of the state before that step has been written.
        SnapshotError: a snapshot cannot be written; older ones are whole.
    """
    run = _Run(engine, batches, output, settings or TrainConfig(), schedule or ScheduleConfig(), validation)
    if early_stopping is not None:
        run.early = EarlyStopping(early_stopping)
    run.generation = generation
    return run.go(snapshot)


@dataclass
class _Run:
    engine: Steps
    batches: Batches | StreamBatches
    output: RunOutput
    settings: TrainConfig
    schedule: ScheduleConfig | MakeRates
    validation: Validation | None
    step: int = 0
    skipped: int = 0
    position: Position = field(default_factory=Position)
    loss: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    evaluated: int = -1
    peak_bytes: int | None = None
    saved: Path | None = None
    saved_step: int = -1
    saved_evaluated: int = -1
    generation: Generation | None = None
    generated: int = -1
    saved_generated: int = -1
    generating_bytes: int | None = None
    mark: Mapping[str, Any] | None = None
    signal: int | None = None
    saving: Saving | None = None
    waiting: float | None = None
    ranks: tuple[MeasuredRank, ...] = ()
    early: EarlyStopping | None = None
    best_saved: int | None = None
    watchdog: Watchdog = field(init=False)

    def __post_init__(self) -> None:
        together, limit = self.output.together, self.settings.rank_timeout
        if together is None or limit is None:
            self.watchdog = Watchdog(None, "")
        else:  # a rank may wait for another one as long as that takes for its own step
            self.watchdog = Watchdog(2 * limit, f"rank {together.rank}")

    def go(self, snapshot: Snapshot | None) -> RunOutcome:
        if self.engine.optimizer is None:
            raise InputError("the engine has no optimizer: pass one to memfit.fit")
        total = total_steps(self.settings, self.batches)
        optimizer, schedule = self.engine.optimizer, self.schedule
        rates = (
            Rates(optimizer, schedule, total) if isinstance(schedule, ScheduleConfig) else schedule(optimizer, total)
        )
        together = self.output.together
        self._check_space(self.engine.optimizer)
        self._begin(snapshot)
        if self.step:
            # As the last step left it: with no step to take, a snapshot must still say so.
            rates.set(max(0, self.step - self.skipped - 1))
        log = Log(self.output.folder, self.step, self.evaluated, self.generated) if self.output.writes else SilentLog()
        try:
            with stop_requests(self.output.display.note) as stop, self.watchdog:
                if self.early is None or not self.early.over:  # a run that was stopped early takes no step
                    plan = self.engine.plan
                    self.output.display.begin(
                        RunState(
                            self.step,
                            total,
                            self._predicted(),
                            plan.budget_bytes,
                            may_end_early=self.early is not None,
                            fullest_bytes=plan.prediction.peak_bytes,
                        )
                    )
                self._steps(total, rates, log, stop)
                if not self._asked(stop):
                    self._evaluate(log, stop)
                    self._generate(log, stop)
                if together is not None:
                    self.ranks = tuple(together.of_all(MeasuredRank(self._predicted(), self.peak_bytes, self.waiting)))
                    self.peak_bytes = together.largest(self.peak_bytes or 0) or None
                saved = (self.saved_step, self.saved_evaluated, self.saved_generated)
                if saved != (self.step, self.evaluated, self.generated):
                    self._save(log)
                self._saved()
                self._prune()  # the run may have been killed before it got to that
                if self.signal is None:
                    self._go_back_to_best()
        except Exception:
            self._given_up()
            raise
        finally:
            rates.release()
            log.close()
        return RunOutcome(
            self.step,
            total,
            self.loss,
            self.validation_loss,
            self.peak_bytes,
            self.saved,
            self.signal,
            self.ranks,
            self.validation_accuracy,
            None if self.early is None else self.early.best,
            self.early.reason() if self.early is not None and self.early.over and self.step < total else None,
        )

    def _check_space(self, optimizer: torch.optim.Optimizer) -> None:
        """For snapshots: better now than after the first hour."""
        if self.output.together is not None:
            from memfit.train import rank_snapshots

            rank_snapshots.check_space(self.output.folder, self.engine, self.output.together)
            return
        with self.engine.gathered(on_host=True, changed=False):
            content = {"model": self.engine.model.state_dict(), "optimizer": optimizer.state_dict()}
            snapshots.check_space(self.output.folder, snapshots.bytes_of(content))

    def _asked(self, stop: StopRequest) -> bool:
        """Whether a signal has asked to stop: one rank's is every rank's, at the same step."""
        number = stop.signal or 0
        if self.output.together is not None:
            number = self.output.together.largest(number)
        self.signal = number or None
        return bool(number)

    def _predicted(self) -> int:
        """Bytes of a step at the peak, of this rank."""
        prediction, together = self.engine.plan.prediction, self.output.together
        return prediction.peak_bytes if together is None else prediction.ranks[together.rank].peak_bytes

    def _begin(self, snapshot: Snapshot | None) -> None:
        """From the start, or from where the snapshot was taken."""
        if self.output.writes:
            snapshots.sweep(self.output.folder)
        if snapshot is None:
            # Whatever planning has drawn; ranks see other samples, and draw other numbers for them.
            seed_all(self.settings.seed + (0 if self.output.together is None else self.output.together.rank))
            return
        if snapshot.samples != self.batches.count:
            before, now = (
                "an unknown number of" if count is None else count for count in (snapshot.samples, self.batches.count)
            )
            raise SnapshotError(
                f"{snapshot.folder} was taken while training on {before} samples, and the data now holds {now}: "
                "put the data back, or start a new run from the weights"
            )
        for moved in snapshots.set_aside(self.output.folder, snapshot.step) if self.output.writes else []:
            self.output.display.note(f"set aside: {moved} (it is later than where this run starts)")
        loop = self._restored(snapshot)
        self.step, self.position, self.saved = snapshot.step, snapshot.position, snapshot.folder
        if snapshot.folder.resolve().parent == self.output.folder.resolve():
            self.saved_step = self.step
        self.loss, self.validation_loss = loop["loss"], loop["validation_loss"]
        if loop.get("predicted_peak_bytes") == self.engine.plan.prediction.peak_bytes:
            self.peak_bytes = loop["peak_bytes"]  # else of another plan, for other ranks say
        self.evaluated = self.saved_evaluated = loop["evaluated"]
        self.generated = self.saved_generated = loop.get("generated", -1)
        self.skipped = loop.get("skipped", 0)
        self.mark = loop.get("mark")
        self.validation_accuracy = loop.get("validation_accuracy")
        if self.early is not None:
            self._go_on_counting(self.early, loop.get("early_stopping"))

    def _go_on_counting(self, early: EarlyStopping, state: Mapping[str, Any] | None) -> None:
        """Evaluations are compared with the best one so far, if the state that it was of is still there."""
        early.set_state(state)
        if early.best is None:
            return
        if (self.output.folder / named(early.best.step) / snapshots.RECORD).is_file():
            self.best_saved = early.best.step
            return
        self.output.display.note(
            f"the snapshot of the best evaluation ({early.best}) is gone: the best is looked for anew"
        )
        early.best, early.misses = None, 0

    def _restored(self, snapshot: Snapshot) -> dict[str, Any]:
        """The loop's values, where everything else is put back."""
        sharded = self.engine.sharded
        ranks = 1 if sharded is None else sharded.ranks
        if ranks != snapshot.ranks:
            # Their generators were for other parts of the batch.
            words = f"{self.settings.seed} {snapshot.step} {0 if sharded is None else sharded.agreement.rank} {ranks}"
            seed_all(seed_of(words))
            self.output.display.note(
                f"the snapshot is of {snapshot.ranks} rank{'s' if snapshot.ranks != 1 else ''} and this run has {ranks}: parameters and optimizer state go on "
                "as they were; dropout draws other numbers from here on"
            )
        if ranks > 1 or snapshot.ranks > 1:
            from memfit.train import rank_snapshots

            return rank_snapshots.restore(snapshot, self.engine)
        with self.engine.gathered(on_host=True):
            return snapshots.restore(snapshot, self.engine)

    def _steps(self, total: int, rates: Rates | MovedRates, log: Log | SilentLog, stop: StopRequest) -> None:
        settings = self.settings
        data = self.batches.start(self.position, self.mark)
        predicted = self._predicted()
        if settings.eval_every and self.step and self.step % settings.eval_every == 0 and self._evaluate(log, stop):
            self._save(log)  # of the evaluation that a stop has cut short; nothing where it was made
        if self.step and self._generates():
            self._generate(log, stop)  # likewise
        while self.step < total and not self._over() and not self._asked(stop):
            self.watchdog.progress()
            if self.saving is not None and self.saving.done:
                self._saved()
            before = process_generators.generators()
            rate = rates.set(self.step - self.skipped)
            batch, after = self._next(data, log)
            # The second step, not the first: only from then on is the optimizer's state there at the peak. And the first one under another plan.
            meter = bool(settings.meter_every) and (
                (self.step - 1) % settings.meter_every == 0 or (self.step > 0 and self.peak_bytes is None)
            )
            try:
                record = self.engine.step(batch, meter=meter)
            except NonFiniteLossError as error:
                process_generators.set_generators(before)
                raise self._non_finite(error, log) from error
            epoch = self.position.epoch
            self.step, self.position, self.loss = self.step + 1, after, record.loss
            self.mark = self.batches.mark()  # only now: a snapshot of a step that failed is one before its batch
            self.skipped += record.skipped
            self.waiting = record.waiting
            record = replace(record, step=self.step)  # the engine counts from where it was made
            if record.peak_bytes is not None:
                self.peak_bytes = max(self.peak_bytes or 0, record.peak_bytes)
            due = (
                self.step % settings.log_every == 0
                or self.step in (1, total)
                or meter
                or bool(record.divergences)
                or record.skipped
            )
            if due:
                log.step(record, epoch=epoch, learning_rate=rate, predicted_peak_bytes=predicted)
                for tracker in self.output.trackers:
                    tracker.step(record, learning_rate=rate, skipped_steps=self.skipped)
            self.output.display.step(record, rate, log=due)
            if self._generates():
                self._generate(log, stop)
            best = bool(settings.eval_every) and self.step % settings.eval_every == 0 and self._evaluate(log, stop)
            if best or (settings.save_every and self.step % settings.save_every == 0):
                self._save(log)
        if self._over() and self.step < total and self.early is not None:
            self.output.display.note(f"stopped early after step {self.step}: {self.early.reason()}")

    def _next(self, data: Iterator[tuple[Batch, Position]], log: Log | SilentLog) -> tuple[Batch, Position]:
        """The next batch; where the data has an error, what was trained so far is saved."""
        try:
            return next(data)
        except SnapshotError:
            raise  # nothing was trained yet
        except InputError as error:
            if not self.step:
                raise
            if self.saved_step != self.step:
                self._save(log)
            self._saved()
            raise InputError(f"{error}. The state after step {self.step} is in {self.saved}") from error

    def _over(self) -> bool:
        """Whether evaluations have got no better for long enough."""
        return self.early is not None and self.early.over

    def _evaluate(self, log: Log | SilentLog, stop: StopRequest) -> bool:
        """Evaluate, unless that was done after this very step; whether it is the best evaluation so far, whose state is to be kept."""
        if self.validation is None or self.evaluated == self.step:
            return False
        choices, sharded = self.engine.plan.choices, self.engine.sharded
        loss_fn = (
            self.validation.loss_fn if sharded is None else sharded.loss_without_gradients(self.validation.loss_fn)
        )
        accuracy = Accuracy()
        with self.engine.evaluating() as model:
            loss = evaluate(
                model,
                self.validation.batches,
                loss_fn,
                largest=choices.micro_batch_size or -(-self.batches.size // choices.micro_batches),
                weights=self.validation.weights,
                precision=choices.precision,
                stop=lambda: self._ends_early(stop),
                accuracy=accuracy,
            )
        if loss is None:
            return False
        if self.output.together is not None:  # in a pipeline the last stage alone has seen what the model returns
            accuracy = next((each for each in self.output.together.of_all(accuracy) if each.samples), accuracy)
        self.validation_loss, self.evaluated = loss, self.step
        self.validation_accuracy = accuracy.share
        best = self._counted(loss, accuracy.share)
        log.validation(self.step, loss, accuracy.share, best=best)
        for tracker in self.output.trackers:
            tracker.validation(self.step, loss)
        told = "" if accuracy.share is None else f", accuracy {100 * accuracy.share:.1f} %"
        if self.early is not None:
            told += (
                ", the best so far"
                if best
                else f", no better for {self.early.misses} of {self.early.settings.patience}"
            )
        self.output.display.note(f"step {self.step}: validation loss {loss:.4f}{told}")
        return best

    def _counted(self, loss: float, accuracy: float | None) -> bool:
        """Whether an evaluation is the best so far."""
        if self.early is None:
            return False
        value = loss if self.early.settings.metric == "validation_loss" else accuracy
        if value is None:
            raise InputError(
                "early_stopping.metric: validation_accuracy needs logits of shape (samples, classes) from the model, and whole numbers as labels, "
                "one for each sample: take validation_loss"
            )
        # Ranks evaluate the same data, and may still differ in the last bit: all follow the first one.
        value = value if self.output.together is None else self.output.together.told(value)
        return self.early.take(self.step, value)

    def _go_back_to_best(self) -> None:
        """The model is what it was at the best evaluation."""
        if self.early is None or self.early.best is None or self.early.best.step == self.step:
            return
        snapshot = None
        if self.output.writes:
            try:
                snapshot = snapshots.read(self.output.folder / named(self.early.best.step))
            except SnapshotError as error:
                self.output.display.note(f"{error}: the model is that of step {self.step}, not of the best evaluation")
        if self.output.together is not None:
            snapshot = self.output.together.told(snapshot)
        if snapshot is not None:
            if self.engine.sharded is not None:
                self._restored(snapshot)
            else:
                with self.engine.gathered(on_host=True):
                    snapshots.restore_model(snapshot, self.engine.model)
            self.output.display.note(f"the model is that of the best evaluation: {self.early.best}")
        else:
            self.early.best = None

    def _generates(self) -> bool:
        """Whether the model writes something after this step."""
        return self.generation is not None and self.step % self.generation.settings.every == 0

    def _generate(self, log: Log | SilentLog, stop: StopRequest) -> None:
        """Have the model write, unless it has after this very step. The first time is metered."""
        if self.generation is None or self.generated == self.step:
            return
        device, together = self.batches.device, self.output.together
        meter = bool(self.settings.meter_every) and self.generating_bytes is None
        with metered(self.engine.present(()), device) if meter else nullcontext() as reading:  # noqa: SIM117 - what is loaded to the device counts
            with self.engine.evaluating() as model:
                texts = self.generation.texts(
                    model,
                    self.step,
                    device,
                    self.engine.plan.choices.precision,
                    lambda: self._ends_early(stop),
                    (lambda token: token) if together is None else together.told,
                )
        if texts is None:
            return
        self.generated = self.step
        peak = None if reading is None else reading.peak_bytes
        log.generated(self.step, texts, peak)
        for each in texts:
            self.output.display.note(f"step {self.step}: {each.prompt!r} goes on: {each.text!r}")
        if peak is not None:
            self.generating_bytes = peak
            if peak > self.engine.plan.budget_bytes:
                self.output.display.note(
                    f"generating took {format_bytes(peak)}, above the budget of {format_bytes(self.engine.plan.budget_bytes)}: "
                    "lower generate.max_new_tokens, or shorten the prompts"
                )

    def _ends_early(self, stop: StopRequest) -> bool:
        """Asked after each batch that was evaluated. Ranks evaluate to the end, or one would wait for the others."""
        self.watchdog.progress()
        return self.output.together is None and bool(stop)

    def _save(self, log: Log | SilentLog) -> None:
        self.watchdog.progress()
        self._saved()  # the one before it: two are never under way
        log.sync()
        loop = {
            "generators": process_generators.generators(),
            "loss": self.loss,
            "validation_loss": self.validation_loss,
            "validation_accuracy": self.validation_accuracy,
            "evaluated": self.evaluated,
            "peak_bytes": self.peak_bytes,
            "predicted_peak_bytes": self.engine.plan.prediction.peak_bytes,
            "skipped": self.skipped,
            "generated": self.generated,
            "mark": self.mark,
            "early_stopping": None if self.early is None else self.early.state(),
        }
        moment = Moment(self.step, self.position, self.batches.count, loop, self.output.config)
        self.saving = Saving.of(
            self.output.folder, self.engine, moment, self.output.together, beside=self.settings.save_async
        )
        self.saved_step, self.saved_evaluated, self.saved_generated = self.step, self.evaluated, self.generated
        if not self.settings.save_async:
            self._saved()

    def _saved(self) -> None:
        """A snapshot that is under way is complete."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            self.saved = saving.finish()
            if self.early is not None and self.early.best is not None and self.early.best.step == self.saved_step:
                self.best_saved = self.saved_step  # only now may the one before it go
            self._prune()

    def _given_up(self) -> None:
        """Training has failed, with a snapshot under way: what it failed with is told, and this only noted."""
        if self.saving is not None:
            try:
                self.saving.give_up()
            except SnapshotError as error:
                self.output.display.note(str(error))

    def _prune(self) -> None:
        if self.output.writes:
            snapshots.prune(self.output.folder, self.settings.keep, self.best_saved)

    def _non_finite(self, error: NonFiniteLossError, log: Log | SilentLog) -> NonFiniteLossError:
        if self.saved_step != self.step:
            self._save(log)
        self._saved()
        setting = "fit.fixed.precision=bf16" if self.engine.plan.choices.precision == "fp16" else "optim.lr=..."
        return NonFiniteLossError(
            f"step {self.step + 1}: {error}. The state before it is in {self.saved}; "
            f"to go on with another setting: memfit resume {self.output.folder} --set {setting}"
        )
