"""Costs of one device, kept on disk: each distinct call is timed once for this device, number of threads and version of torch."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Final

import torch

from memfit.capture.calls import CallSpec
from memfit.capture.costs import Cost
from memfit.capture.present_machine import device_name, present_machine
from memfit.capture.reference_work import BUSY, QUIETER, ReferenceWork
from memfit.capture.roofline import estimated_seconds
from memfit.capture.timing import KernelTimer, processor_clock
from memfit.identity import digest
from memfit.step.generators import forked_generators
from memfit.storage.folders import cache_folder

FORMAT: Final = 7


@dataclass(slots=True)
class _Known:
    """What this process knows of one table.

    Attributes:
        costs: by the digest of a call.
        settled: digests of those that something in this process has asked for.
    """

    costs: dict[str, Cost] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)


_KNOWN: Final[defaultdict[Path, _Known]] = defaultdict(_Known)  # by the file


class CostTable:
    """Costs of one device, read from and kept on disk.

    What was timed on a busy CPU is timed once more at once, and again by a later process that finds it less busy. Within one process a cost stays as it was
    when first asked for, so that all candidates of a plan have the same, and all plans that are compared.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self.device = device
        self.name = device_name(device)
        identity = digest(self.name, torch.get_num_threads() if device.type == "cpu" else 0, torch.__version__, FORMAT)
        self.path = (folder or cache_folder()) / "costs" / f"{identity}.json"
        self._known = _KNOWN[self.path]
        least = inf
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            stored = json.loads(self.path.read_text())
            least = float(stored["reference_seconds"] or inf)
            # Another process may have written the file meanwhile.
            costs = {key: _read(row) for key, row in stored["costs"].items() if key not in self._known.settled}
            self._known.costs.update(costs)
        self._reference = ReferenceWork(processor_clock(), least) if device.type == "cpu" else None

    def measure(
        self, calls: Mapping[str, CallSpec], progress: Callable[[str, float], None] | None = None
    ) -> dict[str, Cost]:
        """Costs of all calls; those not known yet, or known from a busier time, are measured now and written to disk."""
        digests = {key: digest(key) for key in calls}
        wanted = self._wanted(digests)
        if wanted:
            # Random operations are timed too: what the user's run draws must not depend on what was in the cache.
            with forked_generators():
                self._time(wanted, calls, progress)
                busy = {k: d for k, d in wanted.items() if self._known.costs[d].slowdown > BUSY}
                if busy:
                    self._time(busy, calls, progress)
            self._write()
        self._known.settled.update(digests.values())
        return {key: self._known.costs[known] for key, known in digests.items()}

    def _wanted(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Of these, the calls to be timed now."""
        costs, settled = self._known.costs, self._known.settled
        fresh = {key: d for key, d in digests.items() if d not in settled}
        wanted = {key: d for key, d in fresh.items() if d not in costs}
        busy = {key: d for key, d in fresh.items() if d in costs and costs[d].slowdown > BUSY}
        if busy and self._reference is not None:
            now = self._reference.slowdown(now=True)
            wanted |= {key: d for key, d in busy.items() if now < QUIETER * costs[d].slowdown}
        return wanted

    def _time(
        self, wanted: Mapping[str, str], calls: Mapping[str, CallSpec], progress: Callable[[str, float], None] | None
    ) -> None:
        """Time calls; of two costs of one call the one stays that was taken when the machine was less busy."""

        def tell(number: int) -> None:
            if progress is not None:
                progress("timing operations", number / len(wanted))

        found = KernelTimer(self.device, calls, self._reference).measure({key: calls[key] for key in wanted}, tell)
        machine, costs = present_machine(self.device), self._known.costs
        for key, known in wanted.items():
            cost = found.get(key)
            if known not in costs:
                costs[known] = cost or Cost(estimated_seconds(calls[key], machine), measured=False)
            elif cost is not None and cost.slowdown < costs[known].slowdown:
                costs[known] = cost

    def _write(self) -> None:
        # The cache is a convenience: a read-only or full disk must not stop a plan.
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            least = inf if self._reference is None else self._reference.least_seconds
            rows = {k: astuple(c) for k, c in self._known.costs.items()}
            temporary.write_text(json.dumps({"reference_seconds": None if least == inf else least, "costs": rows}))
            temporary.replace(self.path)


def _read(row: Sequence[Any]) -> Cost:
    """A cost as it was written."""
    seconds, workspace, made, layouts, measured, slowdown = row
    return Cost(
        seconds,
        workspace,
        None if made is None else tuple(made),
        None if layouts is None else tuple(None if each is None else (each[0], tuple(each[1])) for each in layouts),
        measured,
        slowdown,
    )
