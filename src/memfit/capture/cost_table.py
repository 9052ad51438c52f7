"""Costs of one device, kept on disk: each distinct call is timed once for this device, number of threads and version of torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, fields, replace
from itertools import islice
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from memfit.capture.calls import CallSpec
from memfit.capture.costs import Cost
from memfit.capture.fresh_memory import fresh_memory
from memfit.capture.host_time import ROWS, TOUCHED, HostTime, host_time
from memfit.capture.present_machine import device_name, present_machine
from memfit.capture.reference_work import BUSY, QUIETER, STALLED, ReferenceWork, noted
from memfit.capture.roofline import estimated_seconds
from memfit.capture.timing import KernelTimer, agree, processor_clock
from memfit.identity import digest
from memfit.step.freed_memory import keep_freed_memory
from memfit.step.generators import forked_generators
from memfit.storage.folders import cache_folder

FORMAT: Final = 30
# Known calls that are timed once more beside new ones, and their seconds: what is shorter tells of Python, what is longer takes too long.
BESIDE_SECONDS: Final = 1e-4, 3e-2
MOST_BESIDE: Final = 8
MOST_NOW: Final = 16  # calls whose seconds now tell how slow the computer is: what slows products does not slow what goes through memory as much
FEWEST_BESIDE: Final = 3


class _KnownCosts:
    """What this process knows of one table: the costs in its file, which any process appends to, a line each, and those that were timed here.

    Args:
        path: of the file.

    Attributes:
        settled: digests of the calls whose costs something in this process has asked for.
        least_reference_seconds: that the reference work has taken in this process and in those that have written costs; infinite where it has not been timed.
        looked: the slowdown of this computer by the reference work, as this process found it first; None before that.
        slowdown: of this computer while this process plans, by which all its costs are multiplied; None before the first.
        long: the longest calls whose costs this process knows, and their seconds.
    """

    def __init__(self, path: Path) -> None:
        self.settled: set[str] = set()
        self.least_reference_seconds = inf
        self.looked: float | None = None
        self.slowdown: float | None = None
        self.long: dict[str, tuple[CallSpec, float]] = {}
        self._path = path
        self._costs: dict[str, Cost] = {}
        self._rows: dict[str, Any] = {}  # as they were read, until somebody asks for them
        self._read_bytes = 0

    def read(self) -> None:
        """Read what has been appended since the last time. A line that is no use is left out: the call is timed again."""
        with suppress(OSError):
            size = self._path.stat().st_size
            if size < self._read_bytes:
                self._read_bytes = 0  # another file by now
            if size == self._read_bytes:
                return
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                lines = file.read().splitlines(keepends=True)
            for line in lines:
                if line.endswith(b"\n"):
                    self._read_bytes += len(line)
                    self._note(line)

    def _note(self, line: bytes) -> None:
        with suppress(ValueError, TypeError, IndexError):
            key, row = json.loads(line)
            if row[_LEAST] is not None:
                self.least_reference_seconds = min(self.least_reference_seconds, row[_LEAST])
            if key not in self.settled:
                self._rows[str(key)] = row
                self._costs.pop(key, None)

    def append(self, digests: Iterable[str], least_reference_seconds: float) -> None:
        """Write these costs to the file. The file is a convenience: a read-only or full disk must not stop a plan."""
        self.least_reference_seconds = min(least_reference_seconds, self.least_reference_seconds)
        least = None if self.least_reference_seconds == inf else self.least_reference_seconds
        lines = [json.dumps([d, [*astuple(self._costs[d]), least]]) for d in digests if d in self._costs]
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # One write, so that other processes' lines are before or after these; and a line of its own, should one have been killed in the midst of one.
            with self._path.open("ab", buffering=0) as file:
                file.write("".join(f"\n{line}" for line in [*lines, ""]).encode())

    def get(self, key: str) -> Cost | None:
        """The cost of a call; None where it is not known."""
        if key in self._rows:
            with suppress(ValueError, TypeError, IndexError):
                self._costs[key] = _read(self._rows[key], self.least_reference_seconds)
            del self._rows[key]
        return self._costs.get(key)

    def put(self, key: str, cost: Cost) -> None:
        """A cost timed now."""
        self._rows.pop(key, None)
        self._costs[key] = cost

    def note_long(self, calls: Mapping[str, CallSpec], digests: Mapping[str, str]) -> None:
        """Remember the longest of these, whose digests are given, and of those before, but for what was timed on a busy computer."""
        quiet = {
            key: each
            for key, each in self.long_of(calls, digests).items()
            if self._costs[digests[key]].slowdown <= BUSY
        }
        self.long = _longest({**self.long, **quiet}, MOST_BESIDE)

    def long_of(self, calls: Mapping[str, CallSpec], digests: Mapping[str, str]) -> dict[str, tuple[CallSpec, float]]:
        """Those of some calls, whose digests are given, that are long enough to be timed once more, and their seconds."""
        least, most = BESIDE_SECONDS
        costs = {key: self.get(digests[key]) for key in calls}
        return {
            key: (calls[key], cost.seconds)
            for key, cost in costs.items()
            if cost is not None and cost.measured and least <= cost.seconds <= most
        }


def _longest(calls: Mapping[str, tuple[CallSpec, float]], number: int) -> dict[str, tuple[CallSpec, float]]:
    """So many of some calls with their seconds."""
    return dict(sorted(calls.items(), key=lambda item: -item[1][1])[:number])


# In the places of digests.
_HOST: Final = (
    *(f"a dispatch mode after a product of {rows} rows" for rows in ROWS),
    *(f"a product of {rows} rows" for rows in ROWS),
    *(f"an operation after {touched} bytes" for touched in TOUCHED),
    *(f"a view after {touched} bytes" for touched in TOUCHED),
)
# Place in a line, after the fields of a cost: the least seconds of the reference work when it was written.
_LEAST: Final = len(fields(Cost))
_KNOWN: Final[dict[Path, _KnownCosts]] = {}  # by the file


class CostTable:
    """Costs of one device, read from and kept on disk.

    What was timed on a busy CPU is timed again by a later process that finds it less busy. Within one process a cost stays as it was
    when first asked for, so that all candidates of a plan have the same, and all plans that are compared.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self.device = device
        self.name = device_name(device)
        on_a_cpu = device.type == "cpu"
        # Where the environment has malloc keep everything, operations meet no page faults; elsewhere those of large blocks are noted with them.
        threads, gives_back = torch.get_num_threads() if on_a_cpu else 0, on_a_cpu and keep_freed_memory()
        identity = digest(self.name, threads, torch.__version__, FORMAT, gives_back)
        self.path = (folder or cache_folder()) / "costs" / f"{identity}.jsonl"
        self._known = _KNOWN.setdefault(self.path, _KnownCosts(self.path))
        self._known.read()
        least = self._known.least_reference_seconds
        self._reference = ReferenceWork(processor_clock(), least) if device.type == "cpu" else None

    def measure(
        self, calls: Mapping[str, CallSpec], progress: Callable[[str, float], None] | None = None
    ) -> dict[str, Cost]:
        """Costs of all calls; those not known yet, or known from a busier time, are measured now and written to disk."""
        digests = {key: digest(key) for key in calls}
        known = self._known
        wanted = self._wanted(digests)
        if wanted:
            # Random operations are timed too: what the user's run draws must not depend on what was in the cache.
            with forked_generators():
                self._time(wanted, calls, progress)
            known.append(wanted.values(), inf if self._reference is None else self._reference.least_seconds)
        known.settled.update(digests.values())
        known.note_long(calls, digests)
        if known.slowdown is None and self._reference is not None:
            known.slowdown = self._slowdown_of(calls, digests)
        found = {key: known.get(d) for key, d in digests.items()}
        return {key: self._here(cost) for key, cost in found.items() if cost is not None}

    @property
    def slowdown(self) -> float:
        """How many times longer than on a quiet computer work takes while this process plans, by which costs are multiplied; 1 before the first."""
        return 1.0 if self._known.slowdown is None else self._known.slowdown

    def host_time(self) -> HostTime:
        """What this computer takes beside the kernels; timed once, and once more where the machine was busy."""
        known = self._known
        if self._wanted({key: key for key in _HOST}):
            before = self._slowdown_and_stall()
            found = host_time(processor_clock())
            seconds = found.modes + found.products + found.operations + found.views
            looks = before, self._slowdown_and_stall()
            busy = sum(slowdown for slowdown, _ in looks) / 2
            as_noted = noted(busy, stalls=any(stalls for _, stalls in looks))
            if any(as_noted < _slowdown(known.get(key)) for key in _HOST):
                for key, each in zip(_HOST, seconds, strict=True):
                    known.put(key, Cost(each / busy, slowdown=as_noted))
                known.append(_HOST, inf if self._reference is None else self._reference.least_seconds)
        known.settled.update(_HOST)
        costs = [known.get(key) for key in _HOST]
        here = [self._here(cost).seconds for cost in costs if cost is not None]
        parts = iter(here)
        counts = (len(ROWS), len(ROWS), len(TOUCHED), len(TOUCHED))
        modes, products, operations, views = (tuple(islice(parts, count)) for count in counts)
        return HostTime(modes, products, operations, views, fresh_memory(processor_clock()).seconds)

    def _slowdown_and_stall(self) -> tuple[float, bool]:
        """Of this computer now, and whether threads wait for each other."""
        return (1.0, False) if self._reference is None else (self._reference.slowdown(), self._reference.stalls)

    def _here(self, cost: Cost) -> Cost:
        """A cost as this computer has it while this process plans. One number for all, so that costs taken at different times can be compared."""
        if self._reference is None or not cost.measured:
            return cost
        slowdown = self._known.slowdown
        return _scaled(cost, self._look(self._reference) if slowdown is None else slowdown)

    def _slowdown_of(self, calls: Mapping[str, CallSpec], digests: Mapping[str, str]) -> float:
        """How many times longer than their costs the longest of these calls take now; by the reference work where too few are long enough, or threads wait.

        What slows that does not slow all work alike: on a virtual machine it took 1.0 to 1.45 times its least time from one moment to the next while a step
        took the same (docs/design/log.md, 2026-11-30).
        """
        assert self._reference is not None, "of a CPU"
        long, now = _longest(self._known.long_of(calls, digests), MOST_NOW), dict[str, float]()
        if len(long) >= FEWEST_BESIDE:
            with forked_generators():
                now = KernelTimer(self.device, calls).seconds_now({key: call for key, (call, _) in long.items()})
        if len(now) < FEWEST_BESIDE or median(seconds / long[key][1] for key, seconds in now.items()) >= STALLED:
            return self._look(self._reference)
        return sum(now.values()) / sum(long[key][1] for key in now)

    def _look(self, reference: ReferenceWork) -> float:
        """The slowdown of this computer by the reference work."""
        known = self._known
        if known.looked is None:
            known.looked = reference.slowdown()
            known.least_reference_seconds = min(known.least_reference_seconds, reference.least_seconds)
        return known.looked

    def _wanted(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Of these, the calls to be timed now."""
        fresh = {key: d for key, d in digests.items() if d not in self._known.settled}
        if fresh and self._reference is not None:
            # Before costs are read, which tells whether the computer was busy when they were taken.
            self._look(self._reference)
        slowdowns = {d: _slowdown(self._known.get(d)) for d in fresh.values()}
        wanted = {key: d for key, d in fresh.items() if slowdowns[d] == inf}
        busy = {key: d for key, d in fresh.items() if BUSY < slowdowns[d] < inf}
        if busy and self._reference is not None:
            now = self._reference.slowdown()
            wanted |= {key: d for key, d in busy.items() if now < QUIETER * slowdowns[d]}
        return wanted

    def _time(
        self, wanted: Mapping[str, str], calls: Mapping[str, CallSpec], progress: Callable[[str, float], None] | None
    ) -> None:
        """Time calls; of two costs of one call the one stays that was taken when the machine was less busy."""

        def tell(number: int) -> None:
            if progress is not None:
                progress("timing operations", number / (len(beside) + len(wanted)))

        if self._reference is not None:
            self._reference.slowdown()  # so that its least time is known before anything is compared with it
        # What is timed now takes a few percent longer or shorter than what was timed on another day, or a minute ago, all of it alike, by more than the
        # reference work does. A plan in micro-batches would be compared with one of the whole batch by that much too much or too little.
        machine = present_machine(self.device)
        beside: dict[str, tuple[CallSpec, float]] = {}
        if self._reference is not None and any(
            estimated_seconds(calls[key], machine) >= BESIDE_SECONDS[0] for key in wanted
        ):
            beside = {key: each for key, each in self._known.long.items() if key not in wanted}
        again = {key: call for key, (call, _) in beside.items()}
        timer = KernelTimer(self.device, {**again, **calls}, self._reference)
        found = timer.measure({**again, **{key: calls[key] for key in wanted}}, tell)
        ratios = [seconds / found[key].seconds for key, (_, seconds) in beside.items() if key in found]
        # Where they do not agree it is not all work that takes longer by as much, but some of it, for reasons of its own.
        scale = median(ratios) if len(ratios) >= FEWEST_BESIDE and agree(ratios) else 1.0
        for key, d in wanted.items():
            cost, before = found.get(key), self._known.get(d)
            cost = None if cost is None else _scaled(cost, scale)
            if cost is None and before is None:
                self._known.put(d, Cost(estimated_seconds(calls[key], machine), measured=False))
            elif cost is not None and cost.slowdown < _slowdown(before):
                self._known.put(d, cost)


def _scaled(cost: Cost, by: float) -> Cost:
    """Times so much."""
    cold = None if cost.cold_seconds is None else cost.cold_seconds * by
    return replace(cost, seconds=cost.seconds * by, cold_seconds=cold)


def _slowdown(cost: Cost | None) -> float:
    """How busy the machine was when a cost was taken; infinite where none was."""
    return inf if cost is None else cost.slowdown


def _read(row: Sequence[Any], least_reference_seconds: float) -> Cost:
    """A cost as it was written, or less where the reference work has taken less since: the computer was busy when that was least, and nobody knew it.

    Args:
        row: as `append` writes it.
        least_reference_seconds: that the reference work has taken by now.
    """
    seconds, workspace, made, layouts, measured, slowdown, cold, faults, least = row
    truly = slowdown if least is None else slowdown * least / least_reference_seconds
    if truly <= BUSY:  # by so much it wavers
        truly = slowdown
    cost = Cost(
        seconds,
        workspace,
        None if made is None else tuple(made),
        None if layouts is None else tuple(None if each is None else (each[0], tuple(each[1])) for each in layouts),
        measured,
        truly,
        cold,
        faults,
    )
    return _scaled(cost, slowdown / truly)
