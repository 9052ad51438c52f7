"""Devices by a few words ("4x24GiB"), and the seconds of a collective among them, with a network model that is stated.

Source: the ring algorithms of Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations; with a latency for each of their
steps, as in Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH, section 3.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from memfit.errors import InputError
from memfit.hardware.machine import GIGA, Machine, known_machine
from memfit.hardware.topology import PeerLink, Topology
from memfit.units import parse_bytes

# Where no link is given: PCIe 4.0 with 16 lanes reaches about 25 GB/s between two GPUs, half of that where both directions share it.
ASSUMED_BANDWIDTH: Final = 12 * GIGA
ASSUMED_LATENCY_SECONDS: Final = 20e-6

_FORM: Final = re.compile(r"\s*(\d+)\s*(?:[x*]\s*([^@]+?)\s*)?(?:@\s*(.+?)\s*/\s*s\s*)?", re.IGNORECASE)


def devices_of(text: str | int, here: Machine) -> Topology:
    """Several equal devices, joined in a ring.

    Args:
        text: how many: 4 or "4"; "4x24GiB" for such as `here` with so many bytes; "4xh100" for those of the table of machines. "@50GB/s" behind it is the
            bandwidth of the links between them.
        here: what they are where nothing else is said.

    Raises:
        InputError: it cannot be read, or there is none.
    """
    form = _FORM.fullmatch(str(text))
    if form is None or int(form[1]) < 1:
        raise InputError(f'devices={text!r}: write how many and what, as "4x24GiB", "4xh100" or "4x24GiB@50GB/s"')
    number, what, bandwidth = int(form[1]), form[2], form[3]
    machine = here
    if what is not None:
        machine = replace(here, memory_bytes=parse_bytes(what)) if what[0].isdecimal() else known_machine(what)
    rate = ASSUMED_BANDWIDTH if bandwidth is None else float(parse_bytes(bandwidth))
    ring = ((n, (n + 1) % number) for n in range(number if number > 2 else number - 1))
    peers = tuple(PeerLink(first, second, rate, ASSUMED_LATENCY_SECONDS) for first, second in ring)
    return Topology((machine,) * number, (), peers)


def collective_seconds(topology: Topology | None, kind: str, size: int, ranks: tuple[int, ...]) -> float:
    """Seconds of a collective in a ring of ranks: the bytes that a rank sends over the slowest of its links, and a latency for each step of the ring.

    With n ranks, a message of S bytes, and b and l the bandwidth and latency of the slowest link: all-gather and reduce-scatter take (n - 1)/n * S/b
    + (n - 1) l, all-reduce both, one after the other; a broadcast that is passed on in small pieces S/b + (n - 1) l; a message from one to another S/b + l.

    Args:
        topology: None for the assumed link.
        kind, size, ranks: as in `values.trace.Collective`; the size is what one rank sends, with the factor of the formula in it.
    """
    steps = {"all_reduce": 2 * (len(ranks) - 1), "send": 1, "receive": 1}.get(kind, len(ranks) - 1)
    among = [] if topology is None else [p for p in topology.peers if p.first in ranks and p.second in ranks]
    bandwidth = min((p.bandwidth for p in among), default=float(ASSUMED_BANDWIDTH))
    latency = max((p.latency_seconds for p in among), default=ASSUMED_LATENCY_SECONDS)
    return size / bandwidth + steps * latency
