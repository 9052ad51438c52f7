"""Paths that no planning saw: the step that takes one first is begun anew under a plan that knows it; where it cannot be undone, the next one has that plan."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit import batches
from memfit.engine.steps import _kept_where_left
from memfit.planner import branches as several_paths
from memfit.planning import planning_of
from memfit.units import format_bytes
from memfit.values.report import StepRecord
from memfit.values.script import CallScript, Script, Step
from models.paths import HIDDEN, Block, loss_of, sample, seeded
from sweeps import by_turns, each_seed

pytestmark = pytest.mark.usefixtures("one_thread", "short_look")

FIRST = 7  # step of the longer path


class Growing(nn.Module):
    """Runs its blocks once in the first steps and one more of them later, as models that think for longer do."""

    def __init__(self, longer_from: int = FIRST) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.longer_from, self.forwards = longer_from, 0

    def longer(self) -> bool:
        """Whether this forward is."""
        return self.forwards >= self.longer_from

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        self.forwards += 1
        for block in (*self.blocks, self.blocks[0]) if self.longer() else self.blocks:
            x = block(x)
        return x


class NowAndThen(Growing):
    """Runs one of its blocks again every fifth time."""

    def longer(self) -> bool:
        """Whether this forward is."""
        return self.forwards % 5 == 0


class Unrolled(nn.Module):
    """Runs many small operations outside of any module, in one order at first and in another later."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(0.2 * torch.randn(32, 32) for _ in range(8))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        self.forwards += 1
        for weight in self.weights:
            x = torch.tanh(x @ weight) if self.forwards < FIRST else torch.sigmoid(x @ weight).mul(2.0).sub(1.0)
        return x


class Doubling(Growing):
    """Later on it runs over eight times as many rows as well."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        y: Tensor = super().forward(torch.cat([x] * 8) if self.forwards + 1 >= self.longer_from else x)
        return y[: len(x)]


class Normalised(Growing):
    """Has running statistics, and drops what chance says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        y: Tensor = super().forward(self.dropout(self.norm(x.mT).mT))
        return y


class Counting(Growing):
    """Keeps a list of what it has seen, which nobody puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        self.seen.append(len(self.seen))
        return super().forward(x * (1.0 + 0.1 * len(self.seen)))


class Teacher(Growing):
    """Moves parameters that are not trained in every forward, as a momentum encoder does, without anybody's seeing a new version of them."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        weight = next(self.blocks.parameters())
        self.average.data.lerp_(weight.data, 0.1)
        return super().forward(x + self.average)


class Stubborn(Growing):
    """Goes on whatever happens in its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        self.forwards += 1
        for block in (*self.blocks, self.blocks[0]) if self.longer() else self.blocks:
            try:
                x = block(x)
            except:  # noqa: E722 - as some do
                x = x * 2.0
        return x


def trained(
    build: Callable[[], Any], share: float, steps: int, micro_batches: int = 1, update: str = "after"
) -> tuple[memfit.Plan, list[StepRecord]]:
    """A plan at this share of the plain peak that planning knows, and the steps under it, each with the numbers of plain PyTorch."""
    seeded(0)
    model = build()
    seeded(0)
    reference = build()
    fixed = {"micro_batches": micro_batches, "update": update}
    most = memfit.plan(model, sample(), loss_of, 1 << 50, small.adamw, fixed=fixed)
    budget = round(share * most.prediction.plain_peak_bytes)
    plan = memfit.replan(most, budget)
    engine = memfit.apply(plan, model)
    optimizer = small.adamw(reference.parameters())
    records = []
    for step in range(steps):
        seeded(100 + step)
        record = engine.step(sample(), meter=True)
        seeded(100 + step)
        total = 0.0
        for part in batches.split(sample(), [8 // micro_batches] * micro_batches):
            loss = loss_of(reference, part)
            loss.backward(None if micro_batches == 1 else torch.tensor(1.0 / micro_batches))
            total += loss.item() / micro_batches
        optimizer.step()
        optimizer.zero_grad()
        assert record.loss == total
        records.append(record)
    mine, theirs = model.state_dict(), reference.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    return plan, records


def above(records: list[StepRecord], budget: int) -> list[int]:
    return [record.step for record in records if record.peak_bytes is not None and record.peak_bytes > budget]


def told(
    build: Callable[[], Any], share: float, steps: int, micro_batches: int = 1, update: str = "after"
) -> tuple[memfit.Plan, list[StepRecord], str]:
    """As `trained`, with what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan, records = trained(build, share, steps, micro_batches, update)
    return plan, records, "\n".join(str(warning.message) for warning in caught)


