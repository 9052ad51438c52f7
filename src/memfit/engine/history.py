"""What happened: a record for each step, its time and measured peak, and warnings, each told once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from memfit.meter import MeterReading, metered
from memfit.values.report import StepRecord


class History:
    """The steps of an engine.

    Args:
        where: how warnings begin on one of several ranks; empty for one device.

    Attributes:
        records: of each step that happened.
        steps: their number; what another trainer counts may be set here.
        reading: of the step that is metered or was the last one to be; None where the last step was not.
    """

    def __init__(self, where: str = "") -> None:
        self._where = where
        self.records: list[StepRecord] = []
        self.steps = 0
        self.reading: MeterReading | None = None
        self._told: set[str] = set()

    def add(self, record: StepRecord) -> None:
        """A step has happened; the record gets its number here."""
        self.steps += 1
        self.records.append(replace(record, step=self.steps))

    def timed(self, run: Callable[[], None]) -> StepRecord:
        """Run a step that adds its record, and put its time there."""
        return self._completed(run)

    def metered(
        self, run: Callable[[], None], present: Callable[[], Iterable[torch.Tensor]], device: torch.device
    ) -> StepRecord:
        """As `timed`, with the peak of the step measured.

        Args:
            run: the step.
            present: returns the tensors that exist before the step and count; no reference is kept here, so that the step can free them.
            device: to measure.
        """

        def measured() -> None:
            with metered(present(), device) as self.reading:
                run()

        return self._completed(measured)

    def _completed(self, run: Callable[[], None]) -> StepRecord:
        self.reading = None
        started = time.perf_counter()
        run()
        record = replace(
            self.records[-1],
            seconds=time.perf_counter() - started,
            peak_bytes=self.reading.peak_bytes if self.reading is not None else None,
        )
        self.records[-1] = record
        return record

    def began_anew(self, where: tuple[str, ...], ended_bytes: int) -> StepRecord:
        """The record of the last step, whose forward was ended before and begun anew.

        Args:
            where: it left what was planned.
            ended_bytes: peak of what was ended; of a step that is metered, the larger of both counts.
        """
        last = self.records[-1]
        peak = None if last.peak_bytes is None else max(last.peak_bytes, ended_bytes)
        self.records[-1] = replace(last, begun_anew=where, peak_bytes=peak)
        return self.records[-1]

    def tell_divergence(self, divergence: str, more: str = "", *, begun_anew: bool = False, stacklevel: int) -> None:
        """Warn that a forward was not as planned, once for each divergence.

        Args:
            divergence: where and why.
            more: what happens now.
            begun_anew: the forward was ended there, not kept plain.
            stacklevel: of `warnings.warn`, from here.
        """
        if divergence not in self._told:
            self._told.add(divergence)
            ended = f"a forward differed from the plan and was ended there: {divergence}. The step was begun anew, under a plan that knows its path"
            kept = f"a forward differed from the plan and was kept plain from there on: {divergence}. Its results are right, its peak may be larger"
            warnings.warn(self._where + (ended if begun_anew else kept) + more, stacklevel=stacklevel)
