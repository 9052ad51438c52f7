"""A model, a sample batch and an optimizer -> a Trace of one training step.

Fake tensors first: nothing is allocated, so a model far larger than memory can be written down. Where they cannot run the model, or where a
small real run shows other operations, the real one is trusted: captured at two small micro-batches and scaled storage by storage.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit import batches, dispatch
from memfit.batches import Batch, LossFunction
from memfit.capture.recorder import CallSpec, Layouts, Recorder
from memfit.capture.standins import lent
from memfit.capture.streamed import record_streamed
from memfit.errors import CaptureError, InputError, MemfitError
from memfit.garbage import uncollected
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.step.arranging import arranged
from memfit.step.device import device_of
from memfit.step.generators import forked_generators
from memfit.step.program import OptimizerFactory, StepProgram, model_tensors, state_tensors
from memfit.techniques.autocast.precision import Scaling
from memfit.techniques.choices import BASELINE, Choices
from memfit.techniques.freezing.freeze import Forced, watching
from memfit.values.trace import Category, Phase, Trace, digest


@dataclass(frozen=True, slots=True)
class Captured:
    """A trace without seconds yet, and what else was seen on the way.

    Attributes:
        trace: the step.
        calls: the distinct calls to time.
        overwritten: something saved was written before backward read it.
        graded: names of the parameters that get gradients, where every forward runs the same operations and all gradients are dense; else None.
            Then a later capture needs no pass before the one it records.
        receiving: names of the parameters that got gradients.
        forced: where gradients are asked for though nothing below is trained; looked for in the first capture of a way that freezes.
        steady: other random numbers gave the same operations and sizes.
    """

    trace: Trace
    calls: dict[str, CallSpec]
    overwritten: bool = False
    graded: frozenset[str] | None = None
    receiving: frozenset[str] = frozenset()
    forced: Forced | None = None
    steady: bool = False


def model_digest(model: nn.Module) -> str:
    """Identity of a model's structure: module classes, parameter and buffer names, shapes, dtypes, what is trained."""
    modules = [(name, type(module).__name__) for name, module in model.named_modules()]
    tensors = [(n, list(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    buffers = [(n, list(b.shape), str(b.dtype)) for n, b in model.named_buffers()]
    return digest(modules, tensors, buffers, model.training)


def capture(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    *,
    clip_norm: float | None = None,
    choices: Choices = BASELINE,
    device: torch.device | None = None,
    after: Captured | None = None,
    layouts: Mapping[str, Layouts] | None = None,
    loader_batches: int = 1,
) -> Captured:
    """Write down one optimizer step on fake tensors.

    Args:
        model: may be on the meta device.
        sample: the whole batch of one optimizer step, or one of its batches.
        loss_fn: as in `StepProgram`.
        optimizer: makes the optimizer from the trainable parameters; None when only gradients are wanted.
        clip_norm: as in `StepProgram`.
        choices: how the step is run; of several micro-batches the largest is captured.
        device: where the step is to run; the model's own device when None (the CPU for a meta model).
        after: an earlier fake capture of this model, split otherwise, whose forward was confirmed.
        layouts: as for `Recorder`.
        loader_batches: batches like the sample that the step takes one after the other; one is there at a time. Each is split alike.

    Raises:
        CaptureError: fake tensors cannot run this model; carries the cause.
        MemfitError: the model's loss is not a scalar, or depends on nothing trainable.
    """
    target = device or device_of(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        where = target if tensor.device.type == "meta" else tensor.device
        with mode:
            return torch.empty_strided(
                tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=where, requires_grad=False
            )

    try:
        # The batch stays real: what a model computes from it alone (masks, positions, lengths, branches on them) is computed, and only
        # what meets a parameter is fake. So models that look at the values of their inputs take the way they take in training.
        sample = batches.map_tensors(lambda t: fake(t) if t.device.type == "meta" else t, sample)
        parts = _parts(sample, choices.micro_batches, loader_batches)
        with forked_generators(), lent(model, fake), mode:
            if choices.streamed:
                return _streamed(model, sample, parts, loss_fn, optimizer, clip_norm, choices, layouts)
            graded = after.graded if after is not None else None
            return _record(model, sample, parts, loss_fn, optimizer, clip_norm, choices, graded=graded, layouts=layouts)
    except MemfitError:
        raise
    except Exception as error:
        raise CaptureError(
            f"fake tensors cannot run this model ({type(error).__name__}: {_first_line(error)})"
        ) from error


def capture_real(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    *,
    clip_norm: float | None = None,
    choices: Choices = BASELINE,
    loader_batches: int = 1,
) -> Captured:
    """Write down one optimizer step on real tensors; parameters, buffers and generators are left as they were."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        fresh = torch.empty_strided(
            tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=tensor.device
        )
        return fresh.copy_(tensor.detach())

    parts = _parts(sample, choices.micro_batches, loader_batches)
    with forked_generators(), lent(model, copy):
        return _record(model, sample, parts, loss_fn, optimizer, clip_norm, choices, source="real")


def _parts(sample: Batch, micro_batches: int, loader_batches: int) -> list[Batch]:
    # Split before any mode is on: the parts are views of the user's tensors, as in the step.
    sizes = batches.micro_batch_sizes(batches.size(sample), micro_batches // loader_batches)
    return batches.split(sample, sizes) * loader_batches


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _record(
    model: nn.Module,
    sample: Batch,
    parts: list[Batch],
    loss_fn: LossFunction | None,
    make_optimizer: OptimizerFactory | None,
    clip_norm: float | None,
    choices: Choices,
    source: str = "fake",
    graded: frozenset[str] | None = None,
    layouts: Mapping[str, Layouts] | None = None,
) -> Captured:
    micro_batches = len(parts)
    believed = graded
    program = StepProgram(model, loss_fn, None, clip_norm, choices)
    trainable = program.trainable()
    if make_optimizer is not None:
        program.optimizer = arranged(make_optimizer(iter(trainable)), choices, model)
    if choices.scales_gradients and program.optimizer is not None:
        program.scaling = Scaling(device_of(model))
    forced: Forced | None = None
    inside = program.updates_in_backward
    weight = None if micro_batches == 1 else 1.0 / micro_batches
    # What is garbage already stays garbage meanwhile: the recorder follows only storages made after it, and collecting all of Python takes longer than
    # capturing a small model.
    with uncollected(), dispatch.ModulePaths(model) as paths:
        # [1] A first forward, not recorded: what models build once (caches, lazy parameters) is there afterwards. Of several micro-batches a whole
        # pass, so that the recorded one adds to gradients.
        recorder = Recorder(paths, layouts)
        recorder.recording = False
        if graded is not None:
            for name, parameter in model.named_parameters():
                if (micro_batches > 1 or inside) and name in graded:
                    parameter.grad = _as_accumulated(parameter)
        else:
            with watching(model) if choices.frozen else contextlib.nullcontext() as forced:
                if micro_batches == 1 and not inside:
                    with recorder:
                        loss = program.loss(sample)
                    del loss
                else:
                    program.forward_backward(parts[0], weight, recorder)
        once = list(recorder.unrecorded)
        if inside:
            # What is updated inside the recorded backward has its state by then.
            graded = graded if graded is not None else _graded(model)
            _make_state(program, recorder)
            if micro_batches == 1:
                program.clear()
        # Cycles of that forward may hold activations; all are young, as no collection has run since they were made.
        gc.collect(0)
        recorder.recording = True
        recorder.register(model.parameters(), Category.PARAMETER)
        recorder.register(model.buffers(), Category.BUFFER)
        recorder.register(model_tensors(model), Category.BUFFER)
        recorder.register((p.grad for p in trainable if p.grad is not None), Category.GRADIENT)
        recorder.register(program.scaling.tensors() if program.scaling is not None else (), Category.OTHER)
        recorder.register(batches.leaves(sample), Category.BATCH)

        @contextlib.contextmanager
        def around_update(parameter: torch.Tensor) -> Iterator[None]:
            if parameter.grad is not None:
                recorder.recategorise((parameter.grad,), Category.GRADIENT)
            recorder.phase = Phase.OPTIMIZER
            yield
            recorder.phase = Phase.BACKWARD

        marks: list[int] = []

        def after_forward() -> None:
            marks.append(len(recorder.events))
            recorder.phase = Phase.BACKWARD

        with recorder, recorder.seeing_generator_states():
            # [2] One micro-batch, recorded; the largest one, after the gradients exist when there are several.
            # The engine, too, holds the buffers that were there before the step, in case it fails.
            buffers = dict(model.named_buffers())
            loss = program.forward_backward(
                parts[-1],
                weight,
                recorder.saving(),
                after_forward=after_forward,
                around_backward=program.updating(around_update) if inside else None,
            )
            pass_events = len(recorder.events)
            if once != [o.name for o in recorder.operations if o.phase is Phase.FORWARD]:
                graded = believed
            elif not inside:
                graded = _graded(model)
            receiving = frozenset(name for name, p in model.named_parameters() if p.grad is not None)
            changed = {
                name: b.numel() * b.element_size()
                for name, b in buffers.items()
                if dispatch.has_storage(b) and recorder.storage_id(b) in recorder.changed
            }
            del buffers
            recorder.recategorise((p.grad for p in trainable if p.grad is not None), Category.GRADIENT)
            # [3] The optimizer twice: the first time makes its state, the second is the steady one.
            if not inside:
                _make_state(program, recorder)
            recorder.phase = Phase.CLIP
            program.unscale()
            program.clip()
            recorder.phase = Phase.OPTIMIZER
            if program.optimizer is not None:
                program.optimizer.step()
            del loss
            program.clear()
        operations, storages, saves = recorder.tables()
        recorder.recording = False
    del program
    if inside:
        _check_reads(recorder)
    trace = Trace(
        events=tuple(recorder.events),
        operations=operations,
        storages=storages,
        saves=saves,
        forward_events=marks[0],
        pass_events=pass_events,
        choices=replace(choices, micro_batch_size=batches.size(parts[-1])),
        device=str(device_of(model)),
        seconds_are="none",
        source=source,
        signature=batches.signature(sample),
        model=model_digest(model),
        notes=tuple(recorder.notes),
        changed_buffers=tuple(changed),
        changed_buffer_bytes=sum(changed.values()),
    )
    return Captured(trace, recorder.calls, recorder.overwritten, graded, receiving, forced)


def _make_state(program: StepProgram, recorder: Recorder) -> None:
    """A first update, not recorded: it makes the optimizer's state. What of it lies elsewhere takes nothing of the device."""
    if program.optimizer is None:
        return
    recording, recorder.recording = recorder.recording, False
    optimizer = program.optimizer
    fake = all(isinstance(p, FakeTensor) for p in program.model.parameters())
    sketched = optimizer.sketching() if fake and isinstance(optimizer, ChunkedOptimizer) else contextlib.nullcontext()
    with contextlib.nullcontext() if recording else recorder, sketched:
        optimizer.step()
    recorder.recording = recording
    here = device_of(program.model).type
    state = state_tensors(program.optimizer)
    recorder.register((t for t in state if t.device.type == here), Category.OPTIMIZER_STATE)
    recorder.register((t for t in state if t.device.type != here), Category.OPTIMIZER_STATE, counts=False)


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


def _streamed(
    model: nn.Module,
    sample: Batch,
    parts: list[Batch],
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    clip_norm: float | None,
    choices: Choices,
    layouts: Mapping[str, Layouts] | None,
) -> Captured:
    digest_of, where = model_digest(model), str(device_of(model))  # before the blocks' parameters go
    trace, recorder = record_streamed(model, sample, parts, loss_fn, optimizer, clip_norm, choices, layouts)
    return Captured(replace(trace, model=digest_of, device=where), recorder.calls, recorder.overwritten)


def _graded(model: nn.Module) -> frozenset[str] | None:
    """Names of the parameters that have gradients; None where one of them is sparse."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return frozenset(grads) if all(dispatch.has_storage(g) for g in grads.values()) else None


def _as_accumulated(parameter: nn.Parameter) -> torch.Tensor:
    """A gradient laid out as autograd accumulates it: as its parameter where that is dense, else row by row (`AccumulateGrad`)."""
    if dispatch.is_dense(parameter):
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
