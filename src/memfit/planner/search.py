"""Traces + budget -> Plan: the few discrete choices around the minimum cuts, what was turned down, and what the user is told.

Ways to run the step are weighed one after the other, the plainest first. A way is not even captured where what is known bounds its seconds from below by
more than the best plan takes. For each, the number of micro-batches is searched upwards in powers of two. It stops where more cannot help: when the plain
time at a number of micro-batches is already longer than the best plan found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from memfit.errors import CaptureError, EngineError, InfeasibleError, InputError, Remedy
from memfit.garbage import uncollected
from memfit.planner.offloading import solver_for, why_nothing_is_offloaded
from memfit.planner.optimistic import least_bytes, optimistic_bound
from memfit.planner.recipes import Recipes
from memfit.planner.script_compiler import compile_script
from memfit.planner.solution import Solution
from memfit.planner.solver import Solver
from memfit.planner.timeline import Timeline
from memfit.planner.transfers import StreamedLayer
from memfit.techniques.choices import BASELINE, Choices, in_words
from memfit.techniques.technique import OptimisticBound
from memfit.units import format_bytes, format_seconds
from memfit.values.machine import Link
from memfit.values.plan import Plan
from memfit.values.prediction import ModuleSaving, Prediction, TierUse
from memfit.values.trace import Trace

CURVE_POINTS: Final = 240
# Python numbers that kernels wrap into tensors of 8 bytes, out of sight; measured up to 280 bytes at once.
SLACK_BYTES: Final = 512
WORTH_MORE: Final = (
    1.01  # what is plainer must be slower by this much to be left: a single batch is bit-equal to plain, say
)

# Torch itself refuses, with a RuntimeError, a step that writes into what backward reads: in 16 bits, say, where other tensors are saved.
CANNOT_RUN: Final = (CaptureError, EngineError, InputError, RuntimeError)


def doubled_up_to(number: int) -> list[int]:
    """Powers of two below a number, and the number."""
    return [*(1 << power for power in range((number - 1).bit_length())), number]


@dataclass(slots=True)
class Search:
    """Plans for one model and batch at any budget.

    Attributes:
        trace_of: the trace of a step run this way; called once for each way and number of micro-batches.
        samples: in the batch.
        weights: how parts add up, asked only when splitting is weighed: (weights or None, reason when None).
        fixed_micro_batches: the user's choice, or None.
        ways: how else the step may be run, each with one micro-batch; the first is the step as the user has it, and what "plain" means.
        refused: ways that were asked for or allowed and cannot be taken, each with its reason.
        lower_tier: the nearest tier that storages may be swapped to, with those below it; None for nowhere.
        state_bytes: of the optimizer in 32 bits, which lie on the lower tier in some ways; in 8 bits they leave some of that room unused.
        layers: that are streamed in some ways, and what is in no block.
    """

    trace_of: Callable[[Choices], Trace]
    samples: int
    weights: Callable[[], tuple[str | None, str]]
    fixed_micro_batches: int | None = None
    ways: Sequence[Choices] = (BASELINE,)
    refused: Sequence[str] = ()
    lower_tier: Link | None = None
    state_bytes: int = 0
    layers: Sequence[StreamedLayer] = ()
    _solvers: dict[Choices, Solver] = field(default_factory=dict)

    def solver(self, micro_batches: int, way: Choices | None = None) -> Solver:
        """The solver for this many micro-batches; the trace is captured on first use."""
        choices = replace(way or self.ways[0], micro_batches=micro_batches)
        if choices not in self._solvers:
            trace = self.trace_of(choices)
            with uncollected():
                timeline = Timeline(trace, Recipes(trace, self._room_for_swaps(choices)))
                self._solvers[choices] = solver_for(timeline)
        return self._solvers[choices]

    def _room_for_swaps(self, choices: Choices) -> Link | None:
        """The lower tiers without what the optimizer's state takes of the one where it lies."""
        left: Link | None = None
        for link in reversed(self.lower_tier.chain if self.lower_tier is not None else ()):
            room = link.room_bytes
            if room is not None and choices.state_place == link.tier:
                room = max(0, room - self.state_bytes)
            left = replace(link, room_bytes=room, below=left)
        return left

    def _not_swapped(self) -> list[str]:
        """Why nothing can be swapped, where the user gave room for it."""
        tier = self.lower_tier
        reason = (
            why_nothing_is_offloaded(self._plain().recipes)
            if tier is not None and tier.room_bytes is not None
            else None
        )
        return [] if reason is None else [f"swapping: {reason}"]

    def _plain(self) -> Solver:
        return self.solver(self.fixed_micro_batches or 1)

    @property
    def extra_bytes(self) -> int:
        """What the engine keeps beside the trace: copies of the buffers that forward writes."""
        return self._plain().trace.changed_buffer_bytes

    def numbers(self) -> list[int]:
        """Of micro-batches that are weighed: powers of two and as many as there are samples, or what the user fixed."""
        if self.fixed_micro_batches is not None:
            return [self.fixed_micro_batches]
        return doubled_up_to(self.samples)

    def plan(self, budget_bytes: int) -> Plan:
        """The fastest plan found.

        Raises:
            InfeasibleError: nothing fits; names the smallest budget that would do.
        """
        best: Found | None = None
        turned_down = [*self.refused, *self._not_swapped()]
        hopeless: list[Choices] = []
        for way in self.ways:
            reason = self._hopeless(way, budget_bytes, best)
            if reason is not None:
                if not any(_adds_to(other, way) for other in hopeless):  # else what adds to it need not be named
                    turned_down.append(f"{in_words(way) or 'as it is'}: {reason}")
                hopeless.append(way)
                continue
            try:
                best = self._weigh(way, budget_bytes, best, turned_down)
            except CANNOT_RUN as error:
                if len(self.ways) == 1:
                    raise
                turned_down.append(f"{in_words(way)}: {error}")
        if best is None:
            raise self._infeasible(budget_bytes, turned_down)
        return self.describe(budget_bytes, best, turned_down)

    def _hopeless(self, way: Choices, budget: int, best: Found | None) -> str | None:
        """Why a way need not be captured; None where it may give the fastest plan."""
        if way == self.ways[0]:
            return None
        saved = [self._bound(name, value).saved_bytes for name, value in _added(way, self.ways[0])]
        if all(size is not None for size in saved):
            least = least_bytes(self._plain()) - sum(size or 0 for size in saved) + self.extra_bytes
            if least > budget:
                return f"{format_bytes(least)} at least are there when the optimizer updates"
        if best is not None:
            seconds = self._least_seconds(way, budget)
            if seconds * WORTH_MORE >= best.seconds:
                return (
                    f"{format_seconds(seconds)} a step at least, the chosen plan takes {format_seconds(best.seconds)}"
                )
        return None

    def _weigh(self, way: Choices, budget_bytes: int, best: Found | None, turned_down: list[str]) -> Found | None:
        """The best of what was found and what this way gives, its micro-batches searched upwards."""
        room = budget_bytes - self.extra_bytes - SLACK_BYTES
        own: Found | None = None  # of this way
        no_faster = 0  # numbers of micro-batches in a row
        for number in self.numbers():
            if number > 1:
                how, reason = self.weights()
                if how is None:
                    if f"micro-batches: {reason}" not in turned_down:
                        turned_down.append(f"micro-batches: {reason}")
                    break
            solver = self.solver(number, way)
            plain = solver.trace.plain_step_seconds
            name = _named(way, number)
            if best is not None and plain * WORTH_MORE >= best.seconds:
                turned_down.append(
                    f"{name}: {format_seconds(plain)} a step before anything is dropped, the chosen plan takes {format_seconds(best.seconds)}"
                )
                break
            plainly = self.budget_for(solver, solver.plain) <= budget_bytes
            solution = solver.plain if plainly else solver.fitting(room)
            if solution is None:
                turned_down.append(
                    f"{name}: nothing fits, the smallest plan found needs {format_bytes(solver.needed(solver.least()))}"
                )
                continue
            found = Found(way, number, solver, solution)
            faster = own is None or found.seconds * WORTH_MORE < own.seconds
            if best is None or found.seconds * WORTH_MORE < best.seconds:
                if best is not None:
                    turned_down.append(best.slower())
                best = found
            else:
                turned_down.append(found.slower())
            no_faster = 0 if faster else no_faster + 1
            if no_faster == 2:
                break
            own = found if faster else own
            if found.worth_no_more():
                break  # what more parts could still save is not worth them
        return best

    def _least_seconds(self, way: Choices, budget: int) -> float:
        """Seconds that a step run this way takes at least, from the ways already captured whose techniques it takes over and adds to.

        With the bytes that the added techniques save at most, the rest of the step is no easier than the older way is with that much more budget.
        """
        least = 0.0
        for other in {replace(choices, micro_batches=1) for choices in self._solvers} - {way}:
            if not _adds_to(other, way):
                continue
            added = [self._bound(*technique) for technique in _added(way, other)]
            saved = [each.saved_bytes for each in added]
            bounds = [
                solver.trace.plain_step_seconds
                + sum(each.seconds for each in added)
                + (
                    0.0
                    if None in saved
                    else solver.trace.micro_batches * solver.bound(budget + sum(s or 0 for s in saved))
                )
                for choices, solver in self._solvers.items()
                if replace(choices, micro_batches=1) == other
            ]
            least = max(least, min(bounds))
        return least

    def _bound(self, name: str, value: object) -> OptimisticBound:
        """What this technique can do at best; as it did alone, where it was captured alone."""
        bound = optimistic_bound(self._plain(), name, self.lower_tier, self.layers)
        alone = self.ways[0].but(**{name: value}, micro_batches=self.fixed_micro_batches or 1)
        if bound is not None and name != "streamed" and alone in self._solvers:
            seconds = self._solvers[alone].trace.plain_step_seconds - self._plain().trace.plain_step_seconds
            return replace(bound, seconds=seconds)
        return bound if bound is not None else OptimisticBound(None, -inf)

    def smallest(self) -> tuple[int, Found]:
        """Bytes and plan of the smallest plan found."""
        found: list[tuple[int, Found]] = []
        for way in self.ways:
            own: list[int] = []
            for number in self.numbers():
                if number > 1 and self.weights()[0] is None:
                    break
                try:
                    solver = self.solver(number, way)
                except CANNOT_RUN:
                    if way == self.ways[0]:
                        raise
                    break
                smallest = solver.least()
                own.append(self.budget_for(solver, smallest))
                found.append((own[-1], Found(way, number, solver, smallest)))
                if len(own) > 1 and own[-1] >= own[-2]:
                    break
        return min(found, key=lambda f: f[0])

    def budget_for(self, solver: Solver, solution: Solution) -> int:
        """The smallest budget in which a plan is let through."""
        # Plain is let through at its own peak: what the slack is for, plain PyTorch needs as well. A streamed step is not that of plain PyTorch.
        slack = SLACK_BYTES if solution.reruns or solver.trace.choices.streamed else 0
        return solver.needed(solution) + self.extra_bytes + slack

    def plain_peak(self) -> int:
        """Budget in which the step runs as PyTorch runs it, whole batch at once."""
        solver = self._plain()
        return self.budget_for(solver, solver.plain) + SLACK_BYTES

    def _infeasible(self, budget: int, turned_down: Sequence[str]) -> InfeasibleError:
        size, found = self.smallest()
        trace, solution = found.solver.trace, found.solution
        phase, module, operation = where(trace, solution.evaluation.peak_event)
        plain = self._plain().trace.plain_step_seconds
        how = _named(found.way, found.number) if found.number > 1 or found.way != self.ways[0] else ""
        remedies = [
            Remedy(f'budget="{_budget_of(size)}"' + (f" ({how})" if how else ""), size - budget, found.seconds - plain)
        ]
        if self.fixed_micro_batches == 1 and self.samples > 1:
            smaller, free = replace(self, fixed_micro_batches=None).smallest()
            if smaller < size:
                remedies.append(
                    Remedy(f'fixed={{"micro_batches": {free.number}}}', size - smaller, free.seconds - plain)
                )
        state = sum(s.bytes for s in trace.storages if s.category == "optimizer_state")
        if state:
            remedies.append(Remedy("an optimizer without state (torch.optim.SGD without momentum)", state, 0.0))
        batch_part = solution.evaluation.peak_bytes - trace.bytes_before_step
        if self.samples > 1 and batch_part > 0:
            remedies.append(
                Remedy(f"a batch of {self.samples // 2} instead of {self.samples} samples", batch_part // 2, -plain / 2)
            )
        remedies = sorted(remedies, key=lambda r: r.extra_seconds)[:3] if len(remedies) > 3 else remedies
        ways = "; ".join(
            f"{r.text} ({format_bytes(abs(r.saved_bytes))} {'more' if r.text.startswith('budget') else 'less'}, "
            f"{'+' if r.extra_seconds >= 0 else '-'}{format_seconds(abs(r.extra_seconds))} a step)"
            for r in remedies
        )
        message = (
            f"{format_bytes(budget)} is too little: the smallest plan found needs {format_bytes(size)} ({size} bytes), set in {phase} by "
            f"{module or 'an operation outside any module'} ({operation}). Ways out: {ways}"
        )
        if turned_down:
            message += ". Weighed: " + "; ".join(turned_down)
        return InfeasibleError(
            message,
            budget_bytes=budget,
            minimum_bytes=size,
            moment=f"{phase}: {operation}",
            module=module,
            remedies=tuple(remedies),
        )

    @uncollected()
    def describe(self, budget_bytes: int, found: Found, turned_down: Sequence[str] = ()) -> Plan:
        """What was found as a Plan, with everything a person may ask about it."""
        solver, solution = found.solver, found.solution
        trace, recipes = solver.trace, solver.recipes
        timeline, evaluation = solver.worst(solution)
        plain = self._plain()
        plainly = plain.worst(plain.plain)[1]
        nothing_dropped = solver.worst(solver.plain)[1].levels
        phase, module, operation = where(trace, evaluation.peak_event)
        bands = timeline.by_category(solution.reruns)
        moments = _moments(trace, evaluation.peak_event)
        bound = solver.bound(budget_bytes - self.extra_bytes - SLACK_BYTES, solution) if solution.reruns else 0.0
        kept: dict[str, int] = defaultdict(int)
        dropped: dict[str, int] = defaultdict(int)
        again: dict[str, float] = defaultdict(float)
        below: dict[str, int] = defaultdict(int)
        copying = evaluation.copying
        rebuilt = {m for runs in solution.reruns.values() for r in runs for m in recipes.recipes[r].makes}
        for s in recipes.saved:
            fate = below if s in copying.swapped else dropped if s in rebuilt and s in solution.dropped else kept
            fate[trace.storages[s].module] += trace.storages[s].bytes
        for runs in solution.reruns.values():
            for r in runs:
                for op in recipes.recipes[r].operations:
                    again[trace.operations[op].module] += trace.operations[op].seconds
        prediction = Prediction(
            peak_bytes=evaluation.peak_bytes + self.extra_bytes,
            plain_peak_bytes=plainly.peak_bytes + self.extra_bytes,
            step_seconds=found.seconds,
            plain_step_seconds=plain.trace.plain_step_seconds,
            bound_seconds=trace.plain_step_seconds + trace.micro_batches * bound,
            seconds_are=trace.seconds_are,
            peak_phase=phase,
            peak_module=module,
            peak_operation=operation,
            categories_at_peak={
                str(c): int(b[evaluation.peak_event]) for c, b in bands.items() if int(b[evaluation.peak_event])
            },
            moments=tuple(moments),
            phases=tuple(where(trace, m)[0] for m in moments),
            curve={str(c): tuple(int(b[m]) for m in moments) for c, b in bands.items() if b.any()},
            plain_curve=tuple(int(nothing_dropped[m]) for m in moments),
            copy_seconds=trace.transfer_seconds + trace.micro_batches * copying.copy_seconds,
            exposed_seconds=trace.waited_seconds + trace.micro_batches * copying.exposed_seconds,
            varies_bytes=solver.draws.varies(solution.reruns),
            tiers=tuple(
                TierUse(
                    link.tier,
                    sum(trace.storages[s].bytes for s in link.swapped),
                    trace.micro_batches * link.copy_seconds,
                    trace.micro_batches * link.exposed_seconds,
                )
                for link in copying.links
            ),
        )
        names = sorted({*kept, *dropped, *below, *again})
        return Plan(
            budget_bytes=budget_bytes,
            choices=replace(trace.choices, weights=self.weights()[0] or "whole") if found.number > 1 else trace.choices,
            script=compile_script(recipes, solution.reruns),
            prediction=prediction,
            signature=trace.signature,
            model=trace.model,
            device=trace.device,
            torch_version=trace.torch_version,
            clip_norm=trace.clip_norm,
            by_module=tuple(ModuleSaving(n, kept[n], dropped[n], again[n], below[n]) for n in names),
            turned_down=tuple(turned_down),
            notes=(*trace.notes, *_drawn(prediction, len(trace.drawn_bytes) + 1)),
            source=trace.source,
            changed_buffers=trace.changed_buffers,
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that fits, not yet put into words."""

    way: Choices
    number: int
    solver: Solver
    solution: Solution

    @property
    def seconds(self) -> float:
        """Of a whole step."""
        return self.solver.trace.plain_step_seconds + self.solver.trace.micro_batches * self.solution.seconds

    def worth_no_more(self) -> bool:
        """Whether what this plan does about bytes takes so little that saving all of it gains nothing worth a change."""
        return self.solver.trace.micro_batches * self.solution.seconds <= (WORTH_MORE - 1) * self.seconds

    def slower(self) -> str:
        """Why it is not taken."""
        return f"{_named(self.way, self.number)}: {format_seconds(self.seconds)} a step at {format_bytes(self.solution.peak)}"


def _adds_to(known: Choices, way: Choices) -> bool:
    """Whether a way takes over every technique of a known one."""
    own = way.used
    return all(own.get(name) == value for name, value in known.techniques)


def _added(way: Choices, known: Choices) -> list[tuple[str, object]]:
    """Techniques that a way has and a known one has not."""
    return sorted(set(way.techniques) - set(known.techniques), key=str)


def _drawn(prediction: Prediction, draws: int) -> tuple[str, ...]:
    """What the user should know of sizes that random numbers decide."""
    if draws == 1:
        return ()
    largest, varies = prediction.peak_bytes, prediction.varies_bytes
    kept = f"; {format_bytes(varies)} more are kept free for draws not seen" if varies else ""
    note = (
        f"random numbers, drawn anew in each step, decide how large some results are: over {draws} draws the peak of this plan lay between "
        f"{format_bytes(largest - varies)} and {format_bytes(largest)}{kept}. Single steps may hold more, and training may change what is usual"
    )
    return (note,)


def _named(way: Choices, number: int) -> str:
    words = in_words(way)
    return f"{words}, {_parts(number)}" if words else _parts(number)


def _parts(number: int) -> str:
    return f"{number} micro-batch{'es' if number > 1 else ''}"


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


def _budget_of(size: int) -> str:
    """A budget that is at least `size` bytes, as a person would write it where that wastes little."""
    mib = -(-size // (1 << 20))
    return f"{mib}MiB" if mib >= 64 else f"{size}B"
