"""A capture that the real model has confirmed: on fake tensors where the real forward runs the same operations, else on real ones.

Python code can tell fake tensors from real ones and take another way (one-hot's range check, sliced assignment, masks that are skipped when full), so a
fake capture is believed only after the real forward has shown the same operations on a few samples. Otherwise two small real captures are scaled (`scaling`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from memfit import batches
from memfit.capture.calls import ResultLayouts
from memfit.capture.capture import capture
from memfit.capture.captured import Captured
from memfit.capture.comparing import forward_names
from memfit.capture.cuda.kernels import ASSUMED
from memfit.capture.draws import with_other_draws
from memfit.capture.extreme_draws import End, drawing, drawn_one_by_one
from memfit.capture.real_forward import looked_at, on_few, real_forward_names, refused_by_torch
from memfit.capture.samples import rows_of, shortened
from memfit.capture.scaling import scaled
from memfit.capture.source import StepSource
from memfit.capture.values_read import other_samples, rows_alone
from memfit.errors import CaptureError, InputError
from memfit.step.device import device_of
from memfit.step.other_kernels import explained
from memfit.step.process_generators import outside_torch, outside_torch_kept
from memfit.techniques.choices import BASELINE, Choices
from memfit.values.trace import Trace

NOT_AS_STREAMED: Final = (
    "without streaming, this step was captured on real tensors, since it runs other operations on fake ones; with layers streamed it could only be captured on "
    "fake ones, so its bytes are not known exactly; a rehearsal measures them"
)
MAKES_SPARSE: Final = "it makes sparse tensors, whose bytes fake tensors do not tell"
SPARSE_UNKNOWN: Final = (
    "the step makes sparse tensors (a gradient of nn.Embedding(sparse=True), say), whose bytes are not counted where nothing is run for real: a step takes "
    "more than predicted. Plan with the model on its own device, or rehearse by memfit.fit"
)
CPU_KERNELS: Final = "captured on real tensors, so the bytes are those of the CPU's kernels, not of CUDA's (dropout masks of four bytes, the CPU's attention)"


def trustworthy(
    source: StepSource,
    choices: Choices = BASELINE,
    *,
    believed: Captured | None = None,
    layouts: Mapping[str, ResultLayouts] | None = None,
    others: Iterable[Captured] = (),
) -> Captured:
    """A capture that the real model has confirmed: on fake tensors if possible, otherwise on real ones.

    Args:
        source, choices, layouts: as in `capture`.
        believed: an earlier capture of this model whose forward was confirmed; the same operations need no second confirmation.
        others: earlier captures of this step run in other ways; a forward that was steady in one of them is not drawn for again.

    Raises:
        CaptureError: neither is possible.
        InputError: the step ends inside a kernel that is not PyTorch's own; the message says what to do.
        Exception: the user's own, when the step itself fails.
    """
    try:
        return _trustworthy(source, choices, believed, layouts, others)
    except Exception as error:
        on_gpu = device_of(source.model).type == "cuda"
        told = None if isinstance(error, InputError) else explained(error, on_gpu=on_gpu)
        if told is None:
            raise
        raise told from error


def _trustworthy(
    source: StepSource,
    choices: Choices,
    believed: Captured | None,
    layouts: Mapping[str, ResultLayouts] | None,
    others: Iterable[Captured],
) -> Captured:
    def on_fakes(of: StepSource) -> Captured:
        return capture(of, choices, layouts=layouts)

    def for_real(why: str, known: Captured | None = None, of: StepSource = source) -> Captured:
        made = scaled(replace(of, cuda=None), choices, why=why, known=known)
        if of.cuda is None:
            return made
        return made.noting(CPU_KERNELS)

    if choices.sharding:
        return _sharded(source, choices, on_fakes, others)
    if choices.streamed:
        # Its operations are those of the plain step, which has been confirmed before it is streamed; only their order is another.
        source = replace(source, views_anew=any(other.views_anew for other in others))
        captured = on_fakes(source)
        if all(other.trace.source == "fake" for other in others):
            return captured
        return captured.noting(NOT_AS_STREAMED)
    with outside_torch_kept():
        outside, one_by_one = outside_torch(), drawn_one_by_one()
        found = confirmed(source, choices, believed, layouts)
        decides = drawn_one_by_one() > one_by_one or outside_torch() != outside
        if isinstance(found, str) and decides:
            # Fake operations draw nothing, so what decides the path was another number in the real forward: at an end of the range it is the same.
            with drawing(End.HIGHEST):
                at_the_end = confirmed(source, choices, None, layouts)
            found = at_the_end if isinstance(at_the_end, Captured) else found
        captured = for_real(found) if isinstance(found, str) else found
        as_believed = partial(for_real, found, captured) if isinstance(found, str) else on_fakes
        source = replace(source, views_anew=captured.views_anew)
        earlier = choices.micro_batches > 1 or choices.update == "in_backward"
        if earlier and source.forwards_before == 0 and not captured.receiving <= source.trained_elsewhere:
            # No pass was run before the one that is recorded: it alone tells which gradients earlier micro-batches leave, and which state earlier steps.
            source = replace(source, trained_elsewhere=source.trained_elsewhere | captured.receiving)
            captured = as_believed(source)
        if source.draws:
            samples, told = other_samples(source, choices, captured)
            captured = with_other_draws(captured, as_believed, source, others, decides=decides, samples=samples)
            if told:
                captured = captured.noting(told)
    if captured.overwritten and not source.on_meta:
        refused_by_torch(source, choices)
    return replace(captured, trace=_as_many_as_run(captured.trace, batches.size(source.sample), source.loader_batches))


def _sharded(
    source: StepSource, choices: Choices, on_fakes: Callable[[StepSource], Captured], others: Iterable[Captured]
) -> Captured:
    """A rank's step, whose forward is that of the step on one device with collectives in between: so it is believed where that one was.

    Under ZeRO 2 and 3 no rank learns a path while it trains. So where forward tells the samples of a batch apart, each is taken for what a whole batch may be
    like.

    Raises:
        CaptureError: that one was captured on real tensors.
    """
    alone = next(iter(others), None) or trustworthy(source, choices.but(sharding=""))
    if alone.trace.source != "fake":
        why = (
            alone.trace.notes[0] if alone.trace.notes else "it runs other operations on fake tensors than on real ones"
        )
        if MAKES_SPARSE in why:
            raise sparse_on_ranks()
        raise real_on_ranks(why.removeprefix("captured for real: "))
    source = replace(source, views_anew=alone.views_anew)
    with outside_torch_kept():
        outside, one_by_one = outside_torch(), drawn_one_by_one()
        captured = on_fakes(source)
        decides = drawn_one_by_one() > one_by_one or outside_torch() != outside
        if source.draws:
            each = replace(source, other_samples=source.other_samples or (lambda _: rows_alone(source.sample)))
            samples, _ = other_samples(each, choices.but(sharding=""), alone)
            # Engines set themselves up in the forward before the one that is captured, so no other one of them is looked at.
            once = replace(captured, repeats=True)
            captured = with_other_draws(once, on_fakes, source, (alone,), decides=decides, samples=samples)
    # Which kernels there are depends on the precision, and the other one may have another.
    of_alone = [note for note in alone.trace.notes if not note.startswith(ASSUMED)]
    notes = tuple(dict.fromkeys((*of_alone, *captured.trace.notes)))
    return replace(captured, trace=replace(captured.trace, notes=notes))


def real_on_ranks(why: str) -> CaptureError:
    """The error for a step of several ranks that real tensors alone can run.

    Args:
        why: fake ones cannot.
    """
    return CaptureError(
        f"the step on one device had to be captured on real tensors ({why}), and that of one of several ranks can only be captured on fake ones: "
        "its bytes would not be known. Where forward or the loss reads values of tensors, to log them (.item(), print), do that after the step: "
        "record.loss has the loss of all ranks; an optimizer that reads them (Adafactor) trains on one device"
    )


def sparse_on_ranks() -> CaptureError:
    """The error for a step of several ranks whose bytes real tensors alone would tell."""
    return CaptureError(
        "the step makes sparse tensors (gradients of nn.Embedding(sparse=True), say), and that of one of several ranks can only be captured on fake ones, "
        "which do not tell their bytes: take sparse=False and an optimizer for dense gradients, or train on one device"
    )


def confirmed(
    source: StepSource,
    choices: Choices,
    believed: Captured | None = None,
    layouts: Mapping[str, ResultLayouts] | None = None,
) -> Captured | str:
    """A fake capture whose operations the real model shows too, or why there is none. Arguments are those of `trustworthy`."""
    # Watching for views takes a tenth of a capture, and few models need it; where nothing can be compared, nothing else tells which do.
    watched = source.on_meta or (believed is not None and believed.views_anew)
    try:
        found = _confirmed(replace(source, views_anew=watched), choices, believed, layouts)
        if isinstance(found, Captured) or watched or found == MAKES_SPARSE:
            return found
        again = _confirmed(replace(source, views_anew=True), choices, None, layouts)
    except CaptureError as error:
        if source.on_meta:
            raise
        return str(error)
    return again if isinstance(again, Captured) else found


def _confirmed(
    source: StepSource, choices: Choices, believed: Captured | None, layouts: Mapping[str, ResultLayouts] | None
) -> Captured | str:
    def on_fakes(after: Captured | None) -> Captured:
        return capture(source, choices, after=after, layouts=layouts)

    known = forward_names(believed.trace) if believed is not None and believed.trace.source == "fake" else None
    fake = on_fakes(believed if known is not None else None)
    if known is not None and known != forward_names(fake.trace):
        fake = on_fakes(None)  # what is built once for each shape was recorded, perhaps: this time it is there
    if fake.fakes_sparse:
        if not source.on_meta and source.cuda is None:
            return MAKES_SPARSE
        fake = fake.noting(SPARSE_UNKNOWN)
    if source.on_meta:
        return fake.noting(
            "the model is on the meta device, so the recorded step could not be compared with a real one"
        )
    seen = forward_names(fake.trace)
    if known == seen:
        return fake
    if source.cuda is not None:
        # The real forward runs here, so it is compared with what the fake one would run here.
        seen = forward_names(capture(replace(source, cuda=None), choices).trace)
    short = shortened(rows_of(source.sample, min(2, batches.size(source.sample))))
    if short is not None:
        # A model that runs the same operations on a few tokens needs no longer look; one that does not is given the whole samples.
        with suppress(Exception):
            if real_forward_names(source, short, choices) == seen:
                return fake
    few, real = looked_at(source, choices)
    if real == seen:
        return fake
    few, real = on_few(few, source.sample, lambda some: real_forward_names(source, some, choices, twice=True))
    if real == seen:
        # Something is built once, for each shape perhaps, and a cache of one entry now holds that of the few samples. Another capture puts the
        # batch's own back (what is made of constants is real in it), so that the first step finds it.
        return on_fakes(None)
    again = forward_names(
        capture(
            StepSource(source.model, few, source.loss_fn, views_anew=source.views_anew),
            replace(choices, micro_batches=1),
        ).trace
    )
    if real == again:
        return fake
    difference = next((f"{a} instead of {b}" for a, b in zip(real, again, strict=False) if a != b), "more or fewer")
    return f"the real forward runs other operations than the fake one ({difference})"


def _as_many_as_run(trace: Trace, samples: int, loader_batches: int) -> Trace:
    """The trace with the true number of passes: the engine runs as few parts as do, since smaller ones hold no fewer bytes and take longer."""
    asked, largest = trace.micro_batches, trace.choices.micro_batch_size
    runs = -(-samples // largest) * loader_batches if asked > 1 else 1
    if runs == asked:
        return trace
    note = (
        f"{samples * loader_batches} samples in {asked} parts come to at most {largest} at a time, "
        f"so they are run in {runs} parts: as many bytes, fewer passes"
    )
    return replace(trace, choices=replace(trace.choices, micro_batches=runs), notes=(*trace.notes, note))


def without_forced_gradients(run: Callable[[Choices], Captured], choices: Choices) -> tuple[Captured, tuple[str, ...]]:
    """A capture in which backward ends at the lowest trained parameter, where the step allows it, and the modules whose outputs that concerns.

    Only what the step shows decides: without the forced gradients it must run the same forward and give gradients to the same parameters.
    Re-entrant checkpointing, for one, gives none to a layer whose input asks for none.

    Args:
        run: captures the step as choices say.
        choices: how it is to be run.
    """
    captured = run(choices)
    if captured.forced is None:
        return captured, ()
    notes = [
        f"backward runs through what is frozen in {path}: the tensor it is handed asks for gradients though nothing below is trained"
        for path in captured.forced.inputs
    ]
    paths = tuple(captured.forced.outputs)
    if paths:
        who = f"the output of {', '.join(paths)} is made to ask for gradients though nothing below is trained"
        freed: Captured | None = None
        with (
            suppress(Exception),
            warnings.catch_warnings(),
        ):  # what a step without them fails at, or warns of, is no step of the user's
            warnings.simplefilter("ignore")
            freed = run(replace(choices, unforced=paths))
        same = freed is not None and forward_names(freed.trace) == forward_names(captured.trace)
        if freed is not None and same and freed.receiving == captured.receiving:
            captured = freed
            notes.append(
                f"{who}; this is taken back, so backward ends at the lowest trained parameter, with the same numbers"
            )
        else:
            paths = ()
            notes.append(f"{who}, and without that the step would be another: backward runs through what is frozen")
    return captured.noting(*notes), paths
