"""The public interface of training under a plan: a model, its optimizer and a plan become steps. The engine decides nothing.

What it is made of: the plans by signature (`plan_table`), forward and backward of a micro-batch as a script says (`executor`, `follower`, `tape`), what
makes a step whole or not at all (`transaction`), how micro-batches add up (`accumulation`), streamed layers (`streamed`), and what happened (`history`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.engine.accumulation import Accumulated, Told, micro_batches_of, weighted_micro_batches, weighted_on_ranks
from memfit.engine.activation_offloading import LowerTiers, Makers, arena_makers
from memfit.engine.call_follower import CallFollower
from memfit.engine.called_modules import UnfollowedForward
from memfit.engine.executor import Executor
from memfit.engine.follower import Follower
from memfit.engine.history import History
from memfit.engine.new_paths import Learner, PathWatch
from memfit.engine.pipelined import PipelinedStep
from memfit.engine.plan_table import PlanTable
from memfit.engine.steps import Steps
from memfit.engine.streamed import StreamedStep
from memfit.engine.transaction import Transaction, Transactions
from memfit.errors import BatchError, EngineError, InputError
from memfit.meter import MeterReading
from memfit.sharding.pipelined import PipelinedModel
from memfit.sharding.sharded import ShardedModel
from memfit.step.device import device_of
from memfit.step.freed_memory import keep_freed_memory
from memfit.step.guard import Deciding
from memfit.step.held_tensors import loss_tensors, model_tensors
from memfit.step.modules import forget_modules, has_gradients, remembering_modules
from memfit.step.other_kernels import CompileWatch
from memfit.step.program import LossBy, StepProgram, held_by_optimizer, state_tensors
from memfit.storage.tiers import nearest_tier
from memfit.streaming.stream import LayerStream
from memfit.techniques.autocast.precision import Scaling
from memfit.units import format_bytes
from memfit.values.plan import Plan
from memfit.values.report import FrontierPoint, Rehearsal, Report, StepRecord

LARGER_WINDOW: Final = (
    "plan again with a sample that holds the samples of all batches of a step (with loader_batches=n it is divided by n), "
    "each of the largest shape that will come"
)


class LearningRateSchedule(Protocol):
    """What moves the learning rate: torch's schedulers, or whatever else has a `step`."""

    def step(self) -> Any:
        """A step was taken."""


