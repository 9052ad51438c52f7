"""Random programs of tensor operations: the same numbers at every budget and under any choice of what to drop, and the predicted peak.

Then what a training run does with them: several steps with an optimizer, batches smaller than planned, batches in parts, forwards that change from
step to step; 16 bits, optimizer state in 8 bits or on the disk, updates inside backward, frozen parts, a loss head in chunks. The promise is the same
everywhere: never a wrong gradient, never above the budget while the plan was followed, never a crash without an error of memfit's own that says why.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, currently_in_test_context, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit import batches
from memfit.capture import values_read
from memfit.hardware.machine import Link
from memfit.meter import metered
from memfit.optimizers.eight_bit import eight_bit
from memfit.planner.recipes import Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planner.script_compiler import compile_script
from memfit.planner.solvers import SLACK_BYTES
from memfit.planner.timeline import Timeline
from memfit.planning import changed, planning_of
from memfit.step.program import StepProgram, state_tensors
from memfit.techniques.autocast.precision import FORMATS
from memfit.techniques.choices import BASELINE, Choices, conflict, in_words
from memfit.techniques.chunked_loss.head import chunked_head
from memfit.values.trace import Category
from models.outcome import measured_peak, outcome_of, plans_between, same
from models.programs import (
    RANDOM,
    WITHIN_SAMPLES,
    Branching,
    Instruction,
    Program,
    branching,
    headed,
    program_loss,
    programs,
    sample_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# The programs hold some kilobytes, so the 8-byte tensors that kernels make of Python numbers, out of sight, come to more than 0.5 % of a step.
# Budgets allow for them by SLACK_BYTES, predictions do not.
UNSEEN_BYTES = SLACK_BYTES


class Watching(TorchDispatchMode):
    """Does nothing, but is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def watched_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss, with forward run as it is under a plan: while a mode watches, ATen's linear adds its bias out of place."""
    with Watching():
        return program_loss(model, batch)


def leaks(model: nn.Module, sample: Any, loss_fn: Any = program_loss) -> bool:
    """Whether plain PyTorch itself keeps memory after a step: `x.mul_(x)` off the loss's path saves its own output, and its node owns itself."""
    for _ in range(2):
        with metered() as reading:
            torch.manual_seed(7)
            loss_fn(model, sample).backward()
            model.zero_grad()
    return sum(reading.changes) != 0


def plans_of(model: nn.Module, sample: Any) -> list[memfit.Plan]:
    """Plans at three budgets; drawn blindly, one that drops all it can, one that drops half of it, and one that offloads, drops or keeps."""
    plans = plans_between(model, sample, program_loss, fractions=(1.0, 0.6, 0.0))
    plain = memfit.plan(model, sample, program_loss, 1 << 50, None, fixed={"micro_batches": 1})
    return [*plans, *blind_plans(plain)]


def blind_plans(plain: memfit.Plan) -> list[memfit.Plan]:
    """From a plan that drops nothing: one that drops all it can, one that drops half of it, and one that offloads, drops or keeps."""
    search = planning_of(plain)
    solver = search.solver(plain.choices.micro_batches)
    droppable = sorted(solver.recipes.saved & solver.recipes.rebuildable)
    draw = random.Random(len(droppable))
    recipes = Recipes(solver.trace, Link("disk", 1e9, 1e9, 1e-4, least_bytes=1))
    timeline = Timeline(solver.trace, recipes)
    offloaded = {s: draw.choice(ways) for s, ways in sorted(recipes.reloads_of.items()) if draw.random() < 0.4}
    half = [s for s in droppable if draw.random() < 0.5]
    plans = []
    for dropped, below in ((droppable, {}), (half, {}), ([s for s in half if s not in offloaded], offloaded)):
        recomputations = recomputations_for(recipes, dropped, offloaded=below)
        peak = timeline.evaluate(recomputations).peak_bytes + search.extra_bytes
        plans.append(
            changed(
                plain,
                budget_bytes=peak + SLACK_BYTES,
                script=compile_script(recipes, recomputations),
                prediction=replace(plain.prediction, peak_bytes=peak),
            )
        )
    return plans


