"""The public functions: plan, apply, fit, measure, frontier, record, replan."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture import costs as cost_tables
from memfit.capture.capture import Captured, device_of, model_digest
from memfit.capture.recorder import Strides
from memfit.capture.scaled import trustworthy
from memfit.capture.splitting import Splitting, find_splitting
from memfit.choices import Choices, in_words
from memfit.engine.engine import Engine, norm_statistics
from memfit.errors import InfeasibleError, InputError, PlanFileError, SnapshotError, SplitError
from memfit.machine import Machine, known_machine
from memfit.planner.search import Search
from memfit.planner.ways import Offers, ways
from memfit.plans import Plan, Prediction, Script
from memfit.report import FrontierPoint, Rehearsal, StepRecord
from memfit.step.blocks import blocks_at
from memfit.step.filling import Fill, reset
from memfit.step.program import OptimizerFactory
from memfit.step.stream import LayerStream
from memfit.step.tiers import tier_below
from memfit.trace import Trace
from memfit.units import format_bytes, parse_bytes

Progress = Callable[[str, float], None]
Budget = str | int

REPAIR_ROUNDS: Final = 3
LAYOUT_ROUNDS: Final = 4  # captures until fake kernels lay out what they return as the real ones do
ENGINE_SECONDS: Final = 14e-6  # host time the engine adds to each forward operation; bench/overhead measures it
RNG_STATE_BYTES: Final = {"cpu": 5056, "cuda": 16}


class Runtime:
    """What a plan was made from, kept beside it in the process that made it."""

    def __init__(
        self,
        search: Search,
        loss_fn: LossFunction | None,
        optimizer: OptimizerFactory | None,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        self.search = search
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.fixed = fixed


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
    allow: Sequence[str] = (),
    freeze: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    device: str | None = None,
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
        host_budget, allow, freeze: reserved for techniques this version does not have; anything but the default is refused.
        fixed: choices that are the user's, by the name of their field in `Choices`: {"micro_batches": 4}.
        clip_norm: global gradient norm to clip to.
        device: None for the device of the model, or the name of a GPU that is not here ("rtx4090"): then seconds are estimated.
        progress: called with what is being done and the share done.

    Raises:
        InfeasibleError: nothing fits; carries `minimum_bytes` and ways out.
        BudgetError: the budget cannot be read.
        InputError: something else about the input.
        CaptureError: the step cannot be predicted.
    """
    machine = _machine(model, device)
    budget_bytes = parse_bytes(budget, total_bytes=machine.memory_bytes)
    search = _search(model, sample, loss_fn, optimizer, host_budget, allow, freeze, fixed, clip_norm, device, progress)
    _tell(progress, "planning", 0.9)
    found = search.plan(budget_bytes)
    _tell(progress, "planned", 1.0)
    return replace(found, runtime=Runtime(search, loss_fn, optimizer, fixed))


