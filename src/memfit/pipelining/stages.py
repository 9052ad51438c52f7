"""Stages of a model, captured and planned: each alone, in this process, fed with what it would receive.

The parts are found in a trace of one micro-batch and cut for what they take by themselves; the stages of that cut are captured as they will run, and planned;
then it is cut again with what was learnt, until nothing changes. No process is started for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture.capture import capture
from memfit.capture.part_calls import find_part_calls
from memfit.capture.source import StepSource
from memfit.capture.trace_source import TraceSource
from memfit.errors import InputError
from memfit.parallel.other_stages import without_other_stages
from memfit.parallel.pipeline import equal_micro_batches
from memfit.parallel.stage_module import StageModule
from memfit.planner.cut_costs import cost_of
from memfit.planner.cutting import cut as cut_parts
from memfit.planner.model_parts import Boundary, chain, part_calls
from memfit.planner.schedules import rank_orders
from memfit.planner.script_compiler import compile_script
from memfit.planner.solution import Solution
from memfit.planner.solver import Solver
from memfit.planner.stage_bytes import NUMBER_BYTES, StageLevels, menu, rank_peak, seconds_of, stage_levels
from memfit.planner.timeline import Recomputations, Timeline
from memfit.step.part_calls import PartCalls
from memfit.techniques.choices import BASELINE
from memfit.values.pipeline import Message, PipelinePlan
from memfit.values.stages import Cut, Line, Parts, Recompute, Schedule, StageCost
from memfit.values.trace import Trace

ROUNDS: Final = 20  # of cutting again with what the captured stages have shown
LEVELS: Final = 3  # how far out blocks within blocks are looked at


@dataclass(frozen=True, slots=True)
class StagesFound:
    """A cut whose stages are planned.

    Attributes:
        pipeline: the stages; of one pipeline.
        peak_bytes: of each rank.
        plain_peak_bytes: likewise, with nothing dropped.
        phases: of each rank, where its peak is.
        gradient_bytes: of each parameter of each rank.
        changed_buffers: that forwards write.
        model: digest of the model.
        plain_seconds: of a step in which nothing is dropped, in this cut.
        seconds_are: as in `Prediction`.
    """

    pipeline: PipelinePlan
    peak_bytes: tuple[int, ...]
    plain_peak_bytes: tuple[int, ...]
    phases: tuple[str, ...]
    gradient_bytes: tuple[tuple[int, ...], ...]
    changed_buffers: tuple[str, ...]
    model: str
    plain_seconds: float
    seconds_are: str


@dataclass(eq=False)
class _StagePlanner:
    """Captures and plans stages of one model, each stretch of parts once.

    Args:
        source: of the model, its loss and its optimizer; its sample is the part of one rank.
        batch: of a pipeline.
        micro_batches: into which that is divided.
        calls: of the model's parts, for one of them.
    """

    source: TraceSource
    batch: Batch
    micro_batches: int
    calls: PartCalls

    def __post_init__(self) -> None:
        self._solvers: dict[tuple[int, int], Solver] = {}
        self._menus: dict[tuple[int, int], list[tuple[Recompute, Solution]]] = {}
        # The part that is handed in is there beside what the ranks have brought together.
        self.own_part_bytes = batches.signature_bytes(batches.signature(self.source.sample))
        self.fixed_bytes = batches.signature_bytes(batches.signature(self.batch)) + self.own_part_bytes

    def solver(self, first: int, end: int) -> Solver:
        """For the step of this stretch as one stage."""
        if (first, end) not in self._solvers:
            self._solvers[first, end] = Solver(Timeline(self._trace(first, end)))
        return self._solvers[first, end]

    def levels(self, first: int, end: int, recomputations: Recomputations) -> StageLevels:
        """What the stage holds under a plan."""
        last = end == len(self.calls.calls)
        return stage_levels(
            self.solver(first, end).timeline,
            recomputations,
            self.received_gradient_bytes(first),
            0 if last else self.calls.crossing_bytes(end),
            self.buffers_bytes(first, end) + self.own_part_bytes + self.solver(first, end).trace.changed_buffer_bytes,
        )

    def cost(self, first: int, end: int, found: Cut, has_bytes: int) -> StageCost:
        """What the stage takes, for the cut: nowhere less than `rank_peak` says of it.

        Args:
            first, end: its parts.
            found: whose schedule it is to run.
            has_bytes: the least that a device has. Where it fits there with everything kept, no other way is looked for.
        """
        solver = self.solver(first, end)
        forward, backward, update = seconds_of(solver.trace)
        plain = self.levels(first, end, {})
        state = plain.base_bytes + plain.gradient_bytes
        kept = menu(solver, plain_only=True)
        most = self.micro_batches if found.schedule is Schedule.GPIPE else len(found.stages)
        one = self._with_messages(kept[0][0], plain, found.schedule)
        if state + one.pass_bytes + (most - 1) * one.kept_bytes > has_bytes:
            kept = menu(solver)
        self._menus[first, end] = kept
        ways = (
            self._with_messages(way, self.levels(first, end, solution.recomputations), found.schedule)
            for way, solution in kept
        )
        return StageCost(forward, backward, state, tuple(ways), update)

    def _with_messages(self, way: Recompute, levels: StageLevels, schedule: Schedule) -> Recompute:
        sent = levels.received_gradient_bytes
        held = sent + levels.sent_bytes
        if schedule is Schedule.GPIPE:  # what one is done with, against what it has kept until then
            held = (self.micro_batches - 1) * max(0, held - way.kept_bytes)
        if not levels.sent_bytes:
            held += self.micro_batches * NUMBER_BYTES
        return replace(way, pass_bytes=max(way.pass_bytes + held, levels.update_bytes))

    def solution(self, first: int, end: int, way: Recompute) -> Solution:
        """The plan of a way to hold activations."""
        return next(
            solution
            for known, solution in self._menus[first, end]
            if (known.kept_bytes, known.extra_seconds) == (way.kept_bytes, way.extra_seconds)
        )

    def _trace(self, first: int, end: int) -> Trace:
        source, model = self.source, self.source.model
        with without_other_stages(model, self.calls, [(first, end)]):
            stage = StageModule(model, source.loss_fn, self.calls, first, end)
            size = batches.size(self.batch) // self.micro_batches
            sample = {
                "batch": self.batch,
                "received": tuple(_buffers(meta, size, self.micro_batches) for meta in stage.received),
                "gradients": tuple(_buffers(m, size, self.micro_batches) for m in stage.sent if m.requires_grad),
            }
            step = StepSource(stage, sample, _stage_loss, source.optimizer, source.clip_norm, cuda=source.cuda)
            captured = capture(step, replace(BASELINE, micro_batches=self.micro_batches))
            return _without_calls(source.priced(captured))

    def buffers_bytes(self, first: int, end: int) -> int:
        """Of messages whose first dimension does not count samples: in the trace they are there once."""
        size = batches.size(self.batch) // self.micro_batches
        crossing = [self.calls.meta(label) for label in self.calls.crossing(first)] if first else []
        if end < len(self.calls.calls):
            crossing += [m for m in map(self.calls.meta, self.calls.crossing(end)) if m.requires_grad]
        return (self.micro_batches - 1) * sum(m.bytes for m in crossing if not m.shape or m.shape[0] != size)

    def received_gradient_bytes(self, first: int) -> int:
        """Of what backward of a stage sends for one micro-batch."""
        crossing = (self.calls.meta(label) for label in self.calls.crossing(first)) if first else ()
        return sum(meta.bytes for meta in crossing if meta.requires_grad)


def _without_calls(trace: Trace) -> Trace:
    """What follows the forwards of a stage does not have its modules, so whole calls of them are not made again."""
    return replace(trace, calls=tuple(replace(call, repeatable=False) for call in trace.calls))


def _buffers(meta: Any, size: int, number: int) -> Tensor:
    """What stands for the buffers of all micro-batches: one after the other, so that splitting the batch gives one to each."""
    many = number if meta.shape and meta.shape[0] == size else 1
    shape = (many * meta.shape[0], *meta.shape[1:]) if meta.shape else ()
    return torch.empty(shape, dtype=meta.dtype, device="meta")


class _GivenGradients(torch.autograd.Function):
    """The start of a stage's backward: outputs on one side, the gradients received for them on the other."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        """A scalar to begin with."""
        ctx.gradients = gradients
        ctx.outputs = outputs  # the schedule holds them until then, too
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        """What was received."""
        return (None, *ctx.gradients)


