"""Run optimizer steps as a plan says. The engine decides nothing; it splits, follows, accumulates, updates once and reports.

A step either happens whole or not at all: when anything fails before the update (the model, a NaN loss, an interrupt), gradients, batch-norm statistics,
generators and the gradient scaler are put back, and an interrupt during the update waits for its end.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.engine.saved import CompiledScript, Follower
from memfit.engine.swap import LowerTiers, Makers, tiers_below
from memfit.errors import (
    BatchError,
    CaptureError,
    EngineError,
    InfeasibleError,
    InputError,
    MemfitError,
    NonFiniteLossError,
)
from memfit.meter import Reading, metered
from memfit.step.precision import Scaling
from memfit.step.program import StepProgram, model_tensors, state_tensors
from memfit.storage.tiers import tier_below
from memfit.streaming.stream import LayerStream
from memfit.streaming.watch import WATCHED_BY_NOBODY, Watch
from memfit.values.plan import Plan
from memfit.values.report import FrontierPoint, Rehearsal, Report, StepRecord


def norm_statistics(model: nn.Module) -> tuple[str, ...]:
    """Names of the running statistics of normalisation layers in training: what is known to change in forward without a capture."""
    return tuple(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, _NormBase) and module.training
        for name, _ in module.named_buffers(recurse=False)
    )


def parts_of(plan: Plan, batch: Batch) -> list[Batch]:
    """The micro-batches that a plan runs a batch in; a smaller batch than planned may be fewer."""
    if plan.choices.micro_batches == 1:
        return [batch]
    total = batches.size(batch)
    count = -(-total // plan.choices.micro_batch_size)
    return batches.split(batch, batches.micro_batch_sizes(total, count))


def counting_parts(plan: Plan, batch: Batch) -> list[tuple[Batch, float]] | None:
    """The micro-batches of a batch and the share of each in its loss; None where it is run whole.

    A part in which nothing counts (all its labels are masked) is left out: its own mean is 0/0.
    """
    parts = parts_of(plan, batch)
    if len(parts) == 1:
        return None
    shares = batches.shares(parts, plan.choices.weights) or [1.0 / len(parts)] * len(parts)
    return [(part, share) for part, share in zip(parts, shares, strict=True) if share != 0.0]


@dataclass(slots=True)
class _Sum:
    """What the micro-batches of a step have come to so far.

    Attributes:
        loss: weighted.
        parts: micro-batches run.
        last: loss of the last one, a tensor as in the capture; must not lie beside the next one's activations.
        unit, counted: where the whole is not known before: what the first micro-batch counts for, and all so far.
    """

    loss: float = 0.0
    parts: int = 0
    reruns: int = 0
    departures: list[str] = field(default_factory=list)
    last: torch.Tensor | None = None
    unit: int = 0
    counted: int = 0


class Schedule(Protocol):
    """What moves the learning rate: torch's schedulers, or whatever else has a `step`."""

    def step(self) -> Any:
        """A step was taken."""


