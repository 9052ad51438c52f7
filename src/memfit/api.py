"""The public functions: plan, recompute, apply, fit, measure, frontier, record, replan."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from memfit import batches
from memfit.batches import Batch, LossFunction
from memfit.capture import costs as cost_tables
from memfit.capture.capture import Captured, device_of, model_digest
from memfit.capture.recorder import Strides
from memfit.capture.scaled import trustworthy, without_forced_gradients
from memfit.capture.splitting import Splitting, find_splitting
from memfit.choices import Choices, in_words
from memfit.engine.engine import Engine, norm_statistics
from memfit.engine.swap import swap_folder
from memfit.errors import CaptureError, InfeasibleError, InputError, PlanFileError, SnapshotError, SplitError
from memfit.machine import Link, Machine, known_machine
from memfit.planner.by_hand import Placement, plan_by_hand
from memfit.planner.head import LossHead, head_of, sets_peak
from memfit.planner.search import Search
from memfit.planner.timeline import Timeline
from memfit.planner.ways import Offers, ways
from memfit.plans import FrozenPart, Plan, Prediction, Saving, Script
from memfit.report import FrontierPoint, Rehearsal, StepRecord
from memfit.step.blocks import blocks_at
from memfit.step.filling import Fill, reset
from memfit.step.freeze import freeze as freeze_for_good
from memfit.step.freeze import frozen, frozen_parts
from memfit.step.optimizers import arranged, offered
from memfit.step.precision import FORMATS, why_not_scaled
from memfit.step.program import OptimizerFactory
from memfit.step.stream import LayerStream
from memfit.step.tiers import tier_below
from memfit.trace import Category, Phase, Trace
from memfit.units import format_bytes, format_seconds, parse_bytes

Progress = Callable[[str, float], None]
Budget = str | int

REPAIR_ROUNDS: Final = 3
LAYOUT_ROUNDS: Final = 4  # captures until fake kernels lay out what they return as the real ones do
ENGINE_SECONDS: Final = 14e-6  # host time the engine adds to each forward operation; bench/overhead measures it
OF_OPTIMIZERS: Final = ("state_format", "state_place", "update")  # choices that only the optimizer can refuse
LINK_LATENCY_SECONDS: Final = 10e-6  # of a copy to a host that is not here
RNG_STATE_BYTES: Final = {"cpu": 5056, "cuda": 16}


class Runtime:
    """What a plan was made from, kept beside it in the process that made it."""

    def __init__(
        self,
        search: Search,
        loss_fn: LossFunction | None,
        optimizer: OptimizerFactory | None,
        fixed: Mapping[str, Any] | None = None,
        frozen: tuple[FrozenPart, ...] = (),
        placement: Placement | None = None,
        host_budget: Budget | None = None,
    ) -> None:
        self.search = search
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.fixed = fixed
        self.frozen = frozen
        self.host_budget = host_budget
        self.placement = placement  # of recomputation, where the user did it by hand

    def plan(self, budget_bytes: int) -> Plan:
        """The fastest plan found, with what its techniques save and what they cost that nobody may expect."""
        found = self.search.plan(budget_bytes)
        return replace(
            found,
            savings=tuple(self._savings(found.choices)),
            frozen=self.frozen,
            notes=(*found.notes, *self._slow_precisions()),
            runtime=self,
        )

    def _plain(self, way: Choices) -> tuple[Trace, int]:
        """The step run this way and nothing dropped, and its peak."""
        solver = self.search.solver(self.search.fixed_micro_batches or 1, way)
        return solver.trace, solver.plain.peak

    def _savings(self, chosen: Choices) -> Iterator[Saving]:
        way = replace(chosen, micro_batches=1, micro_batch_size=0, weights="whole", unforced=())
        trace, peak = self._plain(way)
        if way.frozen:
            with suppress(CaptureError):
                whole, whole_peak = self._plain(replace(way, frozen=()))
                lasting = (Category.GRADIENT, Category.OPTIMIZER_STATE)
                claimed = _bytes_of(whole, *lasting) - _bytes_of(trace, *lasting)
                yield Saving("freeze", claimed, whole_peak - peak, "gradients and optimizer state of what is frozen")
        if way.precision != "full":
            with suppress(CaptureError):
                full, full_peak = self._plain(replace(way, precision="full"))
                half = _bytes_of(full, Category.ACTIVATION) // 2
                yield Saving(way.precision, half, full_peak - peak, "half of what is saved for backward")

    def _slow_precisions(self) -> Iterator[str]:
        """Of 16-bit ways that were weighed, those whose operations take longer than in full precision."""
        for precision in FORMATS:
            way = next((w for w in self.search.ways if w.precision == precision), None)
            if way is None:
                continue
            with suppress(CaptureError):
                seconds = self._plain(way)[0].plain_step_seconds
                full = self._plain(replace(way, precision="full"))[0].plain_step_seconds
                if seconds > full:
                    yield (
                        f"{precision} is slower than full precision on this device: {format_seconds(seconds)} a step against {format_seconds(full)} "
                        "before anything is dropped; what it may save is bytes"
                    )


def _bytes_of(trace: Trace, *categories: Category) -> int:
    return sum(s.bytes for s in trace.storages if s.category in categories)


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
        host_budget: bytes on the tier below that activations and optimizer state may be moved to: the host's memory for a GPU (None: as much as it takes), the
            disk for a CPU (None: nothing is moved). 0: nothing is moved.
        allow: what may change results: "bf16" and "fp16" (forward and loss under autocast, fp16 with a gradient scaler), "8bit" (optimizer state).
        freeze: patterns of module paths that are not trained, as "embeddings" or "encoder.layer.[0-3]" (`memfit.step.freeze`). The model is left as it
            is; `apply` freezes it.
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
    runtime = Runtime(search, loss_fn, optimizer, fixed, _frozen_parts(model, freeze), host_budget=host_budget)
    found = runtime.plan(budget_bytes)
    _tell(progress, "planned", 1.0)
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
    whole = {"micro_batches": 1, **(fixed or {})}
    search = _search(model, sample, loss_fn, optimizer, None, (), (), whole, clip_norm, device, progress)
    _tell(progress, "planning", 0.9)
    made = plan_by_hand(search, placement)
    _tell(progress, "planned", 1.0)
    return replace(made, runtime=Runtime(search, loss_fn, optimizer, whole, placement=placement))


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
    return made.runtime.plan(budget_bytes)


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
    runtime = Runtime(search, loss_fn, optimizer, fixed, _frozen_parts(model, freeze), host_budget=host_budget)
    return _frontier(search, max(2, points), runtime, progress)


def _frontier(search: Search, points: int, runtime: Runtime, progress: Progress | None = None) -> tuple[Plan, ...]:
    plain, smallest = search.plain_peak(), search.smallest()[0]
    found: dict[int, Plan] = {}
    for i in range(points):
        budget = round(plain - (plain - smallest) * i / (points - 1))
        _tell(progress, f"planning for {format_bytes(budget)}", i / points)
        made = runtime.plan(budget)
        known = found.get(made.prediction.peak_bytes)
        if known is None or made.prediction.step_seconds < known.prediction.step_seconds:
            found[made.prediction.peak_bytes] = made
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

    What the plan freezes is frozen in the model from here on (`requires_grad` is false, gradients it had are let go), and an optimizer made here is
    made without it.

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
    have = _digest(model, plan.choices.frozen)
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
    freeze_for_good(model, plan.choices.frozen)
    chosen: Any = optimizer if optimizer is not None else (runtime.optimizer if runtime is not None else None)
    if chosen is not None and not isinstance(chosen, torch.optim.Optimizer):
        chosen = chosen(p for p in model.parameters() if p.requires_grad)
    if chosen is not None:
        chosen = arranged(chosen, plan.choices, model)
    loss_fn = loss_fn if loss_fn is not None or runtime is None else runtime.loss_fn
    stream: LayerStream | None = None
    if plan.choices.streamed:  # after the optimizer has seen the parameters: from now on those of the blocks are empty
        stream = LayerStream(model, plan.choices.streamed, tier_below(device_of(model), lower_tier), fill=fill or reset)
        if chosen is not None:
            try:
                stream.adopt(chosen)
            except BaseException:
                stream.close()  # puts the layers back into the user's model: nobody gets the engine that knows where they are
                raise
    engine = Engine(plan, model, loss_fn, chosen, stream)
    if runtime is not None:
        engine.planner = _planner_of(engine, runtime)
    return engine


def _digest(model: nn.Module, patterns: Sequence[str]) -> str:
    """Of the model with what the patterns mean frozen; as it is where they mean nothing in it."""
    with suppress(InputError), frozen(model, patterns):
        return model_digest(model)
    return model_digest(model)


def _frozen_parts(model: nn.Module, patterns: Sequence[str]) -> tuple[FrozenPart, ...]:
    return frozen_parts(model, patterns) if patterns else ()


def _planner_of(engine: Engine, runtime: Runtime) -> Callable[[Batch], Plan]:
    """What makes a plan for another batch, under the budget and the constraints of the engine's plan."""

    def made(batch: Batch) -> Plan:
        optimizer = None if engine.optimizer is None else (runtime.optimizer or default_optimizer)
        chosen = engine.plan.choices
        # The scaler goes on, and so does the optimizer as it was made.
        lasting = {name: getattr(chosen, name) for name in ("precision", "state_format", "state_place")}
        fixed = {**(runtime.fixed or {}), **lasting}
        norm = engine.plan.clip_norm
        if runtime.placement is None:
            return plan(
                engine.model,
                batch,
                engine.loss_fn,
                engine.plan.budget_bytes,
                optimizer,
                host_budget=runtime.host_budget,
                freeze=chosen.frozen,
                fixed=fixed,
                clip_norm=norm,
            )
        # Placed by hand, it stays so.
        search = _search(engine.model, batch, engine.loss_fn, optimizer, None, (), (), fixed, norm, None, None)
        return plan_by_hand(search, runtime.placement)

    return made


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
    try:
        _rehearsed(engine, sample, progress)
    except BaseException:
        if engine.stream is not None:
            engine.stream.close()  # as in `apply`
        raise
    return engine


