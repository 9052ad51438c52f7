"""Stretches of a model's parts that are alike, as those of repeated blocks are: while a cut is searched, what one takes stands for all that are alike.

The stages of the cut that is taken are captured themselves, so where two stretches are held to be alike and are not, that costs time and no byte.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

from torch import nn

from memfit.step.part_calls import PartCalls
from memfit.values.trace import Operation, Trace

Stretch = tuple[int, int]  # of parts: the first of a stage, and the first after it


class AlikeStretches:
    """Tells stretches of one model's parts that are alike by their descriptions.

    Args:
        trace: of the undivided model for one micro-batch.
        ends: of each part, the forward operation before which it ends.
        calls: of the parts.
        model: with all of its parameters.
        counted: name of the leaf of the batch that tells what a micro-batch counts for.
    """

    def __init__(self, trace: Trace, ends: Sequence[int], calls: PartCalls, model: nn.Module, counted: str) -> None:
        self._calls, self._counted = calls, counted
        self._parameters = {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in model.named_parameters()}
        self._model = model
        kinds: dict[Hashable, int] = {}
        self._parts = [
            kinds.setdefault(_operations_of(trace, call.path, range(*bounds)), len(kinds))
            for call, bounds in zip(calls.calls, pairwise((0, *ends)), strict=True)
        ]

    def description(self, first: int, end: int) -> Hashable:
        """What two stretches have in common that take the same as stages: operations, what they read of the batch, parameters, messages."""
        calls, number = self._calls, len(self._parts)
        received = calls.crossing(first) if first else ()
        sent = () if end == number else calls.crossing(end)
        passed_on = {label: place for place, label in enumerate(received)}
        return (
            *(first == 0, end == number, tuple(self._parts[first:end])),
            *(calls.leaves_read(first, end, self._counted), tuple(map(calls.meta, received))),
            tuple((passed_on.get(label, (label.call - first, label.leaf)), calls.meta(label)) for label in sent),
            tuple(self._parameters[name] for name in calls.parameters(self._model, first, end)),
        )


def _operations_of(trace: Trace, path: str, numbers: range) -> Hashable:
    """Of a part, and of what runs before it: each operation with what it reads, by its place in them and not by its number in the trace."""
    made: dict[int, int] = {}
    given: dict[int, int] = {}

    def place(storage: int) -> Hashable:
        if storage in made:
            return made[storage]
        known = trace.storages[storage]
        return given.setdefault(storage, len(given)), known.bytes, known.category

    rows = []
    for number in numbers:
        operation = trace.operations[number]
        rows.append((*_looks(operation, path), tuple(map(place, operation.reads)), tuple(map(place, operation.writes))))
        for storage in operation.makes:
            made[storage] = len(made)
    return tuple(rows)


def _looks(operation: Operation, path: str) -> Sequence[Hashable]:
    inside = f"{operation.module}.".startswith(f"{path}.")
    module = operation.module[len(path) :] if inside else f"/{operation.module}"
    return operation.name, operation.key, module, operation.random, operation.wanted, operation.outputs
