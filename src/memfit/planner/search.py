"""Traces + budget -> Plan: the few discrete choices around the minimum cuts, what was turned down, and what the user is told.

The number of micro-batches is searched upwards in powers of two. It stops where more cannot help: when the plain time at a number of micro-batches is
already longer than the best plan found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from memfit.errors import InfeasibleError, Remedy
from memfit.garbage import uncollected
from memfit.machine import Link
from memfit.planner.prices import Solution, Solver
from memfit.planner.recipes import Recipes
from memfit.planner.script import compile_script
from memfit.planner.swapping import SwapSolver
from memfit.planner.timeline import Timeline
from memfit.plans import Choices, ModuleSaving, Plan, Prediction
from memfit.trace import Trace
from memfit.units import format_bytes, format_seconds

CURVE_POINTS: Final = 240
# Python numbers that kernels wrap into tensors of 8 bytes, out of sight; measured up to 280 bytes at once.
SLACK_BYTES: Final = 512
WORTH_MORE_MICRO_BATCHES: Final = 1.01  # a single batch is bit-equal to plain: splitting must gain this much


@dataclass(slots=True)
class Search:
    """Plans for one model and batch at any budget.

    Attributes:
        trace_of: the trace with this many micro-batches; called once for each number.
        samples: in the batch.
        weights: how parts add up, asked only when splitting is weighed: (weights or None, reason when None).
        fixed_micro_batches: the user's choice, or None.
        lower_tier: where storages may be swapped to; None for nowhere.
    """

    trace_of: Callable[[int], Trace]
    samples: int
    weights: Callable[[], tuple[str | None, str]]
    fixed_micro_batches: int | None = None
    lower_tier: Link | None = None
    _solvers: dict[int, Solver] = field(default_factory=dict)

    def solver(self, micro_batches: int) -> Solver:
        """The solver for this many micro-batches; the trace is captured on first use."""
        if micro_batches not in self._solvers:
            trace = self.trace_of(micro_batches)
            with uncollected():
                timeline = Timeline(trace, Recipes(trace, self.lower_tier))
                self._solvers[micro_batches] = (SwapSolver if timeline.recipes.reloads else Solver)(timeline)
        return self._solvers[micro_batches]

    @property
    def extra_bytes(self) -> int:
        """What the engine keeps beside the trace: copies of the buffers that forward writes."""
        return self.solver(self.fixed_micro_batches or 1).trace.changed_buffer_bytes

    def _numbers(self) -> list[int]:
        if self.fixed_micro_batches is not None:
            return [self.fixed_micro_batches]
        numbers = [1]
        while numbers[-1] * 2 < self.samples:
            numbers.append(numbers[-1] * 2)
        if self.samples > 1:
            numbers.append(self.samples)
        return numbers

    def plan(self, budget_bytes: int) -> Plan:
        """The fastest plan found.

        Raises:
            InfeasibleError: nothing fits; names the smallest budget that would do.
        """
        room = budget_bytes - self.extra_bytes - SLACK_BYTES
        best: tuple[float, int, Solution] | None = None
        turned_down: list[str] = []
        weights = "whole"
        for number in self._numbers():
            if number > 1:
                how, reason = self.weights()
                if how is None:
                    turned_down.append(f"micro-batches: {reason}")
                    break
                weights = how
            solver = self.solver(number)
            plain = solver.trace.plain_step_seconds
            if best is not None and plain * WORTH_MORE_MICRO_BATCHES >= best[0]:
                turned_down.append(
                    f"{_parts(number)}: {format_seconds(plain)} a step before anything is dropped, the chosen plan takes {format_seconds(best[0])}"
                )
                break
            # Plain is let through at its own peak to the byte: what the slack is for, plain PyTorch needs as well.
            found = solver.plain if solver.plain.peak + self.extra_bytes <= budget_bytes else solver.solve(room)
            if found is None:
                turned_down.append(
                    f"{_parts(number)}: nothing fits, the smallest plan found needs {format_bytes(solver.smallest().peak)}"
                )
                continue
            seconds = plain + solver.trace.micro_batches * found.seconds
            if best is None or seconds * WORTH_MORE_MICRO_BATCHES < best[0]:
                if best is not None:
                    turned_down.append(_slower(best))
                best = (seconds, number, found)
            else:
                turned_down.append(_slower((seconds, number, found)))
                break
            if seconds - plain <= (WORTH_MORE_MICRO_BATCHES - 1) * seconds:
                break  # what more parts could still save is not worth them
        if best is None:
            raise self._infeasible(budget_bytes, turned_down)
        return self.describe(budget_bytes, best[1], best[2], weights if best[1] > 1 else "whole", turned_down)

    def smallest(self) -> tuple[int, int, Solution]:
        """(bytes, micro-batches, plan) of the smallest plan found."""
        found: list[tuple[int, int, Solution]] = []
        for number in self._numbers():
            if number > 1 and self.weights()[0] is None:
                break
            smallest = self.solver(number).smallest()
            slack = SLACK_BYTES if smallest.reruns else 0  # as `plan` lets plain through
            found.append((smallest.peak + self.extra_bytes + slack, number, smallest))
            if len(found) > 1 and found[-1][0] >= found[-2][0]:
                break
        return min(found, key=lambda f: f[0])

    def plain_peak(self) -> int:
        """Budget in which the step runs as PyTorch runs it, whole batch at once."""
        return self.solver(self.fixed_micro_batches or 1).plain.peak + self.extra_bytes + SLACK_BYTES

    def _infeasible(self, budget: int, turned_down: Sequence[str]) -> InfeasibleError:
        size, number, solution = self.smallest()
        solver = self.solver(number)
        phase, module, operation = _where(solver.trace, solution.evaluation.peak_event)
        trace = solver.trace
        seconds = trace.plain_step_seconds + trace.micro_batches * solution.seconds
        plain = self.solver(self.fixed_micro_batches or 1).trace.plain_step_seconds
        remedies = [
            Remedy(
                f'budget="{_budget_of(size)}"' + (f" ({_parts(number)})" if number > 1 else ""),
                size - budget,
                seconds - plain,
            )
        ]
        if self.fixed_micro_batches == 1 and self.samples > 1:
            other = Search(self.trace_of, self.samples, self.weights, lower_tier=self.lower_tier)
            other._solvers = self._solvers
            smaller, parts, free = other.smallest()
            if smaller < size:
                remedies.append(
                    Remedy(
                        f'fixed={{"micro_batches": {parts}}}',
                        size - smaller,
                        other.solver(parts).trace.plain_step_seconds + parts * free.seconds - plain,
                    )
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
    def describe(
        self, budget_bytes: int, number: int, solution: Solution, weights: str, turned_down: Sequence[str] = ()
    ) -> Plan:
        """A solution as a Plan, with everything a person may ask about it."""
        solver = self.solver(number)
        trace, recipes, timeline = solver.trace, solver.recipes, solver.timeline
        plain_trace = self.solver(self.fixed_micro_batches or 1).trace
        evaluation = solution.evaluation
        phase, module, operation = _where(trace, evaluation.peak_event)
        bands = timeline.by_category(solution.reruns)
        moments = _moments(trace, evaluation.peak_event)
        bound = solver.bound(budget_bytes - self.extra_bytes - SLACK_BYTES) if solution.reruns else 0.0
        kept: dict[str, int] = defaultdict(int)
        dropped: dict[str, int] = defaultdict(int)
        again: dict[str, float] = defaultdict(float)
        below: dict[str, int] = defaultdict(int)
        copying = evaluation.copying
        rebuilt = {m for runs in solution.reruns.values() for r in runs for m in recipes.recipes[r].makes}
        for s in recipes.saved:
            where = below if s in copying.swapped else dropped if s in rebuilt and s in solution.dropped else kept
            where[trace.storages[s].module] += trace.storages[s].bytes
        for runs in solution.reruns.values():
            for r in runs:
                for op in recipes.recipes[r].operations:
                    again[trace.operations[op].module] += trace.operations[op].seconds
        prediction = Prediction(
            peak_bytes=evaluation.peak_bytes + self.extra_bytes,
            plain_peak_bytes=self.plain_peak() - SLACK_BYTES,
            step_seconds=trace.plain_step_seconds + trace.micro_batches * solution.seconds,
            plain_step_seconds=plain_trace.plain_step_seconds,
            bound_seconds=trace.plain_step_seconds + trace.micro_batches * bound,
            seconds_are=trace.seconds_are,
            peak_phase=phase,
            peak_module=module,
            peak_operation=operation,
            categories_at_peak={
                str(c): int(b[evaluation.peak_event]) for c, b in bands.items() if int(b[evaluation.peak_event])
            },
            moments=tuple(moments),
            phases=tuple(_where(trace, m)[0] for m in moments),
            curve={str(c): tuple(int(b[m]) for m in moments) for c, b in bands.items() if b.any()},
            plain_curve=tuple(int(solver.plain.evaluation.levels[m]) for m in moments),
            copy_seconds=trace.micro_batches * copying.copy_seconds,
            exposed_seconds=trace.micro_batches * copying.exposed_seconds,
        )
        names = sorted({*kept, *dropped, *below, *again})
        return Plan(
            budget_bytes=budget_bytes,
            choices=Choices(trace.micro_batches, trace.micro_batch_size, weights),
            script=compile_script(recipes, solution.reruns),
            prediction=prediction,
            signature=trace.signature,
            model=trace.model,
            device=trace.device,
            torch_version=trace.torch_version,
            clip_norm=trace.clip_norm,
            by_module=tuple(ModuleSaving(n, kept[n], dropped[n], again[n], below[n]) for n in names),
            turned_down=tuple(turned_down),
            notes=trace.notes,
            source=trace.source,
            changed_buffers=trace.changed_buffers,
        )


def _slower(candidate: tuple[float, int, Solution]) -> str:
    seconds, number, solution = candidate
    return f"{_parts(number)}: {format_seconds(seconds)} a step at {format_bytes(solution.peak)}"


def _parts(number: int) -> str:
    return f"{number} micro-batch{'es' if number > 1 else ''}"


def _where(trace: Trace, event: int) -> tuple[str, str, str]:
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
