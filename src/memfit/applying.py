"""From a plan to the engine that runs it: the model frozen and converted, the optimizer arranged, layers streamed, as the plan says."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from memfit.batches import Batch, LossFunction, planned_size
from memfit.capture.source import model_digest
from memfit.capture.trace_source import TraceSource
from memfit.engine.engine import Engine
from memfit.engine.new_paths import Learner
from memfit.engine.plan_table import MOST_PLANS
from memfit.engine.size_watch import PathSizes
from memfit.errors import EngineError, InfeasibleError, InputError, PlanFileError
from memfit.offers import planning_for
from memfit.optimizers.alike import unwrapped
from memfit.pipelining.joining import join
from memfit.planner.by_hand import RecomputePlacement
from memfit.planning import Planning, origin_of, planning_of
from memfit.sharding.by_rows import check_by_rows
from memfit.sharding.same_model import check_same_model, check_same_optimizer
from memfit.sharding.sharded import ShardedModel
from memfit.sharding.ways import follow_device, group_of, shard
from memfit.step.arranging import arranged
from memfit.step.device import device_of
from memfit.step.given import (
    check_model,
    check_trains,
    loss_function,
    made_optimizer,
    optimizer_factory,
    refuse_made_optimizer,
)
from memfit.step.program import OptimizerFactory, default_optimizer
from memfit.storage.tiers import nearest_tier
from memfit.streaming.initialisation import Fill, reset
from memfit.streaming.stream import LayerStream
from memfit.techniques.choices import Choices, convert, converting, lasting
from memfit.techniques.conversions import conversion_of, remember
from memfit.techniques.freezing.freeze import freeze as freeze_for_good
from memfit.techniques.freezing.freeze import frozen
from memfit.techniques.sharding import at_rank
from memfit.values.bundle import TraceBundle, Weighting
from memfit.values.plan import Plan
from memfit.values.request import Request, TierBudget
from memfit.values.trace import Trace


def apply(
    plan: Plan,
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
    *,
    fill: Fill | None = None,
    lower_tier: str | Path | None = None,
) -> Engine:
    """An engine that trains this model as the plan says.

    Parameters that the plan freezes stay frozen in the model (`requires_grad` becomes false, their gradients are freed), and an optimizer made here does
    not get them.

    Args:
        plan: made in this process or loaded from a file.
        model: of the structure that the plan was made for; this very object is trained.
        loss_fn, optimizer: needed for a loaded plan; a plan from this process remembers its own. The optimizer may be an object or a function that makes it.
        fill: for a plan that streams layers of a model on the meta device: gives the modules their values one by one, so the model is never in memory as a
            whole.
        lower_tier: folder for everything that the plan offloads to disk; with a GPU also for streamed layers, which are in host memory otherwise. None for
            the default (`MEMFIT_OFFLOAD_DIR`). Pass the same folder to `plan`, whose predictions use the speed of its disk.

    Raises:
        PlanFileError: the plan is for another model.
        InputError: the model is compiled, or runs kernels of other packages (`memfit.plan` refuses it, too); or the optimizer is over another model.
        InfeasibleError: a lower tier does not have the space for what is offloaded to it.
        EngineError: no file can be created in the folder.
    """
    if not isinstance(plan, Plan):
        raise InputError(
            f"the plan is {type(plan).__name__}: give one that memfit.plan has made, or memfit.Plan.load(path) has read; the arguments are plan, model, "
            "loss_fn, optimizer, in this order"
        )
    check_model(model)
    if plan.choices.sharding:
        refuse_made_optimizer(optimizer)  # before the model is shared out
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = unwrapped(optimizer)
        check_trains(optimizer, model)
    have = _digest(model, plan.choices.frozen)
    planned = plan.model.split("/")  # before its first forward, and after it
    conversion = conversion_of(model, have)
    if conversion is not None and conversion.settings == converting(plan.choices):
        have = next((one for one in planned if one in {conversion.before, have}), have)
    if plan.choices.sharding and dist.is_initialized():
        # The rank that has planned may have had the first forward.
        check_same_model(model, plan.model if have in planned else have, plan.choices.sharding, _followed(plan))
    if have not in planned:
        raise PlanFileError(
            f"the plan is for a model with digest {plan.model}, this one has {have}: other modules, shapes, dtypes, frozen parameters or mode "
            "(train/eval). Plan again for this model"
        )
    check_kind(plan, model)
    planning, origin = planning_of(plan), origin_of(plan)
    source = origin.source if origin is not None else None
    absent = any(p.device.type == "meta" for p in model.parameters())
    if absent and not (plan.choices.streamed and fill is not None):
        raise InputError(
            "the model is on the meta device: it can be planned for, but to train it needs its tensors (model.to_empty, load weights)"
            + ("; as its layers are streamed, fill= can give them one by one" if plan.choices.streamed else "")
        )
    freeze_for_good(model, plan.choices.frozen)
    convert(plan.choices, model)
    remember(model, plan.choices, conversion.before if conversion is not None else have, model_digest(model))
    loss_fn = loss_function(loss_fn)
    loss_fn = loss_fn if loss_fn is not None or source is None else source.loss_fn
    given = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer_factory(optimizer, model)
    chosen: Any = given if given is not None else (source.optimizer if source is not None else None)
    sharded: ShardedModel | None = None
    if plan.choices.sharding:
        group = group_of(plan.choices.sharding)
        follow_device(device_of(model))
        in_stages = plan.pipeline is not None
        sharded = join(plan, model, loss_fn, group) if in_stages else shard(model, plan.choices.sharding, group)
        if chosen is not None:
            agreement, by_rows = sharded.agreement, sharded.shards_parameters

            def same(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
                check_same_optimizer(made, agreement)
                if by_rows:
                    check_by_rows(made)
                return arranged(made, plan.choices, model, lower_tier)

            chosen = sharded.optimizer(chosen, same)
    elif chosen is not None and not isinstance(chosen, torch.optim.Optimizer):
        chosen = made_optimizer(chosen, [p for p in model.parameters() if p.requires_grad])
    if chosen is not None and sharded is None:
        chosen = arranged(chosen, plan.choices, model, lower_tier)
    stream: LayerStream | None = None
    if plan.choices.streamed:  # Only now, when the optimizer has the parameters: streaming empties those of the blocks.
        stream = LayerStream(
            model, plan.choices.streamed, nearest_tier(device_of(model), lower_tier), fill=fill or reset
        )
        if chosen is not None:
            try:
                stream.adopt(chosen)
            except BaseException:
                stream.close()  # Puts the layers back into the user's model: no engine is returned that could do it.
                raise
    make = partial(Engine, plan, model, loss_fn, chosen, stream, folder=lower_tier, sharded=sharded)
    engine = make() if sharded is None or not plan.script.lower_bytes else _on_all_ranks(make, sharded)
    held: Engine = weakref.proxy(engine)  # by what the engine itself holds
    # What one rank would plan anew, all would have to.
    if planning is not None and source is not None and sharded is None:
        alike = source.optimizer or _like(optimizer, model)
        engine.planner = _planner_of(held, planning.request, planning.placement, alike)
        # What is placed by hand is placed on one path; streamed layers run in an order of their own.
        if planning.placement is None and not plan.choices.streamed:
            engine.learner = _Learner(held, alike)
    elif (
        plan.undoable and not plan.choices.streamed and (sharded is None or sharded.learns_paths)
    ):  # loaded, or made on another rank: what it was planned from is captured anew where it is left
        like = optimizer if optimizer is not None or source is None else source.optimizer
        engine.learner = _Learner(held, None if like is None else optimizer_factory(like, model))
    return engine


def _followed(plan: Plan) -> dict[str, Any]:
    """What of a plan all its ranks have to follow alike. What each runs again, and in how many micro-batches but for a pipeline's, is its own."""
    found = {**plan.choices.used, "clip_norm": plan.clip_norm, "offloading": bool(plan.script.lower_bytes)}
    if plan.pipeline is not None:
        found |= {"stages": plan.pipeline.ends, "micro_batches": plan.choices.micro_batches}
    return found


