"""How long runs wait, and how full the devices are: the service's queue against first-come-first-served and against fixed slots, on a simulated clock.

Runs are drawn; or those whose bytes and seconds the planner has found in `bench/frontier`; or a published trace's (`--trace FILE`, see `traces.py`). Beside
them the figures of `crashes.py`.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import measuring
import traces

from memfit.runner import Ledger, RunRequest
from memfit.service.queue import Occupied, Queued, in_order, turns

GIB = 1 << 30
CAPACITY = {"cuda:0": 80 * GIB, "cuda:1": 80 * GIB}
LONGEST_SECONDS = 24 * 3600.0  # that a run of a published trace took
LOAD = 0.85  # of the devices, that planned and published runs take
SLOTS = 4  # of each device, where slots are fixed
RUNS = 500
EVERY_SECONDS = 105.0  # a run comes, on the mean


@dataclass(frozen=True)
class Drawn:
    """A run of the trace: when it comes, what it takes, how long it is thought to take, and how long it does."""

    queued: Queued
    arrives: float
    takes: float


@dataclass(frozen=True)
class Workload:
    """Runs, and the devices that they share."""

    capacity: dict[str, int]
    runs: list[Drawn]


def drawn(seed: int, error: float) -> Workload:
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
    return Workload(CAPACITY, found)


def planned(seed: int, error: float) -> Workload:
    """Runs of the models of `bench/frontier`, each with one of the plans that the planner has made for it there: its peak, its seconds.

    The largest takes four fifths of one of the two devices.
    """
    plans: dict[str, list[tuple[int, float]]] = {}
    for row in measuring.kept("frontier"):
        if row["kind"] == "memfit":
            plans.setdefault(row["model"], []).append((row["predicted_peak_bytes"], row["predicted_ratio"]))
    draw, now, found = random.Random(seed), 0.0, []
    device = max(size for each in plans.values() for size, _ in each) * 5 // 4
    jobs = []
    for _ in range(RUNS):
        size, ratio = draw.choice(plans[draw.choice(sorted(plans))])
        jobs.append((size, min(14_400.0, max(30.0, ratio * draw.lognormvariate(math.log(420), 1.1)))))
    every = sum(size * seconds for size, seconds in jobs) / (LOAD * 2 * device) / RUNS
    for number, (size, seconds) in enumerate(jobs):
        now += draw.expovariate(1 / every)
        request = RunRequest(f"r{number}", ("train",), rank_bytes=(size,), device="cuda")
        takes = seconds * draw.lognormvariate(0, error) if error else seconds
        found.append(Drawn(Queued(request, seconds, owner=f"u{draw.randrange(5)}"), now, takes))
    return Workload({"cuda:0": device, "cuda:1": device}, found)


def published(file: Path, seed: int, error: float) -> Workload:
    """A published trace, on as many devices of 80 GiB as its jobs would fill to `LOAD`; at least as many as its largest job has.

    What ran longer than a day is left out: in OpenB these are mostly pods that serve, and some stay for months.
    """
    draw, size, found = random.Random(seed), 80 * GIB, []
    jobs = traces.read(file, RUNS, LONGEST_SECONDS)
    taken = sum(job.gpus * job.share * job.seconds for job in jobs)
    span = max(job.arrives for job in jobs) or 1.0
    devices = max(math.ceil(taken / (LOAD * span)), *(job.gpus for job in jobs))
    for number, job in enumerate(jobs):
        request = RunRequest(f"r{number}", ("train",), rank_bytes=(int(size * job.share),) * job.gpus, device="cuda")
        takes = job.seconds * draw.lognormvariate(0, error) if error else job.seconds
        found.append(Drawn(Queued(request, job.seconds, owner=job.owner), job.arrives, takes))
    return Workload({f"cuda:{number}": size for number in range(devices)}, found)


Policy = Callable[[Ledger, Sequence[Occupied], Sequence[Queued]], list[str]]


def backfill(ledger: Ledger, occupied: Sequence[Occupied], queue: Sequence[Queued]) -> list[str]:
    """The service's."""
    return [turn.name for turn in turns(ledger.capacity, occupied, in_order(queue)) if turn.seconds == 0.0]


def first_come(ledger: Ledger, _occupied: Sequence[Occupied], queue: Sequence[Queued]) -> list[str]:
    """In the order in which they came; whoever does not fit holds up all behind."""
    return [queue[0].request.name] if ledger.fits(queue[0].request) else []


def slotted(request: RunRequest, device: int) -> RunRequest:
    """The same, as one that takes whole slots of a device."""
    slot = device // SLOTS
    return RunRequest(
        request.name,
        request.command,
        rank_bytes=tuple(min(SLOTS, math.ceil(size / slot)) * slot for size in request.rank_bytes),
        device="cuda",
    )


