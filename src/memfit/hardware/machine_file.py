"""A machine file: devices that need not be alike, the nodes that they are in, and the links between them.

    devices:                                  # of one computer, in the order of the ranks
      - {gpu: h100, number: 4}
      - {name: old, memory: 24GiB, speed: 0.5, number: 2}
    inside: {bandwidth: 50GB, latency: 0.00001}
    links:                                    # of single pairs, in place of that
      - {between: [old 0, old 1], bandwidth: 100GB}

or several computers, `between` being what one of them sends to the others, all of its devices together:

    nodes:
      - number: 16
        devices: [{gpu: h100, number: 8}]
    inside: {bandwidth: 360GB}
    between: {bandwidth: 400GB}
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import yaml

from memfit import strict, yaml_reader
from memfit.errors import BudgetError, ConfigError, InputError
from memfit.hardware.machine import Machine, known_machine
from memfit.hardware.network import assumed_between, assumed_inside, devices_of, lacks_unit
from memfit.hardware.topology import Nodes, PeerLink, Topology, Wire
from memfit.units import parse_bytes

SUFFIXES: Final = (".yaml", ".yml", ".json")

Devices = str | int | Path | Topology
"""Several devices as a user names them: in a few words, by a machine file, or as they are."""


@dataclass(frozen=True)
class DeviceEntry:
    """Some devices that are alike.

    Attributes:
        name: by which links name them; with several, "name 0" is the first. The GPU's where left out.
        gpu: of the table of machines; None for such as the device that is planned on.
        number: of them.
        memory: bytes of each, "24GiB"; None for what the GPU has.
        speed: how many times as fast as that device, in everything that it computes and moves.
    """

    name: str | None = None
    gpu: str | None = None
    number: int = 1
    memory: str | int | None = None
    speed: float = 1.0


@dataclass(frozen=True)
class NodeEntry:
    """Some nodes that are alike: how many, and what each has."""

    devices: tuple[DeviceEntry, ...]
    number: int = 1


@dataclass(frozen=True)
class WireEntry:
    """A link: bytes a second each way ("50GB"), and seconds of latency for each message; None where they are assumed."""

    bandwidth: str | int | None = None
    latency: float | None = None


@dataclass(frozen=True)
class PairEntry:
    """The link of two devices, by their names."""

    between: tuple[str, str]
    bandwidth: str | int
    latency: float = 0.0


@dataclass(frozen=True)
class MachineFile:
    """All that a machine file may say; exactly one of `devices` and `nodes`."""

    devices: tuple[DeviceEntry, ...] = ()
    nodes: tuple[NodeEntry, ...] = ()
    inside: WireEntry | None = None
    between: WireEntry | None = None
    links: tuple[PairEntry, ...] = ()


def named_devices(devices: Devices, here: Machine) -> Topology:
    """The devices that a user named.

    Args:
        devices: in a few words (`devices_of`), the path of a machine file, or a topology.
        here: what they are where nothing else is said.

    Raises:
        ConfigError: the machine file cannot be read, or says what cannot be meant.
        InputError: the words cannot be read.
    """
    if isinstance(devices, Topology):
        return devices
    if isinstance(devices, Path) or (isinstance(devices, str) and devices.lower().endswith(SUFFIXES)):
        return read_machine_file(devices, here)
    return devices_of(devices, here)


def read_machine_file(path: str | Path, here: Machine) -> Topology:
    """The topology that a machine file describes.

    Args:
        path: of the file, YAML.
        here: such as which a device is that names no GPU.

    Raises:
        ConfigError: it cannot be read, or says what cannot be meant; names line and key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(
            f"cannot read the machine file {path}: {reason}: give the path of one, or name devices that are alike in a few words, as 4x24GiB"
        ) from error
    try:
        data = yaml_reader.parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"machine file {path}: {yaml_reader.reason(error)}") from error
    try:
        return _topology(strict.read(MachineFile, data), here)
    except ConfigError as error:
        lines = yaml_reader.lines(text)
        told = max((p for p in lines if str(error).startswith(p)), key=len, default=None)
        where = f", line {lines[told]}" if told is not None else ""
        raise ConfigError(f"machine file {path}{where}: {error}") from None


