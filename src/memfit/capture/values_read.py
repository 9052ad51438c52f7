"""Micro-batches that a forward tells apart: what Python reads of a batch (is any token padding?) may decide which operations run, values how large results are.

A look at one is cheap: its forward runs up to the last operation that reads values, which in most models is one of the first, on fake tensors where it can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

import torch

from memfit import batches, dispatch
from memfit.batches import Batch
from memfit.capture.capture import on_fakes
from memfit.capture.captured import Captured
from memfit.capture.constants import run_recorded
from memfit.capture.extreme_draws import at_the_end
from memfit.capture.isolation import batch_kept, with_copied_storage
from memfit.capture.real_forward import forward_for_real
from memfit.capture.source import StepSource
from memfit.step.device import device_of
from memfit.step.program import StepProgram
from memfit.techniques.choices import Choices, convert
from memfit.values.trace import Category, Operation, Trace

# Operations that hand a value to Python.
READING: Final = frozenset({"aten._local_scalar_dense.default", "aten.equal.default"})
# Looks may run as many operations as this many forwards, ...
MOST_FORWARDS: Final = 4
# ... so many samples of a batch are looked at by themselves, ...
MOST_ROWS: Final = 8
# (fewer where the batches that are made of them, each of one row over and over, would take more than this on the sample's device)
MOST_BYTES: Final = 1 << 28
# ... and so many micro-batches are taken for others at most.
MOST_OTHERS: Final = 3
# Of a kind of micro-batch that the sample has none of, in a step; what is rarer is not planned for.
LEAST_LIKELY: Final = 1e-4

Reading = tuple[Any, ...]


def other_samples(source: StepSource, choices: Choices, captured: Captured) -> tuple[list[Batch], str]:
    """Samples whose micro-batches are all alike, each like one of which forward reads other values than of the one that was captured.

    Args:
        source: the step. Its own micro-batches are looked at, and those of its other samples; where it knows of none, what rows like its own are likely to
            make together.
        choices: how it is run.
        captured: the step. Forward is looked at on fake tensors where that is what it was captured on, else on real ones.

    Returns:
        The samples; and what the user should know of something that forward asks of the batch where all that was looked at gives one answer.
    """
    number = choices.micro_batches // source.loader_batches
    trace = captured.trace
    reading = {place: operation for place, operation in enumerate(trace.in_forward(), 1) if _reads(operation)}
    if not reading or source.on_meta:
        return [], ""
    total = batches.size(source.sample)
    sizes = batches.micro_batch_sizes(total, number)
    others = None if source.other_samples is None else source.other_samples(sizes[-1])
    if number == 1 and others is not None and not others:
        return [], ""
    most = max(2, MOST_FORWARDS * trace.forward_operations // max(reading))

    def look(sample: Batch, number: int, looked_at: Sequence[int]) -> dict[int, Reading]:
        fake = trace.source == "fake"
        running = _on_fakes if fake else _for_real
        of = replace(source, sample=sample, loader_batches=1)
        with running(of, choices.but(micro_batches=number)) as (program, micro_batches):
            return _readings(program, micro_batches, looked_at, len(reading), fake=fake)

    known: Reading | None = None  # of the micro-batch that was captured
    found: dict[Reading, tuple[Batch, int, int]] = {}  # a batch, from which of its samples on how many are meant
    for sample in (source.sample, *(_beside(source.sample, other) for other in others or ())):
        readings = look(sample, number, spread(number, most))
        known = readings.get(number - 1) if known is None else known
        if known is None:
            return [], ""
        for place, each in readings.items():
            if sizes[place]:
                found.setdefault(each, (sample, sum(sizes[:place]), sizes[place]))
    assert known is not None, "the sample was looked at"
    told = ""
    if others is None and any(isinstance(value, bool) for each in known for value in each):
        rows = _rows(source.sample)[:most]
        alone = batches.rows(source.sample, [row for row in rows for _ in range(sizes[-1])])
        readings = look(alone, len(rows), range(len(rows)))
        told = _always_the_same({*found, *readings.values()}, list(reading.values()), _made_of_the_batch(trace))
        for place in _likely(readings, known, sizes):
            found.setdefault(readings[place], (source.sample, rows[place], 1))
    found.pop(known, None)
    samples = [
        _stored_as(source.sample, batches.rows(sample, [start + row % size for row in range(total)]))
        for sample, start, size in map(found.__getitem__, _few(found))
    ]
    return samples, told


def _made_of_the_batch(trace: Trace) -> set[int]:
    """Storages that hold what forward has computed of the batch; positions and other constants are not among them."""
    found = {number for number, storage in enumerate(trace.storages) if storage.category is Category.BATCH}
    for operation in trace.in_forward():
        if not found.isdisjoint(operation.reads):
            found.update(operation.makes, operation.writes)
    return found


def asks_for_counts(trace: Trace) -> bool:
    """Whether Python reads what is made of buffers that forward writes, and of nothing else (how often it ran): by it forward may run other operations."""
    forward = list(trace.in_forward())
    written = {s for operation in forward for s in operation.writes}
    counts = {s for s in written if trace.storages[s].category is Category.BUFFER}
    for operation in forward:
        if operation.reads and counts.issuperset(operation.reads):
            if operation.name in READING:
                return True
            counts.update(operation.makes)
    return False


def _always_the_same(readings: Collection[Reading], operations: Sequence[Operation], of_batch: set[int]) -> str:
    """A note where something true or false that forward asks of the batch has one answer in all readings; empty where there is none.

    Args:
        readings, operations: what was read, and by which operations.
        of_batch: storages that hold what was made of the batch.
    """
    for values, operation in zip(zip(*readings, strict=False), operations, strict=False):
        if (
            len(set(values)) == 1
            and not of_batch.isdisjoint(operation.reads)
            and all(isinstance(value, bool) for value in values[0])
        ):
            where = operation.module or "the model"
            return (
                f"{where} asks something of the batch (whether there is padding, say) that has one answer in all of the sample: batches with another answer "
                "may run other operations and hold other bytes, and are planned for before they come if the sample has some of their rows"
            )
    return ""


def _likely(alone: Mapping[int, Reading], known: Reading, sizes: Sequence[int]) -> Iterator[int]:
    """Rows whose kind is likely to fill a micro-batch, were rows drawn by chance: of a kind are those of which forward finds the same true and the same false.

    Args:
        alone: what is read of micro-batches that have one row over and over.
        known: what is read of the captured one.
        sizes: of the step's micro-batches.
    """
    kinds = Counter(alone.values())
    for place, reading in alone.items():
        told = {type(value) for one, other in zip(reading, known, strict=False) if one != other for value in one}
        if told == {bool} and len(sizes) * (kinds[reading] / len(alone)) ** sizes[-1] >= LEAST_LIKELY:
            yield place


def _stored_as(sample: Batch, other: Batch) -> Batch:
    """The other batch in storages as large, and as shared, as those of the sample: a view of a larger batch holds all of it."""
    copied: dict[int, torch.UntypedStorage] = {}
    placed = []
    leaves, structure = batches.flattened(other)
    for leaf, like in zip(leaves, batches.flattened(sample)[0], strict=True):
        placed.append(leaf)
        if (
            isinstance(leaf, torch.Tensor)
            and leaf is not like
            and dispatch.has_storage(like)
            and leaf.shape == like.shape
        ):
            with suppress(RuntimeError):  # torch writes into no tensor of which several elements are one
                placed[-1] = with_copied_storage(like.detach(), copied).copy_(leaf)
    return batches.rebuilt(placed, structure)


def rows_alone(sample: Batch) -> list[Batch]:
    """Some samples of a batch, each over and over in one of its size."""
    return [batches.rows(sample, [row] * batches.size(sample)) for row in _rows(sample)]


def _rows(sample: Batch) -> list[int]:
    """Which of a batch's samples are looked at by themselves."""
    most = max(2, min(MOST_ROWS, MOST_BYTES // max(1, sum(leaf.nbytes for leaf in batches.leaves(sample)))))
    return spread(batches.size(sample), most)[:most]


def _reads(operation: Operation) -> bool:
    return operation.by_values or operation.name in READING


def spread(number: int, most: int) -> list[int]:
    """So many of the first numbers, evenly spaced, and the last of them; all where there are no more."""
    return list(range(number)) if number <= most else [*(number * each // most for each in range(most)), number - 1]


@contextmanager
def _on_fakes(source: StepSource, choices: Choices) -> Iterator[tuple[StepProgram, list[Batch]]]:
    with on_fakes(source, choices, device_of(source.model)) as (source, micro_batches, _):  # noqa: PLR1704 - without meta tensors
        convert(choices, source.model)
        yield StepProgram(source.model, source.loss_fn, choices=choices), micro_batches


@contextmanager
def _for_real(source: StepSource, choices: Choices) -> Iterator[tuple[StepProgram, list[Batch]]]:
    micro_batches = source.micro_batches(choices.micro_batches)
    # Without gradients: a whole micro-batch's activations may not fit.
    with batch_kept(source.sample), forward_for_real(source, choices) as program, torch.no_grad():
        yield program, micro_batches


def _readings(
    program: StepProgram, micro_batches: Sequence[Batch], looked_at: Sequence[int], reads: int, *, fake: bool
) -> dict[int, Reading]:
    """What forward reads of these micro-batches, the first `reads` times; those on which it fails are left out.

    Args:
        program, micro_batches, looked_at, reads: of the step.
        fake: it runs on fake tensors. They have floats of the batch alone, which count as well; in a real forward these are losses that somebody notes, each
            another.
    """
    found: dict[int, Reading] = {}
    for number in looked_at:
        look = _Look(reads, fake=fake)
        with suppress(Exception):
            with suppress(_Seen), look:
                program.loss(micro_batches[number])
            found[number] = tuple(look.values)
    return found


def _few(readings: Iterable[Reading]) -> list[Reading]:
    """At most so many, those of the least and the most that was read among them."""
    by_size = sorted(readings, key=lambda reading: sum(sum(map(abs, each)) for each in reading))
    return by_size if len(by_size) <= MOST_OTHERS else [by_size[0], *by_size[-1:-MOST_OTHERS:-1]]


def _beside(sample: Batch, other: Batch) -> Batch:
    """The other batch on the devices of the sample."""
    devices = iter([leaf.device for leaf in batches.leaves(sample)])
    return batches.map_tensors(lambda tensor: tensor.to(next(devices)), other)


class _Seen(BaseException):
    """Ends a forward that has read what was looked for; the user's code catches none of these."""


class _Look(dispatch.DispatchMode):
    """Notes the first values that a forward reads, and ends it with `_Seen`.

    Attributes:
        values: of each reading operation the value, or the sizes of its results.
    """

    def __init__(self, reads: int, *, fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[tuple[Any, ...]] = []
        self._reads, self._fake = reads, fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if self._fake:
                result = run_recorded(func, list(dispatch.tensors_in((args, kwargs))), args, kwargs)
            else:  # not below all modes: one of them keeps what is written
                result = at_the_end(func, args, func(*args, **kwargs))
        if str(func) in READING:
            self.values.append((result,) if self._fake or not isinstance(result, float) else ())
        elif dispatch.is_sized_by_values(func, args):
            self.values.append(tuple(n for t in dispatch.tensors_in(result) for n in t.shape))
        if len(self.values) == self._reads:
            raise _Seen
        return result
