"""Activations offloaded beside every way of sharing a step out: the numbers of the plain sharded step bit by bit, and each rank's predicted peak to the byte.

The link is told, not measured, so that plans do not depend on this computer's disk: fast enough to pay, and for tensors of any size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import memfit
import small
from engine.forced import everything, forced
from memfit.hardware.machine import Link
from memfit.planner.recipes import ALIGNMENT_BYTES
from memfit.planning import Planning, planning_of
from memfit.techniques.sharding import WAYS, setting_of
from sharding import offloads, steps
from sharding.ranks import on_ranks
from sharding.test_training import planned

pytestmark = pytest.mark.usefixtures("one_thread")

FAST: Final = Link("disk", 1e11, 1e11, 0.0, least_bytes=1)
Wanted = tuple[str, int, str]
# Each way once, half of them with accumulation, half of them with state that is offloaded as well.
SOME: list[Wanted] = [("data", 4, "device"), ("zero3", 1, "disk")]
OTHERS: list[Wanted] = [("zero1", 1, "disk"), ("zero2", 4, "device")]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where these tests offload to."""
    monkeypatch.setenv("MEMFIT_OFFLOAD_DIR", str(tmp_path))
    return tmp_path


def half_of_gpt() -> steps.Built:
    model, sample, loss_fn = steps.gpt()
    return model, steps.part_of(sample, 0, 2), loss_fn


def with_link(plan: memfit.Plan, link: Link) -> Planning:
    """Plans of the same step for a lower tier that is told."""
    known = planning_of(plan)
    assert known is not None
    return Planning(replace(known.bundle, lower_tier=link), known.source)


def bit_equal_to_the_first(plans: list[memfit.Plan], every: int, build: Any) -> None:
    """On two ranks: of each group of so many plans the numbers of the first, and the predicted peak of every rank."""
    for rank, of_one in enumerate(on_ranks(2, steps.judged, [p.to_json() for p in plans], build, "adamw")):
        for number, (plan, (losses, trained, peak)) in enumerate(zip(plans, of_one, strict=True)):
            told, parameters, _ = of_one[number - number % every]
            assert losses == told, plan.choices
            assert small.same(trained, parameters), plan.choices
            assert peak == plan.prediction.ranks[rank].peak_bytes, plan.choices


@pytest.mark.parametrize("wanted", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_whatever_backward_reads_is_offloaded_beside_every_way(wanted: list[Wanted]) -> None:
    """A choice of reloads for all, not what pays: of everything at once, at each distance that a copy may have."""
    model, whole, loss_fn = steps.chain()
    sample = steps.part_of(whole, 0, 2)
    plans = []
    for lag, (way, parts, place) in enumerate(wanted, start=1):
        fixed = {"sharding": setting_of(way, 2), "state_place": place}
        plain = planned(
            lambda: (model, sample, loss_fn), "adamw", fixed["sharding"], parts, more={"state_place": place}
        )
        made, _ = forced(model, sample, loss_fn, everything(lag % 3), steps.adamw, parts, FAST, **fixed)
        figures = made.prediction
        ranks = tuple(replace(rank, peak_bytes=figures.peak_bytes) for rank in figures.ranks)
        made = replace(made, prediction=replace(figures, ranks=ranks))
        assert made.script.swaps
        assert not made.script.steps or all(run[0] < 0 for step in made.script.steps for run in step.runs)
        plans += [plain, made]
    bit_equal_to_the_first(plans, 2, steps.chain)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "disk"])
