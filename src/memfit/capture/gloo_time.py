"""What collectives take of a processor where the ranks are processes of this computer: gloo copies what it sends through the memory that all of them share.

A GPU's cards move bytes beside the kernels, so there a model of links says what a collective takes (`hardware/network.py`). gloo's sends are a processor's own
work, and its kinds differ by how often they copy: a reduce-scatter is an all-reduce of a copy, an all-gather is copied out of one flat tensor. So each kind is
run here, by as many ranks as threads of this process can stand in for, and what a rank sends is priced by a line through two sizes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist

from memfit.hardware.network import collective_seconds
from memfit.hardware.topology import Topology
from memfit.identity import digest
from memfit.storage.folders import measured_once

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
MOST_RANKS: Final = 4  # beyond it a rank's processor time for each byte that it sends hardly grows
SIZES: Final = (64, 1 << 22)  # of the whole message, in bytes
RUNS: Final = (12, 3)  # of each, in a row
ROUNDS: Final = 3  # of which the fastest counts: what else runs only adds
LIMIT: Final = timedelta(seconds=30)
FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class GlooTime:
    """Processor seconds of one rank's collectives.

    Attributes:
        fixed: of each kind, whatever is sent.
        for_a_byte: of each kind, for each byte that the rank sends, as `values.trace.Collective` counts them.
    """

    fixed: Mapping[str, float]
    for_a_byte: Mapping[str, float]

    def seconds(self, kind: str, size: int) -> float | None:
        """Of one collective in which a rank sends so many bytes; None of a kind that was not run."""
        kind = "send" if kind == "receive" else kind
        return self.fixed[kind] + size * self.for_a_byte[kind] if kind in self.fixed else None


@cache
def gloo_time(ranks: int) -> GlooTime | None:
    """Measured once for a computer and kept; None where gloo cannot connect here, or is not in this torch.

    Args:
        ranks: of one collective.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        return None
    ranks = max(2, min(ranks, MOST_RANKS))
    identity = digest(ranks, os.cpu_count(), torch.__version__, FORMAT)
    try:
        return measured_once(GlooTime, "collectives", identity, lambda: _measured(ranks))
    except RuntimeError:
        return None


def seconds_among(network: Topology | None, kind: str, size: int, ranks: tuple[int, ...]) -> float:
    """Seconds of a collective: measured where its ranks are processes of this computer, else by the model of the links between them.

    Args:
        network: None for assumed links.
        kind, size, ranks: as for `hardware.network.collective_seconds`.
    """
    if network is not None and network.processes and (here := gloo_time(len(ranks))) is not None:
        measured = here.seconds(kind, size)
        if measured is not None:
            return measured
    return collective_seconds(network, kind, size, ranks)


def as_processes(devices: Topology) -> Topology:
    """The same devices as processes of this computer: a message between two of them takes what gloo takes here. As they were where gloo cannot tell."""
    if (here := gloo_time(len(devices.devices))) is None:
        return devices
    peers = tuple(
        replace(peer, bandwidth=1 / max(here.for_a_byte["send"], 1e-15), latency_seconds=here.fixed["send"])
        for peer in devices.peers
    )
    return replace(devices, peers=peers, processes=True)


def _measured(ranks: int) -> GlooTime:
    groups = _joined(ranks)
    fixed, for_a_byte = {}, {}
    for kind in KINDS:
        small, large = (
            min(_processor_seconds(groups, kind, size, runs) for _ in range(ROUNDS))
            for size, runs in zip(SIZES, RUNS, strict=True)
        )
        fixed[kind] = small
        for_a_byte[kind] = max(0.0, large - small) / _sent(kind, SIZES[1], ranks)
    return GlooTime(fixed, for_a_byte)


def _sent(kind: str, size: int, ranks: int) -> int:
    """Of a message of so many bytes, what a rank sends, as `sharding.collectives` counts it."""
    share = size - size // ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share}.get(kind, size)


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


def _processor_seconds(groups: list[Any], kind: str, size: int, runs: int) -> float:
    """Of one rank and one run."""
    ranks = len(groups)
    numbers = size // 4
    whole = [torch.ones(numbers) for _ in groups]
    parts = [torch.ones(numbers // ranks) for _ in groups]

    def run(rank: int) -> None:
        group = groups[rank]
        for number in range(runs):
            if kind == "all_reduce":
                group.allreduce([whole[rank]]).wait()
            elif kind == "all_gather":
                group._allgather_base(whole[rank], parts[rank]).wait()
            elif kind == "reduce_scatter":
                group._reduce_scatter_base(parts[rank], whole[rank]).wait()
            elif kind == "broadcast":
                group.broadcast([whole[rank]], dist.BroadcastOptions()).wait()
            elif rank < 2:
                (group.send if rank == 0 else group.recv)([whole[rank]], 1 - rank, number).wait()

    begin = time.process_time()
    _together(ranks, run)
    return (time.process_time() - begin) / (2 if kind == "send" else ranks) / runs


def _together(ranks: int, do: Callable[[int], None]) -> None:
    """In as many threads at once.

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
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise RuntimeError(str(failed[0])) from failed[0]
