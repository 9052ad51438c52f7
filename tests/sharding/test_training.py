"""On several ranks: the predicted peak of each is the measured one, to the byte, and the numbers are those of one device on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import memfit
import small
from memfit import api
from memfit.planner.solvers import SLACK_BYTES
from memfit.sharding.agreement import IN_A_STEP, OF_SHARDS
from memfit.techniques.sharding import ONE_UNIT, WAYS, setting_of
from sharding import steps
from sharding.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

Wanted = tuple[str, int, bool]  # way, micro-batches, and whether as much as possible is dropped
ALL = (*WAYS, ONE_UNIT)
EVERYTHING = [(way, parts, least) for way in ALL for parts in (1, 4) for least in (False, True)]
# Each way once, with accumulation or without, some with recomputation; at night all combinations.
SOME = [("data", 4, True), ("zero1", 1, False), ("zero2", 1, True), ("zero3", 4, True), (ONE_UNIT, 1, True)]


def planned(
    build: Callable[[], steps.Built], optimizer: str, sharding: str, parts: int, *, least: bool = False, **named: Any
) -> memfit.Plan:
    """The plan for a rank's part of the batch, plain or the smallest."""
    model, sample, loss_fn = build()
    fixed = {"sharding": sharding, "micro_batches": parts, **named.pop("more", {})}
    plan = memfit.plan(model, sample, loss_fn, 1 << 50, steps.OPTIMIZERS[optimizer], fixed=fixed, **named)
    return api.replan(plan, memfit.smallest_budget(plan)) if least else plan


def compared(
    ranks: int,
    build: Callable[[], steps.Built],
    optimizer: str,
    wanted: Iterable[Wanted],
    *,
    clip_norm: float | None = None,
) -> None:
    """Peaks to the byte; with SGD parameters after three steps within 1e-6; and every rank tells the loss of the whole batch.

    In 32 bits AdamW makes an update of up to the learning rate of a gradient near zero, where the order of a sum decides its digits: of this GPT's qkv one is
    -2.2e-9, in four parts -2.0e-9, and moves its parameter by 1.5e-5 less (lr * g / (|g| + eps), eps 1e-8). `test_equality` compares gradients, and AdamW
    in 64 bits.

    Between ways bit-equal: with a power of two of ranks it does not matter whether gradients are divided by their number before they are added up or after.
    """

    def of_rank() -> steps.Built:
        model, sample, loss_fn = build()
        return model, steps.part_of(sample, 0, ranks), loss_fn

    plans = [
        planned(of_rank, optimizer, setting_of(way, ranks), parts, least=least, clip_norm=clip_norm)
        for way, parts, least in wanted
    ]
    losses, parameters = steps.alone(build, optimizer, clip_norm=clip_norm)
    measured = on_ranks(ranks, steps.judged, [plan.to_json() for plan in plans], build, optimizer)
    for rank, of_one in enumerate(measured):
        first: dict[int, list[torch.Tensor]] = {}
        for plan, (told, trained, peak) in zip(plans, of_one, strict=True):
            if clip_norm is None:  # the squares of the norm are added up shard by shard
                assert small.same(trained, first.setdefault(plan.choices.micro_batches, trained)), plan.choices
            assert peak == plan.prediction.ranks[rank].peak_bytes, plan.choices
            assert told == pytest.approx(losses, rel=1e-5), plan.choices
            if optimizer == "sgd":
                for mine, expected in zip(trained, parameters, strict=True):
                    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6, msg=str(plan.choices))


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_every_way_takes_what_is_predicted_and_trains_as_one_device_does(optimizer: str) -> None:
    compared(2, steps.chain, optimizer, SOME)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [SOME[1::2], SOME[::2]], ids=["zero1, zero3", "others"])
def test_ranks_may_take_another_path_than_each_other(ways: list[tuple[str, int, bool]]) -> None:
    """One's samples have padding and the other's have none, so that its forward runs other operations than that of the sample that was planned for."""

    def of_rank() -> steps.Built:
        model, sample, loss_fn = steps.padded()
        return model, steps.part_of(sample, 0, 2), loss_fn

    plans = [planned(of_rank, "sgd", setting_of(way, 2), parts, least=least) for way, parts, least in ways]
    assert any(plan.script.branches for plan in plans)
    losses, parameters = steps.alone(steps.padded, "sgd")
    measured = on_ranks(2, steps.judged, [plan.to_json() for plan in plans], steps.padded, "sgd")
    for number, plan in enumerate(plans):
        peaks = [of_one[number][2] for of_one in measured]
        for peak, rank in zip(peaks, plan.prediction.ranks, strict=True):
            assert peak <= rank.peak_bytes + SLACK_BYTES
        assert max(peaks) >= plan.prediction.peak_bytes, plan.choices
        for of_one in measured:
            told, trained, _ = of_one[number]
            assert told == pytest.approx(losses, rel=1e-5), plan.choices
            for mine, expected in zip(trained, parameters, strict=True):
                torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6, msg=str(plan.choices))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_all_combinations_on_two_ranks(optimizer: str) -> None:
    compared(2, steps.chain, optimizer, EVERYTHING)


