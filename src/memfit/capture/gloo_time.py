"""What collectives take by the clock where the ranks are processes of this computer: gloo copies what it sends through the memory that all of them share.

A GPU's cards move bytes beside the kernels, so there a model of links says what a collective takes (`hardware/network.py`). gloo's sends are a processor's own
work, and its kinds differ by how often they copy: a reduce-scatter is an all-reduce of a copy, an all-gather is copied out of one flat tensor. So each kind is
run here, by as many ranks as threads of this process can stand in for, and what a rank sends is priced by a line through two sizes.

gloo sends in a thread of its own, which has to get a core from ranks that compute. Where there are as many cores as ranks a message of some bytes takes
milliseconds by the clock, and a tenth of that of a processor (docs/design/log.md). So ranks compute here between two collectives, as they do in a step; and
for longer before those in which all ranks meet, since then one waits for the other, too. Other programs that take the cores meanwhile make it tens of
milliseconds; what was measured beside them is measured again once it is quieter.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

from memfit.capture.reference_work import QUIETER
from memfit.hardware.cores import cores
from memfit.hardware.network import collective_seconds
from memfit.hardware.topology import PeerLink, Topology
from memfit.identity import digest
from memfit.sharding.agreement import FEW_RANKS, IN_A_STEP
from memfit.step.freed_memory import keep_freed_memory
from memfit.storage.folders import measured_once

KINDS: Final = ("all_reduce", "all_reduce of many", "all_gather", "reduce_scatter", "broadcast", "send")
# Begun one after the other, and waited for at the end: ZeroRedundancyOptimizer broadcasts each parameter so, pipelines sum gradients. How many.
AT_ONCE: Final = {"broadcast": 60, "all_reduce of many": 60}
MOST_RANKS: Final = 4  # beyond it a rank's time for each byte that it sends hardly grows
SIZES: Final = (64, 1 << 22)  # of the whole message, in bytes
RUNS: Final = 12  # of each: some get a core at once, and others wait for one
ROUNDS: Final = 3  # of which the median counts
COMPUTED: Final = bytes(1 << 23)  # hashed in between, which takes some milliseconds of one core, and not Python's lock
MEETINGS: Final = ("all_reduce", "all_gather", "reduce_scatter")  # all ranks wait for the last of them
LONGER: Final = 6  # times as much is hashed before these, a second time
LONG_RUNS: Final = 4
LOOKS: Final = 10  # at how busy the cores are
LIMIT: Final = timedelta(seconds=30)
FORMAT: Final = 5
BUSY: Final = 1.3  # times the clock's seconds that computing takes on cores that nobody else uses


@dataclass(frozen=True, slots=True)
class GlooTime:
    """Seconds of a collective by the clock.

    Attributes:
        fixed: of each kind, whatever is sent.
        for_a_byte: of each kind, for each byte that the rank sends, as `values.trace.Collective` counts them.
        fixed_after_long, for_a_byte_after_long: the same where ranks have computed for longer before.
        computing, computing_long: seconds for which they have computed before each.
        slowdown: how many times longer than on cores of its own the computing in between took.
    """

    fixed: Mapping[str, float]
    for_a_byte: Mapping[str, float]
    fixed_after_long: Mapping[str, float] = field(default_factory=dict)
    for_a_byte_after_long: Mapping[str, float] = field(default_factory=dict)
    computing: float = 0.0
    computing_long: float = 1.0
    slowdown: float = 1.0

    def seconds(self, kind: str, size: int, computed: float = 0.0) -> float | None:
        """Of one collective; None of a kind that was not run.

        Args:
            kind: of it.
            size: bytes that a rank sends.
            computed: seconds since the collective before, in which ranks have computed.
        """
        kind = "send" if kind == "receive" else kind
        if kind not in self.fixed:
            return None
        soon = self.fixed[kind] + size * self.for_a_byte[kind]
        if kind not in self.fixed_after_long:
            return soon
        late = self.fixed_after_long[kind] + size * self.for_a_byte_after_long[kind]
        part = (computed - self.computing) / (self.computing_long - self.computing)
        # What is timed wavers, and after longer computing ranks have parted no less.
        return soon + min(1.0, max(0.0, part)) * max(0.0, late - soon)

    def times(self, by: float) -> GlooTime:
        """Of the same computer when all work takes so many times as long: gloo's is that of a processor, too."""

        def slower(seconds: Mapping[str, float]) -> dict[str, float]:
            return {kind: by * each for kind, each in seconds.items()}

        return GlooTime(
            slower(self.fixed),
            slower(self.for_a_byte),
            slower(self.fixed_after_long),
            slower(self.for_a_byte_after_long),
            by * self.computing,
            by * self.computing_long,
            self.slowdown,
        )


