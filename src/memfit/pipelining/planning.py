"""The plan of a step that pipelines share: how many stages, how many pipelines beside each other, how many micro-batches; the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from memfit import batches
from memfit.batches import Batch
from memfit.capture.trace_source import TraceSource
from memfit.errors import InfeasibleError, InputError
from memfit.hardware.network import ASSUMED_BANDWIDTH, ASSUMED_LATENCY_SECONDS, collective_seconds
from memfit.hardware.topology import PeerLink, Topology
from memfit.pipelining.stages import StagesFound, find_stages
from memfit.planner.schedules import textbook_bubble
from memfit.progress import tell
from memfit.techniques.choices import Choices, in_words
from memfit.techniques.sharding import PIPELINES, pipeline_setting
from memfit.units import format_bytes
from memfit.values.pipeline import PipelinePlan
from memfit.values.plan import Plan
from memfit.values.prediction import Prediction, RankPrediction
from memfit.values.request import Request
from memfit.values.script import Script
from memfit.values.stages import Line, Schedule, StageDevice

MOST_ROUNDS: Final = 8  # micro-batches for each stage: with as many the textbook's bubble is below an eighth
OPEN: Final = ("sharding", "micro_batches")  # what may be fixed of a step in stages


def settings_for(asked: str, ranks: int) -> tuple[str, ...]:
    """The pipelines that so many ranks may form, the longest first.

    Args:
        asked: what the user fixed: "" or "pipeline" for all, a schedule as "1f1b", or all of it as "1f1b/2x2".
        ranks: of all pipelines.

    Raises:
        InputError: what was asked is for another number of ranks.
    """
    way, _, shape = asked.partition("/")
    schedule = way if way in PIPELINES else ""
    lengths = [n for n in range(ranks, 1, -1) if ranks % n == 0]
    if shape:
        lengths = [n for n in lengths if pipeline_setting("", n, ranks // n) == f"/{shape}"]
        if not lengths:
            raise InputError(
                f"fixed sharding={asked!r}: {ranks} devices make "
                + ", ".join(
                    repr(pipeline_setting(schedule or "1f1b", n, ranks // n))
                    for n in range(ranks, 1, -1)
                    if ranks % n == 0
                )
            )
    return tuple(pipeline_setting(schedule or "1f1b", n, ranks // n) for n in lengths)


def plan_pipelines(source: TraceSource, request: Request, topology: Topology, setting: str) -> Plan:
    """The fastest plan for pipelines of this length.

    All ranks hand in their parts of the batch, as for every other way: a pipeline of K ranks runs K of them.

    Args:
        source: of the model; its sample is the part of one rank.
        request: whose budget is that of each device.
        topology: the devices.
        setting: as `pipeline_setting` makes it; in "1f1b" GPipe is taken where there are fewer micro-batches than stages.

    Raises:
        InfeasibleError: no cut fits.
        InputError: the request asks for more than stages can have, or the model cannot be cut.
    """
    _check(request)
    assert request.budget is not None, "whoever plans has one"
    schedule, _, shape = setting.partition("/")
    stages = int(shape.partition("x")[0])
    weighting = source.weighting(())
    if weighting.weights is None and not _on_meta(source):
        raise InputError(f"its micro-batches would not add up to the batch: {weighting.reason}")
    weights = weighting.weights or "samples"
    batch = _of_pipeline(source.sample, stages)
    for other in range(stages, len(topology.devices)):
        if topology.devices[other] != topology.devices[other % stages]:
            raise InputError(
                f"pipelines beside each other have the same stages, and devices {other % stages} and {other} are not alike"
            )
    line = _line(topology, stages, request.budget.bytes)
    best: Plan | None = None
    lacking: InfeasibleError | InputError | None = None
    for number in _numbers(request, stages, batches.size(batch)):
        tell(source.progress, f"planning for {stages} stages, {number} micro-batches", 0.0)
        used = Schedule(schedule if number >= stages else Schedule.GPIPE)
        try:
            found = find_stages(source, batch, line, number, used, stages)
        except (InfeasibleError, InputError) as error:
            if lacking is None or isinstance(error, InfeasibleError):
                lacking = error
            continue
        made = _plan(source, request, topology, line, found, weights, weighting.reason)
        if best is not None and made.prediction.step_seconds >= best.prediction.step_seconds:
            break
        best = made
    if best is None:
        assert lacking is not None, "at least one number was tried"
        raise lacking
    return best


def _on_meta(source: TraceSource) -> bool:
    return any(p.device.type == "meta" for p in source.model.parameters())


def _check(request: Request) -> None:
    """Refuse what stages do not have yet."""
    more = sorted(name for name in request.fixed if name not in OPEN)
    if more or request.freeze:
        what = f"fixed {more[0]}={request.fixed[more[0]]!r}" if more else f"freeze={list(request.freeze)!r}"
        raise InputError(f"{what} is not for stages of a pipeline yet, which are trained as plain PyTorch trains them")


def _of_pipeline(sample: Batch, ranks: int) -> Batch:
    """The parts of so many ranks, each like the sample."""
    size = batches.size(sample)

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or len(tensor) != size:
            return tensor
        if tensor.device.type == "meta":
            return tensor.new_empty((ranks * size, *tensor.shape[1:]))
        return tensor.repeat(ranks, *(1 for _ in tensor.shape[1:]))

    return batches.map_tensors(longer, sample)


def _numbers(request: Request, stages: int, samples: int) -> Iterator[int]:
    """Numbers of micro-batches to try: from one for each stage on, doubled; fewer where there are not as many samples."""
    asked = request.micro_batches
    if asked is not None:
        yield asked
        return
    number = stages
    if samples < stages or samples % stages:
        number = next(n for n in range(samples, 0, -1) if samples % n == 0 and n <= max(stages, 1))
    while number <= min(samples, MOST_ROUNDS * stages):
        if samples % number == 0:
            yield number
        number *= 2


def _line(topology: Topology, stages: int, budget_bytes: int) -> Line:
    """The devices of the first pipeline; neighbours without a link of their own send over the slowest."""
    slowest = _slowest(topology)
    peers = []
    for first in range(stages - 1):
        between = [p for p in topology.peers if {p.first, p.second} == {first, first + 1}]
        peers.append(between[0] if between else replace(slowest, first=first, second=first + 1))
    devices = Line.of(topology).devices[:stages]
    return Line(tuple(StageDevice(min(budget_bytes, d.bytes), d.speed) for d in devices), tuple(peers))


def _slowest(topology: Topology) -> PeerLink:
    assumed = PeerLink(0, 1, float(ASSUMED_BANDWIDTH), ASSUMED_LATENCY_SECONDS)
    return min(topology.peers, key=lambda p: p.bandwidth, default=assumed)


def _summing_seconds(topology: Topology, gradient_bytes: tuple[int, ...], replicas: int) -> float:
    """Of the gradients of one stage over the pipelines, one parameter after the other, over the slowest link."""
    if replicas == 1:
        return 0.0
    slowest = _slowest(topology)
    ring = tuple(replace(slowest, first=n, second=(n + 1) % replicas) for n in range(replicas))
    among = replace(topology, peers=ring)
    return sum(
        collective_seconds(among, "all_reduce", 2 * (size - size // replicas), tuple(range(replicas)))
        for size in gradient_bytes
    )


def _plan(
    source: TraceSource,
    request: Request,
    topology: Topology,
    line: Line,
    found: StagesFound,
    weights: str,
    unsure: str,
) -> Plan:
    assert request.budget is not None
    cut = found.pipeline.cut
    stages, number, ranks = len(cut.stages), cut.micro_batches, len(topology.devices)
    replicas = ranks // stages
    setting = pipeline_setting(cut.schedule, stages, replicas)
    size = stages * batches.size(source.sample) // number
    choices = Choices(number, size, weights, sharding=setting)
    summing = max(_summing_seconds(topology, sizes, replicas) for sizes in found.gradient_bytes)
    passes = max(cut.pass_seconds, 1e-12)
    predicted = tuple(
        RankPrediction(
            rank,
            found.peak_bytes[rank % stages],
            cut.step_seconds + summing,
            rank % stages,
            max(0.0, 1 - cut.busy_seconds[rank % stages] / passes),
        )
        for rank in range(ranks)
    )
    fullest = max(range(stages), key=lambda stage: found.peak_bytes[stage])
    peak = found.peak_bytes[fullest]
    for stage, (needed, device) in enumerate(zip(found.peak_bytes, line.devices, strict=True)):
        if needed > device.bytes:
            raise InfeasibleError(
                f"the best cut found needs {format_bytes(needed)} on device {stage}, which has {format_bytes(device.bytes)}: "
                "give it more, or take more micro-batches",
                budget_bytes=device.bytes,
                minimum_bytes=needed,
            )
    pipeline: PipelinePlan = replace(found.pipeline, replicas=replicas)
    average = sum(rank.waiting for rank in predicted) / ranks
    told = (
        f"stages wait {100 * average:.1f} % of their passes on average, where (K - 1)/(M + K - 1) is {100 * textbook_bubble(stages, number):.1f} % for "
        f"{stages} equal stages and {number} micro-batches; messages between stages are counted as if they overlapped with computing on both sides"
    )
    on_meta = (f"{unsure}: micro-batches are weighted by samples",) if _on_meta(source) else ()
    return Plan(
        request.budget.bytes,
        choices,
        # Every rank follows the script of its stage.
        script=Script(),
        prediction=Prediction(
            peak,
            max(found.plain_peak_bytes),
            cut.step_seconds + summing,
            found.plain_seconds + summing,
            min(cut.bound_seconds, cut.step_seconds) + summing,
            found.seconds_are,
            peak_phase=found.phases[fullest],
            peak_module=f"stage {fullest}, {pipeline.named(fullest)}",
            peak_operation=f"{cut.schedule}, {number} micro-batches",
            plain_with=in_words(choices),
            ranks=predicted,
        ),
        signature=batches.signature(source.sample),
        model=found.model,
        device=source.machine.name,
        torch_version=torch.__version__,
        clip_norm=request.clip_norm,
        notes=(told, *on_meta),
        changed_buffers=found.changed_buffers,
        device_kind=source.machine.kind,
        pipeline=pipeline,
    )
