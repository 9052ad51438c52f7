"""Devices and what joins them: to each other, and down to the tiers of memory below each. A value: frozen, torch-free, JSON both ways.

A single device is a topology of one. Several are the same value with more devices and their peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
class Topology:
    """The devices of one plan.

    Attributes:
        devices: at least one; a rank's position is its number.
        down: for each device, its links to lower tiers, the nearest first, as measured: no `free_bytes`, no `below`. Empty where they were not measured.
        peers: links between devices.
    """

    devices: tuple[Machine, ...]
    down: tuple[tuple[Link, ...], ...] = ()
    peers: tuple[PeerLink, ...] = ()

    @classmethod
    def single(cls, machine: Machine, links: tuple[Link, ...] = ()) -> Topology:
        """One device and its links to lower tiers."""
        return cls((machine,), (links,))

    def link_to(self, tier: str, device: int = 0) -> Link:
        """From a device to where something is offloaded: the tier of this name, else the nearest one.

        Raises:
            LookupError: no link from this device is known.
        """
        links = self.down[device]
        return next((link for link in links if link.tier == tier), links[0])

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
        return cls(tuple(Machine(**machine) for machine in devices), down, peers)
