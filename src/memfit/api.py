"""The public functions that take a model: plan, recompute, record, frontier, fit, measure. `apply` is in `applying`; what takes plans is in `planning`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from memfit import batches
from memfit.applying import apply
from memfit.batches import Batch, LossFunction
from memfit.capture.source import model_digest
from memfit.capture.trace_source import TraceSource, machine_of
from memfit.capture.values_read import rows_alone, spread
from memfit.devices import plan_sharded, several_devices, share_of
from memfit.engine import fabric as through_fabric
from memfit.engine.engine import Engine
from memfit.errors import InfeasibleError, InputError
from memfit.hardware.machine_file import Devices, named_devices
from memfit.lower_tiers import requested
from memfit.offers import planning_for
from memfit.planner.by_hand import RecomputePlacement
from memfit.planning import replan, smallest_budget
from memfit.progress import Progress, tell
from memfit.ranks import check_world, fit_together, refuse_one_device
from memfit.rehearsal import rehearse, rehearsed
from memfit.remedies.search import with_ways_out
from memfit.sharding.sharded import taken_back
from memfit.sharding.ways import refuse_wrapped
from memfit.step.buffers import norm_statistics
from memfit.step.device import device_of
from memfit.step.given import check_closure, check_sample, loss_function, refuse_made_optimizer
from memfit.step.program import OptimizerFactory, default_optimizer
from memfit.techniques.choices import Choices
from memfit.values.bundle import TraceBundle
from memfit.values.plan import Plan
from memfit.values.prediction import Prediction
from memfit.values.report import FrontierPoint, StepRecord
from memfit.values.request import Budget, Request
from memfit.values.script import Script
from memfit.window import LOOKED_AT, of_loader, plan_window

_ONE_DEVICE: Final = (None, 1, "1")  # `devices=` that share nothing out


def plan(
    model: nn.Module,
    sample: Batch = None,
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
    loader_batches: int = 1,
    devices: Devices | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan how to train inside `budget` bytes, and predict bytes and seconds of a step; nothing is trained.

    Args:
        model: any module, in the mode it is to be trained in; it may be on the meta device.
        sample: one whole batch of an optimizer step, of the largest shape that will come: a tensor, tuple or mapping.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss; None means `model(**sample).loss`. Or a criterion of torch, such as `nn.CrossEntropyLoss()`,
            for batches that are pairs (input, target).
        budget: bytes the step may hold in all: parameters, buffers, gradients, optimizer state, the batch, activations, temporaries. "8GiB",
            "8GB", an int, or a share of the device's memory such as "80%".
        optimizer: makes the optimizer from the parameters; None when only gradients are computed. A class or a name of `torch.optim` ("AdamW") will do, and an
            optimizer of this model, which `fit` then steps.
        host_budget: bytes of the nearest lower memory tier to which activations, optimizer state and streamed layers may be offloaded: host memory for a GPU
            (None: no limit), the disk for a CPU (None: nothing is offloaded). 0: nothing is offloaded. With `devices`, of each one; a share ("50%") is then one
            of a device's part of its computer's.
        disk_budget: for a GPU, together with `host_budget`, bytes of the disk to which activations that do not fit into `host_budget`, or the optimizer's
            state, may be offloaded; copies pass through a few MiB of host memory. None or 0: no disk. On a CPU `host_budget` is the limit for the disk.
        allow: what may change results: "bf16" and "fp16" (forward and loss under autocast, fp16 with a gradient scaler), "8bit" (optimizer state);
            and "in_backward": the same results, but parameters have no gradients after a step.
        freeze: patterns of module paths that are not trained, as "embeddings" or "encoder.layer.[0-3]" (`memfit.techniques.freezing`). The model is left as it
            is; `apply` freezes it.
        fixed: choices that the search must not change, by the name of their field in `Choices`: {"micro_batches": 4}; None leaves one open.
        clip_norm: global gradient norm to clip to.
        device: None for the device of the model, or the name of a GPU that this computer does not have ("rtx4090"): then seconds are
            estimated, and bytes are those of CUDA's kernels, which the plan's notes name.
        lower_tier: folder to offload to, whose disk's speed and free space the plan uses, as for `apply`; None for the default (`MEMFIT_OFFLOAD_DIR`).
        loader_batches: how many batches of a loader the sample's are, where `engine.accumulate` takes them from an iterator, one on the device at a time; 1
            where the sample is there as a whole.
        devices: several of them, one for each rank (1 is as None): 4, "4x24GiB", "4xh100", "4x24GiB@50GB/s" (the links between them), "2x8xh100" (nodes of
            eight), the path of a machine file (`memfit.hardware.machine_file`), or a `Topology`. The sample is then the batch of one rank and the budget that
            of one device. Data parallelism, ZeRO 1, 2 and 3, and pipelines are compared; `fixed={"sharding": "zero2"}` takes one, "pipeline" or "1f1b/2x2"
            (two stages, two pipelines) pipelines, "1f1b/2x2+zero1" those in which each stage's optimizer state is shared out, and "interleaved/4" one of eight
            stages on four devices.
        progress: called with a description of the current work and the share done (0 to 1). Where several ways are tried, the description says how many
            others may follow and how long that takes at most, by those so far.

    Raises:
        InfeasibleError: nothing fits; carries `minimum_bytes` and ways out that were tried.
        BudgetError: the budget is not a number of bytes.
        InputError: another argument is invalid.
        CaptureError: the step cannot be captured, so it cannot be predicted.
    """
    asked: dict[str, Any] = {
        "host_budget": host_budget,
        "disk_budget": disk_budget,
        "allow": allow,
        "freeze": freeze,
        "fixed": fixed,
        "clip_norm": clip_norm,
    }
    if devices not in _ONE_DEVICE:
        return _planned_among(
            devices, model, sample, loss_fn, budget, optimizer,
            device=device, lower_tier=lower_tier, loader_batches=loader_batches, progress=progress, **asked,
        )  # fmt: skip
    request = requested(model, budget=budget, device=device, folder=lower_tier, **asked)
    return _planned(model, sample, loss_fn, optimizer, request, progress, loader_batches)[0]


