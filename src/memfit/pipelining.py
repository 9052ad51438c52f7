"""A model, a batch and the bytes of several devices -> a pipeline: where to cut, what each stage recomputes, what each rank will hold, what a step will take.

The parts are found in a trace of one micro-batch and cut for what they take by themselves; the stages of that cut are captured as they will run, each alone and
in this process, fed with what it would receive, and planned; then it is cut again with what was learnt, until nothing changes. No process is started for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture.capture import capture
from memfit.capture.cost_table import CostTable
from memfit.capture.costs import with_costs
from memfit.capture.part_calls import find_part_calls
from memfit.capture.present_machine import present_machine
from memfit.capture.source import StepSource
from memfit.capture.trace_source import RNG_STATE_BYTES, engine_seconds, host_time_of
from memfit.engine.compiled import CompiledScript
from memfit.engine.follower import Follower
from memfit.errors import InfeasibleError, InputError
from memfit.parallel.pipeline import Pipeline, StageEnds, equal_micro_batches
from memfit.parallel.stage_module import StageModule, without_other_stages
from memfit.planner.cutting import cut as cut_parts
from memfit.planner.model_parts import Boundary, chain, part_calls
from memfit.planner.schedules import rank_orders
from memfit.planner.script_compiler import compile_script
from memfit.planner.solution import Solution
from memfit.planner.solver import Solver
from memfit.planner.stage_bytes import StageLevels, menu, rank_peak_bytes, seconds_of, stage_levels
from memfit.planner.timeline import Recomputations, Timeline
from memfit.step.device import device_of
from memfit.step.part_calls import PartCalls
from memfit.step.program import OptimizerFactory, default_optimizer
from memfit.techniques.choices import BASELINE
from memfit.units import format_bytes
from memfit.values.prediction import RankPrediction
from memfit.values.script import Script
from memfit.values.stages import Cut, Line, Parts, Recompute, Schedule, StageCost
from memfit.values.trace import Trace

ROUNDS: Final = 20  # of cutting again with what the captured stages have shown
LEVELS: Final = 3  # how far out blocks within blocks are looked at


@dataclass(frozen=True, slots=True, eq=False)
class PipelinePlan:
    """How to train a model as a pipeline.

    Attributes:
        cut: the stages, and what a step of them takes.
        parts: names of the parts.
        calls: what crosses between them.
        scripts: of each stage, what its forwards drop and recompute.
        ranks: predicted, of each device in the order of the pipeline.
        weights: what micro-batches count for.
        clip_norm: as asked.
    """

    cut: Cut
    parts: tuple[str, ...]
    calls: PartCalls
    scripts: tuple[Script, ...]
    ranks: tuple[RankPrediction, ...]
    weights: str
    clip_norm: float | None

    @property
    def ends(self) -> StageEnds:
        """Where it is cut."""
        return StageEnds(tuple(stage.end for stage in self.cut.stages), self.cut.schedule, self.cut.micro_batches)


@dataclass(eq=False)
class _StagePlanner:
    """Captures and plans stages of one model, each stretch of parts once."""

    model: nn.Module
    batch: Batch
    loss_fn: LossFunction | None
    optimizer: OptimizerFactory | None
    clip_norm: float | None
    micro_batches: int
    weights: str
    calls: PartCalls

    def __post_init__(self) -> None:
        self._table = CostTable(device_of(self.model))
        self._solvers: dict[tuple[int, int], Solver] = {}
        self._menus: dict[tuple[int, int], list[tuple[Recompute, Solution]]] = {}
        self.fixed_bytes = batches.signature_bytes(batches.signature(self.batch))

    def solver(self, first: int, end: int) -> Solver:
        """For the step of this stretch as one stage."""
        if (first, end) not in self._solvers:
            self._solvers[first, end] = Solver(Timeline(self._trace(first, end)))
            self._menus[first, end] = menu(self._solvers[first, end])
        return self._solvers[first, end]

    def levels(self, first: int, end: int, recomputations: Recomputations) -> StageLevels:
        """What the stage holds under a plan."""
        last = end == len(self.calls.calls)
        return stage_levels(
            self.solver(first, end).timeline,
            recomputations,
            self.received_gradient_bytes(first),
            0 if last else self.calls.crossing_bytes(end),
            self.buffers_bytes(first, end),
        )

    def cost(self, first: int, end: int, schedule: Schedule) -> StageCost:
        """What the stage takes, for the cut: nowhere less than `rank_peak_bytes` says of it."""
        forward, backward, update = seconds_of(self.solver(first, end).trace)
        ways = []
        for way, solution in self._menus[first, end]:
            levels = self.levels(first, end, solution.recomputations)
            sent = levels.received_gradient_bytes
            held = sent + levels.sent_bytes
            sending = (
                held if schedule is not Schedule.GPIPE else (self.micro_batches - 1) * max(0, sent - way.kept_bytes)
            )
            highest = max(way.pass_bytes + sending, levels.update_bytes)
            ways.append(replace(way, pass_bytes=highest))
        plain = self.levels(first, end, {})
        return StageCost(forward, backward, plain.base_bytes + plain.gradient_bytes, tuple(ways), update)

    def solution(self, first: int, end: int, way: Recompute) -> Solution:
        """The plan of a way to hold activations."""
        return next(
            solution
            for known, solution in self._menus[first, end]
            if (known.kept_bytes, known.extra_seconds) == (way.kept_bytes, way.extra_seconds)
        )

    def _trace(self, first: int, end: int) -> Trace:
        with without_other_stages(self.model, self.calls, [(first, end)]):
            stage = StageModule(self.model, self.loss_fn, self.calls, first, end)
            size = batches.size(self.batch) // self.micro_batches
            sample = {
                "batch": self.batch,
                "received": tuple(_buffers(meta, size, self.micro_batches) for meta in stage.received),
                "gradients": tuple(_buffers(m, size, self.micro_batches) for m in stage.sent if m.requires_grad),
            }
            choices = replace(BASELINE, micro_batches=self.micro_batches)
            source = StepSource(stage, sample, _stage_loss, self.optimizer, self.clip_norm)
            return priced(capture(source, choices), self._table, device_of(self.model))

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


def priced(captured: Any, table: CostTable, device: torch.device) -> Trace:
    """A captured step with seconds and workspaces, measured here."""
    machine = present_machine(device)
    trace = with_costs(
        captured,
        table.measure(captured.calls, None),
        seconds_are="measured",
        device=machine.name,
        allocation_bytes=machine.allocation_bytes,
        host=host_time_of(table),
    )
    followed, recomputed = engine_seconds(table)
    return replace(
        trace,
        rng_state_bytes=RNG_STATE_BYTES.get(device.type, 0),
        dispatch_seconds=followed,
        recomputed_seconds=recomputed,
        torch_version=torch.__version__,
        # What follows the forwards of a stage does not have its modules, so whole calls of them are not made again.
        calls=tuple(replace(call, repeatable=False) for call in trace.calls),
    )


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


def plan_pipeline(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    line: Line,
    micro_batches: int,
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    schedule: Schedule | str = Schedule.ONE_FORWARD_ONE_BACKWARD,
    stages: int | None = None,
    per_device: int = 1,
    any_order: bool = False,
    weights: str = "samples",
    clip_norm: float | None = None,
) -> PipelinePlan:
    """Plan a pipeline: the fastest cut found in which every device holds no more than its bytes. Nothing is trained, no process started.

    Args:
        model, loss_fn, optimizer, clip_norm: as for `memfit.plan`.
        sample: the whole batch of a step.
        line: the devices and their links; their speeds are relative to this one's, on which operations are timed.
        micro_batches: into which the batch is divided; they are of one size.
        schedule, stages, per_device, any_order: as for `memfit.planner.cutting.cut`.
        weights: what micro-batches count for in the loss, in the words of `memfit.batches.weightings`: "samples", "tokens:labels".

    Raises:
        InfeasibleError: no cut fits.
        InputError: the model, the batch or the schedule is not one for a pipeline.
        CaptureError: the forward cannot be looked at without values.
    """
    schedule = Schedule(schedule)
    parts_of_batch, _ = equal_micro_batches(sample, micro_batches, weights)
    table = CostTable(device_of(model))
    captured = capture(StepSource(model, parts_of_batch[0], loss_fn, optimizer))
    calls, parts = chain_of(model, parts_of_batch[0], loss_fn, priced(captured, table, device_of(model)))
    planner = _StagePlanner(model, sample, loss_fn, optimizer, clip_norm, micro_batches, weights, calls)
    known: dict[tuple[int, int], StageCost] = {}
    exact = replace(parts, fixed_bytes=planner.fixed_bytes, known=known, recompute=True)
    for _ in range(ROUNDS):
        found = cut_parts(
            exact,
            line,
            micro_batches,
            schedule,
            stages=stages,
            per_device=per_device,
            any_order=any_order,
        )
        new = [(s.first, s.end) for s in found.stages if (s.first, s.end) not in known]
        for stretch in new:
            known[stretch] = planner.cost(*stretch, schedule)
        if not new:
            break
    return _planned(planner, found, line, tuple(part.name for part in parts.parts))


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


def _planned(planner: _StagePlanner, found: Cut, line: Line, names: tuple[str, ...]) -> PipelinePlan:
    """The cut with the script of each stage, and what each rank will hold."""
    devices = found.devices
    orders = rank_orders(found.schedule, len(devices), found.micro_batches, len(found.stages) // len(devices))
    levels, scripts = {}, []
    for number, stage in enumerate(found.stages):
        solver = planner.solver(stage.first, stage.end)
        solution = planner.solution(stage.first, stage.end, stage.recompute)
        levels[number] = planner.levels(stage.first, stage.end, solution.recomputations)
        whole = next(call for call in solver.trace.calls if not call.module)
        scripts.append(compile_script(solver.recipes, solution.recomputations, whole))
    peaks = [
        rank_peak_bytes(
            orders[rank],
            found.schedule,
            {s: levels[s] for s in range(rank, len(found.stages), len(devices))},
            planner.fixed_bytes,
        )
        for rank in range(len(devices))
    ]
    for device, peak in zip(devices, peaks, strict=True):
        if peak > line.devices[device].bytes:
            raise InfeasibleError(
                f"the best cut found needs {format_bytes(peak)} on device {device}, which has {format_bytes(line.devices[device].bytes)}: "
                "give it more, or take more micro-batches",
                budget_bytes=line.devices[device].bytes,
                minimum_bytes=peak,
            )
    ranks = tuple(RankPrediction(r, peak, found.step_seconds, r) for r, peak in enumerate(peaks))
    return PipelinePlan(found, names, planner.calls, tuple(scripts), ranks, planner.weights, planner.clip_norm)


def start(
    plan: PipelinePlan,
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None = default_optimizer,
    **of_pipeline: Any,
) -> Pipeline:
    """This rank's stages, ready to train; in a process of a group that has as many as the plan has devices.

    Args:
        plan: of this model, the same on every rank.
        model, loss_fn, optimizer: as for `plan_pipeline`.
        of_pipeline: group, device: as for `Pipeline`.
    """
    rank, world = dist.get_rank(of_pipeline.get("group")), dist.get_world_size(of_pipeline.get("group"))
    around = [_follow(CompiledScript(script)) for script in plan.scripts[rank::world]]
    return Pipeline(
        model,
        loss_fn,
        plan.calls,
        plan.ends,
        optimizer,
        clip_norm=plan.clip_norm,
        weights=plan.weights,
        around=around,
        **of_pipeline,
    )


def _follow(compiled: CompiledScript) -> Callable[[], AbstractContextManager[object]]:
    """What the forwards of a stage run in."""
    return nullcontext if compiled.script.plain else lambda: Follower(compiled).following()
