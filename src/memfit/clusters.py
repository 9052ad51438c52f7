"""The step of a model with many repeated blocks on many devices, from captures of it with a few of them: for shapes and clusters not at hand.

A step of 126 blocks on 4,096 devices can be captured like any other, on fake tensors under the fake process group, but takes its time. Blocks that are alike do
the same, so bytes at corresponding moments grow by the same number with each block: the peak of each *section* of the step (forward, the beginning of backward,
all of it, its end, clipping and the update) is a straight line over the number of blocks (over every second number, where every second block is treated
alike). Within backward bytes change from block to block by what a block's
activations and gradients take, a straight line as well, so its highest moment is at one of its ends. Each line is laid through three captures and has to go
through all of them, else one more is captured: then the bytes are those of the whole model, and `tests/test_clusters.py` compares them with a capture of
it. Where no line goes through three (buckets of data parallelism), the prediction says that it is not exact. So it does of ZeRO 1, which deals out whole
parameters, the largest first: who has most of a few blocks does not tell how many of all of them it gets. Its optimizer state is left out of the lines, and
added as what the fullest rank is dealt of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from torch import nn

from memfit.batches import Batch, LossFunction, size
from memfit.capture.trace_source import TraceSource, machine_of
from memfit.errors import CaptureError, InputError
from memfit.hardware.machine_file import Devices, named_devices
from memfit.planner.by_hand import every_block, every_block_but_products
from memfit.planner.overlap import overlapped
from memfit.planner.solver import Solver
from memfit.planner.timeline import Recomputations, Timeline
from memfit.progress import Progress
from memfit.sharding.roles import fullest, most_elements
from memfit.step.program import OptimizerFactory, default_optimizer
from memfit.techniques.choices import BASELINE
from memfit.techniques.layer_streaming.blocks import repeated_blocks
from memfit.techniques.sharding import WAYS, setting_of
from memfit.techniques.technique import listed
from memfit.values.trace import Category, Trace

FEWEST, CAPTURES = 3, 5  # blocks in the first capture; captures at most, until the last three are on one line
POINTS: Final = 3
# What is recomputed, each with the number of blocks after which it repeats.
RECOMPUTED: Final = {"none": 1, "selective": 1, "alternate": 2, "blocks": 1}
PRECISIONS: Final = ("full", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class ClusterPrediction:
    """A step on one of many devices.

    Attributes:
        ranks: devices.
        blocks: repeated blocks of the model.
        way: how the step is shared out: "data", "zero1", "zero2" or "zero3".
        recompute: as asked for.
        micro_batches: in which each device runs its batch.
        peak_bytes: largest number of bytes held at once on the fullest device.
        parameter_bytes, gradient_bytes, optimizer_bytes: of these, of parameters and buffers, gradients and optimizer state at the end of backward.
        step_seconds: with no collective beside computing.
        overlapped_seconds: with collectives beside computing (`memfit.planner.overlap`).
        sending_seconds: that the collectives take.
        seconds_are: "estimated" from a data sheet, or "measured" operation by operation; those of collectives are always estimated.
        samples: of all devices in a step.
        exact: bytes are those of the whole model's trace; False where its blocks do not add up alike.
    """

    ranks: int
    blocks: int
    way: str
    recompute: str
    micro_batches: int
    peak_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    step_seconds: float
    overlapped_seconds: float
    sending_seconds: float
    seconds_are: str
    samples: int
    exact: bool

    @property
    def state_bytes(self) -> int:
        """What no plan can drop: of parameters, buffers, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def predict_ways(
    ways: Sequence[str], predict: Callable[[str], tuple[ClusterPrediction, ...]]
) -> tuple[tuple[ClusterPrediction, ...], tuple[str, ...]]:
    """The predictions of each way to share a step out that the model allows, and why it does not allow the others.

    Args:
        ways: as for `predict_cluster`.
        predict: `predict_cluster` for one of them.

    Raises:
        CaptureError, InputError: as `predict` does of the first way, where it does of every one.
    """
    found: list[ClusterPrediction] = []
    refused: dict[str, CaptureError | InputError] = {}
    for way in ways:
        try:
            found += predict(way)
        except (CaptureError, InputError) as error:
            refused[way] = error
    if not found:
        raise next(iter(refused.values()))
    return tuple(found), tuple(f"{way}: {error}" for way, error in refused.items())