def check(program: Any) -> int:
    """Assert what this page promises; the number of operations that were run again."""
    model, sample, loss_fn = program
    leaky = leaks(model, sample)
    reference = outcome_of(model, sample, loss_fn)  # from here on the model is put back after each run
    recomputations = 0
    for number, made in enumerate(plans_of(model, sample)):
        found = outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn, None))
        recomputations += found.recomputations
        assert found.divergence is None, number
        assert found.differs(reference) is None, number
        if leaky:
            continue  # what a step holds then depends on the steps before it
        measured, predicted = measured_peak(made, model, sample, loss_fn), made.prediction.peak_bytes
        close = max(0.005 * measured, UNSEEN_BYTES)
        assert predicted >= measured - close, (number, predicted, measured)
        # Plain PyTorch needs the unseen bytes as well, so the plain plan is let through at its own peak.
        assert measured <= made.budget_bytes + (UNSEEN_BYTES if made.script.plain else 0), (number, measured)
        if made.script.plain and predicted > measured + close:
            measured = measured_peak(made, model, sample, watched_loss)
        assert predicted <= measured + close, (number, predicted, measured)
    return recomputations


# -- several steps -----------------------------------------------------------------------------------------------------------

# Choices that a technique is made of.
CHOSEN = ("precision", "state_format", "state_place", "update", "loss_chunks")
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
}


def unseen(model: Branching) -> bool:
    """Whether both its forwards call the same operations, with the same need for gradients, and may still hold other bytes."""
    return model.change == "operand" or (model.change == "detach" and not model.changed_is_read)


def told(what: str) -> None:
    """Count it in hypothesis's statistics, when a program was drawn."""
    if currently_in_test_context():
        event(what)


def drawing_nothing(planner: Any) -> Any:
    """A planner that leaves the generator alone; see `test_planning_leaves_the_generator_alone`."""

    def plan_for(batch: Any) -> memfit.Plan:
        with torch.random.fork_rng():
            found: memfit.Plan = planner(batch)
        return found

    return plan_for


@dataclass(frozen=True, slots=True)
class Technique:
    """How steps are run, beside their budget.

    Attributes:
        choices: all but the frozen parts.
        frozen_by: seed of what is frozen; None for nothing.
    """

    choices: Choices = BASELINE
    frozen_by: int | None = None

    def frozen(self, model: nn.Module) -> list[str]:
        """Paths of the modules of a program that are frozen."""
        if self.frozen_by is None:
            return []
        draw = random.Random(self.frozen_by)
        named = dict.fromkeys(
            ".".join(name.split(".")[: 2 if name.startswith("parts") else 1]) for name, _ in model.named_parameters()
        )
        return [path for path in named if draw.random() < 0.4]


class Loop:
    """Steps as torch documents them, with the same technique: autocast, gradient scaler, `requires_grad`; every update after backward, all state in memory."""

    def __init__(self, model: nn.Module, loss_fn: Any, optimizer: Optimizer, technique: Technique) -> None:
        self.model, self.loss_fn, self.choices = model, loss_fn, technique.choices
        for path in technique.frozen(model):
            model.get_submodule(path).requires_grad_(False)
        self.optimizer = optimizer(p for p in model.parameters() if p.requires_grad)
        if self.choices.state_format == "8bit":
            self.optimizer = eight_bit(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu") if self.choices.precision == "fp16" else None

    def loss(self, batch: Tensor) -> Tensor:
        dtype = FORMATS.get(self.choices.precision)
        region = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
        with chunked_head(self.model, self.choices.loss_chunks), region:
            found: Tensor = self.loss_fn(self.model, batch)
        return found

    def step(self, parts: Sequence[Tensor], shares: Sequence[float]) -> float | None:
        """The weighted loss; None when it is infinite or no number, which the engine refuses to train on."""
        whole = 0.0
        for part, share in zip(parts, shares, strict=True):
            loss = self.loss(part)
            if self.scaler is None and not loss.isfinite():
                return None
            whole += loss.item() * share
            scaled = loss if self.scaler is None else self.scaler.scale(loss)
            scaled.backward(None if len(parts) == 1 else torch.full_like(scaled.detach(), share))
        if self.scaler is None:
            self.optimizer.step()
        elif any(p.grad is not None for p in self.model.parameters()):
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        for parameter in self.model.parameters():
            parameter.grad = None
        return whole


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor | None]:
    """Everything that a step may change; optimizer state as it is saved, wherever it lies."""
    kept = optimizer.state_dict()["state"]
    values = [kept[place][name] for place in sorted(kept) for name in sorted(kept[place])]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), *tensors]