def record(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    micro_batches: int = 1,
    clip_norm: float | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Trace:
    """One training step written down, with seconds: what plans are made from. `Trace.save` keeps it, `replan` plans from it without the model.

    Args:
        micro_batches: into how many parts the batch is split; plans from this trace keep to it.
        model, sample, loss_fn, optimizer, clip_norm, device, progress: as for `plan`.

    Raises:
        SplitError: the batch does not split without changing the result.
        InputError, CaptureError: as for `plan`.
    """
    fixed = {"micro_batches": micro_batches}
    search = _search(model, sample, loss_fn, optimizer, None, (), (), fixed, clip_norm, device, progress)
    trace = search.solver(micro_batches).trace
    if micro_batches == 1:
        return trace
    weights, _ = search.weights()
    assert weights is not None, "a fixed number of parts is refused before, where the batch does not split"
    return replace(trace, choices=replace(trace.choices, weights=weights))


def replan(made: Plan | Trace, budget: Budget) -> Plan:
    """The same model and batch at another budget, without capturing anything again.

    Args:
        made: a plan from this process, or a trace (`record`, `Trace.load`).
        budget: as for `plan`, but in bytes: there may be no device to take a share of.

    Raises:
        InfeasibleError, BudgetError: as for `plan`.
        InputError: the plan was loaded from a file and carries no trace.
    """
    budget_bytes = parse_bytes(budget)
    if isinstance(made, Trace):
        # The last part is the largest, so there may be fewer samples; only a search for the number of parts would need them exactly.
        how = made.choices
        samples = how.micro_batch_size * how.micro_batches
        way = replace(how, micro_batches=1, micro_batch_size=0, weights="whole")
        search = Search(lambda _: made, samples, lambda: (how.weights, ""), how.micro_batches, ways=(way,))
        return search.plan(budget_bytes)
    if not isinstance(made.runtime, Runtime):
        raise InputError(
            "this plan was loaded from a file and carries no trace: keep the trace (memfit.record(...).save(path)) to plan again without the model, "
            "or call memfit.plan(model, sample, ...) again"
        )
    return replace(made.runtime.search.plan(budget_bytes), runtime=made.runtime)


def frontier(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    points: int = 9,
    host_budget: Budget | None = None,
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
        model, sample, loss_fn, optimizer, host_budget, allow, freeze, fixed, clip_norm, device, progress: as for `plan`.

    Returns:
        Plans in order of falling peak, each no slower than any with a smaller peak.
    """
    search = _search(model, sample, loss_fn, optimizer, host_budget, allow, freeze, fixed, clip_norm, device, progress)
    return _frontier(search, max(2, points), Runtime(search, loss_fn, optimizer, fixed), progress)


def _frontier(search: Search, points: int, runtime: Runtime, progress: Progress | None = None) -> tuple[Plan, ...]:
    plain, smallest = search.plain_peak(), search.smallest()[0]
    found: dict[int, Plan] = {}
    for i in range(points):
        budget = round(plain - (plain - smallest) * i / (points - 1))
        _tell(progress, f"planning for {format_bytes(budget)}", i / points)
        made = search.plan(budget)
        known = found.get(made.prediction.peak_bytes)
        if known is None or made.prediction.step_seconds < known.prediction.step_seconds:
            found[made.prediction.peak_bytes] = replace(made, runtime=runtime)
    ordered = [found[p] for p in sorted(found, reverse=True)]
    best: list[Plan] = []
    for made in reversed(ordered):  # from the smallest up: a larger plan must be faster to be worth showing
        if not best or made.prediction.step_seconds < best[-1].prediction.step_seconds:
            best.append(made)
    return tuple(reversed(best))


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

    Args:
        plan: made in this process or loaded.
        model: of the structure the plan was made for; the user's own object is trained.
        loss_fn, optimizer: needed for a loaded plan; a plan from this process remembers its own. The optimizer may be a factory or made already.
        fill: of a plan that streams layers and a model on the meta device: gives each module its values, so that the model is never there as a whole.
        lower_tier: folder for what a plan that streams layers keeps on disk; None for host memory below a GPU, and the system's folder for temporary files.

    Raises:
        PlanFileError: the plan is for another model.
        InfeasibleError: the lower tier has no room.
    """
    have = model_digest(model)
    if have != plan.model:
        raise PlanFileError(
            f"the plan is for a model with digest {plan.model}, this one has {have}: other modules, shapes, dtypes, frozen parameters or mode "
            "(train/eval). Plan again for this model"
        )
    runtime = plan.runtime if isinstance(plan.runtime, Runtime) else None
    absent = any(p.device.type == "meta" for p in model.parameters())
    if absent and not (plan.choices.streamed and fill is not None):
        raise InputError(
            "the model is on the meta device: it can be planned for, but to train it needs its tensors (model.to_empty, load weights)"
            + ("; as its layers are streamed, fill= can give them one by one" if plan.choices.streamed else "")
        )
    chosen: Any = optimizer if optimizer is not None else (runtime.optimizer if runtime is not None else None)
    if chosen is not None and not isinstance(chosen, torch.optim.Optimizer):
        chosen = chosen(p for p in model.parameters() if p.requires_grad)
    loss_fn = loss_fn if loss_fn is not None or runtime is None else runtime.loss_fn
    stream: LayerStream | None = None
    if plan.choices.streamed:  # after the optimizer has seen the parameters: from now on those of the blocks are empty
        stream = LayerStream(model, plan.choices.streamed, tier_below(device_of(model), lower_tier), fill=fill or reset)
    engine = Engine(plan, model, loss_fn, chosen, stream)
    if runtime is not None:
        engine.planner = _planner_of(engine, runtime)
    return engine


def _planner_of(engine: Engine, runtime: Runtime) -> Callable[[Batch], Plan]:
    """What makes a plan for another batch, under the budget and the constraints of the engine's plan."""
    return partial(
        plan,
        engine.model,
        loss_fn=engine.loss_fn,
        budget=engine.plan.budget_bytes,
        optimizer=None if engine.optimizer is None else (runtime.optimizer or default_optimizer),
        fixed=runtime.fixed,
        clip_norm=engine.plan.clip_norm,
    )


def fit(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None = None,
    budget: Budget = "80%",
    optimizer: OptimizerFactory | None = default_optimizer,
    *,
    host_budget: Budget | None = None,
    allow: Sequence[str] = (),
    freeze: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Plan, apply, rehearse one real step under the meter, and repair the plan when the measurement is above the budget.

    The rehearsal leaves parameters, buffers, optimizer and generators as they were. Arguments and errors are those of `plan`.

    Raises:
        InfeasibleError: also when no repaired plan passes its rehearsal.
    """
    made = plan(
        model,
        sample,
        loss_fn,
        budget,
        optimizer,
        host_budget=host_budget,
        allow=allow,
        freeze=freeze,
        fixed=fixed,
        clip_norm=clip_norm,
        progress=progress,
    )
    engine = apply(made, model)
    budget_bytes = made.budget_bytes
    target = budget_bytes
    for number in range(1, REPAIR_ROUNDS + 1):
        _tell(progress, "rehearsing one step", 0.0)
        engine.rehearsal = replace(rehearse(engine, sample), rounds=number)
        excess = engine.rehearsal.measured_peak_bytes - budget_bytes
        if excess <= 0 or number == REPAIR_ROUNDS:
            break
        target -= excess + engine.rehearsal.measured_peak_bytes // 1000
        runtime = made.runtime
        with engine.gathered():
            found = runtime.search.plan(target)
        repaired = replace(
            found,
            runtime=runtime,
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
    return engine


def rehearse(engine: Engine, sample: Batch) -> Rehearsal:
    """One metered step (after an unmetered one that makes the optimizer's state); everything is put back from a file on disk."""
    model, optimizer = engine.model, engine.optimizer
    # Streamed layers lie on the lower tier, which puts them back by itself.
    tensors = [*(engine.stream.resident if engine.stream is not None else model.parameters()), *model.buffers()]
    grads = [p.grad for p in model.parameters()]
    state = torch.default_generator.clone_state()
    cuda_state = torch.cuda.get_rng_state() if engine.device.type == "cuda" else None
    training = [(m, m.training) for m in model.modules()]
    handle, name = tempfile.mkstemp(prefix="memfit-rehearsal-")
    os.close(handle)
    try:
        try:
            torch.save(
                {"tensors": [t.detach() for t in tensors], "optimizer": optimizer.state_dict() if optimizer else None},
                name,
            )
        except (OSError, RuntimeError) as error:
            raise SnapshotError(
                f"the rehearsal keeps a copy of the model in {Path(name).parent} and could not write it ({error}): free some disk space, set TMPDIR, or use "
                "memfit.plan and memfit.apply, which do not rehearse"
            ) from error
        fresh = optimizer is not None and not optimizer.state
        steps, records = engine.steps, list(engine.records)
        try:
            for parameter in model.parameters():
                parameter.grad = None
            with engine.stream.undone() if engine.stream is not None else nullcontext():
                engine.step(sample)
                record = engine.step(sample, meter=True)
                reading = engine.reading
        finally:
            saved = torch.load(name, weights_only=False, mmap=True)  # our own file of a moment ago
            with torch.no_grad():
                for tensor, value in zip(tensors, saved["tensors"], strict=True):
                    tensor.copy_(value)
            if optimizer is not None:
                if fresh:
                    optimizer.state.clear()
                else:
                    optimizer.load_state_dict(saved["optimizer"])
            del saved
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
            torch.default_generator.set_state(state.get_state())
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state)
            for module, mode in training:
                module.training = mode
            engine.steps, engine.records = steps, records
    finally:
        Path(name).unlink(missing_ok=True)
    curve: list[int] = []
    if reading is not None and reading.changes:
        level, levels = reading.base_bytes, []
        for change in reading.changes:
            level += change
            levels.append(level)
        stride = max(1, len(levels) // 400)
        curve = [max(levels[i : i + stride]) for i in range(0, len(levels), stride)]
    return Rehearsal(
        engine.plan_for(sample).prediction.peak_bytes,
        record.peak_bytes or 0,
        record.seconds,
        1,
        record.departures,
        tuple(curve),
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


def _tell(progress: Progress | None, what: str, share: float) -> None:
    if progress is not None:
        progress(what, share)


def _machine(model: nn.Module, device: str | None) -> Machine:
    return known_machine(device) if device is not None else cost_tables.present_machine(device_of(model))


def _search(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    host_budget: Budget | None,
    allow: Sequence[str],
    freeze: Sequence[str],
    fixed: Mapping[str, Any] | None,
    clip_norm: float | None,
    device: str | None,
    progress: Progress | None,
) -> Search:
    for name, value in (("host_budget", host_budget), ("allow", allow), ("freeze", freeze)):
        if value:
            raise InputError(
                f"{name}={value!r} is not available in this version: memfit plans recomputation and micro-batches only, and changes no numbers. "
                f"Leave {name} out"
            )
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm={clip_norm!r}: a positive number is needed, or None for no clipping")
    samples = batches.size(sample)
    micro_batches = _fixed(fixed, samples)
    here = device_of(model)
    machine = _machine(model, device)
    table = None if device is not None else cost_tables.CostTable(here)
    possible, refused = ways(
        _offers(model, fixed), allow=allow, freeze=freeze, fixed=fixed, clips=clip_norm is not None
    )
    believed: dict[Choices, Captured] = {}  # by the way the step is run
    strides: dict[str, Strides] = {}

    def trace_of(choices: Choices) -> Trace:
        number, way = choices.micro_batches, replace(choices, micro_batches=1)
        named = f"{in_words(choices)}, " if in_words(choices) else ""
        for _ in range(LAYOUT_ROUNDS):
            _tell(progress, f"capturing a step ({named}{number} micro-batch{'es' if number > 1 else ''})", 0.1)
            captured = trustworthy(
                model,
                sample,
                loss_fn,
                optimizer,
                clip_norm=clip_norm,
                choices=choices,
                believed=believed.get(way),
                strides=strides,
            )
            believed.setdefault(way, captured)
            if table is None:
                costs, are = cost_tables.estimated_costs(captured.calls, machine), "estimated"
                break
            costs, are = table.measure(captured.calls, progress), "measured"
            known = len(strides)
            strides.update(cost_tables.wrong_strides(captured, costs))
            if len(strides) == known:
                break
        # Measured after the operations have run once: by then the libraries have taken what they keep.
        present = [*model.parameters(), *model.buffers(), *batches.leaves(sample), *_gradients(model)]
        beside = cost_tables.beside_bytes(here, present) if device is None else 0
        trace = cost_tables.with_costs(
            captured,
            costs,
            seconds_are=are,
            device=machine.name,
            allocation_bytes=machine.allocation_bytes,
            beside_bytes=beside,
        )
        return replace(
            trace,
            rng_state_bytes=RNG_STATE_BYTES.get(here.type, 0),
            dispatch_seconds=ENGINE_SECONDS,
            clip_norm=clip_norm,
            torch_version=torch.__version__,
        )

    splitting: list[Splitting] = []

    def weights() -> tuple[str | None, str]:
        if not splitting:
            if any(p.device.type == "meta" for p in model.parameters()):
                return None, "the model is on the meta device, so it cannot be checked whether its batch splits"
            _tell(progress, "checking whether the batch splits", 0.5)
            splitting.append(find_splitting(model, sample, loss_fn))
        return splitting[0].weights, splitting[0].reason

    if micro_batches is not None and micro_batches > 1:
        how, reason = weights()
        if how is None:
            raise SplitError(
                f'fixed={{"micro_batches": {micro_batches}}} cannot be honoured: {reason}. Leave it out, or use a model that treats samples apart'
            )
    return Search(trace_of, samples, weights, micro_batches, possible, refused)


def _offers(model: nn.Module, fixed: Mapping[str, Any] | None) -> Offers:
    """What this model's step could have. Layers are streamed only where the user says so: what the transfers take is not in a trace's seconds."""
    path = (fixed or {}).get("streamed")
    if not isinstance(path, str) or not path:
        return Offers()
    return Offers({"streamed": (blocks_at(model, path).path,)})


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _fixed(fixed: Mapping[str, Any] | None, samples: int) -> int | None:
    number = (fixed or {}).get("micro_batches")
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= samples:
        raise InputError(
            f"fixed micro_batches={number!r}: a whole number from 1 to the {samples} samples of the batch is needed"
        )
    return number


__all__ = [
    "Budget",
    "Progress",
    "apply",
    "fit",
    "frontier",
    "frontier_points",
    "measure",
    "plan",
    "record",
    "rehearse",
    "replan",
]
