"""What the optimizer is given on several ranks is what it is given of the undivided model: within 1e-6, and bit by bit where the operations are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import memfit
from memfit.techniques.sharding import ONE_UNIT, WAYS, setting_of
from sharding import equality, steps
from sharding.equality import Trained
from sharding.ranks import on_ranks
from sharding.test_training import planned

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Case:
    """One step to compare.

    Attributes:
        build, optimizer: of it.
        micro_batches: of each rank.
        least: as much as possible is recomputed.
        precision: of forward and backward. In 16 bits a matrix product of half of the rows is rounded otherwise, so the undivided model then takes the batch in
            the parts that ranks and micro-batches take.
        named: further arguments of `memfit.plan`.
        later: whether what comes after the first step is compared as well. It is not where rounding grows: AdamW divides a gradient by its size, so that
            one near zero turns rounding into an update of up to the learning rate in 32 bits (in 64 it does not matter); blocks of 8-bit state lie
            within shards.
    """

    build: Callable[[], steps.Built] = steps.chain
    optimizer: str = "sgd"
    micro_batches: int = 1
    least: bool = False
    precision: str = "full"
    named: dict[str, Any] = field(default_factory=dict)
    later: bool = True


def chain_in_64_bits() -> steps.Built:
    model, (x, y), loss_fn = steps.chain()
    return model.double(), (x.double(), y.double()), loss_fn


def gpt_in_64_bits() -> steps.Built:
    model, sample, loss_fn = steps.gpt()
    return model.double(), sample, loss_fn


CASES = {
    "plain": Case(),
    "gpt": Case(steps.gpt),
    "accumulation": Case(micro_batches=4),
    "tokens": Case(steps.tagger),
    "tokens-accumulation": Case(steps.tagger, micro_batches=2),
    "clipping": Case(named={"clip_norm": 1e-2}),
    "clipping-tokens": Case(steps.tagger, named={"clip_norm": 1e-2}),
    "recompute": Case(steps.gpt, least=True),
    "recompute-accumulation": Case(micro_batches=4, least=True),
    "bf16": Case(precision="bf16"),
    "bf16-accumulation": Case(precision="bf16", micro_batches=2),
    "fp16": Case(precision="fp16"),
    "fp16-clipping": Case(precision="fp16", named={"clip_norm": 1e-2}),
    "frozen": Case(named={"freeze": ["0", "2"]}),
    "8bit": Case(optimizer="adamw", named={"more": {"state_format": "8bit"}}, later=False),
    "adamw": Case(steps.gpt, "adamw", later=False),
    "adamw-64": Case(chain_in_64_bits, "adamw", micro_batches=2),
    "adamw-64-gpt": Case(gpt_in_64_bits, "adamw"),
}


def plan_of(case: Case, way: str, ranks: int) -> dict[str, Any]:
    def of_rank() -> steps.Built:
        model, sample, loss_fn = case.build()
        return model, steps.part_of(sample, 0, ranks), loss_fn

    named = dict(case.named)
    if case.precision != "full":
        named["more"] = {"precision": case.precision, **named.get("more", {})}
    made = planned(of_rank, case.optimizer, setting_of(way, ranks), case.micro_batches, least=case.least, **named)
    return made.to_json()


def undivided(case: Case, ranks: int, hot: float = 1.0) -> Trained:
    parts = 1 if case.precision == "full" else ranks * case.micro_batches
    clip_norm, frozen = case.named.get("clip_norm"), case.named.get("freeze", ())
    return equality.undivided(
        case.build, case.optimizer, parts=parts, precision=case.precision, clip_norm=clip_norm, frozen=frozen, hot=hot
    )


def close(found: list[Tensor | None], expected: list[Tensor | None], told: str) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) is (theirs is None), told
        if mine is not None and theirs is not None:
            difference = float((mine - theirs).abs().max())
            assert difference <= 1e-6, (told, difference)


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, ONE_UNIT])
def test_four_ranks_give_the_optimizer_the_gradients_of_the_undivided_model(way: str) -> None:
    plans = [(plan_of(case, way, 4), case.build, case.optimizer) for case in CASES.values()]
    expected = [undivided(case, 4) for case in CASES.values()]
    for of_rank in on_ranks(4, equality.on_rank, plans, limit=1800.0):
        for (name, case), found, whole in zip(CASES.items(), of_rank, expected, strict=True):
            assert len(found.gradients) == len(whole.gradients) > 0, name
            for mine, theirs in zip(
                *((each.gradients if case.later else each.gradients[:1]) for each in (found, whole)), strict=True
            ):
                close(mine, theirs, name)
            if case.later:
                close([*found.parameters], [*whole.parameters], name)
            assert found.losses == pytest.approx(whole.losses, rel=1e-3 if name == "8bit" else 1e-5), name
            assert (found.scale, found.skipped) == (whole.scale, whole.skipped), name


@pytest.mark.parametrize(
    "ways", [("data", "zero3"), pytest.param(("zero1", "zero2", ONE_UNIT), marks=pytest.mark.slow)]
)
def test_with_two_ranks_the_bits_are_those_of_the_undivided_model_in_two_micro_batches(ways: Sequence[str]) -> None:
    """Two numbers have one sum in either order."""
    case = CASES["plain"]
    plans = [(plan_of(case, way, 2), case.build, case.optimizer) for way in ways]
    whole = equality.undivided(case.build, case.optimizer, parts=2)
    for of_rank in on_ranks(2, equality.on_rank, plans):
        for way, found in zip(ways, of_rank, strict=True):
            pairs = zip(found.gradients, whole.gradients, strict=True)
            assert all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)), way  # type: ignore[arg-type]
            assert all(torch.equal(a, b) for a, b in zip(found.parameters, whole.parameters, strict=True)), way


def test_a_gradient_that_overflows_on_one_rank_is_left_out_on_all_and_halves_the_scale_of_all() -> None:
    case, ways = CASES["fp16"], ("data", "zero3")
    plans = [(plan_of(case, way, 2), case.build, case.optimizer) for way in ways]
    whole, cold = undivided(case, 2, hot=1e6), undivided(case, 2)
    assert (cold.skipped[1], whole.skipped[1]) == (False, True)
    for of_rank in on_ranks(2, equality.on_rank, plans, 1e6):
        for way, found in zip(ways, of_rank, strict=True):
            assert (found.skipped, found.scale) == (whole.skipped, whole.scale), way
            close([*found.parameters], [*whole.parameters], way)


def test_a_list_of_batches_is_a_step_of_all_of_them_on_several_ranks() -> None:
    """Of tokens, of which the halves and the ranks have more and fewer."""
    case = CASES["tokens-accumulation"]
    plans = [plan_of(case, way, 2) for way in ("data", "zero3")]
    for of_rank in on_ranks(2, equality.stepped_and_accumulated, plans, case.build):
        for stepped, accumulated in of_rank:
            assert len(stepped) > 0
            for mine, theirs in zip(accumulated, stepped, strict=True):
                assert mine is not None
                assert theirs is not None
                assert torch.equal(mine, theirs)


def choosing_plan(way: str) -> dict[str, Any]:
    model, sample, loss_fn = equality.choosing()
    fixed = {"sharding": setting_of(way, 2), "micro_batches": 1}
    own = steps.part_of(sample, 0, 2)
    return memfit.plan(model, own, loss_fn, 1 << 40, equality.decayed, fixed=fixed).to_json()


def test_a_parameter_that_one_rank_alone_has_used_gets_its_gradient_and_one_of_none_stays() -> None:
    """Each rank sends what it has a gradient of, so those of different parameters were added up, or messages of different sizes met."""
    ways = [(ONE_UNIT, "whole"), ("zero2", "blocks"), ("zero3", "blocks")]
    plans = [(choosing_plan(way), kind) for way, kind in ways]
    expected = [equality.chosen_by_one(kind) for _, kind in ways]
    for of_rank in on_ranks(2, equality.chosen, plans):
        for found, whole, way in zip(of_rank, expected, ways, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True)), way


def test_a_rank_that_calls_other_blocks_than_another_is_named_where_each_is_gathered_by_itself() -> None:
    first, last = on_ranks(2, equality.other_blocks, choosing_plan("zero3"), joined=False)
    assert (
        "in this forward rank 1 calls blocks.2 where rank 0 calls blocks.1: all ranks have to call the same blocks"
        in last
    )
    assert "closed" in first or "reset" in first
