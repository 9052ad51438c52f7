"""Devices by a few words ("4x24GiB", "2x8xh100"), and the seconds of a collective among them, with a network model that is stated.

Collectives run in rings: the algorithms of Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations, with a latency for
each of their steps, as in Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH, section 3. Where devices are in
nodes, as NCCL does it (src/graph/tuning.cc of its sources, read in version 2.28): as many rings at once as a node has devices, each leaving the node through
another of its cards, so that the bytes go at the rate of the slower of the two, a device's link inside the node and the node's to the others; of the steps of
a ring, as many as there are other nodes go between nodes. An all-reduce may go over a tree of nodes instead (Sanders et al. 2009, Two-tree algorithms
for full bandwidth broadcast, reduction and scan), which moves as many bytes in a logarithm of steps: the faster one counts.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Final

from memfit.errors import BudgetError, InputError
from memfit.hardware.machine import GIGA, Machine, known_machine, of_torch
from memfit.hardware.topology import Nodes, PeerLink, Topology, Wire
from memfit.units import parse_bytes

# Where no link is given: PCIe 4.0 with 16 lanes reaches about 25 GB/s between two GPUs, half of that where both directions share it.
ASSUMED_BANDWIDTH: Final = 12 * GIGA
ASSUMED_LATENCY_SECONDS: Final = 20e-6
# Between nodes: 200 Gbit/s for each device; NCCL's own latencies of a ring's step over NVLink and over the network.
ASSUMED_BETWEEN_BANDWIDTH: Final = 25 * GIGA
SWITCH_LATENCY_SECONDS: Final = 3.4e-6
BETWEEN_LATENCY_SECONDS: Final = 14e-6

_LEAST_BYTES: Final = 1 << 20  # a number alone that is less is one of gigabytes whose unit was left out
_FORM: Final = re.compile(
    r"\s*(?:(\d+)\s*[x*]\s*(?=\d+\s*[x*]))?(\d+)\s*(?:[x*]\s*([^@]+?)\s*)?(?:@\s*([^,]+?)\s*/\s*s\s*(?:,\s*(.+?)\s*/\s*s\s*)?)?",
    re.IGNORECASE,
)


def devices_of(text: str | int, here: Machine) -> Topology:
    """Several equal devices: in a ring, or in equal nodes.

    Args:
        text: how many: 4 or "4"; "4x24GiB" for such as `here` with so many bytes; "4xh100" for those of the table of machines; "2x8xh100" for two nodes of
            eight. "@50GB/s" behind it is the bandwidth of the links between them, "@360GB/s,400GB/s" that of a device inside its node, and of a whole node
            to the others.
        here: what they are where nothing else is said.

    Raises:
        InputError: it cannot be read, or there is none.
    """
    form = _FORM.fullmatch(str(text))
    if form is None or int(form[2]) < 1 or int(form[1] or 1) < 1 or (form[5] and not form[1]):
        raise _of_no_form(text)
    number, what = int(form[2]), form[3]
    machine = here
    if what is not None:
        machine = _named(text, what, here)
    inside = assumed_inside(machine)
    if form[4] is not None:
        inside = replace(inside, bandwidth=_rate(text, form[4]))
    if form[1] is not None:
        between = assumed_between(number)
        if form[5] is not None:
            between = replace(between, bandwidth=_rate(text, form[5]))
        sizes = (number,) * int(form[1])
        return Topology((machine,) * sum(sizes), nodes=Nodes(sizes, inside, between))
    ring = ((n, (n + 1) % number) for n in range(number if number > 2 else number - 1))
    peers = tuple(PeerLink(first, second, inside.bandwidth, inside.latency_seconds) for first, second in ring)
    return Topology((machine,) * number, (), peers)


def _of_no_form(text: str | int) -> InputError:
    return InputError(
        f'devices={text!r}: write how many and what, as "4x24GiB", "4xh100", "4x24GiB@50GB/s" or "2x8xh100@360GB/s,400GB/s"; a number alone, as 4, for '
        "as many as the one that the model is on; or the path of a machine file (machines.yaml) for devices of several kinds"
    )


def _named(text: str | int, what: str, here: Machine) -> Machine:
    """A device by its name ("h100", "4090") or its bytes ("24GiB")."""
    if of_torch(what) or "+" in what:  # "2xh100+2x4090"
        raise _of_no_form(text)
    try:
        return known_machine(what)
    except InputError:
        # Four digits are those of a name ("4091").
        if not what[0].isdecimal() or (what.isdecimal() and 1000 <= int(what) < 10000):
            raise
    try:
        found = replace(here, memory_bytes=parse_bytes(what))
    except BudgetError:
        raise _of_no_form(text) from None
    if lacks_unit(what):
        raise InputError(f'devices={text!r} names devices of {what} bytes: write the unit along, as in "4x24GiB"')
    return found


def _rate(text: str | int, said: str) -> float:
    """Bytes a second of a link."""
    if lacks_unit(said):
        raise InputError(
            f'devices={text!r} names a link of {said} bytes a second: write the unit along, as in "@50GB/s"'
        )
    return float(parse_bytes(said))


def lacks_unit(said: str | int) -> bool:
    """Whether it is a number alone, and of bytes so few that its unit was left out."""
    return str(said).strip().isdecimal() and int(said) < _LEAST_BYTES


def assumed_inside(machine: Machine) -> Wire:
    """What joins devices of this kind inside a node, where nothing is said of it."""
    if machine.peer_bandwidth:
        return Wire(machine.peer_bandwidth, SWITCH_LATENCY_SECONDS)
    return Wire(float(ASSUMED_BANDWIDTH), ASSUMED_LATENCY_SECONDS)


def assumed_between(devices: int) -> Wire:
    """What joins a node of so many devices to others, where nothing is said of it."""
    return Wire(float(ASSUMED_BETWEEN_BANDWIDTH * devices), BETWEEN_LATENCY_SECONDS)


def collective_seconds(topology: Topology | None, kind: str, size: int, ranks: tuple[int, ...]) -> float:
    """Seconds of a collective: the bytes that a rank sends over the slowest of its links, and a latency for each step.

    With n ranks, a message of S bytes, and b and l the bandwidth and latency of the slowest link: all-gather and reduce-scatter take (n - 1)/n * S/b
    + (n - 1) l, all-reduce both, one after the other; a broadcast that is passed on in small pieces S/b + (n - 1) l; a message from one to another S/b + l.
    With m nodes, b is the lesser of a device's bandwidth inside its node and of what a node's devices that take part have of its bandwidth to the others;
    m - 1 of n - 1 steps have the latency between nodes.

    Args:
        topology: None for the assumed link.
        kind, size, ranks: as in `values.trace.Collective`; the size is what one rank sends, with the factor of the formula in it.
    """
    if topology is not None and topology.nodes is not None:
        return _in_nodes(topology, topology.nodes, kind, size, ranks)
    steps = {"all_reduce": 2 * (len(ranks) - 1), "send": 1, "receive": 1}.get(kind, len(ranks) - 1)
    among = [] if topology is None else [p for p in topology.peers if p.first in ranks and p.second in ranks]
    bandwidth = min((p.bandwidth for p in among), default=float(ASSUMED_BANDWIDTH))
    latency = max((p.latency_seconds for p in among), default=ASSUMED_LATENCY_SECONDS)
    return size / bandwidth + steps * latency


def _in_nodes(topology: Topology, nodes: Nodes, kind: str, size: int, ranks: tuple[int, ...]) -> float:
    if kind in {"send", "receive"} and len(ranks) == 2:
        link = topology.link_between(*ranks)
        assert link is not None, "nodes join all of their devices"
        return link.seconds(size)
    members = nodes.members(ranks)
    several, most = len(members) > 1, max(members.values())
    rates = [nodes.inside.bandwidth] if most > 1 else []
    if several:
        rates += [nodes.between.bandwidth * count / nodes.sizes[node] for node, count in members.items()]
    rates += [p.bandwidth for p in topology.peers if p.first in ranks and p.second in ranks]
    inside, between = nodes.inside.latency_seconds, nodes.between.latency_seconds
    crossing = len(members) - 1
    latency = (len(ranks) - 1 - crossing) * inside + crossing * between
    if kind == "all_reduce":
        tree = (most - 1) * inside + math.ceil(math.log2(len(members))) * between
        latency = 2 * min(latency, tree)
    return size / min(rates, default=math.inf) + latency
