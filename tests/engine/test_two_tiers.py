"""Two tiers below a device, run for real on a CPU: plain memory stands for the host below a GPU, and the disk is reached through a stage as from there."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
import small
from engine.forced import Choice, forced
from engine.test_activation_offloading import mixed, out_of_space
from memfit.engine import activation_offloading
from memfit.errors import EngineError, InfeasibleError
from memfit.hardware.machine import Link
from memfit.planner.recipes import PREFETCH_DISTANCES, Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planning import Planning, planning_of
from memfit.storage import files, staging
from memfit.storage.arenas import Arena, Copy, DiskArena, Storage
from memfit.storage.files import DiskFile
from memfit.storage.raw_bytes import memory_of_storage
from memfit.storage.staging import StagedDiskArena
from memfit.values.bundle import TraceBundle

pytestmark = pytest.mark.usefixtures("one_thread")

DISK = Link("disk", 1e8, 1e8, 1e-4, least_bytes=1)
LINK = Link("host", 1e9, 1e9, 1e-5, least_bytes=1, below=DISK)
CPU = torch.device("cpu")
PIECE_BYTES = 5000  # storages of the models here are larger, so that they pass in several pieces, the last one not full


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where these tests offload to, and in which pieces."""
    monkeypatch.setenv("MEMFIT_OFFLOAD_DIR", str(tmp_path))
    monkeypatch.setattr(staging, "PIECE_BYTES", PIECE_BYTES)
    return tmp_path


class MemoryArena(DiskArena):
    """What pinned host memory is to a GPU, with the queues of a disk."""

    def __init__(self, size: int) -> None:
        super().__init__(0)
        self.bytes = size
        self.buffer = memoryview(bytearray(size))

    def _carry_down(self) -> Any:
        buffer = self.buffer

        def carry(_: DiskFile, storage: Storage, offset: int) -> None:
            buffer[offset : offset + storage.nbytes()] = memory_of_storage(storage)

        return carry

    def _carry_up(self) -> Any:
        buffer = self.buffer

        def carry(_: DiskFile, storage: Storage, offset: int) -> None:
            memory_of_storage(storage)[:] = buffer[offset : offset + storage.nbytes()]

        return carry


class Noting(Arena):
    """Passes copies on, and notes what is begun and what is waited for."""

    def __init__(self, arena: Arena, tier: str, told: list[tuple[str, str, int, int]]) -> None:
        self.arena, self.tier, self.told = arena, tier, told
        self.bytes, self.device_type = arena.bytes, arena.device_type

    def _noted(self, way: str, copy: Copy, offset: int, size: int) -> Copy:
        tier, told = self.tier, self.told
        told.append((tier, way, offset, size))

        class Waiting(Copy):
            def wait(self) -> None:
                copy.wait()
                told.append((tier, f"{way} done", offset, size))

        return Waiting()

    def copy_down(self, storage: Storage, offset: int) -> Copy:
        return self._noted("down", self.arena.copy_down(storage, offset), offset, storage.nbytes())

    def copy_up(self, storage: Storage, offset: int) -> Copy:
        return self._noted("up", self.arena.copy_up(storage, offset), offset, storage.nbytes())

    def settle(self) -> None:
        self.arena.settle()

    def close(self) -> None:
        self.arena.close()


Told = list[tuple[str, str, int, int]]


def below(told: Told) -> activation_offloading.Makers:
    return {
        "host": lambda size: Noting(MemoryArena(size), "host", told),
        "disk": lambda size: Noting(StagedDiskArena(size, CPU), "disk", told),
    }


def engine_of(made: memfit.Plan, blocks: int = 3, told: Told | None = None) -> memfit.Engine:
    model = small.chain(blocks, dropout=0.1)
    optimizer = small.adamw(model.parameters())
    return memfit.Engine(made, model, small.squared_error, optimizer, below=below([] if told is None else told))


def halves(lag: int) -> Choice:
    """Everything offloaded, by turns to one tier and the other."""

    def plan(recipes: Recipes) -> dict[int, list[int]]:
        own = sorted(s for s in recipes.reloads_of if s in recipes.saved)
        offloaded = {s: recipes.reloads_of[s][n % 2 * len(PREFETCH_DISTANCES) + lag] for n, s in enumerate(own)}
        return recomputations_for(recipes, (), offloaded=offloaded)

    return plan


def told_to(choice: Choice, parts: int = 1) -> memfit.Plan:
    model = small.chain(3, dropout=0.1)
    made, _ = forced(model, small.rows(), small.squared_error, choice, small.adamw, parts, LINK)
    assert made.script.lower_bytes.keys() == {"host", "disk"}
    return memfit.Plan.from_json(made.to_json())


def plain_state(steps: int, made: memfit.Plan) -> list[torch.Tensor]:
    """After plain steps, in as many parts."""
    engine = engine_of(replace(made, script=type(made.script)()))
    torch.manual_seed(3)
    for _ in range(steps):
        engine.step(small.rows())
    return small.state_of(engine.model, engine.optimizer)


@pytest.mark.parametrize(
    ("choice", "parts"), [(halves(0), 1), (halves(1), 2), (halves(2), 1), (mixed(0), 1), (mixed(3), 2)]
)
def test_steps_are_plain_steps_and_every_storage_lies_where_the_plan_says(choice: Choice, parts: int) -> None:
    made = told_to(choice, parts)
    told: Told = []
    engine = engine_of(made, told=told)
    torch.manual_seed(3)
    for number in range(3):
        told.clear()
        record = engine.step(small.rows(), meter=number == 2)
        assert record.divergences == ()
    assert small.same(small.state_of(engine.model, engine.optimizer), plain_state(3, made))
    assert engine.records[-1].peak_bytes == pytest.approx(made.prediction.peak_bytes, rel=0.005)
    downs = sorted((tier, offset) for tier, way, offset, _ in told if way == "down")
    assert downs == sorted([(s.tier, s.offset) for s in made.script.swaps.values()] * parts)
    assert {tier: arena.bytes for tier, arena in engine._lower_tiers.arenas.items()} == made.script.lower_bytes


