"""From what the search found to a Plan with its figures: where the peak is, bytes over time, what each module keeps and drops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from memfit.garbage import uncollected
from memfit.planner.caching_allocator import MIB, allocator_bytes
from memfit.planner.copying import Copying
from memfit.planner.found import Found, Rejection
from memfit.planner.script_compiler import compile_branches, compile_calls, compile_script, knowing_calls
from memfit.planner.solution import Solution
from memfit.planner.solver import Solver
from memfit.planner.solvers import SLACK_BYTES, Solvers
from memfit.planner.timeline import Recomputations, Timeline
from memfit.step.freed_memory import GIVEN_BACK_BYTES
from memfit.techniques.choices import Choices, in_words, named
from memfit.techniques.sharding import at_rank, way_of
from memfit.units import format_bytes, format_seconds
from memfit.values.plan import Plan
from memfit.values.prediction import ModuleSaving, Prediction, RankPrediction, TierUse
from memfit.values.script import TIERS, FirstForward, Script
from memfit.values.trace import Trace

CURVE_POINTS: Final = 240
GPU_STATE_BYTES: Final = 16  # of a generator on a GPU; that of the CPU has thousands


@uncollected()
def describe(
    solvers: Solvers, budget_bytes: int, found: Found, rejected: Sequence[Rejection] = (), room_bytes: int = 0
) -> Plan:
    """The plan in full, except for its savings, which need other candidates.

    Args:
        solvers, found, rejected: of the search.
        budget_bytes: what was asked for.
        room_bytes: of these, left free for blocks that are larger than their tensors.
    """
    solver, solution = found.solver, found.solution
    trace, recipes = solver.trace, solver.recipes
    fullest, there = solver.fullest(solution)  # of several ranks
    copying = fullest.worst(there)[1].copying
    beside = [(other, _beside(other, budget_bytes - room_bytes - solvers.extra_bytes)) for other in solver.branches]
    # What is told of the peak is of the path that has it.
    timeline, its_plan = _with_the_peak(fullest, there, beside)
    evaluation = timeline.evaluate(its_plan)
    nothing_dropped = timeline.plain().levels
    phase, module, operation = where(timeline.trace, evaluation.peak_event)
    bands = timeline.by_category(its_plan)
    moments = _moments(timeline.trace, evaluation.peak_event)
    capacity = budget_bytes - room_bytes - solvers.extra_bytes - SLACK_BYTES
    bound = solver.bound(capacity, solution) if solution.recomputations else 0.0
    kept: dict[str, int] = defaultdict(int)
    dropped: dict[str, int] = defaultdict(int)
    again: dict[str, float] = defaultdict(float)
    below: dict[str, int] = defaultdict(int)
    rebuilt = {m for runs in solution.recomputations.values() for r in runs for m in recipes.recipes[r].makes}
    for s in recipes.saved:
        fate = below if s in copying.offloaded else dropped if s in rebuilt and s in solution.dropped else kept
        fate[trace.storages[s].module] += trace.storages[s].bytes
    for runs in solution.recomputations.values():
        for r in runs:
            for op in recipes.recipes[r].operations:
                again[trace.operations[op].module] += trace.operations[op].seconds
    script = script_of(solver, solution, beside)
    on_each = [solution, *(plan for _, plan in beside)]
    own_peak = max(evaluation.peak_bytes, *_in_branches(fullest, on_each, script)) + solvers.extra_bytes
    ranks = _of_ranks(solvers, found, on_each, script)
    on_a_gpu = any(machine.kind == "cuda" for machine in solvers.bundle.topology.devices)
    blocks = allocator_bytes(timeline, its_plan) if on_a_gpu else None
    prediction = Prediction(
        peak_bytes=max(own_peak, *(rank.peak_bytes for rank in ranks)) if ranks else own_peak,
        step_seconds=max(found.seconds, *(rank.step_seconds for rank in ranks)) if ranks else found.seconds,
        ranks=ranks,
        bound_seconds=trace.planned_step_seconds + trace.micro_batches * bound,
        seconds_are=trace.seconds_are,
        peak_phase=phase,
        peak_module=module,
        peak_operation=operation,
        categories_at_peak={
            str(c): int(b[evaluation.peak_event]) for c, b in bands.items() if int(b[evaluation.peak_event])
        },
        moments=tuple(moments),
        phases=tuple(where(timeline.trace, m)[0] for m in moments),
        curve={str(c): tuple(int(b[m]) for m in moments) for c, b in bands.items() if b.any()},
        plain_curve=tuple(int(nothing_dropped[m]) for m in moments),
        copy_seconds=trace.transfer_seconds + trace.micro_batches * copying.copy_seconds,
        exposed_seconds=trace.waited_seconds + trace.micro_batches * copying.exposed_seconds,
        varies_bytes=solver.draws.varies(solution.recomputations),
        tiers=_tiers(solvers, trace, copying),
        allocated_bytes=blocks.allocated + solvers.extra_bytes if blocks else 0,
        reserved_bytes=blocks.reserved + solvers.extra_bytes if blocks else 0,
        **asdict(plain_step(solvers)),
    )
    names = sorted({*kept, *dropped, *below, *again})
    first, first_peak = _first_forward(solver.first, capacity) if solver.first is not None else (None, 0)
    return Plan(
        budget_bytes=budget_bytes,
        choices=_weighted(trace.choices, solvers, found.number),
        script=script if first is None else replace(script, first=first),
        prediction=prediction,
        signature=trace.signature,
        model=trace.model,
        device=trace.device,
        device_kind=_kind_of_device(solvers, trace),
        torch_version=trace.torch_version,
        clip_norm=trace.clip_norm,
        differs=_differs(solvers, trace, found.number),
        by_module=tuple(ModuleSaving(n, kept[n], dropped[n], again[n], below[n]) for n in names),
        rejected=tuple(map(str, rejected)),
        notes=(
            *trace.notes,
            *_on_parts(solvers, trace),
            *_undivided(solvers, found, budget_bytes),
            *_reserved(prediction, budget_bytes, room_bytes),
            *_drawn(prediction, trace),
            *_several(trace, prediction, budget_bytes),
            *_each_its_own(prediction, budget_bytes, [(solver, solution), *beside], solvers.extra_bytes),
            *(_builds(first_peak + solvers.extra_bytes, budget_bytes) if first is not None else ()),
        ),
        source=trace.source,
        changed_buffers=trace.changed_buffers,
        frozen=solvers.bundle.frozen,
    )


@dataclass(frozen=True, slots=True)
class PlainStep:
    """The figures that a plan's are compared with: `Prediction` has them under the same names."""

    plain_peak_bytes: int
    plain_step_seconds: float
    plain_with: str


