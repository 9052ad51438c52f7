"""Calls of modules that are made again as a whole: the numbers of plain PyTorch, the predicted peak, and what cannot be made again is not."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.errors import EngineError
from memfit.planner.call_plans import CallPlans
from memfit.planning import planning_of
from memfit.views.tables import plan_cells
from models import CASES, Case
from models.outcome import measured_peak, outcome_of, plan_of_calls

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"gpt_dropout", "amp_gpt", "t5", "custom_function_ctx", "item_control_flow"}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def undivided(model: nn.Module, sample: Any, loss_fn: Any, budget: int = 1 << 44) -> memfit.Plan:
    return memfit.plan(model, sample, loss_fn, budget, adamw, fixed={"micro_batches": 1})


def call_plans(base: memfit.Plan) -> CallPlans:
    planning = planning_of(base)
    assert planning is not None
    return planning.solver(1).call_plans


@pytest.mark.alternate(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=() if c.name in QUICK else pytest.mark.slow, id=c.name)
        for c in CASES
        if not c.slow or c.name == "residual_chain_1000"
    ],
)
def test_one_half_and_all_of_the_calls_give_plain_numbers_and_the_predicted_peak(case: Case) -> None:
    model, sample, loss_fn = case.build()
    base = undivided(model, sample, loss_fn)
    orders = call_plans(base).orders
    assert orders or case.name not in QUICK
    outcome_of(model, sample, loss_fn)  # what a model builds once is built here
    reference = outcome_of(model, sample, loss_fn)
    for number, order in enumerate(orders):
        for count in sorted({1, len(order) // 2, len(order)} - {0}):
            made = plan_of_calls(base, number, count)
            assert made.script.repeated_calls
            assert not made.script.steps
            found = outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn, None))
            assert found.divergence is None
            assert found.differs(reference) is None, (number, count)
            assert measured_peak(made, model, sample, loss_fn, adamw) == made.prediction.peak_bytes, (number, count)


class Block(nn.Module):
    """A residual block; a test may have its forward do something more."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.wide, self.narrow, self.norm = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.LayerNorm(width),
        )
        self.drop = nn.Dropout(0.1)
        self.also: Callable[[Tensor], Any] | None = None

    def forward(self, x: Tensor, scale: Tensor, *, extra: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
        if self.also is not None:
            self.also(x)
        shift = 0.0 if extra is None else extra["shift"][0]
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.norm(x) * scale)))) + shift, scale


class Blocks(nn.Module):
    """Blocks that share an argument, in a list."""

    blocks: Any  # a ModuleList; a test has its blocks do something more

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.exp()
        shift = x.mean()
        for block in self.blocks:
            x, scale = block(x, scale, extra={"shift": [shift]})
        return x


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def untrained() -> tuple[Blocks, Tensor]:
    torch.manual_seed(0)
    return Blocks(), torch.randn(256, 16)


@functools.cache
def base_of_blocks() -> memfit.Plan:
    """Captured once for all tests: a plan is for every model of the same structure."""
    return undivided(*untrained(), loss_of)


def blocks() -> tuple[Blocks, Tensor, memfit.Plan]:
    return *untrained(), base_of_blocks()


@pytest.mark.parametrize("rows", [0, -1])
def test_training_is_that_of_plain_pytorch(rows: int) -> None:
    model, batch, base = blocks()
    order = rows % len(call_plans(base).orders)
    made = plan_of_calls(base, order, len(call_plans(base).orders[order]))
    plain = Blocks()
    plain.load_state_dict(model.state_dict())
    engines = [
        memfit.apply(made, model, loss_of, adamw),
        memfit.apply(undivided(plain, batch, loss_of), plain, loss_of, adamw),
    ]
    losses = []
    for engine in engines:
        torch.manual_seed(3)
        losses.append([engine.step(batch).loss for _ in range(3)])
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert not any("forward" in vars(module) for module in model.modules())


def test_blocks_in_a_row_are_called_one_after_the_other() -> None:
    _, _, base = blocks()
    longest = plan_of_calls(base, len(call_plans(base).orders) - 1, 1).script.repeated_calls[0]
    assert [path for path, _ in longest.modules] == [f"blocks.{n}" for n in range(8)]


