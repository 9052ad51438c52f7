"""Micro-batches that a forward tells apart: what Python reads of a batch (is any token padding?) may decide which operations run, values how large results are.

A look at one is cheap: its forward runs up to the last operation that reads values, which in most models is one of the first, on fake tensors where it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

import torch

from memfit import batches, dispatch
from memfit.batches import Batch
from memfit.capture.capture import on_fakes
from memfit.capture.captured import Captured
from memfit.capture.constants import run_recorded
from memfit.capture.isolation import with_copied_storage
from memfit.capture.real_forward import forward_for_real
from memfit.capture.source import StepSource
from memfit.step.device import device_of
from memfit.step.program import StepProgram
from memfit.techniques.choices import Choices, convert
from memfit.values.trace import Operation

# Operations that hand a value to Python.
READING: Final = frozenset({"aten._local_scalar_dense.default", "aten.equal.default"})
# Looks may run as many operations as this many forwards, ...
MOST_FORWARDS: Final = 4
# ... so many samples of a batch are looked at by themselves, ...
MOST_ROWS: Final = 8
# ... and so many micro-batches are taken for others at most.
MOST_OTHERS: Final = 3

Reading = tuple[Any, ...]


def other_samples(source: StepSource, choices: Choices, captured: Captured) -> list[Batch]:
    """Samples whose micro-batches are all alike, each like one of which forward reads other values than of the one that was captured.

    Args:
        source: the step. Its own micro-batches are looked at, and those of its other samples.
        choices: how it is run.
        captured: the step. Forward is looked at on fake tensors where that is what it was captured on, else on real ones.
    """
    number = choices.micro_batches // source.loader_batches
    trace = captured.trace
    reads = [place for place, operation in enumerate(trace.in_forward(), 1) if _reads(operation)]
    if not reads or source.on_meta:
        return []
    total = batches.size(source.sample)
    sizes = batches.micro_batch_sizes(total, number)
    others = source.other_samples(sizes[-1]) if source.other_samples is not None else ()
    if number == 1 and not others:
        return []
    looked_at = spread(number, max(2, MOST_FORWARDS * trace.forward_operations // reads[-1]))
    known: Reading | None = None  # of the micro-batch that was captured
    found: dict[Reading, Batch] = {}
    for sample in (source.sample, *(_beside(source.sample, other) for other in others)):
        running = _on_fakes if trace.source == "fake" else _for_real
        with running(replace(source, sample=sample), choices) as (program, micro_batches):
            readings = _readings(program, micro_batches, looked_at, len(reads), floats=trace.source == "fake")
        known = readings.get(number - 1) if known is None else known
        if known is None:
            return []
        for place, reading in readings.items():
            if reading != known and reading not in found and sizes[place]:
                start = sum(sizes[:place])
                found[reading] = batches.rows(sample, [start + row % sizes[place] for row in range(total)])
    return [_stored_as(source.sample, found[reading]) for reading in _few(found)]


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
    total = batches.size(sample)
    return [batches.rows(sample, [row] * total) for row in spread(total, MOST_ROWS)[:MOST_ROWS]]


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
    with forward_for_real(source, choices) as program, torch.no_grad():  # a whole micro-batch's activations may not fit
        yield program, micro_batches


def _readings(
    program: StepProgram, micro_batches: Sequence[Batch], looked_at: Sequence[int], reads: int, *, floats: bool
) -> dict[int, Reading]:
    """What forward reads of these micro-batches, the first `reads` times; those on which it fails are left out.

    Args:
        program, micro_batches, looked_at, reads: of the step.
        floats: count as well. Fake tensors have those of the batch alone; in a real forward they are losses that somebody notes, each another.
    """
    found: dict[int, Reading] = {}
    for number in looked_at:
        look = _Look(reads, floats=floats)
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

    def __init__(self, reads: int, *, floats: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[tuple[Any, ...]] = []
        self._reads, self._floats = reads, floats

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            result = run_recorded(func, list(dispatch.tensors_in((args, kwargs))), args, kwargs)
        if str(func) in READING:
            self.values.append((result,) if self._floats or not isinstance(result, float) else ())
        elif dispatch.is_sized_by_values(func, args):
            self.values.append(tuple(n for t in dispatch.tensors_in(result) for n in t.shape))
        if len(self.values) == self._reads:
            raise _Seen
        return result