@pytest.mark.parametrize("lag", range(len(PREFETCH_DISTANCES)))
def test_no_more_is_on_its_way_to_a_tier_than_the_plan_says(lag: int) -> None:
    made = told_to(halves(lag))
    told: Told = []
    engine_of(made, told=told).step(small.rows())
    script = made.script
    for tier in ("host", "disk"):
        own = [s for s in script.swaps.values() if s.tier == tier]
        allowed = max(sum(s.bytes for s in own if s.begin <= i <= s.gone_by) for i in range(len(script.operations)))
        ups = [
            s.offset for step in script.steps for run in step.runs if run[0] < 0 and (s := script.swaps[~run[0]]) in own
        ]
        assert [offset for where, way, offset, _ in told if (where, way) == (tier, "up")] == ups
        on_its_way = most = 0
        for where, way, _, size in told:
            if where == tier:
                on_its_way += {"down": size, "down done": -size}.get(way, 0)
                most = max(most, on_its_way)
        assert on_its_way == 0
        assert 0 < most <= allowed


def test_planned_offloading_fills_the_first_tier_stays_in_its_room_and_in_the_budget() -> None:
    model, sample = small.chain(3, dropout=0.1), small.rows()
    plain = memfit.plan(model, sample, small.squared_error, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    trace = planning_of(plain).solver(1).trace
    fast = replace(LINK, out_bandwidth=1e12, in_bandwidth=1e12, latency_seconds=0.0)
    fast = replace(fast, below=replace(DISK, out_bandwidth=1e11, in_bandwidth=1e11, latency_seconds=0.0))
    used: set[str] = set()
    for room in (0, 1 << 17, 1 << 30):
        search = Planning(TraceBundle.of(trace, replace(fast, free_bytes=room)))
        low, high = search.smallest()[0], search.plain_peak()
        for fraction in (0.0, 0.5):
            budget = round(low + fraction * (high - low))
            made = search.plan(budget)
            assert made.script.lower_bytes.get("host", 0) <= room
            used |= made.script.lower_bytes.keys()
            engine = engine_of(made)
            torch.manual_seed(3)
            for meter in (False, True):
                record = engine.step(sample, meter=meter)
            assert record.peak_bytes is not None
            assert record.peak_bytes <= budget
            assert small.same(small.state_of(engine.model, engine.optimizer), plain_state(2, made))
    assert used == {"host", "disk"}


# -- what fails --------------------------------------------------------------------------------------------------------------


def cut(file: int, memory: memoryview, offset: int) -> None:
    os.ftruncate(file, 0)
    READ(file, memory, offset)


READ = files.read_whole


@pytest.mark.parametrize(
    ("name", "failing", "sentence"),
    [
        ("write_whole", out_of_space, r"could not be written .*No space left on device.* the step was not taken"),
        ("read_whole", cut, "something cut it while it was in use: the step was not taken"),
    ],
)
def test_a_disk_below_the_host_that_fails_fails_the_step_and_nothing_else(
    name: str, failing: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(told_to(halves(1)))
    engine.step(small.rows())
    before = small.state_of(engine.model, engine.optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(files, name, failing)
        with pytest.raises(EngineError, match=sentence):
            engine.step(small.rows())
    assert small.same(small.state_of(engine.model, engine.optimizer), before)
    assert engine.step(small.rows()).divergences == ()


def test_whatever_goes_wrong_on_the_way_is_told_and_nobody_waits_for_ever(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(files, "write_whole", lost)
    arena = StagedDiskArena(1 << 16, CPU, here)
    with pytest.raises(EngineError, match=r"could not be copied \(the device is gone\): the step was not taken"):
        arena.copy_down(torch.ones(9).untyped_storage(), 0).wait()


def test_no_room_on_the_second_tier_gives_back_the_first_and_names_its_budget() -> None:
    tiers = activation_offloading.LowerTiers(below([]))
    with pytest.raises(InfeasibleError, match="on disk, and .* or plan with a smaller disk_budget"):
        tiers.reserve({"host": 100, "disk": 1 << 50})
    assert not tiers.arenas
    tiers.reserve({"host": 100, "disk": 100})
    assert tiers.arenas.keys() == {"host", "disk"}
    tiers.close()


def test_bytes_pass_the_stage_as_they_are(here: Path) -> None:
    chance = random.Random(0)
    arena = StagedDiskArena(1 << 20, CPU, here)
    sizes = [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 7 * PIECE_BYTES + 3]
    storages = [torch.tensor(list(chance.randbytes(size)), dtype=torch.uint8).untyped_storage() for size in sizes]
    offsets = [n << 16 for n in range(len(sizes))]
    for copy in [arena.copy_down(s, o) for s, o in zip(storages, offsets, strict=True)]:
        copy.wait()
    back = [torch.zeros(size, dtype=torch.uint8).untyped_storage() for size in sizes]
    for copy in [arena.copy_up(s, o) for s, o in zip(back, offsets, strict=True)]:
        copy.wait()
    assert [bytes(s) for s in back] == [bytes(s) for s in storages]
    assert list(here.iterdir()) == []
    arena.close()