def _stage_loss(stage: nn.Module, sample: Any) -> Tensor:
    assert isinstance(stage, StageModule)
    received = [
        tensor.detach().requires_grad_(meta.requires_grad)
        for tensor, meta in zip(sample["received"], stage.received, strict=True)
    ]
    result = stage(sample["batch"], *received)
    if isinstance(result, Tensor):
        return result
    given: Tensor = _GivenGradients.apply(sample["gradients"], *(one for one in result if one.requires_grad))  # type: ignore[no-untyped-call]
    return given


def find_stages(
    source: TraceSource, batch: Batch, line: Line, micro_batches: int, schedule: Schedule, stages: int | None = None
) -> StagesFound:
    """The fastest cut found in which every device holds no more than its bytes. Nothing is trained, no process started.

    Args:
        source: of the model, its loss and its optimizer; its sample is the part of one rank.
        batch: of one pipeline.
        line: its devices and their links; their speeds are relative to that for which the source has seconds.
        micro_batches: into which the batch is divided; they are of one size.
        schedule, stages: as for `memfit.planner.cutting.cut`.

    Raises:
        InfeasibleError: no cut fits.
        InputError: the model, the batch or the schedule is not one for a pipeline.
        CaptureError: the forward cannot be looked at without values.
    """
    one = equal_micro_batches(batch, micro_batches)[0]
    captured = capture(StepSource(source.model, one, source.loss_fn, source.optimizer, cuda=source.cuda))
    whole = _without_calls(source.priced(captured))
    calls, parts = chain_of(source.model, one, source.loss_fn, whole)
    planner = _StagePlanner(source, batch, micro_batches, calls)
    known: dict[tuple[int, int], StageCost] = {}
    exact = replace(parts, fixed_bytes=planner.fixed_bytes, known=known, recompute=True)
    for _ in range(ROUNDS):
        found = cut_parts(exact, line, micro_batches, schedule, stages=stages)
        new = [(s.first, s.end) for s in found.stages if (s.first, s.end) not in known]
        for stretch in new:
            known[stretch] = planner.cost(*stretch, found, min(device.bytes for device in line.devices))
        if not new:
            break
    return _described(planner, found, line, exact, whole)