class Attending(nn.Module):
    """Each attention is given one tensor three times, and asks whether its query is its key: then it has one product in place of three."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


def test_a_tensor_that_is_given_several_times_is_one_tensor_the_second_time() -> None:
    torch.manual_seed(0)
    model, batch = Attending(), torch.randn(4, 32, 16)
    base = undivided(model, batch, loss_of)
    reference = outcome_of(model, batch, loss_of)
    for number, order in enumerate(call_plans(base).orders):
        made = plan_of_calls(base, number, len(order))
        assert made.script.repeated_calls
        found = outcome_of(model, batch, loss_of, memfit.apply(made, model, loss_of, None))
        assert found.differs(reference) is None


class NormedLinear(nn.Linear):
    """Its weight's norm is detached (DoRA's is), so what autograd saves of it is let go in forward."""

    def forward(self, x: Tensor) -> Tensor:
        norm = (torch.eye(64) @ self.weight.t()).norm(dim=1).detach()
        return nn.functional.gelu(super().forward(x) / norm)


def test_what_a_detached_graph_saves_is_not_held_until_the_end_of_the_second_call() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(NormedLinear(64, 64) for _ in range(4))), torch.randn(64, 64)
    base = undivided(model, batch, loss_of)
    for number, order in enumerate(call_plans(base).orders):
        made = plan_of_calls(base, number, len(order))
        assert measured_peak(made, model, batch, loss_of, adamw) == made.prediction.peak_bytes, number


def test_a_plan_with_calls_survives_its_file(tmp_path: Any) -> None:
    _, _, base = blocks()
    made = plan_of_calls(base, 0, 3)
    made.save(tmp_path / "plan.json")
    assert memfit.Plan.load(tmp_path / "plan.json").script == made.script


def test_the_planner_takes_calls_where_following_costs_more() -> None:
    """Many small operations: what the engine takes for each of them is most of what they cost."""
    torch.manual_seed(0)
    model, batch = Blocks(48), torch.randn(64, 16)
    base = undivided(model, batch, loss_of)
    made = memfit.replan(base, int(0.7 * base.prediction.plain_peak_bytes))
    rows = [len(calls.modules) for calls in made.script.repeated_calls]
    assert rows
    assert f"({made.script.recomputations} operations run again, in {sum(rows)} whole call" in made.explain()
    assert {row[0]: row[1] for row in plan_cells(made).rows}["run again"].endswith(
        f"in {sum(rows)} whole call{'s' if sum(rows) > 1 else ''} of modules"
    )
    assert 0.0 <= made.gap < 1.0
    record = memfit.apply(made, model, loss_of, adamw).step(batch)
    assert record.recomputations == made.script.recomputations > 0
    assert not record.divergences


# -- what cannot be made again ---------------------------------------------------------------------------------------------------


class Counting(Block):
    """Counts its calls."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return super().forward(*args, **kwargs)


class Listing(Block):
    """Appends to a list in a dictionary of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {"calls": []}

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.seen["calls"].append(1)
        return super().forward(*args, **kwargs)


class Drawing(Block):
    """Scales by a random number of Python's."""

    def forward(self, x: Tensor, scale: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().forward(x, scale * random.random(), **kwargs)


class Cache:
    """An object that a block is given."""

    def __init__(self) -> None:
        self.calls = 0


class Cached(nn.Module):
    """A block that is given an object."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, scale: Tensor, *, extra: Any, cache: Cache) -> tuple[Tensor, Tensor]:
        cache.calls += 1
        result: tuple[Tensor, Tensor] = self.block(x, scale)
        return result


class WithCache(Blocks):
    """Passes one object to all of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached() for _ in range(4))
        self.cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        scale, cache = self.scale.exp(), Cache()
        for block in self.blocks:
            x, scale = block(x, scale, extra=None, cache=cache)
        return x


class Escaping(Blocks):
    """What a block makes reaches the loss by a list, not by its result."""

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for block in self.blocks:
            block.also = lambda x: found.append(x.relu().sum())
        result = super().forward(x)
        for block in self.blocks:
            block.also = None
        return result + torch.stack(found).sum()


def _of(block: Callable[[], nn.Module]) -> Blocks:
    model = Blocks()
    model.blocks = nn.ModuleList(block() for _ in range(4))
    return model


@pytest.mark.parametrize(
    "build",
    [lambda: _of(Counting), lambda: _of(Listing), lambda: _of(Drawing), WithCache, Escaping],
    ids=["counts", "lists", "draws", "is given an object", "hands out by a list"],
)
def test_blocks_with_other_effects_are_not_called_twice(build: Callable[[], Blocks]) -> None:
    torch.manual_seed(0)
    model, batch = build(), torch.randn(64, 16)
    inside = {path for recipe in call_plans(undivided(model, batch, loss_of))._calls.values() for path in recipe.calls}
    assert not any(call.module.count(".") == 1 for call in inside)


def with_an_attribute(model: Any, batch: Tensor) -> Tensor:
    for block in model.blocks:
        block.also = torch.relu
    loss = loss_of(model, batch)
    for block in model.blocks:
        block.also = None
    return loss


def in_eval_mode(model: Any, batch: Tensor) -> Tensor:
    model.eval()
    loss = loss_of(model, batch)
    model.train()
    return loss


def while_frozen(model: Any, batch: Tensor) -> Tensor:
    model.blocks.requires_grad_(requires_grad=False)
    loss = loss_of(model, batch)
    model.blocks.requires_grad_(requires_grad=True)
    return loss


def with_other_parameters(model: Any, batch: Tensor) -> Tensor:
    others = {name: p.detach() for name, p in model.named_parameters() if name != "scale"}
    result: Tensor = torch.func.functional_call(model, others, (batch,))
    return result.square().mean()


def with_a_hook(model: Any, batch: Tensor) -> Tensor:
    hooks = [block.drop.register_forward_hook(lambda *_: None) for block in model.blocks]
    loss = loss_of(model, batch)
    for hook in hooks:
        hook.remove()
    return loss


