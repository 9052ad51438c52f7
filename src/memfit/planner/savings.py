"""What the techniques of a plan save and cost: each taken away by itself, all others kept and nothing dropped; and what is commonly claimed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from memfit.planner.found import Found
from memfit.planner.head import head_of
from memfit.planner.solvers import RefusedError, Solvers
from memfit.planner.timeline import Timeline
from memfit.units import format_seconds
from memfit.values.choices import PLAIN, VALUES, Choices, in_words
from memfit.values.prediction import Saving
from memfit.values.trace import Category, Trace


def savings(solvers: Solvers, found: Found) -> Iterator[Saving]:
    """Of each technique that the plan found uses.

    Raises:
        MissingTrace: as for `Solvers.of`.
    """
    candidate = found.candidate
    trace, peak = _nothing_dropped(solvers, candidate)
    for name, value in candidate.told_apart():
        with suppress(RefusedError):
            other, other_peak = _nothing_dropped(solvers, without(candidate, name))
            claimed, claim = _claimed(name, other, trace)
            seconds = trace.plain_step_seconds - other.plain_step_seconds
            yield Saving(_technique(name, value), claimed, other_peak - peak, claim, seconds)
    split = found.solver
    number = split.trace.micro_batches
    if number > 1 and solvers.bundle.request.micro_batches is None:
        claimed = trace.bytes_of(Category.ACTIVATION) * (number - 1) // number
        seconds = split.trace.plain_step_seconds - trace.plain_step_seconds
        claim = "all that forward makes, divided by their number"
        yield Saving(f"{number} micro-batches", claimed, peak - split.plain.peak, claim, seconds)


def without(candidate: Choices, name: str) -> Choices:
    """A candidate with one of its techniques taken away."""
    return replace(candidate, **{name: getattr(PLAIN, name)})


def slow_precisions(solvers: Solvers) -> Iterator[str]:
    """Of 16-bit candidates that were weighed, those whose operations take longer than in full precision, in words."""
    for precision in VALUES["precision"][1:]:
        candidate = next((c for c in solvers.bundle.candidates if c.precision == precision), None)
        if candidate is None:
            continue
        with suppress(RefusedError):
            seconds = _nothing_dropped(solvers, candidate)[0].plain_step_seconds
            full = _nothing_dropped(solvers, without(candidate, "precision"))[0].plain_step_seconds
            if seconds > full:
                yield (
                    f"{precision} is slower than full precision on this device: {format_seconds(seconds)} a step against {format_seconds(full)} "
                    "before anything is dropped; what it may save is bytes"
                )


def _nothing_dropped(solvers: Solvers, candidate: Choices) -> tuple[Trace, int]:
    """The step run this way and nothing dropped, and its peak."""
    solver = solvers.of(solvers.baseline_number, candidate)
    return solver.trace, solver.plain.peak


def _technique(name: str, value: Any) -> str:
    """As the user would ask for it."""
    if name == "frozen":
        return "freeze"
    return str(value) if name == "precision" else in_words(replace(PLAIN, **{name: value}))


def _claimed(name: str, without: Trace, used: Trace) -> tuple[int, str]:
    """Bytes that are commonly said to be saved, and the formula in words."""

    def lost(*categories: Category) -> int:
        return without.bytes_of(*categories) - used.bytes_of(*categories)

    if name == "frozen":
        return lost(Category.GRADIENT, Category.OPTIMIZER_STATE), "gradients and optimizer state of what is frozen"
    if name == "precision":
        return without.bytes_of(Category.ACTIVATION) // 2, "half of what is saved for backward"
    if name == "state_format":
        return without.bytes_of(Category.OPTIMIZER_STATE) * 3 // 4, "three quarters of the optimizer's state"
    if name == "state_place":
        return without.bytes_of(Category.OPTIMIZER_STATE), "all of the optimizer's state"
    if name == "update":
        return without.bytes_of(Category.GRADIENT), "all gradients"
    if name == "loss_chunks":
        head = head_of(Timeline(without))
        whole = head.bytes if head is not None else 0
        return whole - whole // used.choices.loss_chunks, "all but one chunk of what is as large as the logits"
    return lost(
        Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE
    ), "parameters, gradients and state of all layers but two"
