"""One real step under the meter, after which everything is restored; and the plan repaired where the measured peak is above the budget."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit import batches, dispatch
from memfit.batches import Batch
from memfit.capture.isolation import batch_kept, hidden_to_copy
from memfit.engine.engine import Engine
from memfit.errors import InfeasibleError, Remedy, SnapshotError
from memfit.planning import changed, planning_of
from memfit.progress import Progress, tell
from memfit.step.attributes import Attributes, besides_modules, held_by, items_of
from memfit.step.buffers import as_large_as
from memfit.step.guard import Guard, Trained
from memfit.step.held_tensors import model_tensors
from memfit.step.optimizer_state import set_optimizer
from memfit.step.process_generators import seed_alike
from memfit.step.program import LossBy, hooks_of, own_optimizer, state_tensors
from memfit.units import format_budget, format_bytes
from memfit.values.plan import Plan
from memfit.values.report import Rehearsal, StepRecord

CURVE_POINTS: Final = 400  # of a rehearsal's curve, as many as a picture shows
REPAIR_ROUNDS: Final = 3
MORE_LOOKS: Final = 2  # at a step of several ranks: a backend's own thread may hold a collective's buffer for a moment longer than another time


def rehearse(engine: Engine, sample: Batch, loader_batches: int = 1, *, held: bool = True) -> Rehearsal:
    """A metered step, after one that makes the optimizer's state; everything is restored, tensors from a copy on disk.

    The first is metered, too: some optimizers take more for their first update than for the next (a decomposition of each gradient).

    Args:
        engine: whose step it is.
        sample: the batch of a step, or one of its batches.
        loader_batches: batches like the sample that a step takes one after the other.
        held: whether the last of them is there until the step ends; else each is made when its turn comes, and freed after it.

    Raises:
        SnapshotError: the copy on disk could not be written; nothing was run.
    """
    with _all_put_back(engine):
        first = _step_taken(engine, sample, loader_batches, held=held, meter=True)
        reading_first = engine.reading
        record = _step_taken(engine, sample, loader_batches, held=held, meter=True)
        reading = engine.reading
        for _ in range(0 if engine.sharded is None else MORE_LOOKS):
            again = _step_taken(engine, sample, loader_batches, held=held, meter=True)
            if (again.peak_bytes or 0) < (record.peak_bytes or 0):
                record, reading = again, engine.reading
    peak = record.peak_bytes or 0
    # Where the first forward left its plan, something was built once (a cache by shape), which is there from now on.
    on_plan = not (first.divergences or first.begun_anew)
    if on_plan and engine.sharded is None and (first.peak_bytes or 0) > peak:
        peak, reading = first.peak_bytes or 0, reading_first
    prediction = engine.plan_for(sample).prediction
    return Rehearsal(
        prediction.peak_bytes if engine.sharded is None else prediction.ranks[engine.sharded.agreement.rank].peak_bytes,
        peak,
        record.seconds,
        1,
        record.divergences,
        () if reading is None else _curve(reading.base_bytes, reading.changes),
        waiting=record.waiting,
    )


def run_alike(engine: Engine, sample: Batch, loader_batches: int, loss_by: LossBy) -> None:
    """Two steps that draw the same random numbers wherever this is called, the second with `loss_by`; everything is restored.

    The first one builds what is built once (a table of positions), which may be there on some ranks alone. Arguments and errors as for `rehearse`.
    """
    with _all_put_back(engine):
        for way in (None, loss_by):
            engine.loss_by = way
            seed_alike()
            _step_taken(engine, sample, loader_batches, held=True)
    engine.loss_by = None


def rehearsed(
    engine: Engine, sample: Batch, progress: Progress | None = None, *, loader_batches: int = 1, held: bool = True
) -> None:
    """Rehearse, and plan again for less where the measured peak exceeds the budget; raises what `fit` does. Arguments as for `rehearse`."""
    made = engine.plan
    planning = planning_of(made)
    budget_bytes = made.budget_bytes
    target = budget_bytes
    for number in range(1, REPAIR_ROUNDS + 1):
        tell(progress, "rehearsing one step", 0.0)
        engine.rehearsal = replace(rehearse(engine, sample, loader_batches, held=held), rounds=number)
        excess = engine.rehearsal.measured_peak_bytes - budget_bytes
        if excess <= 0 or number == REPAIR_ROUNDS:
            break
        # A plan may take less than it was planned for, and one for a little less than that be the same plan.
        planned = min(target, engine.plan.prediction.peak_bytes)
        target = less_by(planned, engine.rehearsal.measured_peak_bytes, budget_bytes)
        assert planning is not None, "an engine whose plan was made here is rehearsed"
        try:
            with engine.gathered():
                again = planning.plan(target)
        except InfeasibleError as error:
            raise no_smaller_plan(error, engine.rehearsal, budget_bytes) from None
        engine.replace_plan(repaired(made, again, excess, target))
    if engine.rehearsal is not None and engine.rehearsal.measured_peak_bytes > budget_bytes:
        raise still_above(engine.rehearsal.measured_peak_bytes, budget_bytes)


def less_by(target: int, measured_bytes: int, budget_bytes: int) -> int:
    """The bytes to plan for next: as much less as was measured above the budget, and a thousandth of what was measured.

    Args:
        target: that were planned for.
        measured_bytes: the peak of that plan.
        budget_bytes: the user's.
    """
    return target - (measured_bytes - budget_bytes) - measured_bytes // 1000


def repaired(made: Plan, again: Plan, excess_bytes: int, target: int) -> Plan:
    """A plan for less, in the user's own budget and with a note of why.

    Args:
        made: the first plan.
        again: that for less.
        excess_bytes: measured above the budget.
        target: the bytes that it was planned for.
    """
    note = f"the rehearsal measured {format_bytes(excess_bytes)} above the budget; planned again for {format_bytes(target)}"
    return changed(again, budget_bytes=made.budget_bytes, notes=(*made.notes, note))


def still_above(measured_bytes: int, budget_bytes: int, on_rank: str = "") -> InfeasibleError:
    """Why no more is tried.

    Args:
        measured_bytes: the peak in the last rehearsal.
        budget_bytes: the user's.
        on_rank: the rank that measured it, in words; "" for one device.
    """
    return InfeasibleError(
        f"after {REPAIR_ROUNDS} rehearsals the measured peak is still {format_bytes(measured_bytes)}{on_rank}, above the budget of "
        f"{format_bytes(budget_bytes)}: the model's memory changes from run to run; allow for it with a larger budget",
        budget_bytes=budget_bytes,
        minimum_bytes=measured_bytes,
    )


def no_smaller_plan(
    error: InfeasibleError, measured: Rehearsal, budget_bytes: int, on_rank: str = ""
) -> InfeasibleError:
    """Why a plan that took more than predicted cannot be repaired, in terms of the user's budget.

    Args:
        error: of planning for less, which knows only the lowered budget.
        measured: the rehearsal.
        budget_bytes: the user's.
        on_rank: the rank that measured it, in words; "" for one device.
    """
    peak, least = measured.measured_peak_bytes, error.minimum_bytes
    missing = peak - measured.predicted_peak_bytes
    needed, remedies, ways = None, error.remedies, "give a larger budget"
    if least is not None:
        # Where the first plan takes all of a larger budget, its repair is for that much less, and a thousandth of what is measured.
        needed = least + missing
        needed += -(-(needed + missing) // 999)
        larger = Remedy.larger_budget(format_budget(needed), needed - budget_bytes)
        remedies = (larger, *(remedy for remedy in error.remedies if remedy.kind != "budget"))
        ways = (
            f"the smallest one is predicted to take {format_bytes(least)}, which with what is missing from the prediction is about {format_bytes(needed)}. "
            f"Ways out: {'; '.join(remedy.text for remedy in remedies)}"
        )
    return InfeasibleError(
        f"the rehearsal measured a peak of {format_bytes(peak)}{on_rank}, {format_bytes(peak - budget_bytes)} above the budget of "
        f"{format_bytes(budget_bytes)} and {format_bytes(missing)} more than predicted, and there is no plan that much smaller: {ways}",
        budget_bytes=budget_bytes,
        minimum_bytes=needed,
        moment=error.moment,
        module=error.module,
        remedies=remedies,
        weighed=error.weighed,
    )


@contextmanager
def _all_put_back(engine: Engine) -> Iterator[None]:
    """What steps change inside is after the block as it was before; raises what `rehearse` does."""
    # Streamed layers are offloaded, and the stream puts them back by itself.
    kept = engine.stream.resident if engine.stream is not None else list(engine.model.parameters())
    kept = kept if engine.sharded is None else engine.sharded.parameters()
    optimizer = own_optimizer(engine.optimizer)
    hooks = hooks_of(optimizer)
    called = [engine.loss_fn, *hooks]
    attributes = Attributes([*engine.model.modules(), *(module for each in called for module in held_by(each))])
    written = {
        id(t): t for module in attributes.modules for t in (*module.buffers(), *model_tensors(module, hidden=False))
    }
    written |= {id(p): p for each in called for p in hidden_to_copy(engine.model, each)}
    noted = _noted_by(optimizer, kept)
    besides = [besides_modules(each) for each in called]
    written |= {id(t): t for each in (noted, *besides[1:]) for t in _tensors_in(each, optimizer)}
    with ExitStack() as stack:
        stack.enter_context(_copied_to_disk([*kept, *written.values()], optimizer))
        stack.enter_context(_unchanged(engine, attributes.modules))
        stack.callback(attributes.put_back)
        stack.callback(noted.put_back)
        for each in besides:
            stack.callback(each.put_back)
        if engine.stream is not None:
            stack.enter_context(engine.stream.undone())
        yield


def _noted_by(optimizer: torch.optim.Optimizer | None, parameters: Sequence[torch.Tensor]) -> Attributes:
    """What an optimizer notes besides its state: in attributes of its own (weights to go back to, a count of steps), and of the parameters that it steps."""
    own = [] if optimizer is None or type(optimizer).__module__.startswith("memfit.") else [vars(optimizer)]
    return Attributes([*own, *(vars(parameter) for parameter in parameters if parameter.requires_grad)])


def _tensors_in(noted: Attributes, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The tensors among what an optimizer notes: its state, which is kept apart, and parameters left out."""
    known = set() if optimizer is None else set(map(id, state_tensors(optimizer)))
    held = (value for container in noted.containers for value in items_of(container))
    return [t for t in held if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter) and id(t) not in known]