class Engine:
    """A model, its optimizer and a plan, ready to train.

    Args:
        plan: made for this model's structure.
        model: the user's own object; never replaced.
        loss_fn: `loss_fn(model, batch)`, or None for `model(**batch).loss`.
        optimizer: over the model's parameters; None to compute gradients only.
        stream: a `LayerStream` that has offloaded the model's blocks already; made here when None and the plan streams.
        below: functions that allocate space for offloaded activations, by tier; None for those of the device.
        folder: for what is offloaded to disk; None for the default (`MEMFIT_OFFLOAD_DIR`).
        sharded: the model as this one of several ranks has it; None on one device.

    Attributes:
        stream: the `LayerStream` of a plan that streams layers; None otherwise.
        folder: as given.
        planner: makes a plan for a batch whose forward diverged from the plan it fell under; None where nothing can be captured (a loaded plan).
        learner: makes a plan that also knows the path of the present step, of one that the step diverged from; None as for `planner`.
        diverged: a batch whose forward was not as planned, until its path is learnt: the first of a step, or of the user's own loop; None otherwise.
        scaling: of the gradients, under a plan in fp16; None otherwise.
        schedule: its `step` is called after each optimizer step that is taken, not after a skipped one; None where the training loop calls it.
        backward_by: called with the loss in place of `loss.backward()`, as Fabric's; None for the loss's own.
        loss_by: as for `StepProgram`.
        fabric_model: the model as Fabric wrapped it, for saving and evaluating; None without Fabric.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        loss_fn: LossFunction | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        stream: LayerStream | None = None,
        below: Makers | None = None,
        folder: str | Path | None = None,
        sharded: ShardedModel | None = None,
    ) -> None:
        self.model = model
        if self.device.type == "cpu":
            keep_freed_memory()
        self.sharded = sharded
        self.plan = plan
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.stream = stream
        self.folder = folder
        self.planner: Callable[[Batch], Plan] | None = None
        self._training = model.training  # as planned
        self._told_mode = False
        self.learner: Learner | None = None
        self.scaling: Scaling | None = None
        self.schedule: LearningRateSchedule | None = None
        self.backward_by: Callable[[torch.Tensor, torch.Tensor | None], object] | None = None
        self.loss_by: LossBy | None = None
        self.fabric_model: nn.Module | None = None
        self.rehearsal: Rehearsal | None = None
        self.frontier: tuple[FrontierPoint, ...] = ()
        where = "" if sharded is None else f"on rank {sharded.agreement.rank}, "
        self._plans = PlanTable(where)
        self._history = History(where)
        clear = None if sharded is None else partial(sharded.clear, accumulates=plan.choices.micro_batches > 1)
        self._transactions = Transactions(model, loss_fn, clear, optimizer if sharded is None else None)
        self._compile_watch = CompileWatch()
        self.diverged: Batch | None = None
        self._before_it: Deciding | None = None
        # By a weak reference: a cycle would keep the optimizer's state on the device until Python looks for cycles.
        self._steps = Steps(weakref.proxy(self), self._plans, self._transactions, self._history)
        self._lower_tiers = LowerTiers(below if below is not None else arena_makers(self.device, folder))
        self._executor = Executor(self._lower_tiers, model)
        self._pipelined = PipelinedStep(sharded, plan, self._executor) if isinstance(sharded, PipelinedModel) else None
        self.add(plan)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise InputError(
            'an engine cannot be saved or copied: save model.state_dict(), engine.optimizer.state_dict() and engine.plan.save("plan.json"), '
            "or copy the model and call memfit.apply(engine.plan, copy)"
        )

    # -- plans ---------------------------------------------------------------------------------------------------------------

    def add(self, plan: Plan) -> None:
        """Follow this plan for batches of its signature; `plan` stays the first one.

        Raises:
            InfeasibleError: the plan offloads more than fits on a lower tier.
            EngineError: the plan names a buffer that the model does not have, or streams other layers than the plans before; or no file can be created for
                what it offloads.
        """
        self.arrange_for(plan)
        self._plans.add(plan)

    def arrange_for(self, plan: Plan) -> None:
        """Have what a plan needs besides the model."""
        self._lower_tiers.reserve(plan.script.lower_bytes)
        self._stream_as(plan)
        here = dict(self.model.named_buffers()) if self._pipelined is not None else plan.changed_buffers
        self._transactions.buffers.add(tuple(name for name in plan.changed_buffers if name in here))
        if plan.choices.scales_gradients and self.optimizer is not None and self.scaling is None:
            self.scaling = Scaling(self.device, None if self.sharded is None else self.sharded.overflowed)

    def replace_plan(self, plan: Plan) -> None:
        """Follow another plan from now on (the repair after a rehearsal)."""
        self._plans.clear()
        if self.stream is not None and plan.choices.streamed != self.stream.blocks.path:
            self.stream.close()
            self.stream = None
        self.plan = plan
        self.add(plan)
        if self._pipelined is not None:
            self._pipelined.follow(plan)

    def _stream_as(self, plan: Plan) -> None:
        path = plan.choices.streamed
        if path and self.stream is None and not self._plans:
            self.stream = LayerStream(self.model, path, nearest_tier(self.device, self.folder))
        have = "" if self.stream is None else self.stream.blocks.path
        if path != have:
            raise EngineError(
                f"this engine streams the layers of {have!r} and the plan those of {path!r} (none where empty): all plans of an engine must stream alike, "
                'so plan with fixed={"streamed": ...} or make an engine for each'
            )

    def gathered(self, *, on_host: bool = False, changed: bool = True) -> AbstractContextManager[nn.Module]:
        """Inside the block the model has all its parameters and the optimizer all its state; outside of it, streamed layers are offloaded.

        For `state_dict`, for loading, for inspecting parameters; takes as many bytes as the model does in plain PyTorch. What several ranks share out stays so:
        `Engine.state_dict` puts it together.

        Args:
            on_host: bring offloaded tensors to host memory, not to the device; then the model can be saved or loaded, not called.
            changed: write the tensors back to the lower tier at the end; with False, changes made inside are lost.
        """
        return (
            self.stream.gathered(on_host=on_host, changed=changed)
            if self.stream is not None
            else nullcontext(self.model)
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state dict with whole tensors in host memory, under any plan. On several ranks all have to call it, and rank 0 alone gets it."""
        if self.sharded is not None:
            return self.sharded.whole()
        with self.gathered(on_host=True, changed=False) as model:
            return {
                name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for name, value in model.state_dict().items()
            }

    def evaluating(self) -> AbstractContextManager[nn.Module]:
        """The model for calls without gradients; streamed layers are loaded to the device one by one as they are called."""
        if self.sharded is not None:
            return self.sharded.evaluating()
        return self.stream.reading() if self.stream is not None else nullcontext(self.model)

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, *, meter: bool = False) -> StepRecord:
        """One optimizer step over the whole batch, in as many micro-batches as the plan says.

        Args:
            batch: as the sample the plan was made for; it may be smaller in any dimension, not larger.
            meter: measure the true peak of this step (slower).

        Raises:
            BatchError: another structure than planned, or larger.
            NonFiniteLossError: the loss is NaN or infinite; nothing was changed.
            InputError: the model, its loss function or the optimizer's step was compiled by torch.compile since.
            EngineError: an update failed half way, now or before; the engine cannot be used any more.
        """
        self._check()
        with self._refusing():
            batches.size(batch)  # refuses what is no batch
            signature = batches.signature(batch)
            plan = self._plans.plan_for(signature, self.plan)
        if self.planner is not None and self._plans.wants_own_plan(signature):
            plan = self._own_plan(batch, signature, plan, self.planner)
        drawing: AbstractContextManager[None] = nullcontext()
        if self._pipelined is not None:
            self._pipelined.prepare(batch)
            drawing = self._pipelined.drawing()
        # Once in a step, however often this rank begins it anew.
        told = None if self.sharded is None else cache(self.sharded.agreement.counts)
        with drawing, remembering_modules():
            self._notice_what_is_trained()
            record = self._steps.taken(
                plan,
                batch,
                signature,
                self.learner,
                lambda plan, watch: self._recorded(
                    partial(self._step, plan, batch, told, watch), batch, signature, meter=meter, stacklevel=5
                ),
            )
        self._steps.learn_after(batch, signature, self.learner, self._transactions.before)
        return record

    def accumulate(self, micro_batches: Iterable[Batch], *, meter: bool = False) -> StepRecord:
        """One optimizer step over the micro-batches of a loader.

        For a window of n batches of a loader, plan with a sample that holds all their samples: with `loader_batches=n`, then hand over an iterator that makes
        one at a time; or with `fixed={"micro_batches": n}`, then a list of n, which are all in memory. Fewer may come (the last window of an epoch). Each
        counts for what the loss averages over, as the plan has found: samples, or tokens that are not masked. How much that is in all is known only at the end,
        so gradients are added up in units of the first micro-batch and divided once: the same step as over all samples at once up to the order of additions.

        Args:
            micro_batches: any that are larger than a micro-batch of the plan are split; those on other devices are copied to the engine's, one at a time. On
                several ranks a list, since the last one has to be known.
            meter: as for `step`; of a list, all micro-batches that are on the device count.

        Raises:
            BatchError: there are none, nothing in them counts for the loss, one is larger than planned, or a list holds more bytes on the device than the plan
                counts for batches; nothing was changed.
            InputError: the plan runs the batch as a whole, so it has neither weights nor memory for accumulated gradients; it updates parameters inside
                backward; or it streams layers.
            NonFiniteLossError, EngineError: as for `step`.
        """
        self._check()
        self._refuse_stages("engine.accumulate")
        if self.plan.choices.micro_batches == 1:
            raise InputError(
                "this plan runs the batch as a whole: it has no memory planned for gradients between micro-batches, and their weights are not known: "
                "plan with a sample that holds all samples of the step, and with loader_batches=n to hand over an iterator that makes one of n batches at a "
                'time, or with fixed={"micro_batches": n} for a list of n; or call engine.step with the whole batch'
            )
        if self.stream is not None:
            raise InputError(
                "this plan streams layers, through each of which all micro-batches pass before the next one is loaded: plan with "
                'fixed={"streamed": ""}, or call engine.step with the batch of the whole step'
            )
        if self._program(self.plan).updates_in_backward:
            raise InputError(
                "this plan updates parameters inside the backward of the last micro-batch, and which one of a loader's is the last is not known: "
                'plan with fixed={"update": "after"}, or call engine.step'
            )
        listed = micro_batches if isinstance(micro_batches, (list, tuple)) else ()
        if self.sharded is not None and not listed:
            raise InputError(
                "engine.accumulate on several ranks needs a list of at least one batch: gradients are sent in the backward of the last one, which an iterator "
                "does not tell"
            )
        there = [tensor for each in listed for tensor in batches.leaves(each)]
        with self._refusing():
            self._check_held(len(listed), there)
        self._notice_what_is_trained()
        record = self._recorded(lambda: self._accumulate(micro_batches), there, self.plan.signature, meter=meter)
        diverged, self.diverged = self.diverged, None
        if diverged is not None:
            self._steps.learn_after(diverged, self.plan.signature, self.learner, self._transactions.before)
        return record

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """A batch that this rank refuses here ends the step of all ranks."""
        try:
            yield
        except BatchError as error:
            if self.sharded is not None:
                self.sharded.refuse(error)
            raise

    def _check(self) -> None:
        self._transactions.check()
        first = next(self.model.parameters(), None)  # of one rank's stage among the model's others, it may be another's
        if first is not None and first.is_meta and all(parameter.is_meta for parameter in self.model.parameters()):
            raise InputError(
                "the model was moved to the meta device, where it has no tensors: load weights (model.to_empty, load_state_dict), and call memfit.fit again"
            )
        self._refuse_compiled()
        self._notice_the_mode()

    def _notice_what_is_trained(self) -> None:
        """Warn where layers have been frozen or freed since the first step, or replaced, added or converted since the optimizer was made."""
        replaced, added, converted = self._transactions.changed_parameters()
        if replaced:
            warnings.warn(
                f"{replaced} parameters that the optimizer updates are not the model's any more: what replaced them is not trained. Call memfit.fit again",
                stacklevel=3,
            )
        elif added:
            warnings.warn(
                f"{added} parameters have come to the model that the optimizer does not have: they are not trained. Call memfit.fit again",
                stacklevel=3,
            )
        if converted:
            warnings.warn(
                f"{converted} parameters have another type than when the plan was made: steps may exceed the budget. Call memfit.fit again with this model",
                stacklevel=3,
            )
        more, fewer = self._transactions.newly_trained()
        if more or fewer:
            warnings.warn(
                f"{more} parameters are trained from here on that were not, and {fewer}"
                " no longer: the optimizer updates only what it was made with, and your own loops may exceed the budget. Call memfit.fit again with this model",
                stacklevel=3,
            )

    def _notice_the_mode(self) -> None:
        """Warn where `model.train()` was forgotten after an evaluation: what runs then is not what was planned."""
        other = self.model.training != self._training
        if other and not self._told_mode:
            planned, now = ("train", "eval") if self._training else ("eval", "train")
            warnings.warn(
                f"the model is in {now} mode, and its plan is for {planned}"
                " mode, in which dropout and norms do other things: call model."
                f"{planned}() before the step, or plan again if {now} mode is meant",
                stacklevel=4,
            )
        self._told_mode = other

    def _refuse_compiled(self) -> None:
        self._compile_watch.check(self.model, self.loss_fn, self.optimizer, first=not self.records)

    def _refuse_stages(self, what: str) -> None:
        if self._pipelined is not None:
            raise InputError(
                f"this rank has a stage of the model, whose micro-batches go from rank to rank: {what} does not run them, engine.step does; or share the step "
                'out with the whole model on each rank, fixed={"sharding": "data"} or "zero1"'
            )

    def _check_held(self, count: int, tensors: Sequence[torch.Tensor]) -> None:
        """Check that batches which are all on the device at once hold no more bytes than the plan counts for them."""
        held = sum(t.nbytes for t in {id(t): t for t in tensors}.values() if t.device == self.device)
        planned = batches.signature_bytes(self.plan.signature)
        if held > planned:
            how = "" if self.sharded is not None else "hand over an iterator that makes one at a time, or "
            raise BatchError(
                f"a list of {count} batches holds {format_bytes(held)} on the device at once, and the plan counts {format_bytes(planned)} for batches "
                f"[{self.plan.signature}]: {how}plan with a sample that holds all their samples and "
                'fixed={"micro_batches": n} in place of loader_batches=n; nothing was changed'
            )

    def _recorded(
        self, run: Callable[[], None], batch: Batch, signature: str, *, meter: bool, stacklevel: int = 3
    ) -> StepRecord:
        """Run a step, step the schedule, and warn of divergences: of the user's line, which is so many calls away from here."""
        history, device = self._history, self.device
        record = history.metered(run, lambda: self.present(batch), device) if meter else history.timed(run)
        if self.schedule is not None and not record.skipped:
            self.schedule.step()
        if record.divergences and (
            self.planner is not None or (self.learner is not None and self._plans.of(signature))
        ):
            self._plans.note_divergence(signature)
        again = ""
        if self._plans.wants_own_plan(signature):
            again = "; the next batch of this shape gets a plan of its own"
        elif self.learner is not None and self._plans.wants_to_learn(signature):
            again = "; the path that it took is captured and planned for"
        elif self.sharded is not None and not self.sharded.learns_paths:
            again = "; so is every step on this path, as none is learnt in training under ZeRO 2, ZeRO 3 or pipelines"
        for divergence in record.divergences:
            self.tell_divergence(divergence, again, stacklevel=stacklevel + 1)
        return record

    def tell_divergence(self, divergence: str, more: str = "", *, stacklevel: int) -> None:
        """Warn that a forward differed from the plan, once for each divergence. Integrations with a trainer call it, too.

        Args:
            divergence: where and why.
            more: what happens now.
            stacklevel: of `warnings.warn`, from here.
        """
        self._history.tell_divergence(divergence, more, stacklevel=stacklevel + 1)

    def _own_plan(self, batch: Batch, signature: str, known: Plan, planner: Callable[[Batch], Plan]) -> Plan:
        with self.gathered():
            made = self._plans.own_plan(batch, signature, known, planner)
        self.add(made)
        return made

    def _program(self, plan: Plan) -> StepProgram:
        how = (self.model, self.loss_fn, self.optimizer, plan.clip_norm, plan.choices, self.scaling)
        backward = torch.Tensor.backward if self.backward_by is None else self.backward_by
        return StepProgram(*how, backward, self.sharded, self.loss_by)

    def _step(self, plan: Plan, batch: Batch, told: Told | None, watch: PathWatch | None = None) -> None:
        if self._pipelined is not None:
            with self._transactions.begin(self.scaling) as transaction:
                forget_modules()
                self._finish(self._program(plan), self._pipelined.run(batch), transaction)
            return
        self._run(plan, self._weighted(plan, batch, told), watch)

    def _run(self, plan: Plan, weighted: Sequence[tuple[Batch, float | None]], watch: PathWatch | None = None) -> None:
        """A step of these micro-batches, each with its weight."""
        program = self._program(plan)
        with self._transactions.begin(self.scaling) as transaction:
            if self.stream is not None:
                forget_modules()
                record = StreamedStep(self.stream, self._transactions, self.reading).run(program, weighted, transaction)
                transaction.commit()
                self._history.add(record)
                return
            total, compiled = Accumulated(), self._plans.compiled(plan)
            to_come = list(reversed(weighted))
            del weighted
            while to_come:
                micro_batch, weight = to_come.pop()  # held no longer: where the loss asks for its gradient, it has one
                last = not to_come
                inside = program.updates_in_backward and last
                if inside:
                    transaction.begin_update(self._updated())
                with nullcontext() if self.sharded is None else self.sharded.telling_of_failure(agrees=True):
                    self._executor.forward_backward(
                        program, compiled, micro_batch, weight, total, updates=inside, watch=watch, last=last
                    )
            self._finish(program, total, transaction)

    def _weighted(self, plan: Plan, batch: Batch, told: Told | None) -> Sequence[tuple[Batch, float | None]]:
        if self.sharded is not None and told is not None:
            return weighted_on_ranks(plan, micro_batches_of(plan, batch), self.sharded.ranks, told)
        return weighted_micro_batches(plan, batch) or [(batch, None)]

    def _accumulate(self, loaded: Iterable[Batch]) -> None:
        if self.sharded is not None:
            here = [batches.map_tensors(lambda t: t.to(self.device), batch) for batch in loaded]
            with self._refusing():
                for batch in here:
                    self._plans.plan_for(batches.signature(batch), self.plan, again=LARGER_WINDOW)
                split = [part for batch in here for part in micro_batches_of(self.plan, batch)]
            told = self.sharded.agreement.counts
            self._run(self.plan, weighted_on_ranks(self.plan, split, self.sharded.ranks, told))
            return
        how, total, program = self.plan.choices.weights, Accumulated(), self._program(self.plan)
        with self._transactions.begin(self.scaling) as transaction:
            for batch in loaded:
                self._add(batch, how, total)
                del batch  # before the loader makes the next one
            total.divide(self.model, how)
            self._finish(program, total, transaction)

    def _add(self, batch: Batch, how: str, total: Accumulated) -> None:
        here = batches.map_tensors(lambda t: t.to(self.device), batch)
        signature = batches.signature(here)
        plan = self._plans.plan_for(signature, self.plan, again=LARGER_WINDOW)
        program, compiled = self._program(plan), self._plans.compiled(plan)
        total.add_uncounted(
            micro_batches_of(plan, here),
            how,
            lambda part, weight: self._executor.forward_backward(program, compiled, part, weight, total),
        )
        if total.divergences and self.diverged is None:
            self.diverged = here

    def _finish(self, program: StepProgram, total: Accumulated, transaction: Transaction) -> None:
        """The rest of the step: the update, where none began in backward, and the record."""
        if self.sharded is not None and self._pipelined is None:
            total.agree(self.sharded, check_finite=self.scaling is None)
        if not program.updates_in_backward:
            transaction.begin_update(self._updated())
        taken = program.update()
        program.clear()
        if self.scaling is not None:
            self.scaling.check_hope()
        transaction.commit()
        self._history.add(total.record(skipped=not taken))

    def _updated(self) -> list[torch.Tensor]:
        """What an update writes."""
        if self.optimizer is None:
            return []
        return [*(p for group in self.optimizer.param_groups for p in group["params"]), *state_tensors(self.optimizer)]

    @contextmanager
    def forward(
        self, batch: Batch | None = None, *, retain_graph: bool = False
    ) -> Iterator[Follower | CallFollower | UnfollowedForward | None]:
        """For your own training loop: run forward and loss of one micro-batch inside the block, backward and the update after it.

        Under a plan in 16 bits the block is an autocast region, too; in fp16, scale the loss with `engine.scaling.scaler`.

        Args:
            batch: what forward is run on. Where it is given and forward takes a path that the plan does not know, that path is captured and planned for when
                the next forward begins; the batch is kept until then.
            retain_graph: backward will run more than once through this graph; then no tensor is freed early.
        """
        if self.stream is not None:
            raise EngineError(
                "layers are streamed, which runs forward, backward and update in an order of its own: use engine.step, or plan without streaming"
            )
        self._refuse_stages("engine.forward")
        self._refuse_compiled()
        if self._program(self.plan).updates_in_backward:
            raise InputError(
                "this plan updates parameters inside backward, which engine.step does and a loop of your own does not: "
                'plan with fixed={"update": "after"}, or call engine.step'
            )
        signature = self.plan.signature
        self.learn_diverged()
        plan = self._plans.of(signature)[0]
        program = self._program(plan)
        follower = self._executor.follower(self._plans.compiled(plan), retain=retain_graph)
        learns = batch is not None and self.learner is not None and self._plans.would_learn(signature)
        self._before_it = Deciding(self.model, self.loss_fn) if learns else None
        if self.sharded is not None:
            self.sharded.follow_cleared()
        with follower.following() if follower is not None else nullcontext(), program.as_chosen():
            yield follower
        if learns and follower is not None and follower.divergence is not None:
            self._plans.note_divergence(signature)
            self.diverged = batch

    def learn_diverged(self) -> None:
        """Capture and plan for the path that the last `forward(batch)` took, where the plan does not know it. Not under a profiler, which that would end."""
        if self.diverged is not None and not torch._C._autograd._profiler_enabled():
            diverged, self.diverged = self.diverged, None
            self._steps.learn_after(diverged, self.plan.signature, self.learner, self._before_it)

    # -- what it stands on ---------------------------------------------------------------------------------------------------

    def plan_for(self, batch: Batch) -> Plan:
        """The plan whose signature the batch fits within; the tightest one when several do.

        Raises:
            BatchError: no plan is for such a batch.
        """
        return self._plans.plan_for(batches.signature(batch), self.plan)

    def has_gradients(self) -> bool:
        """Whether a parameter has one, as none has between steps."""
        return has_gradients(self.model) if self.sharded is None else self.sharded.has_gradients()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return device_of(self.model)

    @property
    def records(self) -> list[StepRecord]:
        """A record of each step."""
        return self._history.records

    @records.setter
    def records(self, records: list[StepRecord]) -> None:
        self._history.records = records

    @property
    def steps(self) -> int:
        """Number of steps; an integration with a trainer sets the trainer's own count."""
        return self._history.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._history.steps = steps

    @property
    def reading(self) -> MeterReading | None:
        """The meter's reading of the last step; None where it was not metered. An integration with a trainer sets its own."""
        return self._history.reading

    @reading.setter
    def reading(self, reading: MeterReading | None) -> None:
        self._history.reading = reading

    def present(self, batch: Batch) -> list[torch.Tensor]:
        """Tensors that exist before a step and count against the budget."""
        if self.sharded is not None:
            parameters, held = self.sharded.parameters(), self.sharded.held()
        else:
            parameters, held = list(self.model.parameters()), []
        gradients = [*(p.grad for p in parameters if p.grad is not None), *held]
        copies = self._transactions.buffers.copies.values()
        others = [*self.model.buffers(), *copies, *batches.leaves(batch), *model_tensors(self.model)]
        others += loss_tensors(self.loss_fn)
        scaling = self.scaling.tensors() if self.scaling is not None else []
        streamed = [] if self.stream is None else [t for held in self.stream.buffers().values() for t in held]
        state = held_by_optimizer(self.optimizer) if self.optimizer is not None else []
        return [*parameters, *state, *others, *gradients, *scaling, *streamed]

    def report(self, title: str = "memfit", facts: Any = ()) -> Report:
        """What was predicted and what happened so far."""
        return Report(title, self.plan, self.rehearsal, tuple(self.records), self.frontier, tuple(facts))
