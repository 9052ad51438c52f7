"""A bundle of traces and a budget -> the fastest Plan found: the few discrete choices around the minimum cuts, and what was rejected and why.

Candidates (sets of techniques) are tried one after the other, the one closest to the baseline first. A candidate is not captured where a lower bound on its
seconds exceeds those of the best plan. For each candidate the number of micro-batches is searched upwards in powers of two, and the search stops where more
cannot help: when the step with nothing dropped is already slower than the best plan found.

Nothing here runs a model or remembers other budgets: a plan depends on the bundle and the budget alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from memfit.planner.caching_allocator import MIB
from memfit.planner.description import describe
from memfit.planner.found import WORTH_MORE, Found, Reason, Rejection
from memfit.planner.infeasible import infeasible, nothing_fits
from memfit.planner.offloading import why_nothing_is_offloaded
from memfit.planner.optimistic import least_bytes
from memfit.planner.pruning import adds_to_any, why_hopeless
from memfit.planner.savings import savings, slower_notes
from memfit.planner.solvers import SLACK_BYTES, MissingTrace, RefusedError, Solvers
from memfit.techniques.choices import Choices, in_words, named
from memfit.units import format_bytes, format_seconds
from memfit.values.plan import Plan

TRIES: Final = 4  # to leave room for blocks: each takes less than the last one by what that was above the budget


def plan(solvers: Solvers, budget_bytes: int, *, compared: bool = True, explained: bool = True) -> Plan:
    """The fastest plan found, with what its techniques save and which of them are slower than people expect.

    Args:
        solvers: of the bundle.
        budget_bytes: what the plan has to fit into.
        compared: with the steps without its techniques, which are captured for it; else it says nothing of savings.
        explained: where nothing fits, the smallest budget that would do is looked for, which may take further captures.

    Raises:
        InfeasibleError: nothing fits; names the smallest budget that would do.
        NothingFitsError: nothing fits, and that need not be `explained`.
        MissingTrace, MissingWeighting: the bundle lacks what is needed, and the caller can capture it.
        RefusedError: the only candidate cannot be captured.
    """
    found, rejected = weigh(solvers, budget_bytes)
    if found is None:
        if not explained:
            raise nothing_fits(solvers)
        raise infeasible(solvers, budget_bytes, rejected)
    made = describe(solvers, budget_bytes, found, rejected)
    found, made = _with_room_for_blocks(solvers, budget_bytes, found, made)
    if not compared:
        return made
    notes = (*made.notes, *slower_notes(solvers))
    return replace(made, savings=tuple(savings(solvers, found)), notes=notes)


def _with_room_for_blocks(solvers: Solvers, budget_bytes: int, found: Found, made: Plan) -> tuple[Found, Plan]:
    """A plan whose blocks, too, fit the budget, as the allocator of a GPU is likely to hand them out; the one that was made where there is none.

    What is less than 1 MiB larger than its tensors is left as it is.
    """
    first = found, made
    for _ in range(TRIES):
        prediction = made.prediction
        above = prediction.allocated_bytes - budget_bytes
        if above <= 0 or prediction.allocated_bytes - prediction.peak_bytes < MIB:
            return found, made
        room = budget_bytes - (prediction.peak_bytes - above)
        smaller, rejected = weigh(solvers, budget_bytes - room)
        if smaller is None:
            break
        found, made = smaller, describe(solvers, budget_bytes, smaller, rejected, room)
    return (found, made) if made.prediction.allocated_bytes <= budget_bytes else first


def weigh(solvers: Solvers, budget_bytes: int) -> tuple[Found | None, list[Rejection]]:
    """The fastest plan found, None where nothing fits; and what was rejected."""
    bundle = solvers.bundle
    best: Found | None = None
    rejected = [Rejection("", Reason.NOT_OFFERED, text) for text in bundle.refused]
    rejected += _nothing_to_offload(solvers)
    hopeless: list[Choices] = []
    needed: dict[Choices, int] = {}
    for position, candidate in enumerate(bundle.candidates):
        reason = why_hopeless(solvers, candidate, budget_bytes, best, needed)
        if reason is not None:
            if not adds_to_any(candidate, hopeless):  # else it need not be named
                rejected.append(Rejection(in_words(candidate) or "as it is", Reason.CANNOT_WIN, reason))
            hopeless.append(candidate)
            continue
        try:
            best = _weigh_one(solvers, candidate, budget_bytes, best, rejected, needed, solvers.numbers())
        except RefusedError as error:
            if len(bundle.candidates) == 1:
                raise
            rejected.append(Rejection(in_words(candidate), Reason.CANNOT_RUN, error.refusal.text))
        except MissingTrace as missing:
            later = bundle.candidates[position + 1 :]
            missing.further = sum(why_hopeless(solvers, each, budget_bytes, best, needed) is None for each in later)
            raise
    return _in_smaller_blocks(solvers, budget_bytes, best, rejected), rejected


def _in_smaller_blocks(
    solvers: Solvers, budget_bytes: int, best: Found | None, rejected: list[Rejection]
) -> Found | None:
    """The best plan in more micro-batches than it needs, as long as that is faster: large blocks take much of its step, and small ones are kept."""
    while best is not None and best.worth_no_more() and best.waits_for_blocks():
        further, before = [number for number in solvers.numbers() if number > best.number], best
        best = _weigh_one(solvers, best.candidate, budget_bytes, best, rejected, {}, further[:1])
        if best is before:
            break
    return best


def _weigh_one(
    solvers: Solvers,
    candidate: Choices,
    budget_bytes: int,
    best: Found | None,
    rejected: list[Rejection],
    needed: dict[Choices, int],
    numbers: Sequence[int],
) -> Found | None:
    """The best of what was found and what this candidate gives, searched upwards through these numbers of micro-batches.

    What is rejected is added to `rejected`, and bytes that it needs in all numbers of micro-batches to `needed` where it fits in none.
    """
    capacity = budget_bytes - solvers.extra_bytes - SLACK_BYTES
    own: Found | None = None  # of this candidate
    no_faster = 0  # numbers of micro-batches in a row
    needs: dict[int, int] = {}  # bytes, by the numbers in which nothing fits
    most = solvers.numbers()[-1]
    all_tried = True  # numbers that could help
    for number in numbers:
        if number > 1:
            how, reason = solvers.weights()
            if how is None:
                whole = Rejection("micro-batches", Reason.DOES_NOT_SPLIT, reason)
                if whole not in rejected:
                    rejected.append(whole)
                break
        try:
            solver = solvers.of(number, candidate)
        except RefusedError as error:
            if number == solvers.numbers()[0]:
                raise
            rejected.append(Rejection(named(candidate, number), Reason.CANNOT_RUN, error.refusal.text))
            break
        plain = solver.trace.planned_step_seconds
        name = named(candidate, number)
        if best is not None and plain * WORTH_MORE >= best.seconds:
            why = f"{format_seconds(plain)} a step before anything is dropped, and a plan that fits takes {format_seconds(best.seconds)}"
            if plain < best.seconds:
                why += f": a gain of less than {100 * (WORTH_MORE - 1):.0f} % is not searched for"
            rejected.append(Rejection(name, Reason.CANNOT_WIN, why))
            all_tried = False
            break
        solution = solver.plain if solvers.fits_undropped(solver, budget_bytes) else solver.fitting(capacity)
        if solution is None:
            needs[number] = solver.needed_here(solver.least_here())
            held = least_bytes(solver) + solvers.extra_bytes
            rejected.append(_too_large(candidate, number, needs[number], held if held > budget_bytes else None))
            if held > budget_bytes:
                all_tried = False
                break
            *_, fewer, this = (inf, *needs.values())
            # The second number may need more than the first, since gradients then are there from the start; from there on less of the batch is never more.
            if len(needs) > 2 and this >= fewer:
                break
            if number < most and not candidate.streamed and _as_dividing_goes_on(needs, most) > capacity:
                last = _needed_in(solvers, candidate, most, budget_bytes)
                if last > capacity:
                    needs[most] = last
                    rejected.append(_too_large(candidate, most, last))
                    break
            continue
        found = Found(candidate, number, solver, solution)
        faster = own is None or found.seconds * WORTH_MORE < own.seconds
        if best is None or found.seconds * WORTH_MORE < best.seconds:
            if best is not None:
                rejected.append(best.slower())
            best = found
        else:
            rejected.append(found.slower())
        no_faster = 0 if faster else no_faster + 1
        if no_faster == 2:
            break
        own = found if faster else own
        if found.worth_no_more():
            break  # what more micro-batches could still save is not worth them
    if own is None and needs and all_tried:
        needed[candidate] = min(needs.values()) + solvers.extra_bytes
    return best


def _too_large(candidate: Choices, number: int, needed: int, held: int | None = None) -> Rejection:
    """Of a candidate in a number of micro-batches in which it needs too much; of that, bytes `held` in the update are too much by themselves."""
    or_more = " or more" if candidate.sharding else ""  # on another rank
    always = "" if held is None else f", of which {format_bytes(held)} are held in the optimizer's update"
    why = f"nothing fits, the smallest plan found needs {format_bytes(needed)}{or_more}{always}"
    return Rejection(named(candidate, number), Reason.DOES_NOT_FIT, why)


def _as_dividing_goes_on(needs: Mapping[int, int], most: int) -> float:
    """Bytes that the largest number of micro-batches is likely to need, by the last two that were looked at: a part of them is for samples, the rest is not."""
    if len(needs) < 2:
        return 0.0
    *_, (few, needed_by_few), (more, needed_by_more) = needs.items()
    each = max(0, needed_by_few - needed_by_more) / (1 / few - 1 / more)
    return needed_by_more - each * (1 / more - 1 / most)


def _needed_in(solvers: Solvers, candidate: Choices, number: int, budget_bytes: int) -> int:
    """Bytes that a candidate needs in a number of micro-batches, on the rank that is captured first; 0 where it fits undropped, or cannot run so."""
    try:
        solver = solvers.of(number, candidate)
    except RefusedError:
        return 0
    return 0 if solvers.fits_undropped(solver, budget_bytes) else solver.needed_here(solver.least_here())


def _nothing_to_offload(solvers: Solvers) -> list[Rejection]:
    """Why nothing can be offloaded, where the user gave space for it."""
    tier = solvers.bundle.lower_tier
    if tier is None or tier.free_bytes is None:
        return []
    reason = why_nothing_is_offloaded(solvers.baseline.recipes)
    return [] if reason is None else [Rejection("activation offloading", Reason.NOTHING_TO_OFFLOAD, reason)]
