"""What ranks of pipelines send each other: over which links, and how long what goes between the pipelines takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from memfit.capture.engine_time import engine_time
from memfit.capture.gloo_time import agreeing_seconds, link_of, seconds_among
from memfit.hardware.network import ASSUMED_BANDWIDTH, ASSUMED_LATENCY_SECONDS
from memfit.hardware.topology import PeerLink, Topology
from memfit.techniques.sharding import Pipelines
from memfit.values.stages import Line, StageDevice

AGREEMENTS: Final = 3  # messages of a few numbers between the pipelines in a step


def line_of(topology: Topology, pipelines: Pipelines, budget_bytes: int) -> Line:
    """The devices of the first pipeline; neighbours without a link of their own send over the slowest.

    Args:
        topology: all devices.
        pipelines: that they form. Where a rank has several stages, the last rank sends to the first one.
        budget_bytes: of each device, or all of its memory where that is less.
    """
    length, slowest = pipelines.ranks, _slowest(topology)
    neighbours = [(first, first + 1) for first in range(length - 1)]
    if pipelines.per_rank > 1 and length > 2:
        neighbours.append((length - 1, 0))
    peers = []
    for first, second in neighbours:
        between = [p for p in topology.peers if {p.first, p.second} == {first, second}]
        peer = between[0] if between else replace(slowest, first=first, second=second)
        peers.append(link_of(topology, peer))
    devices = Line.of(topology).devices[:length]
    return Line(tuple(StageDevice(min(budget_bytes, d.bytes), d.speed) for d in devices), tuple(peers))


def _slowest(topology: Topology) -> PeerLink:
    assumed = PeerLink(0, 1, float(ASSUMED_BANDWIDTH), ASSUMED_LATENCY_SECONDS)
    return min(topology.peers, key=lambda p: p.bandwidth, default=assumed)


def sending_seconds(topology: Topology, gradient_bytes: tuple[int, ...], pipelines: Pipelines) -> float:
    """Of what goes between the pipelines for one stage, over the slowest link.

    What the batches count for, and the loss, are added up; gradients are summed, once ranks have told which there are; where state is shared out, each
    parameter is sent by the rank that has updated it.
    """
    replicas = pipelines.replicas
    if replicas == 1:
        return 0.0
    slowest = _slowest(topology)
    ring = tuple(replace(slowest, first=n, second=(n + 1) % replicas) for n in range(replicas))
    among, ranks = replace(topology, peers=ring), tuple(range(replicas))
    seconds = sum(
        seconds_among(among, "all_reduce", 2 * (size - size // replicas), ranks, of_many=True)
        for size in gradient_bytes
    )
    seconds += agreeing_seconds(among, ranks, AGREEMENTS)
    if pipelines.shards_state:
        around = engine_time(topology.slowdown).seconds("broadcast", 1) if topology.processes else 0.0
        seconds += sum(seconds_among(among, "broadcast", size, ranks) + around for size in gradient_bytes)
    return seconds
