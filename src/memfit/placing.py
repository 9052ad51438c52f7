"""Model parallelism in one process: which device has which parts of a model, that each holds no more than it may."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from types import TracebackType
from typing import Final, Self
from weakref import WeakSet

import torch
from torch import nn

from memfit.batches import Batch, LossFunction
from memfit.capture.trace_source import TraceSource
from memfit.errors import InfeasibleError, InputError
from memfit.parallel.placement import device_of_parts, placed
from memfit.parallel.placement import place as move
from memfit.pipelining.undivided import Undivided
from memfit.sharding.ways import refuse_wrapped
from memfit.step.part_calls import PartCalls, TensorMeta
from memfit.step.program import OptimizerFactory, default_optimizer
from memfit.techniques.choices import BASELINE
from memfit.units import format_bytes, parse_bytes
from memfit.values.stages import Parts
from memfit.values.trace import Category

Budgets = Mapping[str, int | str]
_PLACED: Final = WeakSet[nn.Module]()  # whose forward goes from device to device
# Of what a loss function takes on the first device: the outputs, what it keeps of them, and their gradient.
OUTPUTS_OF_A_LOSS: Final = 3


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """What one device has.

    Attributes:
        device: its name, as torch has it.
        parts: what is called there, in order: paths of modules, "blocks.0 to blocks.3" for those in between, too.
        budget_bytes: that a step may hold there.
        estimated_bytes: that a step holds there, by what the parts take by themselves with everything kept.
    """

    device: str
    parts: tuple[str, ...]
    budget_bytes: int
    estimated_bytes: int

    def __str__(self) -> str:
        return f"{self.device}: {', '.join(self.parts)}; about {format_bytes(self.estimated_bytes)} of {format_bytes(self.budget_bytes)} at the peak"


class Placement:
    """A model whose parts are on several devices of this process, until `close`; made by `place`.

    Attributes:
        stages: one for each device, in the order in which the forward comes to them.
    """

    def __init__(self, stages: Sequence[PlacedStage], until_closed: ExitStack) -> None:
        self.stages = tuple(stages)
        self._until_closed = until_closed

    def explain(self) -> str:
        """Which device has what, in words."""
        return "\n".join(map(str, self.stages))

    def __str__(self) -> str:
        """As `explain` says it."""
        return self.explain()

    def close(self) -> None:
        """The forward is the model's own again. Parameters stay where they are."""
        self._until_closed.close()

    def __enter__(self) -> Self:
        """Closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def place(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    devices: Budgets,
    optimizer: OptimizerFactory | None = default_optimizer,
) -> Placement:
    """Put the parts of a model on several devices of this process, so that a step on each holds as small a share of what it may as can be had.

    The model is then called as before, with its batch on the first device, where its outputs and the loss are; the numbers are those of one device. Everything
    is kept for backward, and one device computes at a time: where each has a process of its own, a pipeline is faster (`memfit.plan(devices=)`). Make the
    optimizer afterwards, over `model.parameters()`.

    Args:
        model: any module whose parts are called one after the other, in the mode it is to be trained in.
        sample: as for `plan`; on the model's device as it is now.
        loss_fn: as for `plan`.
        devices: of each device the bytes that a step may hold there, in the order in which the forward comes to them: {"cuda:0": "20GiB", "cuda:1": "8GiB"}.
        optimizer: as for `plan`; its state is counted where its parameters are.

    Returns:
        Which device has what; bytes are estimates.

    Raises:
        InfeasibleError: with whatever placement a device would hold more.
        InputError: there are fewer than two devices, one is not here, the model is placed already, or its parts are not called one after the other.
        BudgetError: a budget is not a number of bytes.
        CaptureError: the step cannot be captured.
    """
    refuse_wrapped(model)
    if model in _PLACED:
        raise InputError("the model is placed already: close that placement first")
    names = [_device(name) for name in devices]
    if not isinstance(devices, Mapping) or len(set(names)) < 2:
        raise InputError(
            f'devices={devices!r}: at least two are needed, each with its bytes, as in {{"cuda:0": "20GiB", "cuda:1": "8GiB"}}'
        )
    budgets = [parse_bytes(budget) for budget in devices.values()]
    if any(tensor.device.type == "meta" for tensor in (*model.parameters(), *model.buffers())):
        raise InputError("the model is on the meta device and has no values to move: load its weights first")
    found = Undivided.of(TraceSource(model, sample, loss_fn, optimizer), sample, BASELINE, None)
    batch_bytes = sum(meta.bytes for _, meta in found.calls.batch if meta is not None)
    beside = batch_bytes + (1 if loss_fn is None else OUTPUTS_OF_A_LOSS) * _output_bytes(found.calls)
    trace = found.trace
    lasting = sum(map(trace.bytes_of, (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)))
    gradients = trace.bytes_of(Category.GRADIENT) / max(lasting, 1)
    ends, held = best_ends(found.parts, beside, gradients, budgets)
    where = device_of_parts(model, found.calls, ends, names)
    paths = [call.path for call in found.calls.calls]
    stages = []
    for name, budget, size in zip(names, budgets, held, strict=True):
        stages.append(PlacedStage(str(name), _in_runs(paths, [where[path] == name for path in paths]), budget, size))
    _check(stages)
    move(model, found.calls, ends, names)
    until_closed = ExitStack()
    until_closed.enter_context(placed(model, found.calls, ends, names))
    _PLACED.add(model)
    until_closed.callback(_PLACED.discard, model)
    return Placement(stages, until_closed)


def best_ends(
    parts: Parts, beside: int, gradients: float, budgets: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the stages end with which the fullest device, by its share of what it may hold, holds least; and what each holds. Exact for these costs.

    Args:
        parts: as a chain.
        beside: bytes on the first device besides its parts: the batch, what the loss takes.
        gradients: what share of the parts' state they are.
        budgets: of each device.

    Raises:
        InputError: the chain has fewer places to cut it at.
    """
    costs = _Costs(parts, beside, gradients)
    last = len(parts.parts)
    # By end: the share of the fullest of the devices so far, and where the stages before end.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for number, budget in enumerate(budgets):
        left = len(budgets) - number - 1
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (share, ends) in best.items():
            for end, size in costs.from_(first):
                made = max(share, size / budget)
                if (end == last) == (left == 0) and parts.may_end(end) and made < after.get(end, (inf,))[0]:
                    after[end] = made, (*ends, end)
        best = after
    if last not in best:
        raise InputError(
            f"the model has {last} parts that are called one after the other, and cannot be divided among {len(budgets)} devices: name fewer of them"
        )
    _, ends = best[last]
    return ends, tuple(dict(costs.from_(first))[end] for first, end in pairwise((0, *ends)))