class Engine:
    """A model, its optimizer and a plan, ready to train.

    Args:
        plan: made for this model's structure.
        model: the user's own object; never replaced.
        loss_fn: `loss_fn(model, batch)`, or None for `model(**batch).loss`.
        optimizer: over the model's parameters; None to compute gradients only.
        stream: what has taken the model's blocks to the lower tier already; made here when None and the plan streams.
        below: what makes room on the tiers below the device, for what the plan swaps; None for those that are there.
        folder: for what is offloaded to disk; None for the one that is set.

    Attributes:
        stream: of a plan that streams layers; None else.
        folder: as given.
        planner: makes a plan for a batch whose forward departed from the plan it fell under; None where nothing can be captured (a loaded plan).
        scaling: of the gradients, under a plan in fp16; None otherwise.
        schedule: moves once after each step that is taken, and not after one that is skipped; None where the loop moves its own.
        backward: of a loss, where it is somebody else's (Fabric's); None for the loss's own.
        fabric_model: the model as Fabric has set it up, to save and to evaluate through it; None without Fabric.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        loss_fn: LossFunction | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        stream: LayerStream | None = None,
        below: Makers | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self.model = model
        self.stream = stream
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.rehearsal: Rehearsal | None = None
        self.reading: Reading | None = None
        self.frontier: tuple[FrontierPoint, ...] = ()
        self.records: list[StepRecord] = []
        self.steps = 0
        self.plan = plan
        self._compiled: dict[str, CompiledScript] = {}
        self._plans: dict[str, Plan] = {}
        self._warned: set[str] = set()
        self._changed: dict[str, torch.Tensor] = {}  # copies of the buffers that forward writes
        self.folder = folder
        self._lower_tiers = LowerTiers(below if below is not None else tiers_below(self.device, folder))
        self.planner: Callable[[Batch], Plan] | None = None
        self._departed: set[str] = set()
        self._halfway = ""  # why no step can go on from here
        self.scaling: Scaling | None = None
        self.schedule: Schedule | None = None
        self.backward: Callable[[torch.Tensor, torch.Tensor | None], object] | None = None
        self.fabric_model: nn.Module | None = None
        self.add(plan)

    def add(self, plan: Plan) -> None:
        """Plan for one more signature of batch; the first one stays `plan`.

        Raises:
            InfeasibleError: the plan offloads more than a lower tier has space for.
            EngineError: the plan names a buffer that the model does not have, or streams other layers than the plans before; or no file can be made for
                what it offloads.
        """
        self._lower_tiers.reserve(plan.script.lower_bytes)
        self._stream_as(plan)
        buffers = dict(self.model.named_buffers())
        for name in plan.changed_buffers:
            if name not in buffers:
                raise EngineError(
                    f"the plan says that forward writes the buffer {name!r}, which this model does not have: plan again for it"
                )
            if name not in self._changed:
                self._changed[name] = buffers[name].clone()
        if plan.choices.precision == "fp16" and self.optimizer is not None and self.scaling is None:
            self.scaling = Scaling(self.device)
        self._plans[plan.signature] = plan
        self._compiled[plan.signature] = CompiledScript(plan.script)

    def replace_plan(self, plan: Plan) -> None:
        """Follow another plan from now on (the repair after a rehearsal)."""
        self._plans.clear()
        self._compiled.clear()
        if self.stream is not None and plan.choices.streamed != self.stream.blocks.path:
            self.stream.close()
            self.stream = None
        self.plan = plan
        self.add(plan)

    def _stream_as(self, plan: Plan) -> None:
        path = plan.choices.streamed
        if path and self.stream is None and not self._plans:
            self.stream = LayerStream(self.model, path, tier_below(self.device, self.folder))
        have = "" if self.stream is None else self.stream.blocks.path
        if path != have:
            raise EngineError(
                f"this engine streams the layers of {have!r} and the plan those of {path!r} (none where empty): all plans of an engine must stream alike, "
                'so plan with fixed={"streamed": ...} or make an engine for each'
            )

    def gathered(self, *, on_host: bool = False, changed: bool = True) -> AbstractContextManager[nn.Module]:
        """The model with all its parameters, and the optimizer with all its state, for as long as the block lasts: streamed layers are away else.

        For `state_dict`, for loading, for a look at the parameters; takes as many bytes as the model does plainly.

        Args:
            on_host: have what was away in the host's memory, not on the device; to be saved or loaded, not to be called.
            changed: what is changed inside is kept; without, nothing is written to the lower tier.
        """
        return (
            self.stream.gathered(on_host=on_host, changed=changed)
            if self.stream is not None
            else nullcontext(self.model)
        )

    def evaluating(self) -> AbstractContextManager[nn.Module]:
        """The model, to be called without gradients; streamed layers come to the device one by one when they are called."""
        return self.stream.reading() if self.stream is not None else nullcontext(self.model)

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, *, meter: bool = False) -> StepRecord:
        """One optimizer step over the whole batch, in as many micro-batches as the plan says.

        Args:
            batch: as the sample the plan was made for; it may be smaller in any dimension, not larger.
            meter: measure the true peak of this step (slower).

        Raises:
            BatchError: another structure than planned, or larger.
            NonFiniteLossError: the loss is NaN or infinite; nothing was changed.
            EngineError: an update failed half way, now or before; nothing can go on from there.
        """
        if self._halfway:
            raise EngineError(self._halfway)
        signature = batches.signature(batch)
        plan = self._plan_for(signature)
        if signature in self._departed and signature not in self._plans:
            plan = self._planned_anew(batch, signature, plan)
        return self._recorded(lambda: self._step(plan, batch), batch, signature, meter=meter)

    def accumulate(self, micro_batches: Iterable[Batch], *, meter: bool = False) -> StepRecord:
        """One optimizer step over the micro-batches of a loader, one of which is on the device at a time.

        For a window of n batches of a loader, plan with a sample that holds all their samples and `fixed={"micro_batches": n}`; then hand over
        any n of them, or fewer (the last window of an epoch). Each counts for what the loss averages over, as the plan has found: samples, or
        tokens that are not masked. How much that is in all is known only at the end, so gradients are added up in units of the first
        micro-batch and divided once: the same step as over all samples at once up to the order of additions.

        Args:
            micro_batches: each no larger than a micro-batch of the plan, or it is split; where they lie elsewhere they are brought to the device.
            meter: as for `step`; of a list all are there before, so all that lie on the device count.

        Raises:
            BatchError: there are none, they hold nothing that counts, or one is larger than planned; nothing was changed.
            InputError: the plan is for the whole batch at once: it has neither weights nor room for gradients that are there already; or it updates
                parameters inside backward.
            NonFiniteLossError, EngineError: as for `step`.
        """
        if self._halfway:
            raise EngineError(self._halfway)
        if self.plan.choices.micro_batches == 1:
            raise InputError(
                "this plan runs the batch whole, so it keeps no room for gradients between micro-batches and has not found how they are weighted: "
                'plan with a sample that holds all samples of the step and fixed={"micro_batches": n}, or call engine.step'
            )
        if self._program(self.plan).updates_in_backward:
            raise InputError(
                "this plan updates parameters inside the backward of the last micro-batch, and which one is the last of a loader nobody knows: "
                'plan with fixed={"update": "after"}, or call engine.step'
            )
        listed = micro_batches if isinstance(micro_batches, (list, tuple)) else ()
        there = [tensor for each in listed for tensor in batches.leaves(each)]
        return self._recorded(lambda: self._accumulate(micro_batches), there, self.plan.signature, meter=meter)

    def _recorded(self, run: Callable[[], None], batch: Batch, signature: str, *, meter: bool) -> StepRecord:
        """Run a step and finish its record; tell of departures, each once."""
        started = time.perf_counter()
        self.reading = None
        if meter:
            with metered(self.present(batch), self.device) as self.reading:
                run()
        else:
            run()
        record = replace(
            self.records[-1],
            seconds=time.perf_counter() - started,
            peak_bytes=self.reading.peak_bytes if self.reading is not None else None,
        )
        self.records[-1] = record
        if self.schedule is not None and not record.skipped:
            self.schedule.step()
        if record.departures and self.planner is not None and signature not in self._plans:
            self._departed.add(signature)
        again = "; the next batch of this shape gets a plan of its own" if signature in self._departed else ""
        for departure in record.departures:
            self.tell_departure(departure, again, stacklevel=4)
        return record

    def tell_departure(self, departure: str, more: str = "", *, stacklevel: int) -> None:
        """Warn that a forward was not as planned, once for each departure; for front doors whose loop is somebody else's, too.

        Args:
            departure: where and why.
            more: what happens now.
            stacklevel: of `warnings.warn`, from here.
        """
        if departure not in self._warned:
            self._warned.add(departure)
            warnings.warn(
                f"a forward differed from the plan and was kept plain from there on: {departure}. Its results are right, its peak may be larger"
                + more,
                stacklevel=stacklevel,
            )

    def _planned_anew(self, batch: Batch, signature: str, known: Plan) -> Plan:
        """A plan for this very shape, whose forward runs other operations than the plan it would fall under; the known plan where none can be made."""
        self._departed.discard(signature)
        assert self.planner is not None
        try:
            with self.gathered():
                made = self.planner(batch)
        except (CaptureError, InfeasibleError) as error:
            warnings.warn(f"no plan of its own for batches [{signature}]: {error}", stacklevel=3)
            made = replace(known, signature=signature)
        self.add(made)
        return made

    def _step(self, plan: Plan, batch: Batch) -> None:
        counting: Sequence[tuple[Batch, float | None]] = counting_parts(plan, batch) or [(batch, None)]
        if self.stream is not None:
            self._streamed_step(self.stream, self._program(plan), counting)
            return
        done = _Sum()
        with self._all_or_nothing() as keep, ExitStack() as whole:
            for index, (part, weight) in enumerate(counting):
                inside = self._program(plan).updates_in_backward and index == len(counting) - 1
                if inside:
                    whole.enter_context(self._updating())
                self._forward_backward(plan, part, weight, done, updates=inside)
            self._finish(plan, done, keep, whole)

    def _streamed_step(
        self, stream: LayerStream, program: StepProgram, counted: Sequence[tuple[Batch, float | None]]
    ) -> None:
        watch = _Metered(self.reading) if self.reading is not None else WATCHED_BY_NOBODY
        with self._all_or_nothing() as keep, ExitStack() as stack:
            try:
                losses = stream.step(
                    program,
                    [part for part, _ in counted],
                    [weight for _, weight in counted],
                    check_finite=True,
                    watch=watch,
                    changing=lambda: stack.enter_context(_interrupts_wait()),
                )
            except BaseException as error:
                if not stream.updating:
                    raise
                halfway = _halfway(error)
                self._halfway = str(halfway)
                raise halfway from error
            finally:
                program.clear()
            loss = sum(
                float(value) * (1.0 if weight is None else weight)
                for value, (_, weight) in zip(losses, counted, strict=True)
            )
            keep()
            self.steps += 1
            self.records.append(StepRecord(self.steps, loss, 0.0, len(counted), None, 0, ()))

    def _accumulate(self, micro_batches: Iterable[Batch]) -> None:
        how = self.plan.choices.weights
        done = _Sum()
        with self._all_or_nothing() as keep, ExitStack() as whole:
            for micro_batch in micro_batches:
                self._add(micro_batch, how, done)
                del micro_batch  # before the loader makes the next one
            if not done.counted:
                raise BatchError(
                    f"{done.parts or 'no'} micro-batches were handed over, and nothing in them counts for the loss (it is weighted by {how}): "
                    "nothing was changed"
                )
            # A sum stays a sum; a mean was added up in units of the first micro-batch.
            share = 1.0 if how == "sum" else done.unit / done.counted
            done.loss *= share
            if share != 1.0:
                torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], share)
            self._finish(self.plan, done, keep, whole)

    def _add(self, micro_batch: Batch, how: str, done: _Sum) -> None:
        here = batches.map_tensors(lambda t: t.to(self.device), micro_batch)
        plan = self._plan_for(batches.signature(here))
        for part in parts_of(plan, here):
            count = batches.counted(part, how)
            done.unit = done.unit or count
            done.counted += count
            if count:
                self._forward_backward(plan, part, count / done.unit, done)

    def _program(self, plan: Plan) -> StepProgram:
        how = (self.model, self.loss_fn, self.optimizer, plan.clip_norm, plan.choices, self.scaling)
        return StepProgram(*how) if self.backward is None else StepProgram(*how, self.backward)

    def _forward_backward(
        self, plan: Plan, part: Batch, weight: float | None, done: _Sum, *, updates: bool = False
    ) -> None:
        """One micro-batch, followed as the plan says; parameters are updated inside its backward or not at all."""
        compiled = self._compiled[plan.signature]
        program = self._program(plan)
        done.last = None
        follower = None if compiled.script.plain else Follower(compiled, lower_tiers=self._lower_tiers)
        try:
            # In fp16 an infinite loss is an overflow like any other: its gradients are not finite, so the step is skipped.
            done.last = program.forward_backward(
                part,
                weight,
                follower.following() if follower is not None else None,
                check_finite=self.scaling is None,
                around_backward=program.updating() if updates else None,
            )
        finally:
            if follower is not None:
                follower.tape.end()
        done.loss += float(done.last) * (1.0 if weight is None else weight)
        done.parts += 1
        if follower is not None:
            done.reruns += follower.tape.reruns
            if follower.departure is not None:
                done.departures.append(follower.departure)

    def _finish(self, plan: Plan, done: _Sum, keep: Callable[[], None], whole: ExitStack) -> None:
        """The rest of the step: the update, where none began in backward, and the record."""
        program = self._program(plan)
        if not program.updates_in_backward:
            whole.enter_context(self._updating())
        taken = program.update()
        program.clear()
        if self.scaling is not None:
            self.scaling.check_hope()
        keep()
        self.steps += 1
        record = StepRecord(self.steps, done.loss, 0.0, done.parts, None, done.reruns, tuple(done.departures))
        self.records.append(replace(record, skipped=not taken))

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """The update, and with it the step, happens inside: whole, before a waiting interrupt is heard, or the engine knows that it did not."""
        before = [(tensor, tensor._version) for tensor in self._updated()]
        with _interrupts_wait():
            try:
                yield
            except NonFiniteLossError:
                raise  # noticed before an update or in place of one; fused optimizers count a skipped step as a write
            except BaseException as error:
                if any(tensor._version != version for tensor, version in before):
                    halfway = _halfway(error)
                    self._halfway = str(halfway)
                    raise halfway from error
                raise

    def _updated(self) -> list[torch.Tensor]:
        """What an update writes."""
        if self.optimizer is None:
            return []
        return [*(p for group in self.optimizer.param_groups for p in group["params"]), *state_tensors(self.optimizer)]

    @contextmanager
    def _all_or_nothing(self) -> Iterator[Callable[[], None]]:
        """Put back buffers, gradients, generators and the scaler when the block fails before it has called what it is given."""
        kept = False

        def keep() -> None:
            nonlocal kept
            kept = True

        before = [
            (f"{path}.{name}" if path else name, module, name, buffer)
            for path, module in self.model.named_modules()
            for name, buffer in module._buffers.items()
        ]
        buffers = {path: buffer for path, _, _, buffer in before}
        for path, copy in self._changed.items():
            copy.copy_(buffers[path])
        generators = [torch.default_generator.clone_state()]
        if self.device.type == "cuda":
            generators.append(torch.cuda.default_generators[self.device.index or 0].clone_state())
        scaling = None if self.scaling is None else self.scaling.state()
        try:
            yield keep
        except BaseException:
            if kept:
                raise
            for parameter in self.model.parameters():
                parameter.grad = None
            for _, module, name, buffer in before:
                module._buffers[name] = buffer  # where forward put another tensor in its place
            with torch.no_grad():
                for path, copy in self._changed.items():
                    buffers[path].copy_(copy)
            torch.default_generator.set_state(generators[0].get_state())
            if self.device.type == "cuda":
                torch.cuda.default_generators[self.device.index or 0].set_state(generators[1].get_state())
            if self.scaling is not None and scaling is not None:
                self.scaling.set_state(scaling)
            raise

    @contextmanager
    def forward(self, *, retain_graph: bool = False) -> Iterator[Follower | None]:
        """For people who keep their own loop: run forward and loss of one micro-batch inside, backward and the update outside.

        Under a plan in 16 bits it is an autocast region as well; in fp16, scale with `engine.scaling.scaler`.

        Args:
            retain_graph: backward will run more than once through this graph; then nothing is let go early.
        """
        if self.stream is not None:
            raise EngineError(
                "layers are streamed, which runs forward, backward and update in an order of its own: use engine.step, or plan without streaming"
            )
        if self._program(self.plan).updates_in_backward:
            raise InputError(
                "this plan updates parameters inside backward, which engine.step does and a loop of your own does not: "
                'plan with fixed={"update": "after"}, or call engine.step'
            )
        compiled = self._compiled[self.plan.signature]
        program = self._program(self.plan)
        if compiled.script.plain:
            with program.as_chosen():
                yield None
            return
        follower = Follower(compiled, retain=retain_graph, lower_tiers=self._lower_tiers)
        with follower.following(), program.as_chosen():
            yield follower

    # -- what it stands on ---------------------------------------------------------------------------------------------------

    def plan_for(self, batch: Batch) -> Plan:
        """The plan whose signature the batch fits within; the tightest one when several do.

        Raises:
            BatchError: no plan is for such a batch.
        """
        return self._plan_for(batches.signature(batch))

    def _plan_for(self, signature: str) -> Plan:
        if signature in self._plans:
            return self._plans[signature]
        fitting = [p for s, p in self._plans.items() if batches.fits_within(signature, s)]
        if not fitting:
            raise BatchError(
                f"the batch is [{signature}], the plan is for batches up to [{self.plan.signature}]: "
                "plan again with a sample of the largest shape, or cut the batch down to it; nothing was changed"
            )
        return min(fitting, key=lambda p: p.prediction.peak_bytes)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        first = next(self.model.parameters(), None)
        return first.device if first is not None else torch.device("cpu")

    def present(self, batch: Batch) -> list[torch.Tensor]:
        """Tensors that are there before a step and count against the budget."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        beside = [*self.model.buffers(), *self._changed.values(), *batches.leaves(batch), *model_tensors(self.model)]
        scaling = self.scaling.tensors() if self.scaling is not None else []
        streamed = [] if self.stream is None else [t for held in self.stream.buffers().values() for t in held]
        state = state_tensors(self.optimizer) if self.optimizer is not None else []
        return [*self.model.parameters(), *state, *beside, *gradients, *scaling, *streamed]

    def report(self, title: str = "memfit", facts: Any = ()) -> Report:
        """What was predicted and what happened so far."""
        return Report(title, self.plan, self.rehearsal, tuple(self.records), self.frontier, tuple(facts))


class _Metered(Watch):
    """Takes the meter along from thread to thread."""

    def __init__(self, reading: Reading) -> None:
        self.leave_thread = reading.leave_thread  # type: ignore[method-assign]
        self.enter_thread = reading.enter_thread  # type: ignore[method-assign]


def _halfway(error: BaseException) -> EngineError:
    reason = str(error).partition(": ")[0] if isinstance(error, MemfitError) else type(error).__name__
    return EngineError(
        f"the optimizer's update failed half way ({reason}), so parameters and optimizer state lie between two steps: "
        "load the last snapshot (memfit resume does) and make an engine anew"
    )


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done: half an update is no state to stop in."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, Any]] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending and callable(previous):
        previous(*pending[0])
