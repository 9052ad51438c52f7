"""Run a step twice under a Recorder, and write the second run down as a Trace: one micro-batch's forward and backward, clipping, the update.

What a model builds once and the optimizer's state are there before what is recorded, as in every step of training but the first.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memfit import batches, dispatch
from memfit.batches import Batch
from memfit.capture.calls import ResultLayouts
from memfit.capture.captured import Captured
from memfit.capture.comparing import forward_names
from memfit.capture.generator_states import following_generator_states
from memfit.capture.isolation import functions_kept
from memfit.capture.recorder import Recorder
from memfit.capture.source import StepSource, made_by_its_first_forward, model_digest
from memfit.capture.views_made_anew import ViewsMadeAnew
from memfit.errors import InputError
from memfit.garbage import uncollected
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.sharding.collectives import backend_for
from memfit.sharding.sharded import ShardedModel
from memfit.step.device import device_of
from memfit.step.fingerprint import fingerprint
from memfit.step.given import steps_alone
from memfit.step.held_tensors import loss_tensors, model_tensors
from memfit.step.other_kernels import run_as_written
from memfit.step.process_generators import outside_torch
from memfit.step.program import StepProgram, held_by_optimizer, hooks_of, own_optimizer
from memfit.step.unrestored import FoundByCall, HeldByModules
from memfit.techniques.choices import Choices
from memfit.techniques.freezing.freeze import Forced, watching
from memfit.values.trace import Category, ModuleCall, Phase, Trace


def record(
    source: StepSource,
    micro_batches: Sequence[Batch],
    choices: Choices,
    *,
    tensors: str = "fake",
    graded: frozenset[str] | None = None,
    layouts: Mapping[str, ResultLayouts] | None = None,
    sharded: ShardedModel | None = None,
) -> Captured:
    """Write down the step of a model whose tensors are lent already.

    Args:
        source: the step.
        micro_batches: of the sample, the largest last.
        choices: how the step is run.
        tensors: "fake" or "real", for the record.
        graded: of an earlier capture (`Captured.graded`); then no pass is run before the one that is recorded.
        layouts: as for `Recorder`.
        sharded: the model as one of several ranks has it.

    Raises:
        InputError: the step cannot be run as chosen.
    """
    # What is garbage already stays garbage meanwhile: the recorder follows only storages made after it, and collecting all of Python takes longer than
    # capturing a small model.
    views = ViewsMadeAnew() if source.views_anew else None
    with (
        uncollected(),
        dispatch.ModulePaths(source.model) as paths,
        run_as_written() as as_written,
        views or nullcontext(),
    ):
        ranks = () if sharded is None else tuple(range(sharded.ranks))
        device = device_of(source.model)
        backend = backend_for(device)
        recorder = Recorder(paths, layouts, ranks, backend, as_written=as_written, device=device.type, views=views)
        step = _StepRecording(source, micro_batches, choices, recorder, graded, sharded)
        parameters = {name: (parameter, parameter.shape) for name, parameter in source.model.named_parameters()}
        trained = _trained(source.model)
        with functions_kept(hooks_of(own_optimizer(step.program.optimizer)), source.model):
            step.train_before()
            step.first_pass()
            refrozen = _trained(source.model) != trained  # by forward
            made_by_its_first_forward(source.model, parameters)
            del parameters
            step.register()
            # A GPU's generator states lie in host memory.
            states = following_generator_states(step.recorder) if source.cuda is None else nullcontext()
            before = fingerprint(source.model) if source.forwards_before == 0 else {}
            with step.recorder, states:
                step.run()
        after = fingerprint(source.model) if before else {}
        operations, storages, saves = recorder.tables()
        gathered = recorder.gathered()
        recorder.recording = False
        step.finish()
    trace = Trace(
        events=tuple(recorder.events),
        operations=operations,
        storages=storages,
        saves=saves,
        forward_events=step.forward_events,
        pass_events=step.pass_events,
        choices=replace(choices, micro_batch_size=batches.size(micro_batches[-1])),
        device=str(device_of(source.model)),
        seconds_are="none",
        source=tensors,
        signature=batches.signature(source.sample),
        model=model_digest(source.model),
        notes=tuple(recorder.notes),
        changed_buffers=tuple(step.changed),
        changed_buffer_bytes=sum(step.changed.values()),
        calls=tuple(_module_calls(source.model, paths, steady=not step.changes_attributes and not step.leaves_tensors)),
        gathered=gathered,
    )
    names = forward_names(trace)
    once = step.once is None or step.once[: len(names)] == names  # after them its backward, where that was run too
    return Captured(
        trace,
        recorder.calls,
        recorder.overwritten,
        None if step.leaves_tensors or refrozen else step.graded,
        step.receiving,
        step.forced,
        repeats=once and not refrozen,
        counts=step.counts,
        before={
            place: before.get(place, "") for place in before | after if before.get(place, "") != after.get(place, "")
        },
        met_bytes=recorder.met_bytes() if tensors == "real" else (),
        fakes_sparse=recorder.fakes_sparse,
        views_anew=views is not None,
    )


def _trained(model: nn.Module) -> list[bool]:
    """Of each parameter."""
    return [parameter.requires_grad for parameter in model.parameters()]


def _module_calls(model: nn.Module, paths: dispatch.ModulePaths, *, steady: bool) -> Iterator[ModuleCall]:
    """The calls that began and ended while forward was recorded.

    Args:
        model: whose modules.
        paths: has watched them.
        steady: forward leaves what modules hold as it was.
    """
    hooked = [path for path, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    numbers: Counter[str] = Counter()
    for module, begin, end, _, given, result, found in paths.calls:
        if begin is None or end is None:
            continue
        arguments, plain = given or ((), False)
        results, _ = result or ((), False)
        inner = f"{module}." if module else ""
        own = not any(path == module or path.startswith(inner) for path in hooked)
        yield ModuleCall(
            *(module, numbers[module], (begin[0], end[0]), (begin[1], end[1])),
            arguments=arguments,
            results=results,
            repeatable=steady and plain and own and found,
        )
        numbers[module] += 1


class _StepRecording:
    """The passes of one recording, in the order of its methods.

    Attributes:
        graded, receiving, forced, counts: as in `Captured`.
        changed: bytes of the buffers that forward writes, by name.
        changes_attributes: forward changes what modules hold (a counter, a list), or draws from Python's or numpy's random numbers.
        leaves_tensors: forward leaves some as attributes of modules, there when the next step begins: so one has to run before the recorded one.
        forward_events, pass_events: as in `Trace`.
    """

    def __init__(
        self,
        source: StepSource,
        micro_batches: Sequence[Batch],
        choices: Choices,
        recorder: Recorder,
        graded: frozenset[str] | None,
        sharded: ShardedModel | None = None,
    ) -> None:
        self.recorder = recorder
        self.graded = graded
        self.receiving: frozenset[str] = frozenset()
        self.forced: Forced | None = None
        self.changed: dict[str, int] = {}
        self.changes_attributes = self.leaves_tensors = self.counts = False
        self.forward_events = self.pass_events = 0
        self._source = source
        self._micro_batches = micro_batches
        self._believed = graded
        self._sharded = sharded
        self._program: StepProgram | None = source.program(choices, sharded)
        self._trainable = self.program.trainable()
        # A rank weights its part of the batch by what the loss averages over on all of them.
        self._weight = None if len(micro_batches) == 1 and sharded is None else 1.0 / len(micro_batches)
        self._once: list[str] = []  # operations of the pass that is not recorded
        # Identities of the parameters whose gradients went into their updates inside backward.
        self._updated: set[int] = set()

    @property
    def once(self) -> list[str] | None:
        """Operations of the forward before the one that is recorded; None where none was run."""
        return self._once if self._believed is None else None

    @property
    def program(self) -> StepProgram:
        """The step; there until `finish`."""
        assert self._program is not None
        return self._program

    def train_before(self) -> None:
        """[0] The steps after which the recorded one comes."""
        for _ in range(self._source.steps_before):
            self._train()

    def first_pass(self) -> None:
        """[1] A first forward, not recorded: what models build once (caches, lazy parameters) is there afterwards.

        Of several micro-batches a whole pass, so that the recorded one adds to gradients.
        """
        model, program, recorder = self._source.model, self.program, self.recorder
        several, inside = len(self._micro_batches) > 1, program.updates_in_backward
        # Like the one that is recorded where it can be: values decide which operations run, too.
        earlier = self._micro_batches[
            -1 if batches.signature(self._micro_batches[0]) == batches.signature(self._micro_batches[-1]) else 0
        ]
        recorder.recording = False
        if self._sharded is not None:
            self._first_passes()
        elif self.graded is not None:
            for name, parameter in model.named_parameters():
                if (several or inside) and name in self.graded:
                    parameter.grad = _as_accumulated(parameter)
        else:
            for _ in range(self._source.forwards_before - 1):
                with recorder:
                    loss = program.loss(earlier)
                del loss
                recorder.unrecorded.clear()
            first = self._source.forwards_before == 0
            with watching(model) if program.choices.frozen else nullcontext() as self.forced:
                if not first and (several or inside):
                    program.forward_backward(earlier, self._weight, recorder)
                    # Sparse gradients grow with each micro-batch: their elements are listed one after the other. An optimizer that adds up those of one
                    # place has as many as there are places, so each micro-batch has to be its own.
                    if several and _graded(model) is None:
                        program.clear()
                        for each in self._micro_batches[:-1]:
                            recorder.unrecorded.clear()
                            program.forward_backward(each, self._weight, recorder)
                elif not first:
                    with recorder:
                        loss = program.loss(self._source.sample)
                    del loss
                    program.clear()  # what a backward inside the loss has left
            if several or (inside and first):
                for parameter in self._elsewhere():
                    parameter.grad = _as_accumulated(parameter)
        self._once = list(recorder.unrecorded)
        if inside:
            # What is updated inside the recorded backward has its state by then.
            self.graded = self.graded if self.graded is not None else _graded(model)
            _make_state(program, recorder)
            if not several:
                program.clear()
        # Cycles of that forward may hold activations; all are young, as no collection has run since they were made.
        gc.collect(0)
        recorder.recording = True

    def _train(self) -> None:
        """A step that is not recorded, for what it changes: the parameters."""
        program = self.program
        for number, micro_batch in enumerate(self._micro_batches, 1):
            inside = program.updates_in_backward and number == len(self._micro_batches)
            program.forward_backward(micro_batch, self._weight, around_backward=program.updating() if inside else None)
        program.update()
        program.clear()

    def _first_passes(self) -> None:
        """A step without its update, in which `fully_shard` sets itself up.

        Of several micro-batches the one before the last is run as well. Where the very next forward is captured none is: DistributedDataParallel needs none.
        """
        program, recorder = self.program, self.recorder
        if self._source.forwards_before == 0:
            assert self._sharded is not None, "who calls this has looked"
            with self._sharded.micro_batch(
                last=len(self._micro_batches) == 1
            ):  # has the gradients of earlier ones there
                return
        for last in (True, *((False,) if len(self._micro_batches) > 1 else ())):
            recorder.unrecorded.clear()
            program.forward_backward(self._micro_batches[-1], self._weight, recorder, last=last)
            if last:
                program.clear()

    def register(self) -> None:
        """What is there before the recorded pass."""
        model, program, recorder = self._source.model, self.program, self.recorder
        if self._sharded is not None:
            recorder.register(self._sharded.parameters(), Category.PARAMETER)
            recorder.register(self._sharded.held(), Category.GRADIENT)
            recorder.register_resized(self._sharded.gathered())
            # Gradients of earlier micro-batches are of whole parameters.
            recorder.register(self._sharded.accumulated(), Category.GRADIENT)
        else:
            recorder.register(model.parameters(), Category.PARAMETER)
        recorder.register(model.buffers(), Category.BUFFER)
        recorder.register(model_tensors(model), Category.BUFFER)
        recorder.register((p.grad for p in self._trainable if p.grad is not None), Category.GRADIENT)
        recorder.register(program.scaling.tensors() if program.scaling is not None else (), Category.OTHER)
        recorder.register(batches.leaves(self._source.sample), Category.BATCH)
        recorder.register(loss_tensors(self._source.loss_fn), Category.OTHER)

    def run(self) -> None:
        """[2] One micro-batch, recorded, and [3] the update."""
        with _sketched(self.program, 2, self.recorder.stands_for):
            loss = self._forward_backward()
            self._update()
        del loss
        self.program.clear()

    def _forward_backward(self) -> torch.Tensor:
        """The largest micro-batch, after the gradients exist when there are several."""
        model, program, recorder = self._source.model, self.program, self.recorder
        inside = program.updates_in_backward
        # The engine, too, holds the buffers that were there before the step, in case it fails.
        buffers = dict(model.named_buffers())
        held, drawn = HeldByModules(model, self._source.loss_fn), outside_torch()
        recorder.paths.found = FoundByCall

        def after_forward() -> None:
            self.changes_attributes = held.changed() or drawn != outside_torch()
            self.counts = held.counts()
            for call in recorder.paths.calls:
                call[-1] = call[-1] is not None and not call[-1].changed()
            self._after_forward()

        loss = program.forward_backward(
            self._micro_batches[-1],
            self._weight,
            recorder.saving(),
            after_forward=after_forward,
            around_backward=program.updating(self._around_update) if inside else None,
        )
        self.pass_events = len(recorder.events)
        if self._once != [o.name for o in recorder.operations if o.phase is Phase.FORWARD]:
            self.graded = self._believed
        elif not inside:
            self.graded = _graded(model)
        self.receiving = frozenset(n for n, p in self._named() if p.grad is not None or id(p) in self._updated)
        self.changed = {
            name: b.numel() * b.element_size()
            for name, b in buffers.items()
            if dispatch.has_storage(b) and recorder.storage_id(b) in recorder.changed
        }
        del buffers
        self.leaves_tensors = any(recorder.made_in_step(tensor) for tensor in model_tensors(model))
        recorder.recategorise((p.grad for p in self._trainable if p.grad is not None), Category.GRADIENT)
        return loss

    def _after_forward(self) -> None:
        self.forward_events = len(self.recorder.events)
        self.recorder.phase = Phase.BACKWARD

    @contextmanager
    def _around_update(self, parameter: torch.Tensor) -> Iterator[None]:
        if parameter.grad is not None:
            self._updated.add(id(parameter))
            self.recorder.recategorise((parameter.grad,), Category.GRADIENT)
        self.recorder.phase = Phase.OPTIMIZER
        yield
        self.recorder.phase = Phase.BACKWARD

    def _update(self) -> None:
        """Clipping and the optimizer twice: the first time makes its state, the second is the steady one."""
        program, recorder = self.program, self.recorder
        if not program.updates_in_backward:
            elsewhere = self._elsewhere()
            for parameter in elsewhere:
                parameter.grad = _as_accumulated(parameter)
            _make_state(program, recorder)
            for parameter in elsewhere:
                parameter.grad = None
        recorder.phase = Phase.CLIP
        program.unscale()
        program.clip()
        recorder.phase = Phase.OPTIMIZER
        if program.optimizer is not None:
            program.optimizer.step()

    def _elsewhere(self) -> list[nn.Parameter]:
        """Parameters that this step gives no gradient, and others do."""
        return [p for name, p in self._named() if name in self._source.trained_elsewhere and p.grad is None]

    def _named(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer updates, by their names in the model."""
        return self._source.model.named_parameters() if self._sharded is None else self._sharded.named().items()

    def finish(self) -> None:
        """Let go of the optimizer, and see that the step may be run as it was.

        Raises:
            InputError: an update inside backward comes before backward has read the parameter for the last time.
        """
        inside = self.program.updates_in_backward
        self._program = None
        if inside:
            _check_reads(self.recorder)


