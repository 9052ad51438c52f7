"""The public functions that take a model: plan, recompute, record, frontier, apply, fit, measure. Those that take plans and bundles are in `planning`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture.source import model_digest
from memfit.capture.trace_source import TraceSource
from memfit.engine import fabric as through_fabric
from memfit.engine.engine import Engine
from memfit.errors import InfeasibleError, InputError, PlanFileError
from memfit.lower_tiers import requested
from memfit.offers import planning_for
from memfit.planner.by_hand import Placement
from memfit.planning import changed, planning_of, replan, smallest_budget
from memfit.progress import Progress, tell
from memfit.rehearsal import rehearse
from memfit.step.arranging import arranged
from memfit.step.buffers import norm_statistics
from memfit.step.device import device_of
from memfit.step.program import OptimizerFactory
from memfit.storage.tiers import tier_below
from memfit.streaming.initialisation import Fill, reset
from memfit.streaming.stream import LayerStream
from memfit.techniques.choices import Choices, convert, converting, lasting
from memfit.techniques.conversions import conversion_of, remember
from memfit.techniques.freezing.freeze import freeze as freeze_for_good
from memfit.techniques.freezing.freeze import frozen
from memfit.units import format_bytes, parse_bytes
from memfit.values.bundle import TraceBundle
from memfit.values.plan import Plan
from memfit.values.prediction import Prediction
from memfit.values.report import FrontierPoint, StepRecord
from memfit.values.request import Budget, Request, TierBudget
from memfit.values.script import Script

REPAIR_ROUNDS: Final = 3


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with torch's defaults, fused: one kernel, no transient copies."""
    return torch.optim.AdamW(parameters, fused=True)


