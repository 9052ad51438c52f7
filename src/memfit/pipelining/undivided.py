"""One micro-batch of a model that is not cut: its trace, the chain of its parts, and what each takes by itself."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from torch import nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture.capture import capture
from memfit.capture.captured import Captured
from memfit.capture.confirmation import MAKES_SPARSE, confirmed, real_on_ranks, sparse_on_ranks
from memfit.capture.part_calls import Around, find_part_calls
from memfit.capture.source import StepSource
from memfit.capture.trace_source import TraceSource
from memfit.errors import CaptureError, InputError
from memfit.pipelining.batch_reads import with_real_reads
from memfit.planner.model_parts import Boundary, chain, part_calls, part_ends
from memfit.step.device import device_of
from memfit.step.part_calls import PartCalls
from memfit.techniques.choices import Choices, regions
from memfit.values.stages import Parts
from memfit.values.trace import Trace

LEVELS: Final = 3  # how far out blocks within blocks are looked at


@dataclass(frozen=True, eq=False)
class Undivided:
    """The step of one micro-batch, as a model runs it that is whole.

    Attributes:
        step: what was captured.
        captured: of it.
        unconfirmed: how the real forward differs from the one on fake tensors; "" where it does not.
        trace: with costs.
        calls: of the model's parts.
        parts: what they take by themselves.
        ends: the operation of forward before which each part ends.
    """

    step: StepSource
    captured: Captured
    unconfirmed: str
    trace: Trace
    calls: PartCalls
    parts: Parts
    ends: tuple[int, ...]

    @classmethod
    def of(cls, source: TraceSource, micro_batch: Batch, techniques: Choices, known: Undivided | None) -> Undivided:
        """Look at one.

        Args:
            source: of the model, its loss and its optimizer.
            micro_batch: of a step.
            techniques: that the step has.
            known: one in another number of micro-batches; None where there is none.

        Raises:
            InputError: the model is not one for a pipeline.
            CaptureError: the forward cannot be looked at without values.
        """
        model = source.model
        step = StepSource(model, micro_batch, source.loss_fn, source.optimizer, cuda=source.cuda)
        alone = techniques.but(frozen=())
        found = confirmed(step, alone, None if known is None or known.unconfirmed else known.captured)
        if found == MAKES_SPARSE:
            raise sparse_on_ranks()
        unconfirmed = found if isinstance(found, str) else ""
        captured = _captured_on_fakes(step, alone) if isinstance(found, str) else found
        trace = _without_calls(source.priced(captured))
        around = around_forwards(model, techniques)
        calls, parts, ends = chain_of(model, micro_batch, source.loss_fn, trace, around)
        return cls(step, captured, unconfirmed, trace, calls, parts, ends)

    @property
    def samples(self) -> int:
        """In the micro-batch."""
        return batches.size(self.step.sample)


def around_forwards(model: nn.Module, techniques: Choices) -> Around:
    """What forwards run inside."""
    return partial(regions, techniques, model, device_of(model).type)


def _captured_on_fakes(step: StepSource, techniques: Choices) -> Captured:
    try:
        return capture(step, techniques)
    except CaptureError as error:
        raise real_on_ranks(str(error)) from error


def _without_calls(trace: Trace) -> Trace:
    """Of the whole model no plan is made, so what whole calls of its modules would take need not be known."""
    return replace(trace, calls=tuple(replace(call, repeatable=False) for call in trace.calls))


def chain_of(
    model: nn.Module,
    micro_batch: Batch,
    loss_fn: LossFunction | None,
    trace: Trace,
    around: Around = nullcontext,
) -> tuple[PartCalls, Parts, tuple[int, ...]]:
    """The parts of a model, of those ways to see them that leave most boundaries where it may be cut; the calls of them, and before which operations they end.

    Args:
        model, micro_batch, loss_fn: the step.
        trace: of it, with seconds.
        around: makes what a forward and loss run inside.

    Raises:
        InputError: the forward does not call the same parts twice.
    """
    best: tuple[int, PartCalls, Any] | None = None
    for outwards in range(LEVELS):
        found = part_calls(trace, outwards)
        calls = find_part_calls(model, micro_batch, loss_fn, [call.module for call in found], around)
        allowed = sum(not reason for reason in calls.refused[1:])
        if best is None or allowed > best[0]:
            best = allowed, calls, found
    assert best is not None
    _, calls, found = best
    if len(calls.calls) != len(found):
        raise InputError(
            "the forward calls its parts differently from one time to the next, so the model cannot be cut into stages"
        )
    calls = with_real_reads(calls, model, micro_batch, loss_fn, around)
    boundaries = [Boundary(calls.crossing_bytes(b), calls.refused[b]) for b in range(1, len(found))]
    return calls, chain(trace, found, boundaries), part_ends(trace, found)
