"""What one forward and backward gives, compared to the last bit; and the budgets at which plans are asked for it.

One place, so that every test and bench that says "the same numbers" means the same by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import memfit
from memfit import batches
from memfit.planner.description import describe
from memfit.planner.found import Found
from memfit.planning import planning_of, remember

FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the way from the smallest plan to plain


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss, gradients and buffers after one forward and backward.

    Attributes:
        divergence: where the engine stopped following its plan, in words; None when it did not.
        recomputations: operations run again.
    """

    loss: Tensor
    gradients: tuple[Tensor | None, ...]
    buffers: tuple[Tensor, ...]
    divergence: str | None = None
    recomputations: int = 0

    def differs(self, other: Outcome) -> str | None:
        """What is not bit-equal, in words; None when all is."""
        for name in ("loss", "gradients", "buffers"):
            mine, theirs = getattr(self, name), getattr(other, name)
            pairs = zip(mine, theirs, strict=True) if isinstance(mine, tuple) else ((mine, theirs),)
            for place, (a, b) in enumerate(pairs):
                if not same(a, b):
                    return f"{name}[{place}]"
        return None


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal to the last bit, or both absent."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def outcome_of(
    model: nn.Module, sample: Any, loss_fn: Any, engine: memfit.Engine | None = None, *, seed: int = 7
) -> Outcome:
    """Run forward and backward, plainly or inside an engine; the model is left as it was.

    Args:
        model, sample, loss_fn: as in a case.
        engine: None for plain PyTorch.
        seed: of the generator from which dropout draws; the same in every run, so models that branch on values take the same branch.
    """
    before = [b.clone() for b in model.buffers()]
    torch.manual_seed(seed)
    follower = None
    if engine is None:
        loss = batches.loss_of(model, sample, loss_fn)
    else:
        with engine.forward() as follower:
            loss = batches.loss_of(model, sample, loss_fn)
    loss.backward()
    gradients = tuple(None if p.grad is None else p.grad.clone() for p in model.parameters())
    buffers = tuple(b.clone() for b in model.buffers())
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    return Outcome(
        loss.detach().clone(),
        gradients,
        buffers,
        follower.divergence if follower is not None else None,
        follower.tape.recomputations if follower is not None else 0,
    )


def plans_between(
    model: nn.Module,
    sample: Any,
    loss_fn: Any,
    optimizer: Any = None,
    fractions: Sequence[float] = FRACTIONS,
    **fixed: Any,
) -> list[memfit.Plan]:
    """Plans for the whole batch at budgets these fractions of the way from the smallest to plain; none is above its budget. `fixed` as for `memfit.plan`."""
    plain = memfit.plan(model, sample, loss_fn, 1 << 50, optimizer, fixed={"micro_batches": 1, **fixed})
    search = planning_of(plain)
    largest, smallest = search.plain_peak(), search.smallest()[0]
    plans = []
    for fraction in fractions:
        budget = round(smallest + (largest - smallest) * fraction)
        made = search.plan(budget)
        assert made.prediction.peak_bytes <= budget
        plans.append(made)
    return plans


def measured_peak(
    made: memfit.Plan, model: nn.Module, sample: Any, loss_fn: Any, optimizer: Any = None, *, seed: int = 7
) -> int:
    """Bytes that the second step under a plan really holds at most, from this seed; parameters and buffers are left as they were."""
    state = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, value in zip((*model.parameters(), *model.buffers()), state, strict=True):
                tensor.copy_(value)

    engine = memfit.apply(made, model, loss_fn, optimizer)
    for meter in (False, True):  # the first step makes the optimizer's state
        torch.manual_seed(seed)
        record = engine.step(sample, meter=meter)
        put_back()
        assert record.divergences == ()
    assert record.peak_bytes is not None
    return record.peak_bytes


def plan_of_calls(base: memfit.Plan, order: int, count: int) -> memfit.Plan:
    """The plan that makes so many calls of modules again as a whole, whatever the planner would choose.

    Args:
        base: a plan of the same step, made in this process.
        order: which of the ways to choose among the calls (`CallPlans.orders`).
        count: how many.
    """
    planning = planning_of(base)
    assert planning is not None
    solver = planning.solver(1)
    solution = solver.call_plans.plan(solver.call_plans.orders[order][:count])
    found = Found(planning.bundle.candidates[0], 1, solver, solution)
    made = planning._ask(lambda solvers: describe(solvers, solvers.budget_for(solver, solution), found))
    return remember(made, planning)
