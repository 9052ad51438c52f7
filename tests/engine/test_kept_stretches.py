"""Stretches in which a plan drops nothing run without the follower: numbers and peak stay, and what goes wrong in them is still seen."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.engine import Engine
from memfit.engine.compiled import CompiledScript
from memfit.engine.follower import Follower
from memfit.engine.kept_stretches import CONFIRMED_EVERY
from memfit.values.script import Script

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    """A residual block whose forward a test may change. It counts its calls, so that plans run single operations of it again, not all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.wide, self.narrow, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)
        self.also: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.also is not None:
            self.also()
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Blocks(nn.Module):
    """Some of them."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.drop = nn.Dropout(0.1)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.drop(x)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def untrained() -> tuple[Blocks, torch.Tensor]:
    torch.manual_seed(0)
    return Blocks(), torch.randn(256, 16)


@functools.cache
def free() -> memfit.Plan:
    """Captured once for all tests: a plan is for every model of the same structure."""
    return memfit.plan(*untrained(), loss_of, 1 << 40, fixed={"micro_batches": 1})


def planned(share: float = 0.85) -> tuple[Blocks, torch.Tensor, Engine]:
    model, batch = untrained()
    plan = memfit.replan(free(), int(share * free().prediction.plain_peak_bytes))
    return model, batch, memfit.apply(plan, model, loss_of)


def forward_once(engine: Engine, batch: torch.Tensor) -> Follower:
    with engine.forward() as follower:
        loss = loss_of(engine.model, batch)
    loss.backward()
    engine.model.zero_grad()
    assert isinstance(follower, Follower)
    follower.end()
    return follower


def test_the_follower_is_off_where_nothing_is_dropped() -> None:
    _, batch, engine = planned()
    assert engine.plan.script.recomputations > 0
    assert engine.plan.script.kept_stretches
    followers = [forward_once(engine, batch) for _ in range(CONFIRMED_EVERY + 3)]
    kept = sum(stretch.operations[1] - stretch.operations[0] for stretch in engine.plan.script.kept_stretches)
    unfollowed = [follower.unfollowed for follower in followers]
    assert [n for n, count in enumerate(unfollowed) if not count] == [0, CONFIRMED_EVERY + 1]
    assert set(unfollowed) == {0, kept}
    assert all(follower.divergence is None for follower in followers)


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_numbers_and_peak_are_those_of_plain_pytorch(share: float) -> None:
    torch.manual_seed(0)
    plain, batch = Blocks(), torch.randn(256, 16)
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    model, same, engine = planned(share)
    torch.manual_seed(1)
    expected = []
    for _ in range(4):
        loss = loss_of(plain, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    torch.manual_seed(1)
    records = [engine.step(same, meter=n == 3) for n in range(4)]
    assert [record.loss for record in records] == expected
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert records[-1].peak_bytes == engine.plan.prediction.peak_bytes
    assert not any(record.divergences for record in records)


def first_kept(model: Blocks, engine: Engine) -> Block:
    """A block that lies in a stretch as a whole: the one after that in which the last stretch begins."""
    stretch = engine.plan.script.kept_stretches[-1]
    assert stretch.ends == ""
    block = model.blocks[int(stretch.begins.split(".")[1]) + 1]
    assert isinstance(block, Block)
    return block


def test_an_error_inside_leaves_nothing_on() -> None:
    model, batch, engine = planned()
    engine.step(batch)
    block = first_kept(model, engine)

    def fails() -> None:
        assert torch._C._len_torch_dispatch_stack() == 0
        raise ValueError("in forward")

    def interrupts() -> None:
        raise KeyboardInterrupt

    before = [p.clone() for p in model.parameters()]
    for also, error in ((fails, ValueError), (interrupts, KeyboardInterrupt)):
        block.also = also
        with pytest.raises(error):
            engine.step(batch)
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    block.also = None
    assert not engine.step(batch).divergences
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_write_into_what_is_held_is_an_error_never_another_number() -> None:
    model, batch, engine = planned()
    engine.step(batch)
    block = first_kept(model, engine)
    made: list[torch.Tensor] = []
    handles = [b.register_forward_hook(lambda _m, _a, out: made.append(out)) for b in model.blocks]

    def writes() -> None:
        for out in made:
            out.detach().zero_()

    block.also = writes
    with pytest.raises(RuntimeError, match="changed in place|modified by an inplace"):
        engine.step(batch)
    for handle in handles:
        handle.remove()


def test_a_plan_file_that_skips_what_is_dropped_is_refused() -> None:
    _, _, engine = planned()
    script = engine.plan.script
    data = script.to_json()
    assert Script.from_json(data) == script
    stretch = script.kept_stretches[0]
    around = [stretch.begins, stretch.ends, 1]
    with pytest.raises(ValueError, match="the engine is to act in it"):
        Script.from_json({**data, "kept_stretches": [[*around, 0, len(script.operations), 0, len(script.saves), 1, 9]]})
    with pytest.raises(ValueError, match="ends at operation"):
        Script.from_json({**data, "kept_stretches": [[*around, 0, len(script.operations) + 1, 0, 0, 1, 9]]})
    with pytest.raises(ValueError, match="ends with call 0"):
        Script.from_json({**data, "kept_stretches": [[stretch.begins, stretch.ends, 0, 0, 0, 0, 0, 1, 9]]})


def test_what_runs_differently_inside_is_seen_in_the_next_whole_forward() -> None:
    model, batch, engine = planned()
    forward_once(engine, batch)
    first_kept(model, engine).also = lambda: torch.ones(3, requires_grad=True).exp()
    assert (
        forward_once(engine, batch).divergence is None
    )  # kept as plain PyTorch keeps it, and followed again right after
    found = [forward_once(engine, batch).divergence for _ in range(CONFIRMED_EVERY + 1)]
    assert sum(divergence is not None for divergence in found) >= 1


def test_a_mode_of_the_users_own_is_left_on_top() -> None:
    model, batch, engine = planned()
    engine.step(batch)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    entered: list[Any] = []

    def under_hooks() -> None:
        hooks.__enter__()
        entered.append(1)

    first = model.blocks[0]
    assert isinstance(first, Block)
    first.also = under_hooks
    try:
        with engine.forward() as follower:
            loss = loss_of(model, batch)
            hooks.__exit__()
        assert isinstance(follower, Follower)
        assert entered
        assert not follower.unfollowed
        loss.backward()
        follower.end()
    finally:
        first.also = None


class Shared(nn.Module):
    """Small blocks, the second half of which is one block called again and again, then one that takes much."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.again = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.last = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.first:
            x = block(x)
        for _ in range(4):
            x = self.again(x)
        return self.last(x)