def runs_plainly(model: nn.Module, loss_fn: Any, batch: Tensor, technique: Technique) -> bool:
    """Whether plain PyTorch takes a step this way at all, either way of a branch: not all run in 16 bits, and a frozen one may have nothing to train."""
    models = [model]
    if isinstance(model, Branching):
        one, other = (Branching(model.instructions, model.seed, model.at, "counter", model.change) for _ in range(2))
        other.forwards = 1
        models = [one, other]
    in_32bit = replace(technique, choices=technique.choices.but(state_format="32bit"))
    try:
        loops = [Loop(copy.deepcopy(each), loss_fn, OPTIMIZERS["sgd"], in_32bit) for each in models]
        return all(loop.step([batch], [1.0]) is not None for loop in loops)
    except (RuntimeError, ValueError, IndexError):
        return False


def check_steps(
    program: Any,
    lengths: Sequence[int],
    optimizer: Optimizer,
    fraction: float | None,
    technique: Technique = Technique(),
    *,
    may_diverge: bool = False,
) -> tuple[int, int]:
    """Assert that steps under a plan are plain PyTorch's, to the last bit, and stay inside the budget.

    Args:
        program: as `programs` draws it.
        lengths: of the batches, one for each step.
        optimizer: of the steps.
        fraction: of the way from the smallest budget to plain; None for a plan that offloads, drops and keeps at random.
        technique: of the steps.
        may_diverge: whether steps on a batch of the planned shape may diverge from the plan.

    Returns:
        Operations run again, and steps that diverged.
    """
    model, sample, loss_fn = program
    choices, number_of_parts = technique.choices, technique.choices.micro_batches
    if technique != Technique() and not runs_plainly(model, loss_fn, sample, technique):
        told("plain PyTorch does not run this either")
        return 0, 0
    plain = Loop(copy.deepcopy(model), loss_fn, optimizer, technique)
    theirs = plain.model
    looked_at = Loop(copy.deepcopy(model), loss_fn, optimizer, technique)
    leaky = leaks(looked_at.model, sample, lambda _, batch: looked_at.loss(batch))
    fixed = {name: getattr(choices, name) for name in ("micro_batches", *CHOSEN)}
    try:
        made = memfit.plan(model, sample, loss_fn, 1 << 50, optimizer, freeze=technique.frozen(model), fixed=fixed)
    except memfit.MemfitError as error:  # anything else is a crash
        told(f"refused: {type(error).__name__}: {str(error)[:90]}")
        return 0, 0
    if fraction is None:
        made = blind_plans(made)[-1]
    else:
        search = planning_of(made)
        smallest, largest = search.smallest()[0], search.plain_peak()
        made = memfit.replan(made, round(smallest + (largest - smallest) * fraction))
    assert {name: getattr(made.choices, name) for name in CHOSEN} == {name: fixed[name] for name in CHOSEN}
    engine = memfit.apply(made, model)
    engine.planner = drawing_nothing(engine.planner)
    assert engine.optimizer is not None
    for each in (model, theirs):
        if isinstance(each, Branching):
            each.forwards = 0  # capture and planning have run it as well
    trace = planning_of(made).solver(number_of_parts).trace
    planned_state = sum(s.bytes for s in trace.storages if s.category is Category.OPTIMIZER_STATE)
    # A plan that drops nothing is not followed, and which tensors operations read is compared only where they are run again.
    unnoticed = isinstance(model, Branching) and (made.script.plain or unseen(model))
    recomputations = diverged = 0
    for number, length in enumerate(lengths):
        batch = sample.roll(number, 0)[:length].clone()  # another first sample each time, on which a branch may depend
        parts, shares = [batch], [1.0]
        if number_of_parts > 1:
            largest_part = made.choices.micro_batch_size
            parts = batches.split(batch, batches.micro_batch_sizes(length, -(-length // largest_part)))
            shares = batches.shares(parts, made.choices.weights) or []
        torch.manual_seed(number)
        loss = plain.step(parts, shares)
        if loss is None or not all(bool(p.isfinite().all()) for p in theirs.parameters()):
            return (
                recomputations,
                diverged,
            )  # the drawn program was only tried on the sample; the engine refuses such steps
        # A plan of its own, for a shape that diverged, runs the forward before the step does.
        fresh = model.forwards if isinstance(model, Branching) else 0
        torch.manual_seed(number)
        budget = engine.plan_for(batch).budget_bytes  # larger than the user's where a path was learnt that does not fit
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            record = engine.step(batch, meter=True)
        if isinstance(model, Branching):
            model.forwards = fresh + 1
        assert loss == record.loss or (math.isnan(loss) and math.isnan(record.loss)), number
        mine, others = state_of(model, engine.optimizer), state_of(theirs, plain.optimizer)
        assert all(same(a, b) for a, b in zip(mine, others, strict=True)), number
        recomputations += record.recomputations
        if record.begun_anew:
            needed = engine.plan_for(batch).budget_bytes  # the smallest on this path may need more than the user gave
            assert needed <= budget or diverged or "no plan for the path" in str([each.message for each in said])
            budget = max(budget, needed)
            # To put generators back takes one state of theirs. What forward has made goes before (tests/engine/test_learnt_paths.py), but for a graph that
            # saves its own output, as these programs may have: plain PyTorch does not let go of it after an error either.
            budget += torch.get_rng_state().nbytes
            diverged += 1
            assert may_diverge, (number, record.begun_anew)
        if record.divergences:
            diverged += 1
            assert may_diverge or length < len(sample), (number, record.divergences)
            assert said or diverged > 1
        elif not leaky and not unnoticed:
            assert record.peak_bytes is not None
            room = UNSEEN_BYTES if made.script.plain else 0
            if diverged:  # such a step may have trained what the plan's never trains, and its state stays
                room += max(0, sum(t.nbytes for t in state_tensors(engine.optimizer)) - planned_state)
            assert record.peak_bytes <= budget + room, (number, record.peak_bytes, budget)
    told(f"{diverged} of {len(lengths)} steps diverged")
    told(in_words(choices) or "plain")
    return recomputations, diverged


# -- parts -------------------------------------------------------------------------------------------------------------------

# Where 16-bit operations run, parts and whole differ by their rounding, and what looks across samples a little cannot be told from that.
ROUGH = 0.1


@dataclass(frozen=True, slots=True)
class Parts:
    """What splitting a batch by hand gives.

    Attributes:
        gradients: weighted and added up; None where a parameter gets none.
        error: difference from the whole batch's, relative to their norm.
    """

    gradients: tuple[Tensor | None, ...]
    error: float


def in_parts(model: nn.Module, sample: Tensor, loss_fn: Any, count: int, weights: str) -> Parts:
    """Plain PyTorch over the parts of a batch, as `weights` says they add up."""
    whole = outcome_of(model, sample, loss_fn).gradients
    parts = batches.split(sample, batches.micro_batch_sizes(len(sample), count))
    shares = batches.shares(parts, weights)
    assert shares is not None
    plain = StepProgram(model, loss_fn)
    before = [b.clone() for b in model.buffers()]
    torch.manual_seed(7)
    for part, share in zip(parts, shares, strict=True):
        plain.forward_backward(part, share)
    added = tuple(None if p.grad is None else p.grad.clone() for p in model.parameters())
    plain.clear()
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    pairs = [(a, b) for a, b in zip(whole, added, strict=True) if a is not None and b is not None]
    norm = sum(float(a.double().square().sum()) for a, _ in pairs) ** 0.5
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs) ** 0.5
    return Parts(added, apart / norm if norm else float("inf"))


def check_parts(program: Any, count: int, *, splits: bool) -> bool:
    """Assert that a batch which splits gives the whole batch's gradient in parts, and that any other is refused.

    Args:
        program: as `programs` draws it.
        count: of the parts.
        splits: whether nothing in it looks across samples, so that it has to split.

    Returns:
        Whether it was split.
    """
    model, sample, loss_fn = program
    names = {each.name for each in model.instructions}
    low = any("bf16" in name or name == "autocast" for name in names)
    made: memfit.Plan | None = None
    try:
        made = memfit.plan(model, sample, loss_fn, 1 << 50, None, fixed={"micro_batches": count})
    except memfit.SplitError as error:
        refused = str(error)
    if made is None:
        assert "batch" in refused
        assert not splits or low, refused  # rounding to 16 bits may go another way in another shape
        return False
    search = planning_of(made)
    smallest, largest = search.smallest()[0], search.plain_peak()
    for budget in (largest, smallest):
        made = memfit.replan(made, budget)
        gradients, ran = gradients_of(made, model, sample)
        assert 1 < ran <= count
        expected = in_parts(model, sample, loss_fn, ran, made.choices.weights)
        if not names & RANDOM:
            assert expected.error < (ROUGH if low else 1e-5), expected.error
        assert all(same(a, b) for a, b in zip(gradients, expected.gradients, strict=True))
    return True


def gradients_of(made: memfit.Plan, model: nn.Module, sample: Tensor) -> tuple[tuple[Tensor | None, ...], int]:
    """Gradients of one engine step, seen when the optimizer is about to use them, and the number of parts."""
    found: list[Tensor | None] = []

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            found.extend(None if p.grad is None else p.grad.clone() for p in model.parameters())

    before = [b.clone() for b in model.buffers()]
    engine = memfit.apply(made, model, optimizer=lambda p: Looking(p, lr=0.0))
    torch.manual_seed(7)
    record = engine.step(sample)
    assert record.divergences == ()
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    return tuple(found), record.micro_batches


# -- drawn -------------------------------------------------------------------------------------------------------------------

EVERYTHING = list(HealthCheck)
# Six tests of few, four of many: sixty programs in every run of the tests, two thousand at night.
few = settings(max_examples=4, derandomize=True, deadline=None, suppress_health_check=EVERYTHING)
many = settings(max_examples=500, derandomize=False, deadline=None, suppress_health_check=EVERYTHING, print_blob=True)

budgets = st.sampled_from((0.0, 0.3, 0.7, 1.0))
tight = st.sampled_from((0.0, 0.3))  # a plan that drops nothing is not followed
budgets_or_blind = st.sampled_from((0.0, 0.3, 0.7, 1.0, None))
optimizers = st.sampled_from(sorted(OPTIMIZERS)).map(OPTIMIZERS.__getitem__)
lengths_of_batches = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(lambda drawn: [4, *drawn])


@st.composite
def techniques(draw: st.DrawFn, *, parts: int = 1, chunks: int = 1) -> tuple[Optimizer, Technique]:
    """An optimizer and a technique that can stand with it.

    Args:
        draw: hypothesis's own.
        parts: of the batch, at most.
        chunks: of the loss head, at most.
    """
    name = draw(st.sampled_from(sorted(OPTIMIZERS)))
    stateless = name == "sgd"
    choices = Choices(
        micro_batches=draw(st.integers(1, parts)),
        precision=draw(st.sampled_from(("full", "full", "bf16", "fp16"))),
        state_format="32bit" if stateless else draw(st.sampled_from(("32bit", "8bit"))),
        state_place="device" if stateless else draw(st.sampled_from(("device", "disk"))),
        update=draw(st.sampled_from(("after", "in_backward"))),
        loss_chunks=draw(st.integers(1, chunks)),
    )
    assume(conflict(choices) is None)
    return OPTIMIZERS[name], Technique(choices, draw(st.none() | st.integers(0, 99)))


@few
@given(programs())
def test_any_program_gives_plain_numbers_and_the_predicted_peak(program: Any) -> None:
    check(program)


# Only what ends in a loss head has one to take in chunks.
trained = st.tuples(programs(), techniques(parts=2)) | st.tuples(headed(), techniques(parts=2, chunks=3))


@few
@given(trained, budgets_or_blind)
def test_any_program_trains_as_plain(drawn: Any, fraction: float | None) -> None:
    program, (optimizer, technique) = drawn
    check_steps(program, [4, 4, 4], optimizer, fraction, technique)


def check_shorter(
    program: Any,
    lengths: Sequence[int],
    optimizer: Optimizer,
    fraction: float | None,
    technique: Technique = Technique(),
) -> None:
    model, sample, loss_fn = program
    for length in set(lengths):  # tables and views may be made for another
        assume(runs_plainly(model, loss_fn, sample[:length], technique))
    check_steps(program, lengths, optimizer, fraction, technique)


@few
@given(programs(), lengths_of_batches, optimizers, budgets)
def test_any_program_takes_batches_shorter_than_planned(
    program: Any, lengths: Sequence[int], optimizer: Optimizer, fraction: float
) -> None:
    check_shorter(program, lengths, optimizer, fraction)


@few
@given(programs(WITHIN_SAMPLES), st.integers(2, 3))
def test_any_program_that_splits_gives_the_same_gradient_in_parts(program: Any, count: int) -> None:
    check_parts(program, count, splits=True)


@few
@given(programs(), st.integers(2, 3))
def test_any_program_splits_rightly_or_is_refused(program: Any, count: int) -> None:
    event("split" if check_parts(program, count, splits=False) else "refused")


@few
@given(branching(), optimizers, tight)
def test_any_program_may_change_from_step_to_step(program: Any, optimizer: Optimizer, fraction: float) -> None:
    check_steps(program, [4, 4, 4, 4, 4], optimizer, fraction, may_diverge=True)


@pytest.mark.slow
@many
@given(programs())
def test_five_hundred_programs_give_plain_numbers(program: Any) -> None:
    check(program)


@pytest.mark.slow
@many
@given(trained, lengths_of_batches, budgets_or_blind)
def test_five_hundred_programs_train_as_plain(drawn: Any, lengths: Sequence[int], fraction: float | None) -> None:
    program, (optimizer, technique) = drawn
    check_steps(copy.deepcopy(program), [4, 4, 4], optimizer, fraction, technique)
    whole = replace(technique, choices=replace(technique.choices, micro_batches=1))
    check_shorter(program, lengths, optimizer, fraction, whole)


@pytest.mark.slow
@many
@given(st.booleans().flatmap(lambda all_: programs() if all_ else programs(WITHIN_SAMPLES)), st.integers(2, 3))
def test_five_hundred_programs_split_rightly_or_are_refused(program: Any, count: int) -> None:
    names = {each.name for each in program[0].instructions}
    check_parts(program, count, splits=names <= WITHIN_SAMPLES)


@pytest.mark.slow
@many
@given(branching(), techniques(), tight)
def test_five_hundred_programs_change_from_step_to_step(
    program: Any, technique: tuple[Optimizer, Technique], fraction: float
) -> None:
    check_steps(program, [4, 4, 4, 4, 4], technique[0], fraction, technique[1], may_diverge=True)


# -- found by the above ------------------------------------------------------------------------------------------------------


def step(name: str, *operands: int, sizes: tuple[int, ...] = ()) -> Instruction:
    return Instruction(name, operands, sizes)


FOUND = {
    # Gradients of one node that meet again at the next are added up in place, although the same node made both.
    "square": (step("mul", 1, 1), step("mul", 2, 2), step("tanh", 3)),
    # Backward of max and of gather write into fresh zeros in place, and only when no mode watches.
    "gather": (step("below_max", 1), step("gelu", 3), step("below_max", 4)),
    # index_select with a table made for the whole batch does not run on the two samples with which a fake capture is checked.
    "whole_batch_only": (step("index_select", 1, sizes=(4,)), step("gelu", 2), step("mul", 2, 3)),
    # linear of an expanded input adds its bias in place, except while a mode watches.
    "linear_of_expanded": (
        step("expand", 1),
        *(step("linear", 2, sizes=(8,)) for _ in range(3)),
        step("batch_norm", 4, sizes=(8,)),
        step("linear", 2, sizes=(8,)),
    ),
    # Several masks drawn again before one unpack: each generator state goes as soon as its mask is drawn.
    "masks_drawn_again": (
        step("dropout", 1),
        step("slice_add_", 2),
        step("slice_add_", 2),
        step("dropout", 2),
    ),
    # What the batch alone makes is real in a fake capture; a fake value is written into it.
    "fake_into_real": (
        step("softmax", 0),
        step("index_select", 0, sizes=(4,)),
        step("mul_", 2, 3),
        step("batch_norm", 1, sizes=(8,)),
    ),
    # x.mul_(x) that the loss does not reach: PyTorch's own leak, cut by the hooks.
    "own_output": (step("below_max", 1), step("mul_", 2, 2), step("mul", 1, 1), step("relu", 3), step("tanh", 4)),
}


@pytest.mark.parametrize("instructions", FOUND.values(), ids=FOUND)
def test_programs_that_failed_once(instructions: tuple[Instruction, ...]) -> None:
    check((Program(instructions, 0), sample_of(0), program_loss))


def test_state_is_made_inside_backward_in_the_room_of_later_steps() -> None:
    """Beside activations, in the first step: the optimizer's own new state and the workspace were more than any later update takes."""
    instructions = (
        step("linear", 1, sizes=(8,)),
        step("linear", 2, sizes=(8,)),
        step("softmax", 3),
        step("linear", 0, sizes=(8,)),
        step("wide", 4, sizes=(8,)),
    )
    program = Program(instructions, 23186), sample_of(23186), program_loss
    choices = Choices(state_place="disk", update="in_backward")
    check_steps(program, [4, 4], OPTIMIZERS["adamw"], 0.0, Technique(choices, frozen_by=1))


def test_programs_are_run_again_in_part() -> None:
    instructions = (step("tanh", 1), step("linear", 2, sizes=(8,)), step("gelu", 3), step("dropout", 4))
    assert check((Program(instructions, 0), sample_of(0), program_loss)) > 0


# -- found by steps and branches -------------------------------------------------------------------------------------------------


def test_a_batch_split_in_more_parts_than_its_largest_part_needs() -> None:
    """Four samples in three parts are run as two parts of two: no more memory, and the same sum."""
    assert check_parts((Program((step("relu", 0),), 53), sample_of(53), program_loss), 3, splits=True)


def test_a_small_difference_between_samples_is_found() -> None:
    """Batch norm right before a mean of squares: parts add up but for its epsilon, 8e-5 of the gradient."""
    instructions = (
        step("cat", 1, 0),
        step("layer_norm", 2, sizes=(16,)),
        step("batch_norm", 3, sizes=(16,)),
        step("sum_broadcast", 0),
        step("batch_norm", 2, sizes=(16,)),
        step("batch_norm", 3, sizes=(16,)),
    )
    assert not check_parts((Program(instructions, 2), sample_of(2), program_loss), 3, splits=False)


def test_planning_leaves_the_generator_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a shape that gets a plan of its own in mid-training changes what dropout draws from there on."""
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(nn.Linear(7, 13), nn.Dropout(0.31), nn.Linear(13, 1))
    before = torch.get_rng_state()
    memfit.plan(model, torch.ones(5, 7), lambda m, b: m(b).square().mean(), 1 << 40, None, fixed={"micro_batches": 1})
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_same_operations_on_another_tensor_are_another_forward(optimizer: str) -> None:
    """`y = tanh if step % 2 else sigmoid`, both computed: the names of the operations are the same every time."""
    instructions = (*(step("gelu", place) for place in range(1, 4)), step("softmax", 4))
    program = Branching(instructions, 0, 0, "counter", "operand")
    check_steps((program, sample_of(0), program_loss), [4, 4, 4], OPTIMIZERS[optimizer], 0.0, may_diverge=True)


@pytest.mark.slow
def test_a_branch_that_does_not_run_on_two_samples_is_looked_at_on_all() -> None:
    """The first look at it takes the other way, the second one runs into a table made for the whole batch: it was an IndexError."""
    table = (step("linear", 1, sizes=(8,)), step("index_select", 2, sizes=(4,)))
    for last in (step("linear", 3, sizes=(8,)), step("slice_add_", 3)):
        for seed in (0, 1, 2):  # which way a look takes is drawn; any of several may be the one that does not run
            torch.manual_seed(seed)
            program = Branching((*table, last), 0, 0, "draw", "stop")
            check_steps((program, sample_of(0), program_loss), [4] * 2, OPTIMIZERS["sgd"], 0.0, may_diverge=True)


@pytest.mark.alternate(0)
@pytest.mark.parametrize("fraction", [0.0, 0.6])
def test_what_was_saved_before_a_divergence_is_made_again_without_writes_that_were_planned(
    fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned with a write into what layer norm makes; without it, nothing that layer norm had saved could be made again."""
    monkeypatch.setattr(values_read, "LEAST_LIKELY", math.inf)  # else the rows of the sample tell of the other path
    instructions = (step("layer_norm", 1, sizes=(8,)), *(step("linear", place, sizes=(8,)) for place in range(2, 8)))
    program = Branching(instructions, 0, 0, "value", "write")
    recomputations, diverged = check_steps(
        (program, sample_of(0), program_loss), [4] * 4, OPTIMIZERS["sgd"], fraction, may_diverge=True
    )
    assert recomputations
    assert diverged


class Overwriting(nn.Module):
    """Sometimes writes into what dropped tensors are made of; plain PyTorch needs that no more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.writes = nn.Linear(32, 32), nn.Linear(32, 32), False

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        both = nn.functional.gelu(a + 1) + nn.functional.gelu(a * 2)
        if self.writes:
            a.mul_(0.5)
        found: Tensor = torch.tanh(self.last(both + a)) + a
        return found


@pytest.mark.parametrize("below", ["dropped", "offloaded"])
@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.4, 0.6, 0.8])
def test_a_write_that_was_not_planned_changes_nothing_that_is_made_again(
    fraction: float, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients were wrong: the rerun of `a + 1` read `a` after the write."""
    monkeypatch.setenv("MEMFIT_OFFLOAD_DIR", str(tmp_path))
    model, sample = Overwriting(), torch.randn(64, 32)
    loss_fn = lambda m, b: m(b).square().mean()  # noqa: E731
    plain = memfit.plan(model, sample, loss_fn, 1 << 50, None, fixed={"micro_batches": 1})
    search = planning_of(plain)
    smallest, largest = search.smallest()[0], search.plain_peak()
    made = memfit.replan(plain, round(smallest + (largest - smallest) * fraction))
    if below == "offloaded":
        made = offloading(plain, random.Random(fraction))
    model.writes = True
    right = outcome_of(model, sample, loss_fn)
    found = outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn, None))
    assert found.divergence is not None
    assert found.differs(right) is None


