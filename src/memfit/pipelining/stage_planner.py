"""One model for pipelines of one batch: its chain of parts, and every stretch of them as a stage, captured and planned once, whatever cuts ask for it.

Each stage is captured alone, in this process, fed with what it would receive.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memfit import batches
from memfit.batches import Batch
from memfit.capture.capture import capture
from memfit.capture.comparing import path_taken
from memfit.capture.part_calls import find_part_calls
from memfit.capture.source import StepSource
from memfit.capture.trace_source import TraceSource
from memfit.capture.values_read import other_samples, rows_alone
from memfit.errors import InputError
from memfit.parallel.other_stages import without_other_stages
from memfit.parallel.pipeline import equal_micro_batches
from memfit.parallel.schedule import MESSAGES_ARE_RELEASED
from memfit.parallel.stage_module import StageModule
from memfit.pipelining.alike_stretches import AlikeStretches, Stretch
from memfit.pipelining.batch_reads import with_real_reads
from memfit.pipelining.stage_paths import NOTHING, Menu, OnPaths, StagePaths, StagePlan, menu_of_paths, most, on_paths
from memfit.pipelining.undivided import Undivided, around_forwards
from memfit.planner.solver import Solver
from memfit.planner.stage_bytes import StageLevels, adding_rate, menu, seconds_of, stage_levels
from memfit.planner.timeline import Recomputations, Timeline
from memfit.sharding.state_sharding import dealt_out, only_with, something
from memfit.step.absent import only
from memfit.step.part_calls import TensorMeta
from memfit.step.program import OptimizerFactory
from memfit.techniques.choices import BASELINE, Choices
from memfit.values.script import Script
from memfit.values.stages import Cut, Parts, Recompute, Schedule, Shared, StageCost
from memfit.values.trace import Trace


@dataclass(eq=False)
class StagePlanner:
    """Captures and plans stages of one model, each stretch of parts once.

    Args:
        source: of the model, its loss and its optimizer; its sample is the part of one rank.
        batch: of a pipeline.
        micro_batches: into which that is divided; they are of one size.
        techniques: that the stages have, and what is frozen.
        weights: what micro-batches count for, in the words of `batches.weightings`.
        replicas: pipelines whose ranks with the same stage share out its optimizer's state; 1 where each has all of it.
        known: a micro-batch of the undivided model that was looked at, taken as it is where it has as many samples as this step's; None where none was.

    Attributes:
        undivided: of this step.
        calls: of its parts.
        parts: what they take by themselves.
        kinds: batches like that of the pipeline, each of micro-batches on which forward runs other operations (there is padding, say).
        one_answer: what the user should know of something that forward asks of the batch where all of it gives one answer; "" where it does not.

    Raises:
        BatchError: the batch does not divide into so many micro-batches.
        InputError: the model is not one for a pipeline.
        CaptureError: the forward cannot be looked at without values.
    """

    source: TraceSource
    batch: Batch
    micro_batches: int
    techniques: Choices = BASELINE
    weights: str = "samples"
    replicas: int = 1
    known: Undivided | None = None

    def __post_init__(self) -> None:
        self._paths: dict[tuple[int, int, tuple[int, ...]], StagePaths] = {}
        self._solvers: dict[Stretch, tuple[Solver, ...]] = {}
        self._shares: dict[tuple[Stretch, ...], list[dict[Stretch, tuple[str, ...]]]] = {}
        self._gradient_bytes: list[int] = []  # of each part
        self._names: dict[Stretch, tuple[str, ...]] = {}
        self._sizes = {name: p.numel() for name, p in self.source.model.named_parameters()}
        self._menus: dict[tuple[int, int, bool], Menu] = {}
        # The part that is handed in is there beside what the ranks have brought together, of which each has what its stages read.
        self._divided_bytes = _divided_bytes(self.batch)
        self.own_part_bytes = sum(_divided_bytes(self.source.sample).values())
        source, model = self.source, self.source.model
        one = equal_micro_batches(self.batch, self.micro_batches)[-1]  # as `other_samples` has it
        known = self.known
        if known is None or known.samples != batches.size(one):
            known = Undivided.of(source, one, self.techniques, known)
        self.undivided = known
        self.calls, self.one_answer = known.calls, ""
        self.kinds = self._other_kinds(replace(known.step, sample=one))
        self._alike = AlikeStretches(self.whole, known.ends, self.calls, model, batches.counted_leaf(self.weights))
        self._first_alike: dict[Hashable, Stretch] = {}
        self._stand_ins: dict[Stretch, Stretch] = {}
        undivided = sum(leaf.nbytes for leaf in batches.leaves(self.batch)) - sum(self._divided_bytes.values())
        read = (Shared(f"batch {place}", size, self._readers(place)) for place, size in self._divided_bytes.items())
        self.parts = replace(
            known.parts,
            shared=(*known.parts.shared, *read),
            fixed_bytes=undivided + self.own_part_bytes,
            recompute=True,
        )

    @property
    def whole(self) -> Trace:
        """The undivided model's, for one micro-batch."""
        return self.undivided.trace

    @property
    def unconfirmed(self) -> str:
        """As in `Undivided`; where forwards differ, stages run nothing again."""
        return self.undivided.unconfirmed

    def _like_it(self, samples: int) -> list[Batch]:
        """Batches of the pipeline's size, of what is known to come."""
        total = batches.size(self.batch)
        others = () if self.source.other_samples is None else self.source.other_samples(samples)
        as_large = (batches.rows(other, [row % batches.size(other) for row in range(total)]) for other in others)
        return [*rows_alone(self.batch), *as_large]

    def _other_kinds(self, step: StepSource) -> tuple[Batch, ...]:
        """Of what the rows of the batch show. No rank learns a path while it trains, so each row is taken for what a whole batch may be like.

        Raises:
            InputError: on some, forward calls other parts, or parts give other things.
        """
        captured, around = self.undivided.captured, around_forwards(step.model, self.techniques)
        of_all = replace(step, sample=self.batch, other_samples=self._like_it)
        techniques = self.techniques.but(micro_batches=self.micro_batches, frozen=())
        kinds = []
        for sample in other_samples(of_all, techniques, captured)[0]:
            one = equal_micro_batches(sample, self.micro_batches)[-1]
            like_it = replace(step, sample=one, views_anew=captured.views_anew)
            trace = capture(like_it, self.techniques.but(frozen=())).trace
            if path_taken(trace) == path_taken(captured.trace):
                continue
            paths = [call.path for call in self.calls.calls]
            calls = find_part_calls(step.model, one, step.loss_fn, paths, around)
            if not calls.hands_on_as(self.calls):
                raise InputError(
                    "values of the batch (whether there is padding, say) decide which parts the forward calls or what they give, so the model cannot be cut "
                    "into stages: make it take one path (pad every batch to one length longer than any text)"
                )
            self.calls = self.calls.reading_also(with_real_reads(calls, step.model, one, step.loss_fn, around))
            kinds.append(sample)
        if not kinds:
            self.one_answer = other_samples(replace(of_all, other_samples=None), techniques, captured)[1]
        return tuple(kinds)

    def parts_now(self) -> Parts:
        """The parts, with what adding to gradients takes by the stages captured so far: the undivided step, of one micro-batch, makes them anew."""
        rates = [rate for solver, *_ in self._solvers.values() if (rate := adding_rate(solver.timeline)) is not None]
        if not rates:
            return self.parts
        if not self._gradient_bytes:
            sizes = {n: p.nbytes for n, p in self.source.model.named_parameters() if p.requires_grad}
            number = len(self.parts.parts)
            self._gradient_bytes = [sum(sizes.get(n, 0) for n in self._used(i, i + 1)) for i in range(number)]
        adding = [min(rates) * size for size in self._gradient_bytes]
        parts = zip(self.parts.parts, adding, strict=True)
        return replace(
            self.parts, parts=tuple(replace(one, backward_seconds=one.backward_seconds + more) for one, more in parts)
        )

    def _read(self, first: int, end: int) -> frozenset[int]:
        """Places of the tensors of the batch that the rank of a stage is sent."""
        return self.calls.leaves_read(first, end, batches.counted_leaf(self.weights))

    def _given(self, first: int, end: int) -> set[int]:
        """Places of all leaves that it has: those that it is sent, and those that every rank hands in as they are."""
        leaves, _ = batches.flattened(self.batch)
        return {*self._read(first, end), *(set(range(len(leaves))) - self._divided_bytes.keys())}

    def _readers(self, place: int) -> tuple[int, ...]:
        """The parts that read a tensor of the batch."""
        return tuple(part for part in range(len(self.calls.calls)) if place in self._read(part, part + 1))

    def is_captured(self, first: int, end: int) -> bool:
        """Whether this stretch itself was, as a stage."""
        return (first, end) in self._solvers

    def solver(self, first: int, end: int) -> Solver:
        """For the step of this stretch as one stage, on the rank with the most state, and on the longest path."""
        return self.solvers(first, end)[0]

    def solvers(self, first: int, end: int) -> tuple[Solver, ...]:
        """The same on each path that has a plan of its own."""
        if (first, end) not in self._solvers:
            paths = self._paths_of(first, end, self._most_of(first, end))
            self._solvers[first, end] = tuple(map(Solver, paths.planned))
        return self._solvers[first, end]

    @property
    def plans_within_calls(self) -> bool:
        """Whether there is a stage in which one plan is for several paths."""
        return any(solver.trace.paths for solver, *_ in self._solvers.values())

    def _most_of(self, first: int, end: int) -> tuple[str, ...]:
        """Parameters of which the rank with the most optimizer's state has it, where this stretch is its stage."""
        shares = [share[first, end] for share in self.shares([(first, end)])]
        return max(shares, key=lambda share: sum(self._sizes[name] for name in share))

    def _paths_of(self, first: int, end: int, share: Sequence[str]) -> StagePaths:
        """The step of this stretch as one stage.

        Args:
            first, end: its parts.
            share: parameters of which its rank has the optimizer's state; shares of the same sizes have the same timelines.
        """
        key = first, end, tuple(self._sizes[name] for name in share)
        if key not in self._paths:
            self._paths[key] = StagePaths.of(
                [self._trace(first, end, frozenset(share), batch) for batch in (self.batch, *self.kinds)]
            )
        return self._paths[key]

    def script(self, first: int, end: int, plans: OnPaths) -> Script:
        """What a rank follows in forwards of this stage."""
        return self._paths_of(first, end, self._most_of(first, end)).script(plans, self.solver(first, end).draws)

    def shares(self, stretches: Sequence[Stretch]) -> list[dict[Stretch, tuple[str, ...]]]:
        """Which parameters' state a rank with these stages has, by stage, in each of the pipelines: those of all its stages are dealt out together."""
        key = tuple(stretches)
        if key not in self._shares:  # asked again in a rank, whose model has the parameters of its own stages alone
            self._shares[key] = self._dealt(stretches)
        return self._shares[key]

    def _dealt(self, stretches: Sequence[Stretch]) -> list[dict[Stretch, tuple[str, ...]]]:
        model = self.source.model
        used = {stretch: frozenset(self._used(*stretch)) for stretch in stretches}
        own = {
            n: p for n, p in model.named_parameters() if p.requires_grad and any(n in some for some in used.values())
        }
        if self.replicas == 1 or self.source.optimizer is None or not own:
            dealt = [[list(own)]] * self.replicas
        else:
            names = {id(p): name for name, p in own.items()}
            made = self.source.optimizer(iter(own.values()))
            groups = [[names[id(p)] for p in group["params"]] for group in made.param_groups]
            positions = dealt_out([[self._sizes[name] for name in group] for group in groups], self.replicas)
            dealt = [
                [[group[each] for each in of_group[replica]] for group, of_group in zip(groups, positions, strict=True)]
                for replica in range(self.replicas)
            ]
        # State of a parameter that several of these stages have is there once: with the last of them.
        of_stage = {name: stretch for stretch, some in used.items() for name in some}
        return [
            {
                stretch: tuple(name for group in of_rank for name in group if of_stage[name] == stretch)
                for stretch in used
            }
            for of_rank in dealt
        ]

    def levels(
        self,
        first: int,
        end: int,
        plans: OnPaths,
        share: Sequence[str] | None = None,
        later: Sequence[Stretch] = (),
    ) -> StageLevels:
        """What the stage holds under a plan; where forward takes several paths, the most on any of them.

        Args:
            first, end, plans: its parts, and what is run again.
            share: parameters of which its rank has the optimizer's state; None for the rank with the most.
            later: stages of the same rank, whose backward is before this one's. Gradients of what they have, too, are counted in them.
        """
        assert not (self.unconfirmed and any(plans)), "what a stage runs is not known well enough"
        paths = self._paths_of(first, end, self._most_of(first, end) if share is None else share)
        on_each = paths.on_each(plans, self.solver(first, end).draws)
        found = []
        for number, (timeline, plan) in enumerate(zip(paths.timelines, on_each, strict=True)):
            made_elsewhere = self._made_by(timeline, paths.receiving[number], (first, end), later)
            levels = self._levels_on_path(timeline, plan, (first, end), made_elsewhere)
            before = paths.until_known(number, plans)
            found.append(replace(levels, forward_bytes=max(levels.forward_bytes, before)))
        return self._receiving(most(found), first, end)

    def _receiving(self, levels: StageLevels, first: int, end: int) -> StageLevels:
        """With what is received, where that is there for one micro-batch alone."""
        if not MESSAGES_ARE_RELEASED:
            return levels
        return levels.receiving(*self._received_bytes(first, end), self.micro_batches)

    def _levels_on_path(
        self, timeline: Timeline, plan: Recomputations, stretch: Stretch, made_elsewhere: frozenset[int]
    ) -> StageLevels:
        first, end = stretch
        last = end == len(self.calls.calls)
        return stage_levels(
            timeline,
            plan,
            self.received_gradient_bytes(first),
            0 if last else self.calls.crossing_bytes(end),
            0 if last else self._made_bytes(first, end),
            self.buffers_bytes(first, end) + self.own_part_bytes + timeline.trace.changed_buffer_bytes,
            made_elsewhere,
        )

    def _made_bytes(self, first: int, end: int) -> int | None:
        """Of what a stage sends, what it has made."""
        if MESSAGES_ARE_RELEASED:
            return None
        return sum(self.calls.meta(each).bytes for each in self.calls.crossing(end) if each.call >= first)

    def _made_by(
        self, timeline: Timeline, receiving: frozenset[str], stretch: Stretch, later: Sequence[Stretch]
    ) -> frozenset[int]:
        """Gradients of a stage's trace that are there before it, by storage, whose parameters these stages have, too."""
        if not later or self.micro_batches == 1:
            return frozenset()
        others = frozenset[str]().union(*(self._used(*each) for each in later))
        trained = [name for name in self._used(*stretch) if name in receiving]
        return frozenset(s for s, name in zip(timeline.gradients.before, trained, strict=True) if name in others)

    def _used(self, first: int, end: int) -> tuple[str, ...]:
        """Names of the parameters of a stretch, in the model's order; they are asked for again for each cut."""
        if (first, end) not in self._names:
            self._names[first, end] = tuple(self.calls.parameters(self.source.model, first, end))
        return self._names[first, end]

    def shared_bytes(self, stretches: Sequence[Stretch]) -> int:
        """Of a rank with several stages, what is there once and counted in each of them: the batch, what is in no part, and tied parameters."""
        if len(stretches) == 1:
            return 0
        model, calls = self.source.model, self.calls
        inside = {id(b) for call in calls.calls for b in model.get_submodule(call.path).buffers()}
        everywhere = sum(b.nbytes for b in model.buffers() if id(b) not in inside) + self.parts.fixed_bytes
        read = [place for stretch in stretches for place in self._read(*stretch)]
        batch = sum((read.count(place) - 1) * size for place, size in self._divided_bytes.items() if place in read)
        there = [calls.read_between.union(self._used(*stretch)) for stretch in stretches]
        again = (max(0, sum(name in names for names in there) - 1) * p.nbytes for name, p in model.named_parameters())
        return (len(stretches) - 1) * everywhere + batch + sum(again)

    def batch_bytes(self, stretches: Sequence[Stretch]) -> int:
        """Of the batch of all ranks, what a rank with these stages is sent, or has copied."""
        read = {place for stretch in stretches for place in self._read(*stretch)}
        return sum(size for place, size in self._divided_bytes.items() if place in read)

    def cost(self, first: int, end: int, found: Cut, has_bytes: int) -> StageCost:
        """What the stage takes, for the cut: nowhere less than `rank_peak` says of it.

        For a stretch that is not captured yet, the first one that is alike stands.

        Args:
            first, end: its parts.
            found: whose schedule it is to run.
            has_bytes: the least that a device has. Where it fits there with everything kept, or in its share of it beside other stages, no other way is
                looked for.
        """
        if not self.is_captured(first, end):
            first, end = self._stand_in(first, end)
        solver = self.solver(first, end)
        forward, backward, update = seconds_of(solver.trace, found.schedule)
        plain = self.levels(first, end, NOTHING)
        state = plain.base_bytes + plain.gradient_bytes
        kept = self._menu(first, end, plain_only=True)
        most = self.micro_batches if found.schedule is Schedule.GPIPE else len(found.stages)
        one = self._with_messages(kept[0][0], plain, found.schedule)
        per_device = len(found.stages) // len(found.devices)
        if (
            not self.unconfirmed
            and state + one.pass_bytes + (most - 1) * max(one.kept_bytes, one.done_bytes) > has_bytes // per_device
        ):
            kept = self._menu(first, end)
        ways = (self._with_messages(way, self.levels(first, end, on_paths(plan)), found.schedule) for way, plan in kept)
        return StageCost(forward, backward, state, tuple(ways), update, plain.update_bytes)

    def _stand_in(self, first: int, end: int) -> Stretch:
        """The first stretch asked for that is alike."""
        if (first, end) not in self._stand_ins:
            described = self._alike.description(first, end)
            self._stand_ins[first, end] = self._first_alike.setdefault(described, (first, end))
        return self._stand_ins[first, end]

    def _menu(self, first: int, end: int, *, plain_only: bool = False) -> Menu:
        key = first, end, plain_only
        if key not in self._menus:
            self._menus[key] = menu_of_paths(
                [
                    menu(solver, partial(self._levels_alone, (first, end), solver), plain_only=plain_only)
                    for solver in self.solvers(first, end)
                ]
            )
        return self._menus[key]

    def _levels_alone(self, stretch: Stretch, solver: Solver, plan: Recomputations) -> StageLevels:
        """On the path that a plan is for, and on those for which it is as well."""
        if solver.trace.paths:
            return self.levels(*stretch, (plan,))
        return self._receiving(stage_levels(solver.timeline, plan), *stretch)

    def _with_messages(self, way: Recompute, levels: StageLevels, schedule: Schedule) -> Recompute:
        gradients, outputs = levels.received_gradient_bytes, levels.made_bytes
        done = (self.micro_batches - 1) * levels.done_bytes
        holds = schedule is not Schedule.ONE_FORWARD_ONE_BACKWARD
        if not MESSAGES_ARE_RELEASED:
            held, done_bytes = (0, gradients + outputs) if holds else (gradients + outputs, 0)
            return replace(way, pass_bytes=way.pass_bytes + held + done, done_bytes=done_bytes)
        if holds:  # with what is in flight, and not with what is done
            done, outputs = done + levels.arriving_bytes, (self.micro_batches - 1) * outputs
        in_backward = outputs + levels.made_bytes if schedule is Schedule.INTERLEAVED else 0
        passes = max(levels.forward_bytes + outputs, levels.backward_bytes + in_backward)
        return replace(
            way, pass_bytes=passes + done + (0 if holds else gradients), done_bytes=gradients if holds else 0
        )

    def way(self, first: int, end: int, plan: StagePlan, schedule: Schedule) -> Recompute:
        """The way to hold activations that a plan of the stage is, as a cut counts it."""
        levels = self.levels(first, end, on_paths(plan))
        seconds = max(solution.seconds for solution in plan)
        return self._with_messages(Recompute(levels.kept_bytes, levels.pass_bytes, seconds), levels, schedule)

    def solution(self, first: int, end: int, way: Recompute) -> StagePlan:
        """The plan of a way to hold activations."""
        return next(
            plan
            for known, plan in self._menu(first, end, plain_only=(first, end, False) not in self._menus)
            if (known.kept_bytes, known.extra_seconds) == (way.kept_bytes, way.extra_seconds)
        )

    def _trace(self, first: int, end: int, share: frozenset[str], batch: Batch) -> tuple[Trace, frozenset[str]]:
        """Of a stage; and the parameters of the model that get gradients in it."""
        source, model = self.source, self.source.model
        with without_other_stages(model, self.calls, [(first, end)]):
            stage = StageModule(model, source.loss_fn, self.calls, first, end)
            size = batches.size(self.batch) // self.micro_batches
            sample = {
                "samples": torch.empty((size * self.micro_batches, 0)),  # tells how many there are; the rest may not
                "batch": only(batch, self._given(first, end)),
                "received": tuple(_buffers(meta, size, self.micro_batches) for meta in stage.received),
                "gradients": tuple(_buffers(m, size, self.micro_batches) for m in stage.sent if m.requires_grad),
            }
            names = frozenset(self.calls.parameters(model, first, end))
            make = None if source.optimizer is None else partial(self._optimizer, source.optimizer, stage, names, share)
            step = StepSource(stage, sample, _stage_loss, make, source.clip_norm, cuda=source.cuda)
            step = replace(step, views_anew=self.undivided.captured.views_anew)
            captured = capture(step, self.techniques.but(micro_batches=self.micro_batches, frozen=()))
            return source.priced(captured), frozenset(name.removeprefix("model.") for name in captured.receiving)

    def _optimizer(
        self,
        make: OptimizerFactory,
        stage: StageModule,
        names: frozenset[str],
        share: frozenset[str],
        _: Iterable[nn.Parameter],
    ) -> torch.optim.Optimizer:
        """As a rank makes it: over the stage's own parameters, or its share of them."""
        own = {n: p for n, p in stage.model.named_parameters() if p.requires_grad and n in names}
        made = make(iter(something(own.values())))
        if not own or share >= own.keys():
            return made
        kept = {id(own[name]) for name in share}
        return only_with(made, [[p for p in group["params"] if id(p) in kept] for group in made.param_groups])

    def buffers_bytes(self, first: int, end: int) -> int:
        """Of messages that are not in the trace, less those that are in it and not there throughout.

        One whose first dimension does not count samples is in it once.
        """
        size = batches.size(self.batch) // self.micro_batches
        crossing = [self.calls.meta(label) for label in self.calls.crossing(first)] if first else []
        if end < len(self.calls.calls):
            crossing += [m for m in map(self.calls.meta, self.calls.crossing(end)) if m.requires_grad]
        missing = (self.micro_batches - 1) * sum(m.bytes for m in crossing if not m.shape or m.shape[0] != size)
        return missing - self.micro_batches * sum(self._received_bytes(first, end)) * MESSAGES_ARE_RELEASED

    def _received_bytes(self, first: int, end: int) -> tuple[int, int]:
        """Of what a stage receives for one micro-batch: activations, and gradients."""
        activations = sum(self.calls.meta(label).bytes for label in self.calls.crossing(first)) if first else 0
        return activations, self.received_gradient_bytes(end) if end < len(self.calls.calls) else 0

    def received_gradient_bytes(self, first: int) -> int:
        """Of what backward of a stage sends for one micro-batch."""
        crossing = (self.calls.meta(label) for label in self.calls.crossing(first)) if first else ()
        return sum(meta.bytes for meta in crossing if meta.requires_grad)