def test_a_stretch_goes_over_many_small_calls_and_ends_with_the_right_call_of_a_shared_module() -> None:
    torch.manual_seed(0)
    model, batch = Shared(), torch.randn(256, 16)
    plan = memfit.recompute(
        model,
        batch,
        loss_of,
        keep=["last.norm", "last.wide", "last.narrow", "again", "first.*", "first.*.*", "again.*"],
    )
    engine = memfit.apply(plan, model, loss_of)
    (stretch, *_) = plan.script.kept_stretches
    assert (stretch.begins, stretch.ends) == ("", "again.0")  # what the last of them gives is held
    assert stretch.calls == 4
    engine.step(batch)
    follower = forward_once(engine, batch)
    assert follower.unfollowed >= stretch.operations[1]
    assert follower.divergence is None
    assert engine.step(batch, meter=True).peak_bytes == plan.prediction.peak_bytes


def test_a_stretch_may_begin_in_one_call_of_the_model_and_end_in_a_later_one() -> None:
    """A loss that calls the model for several views of the batch: what contrastive and consistency training do."""
    stretches = set()
    for views in (2, 3):

        def of_views(model: nn.Module, batch: torch.Tensor, views: int = views) -> torch.Tensor:
            first, *others = (model(view) for view in batch.chunk(views))
            return sum(((first - other).square().mean() for other in others), first.square().mean())

        torch.manual_seed(0)
        model, batch = Blocks(4), torch.randn(64 * views, 16)
        model.drop.p = 0.0  # its calls run nothing
        everything = memfit.plan(model, batch, of_views, 1 << 40, fixed={"micro_batches": 1})
        smallest, largest = memfit.smallest_budget(everything), everything.prediction.peak_bytes
        for twelfths in range(12):
            plan = memfit.replan(everything, smallest + (largest - smallest) * twelfths // 12)
            stretches |= {(stretch.ends, stretch.calls) for stretch in plan.script.kept_stretches}
            engine = memfit.apply(plan, copy.deepcopy(model), of_views)
            engine.step(batch)
            for record in (engine.step(batch, meter=True) for _ in range(3)):
                assert record.divergences == ()
                assert record.peak_bytes == plan.prediction.peak_bytes
    assert any(ends == "" and calls > 1 for ends, calls in stretches)


def test_what_a_users_hooks_compute_lies_where_the_plan_has_it() -> None:
    """Hooks of blocks, with which stretches end: what they compute is outside of the call."""

    def of_both(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(model, batch) + loss_of(model, batch.flip(0))

    torch.manual_seed(0)
    model, batch = Blocks(4), torch.randn(128, 16)
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, output: output * 1.01)
        block.register_forward_pre_hook(lambda _module, args: (args[0] * 0.99,))
    everything = memfit.plan(model, batch, of_both, 1 << 40, fixed={"micro_batches": 1})
    smallest, largest = memfit.smallest_budget(everything), everything.prediction.peak_bytes
    ends = set()
    for twelfths in range(12):
        plan = memfit.replan(everything, smallest + (largest - smallest) * twelfths // 12)
        ends |= {stretch.ends for stretch in plan.script.kept_stretches}
        engine = memfit.apply(plan, copy.deepcopy(model), of_both)
        assert not any(engine.step(batch).divergences for _ in range(3))
        assert engine.step(batch, meter=True).peak_bytes == plan.prediction.peak_bytes
    assert any(end.startswith("blocks.") and end.count(".") == 1 for end in ends)


class Fails(nn.Module):
    """A call that always fails, after it has computed something."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no kernel for {self.layer(x).shape}")


class Unusual(Blocks):
    """Blocks under a checkpoint of the user's own, whose hooks are on top in there, or run where the error of another call is handled."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__(5)
        self.drop.p = 0.0
        self.checkpoints = checkpoints
        self.fails = Fails()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if self.checkpoints:
                x = checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)
                continue
            try:
                x = self.fails(x)
            except ValueError:
                x = block(x)
        return self.drop(x)


@pytest.mark.alternate(0)
@pytest.mark.parametrize("checkpoints", [True, False])
def test_stretches_that_do_not_end_where_the_plan_has_it_are_followed(*, checkpoints: bool) -> None:
    def of_both(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(model, batch) + loss_of(model, batch.flip(0))

    torch.manual_seed(0)
    model, batch = Unusual(checkpoints=checkpoints), torch.randn(128, 16)
    everything = memfit.plan(model, batch, of_both, 1 << 40, fixed={"micro_batches": 1})
    smallest, largest = memfit.smallest_budget(everything), everything.prediction.peak_bytes
    left_out = 0
    for part in range(16):
        plan = memfit.replan(everything, smallest + (largest - smallest) * part // 16)
        engine = memfit.apply(plan, copy.deepcopy(model), of_both)
        assert not any(engine.step(batch).divergences for _ in range(3))
        assert engine.step(batch, meter=True).peak_bytes == plan.prediction.peak_bytes
        compiled = CompiledScript(plan.script)
        if compiled.kept_stretches:
            follower = Follower(compiled, model=model)
            with follower.following():
                of_both(model, batch)
            left_out += len(compiled.kept_stretches) < len(plan.script.kept_stretches)
            follower.end()
    assert left_out > 0


def test_a_call_that_would_end_a_stretch_and_is_left_out_is_a_divergence() -> None:
    model, batch, engine = planned(0.9)
    forward_once(engine, batch)
    (stretch,) = engine.plan.script.kept_stretches
    assert stretch.ends == ""
    with engine.forward() as follower:  # without the model's own call, which would end it
        x = batch
        for block in model.blocks:
            x = block(x)
        loss = model.drop(x).square().mean()
    assert isinstance(follower, Follower)
    assert follower.divergence is not None
    assert torch._C._len_torch_dispatch_stack() == 0
    loss.backward()
    follower.end()


class ManyCalls(Blocks):
    """Blocks, and calls of modules that run nothing."""

    def __init__(self, quiet: int) -> None:
        super().__init__()
        self.quiet = nn.ModuleList(nn.Identity() for _ in range(quiet))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.quiet:
            x = each(x)
        return super().forward(x)


@pytest.mark.parametrize(("quiet", "kept"), [(0, True), (400, False)])
def test_calls_are_not_counted_where_that_takes_longer_than_following(quiet: int, *, kept: bool) -> None:
    torch.manual_seed(0)
    model, batch = ManyCalls(quiet), torch.randn(256, 16)
    made = memfit.plan(model, batch, loss_of, 1 << 40, fixed={"micro_batches": 1})
    made = memfit.replan(made, int(0.9 * made.prediction.plain_peak_bytes))
    assert made.script.recomputations > 0
    assert bool(made.script.kept_stretches) is kept
    engine = memfit.apply(made, model, loss_of)
    engine.step(batch)  # followed as a whole, as every first one
    assert [forward_once(engine, batch).unfollowed > 0 for _ in range(2)] == [kept, kept]
    assert engine.step(batch, meter=True).peak_bytes == made.prediction.peak_bytes


def test_no_module_has_a_hook_while_forward_runs() -> None:
    """In eval mode layers of nn.TransformerEncoder run one operation where none of their modules has one, and others where one has."""
    model, batch, engine = planned()
    assert engine.plan.script.kept_stretches
    hooked = []
    for block in model.modules():
        if isinstance(block, Block):
            block.also = lambda: hooked.extend(each for each in model.modules() if each._forward_hooks)
    engine.step(batch)
    engine.step(batch)
    assert not hooked


class Labelled(nn.Module):
    """Learns what it finds itself in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True) for _ in range(4)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.eval()
        with torch.no_grad():
            labels = self.layers(x)
        self.train()
        return nn.functional.mse_loss(self.layers(x * 0.9), labels)


def test_fused_layers_of_eval_mode_run_as_planned() -> None:
    torch.manual_seed(0)
    model, batch = Labelled(), torch.randn(8, 16, 32)
    free = memfit.plan(model, batch, None, 1 << 40, fixed={"micro_batches": 1})
    for share in (0.6, 0.8, 0.9):
        plan = memfit.replan(free, int(share * free.prediction.plain_peak_bytes))
        engine = memfit.apply(plan, model)
        records = [engine.step(batch, meter=True) for _ in range(2)]
        assert not any(record.divergences for record in records)
        assert records[-1].peak_bytes == plan.prediction.peak_bytes