def begun_anew(records: list[StepRecord]) -> list[int]:
    return [record.step for record in records if record.begun_anew]


def diverged(records: list[StepRecord]) -> list[int]:
    return [record.step for record in records if record.divergences]


def test_a_forward_that_grows_is_learnt_in_the_step_that_takes_it_first() -> None:
    plan, records, said = told(Growing, 0.9, 12)
    assert (begun_anew(records), diverged(records)) == ([FIRST], [])
    assert not above(records, plan.budget_bytes)
    assert "The step was begun anew, under a plan that knows its path" in said


def test_a_plan_from_a_file_is_learnt_from_where_the_model_is(tmp_path: Path) -> None:
    seeded(0)
    model = Growing()
    seeded(0)
    reference = Growing()
    most = memfit.plan(model, sample(), loss_of, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    memfit.replan(most, round(0.9 * most.prediction.plain_peak_bytes)).save(tmp_path / "plan.json")
    plan = memfit.Plan.load(tmp_path / "plan.json")
    optimizer = small.adamw(reference.parameters())
    engine = memfit.apply(plan, model, loss_of, small.adamw(model.parameters()))
    records = []
    for step in range(FIRST + 2):
        seeded(100 + step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            records.append(engine.step(sample(), meter=True))
        seeded(100 + step)
        loss = loss_of(reference, sample())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert records[-1].loss == loss.item()
    assert (begun_anew(records), diverged(records)) == ([FIRST], [])
    assert not above(records, plan.budget_bytes)


def test_a_plan_that_drops_nothing_sees_a_longer_path_by_its_calls() -> None:
    plan, records, said = told(Growing, 1.02, FIRST + 2)
    assert plan.script.plain
    assert (begun_anew(records), diverged(records)) == ([FIRST], [])
    assert not above(records, plan.budget_bytes)
    assert "blocks.0 is called more often than on any path that is known (1)" in said


def test_a_path_taken_now_and_then_is_learnt_when_it_first_comes() -> None:
    plan, records, _ = told(NowAndThen, 0.9, 16)
    assert (begun_anew(records), diverged(records)) == ([5], [])
    assert not above(records, plan.budget_bytes)


@pytest.mark.slow
def test_a_path_that_does_not_fit_is_told_and_numbers_stay() -> None:
    plan, records, said = told(Doubling, 0.62, 9)
    assert (begun_anew(records), diverged(records)) == ([FIRST], [])
    assert (
        "no plan for the path that a step took fits in the budget: the smallest, which is followed on that path from now on, takes "
        in said
    )
    assert above(records, plan.budget_bytes) == [FIRST, FIRST + 1, FIRST + 2]


class Late(nn.Module):
    """Takes another path from the third forward on, at the operation before which it holds most.

    Args:
        larger: the later path takes more memory; it takes as much otherwise.
    """

    def __init__(self, *, larger: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 8)
        self.larger, self.forwards = larger, 0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        self.forwards += 1
        y: Tensor = self.linear(x)
        for _ in range(12):
            y = torch.sigmoid(y)
        if self.forwards <= 2:
            return torch.sigmoid(y)
        return torch.tanh(torch.cat([y] * 8)) * torch.exp(y.mean()) if self.larger else torch.tanh(y) * 2.0


@pytest.mark.parametrize("larger", [False, True])
@pytest.mark.parametrize("optimizer", ["planned", "given later"])
def test_a_step_begun_anew_takes_no_more_than_its_plan(optimizer: str, *, larger: bool) -> None:
    """While a generator is put back its state takes 5,056 bytes, which came on top of all that the ended forward had made."""
    seeded(0)
    model, rows = Late(larger=larger), torch.randn(32, HIDDEN)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1e-4)  # noqa: E731
    planned = sgd if optimizer == "planned" else None
    most = memfit.plan(model, rows, lambda m, b: m(b).sum(), 1 << 50, planned, fixed={"micro_batches": 1})
    plan = memfit.replan(most, round(0.95 * most.prediction.plain_peak_bytes))
    engine = memfit.apply(plan, model, None, None if planned else sgd(model.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = [engine.step(rows, meter=True) for _ in range(4)]
    assert begun_anew(records) == [3]
    learnt = engine.plan_for(rows)
    assert (learnt.budget_bytes > plan.budget_bytes) == larger
    assert above(records, learnt.budget_bytes) == []
    assert records[-1].peak_bytes == learnt.prediction.peak_bytes
    more = format_bytes(learnt.budget_bytes - plan.budget_bytes)
    assert any(f"from now on, takes {more} more" in str(each.message) for each in caught) == larger


class Wider(nn.Module):
    """Makes something wide between modules where it is told to; its other forwards fit in fewer bytes with nothing dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.wide = True

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to (batch, 12 * width)."""
        x = self.layers[0](x)
        if self.wide:
            x = torch.sigmoid(torch.cat([x] * 6, -1)).sin()[:, :HIDDEN]
        for layer in self.layers[1:]:
            x = layer(x)
        return torch.exp(torch.cat([x] * 12, -1))


@pytest.mark.parametrize(
    "in_one",
    [pytest.param(True, id="one plan"), pytest.param(False, id="a plan each", marks=pytest.mark.slow)],
)
def test_a_plan_that_drops_nothing_is_not_tried_first_where_it_overlooks_a_larger_path(
    monkeypatch: pytest.MonkeyPatch, *, in_one: bool
) -> None:
    """It had been right in every step of late, and the larger path ran with everything kept. One plan for both needs no step to be begun anew."""
    if not in_one:
        monkeypatch.setattr(several_paths, "MOST_BRANCHES", 1)
    seeded(0)
    model, rows = Wider(), torch.randn(64, HIDDEN)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1e-4)  # noqa: E731
    most = memfit.plan(model, rows, lambda m, b: m(b).square().mean(), 1 << 50, sgd, fixed={"micro_batches": 1})
    plan = memfit.replan(most, planning_of(most).smallest()[0] + (1 << 15))
    engine = memfit.apply(plan, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        records = []
        for number in range(11):
            model.wide = number % 5 == 0
            records.append(engine.step(rows, meter=True))
    assert begun_anew(records) == ([2] if in_one else [2, 3, 4, 5, 7, 8, 9, 10])  # on the path that drops nothing
    assert above(records, plan.budget_bytes) == []


class Sometimes(nn.Module):
    """Where it is told to, it runs something wide among its last layers, of which a plan for few bytes drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(HIDDEN, 16 * HIDDEN), nn.Linear(16 * HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(24))
        self.wide = True

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to (batch, 40 * width)."""
        x = self.last(torch.sigmoid(torch.exp(-self.first(x).square())))
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.wide and number == 20:
                x = torch.sigmoid(torch.cat([x] * 20, -1)).sin()[:, :HIDDEN]
        return torch.exp(torch.cat([x] * 40, -1))


def test_with_several_paths_known_nothing_is_left_unfollowed() -> None:
    """In a stretch in which one path's plan drops nothing the other path ran unseen, and above the budget."""
    seeded(0)
    model, rows = Sometimes(), torch.randn(64, HIDDEN)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1e-4)  # noqa: E731
    plans, budget = [], 0
    for model.wide in (False, True):
        most = memfit.plan(model, rows, lambda m, b: m(b).square().mean(), 1 << 50, sgd, fixed={"micro_batches": 1})
        budget = budget or most.prediction.plain_peak_bytes - (1 << 16)
        plans.append(memfit.replan(most, budget))
    narrow, wide = plans
    assert narrow.script.kept_stretches, "something is left unfollowed while this path alone is known"
    engine = memfit.apply(narrow, model)
    engine._plans.add_paths(narrow.signature, (narrow, wide))
    records = []
    for model.wide in (False, False, False, True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            records.append(engine.step(rows, meter=True))
    assert begun_anew(records) == [4]
    assert above(records, budget) == []


def test_where_both_paths_do_not_fit_the_one_that_is_taken_now_is_planned_for() -> None:
    """The first forwards run everything in one way, later ones in another; a plan for both decides within calls alone, and takes more."""
    plan, records, said = told(Unrolled, 0.6, 12)
    assert (begun_anew(records), diverged(records)) == ([FIRST], [])
    assert not above(records, plan.budget_bytes)
    assert "no plan for the path" not in said


@pytest.mark.slow
def test_a_second_engine_of_the_same_planning_learns_for_itself() -> None:
    seeded(0)
    model = Unrolled()
    most = memfit.plan(model, sample(), loss_of, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    plan = memfit.replan(most, round(0.6 * most.prediction.plain_peak_bytes))
    for _ in range(2):
        engine = memfit.apply(plan, Unrolled(), loss_of, small.adamw)
        with pytest.warns(UserWarning, match="was ended there") as warned:
            records = [engine.step(sample(), meter=True) for _ in range(FIRST + 2)]
        assert {each.filename for each in warned} == {__file__}
        assert (begun_anew(records), diverged(records)) == ([FIRST], [])
        assert not above(records, plan.budget_bytes)


def test_what_is_always_the_same_is_never_looked_at_again() -> None:
    _, records, said = told(lambda: Growing(longer_from=0), 0.7, 6)
    assert all(record.divergences == () for record in records)
    assert "captured" not in said


@pytest.mark.alternate(0)
@pytest.mark.parametrize("build", [Normalised, Stubborn])
def test_a_step_that_is_begun_anew_has_the_numbers_of_one_that_is_not(build: Callable[[], Any]) -> None:
    plan, records, _ = told(build, 0.9, 9)
    assert (begun_anew(records), diverged(records)) == ([FIRST], [])
    assert not above(records, plan.budget_bytes)


@pytest.mark.alternate(1)
@pytest.mark.parametrize("update", ["after", "in_backward"])
def test_a_step_of_several_micro_batches_is_begun_anew(update: str) -> None:
    """The second one is the first to take the longer path, when there are gradients of the first already."""
    plan, records, _ = told(lambda: Growing(longer_from=2 * FIRST), 0.9, FIRST + 3, 2, update)
    assert (begun_anew(records), diverged(records)) == ([FIRST], [])
    assert not above(records, plan.budget_bytes)


class Asking(Growing):
    """Runs one of its blocks again where something of the batch is zero."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        self.longer_from = 0 if bool((x == 0.0).any()) else 1 << 50
        return super().forward(x)


@pytest.mark.parametrize(
    ("update", "optimizer"), by_turns(["after", "in_backward"], [small.adamw, partial(torch.optim.SGD, lr=1e-3)])
)
def test_a_path_that_comes_first_is_learnt_with_what_other_steps_and_micro_batches_leave(
    update: str, optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """No state tells yet which parameters are trained: gradients of the first micro-batch were not counted in the second."""
    seeded(0)
    model = Asking()
    full, padded = torch.randn(128, HIDDEN), torch.randn(128, HIDDEN)
    padded[:, -1] = 0.0
    fixed = {"micro_batches": 2, "update": update}
    most = memfit.plan(model, full, lambda m, x: m(x).square().mean(), 1 << 50, optimizer, fixed=fixed)
    engine = memfit.apply(memfit.replan(most, round(0.9 * most.prediction.plain_peak_bytes)), model)
    with pytest.warns(UserWarning, match="was begun anew"):
        records = [engine.step(padded, meter=True) for _ in range(3)]
    assert begun_anew(records) == [1]
    learnt = engine.plan_for(padded)
    assert above(records, learnt.budget_bytes) == []
    assert records[-1].peak_bytes == learnt.prediction.peak_bytes


@pytest.mark.parametrize("build", [Counting, Teacher])
def test_a_step_that_cannot_be_undone_is_kept_plain_and_learnt_after_it(build: Callable[[], Any]) -> None:
    plan, records, said = told(build, 0.9, 12)
    assert (begun_anew(records), diverged(records)) == ([], [FIRST])
    assert set(above(records, plan.budget_bytes)) <= {FIRST}
    assert "the path that it took is captured and planned for" in said


def engines(build: Callable[[], Any], share: float, number: int) -> tuple[memfit.Engine, Any]:
    """An engine for so many micro-batches, and the same model in plain PyTorch."""
    seeded(0)
    model = build()
    seeded(0)
    reference = build()
    fixed = {"micro_batches": number}
    most = memfit.plan(model, sample(), loss_of, 1 << 50, small.adamw, fixed=fixed)
    plan = memfit.replan(most, round(share * most.prediction.plain_peak_bytes))
    return memfit.apply(plan, model), reference


def test_what_a_loader_brings_is_learnt_after_the_step() -> None:
    engine, _ = engines(lambda: Growing(longer_from=2 * FIRST), 0.9, 2)
    parts = batches.split(sample(), [4, 4])
    with pytest.warns(UserWarning, match="kept plain from there on"):
        records = [engine.accumulate(iter(parts), meter=True) for _ in range(FIRST + 3)]
    assert diverged(records) == [FIRST]
    assert set(above(records, engine.plan.budget_bytes)) <= {FIRST}


def test_what_a_loop_of_ones_own_does_is_learnt_where_it_hands_over_the_batch() -> None:
    engine, reference = engines(Growing, 0.9, 1)
    optimizer = small.adamw(reference.parameters())
    told = []
    for step in range(FIRST + 2):
        seeded(step)
        batch = sample()
        with engine.forward(batch) as follower:
            loss = loss_of(engine.model, batch)
        assert follower is not None
        told.append(follower.divergence is not None)
        loss.backward()
        assert engine.optimizer is not None
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        seeded(step)
        expected = loss_of(reference, batch)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == expected.item()
    assert told == [step + 1 == FIRST for step in range(FIRST + 2)]


class LeavingOut(nn.Module):
    """Leaves blocks out by Python's random numbers, the first one and all of them, too: a block saves less where nothing before it wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() >= 0.2:
                x = x + block(x)
        return x


@pytest.mark.slow
@each_seed(2, 16)
def test_steps_on_paths_that_cannot_all_be_learnt_stay_in_the_budget(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(0)
    model, batch = LeavingOut(), torch.randn(512, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = memfit.fit(model, batch, lambda m, b: m(b).pow(2).mean(), "8100KiB", small.adamw)
        records = [engine.step(batch, meter=True) for _ in range(60)]
    assert above(records, 8100 << 10) == []


def test_where_a_forward_has_left_all_plans_the_one_is_followed_that_keeps_least_from_there_on() -> None:
    plain, by_operations, by_calls = (
        Script(),
        Script(steps=(Step(0, (), (), ()),)),
        Script(calls=(CallScript("m", 0, Script()),)),
    )
    plans: list[Any] = [SimpleNamespace(script=script) for script in (plain, by_operations, by_calls)]
    assert sorted(plans, key=_kept_where_left) == plans[::-1]


class Refusing(nn.Module):
    """Draws from Python's and numpy's generators and counts, and may fail after that."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.forwards, self.fails = 0, False

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        self.forwards += 1
        scale = random.random() + np.random.rand()  # noqa: NPY002 - as models do
        if self.fails:
            raise RuntimeError("as asked")
        y: Tensor = self.block(x) * scale
        return y


def test_a_step_that_fails_draws_the_same_numbers_again() -> None:
    seeded(0)
    model = Refusing()
    plan = memfit.plan(model, sample(), loss_of, "1GiB", small.adamw, fixed={"micro_batches": 1})
    engine = memfit.apply(plan, model)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    model.fails = True
    with pytest.raises(RuntimeError, match="as asked"):
        engine.step(sample())
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert after == before
    assert model.forwards == 0


class InitialisedByData(nn.Module):
    """A layer of Glow: its first forward sets its parameters by the batch, and notes in a buffer that it has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Tanh())
        self.register_buffer("done", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.log_scale.copy_(-x.std(0).log())
                self.done.fill_(True)
        x = (x + self.shift) * self.log_scale.exp()
        found: Tensor = x + self.inner(x)
        return found


@pytest.mark.parametrize("flows", [1, 4])
def test_steps_after_one_that_sets_parameters_by_its_batch_are_as_planned(flows: int) -> None:
    """The plan for that step was tried first in all later ones, which left it and were not begun anew, as its forward writes parameters."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(InitialisedByData(32) for _ in range(flows)))

    def squares(model: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = model(x).square().mean()
        return found

    x = 3 * torch.randn(256, 32, generator=torch.Generator().manual_seed(1)) + 1
    plain = memfit.plan(build(), x, squares, 1 << 40, small.adamw, fixed={"micro_batches": 1})
    made = memfit.replan(plain, memfit.smallest_budget(plain))
    model, reference = build(), build()
    engine = memfit.apply(made, model, squares, small.adamw)
    optimizer = small.adamw(reference.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the step that is begun anew
        records = [engine.step(x, meter=True) for _ in range(4)]
    for record in records:
        loss = squares(reference, x)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        assert record.loss == loss.item()
        assert (record.peak_bytes or 0) <= made.budget_bytes
        assert not record.divergences
    assert not any(record.begun_anew for record in records[1:])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