def _planned_among(
    devices: Any,
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    budget: Budget,
    optimizer: OptimizerFactory | None,
    others: Sequence[Batch] = (),
    *,
    device: str | None = None,
    lower_tier: str | Path | None = None,
    loader_batches: int = 1,
    progress: Progress | None = None,
    **asked: Any,
) -> Plan:
    """The plan for several devices; arguments and errors are those of `plan`, and `others` are the samples of other ranks."""
    refuse_wrapped(model)
    refuse_made_optimizer(optimizer)
    here = machine_of(model, device)
    topology = several_devices(devices, here)
    device = device if topology.devices[0].name == here.name else topology.devices[0].name
    request = requested(
        model,
        sharers=topology.most_on_a_computer,
        budget=share_of(topology, budget),
        device=device,
        folder=lower_tier,
        **asked,
    )
    if loader_batches != 1:
        raise InputError(
            "loader_batches and devices do not go together yet: give a sample that holds all of a rank's step"
        )
    source = TraceSource(model, sample, loss_fn, optimizer, request.clip_norm, device, progress, network=topology)
    if others:
        source.other_samples = lambda _: [*rows_alone(sample), *(others[n] for n in spread(len(others), LOOKED_AT))]
    return plan_sharded(source, request, topology)


def _planned(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    request: Request,
    progress: Progress | None = None,
    loader_batches: int = 1,
) -> tuple[Plan, Batch]:
    """The plan, and the batch that it is for: one of the loader's where a step takes several."""
    sharding = request.fixed.get("sharding")
    if sharding and "/" not in str(sharding):  # "zero3/2" says among how many
        raise InputError(
            f'fixed sharding={sharding!r} shares a step out among several devices, and there is one: name them, such as devices="4x24GiB", or leave it out'
        )
    if loader_batches != 1:
        window, asked = of_loader(model, sample, loss_fn, optimizer, loader_batches, request)
        found = plan_window(window, asked, progress)
        tell(progress, "planned", 1.0)
        return found, window.sample
    source = TraceSource(model, sample, loss_fn, optimizer, request.clip_norm, request.device, progress)
    planning = planning_for(source, request)
    tell(progress, "planning", 0.9)
    try:
        found = planning.plan()
    except InfeasibleError as error:
        raise with_ways_out(error, planning, source, request) from None
    tell(progress, "planned", 1.0)
    return found, sample


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

    Activations are kept or recomputed, never offloaded; for offloading call `plan` with `host_budget` or `disk_budget`.

    Args:
        keep: patterns of module paths: the outputs of these modules are kept, and everything else up to the last of them that can be recomputed is dropped.
            `*` stands for one name in a path, `**` for any number, and leading names may be left out: `["encoder.layer.*"]`.
        every: "block" to keep only what goes into each of the model's repeated blocks, n for each n-th, "sqrt" for about the square root of their number
            (Chen et al. 2016, arXiv:1604.06174). Blocks are found automatically: neighbours in one list, alike, each reading the output of the one before.
        activation_bytes: limit on the bytes of all activations at any moment of the step; where to recompute is then searched. "2GiB" or an int.
        fixed: {"micro_batches": n}; the batch is whole otherwise.
        model, sample, loss_fn, optimizer, clip_norm, device, progress: as for `plan`.

    Returns:
        The plan. Its budget is its own predicted peak; `plan.gap` says how much faster the best plan in as many bytes could be.

    Raises:
        InputError: not exactly one of keep, every and activation_bytes; a pattern that matches no module; no repeated blocks.
        InfeasibleError: no plan holds as few bytes of activations.
        CaptureError: as for `plan`.
    """
    loss_fn = loss_function(loss_fn)
    placement = RecomputePlacement.of(keep, every, activation_bytes)
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
    """Capture the training steps that plans are made from, with seconds. `TraceBundle.save` stores them; `replan` plans from them without the model.

    Every step that `plan` might consider under these constraints is captured, so plans made from the bundle equal those that `plan` makes. That takes one
    capture for each number of micro-batches (powers of two) and each combination of techniques; fix the choices that you know already to save time.

    Args:
        micro_batches: their number in all plans; None for all numbers that `plan` would consider.
        model, sample, loss_fn, optimizer, host_budget, disk_budget, allow, freeze, fixed, clip_norm, device, progress: as for `plan`. The speed of the links
            is measured on this computer.

    Returns:
        The bundle; `bundle.trace` is the baseline, the step as the user has it.

    Raises:
        SplitError: `micro_batches` asks for a split batch, and splitting would change the result.
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
    """Plans for budgets from the peak of plain PyTorch down to the smallest for which a plan is found: bytes against seconds.

    Args:
        points: number of budgets, at least 3; the first is the peak of plain PyTorch, the last the smallest found.
        model, sample, loss_fn, optimizer, host_budget, disk_budget, allow, freeze, fixed, clip_norm, device, progress: as for `plan`.

    Returns:
        Plans by decreasing peak, each no slower than any with a smaller peak.
    """
    if not isinstance(points, int):
        raise InputError(f"points={points!r}: a whole number of at least 3 is needed")
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
    return planning_for(source, request).frontier(max(3, points), progress)


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


