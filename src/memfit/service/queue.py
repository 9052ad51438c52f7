"""Which waiting run starts next, and when each may: priorities, fair shares, and backfill that delays nobody. Pure: the same rules on a simulated clock.

Runs are laid into the free bytes of each device over time, one after the other in their order, each at the earliest moment from which it fits for all of its
predicted seconds ("conservative backfill": Mu'alem and Feitelson, IEEE TPDS 2001, https://doi.org/10.1109/71.932708). So a small run passes a large
one only where the large one starts no later for it, as far as predictions hold.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from memfit.errors import InputError
from memfit.runner import Ledger, RunRequest
from memfit.runner.cores import CORES
from memfit.units import format_bytes

DEPTH: Final = 50
"""Waiting runs that are laid out; those behind them wait for their turn."""


@dataclass(frozen=True, slots=True)
class Occupied:
    """A run that has its bytes.

    Attributes:
        request: of the runner.
        devices: of its ranks.
        seconds: that it will still take.
    """

    request: RunRequest
    devices: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Queued:
    """A run that waits.

    Attributes:
        request: of the runner.
        seconds: that it will take.
        owner: who submitted it.
        priority: higher goes first.
    """

    request: RunRequest
    seconds: float
    owner: str = ""
    priority: int = 0

    @property
    def byte_seconds(self) -> float:
        """What it takes of what is shared."""
        return (sum(self.request.rank_bytes) + sum(self.request.peak_bytes.values())) * self.seconds


@dataclass(frozen=True, slots=True)
class Turn:
    """When a waiting run may start.

    Attributes:
        name: of the run.
        seconds: from now; 0 for now; None where that is not laid out yet.
        devices: of its ranks then.
        lasts: seconds that it will take.
        reason: why it waits, in a sentence; "" where it starts now.
    """

    name: str
    seconds: float | None
    devices: tuple[str, ...]
    lasts: float
    reason: str


@dataclass(frozen=True, slots=True)
class _Reservation:
    name: str
    begin: float
    end: float
    used: Mapping[str, int]


def in_order(queue: Sequence[Queued], used: Mapping[str, float] | None = None) -> list[Queued]:
    """The order in which runs are laid out: by priority; within one, whoever has had least goes first, with their runs in the order in which they came.

    Args:
        queue: in the order in which runs came.
        used: bytes times seconds that each owner has had of late.
    """
    found: list[Queued] = []
    for priority in sorted({each.priority for each in queue}, reverse=True):
        of_owner: dict[str, list[Queued]] = defaultdict(list)
        for each in queue:
            if each.priority == priority:
                of_owner[each.owner].append(each)
        first = {owner: index for index, owner in enumerate(of_owner)}
        heap = [((used or {}).get(owner, 0.0), first[owner], owner) for owner in of_owner]
        heapq.heapify(heap)
        while heap:
            share, index, owner = heapq.heappop(heap)
            each = of_owner[owner].pop(0)
            found.append(each)
            if of_owner[owner]:
                heapq.heappush(heap, (share + each.byte_seconds, index, owner))
    return found


def turns(
    capacity: Mapping[str, int],
    occupied: Sequence[Occupied],
    queue: Sequence[Queued],
    depth: int = DEPTH,
    ledger: type[Ledger] = Ledger,
) -> list[Turn]:
    """When each waiting run may start.

    Args:
        capacity: bytes on each device and tier, and cores of the processor.
        occupied: runs that have their bytes.
        queue: runs that wait, in their order.
        depth: so many of them are laid out.
        ledger: by whose rules runs are placed.
    """
    reservations = [
        _Reservation(each.request.name, 0.0, max(each.seconds, 0.0), _used(ledger, each.request, each.devices))
        for each in occupied
    ]
    found: list[Turn] = []
    empty = ledger(capacity)
    for position, each in enumerate(queue):
        try:
            empty.check(each.request)
        except InputError as error:  # it did when it was planned: a device is gone, or the service shares less now
            found.append(Turn(each.request.name, None, (), each.seconds, f"not here now: {error}"))
            continue
        if position >= depth:
            found.append(Turn(each.request.name, None, (), each.seconds, f"{position} runs are ahead of it"))
            continue
        turn = _laid_out(ledger, capacity, reservations, each)
        assert turn.seconds is not None
        end = turn.seconds + each.seconds
        reservations.append(_Reservation(turn.name, turn.seconds, end, _used(ledger, each.request, turn.devices)))
        found.append(turn)
    return found


def _laid_out(
    kind: type[Ledger], capacity: Mapping[str, int], reservations: Sequence[_Reservation], each: Queued
) -> Turn:
    request = each.request
    moments = sorted({0.0, *(reservation.end for reservation in reservations)})
    for moment in moments:
        free = _free(capacity, reservations, moment, moment + each.seconds)
        ledger = kind(free)
        devices = ledger.place(request)
        if devices is not None and ledger.fits(request):
            reason = "" if moment == 0.0 else _why(kind, capacity, reservations, each)
            return Turn(request.name, moment, devices, each.seconds, reason)
    raise AssertionError(f"{request.name} fits into an empty machine: it was checked when it was planned")


def _free(
    capacity: Mapping[str, int], reservations: Sequence[_Reservation], begin: float, end: float
) -> dict[str, int]:
    """Bytes of each device that nobody has at any moment of an interval."""
    overlapping = [each for each in reservations if each.begin < max(end, begin + 1e-9) and each.end > begin]
    moments = {begin, *(each.begin for each in overlapping if each.begin > begin)}
    free = dict(capacity)
    for moment in moments:
        there = [each.used for each in overlapping if each.begin <= moment < each.end]
        for name, size in capacity.items():
            free[name] = min(free[name], size - sum(used.get(name, 0) for used in there))
    return free


def _why(ledger: type[Ledger], capacity: Mapping[str, int], reservations: Sequence[_Reservation], each: Queued) -> str:
    """What keeps a run from starting now."""
    now = _free(capacity, reservations, 0.0, 0.0)
    wanted: dict[str, int] = dict(each.request.peak_bytes)
    if each.request.rank_bytes:
        kind = each.request.device
        largest = max(
            (name for name in capacity if name.partition(":")[0] == kind), key=lambda name: now[name], default=kind
        )
        wanted = dict(ledger.named(each.request, (largest,)).peak_bytes)
        wanted[largest] = wanted.get(largest, 0) + max(each.request.rank_bytes)
    short = [_lacks(name, size, now[name]) for name, size in wanted.items() if size > now.get(name, 0)]
    if short:
        return "; ".join(short)
    if len(each.request.rank_bytes) > 1:
        return f"its {len(each.request.rank_bytes)} ranks do not all have a device now"
    ahead = [other.name for other in reservations if other.begin > 0]
    return f"would delay {', '.join(ahead[:3])}" if ahead else "waits for its turn"


def _lacks(name: str, wanted: int, free: int) -> str:
    if name.partition(":")[0] == CORES:
        return f"needs {wanted} of the processor's cores, and {'no core' if free <= 0 else free} is free"
    return (
        f"needs {format_bytes(wanted)} on {name}, and {f'{format_bytes(free)} are' if free > 0 else 'nothing is'} free"
    )


def _used(ledger: type[Ledger], request: RunRequest, devices: Sequence[str]) -> dict[str, int]:
    used: dict[str, int] = dict(ledger.named(request, devices).peak_bytes)
    for name, size in zip(devices, request.rank_bytes, strict=True):
        used[name] = used.get(name, 0) + size
    return used
