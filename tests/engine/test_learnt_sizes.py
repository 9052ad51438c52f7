"""Sizes that values decide and no planning saw: the step that takes more than fits is begun anew under a plan that knows them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from engine.test_learnt_paths import FIRST, Growing, above, begun_anew, diverged, told
from memfit import applying
from memfit.engine import plan_table, steps
from models.paths import HIDDEN, Block, loss_of, sample, seeded

pytestmark = pytest.mark.usefixtures("one_thread", "short_look")


class Choosing(nn.Module):
    """Runs its blocks over the rows that chance chooses: some of them at first, more of them later."""

    def __init__(self, later: float = 0.45) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.later, self.forwards = later, 0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        self.forwards += 1
        share = self.later if self.forwards >= FIRST else 0.25
        rows = torch.cat([x] * 8)
        y = rows[torch.rand(len(rows)) < share]
        for block in self.blocks:
            y = block(y)
        return x + y.mean(0)


class Trading(Choosing):
    """Each block gets the rows that the one before it did not: what one makes more another makes less."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        self.forwards += 1
        rows = torch.cat([x] * 8)
        to = torch.randint(0, len(self.blocks), (len(rows),))
        return x + torch.cat([block(rows[to == number]) for number, block in enumerate(self.blocks)]).mean(0)


class AlwaysLonger(Growing):
    """Runs one block more in each step."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        self.forwards += 1
        for number in range(self.forwards):
            x = self.blocks[number % len(self.blocks)](x)
        return x


def test_sizes_that_grow_while_training_are_learnt_in_the_step_that_needs_them(monkeypatch: Any) -> None:
    monkeypatch.setattr(applying, "LOOKS_AHEAD", 0)
    plan, records, said = told(Choosing, 0.65, FIRST + 1)
    assert (begun_anew(records)[0], diverged(records)) == (FIRST, [])
    assert not above(records, plan.budget_bytes)
    assert "values have decided on larger sizes than are known" in said
    assert "no plan for the path" not in said


@pytest.mark.slow
def test_sizes_for_which_there_is_no_plan_are_told() -> None:
    plan, records, said = told(lambda: Choosing(0.9), 0.7, FIRST)
    assert above(records, plan.budget_bytes) == [FIRST]
    assert "no plan for the path that a step took fits in the budget" in said


def test_sizes_that_trade_bytes_are_not_looked_at_in_every_step() -> None:
    plan, records, _ = told(Trading, 0.8, 12)
    assert plan.script.recomputations
    assert not above(records, plan.budget_bytes)
    assert len(begun_anew(records)) <= 2


def test_a_step_that_can_be_begun_anew_always_is_and_the_user_is_told_what_it_costs(monkeypatch: Any) -> None:
    monkeypatch.setattr(plan_table, "MOST_LOOKS", 0)
    monkeypatch.setattr(steps, "OFTEN", (1, 0.1))
    seeded(0)
    model = AlwaysLonger()
    model.forwards = 5
    most = memfit.plan(model, sample(), loss_of, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    plan = memfit.replan(most, round(0.9 * most.prediction.plain_peak_bytes))
    engine = memfit.apply(plan, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = [engine.step(sample(), meter=True) for _ in range(6)]
    assert len(begun_anew(records)) > 1  # each look runs some forwards ahead
    assert diverged(records) == []
    assert not above(records, plan.budget_bytes)
    (costs,) = [str(each.message) for each in caught if "were planned anew to stay in the budget" in str(each.message)]
    assert costs.startswith(f"2 of {begun_anew(records)[1]} steps took a path, or sizes, that no plan knew")


def test_plans_and_paths_are_forgotten_where_there_are_too_many() -> None:
    table = plan_table.PlanTable()
    plan = memfit.plan(nn.Linear(HIDDEN, HIDDEN), sample(), loss_of, 1 << 50, small.adamw)
    plans = tuple(memfit.Plan.from_json(plan.to_json()) for _ in range(plan_table.MOST_PLANS + 5))

    class Knowing:
        def __call__(self, batch: object, known: object) -> tuple[memfit.Plan, ...]:
            return plans

    table.add_paths(plan.signature, plans[:1])
    kept = table.learnt(sample(), plan.signature, plan.budget_bytes, Knowing(), undone=True)  # type: ignore[arg-type]
    assert len(kept) == plan_table.MOST_PLANS
    assert kept[0] is plans[0]
    assert kept[-1] is plans[-1]


def test_a_look_at_sizes_in_vain_puts_off_looks_at_sizes_alone() -> None:
    table = plan_table.PlanTable()
    plan = memfit.plan(nn.Linear(HIDDEN, HIDDEN), sample(), loss_of, 1 << 50, small.adamw)
    table.add(plan)

    def look(*, outgrown: bool) -> None:
        asked = sample(), plan.signature, plan.budget_bytes, lambda _, known: known
        assert table.learnt(*asked, undone=True, outgrown=outgrown) == (plan,)  # type: ignore[arg-type]

    look(outgrown=True)
    assert not table.watches_sizes(plan.signature)
    assert table.would_learn(plan.signature, undone=True)  # another path
    for _ in range(2):
        table.step_taken(plan.signature)
    assert table.watches_sizes(plan.signature)
    look(outgrown=False)
    assert table.watches_sizes(plan.signature)
    assert not table.would_learn(plan.signature, undone=True)