def offloading(plain: memfit.Plan, draw: random.Random) -> memfit.Plan:
    """From a plan that drops nothing: one that offloads half of what can be, and drops the rest."""
    solver = planning_of(plain).solver(1)
    recipes = Recipes(solver.trace, Link("disk", 1e9, 1e9, 1e-4, least_bytes=1))
    offloaded = {s: draw.choice(ways) for s, ways in sorted(recipes.reloads_of.items()) if draw.random() < 0.5}
    dropped = sorted(recipes.saved & recipes.rebuildable - offloaded.keys())
    script = compile_script(recipes, recomputations_for(recipes, dropped, offloaded=offloaded))
    assert script.swaps
    return changed(plain, script=script)


@pytest.mark.slow
def test_state_made_by_steps_that_departed_is_all_that_comes_on_top() -> None:
    """Planned without a gradient for the first layers, which every second step trains."""
    instructions = (*(step("linear", place, sizes=(8,)) for place in range(1, 10)), step("linear", 4, sizes=(8,)))
    program = Branching(instructions, 0, 0, "counter", "detach")
    _, diverged = check_steps(
        (program, sample_of(0), program_loss), [4] * 5, OPTIMIZERS["adamw"], 0.0, may_diverge=True
    )
    assert diverged


def test_a_branch_that_only_detaches_is_seen() -> None:
    """With a gradient not wanted, other operations free what they made at other times: 264 bytes above the budget."""
    instructions = (
        step("linear", 0, sizes=(8,)),
        step("relu", 0),
        step("dropout", 3),
        step("add", 3, 1),
        step("dropout_", 4),
        step("tanh", 1),
        step("mul_", 6, 1),
        step("scale_", 6),
        step("autocast", 4, sizes=(8,)),
        step("clone", 7),
        step("mul_", 2, 0),
        step("mul_", 8, 2),
        step("relu", 2),
        step("linear", 0, sizes=(8,)),
        step("no_grad", 9),
        step("narrow_linear", 11, sizes=(8,)),
        step("cat", 8, 10),
    )
    program = Branching(instructions, 102, 6, "value", "detach")
    for optimizer in OPTIMIZERS.values():
        made = copy.deepcopy(program)
        check_steps((made, sample_of(102), program_loss), [4] * 5, optimizer, 0.0, may_diverge=True)
