"""Offloading for real, to a disk: the same numbers, the predicted bytes however slow the disk is, and what happens when it fails."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from engine.forced import LINK, Choice, everything, forced
from memfit.engine import activation_offloading
from memfit.engine.activation_offloading import LowerTiers, arena_makers
from memfit.errors import EngineError, InfeasibleError
from memfit.planner.recipes import PREFETCH_DISTANCES, Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planning import Planning, planning_of
from memfit.storage import files
from memfit.storage.arenas import Copy, DiskArena, Storage
from memfit.values.bundle import TraceBundle
from models import CASES, Case, case
from models.outcome import measured_peak, outcome_of
from sweeps import at_night

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where these tests offload to."""
    monkeypatch.setenv("MEMFIT_OFFLOAD_DIR", str(tmp_path))
    return tmp_path


def mixed(seed: int) -> Choice:
    """Offload some, recompute some from what is kept or offloaded, in windows or not."""

    def plan(recipes: Recipes) -> dict[int, list[int]]:
        chance = random.Random(seed)
        offloaded = {s: chance.choice(ways) for s, ways in sorted(recipes.reloads_of.items()) if chance.random() < 0.4}
        rest = sorted(recipes.saved & recipes.rebuildable - offloaded.keys())
        dropped = [s for s in rest if chance.random() < 0.6]
        length = max(1, recipes.trace.forward_events // 4)
        window = {e: (e + 1) // length for e in range(-1, recipes.trace.forward_events + 1)} if seed % 2 else None
        return recomputations_for(recipes, dropped, window, offloaded=offloaded)

    return plan


def check(each: Case, choices: Sequence[Choice]) -> None:
    model, sample, loss_fn = each.build()
    outcome_of(model, sample, loss_fn)
    reference = outcome_of(model, sample, loss_fn)
    for choice in choices:
        made, _ = forced(model, sample, loss_fn, choice)
        made = memfit.Plan.from_json(made.to_json())
        engine = memfit.apply(made, model, loss_fn, None)
        for _ in range(2):  # the second time over what lies there from the first
            found = outcome_of(model, sample, loss_fn, engine)
            assert found.divergence is None
            assert found.differs(reference) is None
        measured = measured_peak(made, model, sample, loss_fn)
        assert measured == pytest.approx(made.prediction.peak_bytes, rel=0.005)


# Custom functions, views, dropout, running statistics, fused kernels, modules called twice; the others take minutes.
QUICK = {
    "custom_function_ctx",
    "gpt_dropout",
    "lstm",
    "nonzero_model",
    "resnet",
    "twice",
    "views",
}


@pytest.mark.alternate(1)
@pytest.mark.parametrize(
    "each",
    [pytest.param(c, marks=() if c.name in QUICK else pytest.mark.slow, id=c.name) for c in CASES if not c.slow],
)
def test_any_model_offloads_all_it_can_and_gives_plain_numbers_and_the_predicted_peak(each: Case) -> None:
    model, sample, loss_fn = each.build()
    trace = memfit.record(model, sample, loss_fn, None, micro_batches=1).trace
    if trace.sized_by_values:
        assert not Recipes(trace, LINK).reloads_of
    else:
        check(each, [everything(1)])


@pytest.mark.parametrize("name", at_night(["gpt", "bert_sdpa", "resnet", "lstm"], {"bert_sdpa", "resnet", "lstm"}))
def test_offloading_and_recomputing_mix(name: str) -> None:
    check(case(name), [everything(0), everything(2), *map(mixed, range(2))])


# -- bytes -------------------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_process_really_gets_smaller() -> None:
    """Resident memory at the end of forward, where plain PyTorch holds everything; the layers are so large that the allocator gives each back at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4096), *(nn.Tanh() for _ in range(8)), nn.Linear(4096, 1))
    sample = torch.ones(4096, 8)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    made, trace = forced(model, sample, loss_fn, everything(0))
    taken = []
    for engine in (None, memfit.apply(made, model, loss_fn, None)):
        # What earlier tests have freed would else be taken again, and the process be no larger for it.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = resident_bytes()
        if engine is None:
            loss = loss_fn(model, sample)
        else:
            with engine.forward() as follower:
                loss = loss_fn(model, sample)
            assert follower is not None
            assert follower.divergence is None
        taken.append(resident_bytes() - before)
        loss.backward()
        model.zero_grad()
        del loss
    saved = sum(trace.storages[s].bytes for s in Recipes(trace, LINK).saved)
    assert saved > 400 << 20
    assert taken[0] > 0.9 * saved
    assert taken[1] < 0.3 * saved


class Watched(DiskArena):
    """Notes what is begun and what is waited for."""

    def __init__(self, size: int, folder: str | Path | None) -> None:
        super().__init__(size, folder)
        self.told: list[tuple[str, int, int]] = []

    def _noted(self, way: str, copy: Copy, offset: int, size: int) -> Copy:
        self.told.append((way, offset, size))
        told = self.told

        class Waiting(Copy):
            def wait(self) -> None:
                copy.wait()
                told.append((f"{way} done", offset, size))

        return Waiting()

    def copy_down(self, storage: Storage, offset: int) -> Copy:
        return self._noted("down", super().copy_down(storage, offset), offset, storage.nbytes())

    def copy_up(self, storage: Storage, offset: int) -> Copy:
        return self._noted("up", super().copy_up(storage, offset), offset, storage.nbytes())


@pytest.mark.parametrize("lag", range(len(PREFETCH_DISTANCES)))
def test_copies_begin_and_end_in_the_order_of_the_plan_and_no_more_are_on_their_way(
    lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sample, loss_fn = case("gpt").build()
    made, _ = forced(model, sample, loss_fn, everything(lag))
    arenas: list[Watched] = []

    def watched(size: int, folder: str | Path | None) -> Watched:
        arenas.append(Watched(size, folder))
        return arenas[-1]

    monkeypatch.setattr(activation_offloading, "DiskArena", watched)
    outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn, None))
    (arena,) = arenas
    script = made.script
    downs = sorted(script.swaps.values(), key=lambda s: (s.begin, s.offset))
    ups = [script.swaps[~run[0]].offset for step in script.steps for run in step.runs if run[0] < 0]
    assert [offset for way, offset, _ in arena.told if way == "down"] == [s.offset for s in downs]
    assert [offset for way, offset, _ in arena.told if way == "up"] == ups
    allowed = max(sum(s.bytes for s in downs if s.begin <= i <= s.gone_by) for i in range(len(script.operations)))
    on_their_way = most = 0
    for way, _, size in arena.told:
        on_their_way += {"down": size, "down done": -size}.get(way, 0)
        most = max(most, on_their_way)
    assert on_their_way == 0
    assert 0 < most <= allowed
    # What comes up was waited for on its way down, and is waited for itself.
    for offset in ups:
        ways = [way for way, at, _ in arena.told if at == offset]
        assert ways[:2] == ["down", "down done"]
        assert ways.count("up") == ways.count("up done")
    if lag == 0:
        assert all(after[0] in {"up", "up done"} for told, after in pairwise(arena.told) if told[0] == "up")


def test_the_peak_does_not_depend_on_how_fast_the_disk_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, model = small.rows(), small.chain(3)
    made, _ = forced(model, sample, small.squared_error, everything(2), small.adamw)
    fast = measured_peak(made, model, sample, small.squared_error, small.adamw)
    write, read = files.write_whole, files.read_whole

    def slow(move: Any) -> Any:
        def moved(file: int, memory: memoryview, offset: int) -> None:
            time.sleep(0.01)
            move(file, memory, offset)

        return moved

    monkeypatch.setattr(files, "write_whole", slow(write))
    monkeypatch.setattr(files, "read_whole", slow(read))
    assert measured_peak(made, model, sample, small.squared_error, small.adamw) == fast


def test_planned_offloading_stays_in_its_budget() -> None:
    """Plans as the search makes them, at budgets down to one that recomputing alone cannot reach."""
    model, sample, loss_fn = case("gpt").build()
    plain = memfit.plan(model, sample, loss_fn, 1 << 50, None, fixed={"micro_batches": 1})
    trace = planning_of(plain).solver(1).trace
    search = Planning(TraceBundle.of(trace, LINK))
    reference = outcome_of(model, sample, loss_fn)
    low, high = search.smallest()[0], search.plain_peak()
    assert low < memfit.smallest_budget(plain)
    swaps = 0
    for fraction in (0.0, 0.3, 0.6):
        budget = round(low + fraction * (high - low))
        made = search.plan(budget)
        found = outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn, None))
        assert found.divergence is None
        assert found.differs(reference) is None
        measured = measured_peak(made, model, sample, loss_fn)
        assert measured <= budget
        assert measured == pytest.approx(made.prediction.peak_bytes, rel=0.005)
        swaps += len(made.script.swaps)
    assert swaps


# -- forwards that go another way --------------------------------------------------------------------------------------------


class Turning(nn.Module):
    """Runs another operation in the middle when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = small.chain(2), small.chain(2)
        self.turn = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x.sin() if self.turn else x.cos()
        found: Tensor = self.after(x)
        return found


@pytest.mark.parametrize("lag", range(len(PREFETCH_DISTANCES)))
def test_a_forward_that_departs_loses_nothing(lag: int) -> None:
    model, sample = Turning(), small.rows()
    made, _ = forced(model, sample, small.squared_error, everything(lag))
    engine = memfit.apply(made, model, small.squared_error, None)
    for turn in (True, False, True):
        model.turn = turn
        reference = outcome_of(model, sample, small.squared_error)
        found = outcome_of(model, sample, small.squared_error, engine)
        assert (found.divergence is not None) == turn
        assert found.differs(reference) is None


def test_a_smaller_batch_than_planned_follows() -> None:
    model = small.chain(3)
    made, _ = forced(model, small.rows(), small.squared_error, everything(1))
    engine = memfit.apply(made, model, small.squared_error, None)
    part = tuple(t[:100] for t in small.rows())
    found = outcome_of(model, part, small.squared_error, engine)
    assert found.divergence is None
    assert found.differs(outcome_of(model, part, small.squared_error)) is None


def test_backward_may_run_twice_where_the_graph_is_retained() -> None:
    model, sample = small.chain(3, dropout=0.1), small.rows()
    made, _ = forced(model, sample, small.squared_error, mixed(1))
    assert made.script.swaps
    grads = []
    for engine in (None, memfit.apply(made, model, small.squared_error, None)):
        torch.manual_seed(2)
        if engine is None:
            loss = small.squared_error(model, sample)
        else:
            with engine.forward(retain_graph=True):
                loss = small.squared_error(model, sample)
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    assert small.same(*grads)


def test_a_second_backward_through_a_graph_that_is_not_retained_is_refused() -> None:
    model, sample = small.chain(3), small.rows()
    made, _ = forced(model, sample, small.squared_error, everything(1))
    with memfit.apply(made, model, small.squared_error, None).forward():
        loss = small.squared_error(model, sample)
    loss.backward(retain_graph=True)
    with pytest.raises(EngineError, match="backward asked again for a tensor that was already freed"):
        loss.backward()


def test_two_forwards_before_a_backward_do_not_share_the_room() -> None:
    model, samples = small.chain(3), [small.rows(), tuple(2 * t for t in small.rows())]
    made, _ = forced(model, samples[0], small.squared_error, everything(1))
    engine = memfit.apply(made, model, small.squared_error, None)
    losses, followers = [], []
    for sample in samples:
        with engine.forward() as follower:
            losses.append(small.squared_error(model, sample))
        followers.append(follower)
    for loss, sample in zip(losses, samples, strict=True):
        model.zero_grad()
        loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        small.squared_error(model, sample).backward()
        assert small.same(found, [p.grad for p in model.parameters() if p.grad is not None])
    assert followers[0] is not None
    assert followers[1] is not None
    assert followers[0].divergence is None
    assert "still has offloaded activations" in str(followers[1].divergence)
    with engine.forward() as third:  # both have had their backward, though the program still knows them
        small.squared_error(model, samples[0])
    assert third is not None
    assert third.divergence is None


def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    """A backward inside forward, through a graph that is differentiated again."""
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (gradient.norm(dim=-1) - 1).square().mean()


@pytest.mark.parametrize("choice", [everything(0), everything(2), mixed(0), mixed(1)])
def test_a_backward_inside_forward_reads_what_is_still_there_or_comes_back(choice: Choice) -> None:
    model, sample = small.chain(2), small.rows()
    made, _ = forced(model, sample, gradient_penalty, choice)
    reference = outcome_of(model, sample, gradient_penalty)
    found = outcome_of(model, sample, gradient_penalty, memfit.apply(made, model, gradient_penalty, None))
    assert found.divergence is None
    assert found.differs(reference) is None
    assert measured_peak(made, model, sample, gradient_penalty) == pytest.approx(made.prediction.peak_bytes, rel=0.005)


# -- steps -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
def test_steps_train_as_plain_steps_do(parts: int) -> None:
    sample = small.rows()
    model = small.chain(3, dropout=0.1)
    made, _ = forced(model, sample, small.squared_error, mixed(0), small.adamw, parts)
    assert made.script.swaps
    ends = []
    for each in (made, replace(made, script=type(made.script)())):
        trained = small.chain(3, dropout=0.1)
        engine = memfit.apply(each, trained, small.squared_error, small.adamw)
        torch.manual_seed(3)
        for _ in range(3):
            record = engine.step(sample)
            assert record.divergences == ()
            assert record.micro_batches == parts
        ends.append(small.state_of(trained, engine.optimizer))
    assert small.same(*ends)


@pytest.fixture
def trained() -> memfit.Engine:
    """An engine that offloads all it can, one step old."""
    model, sample = small.chain(3, batch_norm=True), small.rows()
    made, _ = forced(model, sample, small.squared_error, everything(2), small.adamw)
    engine = memfit.apply(made, model, small.squared_error, small.adamw)
    engine.step(sample)
    return engine


@pytest.mark.parametrize("layer", [0, 3, 10])
def test_an_exception_in_mid_forward_leaves_all_as_it_was_and_the_next_step_follows(
    trained: memfit.Engine, layer: int
) -> None:
    engine, before = trained, small.state_of(trained.model, trained.optimizer)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    hook = engine.model[layer].register_forward_hook(fail)  # type: ignore[index,operator]
    with pytest.raises(ZeroDivisionError) as held:  # its traceback holds the step's frames meanwhile
        engine.step(small.rows())
    hook.remove()
    assert small.same(small.state_of(engine.model, engine.optimizer), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.step(small.rows()).divergences == ()
    assert held.value is not None


def out_of_space(file: int, memory: memoryview, offset: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(file: int, memory: memoryview, offset: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("name", "failing", "sentence"),
    [
        ("write_whole", out_of_space, r"could not be written .*No space left on device.* the step was not taken"),
        ("write_whole", broken, r"could not be written .*\(Input/output error\).* the step was not taken"),
        ("read_whole", broken, r"could not be read .*\(Input/output error\).* the step was not taken"),
    ],
)
def test_a_disk_that_fails_fails_the_step_and_nothing_else(
    trained: memfit.Engine,
    name: str,
    failing: Any,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, before = trained, small.state_of(trained.model, trained.optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(files, name, failing)
        with pytest.raises(EngineError, match=sentence):
            engine.step(small.rows())
    assert small.same(small.state_of(engine.model, engine.optimizer), before)
    assert engine.step(small.rows()).divergences == ()


def test_a_file_cut_short_under_the_run_is_noticed(trained: memfit.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, before = trained, small.state_of(trained.model, trained.optimizer)
    read = files.read_whole

    def cut(file: int, memory: memoryview, offset: int) -> None:
        os.ftruncate(file, 0)
        read(file, memory, offset)

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_whole", cut)
        with pytest.raises(EngineError, match="something cut it while it was in use: the step was not taken"):
            engine.step(small.rows())
    assert small.same(small.state_of(engine.model, engine.optimizer), before)


def test_the_file_has_no_name_and_goes_with_the_engine(here: Path) -> None:
    def workers() -> int:
        return sum(t.name.startswith("memfit offload") for t in threading.enumerate())

    gc.collect()
    before = workers()
    model = small.chain(2)
    made, _ = forced(model, small.rows(), small.squared_error, everything(1))
    engine = memfit.apply(made, model, small.squared_error, None)
    outcome_of(model, small.rows(), small.squared_error, engine)
    assert list(here.iterdir()) == []
    assert workers() == before + 2
    del engine
    gc.collect()
    assert workers() == before


def test_no_room_is_told_before_anything_runs(here: Path) -> None:
    with pytest.raises(
        InfeasibleError,
        match="offloaded activations need 1.00 PiB on disk, and .*: free space there, set MEMFIT_OFFLOAD",
    ):
        DiskArena(1 << 50)
    assert list(here.iterdir()) == []
    model = small.chain(2)
    made, _ = forced(model, small.rows(), small.squared_error, everything(1))
    number, placed = next(iter(made.script.swaps.items()))
    swaps = {**made.script.swaps, number: replace(placed, offset=1 << 50)}
    with pytest.raises(InfeasibleError, match="on disk"):
        memfit.apply(replace(made, script=replace(made.script, swaps=swaps)), model, small.squared_error, None)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        EngineError, match=r"no file can be created in .*file \(Not a directory\): set MEMFIT_OFFLOAD_DIR"
    ):
        DiskArena(1, tmp_path / "file")


# -- who has the arenas ------------------------------------------------------------------------------------------------------


def test_room_is_lent_to_one_at_a_time() -> None:
    class Borrower:
        pass

    tiers = LowerTiers(arena_makers(torch.device("cpu")))
    assert tiers.lend(Borrower()) is None
    tiers.reserve({"disk": 10})
    arenas = dict(tiers.arenas)
    tiers.reserve({"disk": 5})
    assert tiers.arenas == arenas
    one, other = Borrower(), Borrower()
    assert tiers.lend(one) == arenas
    assert tiers.lend(other) is None
    tiers.give_back(other)
    assert tiers.lend(other) is None
    del one
    assert tiers.lend(other) == arenas
    tiers.give_back(other)
    assert tiers.lend(other) == arenas
    tiers.reserve({"disk": 1 << 14})
    assert tiers.arenas["disk"] is not arenas["disk"]
    tiers.close()
