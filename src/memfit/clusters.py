"""The step of a model with many repeated blocks on many devices, from captures of it with a few of them: for shapes and clusters not at hand.

A step of 126 blocks on 4,096 devices can be captured like any other, on fake tensors under the fake process group, but takes its time. Blocks that are alike do
the same, so bytes at corresponding moments grow by the same number with each block: the peak of each *section* of the step (forward, the beginning of backward,
all of it, its end, clipping and the update) is a straight line over the number of blocks. Within backward bytes change from block to block by what a block's
activations and gradients take, a straight line as well, so its highest moment is at one of its ends. Each line is laid through three captures and has to go
through all of them, else one more block is captured: then the bytes are those of the whole model, and `tests/test_clusters.py` compares them with a capture of
it. Where no line goes through three (buckets of data parallelism, parameters that ZeRO 1 hands out whole), the prediction says that it is not exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from torch import nn

from memfit.batches import Batch, LossFunction
from memfit.capture.trace_source import TraceSource, machine_of
from memfit.errors import InputError
from memfit.hardware.machine_file import Devices, named_devices
from memfit.planner.by_hand import every_block
from memfit.planner.overlap import overlapped
from memfit.planner.solver import Solver
from memfit.planner.timeline import Timeline
from memfit.progress import Progress
from memfit.sharding.roles import fullest
from memfit.step.program import OptimizerFactory, default_optimizer
from memfit.techniques.choices import BASELINE
from memfit.techniques.layer_streaming.blocks import repeated_blocks
from memfit.techniques.sharding import WAYS, setting_of
from memfit.techniques.technique import listed
from memfit.values.trace import Category, Trace

FEWEST, MOST = 3, 7  # blocks that are captured, until the last three captures are on one line
POINTS: Final = 3
RECOMPUTED: Final = ("none", "blocks")
PRECISIONS: Final = ("full", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class ClusterPrediction:
    """A step on one of many devices.

    Attributes:
        ranks: devices.
        blocks: repeated blocks of the model.
        way: how the step is shared out: "data", "zero1", "zero2" or "zero3".
        recompute: "blocks" where each is rebuilt in backward, "none" where everything is kept.
        peak_bytes: largest number of bytes held at once on the fullest device.
        state_bytes: of these, parameters, buffers, gradients and optimizer state as they are between steps and after backward.
        step_seconds: with no collective beside computing.
        overlapped_seconds: with collectives beside computing (`memfit.planner.overlap`).
        sending_seconds: that the collectives take.
        seconds_are: "estimated" from a data sheet, or "measured" operation by operation; those of collectives are always estimated.
        exact: bytes are those of the whole model's trace; False where its blocks do not add up alike.
    """

    ranks: int
    blocks: int
    way: str
    recompute: str
    peak_bytes: int
    state_bytes: int
    step_seconds: float
    overlapped_seconds: float
    sending_seconds: float
    seconds_are: str
    exact: bool


def predict_cluster(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    *,
    devices: Devices,
    optimizer: OptimizerFactory | None = default_optimizer,
    way: str = "zero3",
    recompute: Sequence[str] = ("none", "blocks"),
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
        recompute: one or more of "none" and "blocks" (torch's checkpoint around every block), of each of which there is a prediction.
        precision: "bf16" or "fp16" for autocast.
        device: as for `memfit.plan`; None where `devices` names one of the table of machines, or the model's own.
        progress: called with what is being done.

    Raises:
        InputError: the devices are not alike or only one, the model has no such blocks, or an argument is none of these words.
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
    if ranks < 2 or len(set(topology.devices)) > 1:
        raise InputError(
            f"a step is shared out among two or more devices that are alike, and {devices!r} names others: give those of one kind"
        )
    device = device if topology.devices[0].name == here.name else topology.devices[0].name
    total = len(_blocks_of(model))
    steps: list[tuple[_Step, ...]] = []
    head = 0
    for count in range(FEWEST, MOST + 1) if total > MOST else (total,):
        if len(steps) >= POINTS and all(_straight(each[-POINTS:]) for each in zip(*steps, strict=True)):
            break
        with shortened(model, count):
            setting = setting_of(way, ranks, fullest(model, setting_of(way, ranks)))
            source = TraceSource(model, sample, loss_fn, optimizer, clip_norm, device, progress, network=topology)
            choices = BASELINE.but(sharding=setting, precision=precision)
            trace = source.trace_of(choices)
            head = head or (trace.pass_events - trace.forward_events) // 2
            steps.append(tuple(_step(trace, count, head, each) for each in recompute))
    return tuple(
        _extended([step[n] for step in steps[-POINTS:]], total, ranks, way, each) for n, each in enumerate(recompute)
    )


@contextmanager
def shortened(model: nn.Module, count: int) -> Iterator[None]:
    """The model with only the first of its repeated blocks.

    Raises:
        InputError: it has none that can be left out.
    """
    paths = _blocks_of(model)
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
        peaks: bytes at the peak of each section.
        state_bytes, seconds: as in `ClusterPrediction`; the seconds in the order serial, overlapped, sending.
        seconds_are: of the trace.
    """

    blocks: int
    peaks: tuple[int, ...]
    state_bytes: int
    seconds: tuple[float, ...]
    seconds_are: str


def _step(trace: Trace, blocks: int, head: int, recompute: str) -> _Step:
    """Of a capture; `head` is how many events of backward begin it, and end it, in every capture."""
    timeline = Timeline(trace)
    recomputations = every_block(Solver(timeline)).recomputations if recompute == "blocks" else {}
    levels = timeline.evaluate(recomputations).levels
    forward, ended = trace.forward_events, trace.pass_events
    sections = ((0, forward), (forward, forward + head), (forward, ended), (ended - head, ended), (ended, len(levels)))
    peaks = tuple(int(levels[a:b].max(initial=0)) for a, b in sections)
    played = overlapped(trace, recomputations, timeline.run_seconds)
    seconds = (played.computing_seconds + played.sending_seconds, played.seconds, played.sending_seconds)
    return _Step(blocks, peaks, _state_bytes(trace), seconds, trace.seconds_are)


def _state_bytes(trace: Trace) -> int:
    kinds = {Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE}
    last = trace.pass_events
    return sum(s.bytes for s in trace.storages if s.category in kinds and s.birth < last <= s.death)


def _straight(steps: Sequence[_Step]) -> bool:
    """Whether the bytes of these steps grow by the same number with each block, in every section."""
    rows = [(*step.peaks, step.state_bytes) for step in steps]
    growth = {tuple(b - a for a, b in zip(one, more, strict=True)) for one, more in pairwise(rows)}
    return len(growth) <= 1


def _extended(steps: Sequence[_Step], total: int, ranks: int, way: str, recompute: str) -> ClusterPrediction:
    last, before = steps[-1], steps[-2] if len(steps) > 1 else steps[-1]

    def extended(here: Any, one_less: Any) -> Any:
        return here + (here - one_less) * (total - last.blocks)

    serial, beside, sending = map(extended, last.seconds, before.seconds)
    return ClusterPrediction(
        ranks,
        total,
        way,
        recompute,
        max(map(extended, last.peaks, before.peaks)),
        extended(last.state_bytes, before.state_bytes),
        serial,
        beside,
        sending,
        last.seconds_are,
        _straight(steps),
    )
