"""Devices and what joins them: to each other, and down to the tiers of memory below each. A value: frozen, torch-free, JSON both ways.

A single device is a topology of one. Several are the same value with more devices, and either links between pairs of them or nodes, in which all are joined
alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, combinations
from typing import Any

from memfit.hardware.machine import Link, Machine


@dataclass(frozen=True, slots=True)
class PeerLink:
    """What joins two devices of a topology.

    Attributes:
        first, second: their positions in `Topology.devices`.
        bandwidth: bytes/s each way.
        latency_seconds: of each message, besides its bytes.
    """

    first: int
    second: int
    bandwidth: float
    latency_seconds: float = 0.0

    def seconds(self, size: int) -> float:
        """Time of a message of so many bytes, alone on the link."""
        return self.latency_seconds + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class Wire:
    """What joins devices that are all joined alike.

    Attributes:
        bandwidth: bytes/s each way.
        latency_seconds: of each message, besides its bytes.
    """

    bandwidth: float
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """Computers with several devices each.

    Attributes:
        sizes: how many devices each node has; the first has the first devices of the topology.
        inside: from each device to those of its node, through a switch: each has all of this bandwidth.
        between: from each node to the others: what all of its devices together send, each a like part of it.
    """

    sizes: tuple[int, ...]
    inside: Wire
    between: Wire

    def node_of(self, device: int) -> int:
        """The node of a device.

        Raises:
            IndexError: there is no such device.
        """
        node = bisect_right(list(accumulate(self.sizes)), device)
        if node == len(self.sizes):
            raise IndexError(f"no device {device} beyond the last node")
        return node

    def members(self, devices: Sequence[int]) -> dict[int, int]:
        """How many of these devices each node has."""
        if len(devices) == sum(self.sizes):
            return dict(enumerate(self.sizes))
        return Counter(map(self.node_of, devices))


@dataclass(frozen=True, slots=True)
class Topology:
    """The devices of one plan.

    Attributes:
        devices: at least one; a rank's position is its number.
        down: for each device, its links to lower tiers, the nearest first, as measured: no `free_bytes`, no `below`. Empty where they were not measured.
        peers: links between pairs of devices.
        nodes: in which the devices are; None where they are told by `peers` alone.
        processes: the devices are processes of this computer, whose collectives are measured here and not told by links.
        slowdown: of processes, how many times longer than on this computer when it is quiet work takes by now.
    """

    devices: tuple[Machine, ...]
    down: tuple[tuple[Link, ...], ...] = ()
    peers: tuple[PeerLink, ...] = ()
    nodes: Nodes | None = None
    processes: bool = False
    slowdown: float = 1.0

    @classmethod
    def single(cls, machine: Machine, links: tuple[Link, ...] = ()) -> Topology:
        """One device and its links to lower tiers."""
        return cls((machine,), (links,))

    @property
    def alike(self) -> bool:
        """Whether all devices are of one kind, with as much memory."""
        return len(set(self.devices)) == 1

    @property
    def most_on_a_computer(self) -> int:
        """How many of the devices share one host's memory and disks: those of the largest node; where nothing is said of nodes, all."""
        return len(self.devices) if self.nodes is None else max(self.nodes.sizes)

    def link_to(self, tier: str, device: int = 0) -> Link:
        """From a device to where something is offloaded: the tier of this name, else the nearest one.

        Raises:
            LookupError: no link from this device is known.
        """
        links = self.down[device]
        return next((link for link in links if link.tier == tier), links[0])

    def link_between(self, one: int, other: int) -> PeerLink | None:
        """What a message from one device to another goes over: their own link, else that of their node or of two nodes; None where nothing joins them."""
        own = next((p for p in self.peers if {p.first, p.second} == {one, other}), None)
        if own is not None or self.nodes is None:
            return own
        here, there = self.nodes.node_of(one), self.nodes.node_of(other)
        if here == there:
            return PeerLink(one, other, self.nodes.inside.bandwidth, self.nodes.inside.latency_seconds)
        share = max(self.nodes.sizes[here], self.nodes.sizes[there])
        return PeerLink(one, other, self.nodes.between.bandwidth / share, self.nodes.between.latency_seconds)

    def links(self) -> tuple[PeerLink, ...]:
        """Of every two devices that are joined."""
        if self.nodes is None:
            return self.peers
        pairs = combinations(range(len(self.devices)), 2)
        return tuple(link for pair in pairs if (link := self.link_between(*pair)) is not None)

    @property
    def slowest_bandwidth(self) -> float | None:
        """Of what joins any two devices that are joined, bytes/s each way; None where nothing does."""
        rates = [p.bandwidth for p in self.peers]
        if self.nodes is not None:
            rates += [self.nodes.inside.bandwidth] if max(self.nodes.sizes) > 1 else []
            rates += [self.nodes.between.bandwidth / max(self.nodes.sizes)] if len(self.nodes.sizes) > 1 else []
        return min(rates, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Topology:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError: these are not the fields of a topology.
        """
        down = tuple(tuple(Link(**{**link, "below": None}) for link in links) for links in data["down"])
        peers = tuple(PeerLink(**peer) for peer in data["peers"])
        devices = ({**machine, "capability": tuple(machine.get("capability", (0, 0)))} for machine in data["devices"])
        of = data.get("nodes")
        nodes = None if of is None else Nodes(tuple(of["sizes"]), Wire(**of["inside"]), Wire(**of["between"]))
        processes, slowdown = bool(data.get("processes")), float(data.get("slowdown", 1.0))
        return cls(tuple(Machine(**machine) for machine in devices), down, peers, nodes, processes, slowdown)