def _of_ranks(
    solvers: Solvers, found: Found, solutions: Sequence[Solution], script: Script
) -> tuple[RankPrediction, ...]:
    """Of each rank of a sharded step; all follow the same plan.

    Args:
        solvers, found: of the step.
        solutions: what is found, and the plans for other paths of forward.
        script: of all of them.
    """
    if not found.candidate.sharding:
        return ()
    sharding = found.candidate.sharding
    _, ranks, own = way_of(sharding)
    figures: dict[int, tuple[int, float]] = {}
    roles = solvers.bundle.roles or (own,) * ranks
    for role in dict.fromkeys(roles):
        there = found.candidate.but(sharding=at_rank(sharding, role))
        solver = found.solver if role == roles[own] else solvers.of(found.number, there)
        peak = solver.problem.timeline.peak(found.solution.recomputations)
        beside = _in_branches(solver, solutions, script)
        peak = max(peak, *_on_paths(solver, found.solution), *beside) + solvers.extra_bytes
        figures[role] = peak, solver.trace.planned_step_seconds + solver.trace.micro_batches * found.solution.seconds
    return tuple(RankPrediction(rank, *figures[role]) for rank, role in enumerate(roles))


def _weighted(choices: Choices, solvers: Solvers, number: int) -> Choices:
    """The choices with how losses of micro-batches and ranks add up. Samples are counted where ranks' parts do not stand for themselves (a batch norm)."""
    if choices.sharding:
        return replace(choices, weights=solvers.weights()[0] or "samples")
    return replace(choices, weights=solvers.weights()[0] or "whole") if number > 1 else choices