@cache
def gloo_time(ranks: int, slowdown: float) -> GlooTime | None:
    """As slow as this computer is by now: measured once for it and kept, again where that was beside other programs; None where gloo cannot connect here.

    Args:
        ranks: of one collective.
        slowdown: how many times longer than on a quiet computer work takes by now (`CostTable.slowdown`).
    """
    if not connects():
        return None
    ranks = max(2, min(ranks, MOST_RANKS))
    identity = digest(ranks, cores(), torch.__version__, FORMAT)
    try:
        known = measured_once(
            GlooTime,
            "collectives",
            identity,
            lambda: _measured(ranks).times(1 / slowdown),  # as on a quiet computer
            worth_another=partial(_is_quieter, ranks),
        )
    except RuntimeError:
        return None
    return known.times(slowdown)


@cache
def connects() -> bool:
    """Whether this torch has gloo, and that can connect ranks on this computer."""
    if not dist.is_available() or not dist.is_gloo_available():
        return False
    try:
        _joined(2)
    except RuntimeError:
        return False
    return True


def timed_beside_others(ranks: int, slowdown: float) -> bool:
    """Whether other programs used the cores while this was measured, so that it is too high."""
    here = gloo_time(ranks, slowdown)
    return here is not None and here.slowdown > BUSY


def seconds_among(
    network: Topology | None,
    kind: str,
    size: int,
    ranks: tuple[int, ...],
    *,
    of_many: bool = False,
    computed: float = 0.0,
) -> float:
    """Seconds of a collective: measured where its ranks are processes of this computer, else by the model of the links between them.

    Args:
        network: None for assumed links.
        kind, size, ranks: as for `hardware.network.collective_seconds`.
        of_many: an all-reduce that is begun together with others.
        computed: seconds since the collective before, in which ranks have computed.
    """
    if network is not None and network.processes and (here := gloo_time(len(ranks), network.slowdown)) is not None:
        measured = here.seconds(f"{kind} of many" if of_many else kind, size, computed)
        if measured is not None:
            return measured
    return collective_seconds(network, kind, size, ranks)


def agreeing_seconds(network: Topology | None, ranks: tuple[int, ...], messages: int = IN_A_STEP) -> float:
    """Seconds of a step in which ranks that are processes of this computer agree, in so many messages; of others they are not counted."""
    if network is None or not network.processes:
        return 0.0
    # Of few ranks each sends to all others at once.
    kind, times = ("send", len(ranks) - 1) if len(ranks) <= FEW_RANKS else ("all_reduce", 1)
    return messages * times * seconds_among(network, kind, SIZES[0], ranks)


def core_sharing(network: Topology | None) -> float:
    """How many times longer than alone ranks compute that are processes of this computer, where it has fewer cores than they have threads."""
    if network is None or not network.processes:
        return 1.0
    alone = torch.get_num_threads() / cores()
    return max(1.0, len(network.devices) * alone) / max(1.0, alone)


def as_processes(devices: Topology) -> Topology:
    """The same devices as processes of this computer; as they were where gloo cannot connect them."""
    return replace(devices, processes=True) if connects() else devices


def link_of(network: Topology, peer: PeerLink) -> PeerLink:
    """What joins two devices: of processes of this computer, what a message takes with gloo."""
    here = gloo_time(len(network.devices), network.slowdown) if network.processes else None
    if here is None:
        return peer
    return replace(peer, bandwidth=1 / max(here.for_a_byte["send"], 1e-15), latency_seconds=here.fixed["send"])


def _is_quieter(ranks: int, known: GlooTime) -> bool:
    return known.slowdown > BUSY and _computing(ranks, LOOKS)[1] < QUIETER * known.slowdown


