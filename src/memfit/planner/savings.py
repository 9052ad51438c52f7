"""What each technique of a plan saves and costs (compared with the same step without it, nothing dropped), and what is commonly claimed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from memfit.planner.found import Found
from memfit.planner.optimistic import step_facts
from memfit.planner.solvers import RefusedError, Solvers
from memfit.planner.timeline import Timeline
from memfit.techniques.accumulation import ACCUMULATION
from memfit.techniques.choices import Choices
from memfit.techniques.registry import BY_NAME, TECHNIQUES
from memfit.units import format_seconds
from memfit.values.prediction import Saving
from memfit.values.trace import Trace


def savings(solvers: Solvers, found: Found) -> Iterator[Saving]:
    """Of each technique that the plan found uses.

    Raises:
        MissingTrace: as for `Solvers.of`.
    """
    candidate = found.candidate
    trace, peak = _nothing_dropped(solvers, candidate)
    for name, setting in candidate.techniques:
        technique = BY_NAME[name]
        with suppress(RefusedError):
            other, other_peak = _nothing_dropped(solvers, without(candidate, name))
            claimed, claim = technique.claim(step_facts(Timeline(other)), step_facts(Timeline(trace)), setting)
            seconds = trace.plain_step_seconds - other.plain_step_seconds
            yield Saving(technique.asked_by(setting), claimed, other_peak - peak, claim, seconds)
    split = found.solver
    number = split.trace.micro_batches
    if number > 1 and solvers.bundle.request.micro_batches is None:
        claimed, claim = ACCUMULATION.claim(step_facts(Timeline(trace)), step_facts(split.timeline), number)
        seconds = split.trace.plain_step_seconds - trace.plain_step_seconds
        yield Saving(ACCUMULATION.words(number), claimed, peak - split.plain.peak, claim, seconds)


def without(candidate: Choices, name: str) -> Choices:
    """A candidate with one of its techniques taken away."""
    return candidate.but(**{name: BY_NAME[name].baseline})


def slower_notes(solvers: Solvers) -> Iterator[str]:
    """Of techniques that were weighed and that people expect to be faster, those that are slower here, in words."""
    for technique in TECHNIQUES:
        if not technique.expected_faster:
            continue
        weighed = {c.used[technique.name]: c for c in reversed(solvers.bundle.candidates) if technique.name in c.used}
        for setting in sorted(weighed, key=str):
            with suppress(RefusedError):
                seconds = _nothing_dropped(solvers, weighed[setting])[0].plain_step_seconds
                baseline = _nothing_dropped(solvers, without(weighed[setting], technique.name))[0].plain_step_seconds
                if seconds > baseline:
                    yield (
                        f"{technique.asked_by(setting)} is slower than {technique.baseline_words} on this device: {format_seconds(seconds)} a step against "
                        f"{format_seconds(baseline)} before anything is dropped; what it may save is bytes"
                    )


def _nothing_dropped(solvers: Solvers, candidate: Choices) -> tuple[Trace, int]:
    """The step run this way and nothing dropped, and its peak."""
    solver = solvers.of(solvers.baseline_number, candidate)
    return solver.trace, solver.plain.peak
