"""A pipeline step on several ranks: torch's own schedules over the stages of a model that was cut, and what ranks have to do together beside them.

Built on `torch.distributed.pipelining` (stages built by hand, static shapes): schedules, buffers and messages are its own. What it leaves to its user is here:
a stage is the model's own forward, ranks hand in their own parts of the batch, micro-batches count for their tokens, a parameter of several stages gets the sum
of their gradients, pipelines beside each other sum theirs once a step, the gradient is clipped by the norm over all stages, and a loss that is not finite stops
all ranks before the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.errors import BatchError, InputError, MemfitError
from memfit.parallel.other_stages import OtherStages
from memfit.parallel.schedule import Region, Running, StageEnds
from memfit.parallel.stage_module import StageModule
from memfit.parallel.whole_batch import WholeBatch
from memfit.sharding.agreement import Agreement
from memfit.sharding.pipelined import AroundForward, Passed, PipelinedModel
from memfit.sharding.same_step import check_same_loss
from memfit.sharding.sharded import OptimizerFactory
from memfit.sharding.state_sharding import sharded_state, something, stepped
from memfit.step.device import device_of
from memfit.step.part_calls import PartCalls
from memfit.step.process_generators import generators_kept, seed_alike
from memfit.step.program import non_finite
from memfit.techniques.sharding import Pipelines
from memfit.values.stages import Schedule

Look = Callable[[Batch], PartCalls]


@dataclass(frozen=True, slots=True)
class Division:
    """How a model is divided.

    Attributes:
        parts: paths of the modules that are called one after the other.
        ends: of each stage, the part before which it ends, with schedule and micro-batches.
        parameters: of each stage, the names of those that it has.
        everywhere: names of those that the forward reads between parts.
        weights: what micro-batches count for, in the words of `batches.weightings`.
        shards_state: ranks of different pipelines that have the same stages share out the state of their optimizer.
    """

    parts: tuple[str, ...]
    ends: StageEnds
    parameters: tuple[frozenset[str], ...]
    everywhere: frozenset[str] = frozenset()
    weights: str = "samples"
    shards_state: bool = False

    @classmethod
    def of(cls, model: nn.Module, calls: PartCalls, ends: StageEnds, weights: str = "samples") -> Division:
        """Of a model that is whole, by the calls of its parts."""
        ranges = [ends.range_of(stage) for stage in range(len(ends.ends))]
        return cls(
            tuple(call.path for call in calls.calls),
            ends,
            tuple(frozenset(calls.parameters(model, *each)) for each in ranges),
            calls.read_between,
            weights,
        )

    def holders(self, ranks: int) -> dict[str, tuple[int, ...]]:
        """Of each parameter, by name, the ranks of a pipeline that have it."""
        found: dict[str, set[int]] = {}
        for stage, names in enumerate(self.parameters):
            for name in names:
                found.setdefault(name, set()).add(stage % ranks)
        return {name: tuple(sorted(holding)) for name, holding in found.items()}


def buffers_between(model: nn.Module, parts: Iterable[str]) -> list[str]:
    """Names of the buffers that are in no part; the model's own forward may write them between its parts.

    Args:
        model: whole.
        parts: paths of its parts.
    """
    inside = {id(b) for path in set(parts) for b in model.get_submodule(path).buffers()}
    return [name for name, buffer in model.named_buffers() if id(buffer) not in inside]


def mesh_of_pipelines(device_type: str, length: int, replicas: int = 1) -> DeviceMesh:
    """All ranks of this run as pipelines of so many ranks beside each other; ranks that follow each other are of one pipeline."""
    return init_device_mesh(device_type, (replicas, length), mesh_dim_names=("replica", "stage"))


class Pipeline(PipelinedModel):
    """This rank's stages of a model, ready to train.

    Args:
        model: whole, with the same values on every rank. Parameters and buffers that only other ranks use are taken out of it.
        loss_fn: as for `memfit.plan`.
        look: the calls of the model's parts for a micro-batch, by a look at the whole model, of which what is in other stages is on the meta device.
        division: how it is divided.
        mesh: of pipelines (`mesh_of_pipelines`).
        region: makes what forward and loss of a micro-batch run inside, as the plan's techniques have it; `look` has it for itself.

    Attributes:
        stage: of this rank among those of its pipeline.
        shared: names of parameters that several ranks of a pipeline have, with those ranks.

    Raises:
        InputError: the division is for another number of ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        look: Look,
        division: Division,
        mesh: DeviceMesh,
        region: Region = nullcontext,
    ) -> None:
        assert dist.group.WORLD is not None, "a mesh is of a group"
        super().__init__(model, dist.group.WORLD)
        self.division = division
        self._loss_fn, self._look, self._region = loss_fn, look, region
        self._pipeline, self._replicas = mesh.get_group("stage"), mesh.get_group("replica")
        self._pipelines: list[list[int]] = mesh.mesh.tolist()
        self.device = device_of(model)
        self._among, self._beside = (Agreement(group, self.device) for group in (self._pipeline, self._replicas))
        self.stage, world = self._pipeline.rank(), self._pipeline.size()
        ends = division.ends
        check_ranks(ends, world)
        self._mine = tuple(range(self.stage, len(ends.ends), world))
        self._holders = division.holders(world)
        self.shared = {name: ranks for name, ranks in self._holders.items() if len(ranks) > 1}
        self._groups = self._groups_of(set(self.shared.values()), mesh)
        self._state_names = list(model.state_dict())
        self._names = {id(p): name for name, p in model.named_parameters()}
        # The same on all ranks, also on one that trains nothing.
        double = any(p.dtype in {torch.float64, torch.complex128} for p in model.parameters())
        self._norm_type = torch.float64 if double else torch.float32
        own = frozenset[str]().union(*(division.parameters[stage] for stage in self._mine))
        ranges = [ends.range_of(stage) for stage in self._mine]
        self._between = buffers_between(model, division.parts)
        self._writers: dict[str, int] | None = None  # of those that forwards write, the rank whose values count
        self._others = OtherStages(model, division.parts, ranges, own | division.everywhere)
        self._others.let_go()
        self._own = {name: p for name, p in model.named_parameters() if name in own}
        self._trained = {name: p for name, p in self._own.items() if p.requires_grad}
        self._calls: dict[tuple[str, bool], PartCalls] = {}
        self._signature = ""
        self._whole = WholeBatch(self._pipeline, ())  # of the shapes that are prepared
        self._running: Running | None = None
        self._prepared = 0  # times, on all ranks

    def _groups_of(self, several: set[tuple[int, ...]], mesh: DeviceMesh) -> dict[tuple[int, ...], dist.ProcessGroup]:
        # Every rank makes every group, in one order; it is in those of its own pipeline.
        found = {}
        for pipeline in mesh.mesh.tolist():
            for ranks in sorted(several):
                made = dist.new_group([pipeline[r] for r in ranks])
                if dist.get_rank() in pipeline:
                    found[ranks] = made
        return found

    def wait_at_most(self, limit: timedelta) -> None:
        """The ranks of a pipeline get a new group: messages in gloo keep the limit that their group was made with."""
        super().wait_at_most(limit)
        for ranks in self._pipelines:
            made = dist.new_group(ranks, timeout=limit)
            if dist.get_rank() in ranks:
                self._pipeline, self._among = made, Agreement(made, self.device)
        self._running = None

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._pipeline, rank)

    # -- what is here --------------------------------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank's stages, and what is read between parts."""
        return list(self.model.parameters())

    def trainable(self) -> list[nn.Parameter]:
        """Those of this rank's stages."""
        return list(self._trained.values())

    def named(self) -> dict[str, nn.Parameter]:
        """Those of this rank's stages."""
        return dict(self._own)

    @property
    def lacks_parameters(self) -> bool:
        """Those of other stages."""
        return True

    @property
    def saves_its_part(self) -> bool:
        """The first pipeline does; all of them where each has a part of the optimizer's state."""
        return self._replicas.rank() == 0 or self.division.shards_state

    def held(self) -> list[Tensor]:
        """Buffers for messages."""
        return [] if self._running is None else self._running.buffers()

    def optimizer(
        self, make: OptimizerFactory, arrange: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """The user's, over this rank's parameters; one that shares out their state among the replicas of its stage, where the division says so."""
        trained = self.trainable()
        made = make(iter(something(trained)))
        return sharded_state(made, self._replicas, arrange) if self.division.shards_state and trained else arrange(made)

    def stepped(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Where state is shared out the one inside of torch's."""
        return stepped(optimizer)

    # -- a step --------------------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Buffers and schedule for these shapes, where they are not those of the step before."""
        signature = batches.signature(batch)
        other = signature != self._signature or self._running is None
        if not any(changed for _, changed in self.agreement.counts(1, int(other))):
            return
        self._running, self._signature = None, ""
        self._prepared += 1
        told = self.agreement.of_all(signature)
        for ranks in self._pipelines:
            parts = [told[rank] for rank in ranks]
            if batches.joined_signature(parts) is None:
                shapes = "], [".join(dict.fromkeys(parts))
                raise BatchError(
                    f"the parts of a pipeline's batch differ in more than their number of samples ([{shapes}]): pad them to one length"
                )
            # Of each pipeline on all ranks: one that cannot run its batch would leave the others waiting.
            self._micro_batches(sum(map(batches.planned_size, parts)))
        own = next(ranks for ranks in self._pipelines if self.agreement.rank in ranks)
        self._whole = WholeBatch(self._pipeline, [batches.planned_size(told[rank]) for rank in own])
        micro_batches = self._split(self._whole.together(batch))
        self._whole.wait()
        calls = self._calls_of_all(micro_batches[0])
        counted = batches.counted_leaf(self.division.weights)
        read = [calls.leaves_read(*self._range(stage), counted) for stage in range(len(self.division.ends.ends))]
        # Ranks of a pipeline have looked at one batch, but each at its own model: they send by what all of them have seen.
        seen, digests = zip(*self.agreement.of_all((read, calls.digest)), strict=True)
        for ranks in self._pipelines:
            check_same_loss({rank: digests[rank] for rank in ranks})
        of_stages = zip(*(seen[rank] for rank in own), strict=True)
        self._whole.read = [frozenset().union(*of_stage) for of_stage in of_stages]
        stages = {n: StageModule(self.model, self._loss_fn, calls, *self._range(n)) for n in self._mine}
        ends = self.division.ends.in_micro_batches(len(micro_batches))
        self._running = Running(stages, ends, self._pipeline, self._region, self._prepared)
        self._signature = signature

    def _range(self, stage: int) -> tuple[int, int]:
        return self.division.ends.range_of(stage)

    def _split(self, batch: Batch) -> list[Batch]:
        """Micro-batches of one size, no larger than planned."""
        number = self._micro_batches(self._whole.samples)
        return batches.sliced(batch, [self._whole.samples // number] * number) if number > 1 else [batch]

    def _micro_batches(self, total: int) -> int:
        """How many there are of so many samples."""
        ends, ranks = self.division.ends, self._pipeline.size()
        fitting = (n for n in range(1, total + 1) if total % n == 0 and total // n <= ends.micro_batch_size)
        number = next(
            (n for n in fitting if ends.schedule is not Schedule.INTERLEAVED or n % max(1, n // ranks) == 0), 0
        )
        if not number:
            replicas, state = self._replicas.size(), self.division.shards_state
            instead = Pipelines("1f1b", ranks, replicas, shards_state=state)
            raise BatchError(
                f"interleaved stages run rounds of {ranks} micro-batches of at most {ends.micro_batch_size} samples, and a pipeline's batch of {total} samples "
                f'does not divide into them: leave it out (data.drop_last: true in a run file), or plan with fixed={{"sharding": "{instead}"}}'
            )
        return number

    def _calls_of_all(self, micro_batch: Batch) -> PartCalls:
        """As `_calls_of`; where one rank cannot run it, all of them raise."""
        calls, failed = None, None
        try:
            calls = self._calls_of(micro_batch)
        except MemfitError as error:
            failed = error
        first = self.agreement.others_error(failed)
        if first is not None:
            rank, reason = first
            raise InputError(f"rank {rank} cannot run its stages, so no rank takes the step: {reason}")
        assert calls is not None, "no rank has failed"
        return calls

    def _calls_of(self, micro_batch: Batch) -> PartCalls:
        key = batches.signature(micro_batch), self.model.training
        if key not in self._calls:
            with self._others.there(), torch.enable_grad(), generators_kept():
                seed_alike()
                calls = self._look(micro_batch)
            check_calls(calls, self.division)
            self._calls[key] = calls
        return self._calls[key]

    def forward_backward(self, batch: Batch, around: AroundForward) -> Passed:
        """Gradients are summed over pipelines, and over the ranks that share a parameter."""
        running = self._running
        assert running is not None, "it is prepared"
        running.begin()
        micro_batches = self._split(self._whole.together(batch))
        # The first stage waits for no other: it computes first, and what it has for others is read after that. Not where all pipelines are told what counts.
        if not (running.any_order and 0 in self._mine and self._replicas.size() == 1):
            self._whole.begin()
        counts = self._counts(micro_batches)
        total = self.agreement.total(sum(counts)) if self._replicas.size() > 1 else sum(counts)
        if not total and self._replicas.size() > 1:
            raise self._nothing_counts()
        summed = self.division.weights == "sum"
        weights = [1.0 if summed else count / max(total, 1) for count in counts]
        between = self._between if self._writers is None else self._writers
        before = {name: (buffer := self.model.get_buffer(name), buffer._version) for name in between}  # noqa: SLF001 - the count of writes has no public name
        try:
            # What this rank was sent is what its only stage reads, where it has one.
            of_stages = {
                n: [self._whole.of_stage(n, each) for each in micro_batches] if len(self._mine) > 1 else micro_batches
                for n in self._mine
            }
            size = self._whole.samples // len(micro_batches)
            loss = running.step(
                of_stages, weights, around, lambda number: self._whole.wait((number + 1) * size), self._whole.begin
            )
            self._whole.wait()
        except BaseException as error:
            self._running = None  # it may have been left half way
            # torch's stages put what a forward raises into a RuntimeError.
            if isinstance(error.__cause__, MemfitError):
                raise error.__cause__ from None
            raise
        del micro_batches, of_stages
        loss, seconds, counted = self._of_all(loss, running.seconds, sum(counts))
        if not counted:
            raise self._nothing_counts()
        if not math.isfinite(loss):
            raise non_finite(f"the loss is {loss}")
        self._sum_gradients()
        self._share_buffers(before)
        # Of the passes of all stages, which end with the last backward of the rank that is through last.
        return Passed(loss, len(counts), max(0.0, 1 - running.busy_seconds / seconds))

    def _share_buffers(self, before: dict[str, tuple[Tensor, int]]) -> None:
        """What forwards write between parts counts as the first rank that does so has it: later ones run that code without the values of parts before them.

        Args:
            before: of each buffer, itself and its version when the step began.
        """
        if self._writers is None:
            changed = [
                name
                for name, (buffer, version) in before.items()
                if self.model.get_buffer(name) is not buffer or buffer._version != version  # noqa: SLF001
            ]
            told = self._among.of_all(changed) if before else []
            self._writers = {}
            for rank, names in enumerate(told):
                for name in names:
                    self._writers.setdefault(name, rank)
        for name, rank in self._writers.items():
            if self.stage == rank:
                dist.broadcast(self.model.get_buffer(name).detach(), self._global(rank), group=self._pipeline)
                continue
            buffer, _ = before[name]
            dist.broadcast(buffer, self._global(rank), group=self._pipeline)
            path, _, own = name.rpartition(".")
            setattr(self.model.get_submodule(path), own, buffer)  # where forward has put another one there

    def _counts(self, micro_batches: Sequence[Batch]) -> list[int]:
        """What each counts for, on the rank that has the loss; elsewhere its weight is not asked for, and it counts for nothing."""
        if len(self.division.ends.ends) - 1 not in self._mine:
            return [0] * len(micro_batches)
        if self.division.weights == "samples":  # of which all may be elsewhere
            return [self._whole.samples // len(micro_batches)] * len(micro_batches)
        self._whole.wait(self._whole.samples)  # they come before the first result of the stage before
        return [batches.counted(each, self.division.weights) for each in micro_batches]

    def _nothing_counts(self) -> BatchError:
        return BatchError(
            f"nothing in the batches of all {self.ranks} ranks counts for the loss (it is weighted by {self.division.weights}): nothing was changed"
        )

    def _of_all(self, loss: float, seconds: float, counted: int) -> tuple[float, float, int]:
        """The sum of the losses of all pipelines, the longest seconds of a rank of this one, and what the batches of all count for."""
        # A loss is zero where the last stage is not.
        losses, counts, of_ranks = zip(*self._among.rows((loss, counted, seconds)), strict=True)
        total, count = sum(losses), sum(counts)
        if self._replicas.size() > 1:
            losses, counts = zip(*self._beside.rows((total, count)), strict=True)
            total, count = sum(losses), sum(counts)
        return total, max(of_ranks), int(count)

    def _sum_gradients(self) -> None:
        shared = sorted(self.shared.items())
        self._summed((name, self._groups[ranks]) for name, ranks in shared if name in self._trained)
        if self._replicas.size() == 1:
            return
        names = sorted(self._trained)
        if not names:
            return
        there = torch.tensor(
            [self._trained[name].grad is not None for name in names], dtype=torch.uint8, device=self.device
        )
        dist.all_reduce(there, op=dist.ReduceOp.MAX, group=self._replicas)
        told = zip(names, there.tolist(), strict=True)
        self._summed((name, self._replicas) for name, somewhere in told if somewhere)

    def _summed(self, gradients: Iterable[tuple[str, dist.ProcessGroup]]) -> None:
        """Each over the ranks of its group. All are begun before one is waited for: gloo's thread then waits for a core once, and not for each of them."""
        works = [dist.all_reduce(self._gradient(name), group=group, async_op=True) for name, group in gradients]
        for work in works:
            if work is not None:
                work.wait()

    def _gradient(self, name: str) -> Tensor:
        parameter = self._trained[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def clip(self, norm: float) -> Tensor:
        """By the norm over all stages, in which a parameter of several ranks counts once."""
        mine = [p for name, p in self._trained.items() if self.stage == self._holders[name][0]]
        total = torch.nn.utils.get_total_norm([p.grad for p in mine if p.grad is not None]).to(self.device)
        squared = total.to(self._norm_type).square_()
        dist.all_reduce(squared, group=self._pipeline)
        whole = squared.sqrt_()
        torch.nn.utils.clip_grads_with_norm_(self.trainable(), norm, whole)
        return whole

    def clear(self, *, accumulates: bool) -> None:
        """Let go of them."""
        del accumulates
        for parameter in self._trained.values():
            parameter.grad = None

    # -- besides steps -------------------------------------------------------------------------------------------------------

    def loss_of(self, batch: Batch) -> float:
        """Passed on from stage to stage, once."""
        calls, number, world = self._calls_of(batch), len(self.division.ends.ends), self._pipeline.size()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for stage in self._mine:
                module = StageModule(self.model, self._loss_fn, calls, *self._range(stage))
                received = [meta.empty(self.device) for meta in module.received]
                for tensor in received:
                    dist.recv(tensor, self._global((stage - 1) % world), group=self._pipeline)
                with self._region():
                    result = module(batch, *received)
                if module.is_last:
                    loss.copy_(result)
                else:
                    for tensor in result:
                        dist.send(tensor.contiguous(), self._global((stage + 1) % world), group=self._pipeline)
        dist.broadcast(loss, self._global((number - 1) % world), group=self._pipeline)
        return float(loss)

    def whole(self) -> dict[str, Tensor]:
        """Put together on rank 0 from all stages of its pipeline."""
        self.agreement.call("engine.state_dict()")
        here = self.model.state_dict()
        told = self.agreement.of_all(
            {name: self._described(value) for name, value in here.items() if self._is_ours(name)}
        )
        world = self._pipeline.size()
        found: dict[str, Any] = {}
        for name in self._state_names:
            owner = next((rank for rank in range(world) if name in told[rank]), None)
            if owner is None or self.agreement.rank not in {0, owner}:
                continue
            shape, dtype, value = told[owner][name]
            if shape is None:
                found[name] = value
            elif self.agreement.rank != owner:
                received = torch.empty(shape, dtype=dtype, device=self.device)
                dist.recv(received.view(-1).view(torch.uint8), owner, group=self._pipeline)
                found[name] = received.to("cpu")
            elif owner:
                dist.send(here[name].detach().contiguous().view(-1).view(torch.uint8), 0, group=self._pipeline)
            else:
                found[name] = here[name].detach().to("cpu", copy=True)
        return found if self.agreement.rank == 0 else {}

    def _is_ours(self, name: str) -> bool:
        """Whether something of the state dict is this rank's: of parameters that every stage has, only those of this one's parts are trained here."""
        try:
            parameter = self.model.get_parameter(name)
        except AttributeError:
            return True
        return self._names[id(parameter)] in self._own

    @staticmethod
    def _described(value: Any) -> tuple[Any, Any, Any]:
        return (tuple(value.shape), value.dtype, None) if isinstance(value, Tensor) else (None, None, value)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """This rank's part, for `loss_of`."""
        yield self.model

    def close(self) -> None:
        """Let go of buffers. What is in other stages is on the meta device from here on."""
        self._running = None
        self._others.put_back()


def check_ranks(ends: StageEnds, ranks: int) -> None:
    """Raise InputError where stages are for other ranks."""
    if len(ends.ends) % ranks or (ends.schedule is not Schedule.INTERLEAVED and len(ends.ends) != ranks):
        raise InputError(
            f"the model is cut into {len(ends.ends)} stages for the schedule {ends.schedule} and there are {ranks} ranks: cut it for as many as there are"
        )


def check_calls(calls: PartCalls, division: Division) -> None:
    """Raise InputError where a model cannot be run so."""
    ends, paths = division.ends.ends, tuple(call.path for call in calls.calls)
    if list(ends) != sorted(set(ends)) or not ends or ends[-1] != len(calls.calls):
        raise InputError(
            f"stages end before parts {list(ends)}, and the model has {len(calls.calls)} parts: ends rise to that number"
        )
    if paths != division.parts:
        other = next((a, b) for a, b in zip(paths, division.parts, strict=True) if a != b)
        raise InputError(f"the forward calls {other[0]} where it called {other[1]} when it was planned for: plan again")
    for end in ends[:-1]:
        if calls.refused[end]:
            raise InputError(f"the model cannot be cut after {calls.calls[end - 1].path}: {calls.refused[end]}")


def equal_micro_batches(batch: Batch, number: int) -> list[Batch]:
    """The batch in so many micro-batches of one size.

    Raises:
        BatchError: it does not divide.
    """
    size = batches.size(batch)
    if size % number:
        raise BatchError(
            f"a batch of {size} samples does not divide into {number} micro-batches of one size, which a pipeline needs: take a multiple of {number}"
        )
    return batches.split(batch, [size // number] * number)
