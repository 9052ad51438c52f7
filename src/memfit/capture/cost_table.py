"""Costs of one device, kept on disk: each distinct call is timed once for this device, number of threads and version of torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Final

import torch

from memfit.capture.calls import CallSpec
from memfit.capture.costs import Cost
from memfit.capture.present_machine import device_name, present_machine
from memfit.capture.roofline import estimated_seconds
from memfit.capture.timing import KernelTimer
from memfit.identity import digest
from memfit.step.generators import forked_generators
from memfit.storage.folders import cache_folder

FORMAT: Final = 7


class CostTable:
    """Costs of one device, read from and kept on disk."""

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self.device = device
        self.name = device_name(device)
        identity = digest(self.name, torch.get_num_threads() if device.type == "cpu" else 0, torch.__version__, FORMAT)
        self.path = (folder or cache_folder()) / "costs" / f"{identity}.json"
        self._costs: dict[str, Cost] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):
            for key, (seconds, workspace, made, layouts, measured) in json.loads(self.path.read_text()).items():
                self._costs[key] = Cost(
                    seconds,
                    workspace,
                    None if made is None else tuple(made),
                    None
                    if layouts is None
                    else tuple(None if each is None else (each[0], tuple(each[1])) for each in layouts),
                    measured,
                )

    def measure(
        self, calls: Mapping[str, CallSpec], progress: Callable[[str, float], None] | None = None
    ) -> dict[str, Cost]:
        """Costs of all calls; those not known yet are measured now and written to disk."""
        missing = {key: call for key, call in calls.items() if digest(key) not in self._costs}
        if missing:
            machine = present_machine(self.device)

            def tell(number: int) -> None:
                if progress is not None:
                    progress("timing operations", number / len(missing))

            # Random operations are timed too: what the user's run draws must not depend on what was in the cache.
            with forked_generators():
                found = KernelTimer(self.device, calls).measure(missing, tell)
            for key, call in missing.items():
                cost = found.get(key)
                self._costs[digest(key)] = cost or Cost(estimated_seconds(call, machine), measured=False)
            self._write()
        return {key: self._costs[digest(key)] for key in calls}

    def _write(self) -> None:
        # The cache is a convenience: a read-only or full disk must not stop a plan.
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            rows = {k: astuple(c) for k, c in self._costs.items()}
            temporary.write_text(json.dumps(rows))
            temporary.replace(self.path)
