"""Check a fake capture against the real model, and capture for real at a small size where they differ, scaled up storage by storage.

Python code can tell fake tensors from real ones and take another way (one-hot's range check, sliced assignment, masks that are skipped when full), so a
fake capture is believed only after the real forward has shown the same operations on a few samples. Otherwise two small real captures are taken: bytes,
shapes and integer arguments are affine in the number of samples, so two sizes give all others; a third size checks it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit import batches, dispatch
from memfit.batches import Batch, LossFunction
from memfit.capture.capture import Captured, capture, capture_real
from memfit.capture.recorder import CallSpec, Layouts, TensorSpec
from memfit.capture.standins import lent
from memfit.errors import CaptureError
from memfit.step.generators import forked_generators
from memfit.step.program import OptimizerFactory, StepProgram
from memfit.techniques.choices import BASELINE, Choices
from memfit.values.trace import Trace

T = TypeVar("T")
SMALL_SIZES: Final = (2, 4, 3)  # two to scale from, one to check
# Up to this many bytes in all storages of a step, the whole batch is captured for real: exact also where sizes depend on values.
SMALL_STEP_BYTES: Final = 512 << 20
NOT_AS_STREAMED: Final = (
    "the step run plainly was captured on real tensors, since fake ones show other operations; with layers streamed it was captured on fake ones all the same, "
    "so what it holds is not known exactly; a rehearsal measures it"
)
OTHER_DRAWS: Final = 5  # of the random numbers are captured as well where they may decide sizes


def rows_of(sample: Batch, count: int) -> Batch:
    """A few samples that show the batch's variety: those with the most and the fewest nonzero integers come first."""
    total = batches.size(sample)
    order = list(range(total))
    for leaf in batches.leaves(sample):
        if leaf.dim() > 1 and leaf.shape[0] == total and not leaf.is_floating_point() and leaf.device.type != "meta":
            filled = (leaf.reshape(total, -1) != 0).sum(1).tolist()
            by_filling = sorted(range(total), key=lambda i: filled[i])
            if filled[by_filling[0]] != filled[by_filling[-1]]:
                order = [by_filling[0], by_filling[-1], *by_filling[1:-1]]
                break
    chosen = torch.tensor(sorted(order[:count]))
    return batches.map_tensors(
        lambda t: t.index_select(0, chosen.to(t.device)) if t.dim() and t.shape[0] == total else t, sample
    )


SHORT_TOKENS: Final = 16


def shortened(sample: Batch) -> Batch | None:
    """The samples cut to a few tokens, where every tensor with a second dimension is of integers and equally long; None elsewhere."""
    total = batches.size(sample)
    wide = [t for t in batches.leaves(sample) if t.dim() > 1 and t.shape[0] == total]
    lengths = {int(t.shape[1]) for t in wide}
    if len(lengths) != 1 or any(t.is_floating_point() or t.dim() != 2 for t in wide):
        return None
    if lengths.pop() < 4 * SHORT_TOKENS:
        return None
    return batches.map_tensors(
        lambda t: t[:, :SHORT_TOKENS].contiguous() if t.dim() == 2 and t.shape[0] == total else t, sample
    )


class _Names(TorchDispatchMode):
    """Only notes which operations forward runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if dispatch.is_operation(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def real_forward_names(
    model: nn.Module, sample: Batch, loss_fn: LossFunction | None, choices: Choices = BASELINE, *, twice: bool = False
) -> list[str]:
    """Operations of a real forward and loss (the second one, for models that build things once); nothing of the model is changed."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()

    names = _Names()
    program = StepProgram(model, loss_fn, choices=choices)
    with forked_generators(), lent(model, copied):
        for _ in range(2 if twice else 1):
            names.names.clear()
            with names:
                program.loss(sample)
    return names.names


def looked_at(
    model: nn.Module, sample: Batch, loss_fn: LossFunction | None, choices: Choices = BASELINE
) -> tuple[Batch, list[str]]:
    """Two samples and the operations of a real forward on them; the whole batch where the model does not run on two (a table made for its size)."""
    few = sample if batches.size(sample) <= 2 else rows_of(sample, 2)
    return _on_few(few, sample, lambda some: real_forward_names(model, some, loss_fn, choices))


def _on_few(few: Batch, sample: Batch, look: Callable[[Batch], T]) -> tuple[Batch, T]:
    """What a look at few samples gives, or one at all where the model does not run on few; asked at each look, as a branch may go another way each time."""
    try:
        return few, look(few)
    except Exception:
        if few is sample:
            raise
    return sample, look(sample)