@pytest.mark.parametrize("way", WAYS)
def test_plans_that_offload_are_faster_or_smaller_than_those_that_recompute(way: str, place: str) -> None:
    """The smallest plan with a lower tier, and the one in the bytes of the smallest without."""
    plans: list[memfit.Plan] = []
    for parts in (1, 2):
        plain = planned(half_of_gpt, "adamw", setting_of(way, 2), parts, more={"state_place": place})
        known = planning_of(plain)
        assert known is not None
        below = with_link(plain, FAST)
        alone, least = known.smallest()[0], below.smallest()[0]
        assert least <= alone
        faster = below.plan(alone, savings=False)
        assert faster.script.swaps
        assert faster.prediction.step_seconds < known.plan(alone, savings=False).prediction.step_seconds
        plans += [plain, below.plan(least, savings=False), faster]
    bit_equal_to_the_first(plans, 3, steps.gpt)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_a_user_asks_is_offloaded_where_the_link_is_fast_and_is_not_where_it_is_slow(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `memfit.plan`, in the bytes of the smallest plan that recomputes alone."""
    model, sample, loss_fn = half_of_gpt()

    def made(budget: int, link: Link | None) -> memfit.Plan:
        monkeypatch.setattr("memfit.lower_tiers.nearest_link", lambda *_: link)
        host = None if link is None else "1GiB"
        fixed = {"sharding": setting_of(way, 2), "micro_batches": 1, "state_place": "device"}
        return memfit.plan(model, sample, loss_fn, budget, steps.adamw, devices=2, fixed=fixed, host_budget=host)

    plain = made(1 << 40, None)
    least = memfit.smallest_budget(plain)
    recomputed = memfit.replan(plain, least)
    offloaded = made(least, FAST)
    assert offloaded.script.swaps
    assert offloaded.prediction.step_seconds < recomputed.prediction.step_seconds
    slow = made(least, replace(FAST, out_bandwidth=1.0, in_bandwidth=1.0))
    assert not slow.script.swaps
    bit_equal_to_the_first([plain, recomputed, offloaded], 3, steps.gpt)


def test_less_fits_than_by_recomputing_alone_and_what_a_rank_needs_below_stays_in_its_budget() -> None:
    """What one block hands to the next is kept under ZeRO 3, as gathering twice would be needed to recompute it; it can be offloaded."""
    plain = planned(half_of_gpt, "adamw", setting_of("zero3", 2), 1)
    known = planning_of(plain)
    assert known is not None
    below = with_link(plain, FAST)
    least = below.smallest()[0]
    assert least < known.smallest()[0]
    tight = below.plan(least)
    (use,) = tight.prediction.tiers
    assert f"of disk besides on each device: {use.contents}" in tight.explain()
    reserved = sum(tight.script.lower_bytes.values())
    assert use.all_bytes <= reserved < use.all_bytes + ALIGNMENT_BYTES * len(tight.script.swaps)
    least_room = use.all_bytes // 8
    limited = with_link(plain, replace(FAST, free_bytes=least_room))
    assert least < limited.smallest()[0] < known.smallest()[0]
    made = limited.plan(limited.smallest()[0], savings=False)
    assert 0 < sum(made.script.lower_bytes.values()) <= least_room


def test_a_share_of_what_is_below_is_one_of_a_device_s_part_and_a_disk_is_one_for_all() -> None:
    model, sample, loss_fn = steps.chain()
    shares: list[Any] = []
    for devices in (None, 2, 4):
        plan = memfit.plan(
            model,
            sample,
            loss_fn,
            "1GiB",
            small.adamw,
            host_budget="50%",
            devices=devices,
            fixed={"micro_batches": 1, "state_place": "disk", **({"sharding": "data"} if devices else {})},
        )
        known = planning_of(plan)
        assert known is not None
        assert known.bundle.lower_tier is not None
        shares.append((known.bundle.lower_tier.free_bytes, known.bundle.lower_tier.out_bandwidth))
    (alone, fast), (of_two, halved), (of_four, quartered) = shares
    assert of_two == pytest.approx(alone / 2, rel=0.01)  # other processes use the disk meanwhile
    assert of_four == pytest.approx(alone / 4, rel=0.01)
    assert (halved, quartered) == (fast / 2, fast / 4)


def test_where_one_rank_has_no_room_below_none_begins() -> None:
    model, whole, loss_fn = steps.chain()
    sample = steps.part_of(whole, 0, 2)
    plan, _ = forced(model, sample, loss_fn, everything(0), steps.adamw, sharding=setting_of("zero3", 2))
    first, last = on_ranks(2, offloads.without_room, plan.to_json())
    assert last.startswith("offloaded activations need ")
    assert first == f"rank 1 cannot offload what the plan offloads, so no rank has begun: {last}"