def check_kind(plan: Plan, model: nn.Module) -> None:
    """Check that a plan is for the kind of device that the model is on; on the meta device it is on none yet.

    Raises:
        InputError: it is for another one, whose kernels take other bytes.
    """
    here = device_of(model).type
    if here not in (plan.device_kind, "meta"):
        raise InputError(
            f"the plan is for {plan.device} ({plan.device_kind}) and the model is on {here}, whose kernels take other bytes: move the model there "
            f'(model.to("{plan.device_kind}")) before memfit.apply, or plan for the device that it is on (memfit.plan without device=)'
        )


def _like(optimizer: OptimizerFactory | torch.optim.Optimizer | None, model: nn.Module) -> OptimizerFactory | None:
    """What makes optimizers like the given one; None where it holds other parameters than the model's, too."""
    with suppress(InputError):
        return optimizer_factory(optimizer, model)
    return None


def _digest(model: nn.Module, patterns: Sequence[str]) -> str:
    """Digest of the model with these patterns frozen; of the model as it is where a pattern matches nothing."""
    with suppress(InputError), frozen(model, patterns):
        return model_digest(model)
    return model_digest(model)


# Looks at a step that see other draws of it, too, so that fewer are needed; they take eight times as long as one that sees the step alone.
LOOKS_AHEAD: Final = 4