def forward_names(trace: Trace) -> list[str]:
    """Operations of a captured forward and loss."""
    return [trace.operations[e].name for e in trace.events[: trace.forward_events] if e >= 0]


def scaled(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    *,
    clip_norm: float | None,
    choices: Choices,
    why: str,
    known: Captured | None = None,
    loader_batches: int = 1,
) -> Captured:
    """Real captures at small sizes, scaled to the size of the largest micro-batch.

    Args:
        model, sample, loss_fn, optimizer, clip_norm, choices, loader_batches: as in `capture`.
        why: the fake capture is not believed.
        known: the same under another draw of the random numbers: what was looked into then is not looked into again.

    Raises:
        CaptureError: the sizes do not show the same operations, so nothing can be scaled.
    """
    total = batches.size(sample)
    target = batches.micro_batch_sizes(total, choices.micro_batches // loader_batches)[-1]
    whole = target <= max(SMALL_SIZES)
    if known is not None:
        whole = known.trace.source == "real"
    else:
        few, _ = looked_at(model, sample, loss_fn, choices)
        alone = replace(choices, micro_batches=1)
        few, two = _on_few(few, sample, lambda some: capture_real(model, some, loss_fn, None, choices=alone))
        step_bytes = sum(s.bytes for s in two.trace.storages if s.category != "parameter") / batches.size(few) * target
        whole = whole or step_bytes <= SMALL_STEP_BYTES
        if few is sample and not whole:
            raise CaptureError(
                f"this model runs on the whole batch but not on {min(2, total)} samples of it, so its step cannot be predicted from a small one ({why})"
            )
    if whole:
        one = capture_real(
            model, sample, loss_fn, optimizer, clip_norm=clip_norm, choices=choices, loader_batches=loader_batches
        )
        return replace(one, trace=replace(one.trace, notes=(*one.trace.notes, f"captured for real: {why}")))
    passes = min(choices.micro_batches, 2)

    def captured_at(size: int) -> Captured:
        small_choices = replace(choices, micro_batches=passes)
        try:
            return capture_real(
                model, rows_of(sample, size * passes), loss_fn, optimizer, clip_norm=clip_norm, choices=small_choices
            )
        except Exception as error:  # it has run on two
            raise CaptureError(
                f"this model runs on the whole batch but not on {size * passes} samples of it, so its step cannot be predicted from a small one ({why})"
            ) from error

    first, second, *rest = map(captured_at, SMALL_SIZES[: 3 if known is None else 2])
    third = rest[0] if rest else first
    if not (_same_stream(first.trace, second.trace) and _same_stream(first.trace, third.trace)):
        raise CaptureError(
            f"this model runs other operations for {SMALL_SIZES[0]} samples than for {SMALL_SIZES[1]}, so its step cannot be predicted ({why})"
        )
    notes = [f"captured for real at {SMALL_SIZES[0]} and {SMALL_SIZES[1]} samples and scaled: {why}"]
    small, big, check = SMALL_SIZES

    def line(a: int, b: int, at: int) -> int:
        value = a + (b - a) * (at - small) / (big - small)
        return max(0, -int(-value // 1))

    storages = []
    bent = 0
    batch_bytes = sum(s.nbytes() for s in dispatch.storages_of(batches.leaves(sample)).values())
    batch_seen = sum(s.bytes for s in first.trace.storages if s.category == "batch") or 1
    for a, b, c in zip(first.trace.storages, second.trace.storages, third.trace.storages, strict=True):
        if a.category == "batch":
            storages.append(replace(a, bytes=round(batch_bytes * a.bytes / batch_seen)))
            continue
        bent += abs(line(a.bytes, b.bytes, check) - c.bytes) > 64
        storages.append(replace(a, bytes=line(a.bytes, b.bytes, target)))
    if bent:
        notes.append(
            f"{bent} storages are not affine in the number of samples; the rehearsal tells how far that matters"
        )
    calls: dict[str, CallSpec] = {}
    keys: dict[str, str] = {}
    for key, other in _paired_keys(first.trace, second.trace):
        if key not in keys:
            keys[key] = f"{key} x{target}"
            calls[keys[key]] = _scaled_call(first.calls[key], second.calls[other], small, big, target)
    trace = replace(
        first.trace,
        operations=tuple(replace(op, key=keys[op.key]) for op in first.trace.operations),
        storages=tuple(storages),
        choices=replace(choices, micro_batch_size=target),
        source="scaled",
        signature=batches.signature(sample),
        notes=(*first.trace.notes, *notes),
    )
    return Captured(trace, calls, receiving=first.receiving, forced=first.forced)


def _same_stream(a: Trace, b: Trace) -> bool:
    return (
        a.events == b.events
        and len(a.storages) == len(b.storages)
        and [o.name for o in a.operations] == [o.name for o in b.operations]
    )


def _paired_keys(a: Trace, b: Trace) -> list[tuple[str, str]]:
    return list(dict.fromkeys((x.key, y.key) for x, y in zip(a.operations, b.operations, strict=True)))


def _scaled_call(a: CallSpec, b: CallSpec, small: int, big: int, target: int) -> CallSpec:
    def at(x: Any, y: Any) -> Any:
        if isinstance(x, TensorSpec) and isinstance(y, TensorSpec):
            return TensorSpec(
                at(x.shape, y.shape),
                at(x.stride, y.stride),
                at(x.offset, y.offset),
                x.dtype,
                at(x.storage_bytes, y.storage_bytes),
                x.place,
            )
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)) and len(x) == len(y):
            return type(x)(at(p, q) for p, q in zip(x, y, strict=True))
        if type(x) is int and type(y) is int and x != y:
            return round(x + (y - x) * (target - small) / (big - small))
        return x

    kwargs = {k: at(v, b.kwargs.get(k)) for k, v in a.kwargs.items()}
    made: Sequence[int] = at(a.made_bytes, b.made_bytes)
    return CallSpec(a.func, at(a.args, b.args), kwargs, tuple(made), at(a.layouts, b.layouts), a.written)


def refused_by_torch(
    model: nn.Module, sample: Batch, loss_fn: LossFunction | None, choices: Choices = BASELINE
) -> None:
    """Run a few samples plainly, so that a step torch refuses is refused by torch, with its own words and the user's traceback.

    Saved-tensor hooks switch autograd's check for writes off; this one run has none.
    """

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()

    few, _ = looked_at(model, sample, loss_fn, choices)
    with forked_generators(), lent(model, copied):
        loss = StepProgram(model, loss_fn, choices=choices).loss(few)
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def _confirmed(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    choices: Choices,
    on_fakes: Callable[[Captured | None], Captured],
    believed: Captured | None,
) -> Captured | str:
    """A fake capture whose operations the real model shows too, or why there is none; `on_fakes(after)` captures."""
    on_meta = any(p.device.type == "meta" for p in model.parameters())
    known = forward_names(believed.trace) if believed is not None and believed.trace.source == "fake" else None
    try:
        fake = on_fakes(believed if known is not None else None)
        if known is not None and known != forward_names(fake.trace):
            fake = on_fakes(None)  # what is built once for each shape was recorded, perhaps: this time it is there
    except CaptureError as error:
        if on_meta:
            raise
        return str(error)
    if on_meta:
        note = "the model is on the meta device: the capture could not be checked against a real run"
        return replace(fake, trace=replace(fake.trace, notes=(*fake.trace.notes, note)))
    seen = forward_names(fake.trace)
    if known == seen:
        return fake
    short = shortened(rows_of(sample, min(2, batches.size(sample))))
    if short is not None:
        # A model that runs the same operations on a few tokens needs no longer look; one that does not is given the whole samples.
        with suppress(Exception):
            if real_forward_names(model, short, loss_fn, choices) == seen:
                return fake
    few, real = looked_at(model, sample, loss_fn, choices)
    if real == seen:
        return fake
    few, real = _on_few(few, sample, lambda some: real_forward_names(model, some, loss_fn, choices, twice=True))
    if real == seen:
        # Something is built once, for each shape perhaps, and a cache of one entry now holds that of the few samples. Another capture puts the
        # batch's own back (what is made of constants is real in it), so that the first step finds it.
        return on_fakes(None)
    again = forward_names(capture(model, few, loss_fn, None, choices=replace(choices, micro_batches=1)).trace)
    if real == again:
        return fake
    difference = next((f"{a} instead of {b}" for a, b in zip(real, again, strict=False) if a != b), "more or fewer")
    return f"the real forward runs other operations than the fake one ({difference})"


def trustworthy(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    *,
    clip_norm: float | None = None,
    choices: Choices = BASELINE,
    believed: Captured | None = None,
    layouts: Mapping[str, Layouts] | None = None,
    others: Iterable[Captured] = (),
    loader_batches: int = 1,
) -> Captured:
    """A capture that the real model has confirmed, by whichever way it takes.

    Args:
        model, sample, loss_fn, optimizer, clip_norm, choices, layouts, loader_batches: as in `capture`.
        believed: an earlier capture of this model whose forward was confirmed; the same operations need no second confirmation.
        others: earlier captures of this step run in other ways; a forward that was steady in one of them is not drawn for again.

    Raises:
        CaptureError: neither way works.
        Exception: the user's own, when the step itself fails.
    """
    step = (model, sample, loss_fn, optimizer)
    how: dict[str, Any] = {"clip_norm": clip_norm, "choices": choices, "loader_batches": loader_batches}

    def on_fakes(after: Captured | None) -> Captured:
        return capture(*step, **how, after=after, layouts=layouts)

    def for_real(why: str, known: Captured | None = None) -> Captured:
        return scaled(*step, **how, why=why, known=known)

    if choices.streamed:
        # Its operations are those of the plain step, which has been confirmed before it is streamed; only their order is another.
        captured = on_fakes(None)
        if all(other.trace.source == "fake" for other in others):
            return captured
        return replace(captured, trace=replace(captured.trace, notes=(*captured.trace.notes, NOT_AS_STREAMED)))
    found = _confirmed(model, sample, loss_fn, choices, on_fakes, believed)
    captured = for_real(found) if isinstance(found, str) else found
    again = partial(for_real, found, captured) if isinstance(found, str) else partial(on_fakes, None)
    captured = with_other_draws(captured, again, others)
    if captured.overwritten and not any(p.device.type == "meta" for p in model.parameters()):
        refused_by_torch(model, sample, loss_fn, choices)
    return replace(captured, trace=_in_the_parts_that_run(captured.trace, batches.size(sample), loader_batches))


def with_other_draws(captured: Captured, again: Callable[[], Captured], others: Iterable[Captured] = ()) -> Captured:
    """The capture with the sizes that other random numbers give, where numbers drawn in forward may decide any; and what the user should know of it.

    Args:
        captured: the step under one draw.
        again: captures it in the same way, under the present state of the generators.
        others: captures of the same step run in other ways.
    """
    trace = captured.trace
    told: dict[str, str] = {}
    for operation in trace.operations:
        if operation.by_values:
            told.setdefault(operation.module, operation.name)
    notes: list[str] = []
    if told:
        module, name = next(iter(told.items()))
        more = f" and in {len(told) - 1} more modules" if len(told) > 1 else ""
        notes.append(
            f"values decide how large some results are ({name} in {module or 'the model'}{more}): bytes are those of this sample and these parameters, and "
            "other batches or later steps may hold more"
        )
    drawn: list[tuple[int, ...]] = []
    departing = 0
    if _draws_before_it_looks(trace) and not any(c.steady and _same_forward(c.trace, trace) for c in others):
        own = tuple(s.bytes for s in trace.storages)
        for seed in range(1, OTHER_DRAWS + 1):
            with forked_generators():
                torch.manual_seed(seed)
                try:
                    other = again().trace
                except Exception:  # noqa: BLE001 - what this draw runs cannot be captured, or is the user's own error: no step that was planned for
                    departing += 1
                    continue
            sizes = tuple(s.bytes for s in other.storages)
            if not _same_stream(trace, other):
                departing += 1
            elif sizes != own:
                drawn.append(sizes)
            else:
                break  # what is drawn decides values only
    if departing:
        notes.append(
            f"random numbers, drawn anew in each step, decide which operations run: {departing} of {OTHER_DRAWS} other draws ran others than are planned for. "
            "Such a step is kept plain from where it departs"
        )
    trace = replace(trace, drawn_bytes=tuple(drawn), notes=(*trace.notes, *notes))
    return replace(captured, trace=trace, steady=not drawn and not departing)


def _same_forward(one: Trace, other: Trace) -> bool:
    """Whether two traces run the same forward operations, and make as many bytes in each."""

    def made(trace: Trace) -> list[tuple[str, bool, tuple[int, ...]]]:
        forward = (trace.operations[e] for e in trace.events[: trace.forward_events] if e >= 0)
        return [(o.name, o.random, tuple(trace.storages[s].bytes for s in o.makes)) for o in forward]

    return made(one) == made(other)


def _draws_before_it_looks(trace: Trace) -> bool:
    """Whether forward draws random numbers before values decide sizes, or are read by Python, which may decide anything by them."""
    drawn = False
    for operation in (trace.operations[e] for e in trace.events[: trace.forward_events] if e >= 0):
        if drawn and (operation.by_values or operation.name == "aten._local_scalar_dense.default"):
            return True
        drawn = drawn or operation.random
    return False


def _in_the_parts_that_run(trace: Trace, samples: int, loader_batches: int) -> Trace:
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
    return replace(captured, trace=replace(captured.trace, notes=(*captured.trace.notes, *notes))), paths