def _measured(ranks: int) -> GlooTime:
    keep_freed_memory()  # as in a step
    groups = _joined(ranks)
    slowdowns: list[float] = []

    def lines(kinds: Iterable[str], runs: int, pieces: int) -> tuple[dict[str, float], dict[str, float]]:
        """Fixed seconds and those for each byte."""
        fixed, for_a_byte = {}, {}
        for kind in kinds:
            seconds = []
            for size in SIZES:
                rounds = [_seconds(groups, kind, size, runs, pieces) for _ in range(ROUNDS)]
                seconds.append(median(taken for taken, _ in rounds))
                slowdowns.extend(slowdown for _, slowdown in rounds)
            small, large = seconds
            fixed[kind] = max(small, 1e-6)  # a difference, and the computer may have had something else to do
            for_a_byte[kind] = max(0.0, large - small) / _sent(kind, SIZES[1], ranks)
        return fixed, for_a_byte

    soon, late = lines(KINDS, RUNS, 1), lines(MEETINGS, LONG_RUNS, LONGER)
    computing = _computing(ranks, RUNS)[0] / RUNS
    return GlooTime(*soon, *late, computing, LONGER * computing, median(slowdowns))


def _sent(kind: str, size: int, ranks: int) -> int:
    """Of a message of so many bytes, what a rank sends, as `sharding.collectives` counts it."""
    share = size - size // ranks
    return {
        "all_reduce": 2 * share,
        "all_reduce of many": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
    }.get(kind, size)


def _joined(ranks: int) -> list[Any]:
    """Groups of gloo in threads of this process, which no process group of the user's knows."""
    distributed: Any = dist
    store = distributed.HashStore()
    groups: list[Any] = [None] * ranks

    def join(rank: int) -> None:
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname="127.0.0.1")]
        options._timeout = LIMIT
        groups[rank] = kind(store, rank, ranks, options)

    _together(ranks, join)
    return groups


def _seconds(groups: list[Any], kind: str, size: int, runs: int = RUNS, pieces: int = 1) -> tuple[float, float]:
    """Of one run: what the ranks take to compute and send, less what they take to compute; and how many times longer that is than on cores of their own.

    Args:
        groups: of the ranks.
        kind, size: what is sent, in bytes.
        runs: how many, but of those that are begun at once.
        pieces: of work that are done before each.
    """
    ranks, at_once = len(groups), AT_ONCE.get(kind, 1)
    runs = runs if at_once == 1 else 1
    numbers = size // 4 // ranks * ranks  # of equal parts
    whole = [torch.ones(numbers) for _ in groups]
    parts = [torch.ones(numbers // ranks) for _ in groups]

    def sent(rank: int, number: int) -> Any:
        group = groups[rank]
        if kind.startswith("all_reduce"):
            return group.allreduce([whole[rank]])
        if kind == "all_gather":
            return group._allgather_base(whole[rank], parts[rank])
        if kind == "reduce_scatter":
            return group._reduce_scatter_base(parts[rank], whole[rank])
        if kind == "broadcast":
            return group.broadcast([whole[rank]], dist.BroadcastOptions())
        return (group.send if rank == 0 else group.recv)([whole[rank]], 1 - rank, number) if rank < 2 else None

    def run(rank: int) -> None:
        for number in range(runs):
            for _ in range(pieces):
                _compute()
            works = [sent(rank, number) for _ in range(at_once)]
            for work in works:
                if work is not None:
                    work.wait()

    computing, slowdown = _computing(ranks, runs * pieces)
    return (_together(ranks, run) - computing) / (runs * at_once), slowdown


def _computing(ranks: int, runs: int) -> tuple[float, float]:
    """So many runs of all ranks: seconds by the clock, and how many times longer that is than on cores of their own."""
    before = time.process_time()

    def compute(_: int) -> None:
        for _ in range(runs):
            _compute()

    seconds = _together(ranks, compute)
    return seconds, seconds * min(ranks, cores()) / (time.process_time() - before)


def _compute() -> None:
    hashlib.sha256(COMPUTED).digest()


def _together(ranks: int, do: Callable[[int], None]) -> float:
    """In as many threads at once: seconds by the clock until all are through.

    Raises:
        RuntimeError: one of them failed.
    """
    failed: list[Exception] = []

    def tried(rank: int) -> None:
        try:
            do(rank)
        except Exception as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=tried, args=(rank,), daemon=True) for rank in range(ranks)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if failed:
        raise RuntimeError(str(failed[0])) from failed[0]
    return seconds