class _Costs:
    """Bytes of stretches of parts. What shares a tensor with an earlier part is on that one's device (`parallel/placement.py`).

    Args:
        parts, beside, gradients: as for `best_ends`.
    """

    def __init__(self, parts: Parts, beside: int, gradients: float) -> None:
        self._beside = beside
        home: dict[int, int] = {}
        for tied in parts.shared:
            for position in tied.parts:
                home[position] = min(home.get(position, position), *tied.parts)
        number = len(parts.parts)
        self._kept, self._state, self._working = [0] * number, [0] * number, [0] * number
        for position, part in enumerate(parts.parts):
            there = home.get(position, position)
            self._kept[there] += part.kept_bytes
            self._state[there] += part.state_bytes
            self._working[there] = max(self._working[there], part.working_bytes)
        for tied in parts.shared:
            self._state[min(tied.parts)] += tied.bytes
        self._gradients = [round(gradients * size) for size in self._state]
        self._given = [0, *(part.boundary_bytes for part in parts.parts[:-1])]

    def from_(self, first: int) -> Iterator[tuple[int, int]]:
        """Of each end the bytes of parts [first, end) on one device, the first one where `first` is 0.

        In backward, which comes to them from the last to the first, what a part has kept goes as its gradients come.
        """
        beside = self._given[first] if first else self._beside
        state = kept = before = most = 0
        for position in range(first, len(self._state)):
            kept += self._kept[position]
            most = max(most, kept + self._working[position] - before)
            state += self._state[position]
            before += self._gradients[position]
            # `state` has the gradients of all, of which those before the part are not there at its moment.
            yield position + 1, beside + state + most


def _check(stages: Sequence[PlacedStage]) -> None:
    fullest = max(stages, key=lambda stage: stage.estimated_bytes / stage.budget_bytes)
    if fullest.estimated_bytes <= fullest.budget_bytes:
        return
    raise InfeasibleError(
        f"with the best placement {fullest.device} would hold about {format_bytes(fullest.estimated_bytes)} and may hold {format_bytes(fullest.budget_bytes)}: "
        "allow more there, name another device, take a smaller batch, or fit the model on one of them (memfit.fit), which may recompute and offload",
        budget_bytes=fullest.budget_bytes,
        minimum_bytes=fullest.estimated_bytes,
    )


def _in_runs(paths: Sequence[str], there: Sequence[bool]) -> tuple[str, ...]:
    """The paths that are there, of neighbours the first and the last."""
    runs: list[tuple[str, str]] = []
    for (path, here), before in zip(zip(paths, there, strict=True), (False, *there), strict=False):
        if here and before:
            runs[-1] = runs[-1][0], path
        elif here:
            runs.append((path, path))
    return tuple(first if first == last else f"{first} to {last}" for first, last in runs)


def _output_bytes(calls: PartCalls) -> int:
    """Of what the last part gives."""
    return sum(leaf.bytes for leaf in calls.calls[-1].leaves if isinstance(leaf, TensorMeta))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InputError(f'{name!r} is no name of a device: "cuda:0", "cuda:1" and "cpu" are some') from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no {device} here: this process sees {torch.cuda.device_count()} GPUs")
    return device