def _make_state(program: StepProgram, recorder: Recorder) -> None:
    """A first update, not recorded: it makes the optimizer's state. Offloaded state takes no bytes of the device."""
    if program.optimizer is None:
        return
    recording, recorder.recording = recorder.recording, False
    optimizer = program.optimizer
    with nullcontext() if recording else recorder, _sketched(program, 1):
        steps_alone(optimizer)
    recorder.recording = recording
    here = device_of(program.model).type
    state = held_by_optimizer(program.optimizer)
    recorder.register((t for t in state if t.device.type == here), Category.OPTIMIZER_STATE)
    recorder.register((t for t in state if t.device.type != here), Category.OPTIMIZER_STATE, counts=False)


def _sketched(
    program: StepProgram, chunks: int, stands_for: Callable[[float], None] = lambda _: None
) -> AbstractContextManager[None]:
    """Of updates in chunks of fake tensors only so many of each parameter: the rest is like the last one, and a large model has tens of thousands."""
    optimizer = program.optimizer
    fake = all(isinstance(p, FakeTensor) for p in program.model.parameters())
    return (
        optimizer.sketching(chunks, stands_for) if fake and isinstance(optimizer, ChunkedOptimizer) else nullcontext()
    )


def _check_reads(recorder: Recorder) -> None:
    """Refuse an update inside backward where backward reads a parameter after its update."""
    updated: dict[int, int] = {}
    for event, code in enumerate(recorder.events):
        if code >= 0 and recorder.operations[code].phase is Phase.OPTIMIZER:
            for storage in recorder.operations[code].writes:
                updated.setdefault(storage, event)
    for save in recorder.saves:
        if any(event is not None and event > updated.get(save.storage, event) for event, _ in save.unpacks):
            raise InputError(
                f"backward reads a parameter in {save.module or 'the model'} again after its gradient is whole (a path that passes no gradient back), so it "
                "cannot be updated inside backward: update after backward"
            )


def _graded(model: nn.Module) -> frozenset[str] | None:
    """Names of the parameters that have gradients; None where one of them is sparse."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return frozenset(grads) if all(dispatch.has_storage(g) for g in grads.values()) else None


def _as_accumulated(parameter: nn.Parameter) -> torch.Tensor:
    """A gradient laid out as autograd accumulates it: as its parameter where that is dense, else row by row (`AccumulateGrad`)."""
    if dispatch.is_dense(parameter):
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