def in_a_mode_for_functions(model: Any, batch: Tensor) -> Tensor:
    with torch.device("cpu"):
        return loss_of(model, batch)


@pytest.mark.parametrize(
    "loss_fn",
    [with_an_attribute, in_eval_mode, while_frozen, with_other_parameters, with_a_hook, in_a_mode_for_functions],
)
def test_blocks_that_would_find_something_else_in_backward_are_not_called_twice(loss_fn: Any) -> None:
    torch.manual_seed(0)
    model, batch = Blocks(4), torch.randn(64, 16)
    found = call_plans(undivided(model, batch, loss_fn))._calls.values()
    assert not any(call.module.count(".") == 1 for calls in found for call in calls.calls)


def test_blocks_with_hooks_are_not_called_twice() -> None:
    torch.manual_seed(0)
    model, batch = Blocks(4), torch.randn(64, 16)
    model.blocks[1].wide.register_forward_hook(lambda *_: None)
    found = {
        call.module for calls in call_plans(undivided(model, batch, loss_of))._calls.values() for call in calls.calls
    }
    assert {"blocks.0", "blocks.2", "blocks.3"} <= found
    assert not any(module.startswith("blocks.1") and "wide" in module for module in found)
    assert "blocks.1" not in found


def test_an_argument_written_meanwhile_is_an_error() -> None:
    model, batch, base = blocks()
    engine = memfit.apply(plan_of_calls(base, 0, 8), model, loss_of, None)
    with engine.forward():
        seen: list[Tensor] = []
        model.blocks[2].also = seen.append
        loss = loss_of(model, batch)
    model.blocks[2].also = None
    with torch.no_grad():
        seen[0].add_(1.0)
    with pytest.raises(RuntimeError, match="was changed in place"):
        loss.backward()


def test_a_second_call_that_is_not_the_first_is_an_error_and_trains_nothing() -> None:
    model, batch, base = blocks()
    engine = memfit.apply(plan_of_calls(base, 0, 8), model, loss_of, adamw)
    engine.step(batch)
    calls = 0

    def shorter(_: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            model.blocks[3].wide.requires_grad_(False)

    before = [p.clone() for p in model.parameters()]
    model.blocks[3].also = shorter
    with pytest.raises(
        EngineError, match=r"blocks\.3: called again in backward.*arguments, parameters and buffers alone"
    ):
        engine.step(batch)
    model.blocks[3].wide.requires_grad_(True)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_random_numbers_of_python_are_never_drawn_twice() -> None:
    """A block that draws some only after planning: another number would train wrong."""
    model, batch, base = blocks()
    engine = memfit.apply(plan_of_calls(base, 0, 8), model, loss_of, None)
    model.blocks[3].also = lambda _: random.random()
    with engine.forward() as follower:
        loss = loss_of(model, batch)
    assert follower is not None
    assert "random numbers of Python's or numpy's are drawn" in (follower.divergence or "")
    with pytest.raises(EngineError, match="would draw other random numbers"):
        loss.backward()


def test_another_path_is_noticed_and_right() -> None:
    model, batch, base = blocks()
    plan = plan_of_calls(base, len(call_plans(base).orders) - 1, 1)
    model.blocks.append(model.blocks[0])
    reference = outcome_of(model, batch, loss_of)
    found = outcome_of(model, batch, loss_of, memfit.apply(plan, model, loss_of, None))
    assert found.divergence is not None
    assert found.differs(reference) is None


def test_backward_may_run_twice_where_the_graph_is_retained() -> None:
    model, batch, _ = blocks()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    engine = memfit.apply(plan_of_calls(undivided(model, batch, loss_of), 0, 8), model, loss_of, None)
    with engine.forward(retain_graph=True):
        loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    twice = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))


def test_a_loss_that_is_thrown_away_leaves_nothing() -> None:
    model, batch, base = blocks()
    engine = memfit.apply(plan_of_calls(base, 0, 8), model, loss_of, None)
    gc.disable()
    try:
        with engine.forward():
            seen: list[weakref.ref[Tensor]] = []
            model.blocks[4].also = lambda x: seen.append(weakref.ref(x.untyped_storage()))
            loss = loss_of(model, batch)
        assert seen[0]() is not None
        del loss
        assert seen[0]() is None
    finally:
        gc.enable()


def test_an_error_in_forward_leaves_the_modules_as_they_were() -> None:
    model, batch, base = blocks()
    engine = memfit.apply(plan_of_calls(base, 0, 8), model, loss_of, adamw)
    own = model.blocks[0].forward
    vars(model.blocks[0])["forward"] = own  # as some libraries do

    def fails(_: Tensor) -> None:
        raise ValueError("in forward")

    model.blocks[5].also = fails
    with pytest.raises(ValueError, match="in forward"):
        engine.step(batch)
    assert vars(model.blocks[0]).pop("forward") is own
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    model.blocks[5].also = None
    assert not engine.step(batch).divergences