def predict_cluster(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    *,
    devices: Devices,
    optimizer: OptimizerFactory | None = default_optimizer,
    way: str = "zero3",
    recompute: Sequence[str] = ("none", "blocks"),
    micro_batches: int = 1,
    precision: str = "full",
    clip_norm: float | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> tuple[ClusterPrediction, ...]:
    """Predict bytes and seconds of a step on many devices, from captures of a few of the model's blocks. Nothing is trained; it may be on the meta device.

    Args:
        model: with repeated blocks in a `ModuleList` or `Sequential`; left as it is.
        sample: the batch of one device.
        loss_fn, optimizer, clip_norm: as for `memfit.plan`.
        devices: as for `memfit.plan`: "64x8xh100", a machine file.
        way: "data", "zero1", "zero2" or "zero3".
        recompute: one or more of "none", "blocks" (torch's checkpoint around every block), "alternate" (around every second one) and "selective" (around every
            block, but attention and every second product of matrices, the first among them, are kept; torchtitan's selective activation checkpointing by
            operation). There is a prediction of each.
        micro_batches: equal parts in which the sample is run; gradients are synchronised once a step, in the last one.
        precision: "bf16" or "fp16" for autocast.
        device: as for `memfit.plan`; None where `devices` names one of the table of machines, or the model's own.
        progress: called with what is being done.

    Raises:
        InputError: the devices are not alike or only one, the model has no such blocks, the sample is not so many equal parts, or an argument is none of these
            words.
        CaptureError: the step cannot be captured.
    """
    asked = [
        ("way", way, WAYS),
        ("precision", precision, PRECISIONS),
        *(("recompute", r, RECOMPUTED) for r in recompute),
    ]
    for name, value, known in asked:
        if value not in known:
            raise InputError(f"{name}={value!r}: there is {listed(known)}")
    here = machine_of(model, device)
    topology = named_devices(devices, here)
    ranks = len(topology.devices)
    if ranks < 2:
        raise InputError("devices names one device, and a step is shared out among two or more: name several")
    if not topology.alike:
        kinds = listed(dict.fromkeys(machine.name for machine in topology.devices))
        raise InputError(
            f"a step is shared out in equal parts, and these devices are not alike ({kinds}): name devices of one kind, or plan for all of them "
            "with a pipeline, without few blocks"
        )
    device = device if topology.devices[0].name == here.name else topology.devices[0].name
    samples = size(sample)
    if micro_batches < 1 or samples % micro_batches:
        raise InputError(
            f"micro_batches={micro_batches}: the sample of one device has {samples}, which are divided into equal parts: give a number that divides them"
        )
    divided = {"micro_batch_size": samples // micro_batches, "weights": "samples"} if micro_batches > 1 else {}
    total = len(_blocks_of(model))
    period = max(RECOMPUTED[each] for each in recompute)
    steps: list[tuple[_Step, ...]] = []
    head = 0
    for count in _counts(total, period):
        if len(steps) >= POINTS and all(_straight(each[-POINTS:]) for each in zip(*steps, strict=True)):
            break
        with shortened(model, count):
            setting = setting_of(way, ranks, fullest(model, setting_of(way, ranks)))
            source = TraceSource(model, sample, loss_fn, optimizer, clip_norm, device, progress, network=topology)
            choices = BASELINE.but(sharding=setting, precision=precision, micro_batches=micro_batches, **divided)
            trace = source.trace_of(choices)
            head = head or (trace.pass_events - trace.forward_events) // 2
            elements = most_elements(model, ranks) if way == "zero1" else 0
            steps.append(tuple(_step(trace, count, head, each, elements) for each in recompute))
    elements = most_elements(model, ranks) if way == "zero1" else 0
    found = []
    for n, each in enumerate(recompute):
        last = [step[n] for step in steps[-POINTS:]]
        figures = _extended(last, total, elements)
        (parameters, gradients, state), (serial, beside, sending) = figures.states, figures.seconds
        exact = _straight(last) and (way != "zero1" or len(last) == 1)
        found.append(
            ClusterPrediction(
                ranks, total, way, each, micro_batches, max(figures.peaks), parameters, gradients, state, serial, beside,
                sending, figures.seconds_are, samples * ranks, exact,
            )
        )  # fmt: skip
    return tuple(found)


def fastest(found: Sequence[ClusterPrediction], budget_bytes: int) -> ClusterPrediction | None:
    """Of the steps that fit into so many bytes of each device, the one that takes least time; None where none does."""
    fitting = [each for each in found if each.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda each: each.step_seconds, default=None)


def _counts(total: int, period: int) -> range:
    """Numbers of blocks to capture, one after the other; all of a model that has no more than the last of them."""
    first = FEWEST + (total - FEWEST) % period
    counts = range(first, first + CAPTURES * period, period)
    return counts if total > counts[-1] else range(total, total + 1)


@contextmanager
def shortened(model: nn.Module, count: int, blocks: Sequence[str] = ()) -> Iterator[None]:
    """The model with only the first of its repeated blocks.

    Args:
        model: as a whole.
        count: blocks that stay.
        blocks: paths of all of them; empty for those that `predict_cluster` counts.

    Raises:
        InputError: it has none that can be left out.
    """
    paths = blocks or _blocks_of(model)
    holder = model.get_submodule(paths[0].rpartition(".")[0])
    left_out = list(holder.named_children())[count:]
    for name, _ in left_out:
        delattr(holder, name)
    try:
        yield
    finally:
        for name, block in left_out:
            holder.add_module(name, block)


def _blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Paths of the repeated blocks, which are alone in their list."""
    found = repeated_blocks(model)
    if found:
        holder = model.get_submodule(found[0].paths[0].rpartition(".")[0])
        alone = isinstance(holder, (nn.ModuleList, nn.Sequential)) and len(holder) == len(found[0].paths)
        shapes = {tuple(tuple(p.shape) for p in model.get_submodule(path).parameters()) for path in found[0].paths}
        if alone and len(shapes) == 1:
            return found[0].paths
    raise InputError(
        "the model has no list of repeated blocks that are alike, so its step cannot be told from that of a few blocks: call memfit.plan with devices=, which "
        "captures all of it"
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """What a capture of some blocks shows.

    Attributes:
        peaks: bytes at the peak of each section, without the state of parameters that are dealt out whole.
        states, seconds: as in `ClusterPrediction`, of parameters, gradients and optimizer; serial, overlapped, sending.
        seconds_are: of the trace.
        elements: of parameters that are dealt out whole; 0 where none are.
        dealt_bytes: of their state.
    """

    blocks: int
    peaks: tuple[int, ...]
    states: tuple[int, ...]
    seconds: tuple[float, ...]
    seconds_are: str
    elements: int
    dealt_bytes: int


def _step(trace: Trace, blocks: int, head: int, recompute: str, elements: int) -> _Step:
    """Of a capture; `head` is how many events of backward begin it, and end it, in every capture."""
    timeline = Timeline(trace)
    recomputations = _recomputed(Solver(timeline), recompute)
    levels = timeline.evaluate(recomputations).levels
    forward, ended = trace.forward_events, trace.pass_events
    sections = ((0, forward), (forward, forward + head), (forward, ended), (ended - head, ended), (ended, len(levels)))
    *others, state = _states(trace)
    dealt = state if elements else 0
    peaks = tuple(int(levels[a:b].max(initial=dealt)) - dealt for a, b in sections)
    played = overlapped(trace, recomputations, timeline.run_seconds)
    host = trace.micro_batches * trace.between_seconds
    serial = played.computing_seconds + played.sending_seconds
    seconds = (serial + host, played.seconds + host, played.sending_seconds)
    return _Step(blocks, peaks, (*others, state - dealt), seconds, trace.seconds_are, elements, dealt)


def _recomputed(solver: Solver, recompute: str) -> Recomputations:
    if recompute == "none":
        return {}
    if recompute == "selective":
        return every_block_but_products(solver).recomputations
    return every_block(solver, RECOMPUTED[recompute]).recomputations


def _states(trace: Trace) -> tuple[int, ...]:
    """Bytes of parameters and buffers, gradients, optimizer state, as they are when backward ends."""
    last = trace.pass_events
    there = [s for s in trace.storages if s.birth < last <= s.death]
    kinds = ((Category.PARAMETER, Category.BUFFER), (Category.GRADIENT,), (Category.OPTIMIZER_STATE,))
    return tuple(sum(s.bytes for s in there if s.category in kind) for kind in kinds)


def _straight(steps: Sequence[_Step]) -> bool:
    """Whether the bytes of these steps grow by the same number with each block, in every section."""
    rows = [(*step.peaks, *step.states) for step in steps]
    growth = {tuple(b - a for a, b in zip(one, more, strict=True)) for one, more in pairwise(rows)}
    return len(growth) <= 1


def _extended(steps: Sequence[_Step], total: int, elements: int) -> _Step:
    """What a capture of all blocks would show; `elements` of its parameters are dealt out whole to the fullest rank."""
    last, before = steps[-1], steps[-2] if len(steps) > 1 else steps[-1]
    times = (total - last.blocks) // max(last.blocks - before.blocks, 1)
    dealt = last.dealt_bytes * elements // last.elements if elements else 0

    def extended(here: Any, one_less: Any) -> Any:
        return here + (here - one_less) * times

    *others, state = map(extended, last.states, before.states)
    return _Step(
        total,
        tuple(extended(here, less) + dealt for here, less in zip(last.peaks, before.peaks, strict=True)),
        (*others, state + dealt),
        tuple(map(extended, last.seconds, before.seconds)),
        last.seconds_are,
        elements,
        dealt,
    )