def _differs(solvers: Solvers, trace: Trace, number: int) -> str:
    """As `Plan.differs`: parts of the batch may have another loss than the whole, and draw numbers of their own."""
    sharded = bool(trace.choices.sharding)
    if sharded and solvers.weights()[0] is None:
        return "each rank takes the loss of its own part of the batch, which need not add up to that of the whole batch"
    if (sharded or number > 1) and any(operation.random for operation in trace.operations):
        return own_numbers("rank" if sharded else "micro-batch")
    return ""


def own_numbers(drawer: str) -> str:
    """As `Plan.differs`, where forward draws: who draws for itself."""
    return f"each {drawer} draws random numbers of its own (dropout)"


def _on_parts(solvers: Solvers, trace: Trace) -> tuple[str, ...]:
    """That ranks with a part of the batch each do not give what one device with all of it would."""
    if not trace.choices.sharding or solvers.weights()[0] is not None:
        return ()
    note = (
        "each rank takes the loss of its own part of the batch, and these are weighted by samples, which need not give the results of one device with "
        f"the whole batch: {solvers.weights()[1]}"
    )
    return (note,)


def plain_step(solvers: Solvers) -> PlainStep:
    """The baseline with nothing dropped."""
    plain = solvers.baseline
    full, _ = plain.fullest(plain.plain)
    others = (other.plain.peak for other in full.branches)
    peak = max(full.worst(full.plain)[1].peak_bytes, *_on_paths(full, full.plain), *others)
    return PlainStep(peak + solvers.extra_bytes, plain.trace.plain_step_seconds, _fixed_for(plain.trace.choices))


def _kind_of_device(solvers: Solvers, trace: Trace) -> str:
    """That of the bundle's device. A bundle of a bare trace names none: seconds are estimated for GPUs alone, and a GPU's generator has the smaller state."""
    devices = solvers.bundle.topology.devices
    if devices:
        return devices[0].kind
    return "cuda" if trace.seconds_are == "estimated" or 0 < trace.rng_state_bytes <= GPU_STATE_BYTES else "cpu"


def script_of(solver: Solver, solution: Solution, beside: Sequence[tuple[Solver, Solution]] = ()) -> Script:
    """What the engine follows; call by call where forward takes several paths.

    Args:
        solver, solution: the plan.
        beside: those for the other paths, where each has a plan of its own.
    """
    if beside:
        every = ((solver, solution), *beside)
        script = compile_branches([(each.recipes, plan.recomputations) for each, plan in every])
        return knowing_calls(script, [each.trace for each, _ in every]) if script.plain else script
    if solver.trace.paths:
        return compile_calls(solver.draws, solution.recomputations)
    script = compile_script(solver.recipes, solution.recomputations)
    return knowing_calls(script, [solver.trace]) if script.plain else script


def _first_forward(solver: Solver, capacity: int) -> tuple[FirstForward, int]:
    """What is followed in a first forward that builds something, and the peak of that step: the fastest that fits, else the smallest."""
    solution = solver.within(capacity)
    return FirstForward(dict(solver.trace.before), script_of(solver, solution)), solver.needed(solution)


def _builds(peak_bytes: int, budget_bytes: int) -> tuple[str, ...]:
    """What the user should know where the first forward runs other operations."""
    above = f", above the budget of {format_bytes(budget_bytes)}" if peak_bytes > budget_bytes else ""
    note = (
        "the first forward runs other operations than later ones (it builds what they find), so the first step has a plan of its own: "
        f"{format_bytes(peak_bytes)} at the peak{above}"
    )
    return (note,)


def _fixed_for(baseline: Choices) -> str:
    """What a baseline has that plain PyTorch has not, in words."""
    number = baseline.micro_batches
    return named(baseline, number) if number > 1 else in_words(baseline)


