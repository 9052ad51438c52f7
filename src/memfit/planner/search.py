"""A bundle of traces and a budget -> the fastest Plan found: the few discrete choices around the minimum cuts, and what was rejected and why.

Candidates (sets of techniques) are tried one after the other, the one closest to the baseline first. A candidate is not captured where a lower bound on its
seconds exceeds those of the best plan. For each candidate the number of micro-batches is searched upwards in powers of two, and the search stops where more
cannot help: when the step with nothing dropped is already slower than the best plan found.

Nothing here runs a model or remembers other budgets: a plan depends on the bundle and the budget alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from memfit.planner.caching_allocator import MIB
from memfit.planner.description import describe
from memfit.planner.found import WORTH_MORE, Found, Reason, Rejection
from memfit.planner.infeasible import infeasible
from memfit.planner.offloading import why_nothing_is_offloaded
from memfit.planner.optimistic import least_bytes
from memfit.planner.pruning import adds_to_any, why_hopeless
from memfit.planner.savings import savings, slower_notes
from memfit.planner.solvers import SLACK_BYTES, MissingTrace, RefusedError, Solvers
from memfit.techniques.choices import Choices, in_words, named
from memfit.units import format_bytes, format_seconds
from memfit.values.plan import Plan

TRIES: Final = 4  # to leave room for blocks: each takes less than the last one by what that was above the budget


def plan(solvers: Solvers, budget_bytes: int, *, compared: bool = True) -> Plan:
    """The fastest plan found, with what its techniques save and which of them are slower than people expect.

    Args:
        solvers: of the bundle.
        budget_bytes: what the plan has to fit into.
        compared: with the steps without its techniques, which are captured for it; else it says nothing of savings.

    Raises:
        InfeasibleError: nothing fits; names the smallest budget that would do.
        MissingTrace, MissingWeighting: the bundle lacks what is needed, and the caller can capture it.
        RefusedError: the only candidate cannot be captured.
    """
    found, rejected = weigh(solvers, budget_bytes)
    if found is None:
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
            best = _weigh_one(solvers, candidate, budget_bytes, best, rejected, needed)
        except RefusedError as error:
            if len(bundle.candidates) == 1:
                raise
            rejected.append(Rejection(in_words(candidate), Reason.CANNOT_RUN, error.refusal.text))
        except MissingTrace as missing:
            later = bundle.candidates[position + 1 :]
            missing.further = sum(why_hopeless(solvers, each, budget_bytes, best, needed) is None for each in later)
            raise
    return best, rejected


def _weigh_one(
    solvers: Solvers,
    candidate: Choices,
    budget_bytes: int,
    best: Found | None,
    rejected: list[Rejection],
    needed: dict[Choices, int],
) -> Found | None:
    """The best of what was found and what this candidate gives, its micro-batches searched upwards.

    What is rejected is added to `rejected`, and bytes that it needs in all numbers of micro-batches to `needed` where it fits in none.
    """
    capacity = budget_bytes - solvers.extra_bytes - SLACK_BYTES
    own: Found | None = None  # of this candidate
    no_faster = 0  # numbers of micro-batches in a row
    needs: list[int] = []  # bytes, in the numbers in which nothing fits
    all_tried = True  # numbers that could help
    for number in solvers.numbers():
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
        nothing_dropped = solver.plain.peak <= budget_bytes and solvers.budget_for(solver, solver.plain) <= budget_bytes
        solution = solver.plain if nothing_dropped else solver.fitting(capacity)
        if solution is None:
            needs.append(solver.needed_here(solver.least_here()))
            or_more = " or more" if candidate.sharding else ""  # on another rank
            held = least_bytes(solver) + solvers.extra_bytes
            always = (
                f", of which {format_bytes(held)} are held in the optimizer's update" if held > budget_bytes else ""
            )
            why = f"nothing fits, the smallest plan found needs {format_bytes(needs[-1])}{or_more}{always}"
            rejected.append(Rejection(name, Reason.DOES_NOT_FIT, why))
            # The second number may need more than the first, since gradients then are there from the start; from there on less of the batch is never more.
            if always or (len(needs) > 2 and needs[-1] >= needs[-2]):
                all_tried = not always
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
        needed[candidate] = min(needs) + solvers.extra_bytes
    return best


def _nothing_to_offload(solvers: Solvers) -> list[Rejection]:
    """Why nothing can be offloaded, where the user gave space for it."""
    tier = solvers.bundle.lower_tier
    if tier is None or tier.free_bytes is None:
        return []
    reason = why_nothing_is_offloaded(solvers.baseline.recipes)
    return [] if reason is None else [Rejection("activation offloading", Reason.NOTHING_TO_OFFLOAD, reason)]