def _rehearsed(engine: Engine, sample: Batch, progress: Progress | None) -> None:
    """Rehearse, and follow another plan where more was measured than the budget; raises what `fit` does."""
    made = engine.plan
    budget_bytes = made.budget_bytes
    target = budget_bytes
    for number in range(1, REPAIR_ROUNDS + 1):
        _tell(progress, "rehearsing one step", 0.0)
        engine.rehearsal = replace(rehearse(engine, sample), rounds=number)
        excess = engine.rehearsal.measured_peak_bytes - budget_bytes
        if excess <= 0 or number == REPAIR_ROUNDS:
            break
        target -= excess + engine.rehearsal.measured_peak_bytes // 1000
        with engine.gathered():
            again = made.runtime.plan(target)
        repaired = replace(
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


def rehearse(engine: Engine, sample: Batch) -> Rehearsal:
    """One metered step (after an unmetered one that makes the optimizer's state); everything is put back from a file on disk."""
    model, optimizer = engine.model, engine.optimizer
    # Streamed layers lie on the lower tier, which puts them back by itself.
    tensors = [*(engine.stream.resident if engine.stream is not None else model.parameters()), *model.buffers()]
    grads = [p.grad for p in model.parameters()]
    state = torch.default_generator.clone_state()
    cuda_state = torch.cuda.get_rng_state() if engine.device.type == "cuda" else None
    training = [(m, m.training) for m in model.modules()]
    scaling = engine.scaling.state() if engine.scaling is not None else None
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
                _step_taken(engine, sample)
                record = _step_taken(engine, sample, meter=True)
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
            if engine.scaling is not None and scaling is not None:
                engine.scaling.set_state(scaling)
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


def _step_taken(engine: Engine, sample: Batch, *, meter: bool = False) -> StepRecord:
    """A step whose update was taken: the first ones in fp16 are skipped until the scale is low enough, and hold less."""
    while (record := engine.step(sample, meter=meter)).skipped:
        pass
    return record


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
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm={clip_norm!r}: a positive number is needed, or None for no clipping")
    samples = batches.size(sample)
    micro_batches = _fixed(fixed, samples)
    here = device_of(model)
    machine = _machine(model, device)
    table = None if device is not None else cost_tables.CostTable(here)
    _frozen_parts(model, freeze)
    link = cache(partial(_link, here, machine, device))
    nothing_below = host_budget == 0
    room_bytes = None
    if host_budget is not None and not nothing_below:
        room_bytes = parse_bytes(host_budget, total_bytes=_below_bytes(here))
    optimizers = _optimizer_offers(model, optimizer, freeze)
    # What the optimizer cannot have is said before anything is captured.
    ways(optimizers, fixed={name: value for name, value in (fixed or {}).items() if name in OF_OPTIMIZERS})
    believed: dict[Choices, Captured] = {}  # by the way the step is run
    unforced: dict[Choices, tuple[str, ...]] = {}
    strides: dict[str, Strides] = {}

    def captured_as(choices: Choices, known: Captured | None) -> Captured:
        def run(way: Choices) -> Captured:
            return trustworthy(
                model, sample, loss_fn, optimizer, clip_norm=clip_norm, choices=way, believed=known, strides=strides
            )

        way = replace(choices, micro_batches=1)
        if way in unforced:
            return run(replace(choices, unforced=unforced[way]))
        captured, unforced[way] = without_forced_gradients(run, choices)
        return captured

    @cache
    def trace_of(choices: Choices) -> Trace:
        number, way = choices.micro_batches, replace(choices, micro_batches=1)
        named = f"{in_words(choices)}, " if in_words(choices) else ""
        for _ in range(LAYOUT_ROUNDS):
            _tell(progress, f"capturing a step ({named}{number} micro-batch{'es' if number > 1 else ''})", 0.1)
            with frozen(model, choices.frozen):
                captured = captured_as(choices, believed.get(way))
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
        if choices.state_place != "device":
            lying = trace_of(replace(choices, state_place="device"))
            state = _bytes_of(lying, Category.OPTIMIZER_STATE)
            trace = _with_update_seconds(trace, link().out_seconds(state) + link().in_seconds(state))
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
            with frozen(model, freeze):
                splitting.append(find_splitting(model, sample, loss_fn))
        return splitting[0].weights, splitting[0].reason

    if micro_batches is not None and micro_batches > 1:
        how, reason = weights()
        if how is None:
            raise SplitError(
                f'fixed={{"micro_batches": {micro_batches}}} cannot be honoured: {reason}. Leave it out, or use a model that treats samples apart'
            )
    plain = trace_of(Choices(micro_batches=micro_batches or 1, frozen=tuple(freeze)))
    timeline = Timeline(plain)
    head = head_of(timeline)
    chunks = (fixed or {}).get("loss_chunks", 1)
    # A GPU's host is swapped to by default, a machine's own disk only where the user says how much of it.
    swaps = room_bytes is not None or (machine.kind == "cuda" and not nothing_below)
    below = replace(link(), room_bytes=room_bytes) if swaps else None
    state = _bytes_of(plain, Category.OPTIMIZER_STATE)
    if host_budget is not None:
        lying = replace(plain.choices, state_format=(fixed or {}).get("state_format", "32bit"))
        own = state if lying == plain.choices else _bytes_of(trace_of(lying), Category.OPTIMIZER_STATE)
        _check_room(model, host_budget, room_bytes or 0, own, fixed or {})
    offers = _offers(
        model,
        optimizers,
        timeline,
        head,
        chunks,
        lower_tier=room_bytes is not None and state <= room_bytes,
        streamed=(fixed or {}).get("streamed"),
        bits=micro_batches == 1,
    )
    possible, refused = ways(offers, allow=allow, freeze=freeze, fixed=fixed, clips=clip_norm is not None)
    if room_bytes is not None and state and not any(way.streamed or way.state_place != "device" for way in possible):
        no_room = f"host_budget={host_budget!r} has no room for its {format_bytes(state)}"
        why = no_room if offers.on_request.get("state_place") else offers.why_not["state_place"]
        refused = (*refused, f"optimizer state on the tier below: {why}")
    if head is not None and chunks > 1:
        found = head_of(Timeline(trace_of(replace(possible[0], micro_batches=micro_batches or 1))))
        if found is not None and found.rows == head.rows:
            raise InputError(
                f"fixed loss_chunks={chunks} cannot be honoured: the model uses its logits for more than a mean or sum of their cross entropy, "
                "or makes them otherwise than by a linear layer or torch.nn.functional.linear. Leave it out"
            )
    return Search(trace_of, samples, weights, micro_batches, possible, refused, below, state)


def _check_room(
    model: nn.Module, host_budget: Budget, room_bytes: int, state_bytes: int, fixed: Mapping[str, Any]
) -> None:
    """See that what the user wants to lie below finds room in what he gives of it."""
    if fixed.get("streamed"):
        what, way_out = "layers and optimizer state", "plan without streaming"
        blocks = (model.get_submodule(path) for path in blocks_at(model, fixed["streamed"]).paths)
        needed = state_bytes + sum(p.nbytes for p in {p for block in blocks for p in block.parameters()})
    elif fixed.get("state_place", "device") != "device":
        what, way_out, needed = "optimizer state", "keep the state on the device", state_bytes
    else:
        return
    if needed > room_bytes:
        raise InputError(
            f"host_budget={host_budget!r} is less than the {what} that is to lie there ({format_bytes(needed)}): give it as much, or {way_out}"
        )


def _below_bytes(here: torch.device) -> int:
    """What the tier below a device holds: the host's memory, or what is free on the disk that a CPU swaps to."""
    if here.type == "cuda":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return shutil.disk_usage(swap_folder()).free


def _link(here: torch.device, machine: Machine, device: str | None) -> Link:
    if device is not None:
        return Link("host", machine.link_bandwidth, machine.link_bandwidth, LINK_LATENCY_SECONDS)
    return cost_tables.lower_tier(here, swap_folder())


def _with_update_seconds(trace: Trace, seconds: float) -> Trace:
    """The trace with an update that takes longer: its state comes from the tier below and goes back, chunk by chunk, while nothing else runs."""
    last = max((i for i, o in enumerate(trace.operations) if o.phase is Phase.OPTIMIZER), default=None)
    if last is None:
        return trace
    longer = replace(trace.operations[last], seconds=trace.operations[last].seconds + seconds)
    return replace(trace, operations=(*trace.operations[:last], longer, *trace.operations[last + 1 :]))


def _optimizer_offers(model: nn.Module, make_optimizer: OptimizerFactory | None, freeze: Sequence[str]) -> Offers:
    if make_optimizer is None:
        return Offers(why_not=dict.fromkeys(OF_OPTIMIZERS, "there is no optimizer"), on_request={"state_place": ()})
    with frozen(model, freeze):
        values, why_not = offered(make_optimizer(p for p in model.parameters() if p.requires_grad))
    # Moving bytes to a lower tier is the user's to ask for: on a machine without a GPU that tier is the disk. So is an update inside backward: gradients
    # are gone then before the user's own code could look at them.
    on_request = {name: values.pop(name, ()) for name in ("state_place", "update")}
    return Offers(values, why_not, on_request)


def _offers(
    model: nn.Module,
    optimizers: Offers,
    plain: Timeline,
    head: LossHead | None,
    chunks: Any,
    *,
    lower_tier: bool,
    streamed: Any,
    bits: bool,
) -> Offers:
    """What a step could have besides running as it does.

    Args:
        model: as for `plan`.
        optimizers: what the optimizer could have.
        plain: the step as it is.
        head: its loss head.
        chunks: of the loss head, where the user fixed their number.
        lower_tier: the user gave it room enough for the optimizer's state.
        streamed: the path of the layers that the user wants streamed. What the transfers take is not in a trace's seconds, so nobody else streams.
        bits: the user fixed one micro-batch, and with it every bit of the result: what adds up in another order is not on offer.
    """
    values = dict(optimizers.values)
    why_not = dict(optimizers.why_not)
    on_request = dict(optimizers.on_request)
    if lower_tier:
        values["state_place"] = on_request["state_place"]
    if isinstance(streamed, str) and streamed:
        on_request["streamed"] = (blocks_at(model, streamed).path,)
    values["precision"] = ("bf16", "fp16")
    unscalable = why_not_scaled(model)
    if unscalable is not None:
        values["precision"], why_not["precision"] = ("bf16",), unscalable
    if head is None:
        why_not["loss_chunks"] = "this step takes no cross entropy of what a linear layer makes"
    else:
        worth = head.chunks() if not bits and sets_peak(plain, head) else ()
        own = (chunks,) if isinstance(chunks, int) and 1 < chunks <= head.rows else ()
        values["loss_chunks"] = tuple(dict.fromkeys((*own, *worth)))
        why_not["loss_chunks"] = f"its loss head has {head.rows} rows"
    return Offers(values, why_not, on_request)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _fixed(fixed: Mapping[str, Any] | None, samples: int) -> int | None:
    if fixed is not None and not isinstance(fixed, Mapping):
        raise InputError(f'fixed={fixed!r} is no mapping: write names and values, such as {{"micro_batches": 4}}')
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
    "recompute",
    "record",
    "rehearse",
    "replan",
]