class _Learner(Learner):
    """Captures a step and plans anew for all paths that are known of its shape, with the techniques of the plan so far.

    Args:
        engine: whose steps.
        make_optimizer: makes an optimizer like the engine's; None for memfit's own.
    """

    def __init__(self, engine: Engine, make_optimizer: OptimizerFactory | None) -> None:
        self._engine = engine
        self._make_optimizer = make_optimizer
        self._known: dict[str, Trace] = {}  # of the step, by the signature of its batch
        self._looks: Counter[str] = Counter()
        self._sizes: dict[int, tuple[Plan, Sequence[PathSizes]]] = {}  # by the identity of a plan

    def __call__(self, batch: Batch, known: tuple[Plan, ...]) -> tuple[Plan, ...]:
        engine = self._engine
        # What rank 0 has planned from is another rank's step.
        own = [plan for plan in known if engine.sharded is None or plan is not engine.plan]
        planning = next((found for plan in own if (found := planning_of(plan)) is not None), None)
        if (
            planning is None and not known[0].undoable
        ):  # a copy of another shape's, where no plan of its own could be made
            return known
        optimizer, how, signature = engine.optimizer, known[0].choices, known[0].signature
        parts = -(-planned_size(signature) // how.micro_batch_size)  # of one batch of a loader
        source = TraceSource(
            engine.model,
            batch,
            engine.loss_fn,
            None if optimizer is None else (self._make_optimizer or default_optimizer),
            known[0].clip_norm,
            trained_elsewhere=frozenset(
                name for name, p in engine.model.named_parameters() if optimizer is not None and p in optimizer.state
            ),
            forwards_before=0,
            loader_batches=max(1, how.micro_batches // parts),
            draws=self._looks[signature] < LOOKS_AHEAD,
        )
        self._looks[signature] += 1
        with nullcontext() if engine.sharded is None else engine.sharded.by_itself():
            if planning is None:
                return self._first_of(source, known)
            made, self._known[signature] = planning.knowing(
                known, self._known.get(signature), engine.plan.budget_bytes, source.trace_of
            )
        return made

    def _first_of(self, source: TraceSource, known: tuple[Plan, ...]) -> tuple[Plan, ...]:
        """The plans of a shape where all were loaded from files, and one for what the step does now."""
        (loaded, *_), budget_bytes = known, self._engine.plan.budget_bytes
        planning = self._loaded(source, loaded) if self._engine.sharded is None else self._of_rank(source, loaded)
        try:
            made = planning.plan(budget_bytes)
        except InfeasibleError:
            made = planning.plan(planning.smallest()[0])
        return *known, made

    def _loaded(self, source: TraceSource, loaded: Plan) -> Planning:
        """By the step of now, with the techniques of a plan that another process made."""
        budget_bytes = self._engine.plan.budget_bytes
        asked = Request(
            budget=TierBudget(budget_bytes, budget_bytes), freeze=loaded.choices.frozen, clip_norm=loaded.clip_norm
        )
        fixed = asked.fixing(**lasting(loaded.choices), micro_batches=loaded.choices.micro_batches)
        return planning_for(source, fixed).following(loaded)

    def _of_rank(self, source: TraceSource, plan: Plan) -> Planning:
        """By the step of now as this rank has it. How losses add up stays as all ranks have it."""
        sharded, how = self._engine.sharded, plan.choices
        assert sharded is not None, "it is one of several"
        here = how.but(sharding=at_rank(how.sharding, sharded.agreement.rank))
        own = Choices(techniques=here.techniques, micro_batches=how.micro_batches)
        return Planning(replace(TraceBundle.of(source.trace_of(own)), weighting=Weighting(how.weights)))

    def sizes_of(self, plan: Plan) -> Sequence[PathSizes]:
        if id(plan) not in self._sizes:
            planning = planning_of(plan)
            self._sizes[id(plan)] = plan, () if planning is None else planning.known_sizes(plan)
            for number in list(self._sizes)[:-MOST_PLANS]:
                del self._sizes[number]
        return self._sizes[id(plan)][1]

    def can_begin_anew(self, plan: Plan) -> bool:
        return plan.undoable


def _planner_of(
    engine: Engine, request: Request, placement: RecomputePlacement | None, make_optimizer: OptimizerFactory | None
) -> Callable[[Batch], Plan]:
    """A function that makes a plan for another batch, under the budget and the constraints of the engine's plan."""

    def made(batch: Batch) -> Plan:
        optimizer = None if engine.optimizer is None else (make_optimizer or default_optimizer)
        first = engine.plan
        # The gradient scaler and the optimizer are kept, so techniques that shaped them stay fixed; what was only allowed is decided by now.
        asked = replace(
            request.fixing(**lasting(first.choices)),
            budget=TierBudget(first.budget_bytes, first.budget_bytes),
            allow=(),
            freeze=first.choices.frozen,
            clip_norm=first.clip_norm,
            device=None,
            folder=None if engine.folder is None else str(engine.folder),
        )
        source = TraceSource(engine.model, batch, engine.loss_fn, optimizer, first.clip_norm)
        planning = planning_for(source, asked, placement)
        return planning.plan() if placement is None else planning.plan_by_hand()  # Placed by hand, it stays so.

    return made


def _on_all_ranks(make: Callable[[], Engine], sharded: ShardedModel) -> Engine:
    """An engine that reserves space on lower tiers: on all ranks, or on none.

    Raises:
        InfeasibleError, EngineError: one rank has no space, or can create no file; on all ranks, naming that one.
    """
    engine: Engine | None = None
    failed: InfeasibleError | EngineError | None = None
    try:
        engine = make()
    except (InfeasibleError, EngineError) as error:
        failed = error
    first = sharded.agreement.others_error(failed)
    if first is not None:
        raise EngineError(f"rank {first[0]} cannot offload what the plan offloads, so no rank has begun: {first[1]}")
    assert engine is not None, "no rank has failed"
    return engine
