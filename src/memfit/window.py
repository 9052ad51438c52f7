"""The plan of a step that takes several batches of a loader: a window of them, added up.

`engine.accumulate` and other libraries' trainers run a step so. The samples in a step stay the same, and so do the user's batches: a batch may be divided into
equal micro-batches, and two are never joined.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from memfit import batches
from memfit.batches import Batch
from memfit.capture.trace_source import TraceSource
from memfit.capture.values_read import spread
from memfit.errors import InfeasibleError, InputError, MemfitError, Remedy, SplitError
from memfit.hardware.topology import Topology
from memfit.offers import planning_for
from memfit.planner.found import WORTH_MORE
from memfit.planner.infeasible import with_remedies
from memfit.planner.solvers import doubled_up_to
from memfit.planning import Planning
from memfit.progress import Progress, tell
from memfit.remedies.search import with_ways_out
from memfit.step.program import OptimizerFactory
from memfit.techniques.choices import Choices
from memfit.values.bundle import Weighting
from memfit.values.plan import Plan
from memfit.values.request import Request
from memfit.values.trace import BEFORE_STEP, Category, Storage, Trace

LOSS_BYTES: Final = 4
LOOKED_AT: Final = 8  # about so many batches of a step, where forward may tell them apart


def _none(_: int) -> int:
    return 0


@dataclass(frozen=True)
class Window:
    """One step over several batches.

    Attributes:
        model, sample, loss_fn: as for `memfit.plan`.
        make_optimizer: `optimizer` of `memfit.plan`.
        accumulated: batches in the window.
        divisors: numbers of parts that a batch may be divided into, rising.
        others: numbers of parts that it could be divided into besides, where the user has said the number.
        one_by_one: the batches come one after the other, and the sample is one of them; else all are there, and the sample holds all.
        why_whole: why a batch cannot be divided, whatever the model; "" where it can. Perhaps known once its loss has been taken.
        summed: whoever runs the step adds up whole batches without weights, so that needs no proof that the step splits.
        released: the last batch is freed before clipping and the update.
        other_samples: as in `StepSource`.
        every_sample: all samples of the step, for the look at how their losses add up; None where the sample shows it.
        own_model: model, optimizer and batch are the user's to change; else another trainer's.
        allows: whoever asks for the plan can say `allow=`.
        losses_held: for a number of micro-batches, how many losses whoever runs the step holds beside it, each as a number of 32 bits.
    """

    model: Any
    sample: Batch
    loss_fn: batches.LossFunction | None
    make_optimizer: Callable[..., Any] | None
    accumulated: int
    divisors: Sequence[int]
    others: Sequence[int] = ()
    one_by_one: bool = False
    why_whole: Callable[[], str] = str
    summed: bool = True
    released: bool = False
    every_sample: Batch | None = None
    other_samples: Callable[[int], Sequence[Batch]] | None = None
    own_model: bool = False
    allows: bool = True
    losses_held: Callable[[int], int] = _none


def of_loader(
    model: Any,
    sample: Batch,
    loss_fn: batches.LossFunction | None,
    make_optimizer: OptimizerFactory | None,
    loader_batches: int,
    request: Request,
) -> tuple[Window, Request]:
    """The step of `engine.accumulate` over so many batches of a loader, one at a time, and what is asked of it.

    Args:
        model, sample, loss_fn: as for `memfit.plan`; the sample holds all samples of the step.
        make_optimizer: `optimizer` of `memfit.plan`.
        loader_batches: in a step, 2 or more.
        request: of the user.

    Raises:
        InputError: the samples cannot be that many batches, or the request is for a step that cannot be taken batch by batch.
    """
    samples = batches.size(sample)
    whole = isinstance(loader_batches, int) and not isinstance(loader_batches, bool)
    if not whole or loader_batches < 2 or samples % loader_batches:
        raise InputError(
            f"loader_batches={loader_batches!r}: the sample has {samples} samples, which are to be as many batches of one size, 2 or more: give all samples of "
            "a step as the sample, or leave loader_batches out where a step takes one batch"
        )
    for name, value in (("streamed", ""), ("update", "after")):
        if request.fixed.get(name, value) != value:
            raise InputError(
                f"fixed {name}={request.fixed[name]!r} cannot be had with loader_batches={loader_batches}: engine.accumulate does not know which batch is the "
                "last one before it has run. Leave one of them out"
            )
    size = samples // loader_batches
    # A copy: a view would hold the bytes of all samples.
    part = batches.map_tensors(lambda t: t.clone(), batches.split(sample, [samples - size, size])[-1])
    before = batches.split(sample, [size] * loader_batches)[:-1]
    possible, asked = doubled_up_to(size), request.micro_batches
    if asked is not None and (asked % loader_batches or not 1 <= asked // loader_batches <= size):
        raise InputError(
            f"fixed micro_batches={asked!r} with loader_batches={loader_batches}: each batch of {size} samples is divided alike, so there is any multiple of "
            f"{loader_batches} up to {samples}"
        )
    window = Window(
        model,
        part,
        loss_fn,
        make_optimizer,
        loader_batches,
        possible if asked is None else [asked // loader_batches],
        others=() if asked is None else possible,
        one_by_one=True,
        summed=False,
        released=True,
        every_sample=sample,
        other_samples=lambda _: [before[number] for number in spread(len(before), LOOKED_AT)],
        own_model=True,
    )
    return window, request.settling(streamed="", update="after")


@dataclass(eq=False)
class _WindowSource(TraceSource):
    """Traces of a window of batches.

    Attributes:
        summed: whole batches are added up as they are.
        released, every_sample, why_whole, losses_held: as for `Window`.
    """

    summed: bool = False
    released: bool = False
    every_sample: Batch | None = None
    why_whole: Callable[[], str] = str
    losses_held: Callable[[int], int] = _none

    def weighting(self, freeze: Sequence[str]) -> Weighting:
        if self.summed:
            return Weighting("sum")
        found = Weighting(None) if self.why_whole() else super().weighting(freeze)
        why = self.why_whole()
        return Weighting(None, why) if why else found

    def compared(self) -> Batch:
        return self.sample if self.every_sample is None else self.every_sample

    def captured(self, choices: Choices) -> Trace:
        """The step, with the losses that are held until it ends."""
        trace = super().captured(choices)
        held = self.losses_held(choices.micro_batches)
        if held:
            each = self.machine.allocation_bytes
            trace = _with_held(trace, held * each * -(-LOSS_BYTES // each))
        return _without_batch_in_update(trace) if self.released else trace


def _with_held(trace: Trace, size: int) -> Trace:
    """The trace of a step beside which so many bytes are held."""
    held = Storage(size, Category.OTHER, "", BEFORE_STEP, len(trace.events))
    return replace(
        trace,
        storages=(*trace.storages, held),
        drawn_bytes=tuple((*sizes, size) for sizes in trace.drawn_bytes),
        paths=tuple(_with_held(path, size) for path in trace.paths),
        first=None if trace.first is None else _with_held(trace.first, size),
    )


def _without_batch_in_update(trace: Trace) -> Trace:
    """The trace of a step whose batch is freed when its backward is over."""
    storages = tuple(
        replace(each, death=min(each.death, trace.pass_events - 1)) if each.category is Category.BATCH else each
        for each in trace.storages
    )
    paths = tuple(map(_without_batch_in_update, trace.paths))
    first = None if trace.first is None else _without_batch_in_update(trace.first)
    return replace(trace, storages=storages, paths=paths, first=first)


def plan_window(
    window: Window, request: Request, progress: Progress | None = None, network: Topology | None = None
) -> Plan:
    """The fastest plan, each batch of the window in one part or in as many as one of the divisors.

    Args:
        window: the step.
        request: what the user and the trainer ask, but for the number of micro-batches.
        progress: as for `memfit.plan`.
        network: the devices of a sharded step and their links; None for one device.

    Raises:
        InfeasibleError, SplitError, CaptureError, InputError: as for `memfit.plan`.
    """
    best: Plan | None = None
    refused: InfeasibleError | None = None
    least_of: Planning | None = None  # what refused
    accumulated, divisors = window.accumulated, window.divisors
    source = partial(
        _WindowSource,
        *(window.model, window.sample, window.loss_fn, window.make_optimizer, request.clip_norm),
        *(request.device, progress),
        loader_batches=accumulated if window.one_by_one else 1,
        released=window.released,
        every_sample=window.every_sample,
        why_whole=window.why_whole,
        losses_held=window.losses_held,
        network=network,
        other_samples=window.other_samples,
    )
    parted = source()
    whole = source(summed=True) if window.summed and accumulated > 1 else parted
    # Without memfit each of the batches is run whole, whatever a plan does.
    undivided = planning_for(whole, request.settling(micro_batches=accumulated))

    def planning_of(divisor: int) -> Planning:
        asked = request.settling(micro_batches=accumulated * divisor)
        planning = undivided if divisor == 1 else planning_for(parted, asked)
        planning.plain = None if divisor == 1 else undivided
        return planning

    for divisor in divisors:
        try:
            planning = planning_of(divisor)
            tell(progress, "planning", 0.9)
            made = planning.plan()
        except InfeasibleError as error:
            least = error.minimum_bytes or math.inf
            if refused is not None and least >= (refused.minimum_bytes or math.inf):
                break  # smaller parts hold no less
            refused, least_of = error, planning
            continue
        except SplitError:
            if divisor == divisors[0]:
                raise
            break
        if best is not None and made.prediction.step_seconds * WORTH_MORE >= best.prediction.step_seconds:
            break
        best = made
        if made.script.plain:
            break
    if best is not None:
        return best
    assert refused is not None
    assert least_of is not None
    refused = _compared(refused, least_of)
    refused = _with_another_number(refused, least_of, window, request, planning_of)
    source_of = whole if least_of is undivided else parted
    raise with_ways_out(
        refused, least_of, source_of, least_of.request, own_model=window.own_model, allows=window.allows
    ) from None


def _compared(refused: InfeasibleError, planning: Planning) -> InfeasibleError:
    """The refusal, whose remedies tell their seconds against the undivided batches."""
    if planning.plain is None:
        return refused
    divided = planning.plain_step().plain_step_seconds - planning.plain.plain_step().plain_step_seconds
    against = (each._replace(extra_seconds=each.extra_seconds + divided) for each in refused.remedies)
    return with_remedies(refused, tuple(against))


def _with_another_number(
    refused: InfeasibleError,
    least_of: Planning,
    window: Window,
    request: Request,
    planning_of: Callable[[int], Planning],
) -> InfeasibleError:
    """The refusal, with the first number of micro-batches that would do where the user has said another."""
    for divisor in window.others:
        try:
            size, found = planning_of(divisor).smallest()
        except MemfitError:  # it does not split, or cannot be captured
            continue
        if size <= refused.budget_bytes:
            fixed = {**request.told_fixed, "micro_batches": window.accumulated * divisor}
            plain = (least_of.plain or least_of).plain_step().plain_step_seconds
            saved = (refused.minimum_bytes or size) - size
            arguments = {"fixed": fixed}
            other = Remedy(f"fixed={json.dumps(fixed)}", saved, found.seconds - plain, "micro_batches", arguments)
            return with_remedies(refused, (*refused.remedies, other))
    return refused