def plan(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    budget: Budget = "80%",
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    host_budget: Budget | None = None,
    disk_budget: Budget | None = None,
    allow: Sequence[str] = (),
    freeze: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    device: str | None = None,
    lower_tier: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """How to train inside `budget` bytes, and what it will take; nothing is trained.

    Args:
        model: any module, in the mode it is to be trained in; it may be on the meta device.
        sample: one whole batch of an optimizer step, of the largest shape that will come: a tensor, tuple or mapping.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss; None means `model(**sample).loss`.
        budget: bytes the step may hold in all: parameters, buffers, gradients, optimizer state, the batch, activations, temporaries. "8GiB",
            "8GB", an int, or a share of the device's memory such as "80%".
        optimizer: makes the optimizer from the parameters; None when only gradients are computed.
        host_budget: bytes on the tier below that activations and optimizer state may be moved to: the host's memory for a GPU (None: as much as it takes), the
            disk for a CPU (None: nothing is moved). 0: nothing is moved.
        disk_budget: bytes on the disk below a GPU's host, for activations that `host_budget` has no room for; copies pass through a few MiB of it. None or 0:
            nothing is moved there. A CPU has its disk right below it, where `host_budget` counts.
        allow: what may change results: "bf16" and "fp16" (forward and loss under autocast, fp16 with a gradient scaler), "8bit" (optimizer state);
            and "in_backward": the same results, but no gradients are there after a step.
        freeze: patterns of module paths that are not trained, as "embeddings" or "encoder.layer.[0-3]" (`memfit.techniques.freezing`). The model is left as it
            is; `apply` freezes it.
        fixed: choices that are the user's, by the name of their field in `Choices`: {"micro_batches": 4}.
        clip_norm: global gradient norm to clip to.
        device: None for the device of the model, or the name of a GPU that is not here ("rtx4090"): then seconds are estimated.
        lower_tier: folder on the disk that the plan is to count on, as for `apply`; None for the one that is set.
        progress: called with what is being done and the share done.

    Raises:
        InfeasibleError: nothing fits; carries `minimum_bytes` and ways out.
        BudgetError: the budget cannot be read.
        InputError: something else about the input.
        CaptureError: the step cannot be predicted.
    """
    request = requested(
        model,
        budget=budget,
        host_budget=host_budget,
        disk_budget=disk_budget,
        allow=allow,
        freeze=freeze,
        fixed=fixed,
        clip_norm=clip_norm,
        device=device,
        folder=lower_tier,
    )
    return _planned(model, sample, loss_fn, optimizer, request, progress)


def _planned(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    request: Request,
    progress: Progress | None = None,
) -> Plan:
    planning = planning_for(
        TraceSource(model, sample, loss_fn, optimizer, request.clip_norm, request.device, progress), request
    )
    tell(progress, "planning", 0.9)
    found = planning.plan()
    tell(progress, "planned", 1.0)
    return found


def recompute(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    keep: str | Sequence[str] | None = None,
    every: int | str | None = None,
    activation_bytes: Budget | None = None,
    fixed: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """A plan in which the user says what is recomputed, as with `torch.utils.checkpoint`; explained, predicted, saved and applied like any other.

    Activations are kept or computed again, never moved: what is moved to a tier below is searched for, by `plan` with its `host_budget` and `disk_budget`.

    Args:
        keep: patterns of module paths: what flows out of these modules is kept, and whatever else can be rebuilt is dropped, up to the last of them. `*`
            stands for one name in a path, `**` for any number, and leading names may be left out: `["encoder.layer.*"]`.
        every: "block" to keep only what goes into each of the model's repeated blocks, n for each n-th, "sqrt" for about the square root of their number
            (Chen et al. 2016, arXiv:1604.06174). The blocks are found: neighbours in one list, alike, each reading what the one before it made.
        activation_bytes: bytes that all that forward makes may take at any moment of the step; where to recompute is then searched. "2GiB" or an int.
        fixed: {"micro_batches": n}; the batch is whole otherwise.
        model, sample, loss_fn, optimizer, clip_norm, device, progress: as for `plan`.

    Returns:
        The plan. Its budget is what it takes; `plan.gap` says how much faster the best plan in as many bytes could be.

    Raises:
        InputError: not exactly one of keep, every and activation_bytes; a pattern that matches no module; no repeated blocks.
        InfeasibleError: so few bytes of activations cannot be reached.
        CaptureError: as for `plan`.
    """
    placement = _placement(keep, every, activation_bytes)
    if (fixed or {}).get("streamed"):
        raise InputError(
            f"fixed streamed={(fixed or {})['streamed']!r} cannot be honoured by recompute: streamed layers are computed again as wholes already, so there is "
            "nothing to place. Call memfit.plan"
        )
    request = requested(model, fixed={"micro_batches": 1, **(fixed or {})}, clip_norm=clip_norm, device=device)
    source = TraceSource(model, sample, loss_fn, optimizer, clip_norm, device, progress)
    planning = planning_for(source, request, placement)
    tell(progress, "planning", 0.9)
    made = planning.plan_by_hand()
    tell(progress, "planned", 1.0)
    return made


def _placement(keep: str | Sequence[str] | None, every: int | str | None, activation_bytes: Budget | None) -> Placement:
    asked = {"keep": keep, "every": every, "activation_bytes": activation_bytes}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) != 1:
        raise InputError(
            f"recompute was given {' and '.join(given) or 'nothing to go by'}: exactly one of keep (module paths), every "
            '("block", a number of blocks, "sqrt") and activation_bytes is needed'
        )
    if keep is not None:
        patterns = (keep,) if isinstance(keep, str) else tuple(keep)
        if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise InputError(f'keep={keep!r}: module paths are needed, such as ["encoder.layer.*"]')
        return Placement(keep=patterns)
    if every is not None:
        number = 1 if every == "block" else every
        if number != "sqrt" and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise InputError(f'every={every!r}: "block", "sqrt" or a number of blocks from 1 on is needed')
        return Placement(every=number)
    assert activation_bytes is not None
    return Placement(activation_bytes=parse_bytes(activation_bytes))


def record(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    micro_batches: int | None = None,
    host_budget: Budget | None = None,
    disk_budget: Budget | None = None,
    allow: Sequence[str] = (),
    freeze: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> TraceBundle:
    """Training steps written down, with seconds: all that plans are made from. `TraceBundle.save` keeps it; `replan` plans from it without the model.

    Every step that `plan` might weigh under these constraints is captured, so that plans from the bundle are those that `plan` makes. That takes a capture for
    each number of micro-batches (powers of two) and each combination of techniques; fix what is known already.

    Args:
        micro_batches: their number, to which plans keep; None for all that `plan` would weigh.
        model, sample, loss_fn, optimizer, host_budget, disk_budget, allow, freeze, fixed, clip_norm, device, progress: as for `plan`. The speed of the links
            is the one they have here.

    Returns:
        The bundle; `bundle.trace` is the baseline, the step as it is.

    Raises:
        SplitError: the batch does not split without changing the result, and `micro_batches` wants it split.
        InputError, CaptureError: as for `plan`.
    """
    pinned = {} if micro_batches is None else {"micro_batches": micro_batches}
    request = requested(
        model,
        host_budget=host_budget,
        disk_budget=disk_budget,
        allow=allow,
        freeze=freeze,
        fixed={**pinned, **(fixed or {})} if isinstance(fixed, Mapping | None) else fixed,
        clip_norm=clip_norm,
        device=device,
    )
    source = TraceSource(model, sample, loss_fn, optimizer, clip_norm, device, progress)
    return planning_for(source, request).complete()


def frontier(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    points: int = 9,
    host_budget: Budget | None = None,
    disk_budget: Budget | None = None,
    allow: Sequence[str] = (),
    freeze: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, ...]:
    """Plans from plain down to the smallest that fits: bytes against seconds.

    Args:
        points: number of budgets, at least 2; the first is plain, the last the smallest found.
        model, sample, loss_fn, optimizer, host_budget, disk_budget, allow, freeze, fixed, clip_norm, device, progress: as for `plan`.

    Returns:
        Plans in order of falling peak, each no slower than any with a smaller peak.
    """
    request = requested(
        model,
        host_budget=host_budget,
        disk_budget=disk_budget,
        allow=allow,
        freeze=freeze,
        fixed=fixed,
        clip_norm=clip_norm,
        device=device,
    )
    source = TraceSource(model, sample, loss_fn, optimizer, clip_norm, device, progress)
    return planning_for(source, request).frontier(max(2, points), progress)


def frontier_points(plans: Iterable[Plan]) -> tuple[FrontierPoint, ...]:
    """Plans of a frontier as points for the report."""
    return tuple(
        FrontierPoint(
            p.budget_bytes,
            p.prediction.peak_bytes,
            p.prediction.step_seconds,
            p.prediction.bound_seconds,
            p.choices.micro_batches,
        )
        for p in plans
    )


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

    What the plan freezes is frozen in the model from here on (`requires_grad` is false, gradients it had are let go), and an optimizer made here is
    made without it.

    Args:
        plan: made in this process or loaded.
        model: of the structure the plan was made for; the user's own object is trained.
        loss_fn, optimizer: needed for a loaded plan; a plan from this process remembers its own. The optimizer may be a factory or made already.
        fill: of a plan that streams layers and a model on the meta device: gives each module its values, so that the model is never there as a whole.
        lower_tier: folder for all that the plan offloads to disk, and on a GPU for its streamed layers, which are in host memory else; None for the folder
            that is set (`MEMFIT_OFFLOAD_DIR`). Hand the same one to `plan`, whose seconds are those of its disk.

    Raises:
        PlanFileError: the plan is for another model.
        InfeasibleError: a lower tier has no space for what is offloaded to it.
        EngineError: no file can be made in the folder.
    """
    have = _digest(model, plan.choices.frozen)
    conversion = conversion_of(model, have)
    if conversion is not None and conversion.settings == converting(plan.choices):
        have = plan.model if plan.model in {conversion.before, have} else have
    if have != plan.model:
        raise PlanFileError(
            f"the plan is for a model with digest {plan.model}, this one has {have}: other modules, shapes, dtypes, frozen parameters or mode "
            "(train/eval). Plan again for this model"
        )
    planning = planning_of(plan)
    source = planning.source if planning is not None else None
    absent = any(p.device.type == "meta" for p in model.parameters())
    if absent and not (plan.choices.streamed and fill is not None):
        raise InputError(
            "the model is on the meta device: it can be planned for, but to train it needs its tensors (model.to_empty, load weights)"
            + ("; as its layers are streamed, fill= can give them one by one" if plan.choices.streamed else "")
        )
    freeze_for_good(model, plan.choices.frozen)
    convert(plan.choices, model)
    remember(model, plan.choices, conversion.before if conversion is not None else have, model_digest(model))
    chosen: Any = optimizer if optimizer is not None else (source.optimizer if source is not None else None)
    if chosen is not None and not isinstance(chosen, torch.optim.Optimizer):
        chosen = chosen(p for p in model.parameters() if p.requires_grad)
    if chosen is not None:
        chosen = arranged(chosen, plan.choices, model, lower_tier)
    loss_fn = loss_fn if loss_fn is not None or source is None else source.loss_fn
    stream: LayerStream | None = None
    if plan.choices.streamed:  # after the optimizer has seen the parameters: from now on those of the blocks are empty
        stream = LayerStream(model, plan.choices.streamed, tier_below(device_of(model), lower_tier), fill=fill or reset)
        if chosen is not None:
            try:
                stream.adopt(chosen)
            except BaseException:
                stream.close()  # puts the layers back into the user's model: nobody gets the engine that knows where they are
                raise
    engine = Engine(plan, model, loss_fn, chosen, stream, folder=lower_tier)
    if planning is not None and source is not None:
        engine.planner = _planner_of(engine, planning.request, planning.placement, source.optimizer)
    return engine


def _digest(model: nn.Module, patterns: Sequence[str]) -> str:
    """Of the model with what the patterns mean frozen; as it is where they mean nothing in it."""
    with suppress(InputError), frozen(model, patterns):
        return model_digest(model)
    return model_digest(model)


def _planner_of(
    engine: Engine, request: Request, placement: Placement | None, make_optimizer: OptimizerFactory | None
) -> Callable[[Batch], Plan]:
    """What makes a plan for another batch, under the budget and the constraints of the engine's plan."""

    def made(batch: Batch) -> Plan:
        optimizer = None if engine.optimizer is None else (make_optimizer or default_optimizer)
        first = engine.plan
        # The scaler goes on, and so does the optimizer as it was made. What was merely allowed is decided.
        asked = replace(
            request.fixing(**lasting(first.choices)),
            budget=TierBudget(first.budget_bytes, first.budget_bytes),
            allow=(),
            freeze=first.choices.frozen,
            clip_norm=first.clip_norm,
            device=None,
            folder=None if engine.folder is None else str(engine.folder),
        )
        if placement is None:
            return _planned(engine.model, batch, engine.loss_fn, optimizer, asked)
        # Placed by hand, it stays so.
        source = TraceSource(engine.model, batch, engine.loss_fn, optimizer, first.clip_norm)
        return planning_for(source, asked, placement).plan_by_hand()

    return made


def fit(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    budget: Budget = "80%",
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    host_budget: Budget | None = None,
    disk_budget: Budget | None = None,
    allow: Sequence[str] = (),
    freeze: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    lower_tier: str | Path | None = None,
    progress: Progress | None = None,
    fabric: Any = None,
) -> Engine:
    """Plan, apply, rehearse one real step under the meter, and repair the plan when the measurement is above the budget.

    The rehearsal leaves parameters, buffers, optimizer and generators as they were. Arguments and errors are those of `plan` and
    `apply`.

    Args:
        fabric: a `lightning.Fabric`: model and optimizer are set up through it, and steps run its backward and its update (`memfit.engine.fabric`).

    Raises:
        InfeasibleError: also when no repaired plan passes its rehearsal.
    """
    if fabric is not None:
        through_fabric.refuse(fabric, model, allow, fixed)
        model, sample = model.to(fabric.device), fabric.to_device(sample)
        fixed = {**through_fabric.FIXED, **(fixed or {})} if optimizer is not None else fixed
    request = requested(
        model,
        budget=budget,
        host_budget=host_budget,
        disk_budget=disk_budget,
        allow=allow,
        freeze=freeze,
        fixed=fixed,
        clip_norm=clip_norm,
        folder=lower_tier,
    )
    made = _planned(model, sample, loss_fn, optimizer, request, progress)
    engine = apply(made, model, lower_tier=lower_tier)
    if fabric is not None:
        through_fabric.set_up(engine, fabric)
    try:
        rehearsed(engine, sample, progress)
    except BaseException:
        if engine.stream is not None:
            engine.stream.close()  # as in `apply`
        raise
    return engine


def rehearsed(engine: Engine, sample: Batch, progress: Progress | None = None, *, loader_batches: int = 1) -> None:
    """Rehearse, and follow another plan where more was measured than the budget; raises what `fit` does. Arguments as for `rehearse`."""
    made = engine.plan
    planning = planning_of(made)
    budget_bytes = made.budget_bytes
    target = budget_bytes
    for number in range(1, REPAIR_ROUNDS + 1):
        tell(progress, "rehearsing one step", 0.0)
        engine.rehearsal = replace(rehearse(engine, sample, loader_batches), rounds=number)
        excess = engine.rehearsal.measured_peak_bytes - budget_bytes
        if excess <= 0 or number == REPAIR_ROUNDS:
            break
        target -= excess + engine.rehearsal.measured_peak_bytes // 1000
        assert planning is not None, "an engine whose plan was made here is rehearsed"
        with engine.gathered():
            again = planning.plan(target)
        repaired = changed(
            again,
            budget_bytes=budget_bytes,
            notes=(
                *made.notes,
                f"the rehearsal measured {format_bytes(excess)} above the budget; planned again for {format_bytes(target)}",
            ),
        )
        engine.replace_plan(repaired)
    if engine.rehearsal is not None and engine.rehearsal.measured_peak_bytes > budget_bytes:
        measured = engine.rehearsal.measured_peak_bytes
        raise InfeasibleError(
            f"after {REPAIR_ROUNDS} rehearsals the measured peak is still {format_bytes(measured)}, above the budget of {format_bytes(budget_bytes)}: "
            "the model's memory changes from run to run; allow for it with a larger budget",
            budget_bytes=budget_bytes,
            minimum_bytes=measured,
        )


def measure(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    clip_norm: float | None = None,
) -> StepRecord:
    """One plain step under the meter, everything put back: what PyTorch alone needs, in bytes and seconds."""
    nothing = Plan(
        budget_bytes=1 << 62,
        choices=Choices(1, batches.size(sample)),
        script=Script(),
        prediction=Prediction(1, 1, 0.0, 0.0, 0.0, "measured"),
        signature=batches.signature(sample),
        model=model_digest(model),
        device=str(device_of(model)),
        torch_version=torch.__version__,
        clip_norm=clip_norm,
        changed_buffers=norm_statistics(model),
    )
    engine = apply(nothing, model, loss_fn, optimizer)
    rehearsal = rehearse(engine, sample)
    return StepRecord(1, float("nan"), rehearsal.measured_seconds, 1, rehearsal.measured_peak_bytes)


__all__ = [
    "Budget",
    "Progress",
    "apply",
    "fit",
    "frontier",
    "frontier_points",
    "measure",
    "plan",
    "recompute",
    "record",
    "rehearse",
    "rehearsed",
    "replan",
    "smallest_budget",
]