def chain_of(
    model: nn.Module, micro_batch: Batch, loss_fn: LossFunction | None, trace: Trace
) -> tuple[PartCalls, Parts]:
    """The parts of a model, of those ways to see them that leave most boundaries where it may be cut; and the calls of them.

    Args:
        model, micro_batch, loss_fn: the step.
        trace: of it, with seconds.

    Raises:
        InputError: the forward does not call the same parts twice.
    """
    best: tuple[int, PartCalls, Any] | None = None
    for outwards in range(LEVELS):
        found = part_calls(trace, outwards)
        calls = find_part_calls(model, micro_batch, loss_fn, [call.module for call in found])
        allowed = sum(not reason for reason in calls.refused[1:])
        if best is None or allowed > best[0]:
            best = allowed, calls, found
    assert best is not None
    _, calls, found = best
    if len(calls.calls) != len(found):
        raise InputError(
            "the forward calls its parts differently from one time to the next, so the model cannot be cut into stages"
        )
    boundaries = [Boundary(calls.crossing_bytes(b), calls.refused[b]) for b in range(1, len(found))]
    return calls, chain(trace, found, boundaries)


def _described(planner: _StagePlanner, found: Cut, line: Line, parts: Parts, whole: Trace) -> StagesFound:
    """The cut with the script of each stage, and what each rank will hold."""
    orders = rank_orders(found.schedule, len(found.stages), found.micro_batches)
    solvers = [planner.solver(stage.first, stage.end) for stage in found.stages]
    scripts = []
    peaks: list[tuple[int, str]] = []
    plain: list[tuple[int, str]] = []
    for number, (stage, solver) in enumerate(zip(found.stages, solvers, strict=True)):
        solution = planner.solution(stage.first, stage.end, stage.recompute)
        call = next(call for call in solver.trace.calls if not call.module)
        scripts.append(compile_script(solver.recipes, solution.recomputations, call))
        for recomputations, of_all in ((solution.recomputations, peaks), ({}, plain)):
            levels = planner.levels(stage.first, stage.end, recomputations)
            of_all.append(rank_peak(orders[number], found.schedule, {number: levels}))
    calls, model = planner.calls, planner.source.model
    parameters = [calls.parameters(model, stage.first, stage.end) for stage in found.stages]
    pipeline = PipelinePlan(
        found,
        tuple(call.path for call in calls.calls),
        tuple(tuple(named) for named in parameters),
        tuple(sorted(calls.read_between)),
        tuple(_messages(calls, stage.end) for stage in found.stages[:-1]),
        tuple(scripts),
    )
    unhurried = replace(parts, known={k: replace(c, menu=(_fastest(c),)) for k, c in (parts.known or {}).items()})
    ample = replace(line, devices=tuple(replace(device, bytes=1 << 62) for device in line.devices))
    kept = cost_of(unhurried, ample, pipeline.ends, found.micro_batches, found.schedule)
    return StagesFound(
        pipeline,
        tuple(size for size, _ in peaks),
        tuple(size for size, _ in plain),
        tuple(phase for _, phase in peaks),
        tuple(tuple(p.nbytes for p in named.values() if p.requires_grad) for named in parameters),
        tuple(dict.fromkeys(_buffer_of_model(name) for solver in solvers for name in solver.trace.changed_buffers)),
        whole.model,
        kept.step_seconds,
        whole.seconds_are,
    )


def _fastest(cost: StageCost) -> Recompute:
    return min(cost.menu, key=lambda way: way.extra_seconds)


def _buffer_of_model(name: str) -> str:
    """A stage has the model as its part."""
    return name.removeprefix("model.")


def _messages(calls: PartCalls, end: int) -> tuple[Message, ...]:
    """What crosses a boundary."""
    found = ((calls.calls[label.call].path, calls.meta(label)) for label in calls.crossing(end))
    return tuple(
        Message(path, meta.shape, str(meta.dtype).removeprefix("torch."), meta.bytes, meta.requires_grad)
        for path, meta in found
    )