def _topology(said: MachineFile, here: Machine) -> Topology:
    if bool(said.devices) == bool(said.nodes):
        raise ConfigError(
            "devices: list the devices of one computer under devices, or computers under nodes, one of the two"
        )
    entries = said.nodes or (NodeEntry(said.devices),)
    machines: list[Machine] = []
    names: list[str] = []
    sizes: list[int] = []
    for n, node in enumerate(entries):
        place = f"nodes[{n}].devices" if said.nodes else "devices"
        if not node.devices:
            raise ConfigError(f"{place}: a node needs devices, and this one has none")
        _positive(node.number, f"nodes[{n}].number")
        for _ in range(node.number):
            before = len(machines)
            for d, entry in enumerate(node.devices):
                machine = _machine(entry, f"{place}[{d}]", here)
                machines += [machine] * entry.number
                names += [entry.name or entry.gpu or machine.name] * entry.number
            sizes.append(len(machines) - before)
    peers = _pairs(said, _numbered(names))
    inside = _wire(said.inside, "inside", assumed_inside(machines[0]))
    if len(sizes) == 1:
        if said.between is not None:
            raise ConfigError(
                "between: this is the link between nodes, and there is one node: leave it out, or list several under nodes"
            )
        if peers and said.inside is None:
            return Topology(tuple(machines), (), peers)  # the links that are named are all there are
    between = _wire(said.between, "between", assumed_between(max(sizes)))
    return Topology(tuple(machines), (), peers, Nodes(tuple(sizes), inside, between))


def _machine(entry: DeviceEntry, path: str, here: Machine) -> Machine:
    _positive(entry.number, f"{path}.number")
    if not entry.speed > 0:
        raise ConfigError(
            f"{path}.speed: {entry.speed} is not more than 0: say how many times as fast as this computer's device it is"
        )
    try:
        machine = known_machine(entry.gpu) if entry.gpu is not None else here
    except InputError as error:
        raise ConfigError(f"{path}.gpu: {error}") from None
    if entry.memory is not None:
        machine = replace(machine, memory_bytes=_bytes(entry.memory, f"{path}.memory", "GiB"))
    if entry.speed == 1.0:
        return machine
    return replace(
        machine,
        fp32_flops=machine.fp32_flops * entry.speed,
        tensor_flops=machine.tensor_flops * entry.speed,
        tf32_flops=machine.tf32_flops * entry.speed,
        bandwidth=machine.bandwidth * entry.speed,
    )


def _numbered(names: list[str]) -> dict[str, int]:
    """Positions of devices by the names that links may use: its own where it is the only one of that name, else with its number; "0" where it has none."""
    many, seen = Counter(names), Counter[str]()
    found = {}
    for position, name in enumerate(names):
        found[name if name and many[name] == 1 else f"{name} {seen[name]}".strip()] = position
        seen[name] += 1
    return found


def _pairs(said: MachineFile, positions: dict[str, int]) -> tuple[PeerLink, ...]:
    made = []
    for n, pair in enumerate(said.links):
        path = f"links[{n}]"
        for name in pair.between:
            if name not in positions:
                raise ConfigError(f"{path}.between: no device is called {name!r}; {strict.nearest(name, positions)}")
        first, second = (positions[name] for name in pair.between)
        if first == second:
            raise ConfigError(f"{path}.between: {pair.between[0]!r} is named twice: a link joins two devices")
        wire = _wire(WireEntry(pair.bandwidth, pair.latency), path, Wire(1.0))
        made.append(PeerLink(first, second, wire.bandwidth, wire.latency_seconds))
    return tuple(made)


def _wire(entry: WireEntry | None, path: str, assumed: Wire) -> Wire:
    if entry is None:
        return assumed
    if entry.latency is not None and entry.latency < 0:
        raise ConfigError(f"{path}.latency: {entry.latency} is less than 0: give seconds")
    bandwidth = (
        assumed.bandwidth if entry.bandwidth is None else float(_bytes(entry.bandwidth, f"{path}.bandwidth", "GB"))
    )
    return Wire(bandwidth, assumed.latency_seconds if entry.latency is None else entry.latency)


def _bytes(said: str | int, path: str, unit: str) -> int:
    said = said.removesuffix("/s") if isinstance(said, str) else said
    if lacks_unit(said):
        raise ConfigError(
            f"{path}: {said} without a unit counts bytes, which is too few: write the unit along, as in {said}{unit}"
        )
    try:
        return parse_bytes(said)
    except BudgetError as error:
        raise ConfigError(f"{path}: {error}") from None


def _positive(number: int, path: str) -> None:
    if number < 1:
        raise ConfigError(f"{path}: {number} is less than 1: say how many there are, or leave the entry out")