def _tiers(solvers: Solvers, trace: Trace, copying: Copying) -> tuple[TierUse, ...]:
    """What is on each lower tier: activations, optimizer state, streamed layers; and the copying to and from it."""
    found = {
        link.tier: TierUse(
            link.tier,
            sum(trace.storages[s].bytes for s in link.offloaded),
            trace.micro_batches * link.copy_seconds,
            trace.micro_batches * link.exposed_seconds,
        )
        for link in copying.links
    }
    layers, state, tier = solvers.offloaded_bytes(trace.choices)
    if tier:
        own = found.get(tier, TierUse(tier, 0, 0.0, 0.0))
        found[tier] = replace(
            own,
            copy_seconds=own.copy_seconds + trace.transfer_seconds,
            exposed_seconds=own.exposed_seconds + trace.waited_seconds,
            state_bytes=state,
            layer_bytes=layers,
        )
    return tuple(found[tier] for tier in TIERS if tier in found)


def _several(trace: Trace, prediction: Prediction, budget_bytes: int) -> tuple[str, ...]:
    """What the user should know where forward takes several paths."""
    if not trace.paths:
        return ()
    note = (
        f"what to recompute is decided within calls of modules that run the same operations on every path, and the peak is that of the largest of the "
        f"{1 + len(trace.paths)} paths ({format_bytes(prediction.peak_bytes)}). A path that was not seen is followed wherever it makes these calls; what else "
        f"it makes is kept, so it may hold more{_at_most(prediction, budget_bytes)}"
    )
    return (note,)


def _at_most(prediction: Prediction, budget_bytes: int) -> str:
    """How far above the budget a path that nobody has seen may be: as far as the largest of those that were, if nothing of it were dropped."""
    more = prediction.plain_peak_bytes - budget_bytes
    return (
        f": up to {format_bytes(more)} above the budget, were it as large as the largest of these with nothing dropped"
        if more > 0
        else ""
    )


def _with_the_peak(
    solver: Solver, solution: Solution, beside: Sequence[tuple[Solver, Solution]]
) -> tuple[Timeline, Recomputations]:
    """The path, and the sizes, in which a plan takes most, and what it runs again there."""
    if beside:
        fullest, plan = max((solver, solution), *beside, key=lambda each: each[1].peak)
        return fullest.timeline, plan.recomputations
    if solver.trace.paths:
        return solver.draws.with_the_peak(solution.recomputations)
    return solver.worst(solution)[0], solution.recomputations


def _beside(solver: Solver, free_bytes: int) -> Solution:
    """The plan for another path: the fastest that fits, else the smallest. As plain PyTorch needs the slack, too, that is not asked for it."""
    return solver.plain if solver.plain.peak <= free_bytes else solver.within(free_bytes - SLACK_BYTES)


def _in_branches(solver: Solver, solutions: Sequence[Solution], script: Script) -> list[int]:
    """Peaks on all of a few paths that have a plan each; 0 where there is one path.

    Until it is known which one forward takes, what any of them wants is held.
    """
    if not solver.branches:
        return [0]
    peaks = []
    scripts = (script, *script.branches) if script.branches else (script,) * len(solutions)
    for path, solution, own in zip((solver, *solver.branches), solutions, scripts, strict=True):
        found = path.timeline.evaluate(solution.recomputations)
        more = sum(path.trace.storages[s].bytes for s in own.released)
        before = (
            int(found.levels[: path.trace.events_in_forward[own.decided]].max(initial=0)) + more
            if own.decided > 0
            else 0
        )
        peaks.append(max(found.peak_bytes, before))
    return peaks


def _each_its_own(
    prediction: Prediction, budget_bytes: int, plans: Sequence[tuple[Solver, Solution]], extra_bytes: int
) -> tuple[str, ...]:
    """What the user should know where a few paths have a plan each."""
    if len(plans) == 1:
        return ()
    part = max(solver.trace.shared_operations for solver, _ in plans)
    peaks = " and ".join(format_bytes(solution.peak + extra_bytes) for _, solution in plans)
    note = (
        f"forward takes one of {len(plans)} paths, which part within its first {part + 1} of {plans[0][0].trace.forward_operations} operations, and each has "
        f"a plan of its own: {peaks} at the peak. What a path that was not seen runs is kept from where it differs, so it may hold "
        f"more{_at_most(prediction, budget_bytes)}"
    )
    return (note,)


