"""How long runs wait, and how full the devices are: the service's queue against first-come-first-served and against fixed slots, on a simulated clock."""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

from memfit.runner import Ledger, RunRequest
from memfit.service.queue import Occupied, Queued, in_order, turns

GIB = 1 << 30
CAPACITY = {"cuda:0": 80 * GIB, "cuda:1": 80 * GIB}
SLOTS = 4  # of each device, where slots are fixed
RUNS = 500
EVERY_SECONDS = 105.0  # a run comes, on the mean


@dataclass(frozen=True)
class Drawn:
    """A run of the trace: when it comes, what it takes, how long it is thought to take, and how long it does."""

    queued: Queued
    arrives: float
    takes: float


def trace(seed: int, error: float) -> list[Drawn]:
    """Runs of lognormal bytes and seconds, as job traces have them: most are small and short, a few are neither. One in twelve has two ranks."""
    draw, now, found = random.Random(seed), 0.0, []
    for number in range(RUNS):
        now += draw.expovariate(1 / EVERY_SECONDS)
        size = int(min(78.0, max(1.0, draw.lognormvariate(math.log(14), 0.9))) * GIB)
        seconds = min(14_400.0, max(30.0, draw.lognormvariate(math.log(420), 1.1)))
        ranks = 2 if draw.random() < 1 / 12 else 1
        request = RunRequest(f"r{number}", ("train",), rank_bytes=(size,) * ranks, device="cuda")
        takes = seconds * draw.lognormvariate(0, error) if error else seconds
        found.append(Drawn(Queued(request, seconds, owner=f"u{draw.randrange(5)}"), now, takes))
    return found


Policy = Callable[[Ledger, Sequence[Occupied], Sequence[Queued]], list[str]]


def backfill(_ledger: Ledger, occupied: Sequence[Occupied], queue: Sequence[Queued]) -> list[str]:
    """The service's."""
    return [turn.name for turn in turns(CAPACITY, occupied, in_order(queue)) if turn.seconds == 0.0]


def first_come(ledger: Ledger, _occupied: Sequence[Occupied], queue: Sequence[Queued]) -> list[str]:
    """In the order in which they came; whoever does not fit holds up all behind."""
    return [queue[0].request.name] if ledger.fits(queue[0].request) else []


def slotted(request: RunRequest) -> RunRequest:
    """The same, as one that takes whole slots."""
    slot = CAPACITY["cuda:0"] // SLOTS
    return RunRequest(
        request.name,
        request.command,
        rank_bytes=tuple(math.ceil(size / slot) * slot for size in request.rank_bytes),
        device="cuda",
    )


def simulated(runs: Sequence[Drawn], policy: Policy, shape: Callable[[RunRequest], RunRequest]) -> dict[str, float]:
    """One policy on one trace."""
    ledger, now, waits, used = Ledger(CAPACITY), 0.0, [], 0.0
    coming, queue, ends = list(runs), dict[str, Drawn](), list[tuple[float, str]]()
    started: dict[str, float] = {}
    by_name = {each.queued.request.name: each for each in runs}
    while coming or queue or ends:
        now = min([coming[0].arrives] if coming else [math.inf], [ends[0][0]] if ends else [math.inf])[0]
        while ends and ends[0][0] <= now:
            ledger.give_back(heapq.heappop(ends)[1])
        while coming and coming[0].arrives <= now:
            came = coming.pop(0)
            queue[came.queued.request.name] = came
        while queue:
            waiting = [
                Queued(shape(each.queued.request), each.queued.seconds, each.queued.owner) for each in queue.values()
            ]
            occupied = [
                Occupied(
                    shape(by_name[name].queued.request),
                    ledger.devices(name),
                    max(5.0, by_name[name].queued.seconds - (now - started[name])),
                )
                for name in ledger.running
            ]
            starting = [
                name for name in policy(ledger, occupied, waiting) if ledger.fits(shape(by_name[name].queued.request))
            ]
            if not starting:
                break
            for name in starting:
                each, request = queue[name], shape(by_name[name].queued.request)
                if not ledger.fits(request):
                    continue
                del queue[name]
                ledger.promise(request)
                started[name] = now
                heapq.heappush(ends, (now + each.takes, name))
                waits.append(now - each.arrives)
                used += sum(each.queued.request.rank_bytes) * each.takes
        assert all(ledger.used(name) <= size for name, size in CAPACITY.items())
    waits.sort()
    return {
        "mean_wait": sum(waits) / len(waits),
        "median_wait": waits[len(waits) // 2],
        "p95_wait": waits[int(0.95 * len(waits))],
        "share_used": used / (now * sum(CAPACITY.values())),
        "seconds": now,
    }


POLICIES: dict[str, tuple[Policy, Callable[[RunRequest], RunRequest]]] = {
    "the service": (backfill, lambda request: request),
    "first come, first served": (first_come, lambda request: request),
    "fixed slots, first come": (first_come, slotted),
    "fixed slots, with the service's order": (backfill, slotted),
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    heads = ["seconds that a run takes", "policy", "mean wait", "median", "95 %", "bytes in use", "until the last end"]
    body = [
        [
            row["case"], row["policy"], f"{row['mean_wait'] / 60:.1f} min", f"{row['median_wait'] / 60:.1f} min", f"{row['p95_wait'] / 60:.0f} min",
            f"{100 * row['share_used']:.0f} %", f"{row['seconds'] / 3600:.1f} h",
        ]
        for row in rows
    ]  # fmt: skip
    return measuring.table(heads, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    rows = []
    for case, error in (("as predicted", 0.0), ("off by 1.5 times, either way", 0.4)):
        for name, (policy, shape) in POLICIES.items():
            found = [simulated(trace(seed, error), policy, shape) for seed in range(arguments.seeds)]
            row = {
                "case": case,
                "policy": name,
                **{key: sum(each[key] for each in found) / len(found) for key in found[0]},
            }
            print(row, flush=True)
            rows.append(row)
    measuring.keep("service", measuring.machine(), rows)


if __name__ == "__main__":
    main()