def test_tokens_count_over_all_ranks_and_the_norm_of_all_gradients_is_clipped() -> None:
    """One rank's labels are nearly all masked: the mean of the ranks' means would be another gradient by far."""
    compared(2, steps.tagger, "sgd", [("zero1", 2, False), ("zero3", 2, True)], clip_norm=1e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_nothing_is_run_again_while_a_parameter_that_it_reads_is_away() -> None:
    """Blocks are gathered for each of four calls; a schedule for chains once ran one call's operations again in another one's backward."""

    def of_rank() -> steps.Built:
        model, sample, loss_fn = steps.repeated()
        return model, steps.part_of(sample, 0, 2), loss_fn

    plain = planned(of_rank, "sgd", "zero3/2", 1)
    least, most = memfit.smallest_budget(plain), plain.prediction.peak_bytes
    plans = [plain, *(api.replan(plain, least + (most - least) * part // 6) for part in range(0, 6, 2))]
    assert plans[1].script.recomputations > 0
    for of_one in on_ranks(2, steps.judged, [plan.to_json() for plan in plans], steps.repeated, "sgd"):
        (losses, parameters, _), *others = of_one
        for plan, (found, trained, peak) in zip(plans[1:], others, strict=True):
            assert found == losses
            assert small.same(trained, parameters)
            assert peak == plan.prediction.peak_bytes


def test_each_rank_takes_what_is_predicted_for_it_where_shards_differ() -> None:
    """Rows that cannot be shared out evenly, and under ZeRO 1 whole parameters: the state of each rank is another."""
    plans = [planned(steps.uneven, "adamw", setting_of(way, 2), 1) for way in ("zero1", "zero3")]
    expected = [[plan.prediction.ranks[rank].peak_bytes for plan in plans] for rank in range(2)]
    assert expected[0] != expected[1]
    measured = on_ranks(2, steps.judged_on_all, [plan.to_json() for plan in plans], steps.uneven, "adamw")
    assert [[peak for _, _, peak in of_one] for of_one in measured] == expected


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("build", [steps.chain, steps.gpt, steps.tagger])
@pytest.mark.parametrize("way", ALL)
def test_four_ranks_take_what_is_predicted_and_train_as_one_device_does(
    way: str, build: Callable[[], steps.Built], optimizer: str
) -> None:
    compared(
        4, build, optimizer, [each for each in EVERYTHING if each[0] == way and (each[1] == 1 or build is steps.chain)]
    )


def test_all_ranks_leave_out_a_step_in_which_the_loss_of_one_is_no_number_or_its_batch_is_larger_than_planned() -> None:
    plans = [planned(half_of_chain, "sgd", setting_of(way, 2), 2).to_json() for way in ("data", "zero3")]
    losses, _ = steps.alone(steps.chain, "sgd", 1)
    of_first, of_last = on_ranks(2, steps.beside_a_rank_in_trouble, plans, steps.chain)
    for (told, unchanged, loss), (own, _, _) in zip(of_first, of_last, strict=True):
        assert "the loss of rank 1 is" in told[0]
        assert "the loss of this rank, 1, is nan" in own[0]
        assert told[1:] == [f"rank 1 refuses its batch, and no rank takes the step: {each}" for each in own[1:]]
        assert own[1].startswith("the batch is [0 float32[64, 32]")
        assert own[2].startswith("a list of 1 batches holds")
        assert unchanged
        assert loss == pytest.approx(losses[0], rel=1e-5)


def test_a_parameter_without_a_gradient_on_one_rank_is_told_to_all_and_the_next_step_goes_on() -> None:
    """The others waited in their backward until that rank's process had ended."""
    ways = [("data", 1), ("zero1", 2)]
    plans = [planned(steps.detaching, "sgd", setting_of(way, 2), parts).to_json() for way, parts in ways]
    for of_rank in on_ranks(2, steps.without_a_gradient, plans, limit=60.0):
        for told, unchanged, gradients, alike in of_rank:
            assert told.startswith("on rank 1 a parameter gets no gradient in this step (head.bias), which Distributed")
            assert unchanged
            assert not gradients
            assert alike


def test_a_parameter_without_a_gradient_on_one_rank_is_told_to_all_in_loops_that_are_not_the_engines() -> None:
    """That rank took an update of its own, or raised, and the others waited in their backward until its process had ended."""
    plans = [planned(steps.detaching, "sgd", setting_of(way, 2), 1).to_json() for way in ("data", "zero1")]
    loops = ("clipped", "accumulated", "left out", "skipped", "trainer")
    cases = [(plans, loop) for loop in loops]
    for of_rank in on_ranks(2, steps.each, steps.looped_without_a_gradient, cases, limit=30.0):
        for loop, of_plans in zip(loops, of_rank, strict=True):
            which = "body.weight" if loop in {"left out", "skipped"} else "head.bias"
            for told, unchanged, alike in of_plans:
                assert told.startswith(
                    f"on rank 1 a parameter gets no gradient in this step ({which}), which Distributed"
                )
                assert unchanged
                assert alike


def test_a_rank_that_fails_in_a_step_is_told_to_all_and_the_next_step_goes_on() -> None:
    """The others waited in their backward until its process had ended: for ever, where its script went on."""
    divided, undivided = (
        [planned(half_of_chain, "sgd", setting_of(way, 2), parts).to_json() for way, parts in ways]
        for ways in ([("data", 1), ("zero1", 2)], [("data", 1), ("zero1", 1)])
    )
    cases = [
        (divided if by == "engine" else undivided, where, by)
        for where in ("graph", "forward", "backward")
        for by in ("engine", "trainer")
    ]
    first, last = on_ranks(2, steps.each, steps.beside_a_rank_that_fails, cases, limit=30.0)
    for (_, where, by), of_first, of_last in zip(cases, first, last, strict=True):
        without_graph = (
            "InputError: the loss does not depend" if by == "engine" else "RuntimeError: element 0 of tensors"
        )
        for (told, *after), (own, *after_own) in zip(of_first, of_last, strict=True):
            assert own.startswith(without_graph if where == "graph" else "ValueError: it is enough")
            assert told == f"EngineError: rank 1 has failed in this step, and no rank has taken it: {own}"
            assert after == after_own == [True, True]


def test_ranks_agree_as_often_in_many_micro_batches_as_in_one() -> None:
    plans = [
        planned(half_of_chain, "sgd", setting_of(way, 2), parts).to_json()
        for way in ("data", "zero3")
        for parts in (1, 4)
    ]
    for of_rank in on_ranks(2, steps.messages, plans, steps.chain):
        assert of_rank == [IN_A_STEP] * 2 + [IN_A_STEP + OF_SHARDS] * 2


def half_of_chain() -> steps.Built:
    model, sample, loss_fn = steps.chain()
    return model, steps.part_of(sample, 0, 2), loss_fn


TECHNIQUES: dict[str, dict[str, Any]] = {
    "8bit": {"more": {"state_format": "8bit"}},
    "fp16": {"more": {"precision": "fp16"}},
    "bf16": {"more": {"precision": "bf16"}},
    "frozen": {"freeze": ["0", "2"]},
    "state offloaded": {"more": {"state_place": "disk"}},
}


def with_techniques(wanted: Iterable[tuple[str, str]]) -> None:
    """Peaks, and all ways the same numbers where no state is packed: blocks of 8-bit state lie within shards."""
    wanted = list(wanted)
    plans = [
        planned(half_of_chain, "adamw", setting_of(way, 2), 1, least="offloaded" in how, **TECHNIQUES[how])
        for how, way in wanted
    ]
    for of_one in on_ranks(2, steps.judged, [plan.to_json() for plan in plans], steps.chain, "adamw"):
        first: dict[str, tuple[list[float], list[torch.Tensor], int]] = {}
        for (how, _), plan, result in zip(wanted, plans, of_one, strict=True):
            told, trained, peak = result
            assert peak == plan.prediction.peak_bytes, plan.choices
            other = first.setdefault(how, result)
            assert told == pytest.approx(other[0], rel=1e-3 if how == "8bit" else 1e-6)
            assert how == "8bit" or small.same(trained, other[1]), plan.choices


@pytest.mark.slow
def test_shards_of_state_are_offloaded() -> None:
    with_techniques([("state offloaded", "zero1"), ("state offloaded", "zero3")])


@pytest.mark.slow
def test_techniques_go_with_sharding() -> None:
    with_techniques([("8bit", "zero3"), ("fp16", "data"), ("fp16", "zero3"), ("bf16", "zero2"), ("frozen", "zero3")])


@pytest.mark.slow
@pytest.mark.parametrize("how", TECHNIQUES)
def test_every_technique_goes_with_every_way(how: str) -> None:
    with_techniques((how, way) for way in ALL)
