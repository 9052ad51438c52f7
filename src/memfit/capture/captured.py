"""The result of one capture: the trace, the calls to time, and facts that later captures of the same step can reuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memfit.capture.calls import CallSpec
from memfit.techniques.freezing.freeze import Forced
from memfit.values.trace import Trace


@dataclass(frozen=True, slots=True)
class Captured:
    """A trace without seconds yet, and what else was seen on the way.

    Attributes:
        trace: the step.
        calls: the distinct calls to time.
        overwritten: something saved was written before backward read it.
        graded: names of the parameters that get gradients, where every forward runs the same operations and all gradients are dense; else None.
            Then a later capture needs no pass before the one it records.
        receiving: names of the parameters that got gradients.
        forced: where gradients are asked for though nothing below is trained; looked for in the first capture of a candidate that freezes.
        repeats: the forward before it ran the same operations.
        counts: forward changes a whole number that a module of the model or of the loss holds: how often it was called, perhaps.
        before: what modules hold before it and not after it (`memfit.step.fingerprint.fingerprint`).
        met_bytes: of storages on the device that are neither the model's nor the batch's, and that the step reads: cuDNN keeps the state of dropout in one. Of
            a real capture; fake tensors do not tell whether the device has them already.
        fakes_sparse: fake tensors that are sparse were met, which do not tell the bytes of their indices and values.
        views_anew: as in `StepSource`.
        steady: other random numbers gave the same operations and sizes, or none that are drawn can decide any.
    """

    trace: Trace
    calls: dict[str, CallSpec]
    overwritten: bool = False
    graded: frozenset[str] | None = None
    receiving: frozenset[str] = frozenset()
    forced: Forced | None = None
    steady: bool = False
    repeats: bool = True
    counts: bool = False
    before: Mapping[str, str] = field(default_factory=dict)
    met_bytes: tuple[int, ...] = ()
    fakes_sparse: bool = False
    views_anew: bool = False

    def noting(self, *notes: str) -> Captured:
        """The same, with notes besides."""
        return replace(self, trace=replace(self.trace, notes=(*self.trace.notes, *notes)))
