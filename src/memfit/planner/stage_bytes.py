"""What a stage holds while its schedule runs: one micro-batch's timeline, for each micro-batch where it is in it. No second memory model.

The trace of a stage is of one micro-batch, as it runs when gradients are there to be added to. Of every other micro-batch in flight what forward left is there.
What differs from that is said here: gradients are made in the first backward; the schedule holds gradients that it sends until they are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from memfit.planner.prices import PRICE_RANGE
from memfit.planner.schedules import Action, Order, in_flight
from memfit.planner.solution import Solution
from memfit.planner.solver import Solver
from memfit.planner.timeline import Recomputations, Timeline
from memfit.values.stages import Recompute, Schedule
from memfit.values.trace import Category, Phase, Trace

NUMBER_BYTES: Final = 4  # of what stands for the loss in the trace of a stage that is not the last
# What the host takes longer around the forward of a stage, or its backward, where a rank has several stages, in multiples of what lies between two
# operations: more messages at once, more of the model's forward to walk through (two ranks on a CPU, by hand: docs/design/log.md). What all pipelines take is
# left out.
INTERLEAVED: Final = 150
MENU_BUDGETS: Final = 6  # between the smallest peak and that with everything kept
PRICES: Final = 8  # at which plans are made that hold little between forward and backward
CALLS: Final = 8  # numbers of calls made again that are tried, of each order
ALIKE: Final = 0.01  # of the largest pass: ways that differ by fewer bytes are one
IN_FLIGHT: Final = 32  # micro-batches: for up to as many the way that takes least stays

Planned = TypeVar("Planned")


@dataclass(frozen=True, slots=True)
class StageLevels:
    """Bytes of one stage above what is there throughout.

    Attributes:
        base_bytes: there throughout, gradients left out.
        gradient_bytes: from the first backward on.
        kept_bytes: of a micro-batch between its forward and its backward.
        forward_bytes, first_backward_bytes, backward_bytes: at the peak of each; the first backward's includes the gradients made in it, the others' none.
        update_bytes: at the peak of clipping and the optimizer, gradients left out, and what the trace alone holds until then: the loss, and what that refers
            to.
        received_gradient_bytes: of what backward gives for what was received.
        sent_bytes: of what forward sends; 0 for the last stage.
        made_bytes: of that, what forward has made; the rest it has received, and hands on from the buffer in which that lies. Where messages are released,
            what autograd does not keep of it.
        done_bytes: of a micro-batch that is through, to the end of the step: its loss, and what that refers to.
        arriving_bytes: of what is received for a micro-batch, where messages are released: it is in the other levels from forward or backward on, and may
            arrive before, while another micro-batch is computed with. 0 where there is memory for all of it throughout.
        updated_at_once: the optimizer steps all parameters of a rank in each of its operations.
    """

    base_bytes: int
    gradient_bytes: int
    kept_bytes: int
    forward_bytes: int
    first_backward_bytes: int
    backward_bytes: int
    update_bytes: int
    received_gradient_bytes: int
    sent_bytes: int
    made_bytes: int
    done_bytes: int = 0
    arriving_bytes: int = 0
    updated_at_once: bool = False

    @property
    def pass_bytes(self) -> int:
        """At the peak of a micro-batch's pass, gradients left out."""
        return max(self.forward_bytes, self.backward_bytes)

    def receiving(self, activations_bytes: int, gradients_bytes: int, micro_batches: int) -> StageLevels:
        """With messages that are there for their own micro-batch alone, of so many: from its forward, and from its backward on, until that has ended."""
        both = activations_bytes + gradients_bytes
        return replace(
            self,
            kept_bytes=self.kept_bytes + activations_bytes,
            forward_bytes=self.forward_bytes + activations_bytes,
            first_backward_bytes=self.first_backward_bytes + both,
            backward_bytes=self.backward_bytes + both,
            # The graph of a loss ends in what the last stage has received and sends gradients of.
            done_bytes=self.done_bytes + (0 if self.sent_bytes else self.received_gradient_bytes),
            arriving_bytes=both if micro_batches > 1 else 0,
        )


