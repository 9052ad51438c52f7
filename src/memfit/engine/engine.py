"""Run optimizer steps as a plan says. The engine decides nothing; it splits, follows, accumulates, updates once and reports.

A step either happens whole or not at all: when anything fails before the update (the model, a NaN loss, an interrupt), gradients, batch-norm statistics and
generators are put back, and an interrupt during the update waits for its end.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.engine.saved import CompiledScript, Follower
from memfit.errors import BatchError, CaptureError, EngineError, InfeasibleError
from memfit.meter import Reading, metered
from memfit.plans import Plan
from memfit.report import FrontierPoint, Rehearsal, Report, StepRecord
from memfit.step.program import StepProgram, model_tensors, state_tensors
from memfit.step.stream import WATCHED_BY_NOBODY, LayerStream, Watch


def norm_statistics(model: nn.Module) -> tuple[str, ...]:
    """Names of the running statistics of normalisation layers in training: what is known to change in forward without a capture."""
    return tuple(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, _NormBase) and module.training
        for name, _ in module.named_buffers(recurse=False)
    )


class Engine:
    """A model, its optimizer and a plan, ready to train.

    Args:
        plan: made for this model's structure.
        model: the user's own object; never replaced.
        loss_fn: `loss_fn(model, batch)`, or None for `model(**batch).loss`.
        optimizer: over the model's parameters; None to compute gradients only.
        stream: what has taken the model's blocks to the lower tier already; made here when None and the plan streams.

    Attributes:
        stream: of a plan that streams layers; None else.
        planner: makes a plan for a batch whose forward departed from the plan it fell under; None where nothing can be captured (a loaded plan).
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        loss_fn: LossFunction | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        stream: LayerStream | None = None,
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
        self.planner: Callable[[Batch], Plan] | None = None
        self._departed: set[str] = set()
        self._halfway = ""  # why no step can go on from here
        self.add(plan)

    def add(self, plan: Plan) -> None:
        """Plan for one more signature of batch; the first one stays `plan`.

        Raises:
            EngineError: the plan names a buffer that the model does not have, or streams other layers than the plans before.
        """
        self._stream_as(plan)
        buffers = dict(self.model.named_buffers())
        for name in plan.changed_buffers:
            if name not in buffers:
                raise EngineError(
                    f"the plan says that forward writes the buffer {name!r}, which this model does not have: plan again for it"
                )
            if name not in self._changed:
                self._changed[name] = buffers[name].clone()
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
            self.stream = LayerStream(self.model, path)
        have = "" if self.stream is None else self.stream.blocks.path
        if path != have:
            raise EngineError(
                f"this engine streams the layers of {have!r} and the plan those of {path!r} (none where empty): all plans of an engine must stream alike, "
                'so plan with fixed={"streamed": ...} or make an engine for each'
            )

    def gathered(self) -> AbstractContextManager[nn.Module]:
        """The model with all its parameters, and the optimizer with all its state, for as long as the block lasts: streamed layers are away else.

        For `state_dict`, for loading, for a look at the parameters; takes as many bytes as the model does plainly.
        """
        return self.stream.gathered() if self.stream is not None else nullcontext(self.model)

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
        started = time.perf_counter()
        self.reading = None
        if meter:
            with metered(self.present(batch), self.device) as self.reading:
                self._step(plan, batch)
        else:
            self._step(plan, batch)
        record = replace(
            self.records[-1],
            seconds=time.perf_counter() - started,
            peak_bytes=self.reading.peak_bytes if self.reading is not None else None,
        )
        self.records[-1] = record
        if record.departures and self.planner is not None and signature not in self._plans:
            self._departed.add(signature)
        for departure in record.departures:
            if departure not in self._warned:
                self._warned.add(departure)
                again = "; the next batch of this shape gets a plan of its own" if signature in self._departed else ""
                warnings.warn(
                    f"a forward differed from the plan and was kept plain from there on: {departure}. Its results are right, its peak may be larger"
                    + again,
                    stacklevel=2,
                )
        return record

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
        program = StepProgram(self.model, self.loss_fn, self.optimizer, plan.clip_norm, plan.choices)
        parts = self._parts(plan, batch)
        shares = batches.shares(parts, plan.choices.weights) if len(parts) > 1 else None
        if self.stream is not None:
            self._streamed_step(self.stream, program, parts, shares)
            return
        compiled = self._compiled[plan.signature]
        loss = 0.0
        departures: list[str] = []
        reruns = 0
        value: torch.Tensor | None = None
        with self._all_or_nothing() as keep:
            for index, part in enumerate(parts):
                weight = None if len(parts) == 1 else (shares[index] if shares is not None else 1.0 / len(parts))
                if weight == 0.0:
                    continue  # nothing in this part counts (all its labels are masked), and its own mean is 0/0
                value = None  # the loss of the part before must not lie beside this one's activations
                follower = None if compiled.script.plain else Follower(compiled)
                around = follower.following() if follower is not None else None
                value = program.forward_backward(part, weight, around, check_finite=True)
                loss += float(value) * (1.0 if weight is None else weight)
                if follower is not None:
                    reruns += follower.tape.reruns
                    if follower.departure is not None:
                        departures.append(follower.departure)
                del follower, around
            # The update, and with it the step, happens whole before a waiting interrupt is heard.
            with _interrupts_wait():
                self._update(program)
                keep()
                self.steps += 1
                self.records.append(StepRecord(self.steps, loss, 0.0, len(parts), None, reruns, tuple(departures)))

    def _streamed_step(
        self, stream: LayerStream, program: StepProgram, parts: list[Batch], shares: list[float] | None
    ) -> None:
        weights = [None] if len(parts) == 1 else shares or [1.0 / len(parts)] * len(parts)
        counted = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight != 0.0]
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
            self.records.append(StepRecord(self.steps, loss, 0.0, len(parts), None, 0, ()))

    def _update(self, program: StepProgram) -> None:
        before = [(tensor, tensor._version) for tensor in self._updated()]
        try:
            program.update()
        except BaseException as error:
            if any(tensor._version != version for tensor, version in before):
                halfway = _halfway(error)
                self._halfway = str(halfway)
                raise halfway from error
            raise
        finally:
            program.clear()

    def _updated(self) -> list[torch.Tensor]:
        """What an update writes."""
        state = state_tensors(self.optimizer) if self.optimizer is not None else []
        return [*self.model.parameters(), *state]

    def _parts(self, plan: Plan, batch: Batch) -> list[Batch]:
        total = batches.size(batch)
        if plan.choices.micro_batches == 1:
            return [batch]
        largest = plan.choices.micro_batch_size
        count = -(-total // largest)
        return batches.split(batch, batches.micro_batch_sizes(total, count))

    @contextmanager
    def _all_or_nothing(self) -> Iterator[Callable[[], None]]:
        """Put back buffers, gradients and generators when the block fails before it has called what it is given."""
        kept = False

        def keep() -> None:
            nonlocal kept
            kept = True

        before = [(module, name, buffer) for module in self.model.modules() for name, buffer in module._buffers.items()]
        buffers = dict(self.model.named_buffers())
        for name, copy in self._changed.items():
            copy.copy_(buffers[name])
        generators = [torch.default_generator.clone_state()]
        if self.device.type == "cuda":
            generators.append(torch.cuda.default_generators[self.device.index or 0].clone_state())
        try:
            yield keep
        except BaseException:
            if kept:
                raise
            for parameter in self.model.parameters():
                parameter.grad = None
            for module, name, buffer in before:
                module._buffers[name] = buffer  # where forward put another tensor in its place
            with torch.no_grad():
                for name, copy in self._changed.items():
                    buffers[name].copy_(copy)
            torch.default_generator.set_state(generators[0].get_state())
            if self.device.type == "cuda":
                torch.cuda.default_generators[self.device.index or 0].set_state(generators[1].get_state())
            raise

    @contextmanager
    def forward(self, *, retain_graph: bool = False) -> Iterator[Follower | None]:
        """For people who keep their own loop: run forward and loss of one micro-batch inside, backward and the update outside.

        Args:
            retain_graph: backward will run more than once through this graph; then nothing is let go early.
        """
        if self.stream is not None:
            raise EngineError(
                "layers are streamed, which runs forward, backward and update in an order of its own: use engine.step, or plan without streaming"
            )
        compiled = self._compiled[self.plan.signature]
        if compiled.script.plain:
            yield None
            return
        follower = Follower(compiled, retain=retain_graph)
        with follower.following():
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
        streamed = [] if self.stream is None else [t for held in self.stream.buffers().values() for t in held]
        return [*self._updated(), *beside, *gradients, *streamed]

    def report(self, title: str = "memfit", facts: Any = ()) -> Report:
        """What was predicted and what happened so far."""
        return Report(title, self.plan, self.rehearsal, tuple(self.records), self.frontier, tuple(facts))


class _Metered(Watch):
    """Takes the meter along from thread to thread."""

    def __init__(self, reading: Reading) -> None:
        self.leave_thread = reading.leave_thread  # type: ignore[method-assign]
        self.enter_thread = reading.enter_thread  # type: ignore[method-assign]


def _halfway(error: BaseException) -> EngineError:
    return EngineError(
        f"the optimizer's update failed half way ({type(error).__name__}), so parameters and optimizer state lie between two steps: "
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
