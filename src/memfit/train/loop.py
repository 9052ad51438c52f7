"""The training loop: one engine step after another, and what belongs between them.

The schedule moves once per optimizer step that is taken; one skipped because fp16 overflowed uses its batch and nothing
else. The last, smaller batch of an epoch is used; a stop is obeyed between steps;
whatever ends the run, what is on disk is the state after a whole step, and going on from it gives the same numbers as
never having stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from memfit.batches import Batch, LossFunction
from memfit.errors import InputError, NonFiniteLossError, SnapshotError
from memfit.step import process_generators
from memfit.trackers import Tracker
from memfit.train import snapshots
from memfit.train.assemble import seed_all
from memfit.train.config import ScheduleConfig, TrainConfig
from memfit.train.data import Batches, Position
from memfit.train.evaluate import evaluate
from memfit.train.interrupts import StopRequest, stop_requests
from memfit.train.log import Log
from memfit.train.progress import Display, SilentDisplay
from memfit.train.schedule import MovedRates, Rates
from memfit.train.snapshots import Snapshot
from memfit.train.state import Trained
from memfit.values.report import StepRecord


class Steps(Trained, Protocol):
    """An engine, as far as the loop needs it: `memfit.fit` makes one."""

    def step(self, batch: Batch, *, meter: bool = False) -> StepRecord:
        """One optimizer step."""

    def gathered(self, *, on_host: bool = False, changed: bool = True) -> AbstractContextManager[torch.nn.Module]:
        """Parameters and optimizer state are all there inside, to be saved or loaded."""

    def evaluating(self) -> AbstractContextManager[torch.nn.Module]:
        """The model can be called inside, without gradients."""


MakeRates = Callable[[torch.optim.Optimizer, int], Rates | MovedRates]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: optimizer steps taken in all, those before a resume included.
        total_steps: steps there were to take.
        loss: of the last step; None when none was taken.
        validation_loss: of the last evaluation; None when there was none.
        peak_bytes: largest peak of a metered step; None when none was.
        snapshot: the last one written; None when nothing was left to do.
        signal: number of the signal that stopped it; None when it ran to its end.
    """

    step: int
    total_steps: int
    loss: float | None
    validation_loss: float | None
    peak_bytes: int | None
    snapshot: Path | None
    signal: int | None = None


def total_steps(settings: TrainConfig, batches: Batches) -> int:
    """Optimizer steps of a whole run."""
    return settings.steps if settings.steps is not None else (settings.epochs or 1) * batches.per_epoch


def train(
    engine: Steps,
    batches: Batches,
    out: Path,
    settings: TrainConfig | None = None,
    *,
    schedule: ScheduleConfig | MakeRates | None = None,
    validation: Batches | None = None,
    loss_fn: LossFunction | None = None,
    weights: str = "samples",
    snapshot: Snapshot | None = None,
    config: Mapping[str, Any] | None = None,
    display: Display | None = None,
    trackers: Sequence[Tracker] = (),
) -> Outcome:
    """Train until the steps are taken or somebody stops it.

    Args:
        engine: what `memfit.fit` or `memfit.apply` gave; its learning rates are the full ones.
        batches: to train on.
        out: folder for the log and the snapshots.
        settings: how long, how often to save, log, evaluate and meter. `settings.out` is not looked at.
        schedule: of the learning rate; or what makes the rates, from the optimizer and the number of steps in all.
        validation: to evaluate on.
        loss_fn: of the engine; evaluation uses the same.
        weights: what the loss averages over, see `evaluate`.
        snapshot: where to go on from; None starts anew.
        config: written into snapshots, for whoever finds one.
        display: where to tell about it.
        trackers: get what the log gets; whoever opened them closes them.

    Raises:
        NonFiniteLossError: the loss is NaN or infinite; a snapshot of the state before that step has been written.
        SnapshotError: a snapshot cannot be written; older ones are whole.
    """
    run = _Run(
        engine, batches, out, settings or TrainConfig(), schedule or ScheduleConfig(), validation, loss_fn, weights,
        dict(config or {}), display or SilentDisplay(), trackers,
    )  # fmt: skip
    return run.go(snapshot)