def _on_paths(solver: Solver, solution: Solution) -> list[int]:
    """Peaks on every path that was seen; 0 where there is one alone."""
    return solver.draws.on_paths(solution.recomputations) if solver.trace.paths else [0]


def _undivided(solvers: Solvers, found: Found, budget_bytes: int) -> tuple[str, ...]:
    """That the batch fits as a whole, too, where it is divided to be faster alone."""
    first = solvers.numbers()[0]
    if found.number == first or not found.worth_no_more():
        return ()
    solver = solvers.of(first, found.candidate)
    whole = Found(found.candidate, first, solver, solver.plain)
    if not solvers.fits_undropped(solver, budget_bytes) or not whole.waits_for_blocks():
        return ()
    note = (
        f"undivided the batch fits, too, and a step takes {format_seconds(whole.seconds - found.seconds)} more, since blocks of "
        f'{format_bytes(GIVEN_BACK_BYTES)} and more come from the system anew in each step: fixed={{"micro_batches": 1}}'
    )
    return (note,)


def _reserved(prediction: Prediction, budget_bytes: int, room_bytes: int) -> tuple[str, ...]:
    """What the allocator of a GPU takes from the card for the plan, and what was left free for it."""
    if not prediction.reserved_bytes:
        return ()
    more, above = prediction.allocated_bytes - prediction.peak_bytes, prediction.allocated_bytes - budget_bytes
    blocks = f" and {format_bytes(more)} in blocks larger than their tensors" if more >= MIB else ""
    over = f"; its blocks may be {format_bytes(above)} above the budget" if above >= MIB else ""
    note = (
        f"PyTorch's allocator takes about {format_bytes(prediction.reserved_bytes)} of the card for these {format_bytes(prediction.peak_bytes)}, its free "
        f"blocks{blocks} included (estimated, with its default settings){over}; the CUDA context comes on top"
    )
    if not room_bytes:
        return (note,)
    room = (
        f"{format_bytes(room_bytes)} of the budget are left free, as the allocator's blocks may be larger than their tensors by as much: "
        f"what was rejected was looked for in {format_bytes(budget_bytes - room_bytes)}"
    )
    return note, room


def _drawn(prediction: Prediction, trace: Trace) -> tuple[str, ...]:
    """What the user should know of sizes that random numbers decide, values of the batch, or parameters that steps have changed."""
    draws = len({tuple(storage.bytes for storage in trace.storages), *trace.drawn_bytes})
    if draws == 1:
        return ()
    largest, varies = prediction.peak_bytes, prediction.varies_bytes
    between = f"the peak of this plan lay between {format_bytes(largest - varies)} and {format_bytes(largest)}"
    kept = f"; {format_bytes(varies)} more are kept free for other{{}}" if varies else ""
    if any(operation.random for operation in trace.operations[: trace.forward_operations]):
        note = (
            f"random numbers, drawn anew in each step, decide how large some results are: over {draws} draws {between}{kept.format(' draws')}. "
            "Single steps may hold more, and sizes may change as the model trains"
        )
    elif trace.source == "fake":  # nothing else has values there
        note = (
            f"values of the batch decide how large some results are: in {draws} micro-batches of the sample {between}{kept.format('s')}. "
            "Other batches may hold more"
        )
    else:
        note = (
            f"parameters decide how large some results are, and training changes them: in {draws} of the first steps {between}{kept.format('s')}. "
            "Later steps, and other batches, may hold more"
        )
    return (note,)


def where(trace: Trace, event: int) -> tuple[str, str, str]:
    """(phase, module, operation) at an event."""
    event = min(event, len(trace.events) - 1)
    code = trace.events[event]
    if code >= 0:
        operation = trace.operations[code]
        return str(operation.phase), operation.module, operation.name
    save = trace.saves[~code]
    return "backward", trace.storages[save.storage].module, "rebuilding what it reads"


def _moments(trace: Trace, peak_event: int) -> list[int]:
    """Events at which the curve is drawn: evenly spread, the peak among them."""
    count = len(trace.events)
    step = max(1, count // CURVE_POINTS)
    return sorted({*range(0, count, step), min(peak_event, count - 1), count - 1})