def stage_levels(
    timeline: Timeline,
    recomputations: Recomputations,
    received_gradient_bytes: int = 0,
    sent_bytes: int = 0,
    made_bytes: int | None = 0,
    buffers_bytes: int = 0,
    made_elsewhere: frozenset[int] = frozenset(),
) -> StageLevels:
    """The levels of a stage under a plan.

    Args:
        timeline: of its trace, in which the pass adds to gradients, or makes them where there is one micro-batch.
        recomputations: the plan.
        received_gradient_bytes, sent_bytes, made_bytes: as in `StageLevels`; None for what the trace has at the end of forward and not between it and backward.
        buffers_bytes: of buffers for messages that are not in the trace, less those that are in it and are not there throughout.
        made_elsewhere: gradients, by storage, that a later stage of the same rank makes, since it has their parameters, too: they are counted there.
    """
    trace = timeline.trace
    expanded = timeline.expand(recomputations)
    totals = np.asarray(expanded.totals)
    slot_of_event = np.asarray(expanded.slot_of_event)
    forward_end, pass_end = int(slot_of_event[trace.forward_events - 1]), int(slot_of_event[trace.pass_events - 1])
    known = timeline.gradients
    gradients = known.bytes
    base = trace.bytes_before_step - gradients
    gradients -= sum(trace.storages[s].bytes for s in made_elsewhere)
    above = totals - trace.bytes_before_step
    missing = _gradients_to_come(timeline, slot_of_event, len(totals), made_elsewhere)
    made = _gradients_made(timeline, slot_of_event, len(totals))
    backward = slice(forward_end + 1, pass_end + 1)
    # What backward begins with in the trace of a stage that is not the last: a number in place of a loss, and its gradient.
    begins = NUMBER_BYTES if sent_bytes else 0
    number = NUMBER_BYTES if sent_bytes else _loss_bytes(trace)
    forward = above[: forward_end + 1].copy()
    forward[forward_end] -= begins
    kept = _kept(timeline, expanded, recomputations, forward_end) - begins
    return StageLevels(
        base + buffers_bytes,
        gradients + int(made[pass_end]),
        kept,
        int(forward.max(initial=0)),
        int((above - missing)[backward].max(initial=0)) + gradients - 2 * begins,
        int((above - made)[backward].max(initial=0)) - 2 * begins,
        max(0, int((above - made)[pass_end + 1 :].max(initial=0)) - number - _given_back(timeline)),
        received_gradient_bytes,
        sent_bytes,
        max(0, int(forward[forward_end]) - kept) if made_bytes is None else made_bytes,
        0 if sent_bytes else number,
        updated_at_once=any(o.phase is Phase.OPTIMIZER and "_foreach_" in o.name for o in trace.operations),
    )


def _loss_bytes(trace: Trace) -> int:
    """Of the last stage's loss: a copy (`StageModule.forward`), after which forward makes nothing."""
    *_, made = (operation.makes for operation in trace.in_forward() if operation.makes)
    return sum(trace.storages[s].bytes for s in made)


def _gradients_to_come(timeline: Timeline, slot_of_event: Any, slots: int, made_elsewhere: frozenset[int]) -> Any:
    """At each slot, bytes of the gradients that a first backward has not made by then: they are added to later than that."""
    sizes = timeline.trace.storages
    added = [(event, sizes[s].bytes) for s, event in timeline.gradients.added if s not in made_elsewhere]
    return _until(slot_of_event, added, slots)


def _until(slot_of_event: Any, changes: Iterable[tuple[int, int]], slots: int) -> Any:
    """At each slot, the bytes of all whose event (the first of a pair) comes then or later."""
    ends = np.zeros(slots + 1, dtype=np.int64)
    for event, size in changes:
        ends[int(slot_of_event[event])] += size
    return ends[::-1].cumsum()[::-1][:slots]


def _gradients_made(timeline: Timeline, slot_of_event: Any, slots: int) -> Any:
    """At each slot, bytes of gradients that the pass has made: of the only micro-batch, before which there are none."""
    made = np.zeros(slots, dtype=np.int64)
    for s in timeline.gradients.made:
        storage = timeline.trace.storages[s]
        made[int(slot_of_event[storage.birth]) : int(slot_of_event[timeline.last_end[s]]) + 1] += storage.bytes
    return made


def _given_back(timeline: Timeline) -> int:
    """Bytes that backward has made and that are there to the end of the trace, gradients of parameters left out: what it gives for what was received."""
    trace, last = timeline.trace, len(timeline.trace.events) - 1
    return sum(
        storage.bytes
        for number, storage in enumerate(trace.storages)
        if storage.category is Category.TEMPORARY
        and trace.forward_events <= storage.birth < trace.pass_events
        and timeline.last_end[number] >= last
    )


def _kept(timeline: Timeline, expanded: Any, recomputations: Recomputations, slot: int) -> int:
    """Bytes that forward made and that are there between its last operation and the first of backward."""
    trace, sizes = timeline.trace, timeline.storage_bytes
    storages, births, ends = (np.asarray(column) for column in (expanded.storages, expanded.births, expanded.ends))
    there = (births < slot) & (ends > slot)
    untouched = timeline.kept_by_forward.copy()
    untouched[storages] = False
    used = {recipe for runs in recomputations.values() for recipe in runs}
    random = sum(trace.rng_state_bytes for recipe in used for _ in timeline.random_events.get(recipe, ()))
    passing = {s for recipe in used for s in timeline.recipes.passing.get(recipe, ())}
    held = sum(trace.storages[s].bytes for s in passing if timeline.last_end[s] < trace.forward_events)
    return int(sizes[storages[there]].sum()) + int(sizes[untouched].sum()) + random + held