def simulated(workload: Workload, policy: Policy, *, slots: bool) -> dict[str, float]:
    """One policy on one trace."""
    runs, device = workload.runs, workload.capacity["cuda:0"]
    ledger, now, waits, used = Ledger(workload.capacity), 0.0, list[float](), 0.0

    def shape(request: RunRequest) -> RunRequest:
        return slotted(request, device) if slots else request

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
        assert all(ledger.used(name) <= size for name, size in workload.capacity.items())
    waits.sort()
    return {
        "mean_wait": sum(waits) / len(waits),
        "median_wait": waits[len(waits) // 2],
        "p95_wait": waits[int(0.95 * len(waits))],
        "share_used": used / (now * sum(workload.capacity.values())),
        "seconds": now,
    }


POLICIES: dict[str, tuple[Policy, bool]] = {  # and whether slots are fixed
    "the service": (backfill, False),
    "first come, first served": (first_come, False),
    "fixed slots, first come": (first_come, True),
    "fixed slots, with the service's order": (backfill, True),
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    heads = [
        "runs",
        "devices",
        "seconds that a run takes",
        "policy",
        "mean wait",
        "median",
        "95 %",
        "bytes in use",
        "until the last end",
    ]
    body = [
        [
            row["runs"], str(row["devices"]), row["case"], row["policy"], *(f"{row[name] / 60:.0f} min" for name in ("mean_wait", "median_wait", "p95_wait")),
            f"{100 * row['share_used']:.0f} %", f"{row['seconds'] / 3600:.1f} h",
        ]
        for row in rows
        if row["part"] == "schedules"
    ]  # fmt: skip
    parts = [measuring.table(heads, body)]
    killed = [row for row in rows if row["part"] == "kills"]
    if killed:
        heads = [
            "runs",
            "kills of the service",
            "of watchers",
            "of processes",
            "lost",
            "run twice",
            "two of 60 % together",
            "ends without a cause",
            "done, failed, refused, cancelled",
        ]
        body = [
            [str(row["runs"]), *(str(row["kills"].get(kind, 0)) for kind in ("service", "watcher", "run")),
             *(str(row[name]) for name in ("lost", "twice", "together", "unexplained")),
             ", ".join(str(row["states"].get(state, 0)) for state in ("done", "failed", "refused", "cancelled"))]
            for row in killed
        ]  # fmt: skip
        parts.append(measuring.table(heads, body))
    return "\n\n".join([*parts, *about_status(rows)])


def about_status(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What `status.py` has found: a table of requests, and one of the page."""
    status = [row for row in rows if row["part"] == "status"]
    heads = [
        "asked 200 times a second",
        "runs that train",
        "processor time of the service",
        "where it does not sleep in between",
        "of the client",
        "median",
        "99 %",
    ]
    heads += ["speed of training left", "beside the same client of a server that does nothing"]

    def left(share: float | None) -> str:
        return "" if share is None else f"{100 * share:.1f} %"

    times = ("processor_seconds", "processor_seconds_at_once", "client_processor_seconds", "p50", "p99")
    body = [
        [f"`{row['path']}`", str(row["training"]), *(f"{1e3 * row[name]:.2f} ms" for name in times),
         left(row["kept"]), left(row["kept_beside_clients_alone"])]
        for row in status if "rate" in row
    ]  # fmt: skip
    found = [measuring.table(heads, body)] if body else []
    names = ("first_paint", "paint", "slowest_paint", "first_filled", "filled")
    body = [[str(row["stored"]), *(f"{1e3 * row[name]:.0f} ms" for name in names)] for row in status if "paint" in row]
    heads = [
        "stored runs",
        "first paint of the page in a new browser",
        "median",
        "slowest",
        "runs shown in a new browser",
        "median",
    ]
    return [*found, measuring.table(heads, body)] if body else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="a published trace, on this computer: it alone is asked"
    )
    parser.add_argument("--runs", choices=("drawn", "planned"), help="only these")
    arguments = parser.parse_args()
    workloads: dict[str, Callable[[int, float], Workload]] = {"drawn": drawn, "planned": planned}
    if arguments.runs is not None:
        workloads = {arguments.runs: workloads[arguments.runs]}
    if arguments.trace is not None:
        workloads = {arguments.trace.stem: partial(published, arguments.trace)}
    rows = []
    for which, made in workloads.items():
        for case, error in (("as predicted", 0.0), ("off by 1.5 times, either way", 0.4)):
            # A published trace is one: only what is drawn beside it differs.
            seeds = 1 if arguments.trace is not None and not error else arguments.seeds
            asked = [made(seed, error) for seed in range(seeds)]
            for name, (policy, slots) in POLICIES.items():
                found = [simulated(each, policy, slots=slots) for each in asked]
                row = {
                    "runs": which,
                    "devices": len(asked[0].capacity),
                    "case": case,
                    "policy": name,
                    **{key: sum(each[key] for each in found) / len(found) for key in found[0]},
                }
                print(row, flush=True)
                rows.append(row)
    measuring.keep_part(
        "service", "schedules", measuring.machine(), rows, lambda row: row.get("runs", "drawn") in workloads
    )


if __name__ == "__main__":
    main()