def _divided_bytes(batch: Batch) -> dict[int, int]:
    """Bytes of the tensors of a batch that are divided among ranks, by their places."""
    size = batches.size(batch)
    leaves, _ = batches.flattened(batch)
    return {place: leaf.nbytes for place, leaf in enumerate(leaves) if batches.counts_samples(leaf, size)}


def _buffers(meta: TensorMeta, size: int, number: int) -> Tensor:
    """What stands for the buffers of all micro-batches: one after the other, so that splitting the batch gives one to each.

    What has no samples in front is there once; where it has as many rows as there are samples, a dimension more keeps it from being split.
    """
    shape = meta.shape
    if shape[:1] == (size,):
        shape = (number * size, *shape[1:])
    elif shape[:1] == (number * size,):
        shape = (1, *shape)
    return torch.empty(shape, dtype=meta.dtype, device="meta")


def _message(buffer: Tensor, meta: TensorMeta) -> Tensor:
    """That of one micro-batch, as it is sent."""
    return buffer if buffer.shape == meta.shape else buffer.view(meta.shape)


class _GivenGradients(torch.autograd.Function):
    """The start of a stage's backward: outputs on one side, the gradients received for them on the other."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], sent: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        """A scalar to begin with."""
        ctx.gradients = gradients
        ctx.sent = () if MESSAGES_ARE_RELEASED else sent  # the schedule holds it until then, too
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        """What was received; nothing where no output has a gradient."""
        return (None, None, *(ctx.gradients or (None,)))


def _stage_loss(stage: nn.Module, sample: Any) -> Tensor:
    assert isinstance(stage, StageModule)
    received = [
        _message(tensor.detach(), meta).requires_grad_(meta.requires_grad)
        for tensor, meta in zip(sample["received"], stage.received, strict=True)
    ]
    result = stage(sample["batch"], *received)
    if isinstance(result, Tensor):
        return result
    # Where nothing is trained up to here, something of no bytes, so that there is a backward to write down.
    outputs = [one for one in result if one.requires_grad] or [result[0].new_empty(0).requires_grad_()]
    wanted = [meta for meta in stage.sent if meta.requires_grad]
    gradients = [_message(*each) for each in zip(sample["gradients"], wanted, strict=True)]
    given: Tensor = _GivenGradients.apply(gradients, result, *outputs)  # type: ignore[no-untyped-call]
    return given
