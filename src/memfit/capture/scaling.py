"""Capture for real at small sizes, and scale storage by storage to the size that is asked for.

Bytes, shapes and integer arguments are affine in the number of samples, so two sizes give all others; a third size checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

from memfit import batches, dispatch
from memfit.batches import Batch
from memfit.capture.calls import CallSpec, TensorSpec
from memfit.capture.capture import capture_real
from memfit.capture.captured import Captured
from memfit.capture.comparing import same_operations
from memfit.capture.index_bounds import indices_checked
from memfit.capture.real_forward import looked_at, on_few
from memfit.capture.samples import rows_of
from memfit.capture.source import StepSource
from memfit.errors import CaptureError, InputError
from memfit.step.device import device_of
from memfit.techniques.choices import Choices
from memfit.values.trace import Category, Storage, Trace

SMALL_SIZES: Final = (2, 4, 3)  # two to scale from, one to check
# As large for any number of samples.
_OF_THE_MODEL: Final = frozenset({Category.PARAMETER, Category.GRADIENT, Category.BUFFER, Category.OPTIMIZER_STATE})
# Up to this many bytes in all storages of a step, the whole batch is captured for real: exact also where sizes depend on values.
SMALL_STEP_BYTES: Final = 512 << 20


def scaled(source: StepSource, choices: Choices, *, why: str, known: Captured | None = None) -> Captured:
    """Real captures at small sizes, scaled to the size of the largest micro-batch.

    Args:
        source, choices: as in `capture`.
        why: the fake capture is not believed.
        known: the same under another draw of the random numbers: what was looked into then is not looked into again.

    Raises:
        CaptureError: the sizes do not show the same operations, so nothing can be scaled.
    """
    total = batches.size(source.sample)
    target = batches.micro_batch_sizes(total, choices.micro_batches // source.loader_batches)[-1]
    if known.trace.source == "real" if known is not None else _is_small(source, choices, target, why):
        return capture_real(source, choices).noting(f"captured for real: {why}")
    passes = min(choices.micro_batches, 2)

    def captured_at(size: int) -> Captured:
        small = replace(source, sample=rows_of(source.sample, size * passes), loader_batches=1)
        try:
            with indices_checked(device_of(source.model)):
                return capture_real(small, replace(choices, micro_batches=passes))
        except InputError:
            raise
        except Exception as error:  # it has run on two
            raise CaptureError(
                f"this model runs on the whole batch but not on {size * passes} samples of it, so its step cannot be predicted from a small one ({why})"
            ) from error

    first, second, *rest = map(captured_at, SMALL_SIZES[: 3 if known is None else 2])
    third = rest[0] if rest else first
    if not (same_operations(first.trace, second.trace) and same_operations(first.trace, third.trace)):
        if _held_bytes(first.trace) / SMALL_SIZES[0] * target <= SMALL_STEP_BYTES:
            # Many operations make much that is gone at once: where nothing can be scaled, what the step holds counts.
            return capture_real(source, choices).noting(f"captured for real: {why}")
        raise CaptureError(
            f"this model runs other operations for {SMALL_SIZES[0]} samples than for {SMALL_SIZES[1]}, so its step cannot be predicted ({why})"
        )
    notes = [f"captured for real at {SMALL_SIZES[0]} and {SMALL_SIZES[1]} samples and scaled: {why}"]
    storages, bent = _scaled_storages(first.trace, second.trace, third.trace, source.sample, target)
    if bent:
        notes.append(
            f"{bent} storages are not affine in the number of samples; the rehearsal tells how far that matters"
        )
    calls: dict[str, CallSpec] = {}
    keys: dict[str, str] = {}
    for key, other in _paired_keys(first.trace, second.trace):
        if key not in keys:
            keys[key] = f"{key} x{target}"
            calls[keys[key]] = _scaled_call(first.calls[key], second.calls[other], target)
    trace = replace(
        first.trace,
        operations=tuple(
            replace(op, key=keys[op.key], shape=calls[keys[op.key]].shape) for op in first.trace.operations
        ),
        storages=storages,
        choices=replace(choices, micro_batch_size=target),
        source="scaled",
        signature=batches.signature(source.sample),
        notes=(*first.trace.notes, *notes),
    )
    return Captured(
        trace,
        calls,
        receiving=first.receiving,
        forced=first.forced,
        repeats=first.repeats,
        counts=first.counts,
        before=first.before,
        met_bytes=first.met_bytes,
    )


def _is_small(source: StepSource, choices: Choices, target: int, why: str) -> bool:
    """Whether the whole batch may be captured for real: a step of two samples tells how many bytes it takes.

    Raises:
        CaptureError: it is not small, and the model runs on nothing smaller.
    """
    few, _ = looked_at(source, choices)
    alone = replace(choices, micro_batches=1)

    def captured(some: Batch) -> Captured:
        with indices_checked(device_of(source.model)):
            return capture_real(StepSource(source.model, some, source.loss_fn), alone)

    few, two = on_few(few, source.sample, captured)
    step_bytes = sum(s.bytes for s in _growing(two.trace)) / batches.size(few) * target
    small = step_bytes <= SMALL_STEP_BYTES or target <= max(SMALL_SIZES)
    if few is source.sample and not small:
        total = batches.size(source.sample)
        raise CaptureError(
            f"this model runs on the whole batch but not on {min(2, total)} samples of it, so its step cannot be predicted from a small one ({why})"
        )
    return small


def _growing(trace: Trace) -> list[Storage]:
    """What there is more of in a larger batch."""
    return [s for s in trace.storages if s.category not in _OF_THE_MODEL]


def _held_bytes(trace: Trace) -> int:
    """The most bytes of growing storages that are alive at one moment, as if all that autograd saves were kept to the end."""
    saved = {trace.storages[save.storage] for save in trace.saves}
    changes = [0] * (len(trace.events) + 2)
    for storage in _growing(trace):
        changes[max(storage.birth, 0)] += storage.bytes
        if storage not in saved:
            changes[storage.death + 1] -= storage.bytes
    return max(accumulate(changes))


def _scaled_storages(
    first: Trace, second: Trace, third: Trace, sample: Batch, target: int
) -> tuple[tuple[Storage, ...], int]:
    """The storages of a step of `target` samples, from those of `SMALL_SIZES`; and how many of them the third size does not confirm."""
    small, big, check = SMALL_SIZES

    def line(a: int, b: int, at: int) -> int:
        value = a + (b - a) * (at - small) / (big - small)
        return max(0, -int(-value // 1))

    storages = []
    bent = 0
    batch_bytes = sum(s.nbytes() for s in dispatch.storages_of(batches.leaves(sample)).values())
    batch_seen = sum(s.bytes for s in first.storages if s.category == "batch") or 1
    for a, b, c in zip(first.storages, second.storages, third.storages, strict=True):
        if a.category == "batch":
            storages.append(replace(a, bytes=round(batch_bytes * a.bytes / batch_seen)))
            continue
        bent += abs(line(a.bytes, b.bytes, check) - c.bytes) > 64
        storages.append(replace(a, bytes=line(a.bytes, b.bytes, target)))
    return tuple(storages), bent


def _paired_keys(a: Trace, b: Trace) -> list[tuple[str, str]]:
    return list(dict.fromkeys((x.key, y.key) for x, y in zip(a.operations, b.operations, strict=True)))


def _scaled_call(a: CallSpec, b: CallSpec, target: int) -> CallSpec:
    small, big, _ = SMALL_SIZES

    def at(x: Any, y: Any) -> Any:
        if isinstance(x, TensorSpec) and isinstance(y, TensorSpec):
            return TensorSpec(
                at(x.shape, y.shape),
                at(x.stride, y.stride),
                at(x.offset, y.offset),
                x.dtype,
                at(x.storage_bytes, y.storage_bytes),
                x.place,
                x.device,
                x.conjugated,
            )
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)) and len(x) == len(y):
            return type(x)(at(p, q) for p, q in zip(x, y, strict=True))
        if type(x) is int and type(y) is int and x != y:
            return round(x + (y - x) * (target - small) / (big - small))
        return x

    kwargs = {k: at(v, b.kwargs.get(k)) for k, v in a.kwargs.items()}
    made: Sequence[int] = at(a.made_bytes, b.made_bytes)
    return CallSpec(a.func, at(a.args, b.args), kwargs, tuple(made), at(a.layouts, b.layouts), a.written)