@dataclass
class _Run:
    engine: Steps
    batches: Batches
    out: Path
    settings: TrainConfig
    schedule: ScheduleConfig | MakeRates
    validation: Batches | None
    loss_fn: LossFunction | None
    weights: str
    config: dict[str, Any]
    display: Display
    trackers: Sequence[Tracker]
    step: int = 0
    skipped: int = 0
    position: Position = field(default_factory=Position)
    loss: float | None = None
    validation_loss: float | None = None
    evaluated: int = -1
    peak_bytes: int | None = None
    saved: Path | None = None
    saved_step: int = -1
    saved_evaluated: int = -1

    def go(self, snapshot: Snapshot | None) -> Outcome:
        if self.engine.optimizer is None:
            raise InputError("the engine has no optimizer: pass one to memfit.fit")
        total = total_steps(self.settings, self.batches)
        optimizer, schedule = self.engine.optimizer, self.schedule
        rates = (
            Rates(optimizer, schedule, total) if isinstance(schedule, ScheduleConfig) else schedule(optimizer, total)
        )
        with self.engine.gathered(on_host=True, changed=False):
            content = {"model": self.engine.model.state_dict(), "optimizer": self.engine.optimizer.state_dict()}
            snapshots.check_space(self.out, snapshots.bytes_of(content))  # better now than after the first hour
            del content
        self._begin(snapshot)
        if self.step:
            # As the last step left it: with no step to take, a snapshot must still say so.
            rates.set(max(0, self.step - self.skipped - 1))
        log = Log(self.out, self.step, self.evaluated)
        try:
            with stop_requests(self.display.note) as stop:
                self.display.begin(self.step, total, self.engine.plan.prediction.peak_bytes)
                self._steps(total, rates, log, stop)
                if not stop:
                    self._evaluate(log, stop)
                if (self.saved_step, self.saved_evaluated) != (self.step, self.evaluated):
                    self._save(log)
                else:  # the run may have been killed before it got to that
                    snapshots.prune(self.out, self.settings.keep)
        finally:
            rates.release()
            log.close()
        return Outcome(self.step, total, self.loss, self.validation_loss, self.peak_bytes, self.saved, stop.signal)

    def _begin(self, snapshot: Snapshot | None) -> None:
        """From the start, or from where the snapshot was taken."""
        snapshots.sweep(self.out)
        if snapshot is None:
            seed_all(self.settings.seed)  # whatever planning has drawn
            return
        if snapshot.samples != len(self.batches.samples):
            raise SnapshotError(
                f"{snapshot.folder} was taken while training on {snapshot.samples} samples, and the data now holds "
                f"{len(self.batches.samples)}: "
                "put the data back, or start a new run from the weights"
            )
        for moved in snapshots.set_aside(self.out, snapshot.step):
            self.display.note(f"set aside: {moved} (it is later than where this run starts)")
        with self.engine.gathered(on_host=True):
            loop = snapshots.restore(snapshot, self.engine)
        self.step, self.position, self.saved = snapshot.step, snapshot.position, snapshot.folder
        if snapshot.folder.resolve().parent == self.out.resolve():
            self.saved_step = self.step
        self.loss, self.validation_loss, self.peak_bytes = loop["loss"], loop["validation_loss"], loop["peak_bytes"]
        self.evaluated = self.saved_evaluated = loop["evaluated"]
        self.skipped = loop.get("skipped", 0)

    def _steps(self, total: int, rates: Rates | MovedRates, log: Log, stop: StopRequest) -> None:
        settings = self.settings
        data = self.batches.start(self.position)
        predicted = self.engine.plan.prediction.peak_bytes
        if settings.eval_every and self.step and self.step % settings.eval_every == 0:
            self._evaluate(log, stop)  # the one that a stop has cut short; nothing when it was made
        while self.step < total and not stop:
            before = process_generators.generators()
            rate = rates.set(self.step - self.skipped)
            batch, after = next(data)
            # The second step, not the first: only from then on is the optimizer's state there at the peak.
            meter = bool(settings.meter_every) and (self.step - 1) % settings.meter_every == 0
            try:
                record = self.engine.step(batch, meter=meter)
            except NonFiniteLossError as error:
                process_generators.set_generators(before)
                raise self._non_finite(error, log) from error
            epoch = self.position.epoch
            self.step, self.position, self.loss = self.step + 1, after, record.loss
            self.skipped += record.skipped
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
                for tracker in self.trackers:
                    tracker.step(record, learning_rate=rate, skipped_steps=self.skipped)
            self.display.step(record, rate, log=due)
            if settings.eval_every and self.step % settings.eval_every == 0:
                self._evaluate(log, stop)
            if settings.save_every and self.step % settings.save_every == 0:
                self._save(log)

    def _evaluate(self, log: Log, stop: StopRequest) -> None:
        if self.validation is None or self.evaluated == self.step:
            return
        choices = self.engine.plan.choices
        with self.engine.evaluating() as model:
            loss = evaluate(
                model,
                self.validation,
                self.loss_fn,
                largest=choices.micro_batch_size or -(-self.batches.size // choices.micro_batches),
                weights=self.weights,
                precision=choices.precision,
                stop=lambda: bool(stop),
            )
        if loss is None:
            return
        self.validation_loss, self.evaluated = loss, self.step
        log.validation(self.step, loss)
        for tracker in self.trackers:
            tracker.validation(self.step, loss)
        self.display.note(f"step {self.step}: validation loss {loss:.4f}")

    def _save(self, log: Log) -> None:
        log.sync()
        loop = {
            "generators": process_generators.generators(),
            "loss": self.loss,
            "validation_loss": self.validation_loss,
            "evaluated": self.evaluated,
            "peak_bytes": self.peak_bytes,
            "skipped": self.skipped,
        }
        with self.engine.gathered(on_host=True, changed=False):
            self.saved = snapshots.write(
                self.out,
                self.engine,
                step=self.step,
                position=self.position,
                samples=len(self.batches.samples),
                loop=loop,
                config=self.config,
            )
        self.saved_step, self.saved_evaluated = self.step, self.evaluated
        snapshots.prune(self.out, self.settings.keep)

    def _non_finite(self, error: NonFiniteLossError, log: Log) -> NonFiniteLossError:
        if self.saved_step != self.step:
            self._save(log)
        setting = "fit.fixed.precision=bf16" if self.engine.plan.choices.precision == "fp16" else "optim.lr=..."
        return NonFiniteLossError(
            f"step {self.step + 1}: {error}. The state before it is in {self.saved}; "
            f"to go on with another setting: memfit resume {self.out} --set {setting}"
        )
