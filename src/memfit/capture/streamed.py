"""A streamed step (`memfit.streaming`) -> a Trace: the whole step, all micro-batches, as it runs.

Nothing in it is planned storage by storage: what backward reads is made again by running blocks again, which is part of the step. So the trace has no saves
and no pass that is repeated; it says what the bytes are. What autograd holds inside a block that runs again lives from when it is made until backward lets go.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from memfit import batches, dispatch
from memfit.batches import Batch
from memfit.capture.calls import ResultLayouts
from memfit.capture.generator_states import following_generator_states
from memfit.capture.recorder import Recorder
from memfit.capture.source import StepSource
from memfit.capture.views_made_anew import ViewsMadeAnew
from memfit.garbage import uncollected
from memfit.step.device import device_of
from memfit.step.held_tensors import loss_tensors, model_tensors
from memfit.step.other_kernels import run_as_written
from memfit.step.program import StepProgram, state_tensors
from memfit.storage.tiers import NoTier
from memfit.streaming.stream import LayerStream
from memfit.streaming.watch import Watch
from memfit.techniques.choices import Choices
from memfit.values.trace import Category, Phase, Save, Storage, Trace


class _Watched(Watch):
    """Tells the recorder the phase of what runs, and has it see what autograd saves."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @contextmanager
    def forward(self) -> Iterator[None]:
        self.goes_on()
        with self.recorder.saving():
            yield
        self.recorder.phase = Phase.BACKWARD

    def goes_on(self) -> None:
        self.recorder.phase = Phase.FORWARD

    @contextmanager
    def update(self) -> Iterator[None]:
        before, self.recorder.phase = self.recorder.phase, Phase.OPTIMIZER
        yield
        self.recorder.phase = before


def record_streamed(
    source: StepSource, parts: Sequence[Batch], choices: Choices, layouts: Mapping[str, ResultLayouts] | None
) -> tuple[Trace, Recorder]:
    """Write down the second of two streamed steps; the first makes the optimizer's state. `seconds_are`, `device` and `model` are left to the caller.

    Arguments are those of `capture`, with the model's tensors lent already and its batch split.
    """
    model, sample = source.model, source.sample
    device = device_of(model)  # before the blocks' parameters go
    program = StepProgram(model, source.loss_fn, None, source.clip_norm, choices)
    program.optimizer = source.optimizer(iter(program.trainable())) if source.optimizer is not None else None
    stream = LayerStream(model, choices.streamed, NoTier())
    weights = [None if len(parts) == 1 else 1.0 / len(parts)] * len(parts)
    views = ViewsMadeAnew() if source.views_anew else None
    with (
        uncollected(),
        dispatch.ModulePaths(model) as paths,
        run_as_written() as as_written,
        views or nullcontext(),
    ):
        recorder = Recorder(paths, layouts, as_written=as_written, device=device.type, views=views)
        watch = _Watched(recorder)
        recorder.recording = False
        with recorder:
            stream.step(program, parts, weights, watch=watch)
        program.clear()
        gc.collect(0)
        recorder.recording = True
        buffers = dict(model.named_buffers())
        recorder.phase = Phase.FORWARD
        recorder.register(model.parameters(), Category.PARAMETER)
        recorder.register(model.buffers(), Category.BUFFER)
        recorder.register(model_tensors(model), Category.BUFFER)
        for category, held in stream.buffers().items():
            recorder.register(held, Category(category))
        if program.optimizer is not None:
            recorder.register(state_tensors(program.optimizer), Category.OPTIMIZER_STATE)
        recorder.register(batches.leaves(sample), Category.BATCH)
        recorder.register(loss_tensors(source.loss_fn), Category.OTHER)
        with recorder, following_generator_states(recorder, as_operations=True):
            losses = stream.step(program, parts, weights, watch=watch)
            del losses
            program.clear()
        changed = {
            name: b.numel() * b.element_size()
            for name, b in buffers.items()
            if dispatch.has_storage(b) and recorder.storage_id(b) in recorder.changed
        }
        operations, storages, saves = recorder.tables()
        recorder.recording = False
    stream.close(restore=False)
    events, lasting = _without_saves(recorder.events, storages, saves)
    trace = Trace(
        events=events,
        operations=operations,
        storages=lasting,
        saves=(),
        forward_events=0,
        pass_events=0,
        choices=replace(choices, micro_batch_size=batches.size(parts[-1])),
        device="",
        seconds_are="none",
        source="fake",
        signature=batches.signature(sample),
        model="",
        notes=tuple(recorder.notes),
        changed_buffers=tuple(changed),
        changed_buffer_bytes=sum(changed.values()),
    )
    return trace, recorder


def _without_saves(
    events: Sequence[int], storages: Sequence[Storage], saves: Sequence[Save]
) -> tuple[tuple[int, ...], tuple[Storage, ...]]:
    """The operations alone, with what autograd saves held until backward lets go of it."""
    ends = [storage.death for storage in storages]
    for save in saves:
        ends[save.storage] = max(ends[save.storage], save.freed, *(release for _, release in save.unpacks))
    place: list[int] = []  # of each event among the operations; an unpack counts to the operation before it
    kept: list[int] = []
    for event in events:
        if event >= 0:
            kept.append(event)
        place.append(len(kept) - 1)
    place.append(len(kept))

    def moved(event: int) -> int:
        return event if event < 0 else place[min(event, len(events))]

    return tuple(kept), tuple(
        replace(storage, birth=moved(storage.birth), death=max(moved(storage.birth), moved(end)))
        for storage, end in zip(storages, ends, strict=True)
    )
