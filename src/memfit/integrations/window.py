"""The samples of one optimizer step in another trainer's loop: the largest that will come, and the plan that divides them into micro-batches.

Such a loop runs a step as a window of several batches from its loader. The samples in a step stay the same, and so do the user's batches: a batch may be
divided into equal micro-batches, and two are never joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from memfit import batches
from memfit.batches import Batch
from memfit.capture.trace_source import TraceSource
from memfit.errors import InfeasibleError, InputError, SplitError
from memfit.offers import planning_for
from memfit.planner.found import WORTH_MORE
from memfit.planning import Planning
from memfit.progress import Progress, tell
from memfit.remedies.search import with_ways_out
from memfit.values.bundle import Weighting
from memfit.values.plan import Plan
from memfit.values.request import Request

# Of the trainer, told to it and not to the plan.
FIXED: Final[Mapping[str, Any]] = {"precision": "full", "state_place": "device", "streamed": "", "update": "after"}


def largest_samples(data: Any, count: int) -> list[int]:
    """Indices of the samples of a dataset that make a batch as large as any: those that are longest somewhere, then the largest.

    Raises:
        InputError: the data is a stream.
    """
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise InputError(
            "the training data is a stream, so the largest batch in it is not known: give one of the largest shape that will come, sample=..."
        )
    longest: dict[tuple[str, int], tuple[int, int]] = {}
    sizes: list[int] = []
    for index in range(len(data)):
        shapes = dict(_shapes(data[index]))
        sizes.append(sum(math.prod(shape) for shape in shapes.values()))
        for name, shape in shapes.items():
            for dimension, length in enumerate(shape):
                if length > longest.get((name, dimension), (0, 0))[0]:
                    longest[name, dimension] = length, index
    leading = dict.fromkeys(index for _, index in longest.values())
    others = sorted(set(range(len(data))) - set(leading), key=lambda index: -sizes[index])
    return [*leading, *others][:count]


def largest_batch(loader: Any, count: int) -> Batch:
    """So many samples of a loader's dataset, in the order of `largest_samples`, collated as the loader does.

    Raises:
        InputError: the data is a stream.
    """
    return loader.collate_fn([loader.dataset[index] for index in largest_samples(loader.dataset, count)])


def _shapes(sample: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What of a sample has a length, before it is collated: tensors and arrays, lists, texts."""
    entries = sample.items() if isinstance(sample, Mapping) else enumerate(sample if isinstance(sample, tuple) else ())
    for name, value in entries:
        shape = getattr(value, "shape", None)
        if shape is not None:
            yield str(name), tuple(shape)
        elif isinstance(value, Sized):
            yield str(name), (len(value),)


@dataclass(frozen=True)
class Window:
    """One step of another trainer's loop.

    Attributes:
        model, sample, loss_fn: as for `memfit.plan`.
        make_optimizer: `optimizer` of `memfit.plan`.
        accumulated: batches in the window.
        divisors: numbers of parts that a batch may be divided into, rising.
        one_by_one: the batches come one after the other, and the sample is one of them; else all are there, and the sample holds all.
        why_whole: why the trainer cannot have a batch divided, whatever the model; "" where it can. Perhaps known once its loss has been taken.
    """

    model: Any
    sample: Batch
    loss_fn: batches.LossFunction
    make_optimizer: Callable[..., Any]
    accumulated: int
    divisors: Sequence[int]
    one_by_one: bool = False
    why_whole: Callable[[], str] = str


@dataclass(eq=False)
class _WindowSource(TraceSource):
    """Traces of a window of batches.

    Attributes:
        summed: its micro-batches are batches as the user has them, which the trainer adds up by itself: that needs no proof that it splits.
        why_whole: as for `Window`.
    """

    summed: bool = False
    why_whole: Callable[[], str] = str

    def weighting(self, freeze: Sequence[str]) -> Weighting:
        if self.summed:
            return Weighting("sum")
        found = Weighting(None) if self.why_whole() else super().weighting(freeze)
        why = self.why_whole()
        return Weighting(None, why) if why else found


def plan_window(window: Window, request: Request, progress: Progress | None = None) -> Plan:
    """The fastest plan, each batch of the window in one part or in as many as one of the divisors.

    Args:
        window: the step.
        request: what the user and the trainer ask, but for the number of micro-batches.
        progress: as for `memfit.plan`.

    Raises:
        InfeasibleError, SplitError, CaptureError, InputError: as for `memfit.plan`.
    """
    best: Plan | None = None
    refused: InfeasibleError | None = None
    least_of: Planning | None = None  # what refused
    accumulated, divisors = window.accumulated, window.divisors
    source = partial(
        _WindowSource,
        *(window.model, window.sample, window.loss_fn, window.make_optimizer, request.clip_norm, None, progress),
        loader_batches=accumulated if window.one_by_one else 1,
        why_whole=window.why_whole,
    )
    parted = source()
    whole = source(summed=True) if accumulated > 1 else parted
    # Without memfit the trainer runs each of its batches whole, whatever a plan does.
    undivided = planning_for(whole, request.fixing(micro_batches=accumulated))
    for divisor in divisors:
        try:
            asked = request.fixing(micro_batches=accumulated * divisor)
            planning = undivided if divisor == 1 else planning_for(parted, asked)
            planning.plain = None if divisor == 1 else undivided
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
    summed = least_of is undivided
    raise with_ways_out(refused, least_of, whole if summed else parted, least_of.request, own_model=False) from None


def divisors_of(number: int) -> list[int]:
    """Rising."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def parts_weights(counts: Sequence[int | None], divisor: int) -> list[float]:
    """What each part's loss counts for among the parts of its batch.

    Args:
        counts: what each part's loss is a mean over; None where losses add up as they are.
        divisor: parts in a batch; the last batch of an epoch may have fewer.
    """
    weights: list[float] = []
    for start in range(0, len(counts), divisor):
        own = counts[start : start + divisor]
        total = sum(count or 0 for count in own)
        weights += [1.0 if count is None or not total else count / total for count in own]
    return weights