def menu(
    solver: Solver, levels_of: Callable[[Recomputations], StageLevels], *, plain_only: bool = False
) -> list[tuple[Recompute, Solution]]:
    """Ways to hold a stage's activations, the fastest first: plans between everything kept and the smallest peak, and between all and little held in flight.

    A plan for a peak may hold as much after forward as in backward. Of several micro-batches in flight one is in its pass, and what the others hold between
    forward and backward is there beside it.

    Args:
        solver: of the stage.
        levels_of: what the stage holds under a plan.
        plain_only: everything kept, and no other.
    """
    found: list[Solution | None] = [solver.plain]
    if not plain_only:
        smallest = solver.least()
        budgets = [int(budget) for budget in np.linspace(smallest.peak, solver.plain.peak, MENU_BUDGETS)[1:-1]]
        found += [*map(solver.solve, budgets), smallest, *_holding_little(solver)]
    ways: list[tuple[Recompute, Solution]] = []
    for solution in found:
        if solution is None or not solver.draws.holds_on_all_paths(solution.recomputations):
            continue
        levels = levels_of(solution.recomputations)
        way = Recompute(levels.kept_bytes, levels.pass_bytes, solution.seconds)
        ways.append((way, solution))
    return different(ways)


def different(ways: Sequence[tuple[Recompute, Planned]]) -> list[tuple[Recompute, Planned]]:
    """Those of some ways to hold activations that another one does not beat, or come near to, in bytes and seconds; the fastest first."""
    ordered = sorted(ways, key=lambda one: (one[0].extra_seconds, one[0].kept_bytes, one[0].pass_bytes))
    alike = int(ALIKE * max(way.pass_bytes for way, _ in ordered))
    least = [min(ordered, key=lambda one: one[0].pass_bytes + n * one[0].kept_bytes)[0] for n in range(IN_FLIGHT)]
    best: list[tuple[Recompute, Planned]] = []
    for way, planned in ordered:
        near = 0 if any(way is each for each in least) else alike
        if not any(w.kept_bytes <= way.kept_bytes + near and w.pass_bytes <= way.pass_bytes + near for w, _ in best):
            best.append((way, planned))
    return best


def _holding_little(solver: Solver) -> Iterator[Solution]:
    """Plans in which what a micro-batch holds between forward and backward has a price, alone and beside its peak; and the plans of calls, from one to all."""
    problem, last = solver.problem, solver.trace.forward_events - 1
    if not solver.droppable:
        return
    lowest, highest = (bound * problem.graph.price_scale for bound in PRICE_RANGE)
    prices = np.geomspace(lowest, highest, PRICES + 1)[1:]
    for weights in ({last: 1.0}, {last: 1.0, problem.baseline.evaluation.peak_event: 1.0}):
        for layout in problem.layouts:
            for price in prices:
                yield problem.cuts.at_price(layout, weights, float(price))
    for order in solver.call_plans.orders:
        for number in sorted({round(share) for share in np.linspace(1, len(order), min(CALLS, len(order)))}):
            yield solver.call_plans.plan(order[:number])


def rank_peak(
    order: Order,
    schedule: Schedule,
    stages: Mapping[int, StageLevels],
    shared_bytes: int = 0,
    batch_bytes: int = 0,
    *,
    messages_released: bool = False,
) -> tuple[int, str]:
    """The most that a rank holds in a step, and in which phase.

    Args:
        order: what it runs.
        schedule: of which that is.
        stages: of this rank, by number.
        shared_bytes: there throughout, that its stages together count too often (`StagePlanner.shared_bytes`).
        batch_bytes: of what is there throughout, what ranks have sent each other of the batch: it goes before the update.
        messages_released: some time after they are sent, or when their micro-batch is through.
    """
    base = sum(levels.base_bytes for levels in stages.values()) - shared_bytes
    held = dict.fromkeys(stages, 0)
    done = dict.fromkeys(stages, 0)
    messages = _released_messages(schedule, stages) if messages_released else _lasting_messages(order, schedule, stages)
    peak, phase = 0, Phase.FORWARD
    for action in order:
        levels = stages[action.stage]
        if action.backward:
            held[action.stage] -= 1
        here = base + sum(stages[s].kept_bytes * n for s, n in held.items())
        here += sum(stages[s].gradient_bytes for s, n in done.items() if n)
        here += sum(stages[s].done_bytes * n for s, n in done.items())
        here += messages(action, held, done)
        if action.backward:
            here += levels.backward_bytes if done[action.stage] else levels.first_backward_bytes
            done[action.stage] += 1
        else:
            here += levels.forward_bytes
            held[action.stage] += 1
        if here > peak:
            peak, phase = here, Phase.BACKWARD if action.backward else Phase.FORWARD
    after = base + sum(levels.gradient_bytes for levels in stages.values())
    updates = [levels.update_bytes for levels in stages.values()]
    at_once = any(levels.updated_at_once for levels in stages.values())
    update = after - batch_bytes + (sum(updates) if at_once else max(updates))
    return (update, str(Phase.OPTIMIZER)) if update > peak else (peak, str(phase))


