"""When nothing fits: the smallest budget that would do, where its peak is, and the ways out that the bundle knows, with what each saves and costs.

Further ways out need other captures: `memfit.remedies` looks for them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from memfit.errors import InfeasibleError, Remedy
from memfit.planner.description import where
from memfit.planner.found import Found, Rejection
from memfit.planner.optimistic import least_bytes
from memfit.planner.pruning import least_needed
from memfit.planner.smallest_budget import smallest
from memfit.planner.solvers import Solvers
from memfit.techniques.choices import named
from memfit.units import format_budget, format_bytes, format_seconds
from memfit.values.trace import BEFORE_STEP, Category, Trace

WORTH_TELLING: Final = 16  # what lies beside the model is told from this part of all bytes on
BESIDE: Final = "for what lies on the device beside the model (libraries' workspaces, other tensors)"


def infeasible(solvers: Solvers, budget_bytes: int, rejected: Sequence[Rejection]) -> InfeasibleError:
    """The error that says so.

    Args:
        solvers: of the bundle that was searched.
        budget_bytes: into which nothing fits.
        rejected: what was weighed.
    """
    size, found = smallest(solvers)
    phase, module, operation = where(found.solver.trace, found.solution.evaluation.peak_event)
    remedies = _remedies(solvers, budget_bytes, size, found)
    beside = _beside_bytes(found.solver.trace)
    return _error(budget_bytes, size, (phase, module, operation), beside, remedies, tuple(map(str, rejected)))


class NothingFitsError(Exception):
    """Nothing fits, and how much would do was not looked for.

    Attributes:
        least_bytes: no plan was found for less, by what was captured.
        beside_bytes: as in `InfeasibleError`.
    """

    def __init__(self, least_bytes: int, beside_bytes: int) -> None:
        super().__init__(f"no plan for less than {least_bytes} bytes")
        self.least_bytes, self.beside_bytes = least_bytes, beside_bytes


def nothing_fits(solvers: Solvers) -> NothingFitsError:
    """The error with what the smallest plan of all candidates takes at least, by what was captured; of a sharded step on the rank that was captured first."""
    numbers, known = solvers.numbers(), solvers.asked
    least = []
    for candidate in solvers.bundle.candidates:
        every = (candidate.but(micro_batches=number) for number in numbers)
        own = {choices.micro_batches: known[choices] for choices in every if choices in known}
        needs = [solver.needed_here(solver.least_here()) for solver in own.values()]
        if own and numbers[-1] not in own and not solvers.cannot_split:
            needs.append(max(map(least_bytes, own.values())))  # in a larger number
        least.append(max(min(needs, default=0) + solvers.extra_bytes, least_needed(solvers, candidate, {})))
    return NothingFitsError(min(least), _beside_bytes(solvers.baseline.trace))


def with_remedies(error: InfeasibleError, remedies: tuple[Remedy, ...], nothing_else: str = "") -> InfeasibleError:
    """The same error with these ways out.

    Args:
        error: made by `infeasible`.
        remedies: all of them.
        nothing_else: what was tried besides and does not do; "" for nothing.
    """
    assert error.minimum_bytes is not None, "made by `infeasible`"
    phase, _, operation = error.moment.partition(": ")
    peak = (phase, error.module, operation)
    return _error(
        error.budget_bytes, error.minimum_bytes, peak, error.beside_bytes, remedies, error.weighed, nothing_else
    )


def worth_telling(beside_bytes: int, size: int) -> bool:
    """Whether what lies beside the model is a good part of what a plan needs."""
    return WORTH_TELLING * beside_bytes >= size


def _beside_bytes(trace: Trace) -> int:
    """What lies on the device beside the model and its step, all the time."""
    return sum(s.bytes for s in trace.storages if s.category is Category.OTHER and s.birth == BEFORE_STEP)


def _error(
    budget_bytes: int,
    size: int,
    peak: tuple[str, str, str],
    beside_bytes: int,
    remedies: tuple[Remedy, ...],
    weighed: tuple[str, ...],
    nothing_else: str = "",
) -> InfeasibleError:
    """With its message: what is needed and where, the ways out, what was weighed."""
    phase, module, operation = peak
    beside = f", {format_bytes(beside_bytes)} of it {BESIDE}" if worth_telling(beside_bytes, size) else ""
    asked = format_bytes(budget_bytes)
    if asked == format_bytes(size):  # rounded, the two would look alike
        asked += f" ({budget_bytes} bytes)"
    ways_out = "; ".join(f"{r.text} ({_cost(r)})" for r in remedies)
    others = (f". {nothing_else}" if nothing_else else "") + (f". Weighed: {'; '.join(weighed)}" if weighed else "")
    return InfeasibleError(
        f"{asked} is too little: the smallest plan found needs {format_bytes(size)} ({size} bytes){beside}, set in {phase} by "
        f"{module or 'an operation outside any module'} ({operation}). Ways out: {ways_out}{others}",
        budget_bytes=budget_bytes,
        minimum_bytes=size,
        moment=f"{phase}: {operation}",
        module=module,
        beside_bytes=beside_bytes,
        remedies=remedies,
        weighed=weighed,
    )


def _cost(remedy: Remedy) -> str:
    """Bytes and seconds of a way out, each with its direction. Under other arguments than a budget there may be smaller and faster plans than those met."""
    exact = remedy.kind == "budget"
    slower = remedy.extra_seconds >= 0
    bounded = "" if exact else "at most " if slower else "at least "
    seconds = f"{bounded}{format_seconds(abs(remedy.extra_seconds))} a step {'slower' if slower else 'faster'}"
    size = f"{format_bytes(remedy.saved_bytes)} more" if exact else f"at least {format_bytes(remedy.saved_bytes)} less"
    return f"{size}, {seconds if remedy.extra_seconds else 'no slower'}"


def _remedies(solvers: Solvers, budget_bytes: int, size: int, found: Found) -> tuple[Remedy, ...]:
    """A larger budget; and where the user fixed the number of micro-batches, another number, if that does."""
    bundle = solvers.bundle
    plain = solvers.baseline.trace.plain_step_seconds
    remedies = [_larger_budget(solvers, budget_bytes, size, found)]
    if bundle.request.numbers_are_open and bundle.samples > 1:
        smaller, free = smallest(solvers.of_request(bundle.request.leaving_open("micro_batches")))
        if smaller <= budget_bytes:
            fixed = {**bundle.request.told_fixed, "micro_batches": free.number}
            text = f"fixed={json.dumps(fixed)}"
            remedies.append(Remedy(text, size - smaller, free.seconds - plain, "micro_batches", {"fixed": fixed}))
    return tuple(remedies)


def _larger_budget(solvers: Solvers, budget_bytes: int, size: int, found: Found) -> Remedy:
    """The budget that would do; another device where this one has not as much."""
    bundle = solvers.bundle
    seconds = found.seconds - solvers.baseline.trace.plain_step_seconds
    how = named(found.candidate, found.number) if found.number > 1 or found.candidate != bundle.candidates[0] else ""
    devices = bundle.topology.devices
    if devices and size > devices[0].memory_bytes:
        have = f"the {format_bytes(devices[0].memory_bytes)} of {devices[0].name}"
        text = f"a device with {format_bytes(size)}, which is more than {have}" + (f" ({how})" if how else "")
        return Remedy(text, size - budget_bytes, seconds, "budget")
    return Remedy.larger_budget(format_budget(size), size - budget_bytes, seconds, how)