@contextmanager
def _copied_to_disk(tensors: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """What is in these tensors and in the optimizer is, after the block, what was in them before."""
    handle, name = tempfile.mkstemp(prefix="memfit-rehearsal-")
    os.close(handle)
    fresh = optimizer is not None and not optimizer.state
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
        try:
            yield
        finally:
            saved = torch.load(name, weights_only=False, mmap=True)  # our own file of a moment ago
            with torch.no_grad():
                for tensor, value in zip(tensors, saved["tensors"], strict=True):
                    with torch.inference_mode() if tensor.is_inference() else nullcontext():
                        as_large_as(tensor, value).copy_(value)
            if optimizer is not None:
                if fresh:
                    optimizer.state.clear()
                else:
                    _set_from_file(optimizer, saved["optimizer"])
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def _unchanged(engine: Engine, modules: Sequence[nn.Module]) -> Iterator[None]:
    """All else that a step changes is as before after the block: buffers, attributes, generators, scale, gradients, modes, and the engine's own record.

    Args:
        engine: whose step runs in the block, which begins without gradients.
        modules: those of the model, and others that the step may give gradients to (a GAN's discriminator, which the generator's loss closes over).
    """
    model: nn.Module = engine.model
    guard, trained = Guard(model, scaling=engine.scaling), Trained(model)
    parameters = {id(p): p for module in modules for p in module.parameters(recurse=False)}
    gradients = [(p, p.grad) for p in parameters.values()]
    for parameter, _ in gradients:
        parameter.grad = None
    modes = [(module, module.training) for module in model.modules()]
    steps, records = engine.steps, list(engine.records)
    schedule, engine.schedule = engine.schedule, None
    try:
        yield
    finally:
        guard.put_back()
        trained.put_back()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        engine.steps, engine.records, engine.schedule = steps, records, schedule


def _set_from_file(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put back state that is mapped from a file which is about to go: torch adopts such tensors, and the blocks of the file would stay."""
    mapped = {_address(value) for value in pytree.tree_leaves(saved["state"])} - {None}
    set_optimizer(optimizer, saved)
    for owner, state in optimizer.state.items():
        if any(_address(value) in mapped for value in pytree.tree_leaves(state)):
            optimizer.state[owner] = pytree.tree_map(
                lambda value: value.clone() if _address(value) in mapped else value, state
            )


def _address(value: Any) -> int | None:
    """Where the memory of a dense tensor begins; None for what is none."""
    dense = isinstance(value, torch.Tensor) and dispatch.has_storage(value)
    return value.untyped_storage().data_ptr() if dense else None


def _step_taken(engine: Engine, sample: Batch, loader_batches: int, *, held: bool, meter: bool = False) -> StepRecord:
    """A step whose update was taken: the first ones in fp16 are skipped until the scale is low enough, and hold less. The sample is as before."""

    def step() -> StepRecord:
        if loader_batches == 1:
            return engine.step(sample, meter=meter)
        copies = (batches.map_tensors(torch.clone, sample) for _ in range(loader_batches))
        return engine.accumulate([sample] * loader_batches if held else copies, meter=meter)

    while True:
        with batch_kept(sample):
            record = step()
        if not record.skipped:
            return record


def _curve(level: int, changes: Sequence[int]) -> tuple[int, ...]:
    """Bytes after each allocation or release, thinned to the largest of each stretch."""
    levels = []
    for change in changes:
        level += change
        levels.append(level)
    stride = max(1, len(levels) // CURVE_POINTS)
    return tuple(max(levels[i : i + stride]) for i in range(0, len(levels), stride))