# Bytes of messages beside what its levels say, while an action runs: of it, micro-batches in flight, and those done, by stage.
Messages = Callable[[Action, Mapping[int, int], Mapping[int, int]], int]


def _lasting_messages(order: Order, schedule: Schedule, stages: Mapping[int, StageLevels]) -> Messages:
    """Up to torch 2.14.

    In GPipe and interleaved 1F1B what forward and backward send is held to the end of the step; in 1F1B only the last gradient, and the last output sent before
    the first backward, until the last forward.
    """
    if schedule is not Schedule.ONE_FORWARD_ONE_BACKWARD:
        return lambda _, __, done: sum(
            (stages[s].received_gradient_bytes + stages[s].made_bytes) * n for s, n in done.items()
        )
    warm_up = {s: in_flight(order, s) for s in stages}
    micro_batches = 1 + max(action.micro_batch for action in order)

    def one_forward_one_backward(action: Action, _: Mapping[int, int], done: Mapping[int, int]) -> int:
        ahead = warm_up[action.stage]
        last_output = ahead > 1 and done[action.stage] >= ahead - 1
        if action.backward and action.micro_batch > micro_batches - ahead:
            last_output = False
        return _last_gradients(stages, done) + (stages[action.stage].made_bytes if last_output else 0)

    return one_forward_one_backward


def _released_messages(schedule: Schedule, stages: Mapping[int, StageLevels]) -> Messages:
    """Since torch 2.15.

    1F1B holds the last gradient, and while it warms up the last output until the next one is made; GPipe all gradients to the end, and all outputs to the last
    forward; interleaved 1F1B likewise, and each output to the end of its backward. There one message may have come beside the one that is computed with.
    """

    def messages(action: Action, held: Mapping[int, int], done: Mapping[int, int]) -> int:
        own = stages[action.stage].made_bytes
        if schedule is Schedule.ONE_FORWARD_ONE_BACKWARD:
            warming_up = not action.backward and not done[action.stage] and held[action.stage]
            return _last_gradients(stages, done) + (own if warming_up else 0)
        gradients = sum(stages[s].received_gradient_bytes * n for s, n in done.items())
        if schedule is Schedule.GPIPE:
            return gradients + (0 if action.backward else own * held[action.stage])
        outputs = sum(stages[s].made_bytes * n for s, n in held.items()) + (own if action.backward else 0)
        return gradients + outputs + max(levels.arriving_bytes for levels in stages.values())

    return messages


def _last_gradients(stages: Mapping[int, StageLevels], done: Mapping[int, int]) -> int:
    return sum(stages[s].received_gradient_bytes for s, n in done.items() if n)


def seconds_of(trace: Trace, schedule: Schedule) -> tuple[float, float, float]:
    """Forward, backward and update of one micro-batch with nothing dropped, in a stage that runs in this schedule."""
    sums = dict.fromkeys(Phase, 0.0)
    for code in trace.events:
        if code >= 0:
            sums[trace.operations[code].phase] += trace.operations[code].seconds
    around = around_seconds(trace, schedule)
    forward, backward = (
        sums[phase] + trace.between_seconds_of(phase) + around for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    return forward, backward, sums[Phase.CLIP] + sums[Phase.OPTIMIZER]


def around_seconds(trace: Trace, schedule: Schedule) -> float:
    """What the host takes longer around each forward and backward of a stage in this schedule."""
    return INTERLEAVED * trace.python_seconds if schedule is Schedule.INTERLEAVED else 0.0


def adding_rate(timeline: Timeline) -> float | None:
    """Seconds for each byte of a gradient that a pass adds to, of the largest, for which it is least; None where it makes all of them."""
    trace, there = timeline.trace, set(timeline.gradients.before)
    rates = []
    for operation in trace.operations:
        if operation.phase is Phase.BACKWARD and (added := there.intersection(operation.writes)):
            size = sum(trace.storages[s].bytes for s in added)
            rates.append((operation.seconds + trace.beside_seconds(operation)) / max(1, size))
    return min(rates, default=None)