def fit(
    model: nn.Module,
    sample: Batch = None,
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
    loader_batches: int = 1,
    devices: Devices | None = None,
    progress: Progress | None = None,
    fabric: Any = None,
) -> Engine:
    """Plan, apply, rehearse one real step under the meter, and repair the plan when the measurement is above the budget.

    The rehearsal leaves parameters, buffers, optimizer and generators as they were. Arguments and errors are those of `plan` and
    `apply`.

    Args:
        devices: as for `plan`; in each of as many processes that torchrun has started, with or without a process group: rank 0 plans, all join and rehearse
            together, and where one rank measures more than its budget all raise. The sample is this rank's part of the batch.
        fabric: a `lightning.Fabric`: model and optimizer are set up through it, and steps run its backward and its update (`memfit.engine.fabric`).

    Raises:
        InfeasibleError: also when no repaired plan passes its rehearsal.
    """
    asked: dict[str, Any] = {
        "host_budget": host_budget,
        "disk_budget": disk_budget,
        "allow": allow,
        "freeze": freeze,
        "fixed": fixed,
        "clip_norm": clip_norm,
    }
    if devices not in _ONE_DEVICE:
        if fabric is not None:
            raise InputError("devices and fabric do not go together: Fabric launches and wraps the ranks itself")
        taken_back(model)
        refuse_wrapped(model)
        check_world(len(named_devices(devices, machine_of(model, None)).devices))
        make: Any = partial(_planned_among, devices, model, sample, loss_fn, budget, optimizer, **asked)
        make = partial(make, lower_tier=lower_tier, loader_batches=loader_batches, progress=progress)
        return fit_together(make, model, sample, loss_fn, optimizer, lower_tier=lower_tier, progress=progress)
    if fabric is not None:
        through_fabric.refuse(fabric, model, allow, fixed)
    refuse_one_device()
    if fabric is not None:
        model, sample = model.to(fabric.device), fabric.to_device(sample)
        if optimizer is not None:
            asked["fixed"] = {**through_fabric.FIXED, **(fixed or {})}
    request = requested(model, budget=budget, folder=lower_tier, **asked)
    made, each = _planned(model, sample, loss_fn, optimizer, request, progress, loader_batches)
    own = (
        optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    )  # the user's object, to which a schedule may be tied
    engine = apply(made, model, optimizer=own, lower_tier=lower_tier)
    if fabric is not None:
        through_fabric.set_up(engine, fabric)
    try:
        rehearsed(engine, each, progress, loader_batches=loader_batches, held=loader_batches == 1)
    except BaseException:
        if engine.stream is not None:
            engine.stream.close()  # as in `apply`
        raise
    return engine


def measure(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    clip_norm: float | None = None,
) -> StepRecord:
    """Measure bytes and seconds of one step of plain PyTorch; afterwards everything is restored."""
    check_sample(sample)
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
        device_kind=device_of(model).type,
    )
    engine = apply(nothing, model, loss_fn, optimizer)
    check_closure(engine.optimizer)
    rehearsal = rehearse(engine, sample)
    return StepRecord(1, float("nan"), rehearsal.measured_seconds, 1, rehearsal.measured_peak_bytes)


__all__ = [
    "Budget",
    "Progress",
    "apply",
    "default_optimizer",
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
