"""Snapshots of several ranks: gone on from bit by bit, in other numbers of ranks and other ways, and on one device; committed by all ranks or by none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.techniques.sharding import ONE_UNIT, WAYS, setting_of
from sharding import saving, steps
from sharding.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(way: str | None, ranks: int, **more: Any) -> dict[str, Any]:
    """The plan of a way; None for one device."""
    model, sample, loss_fn = steps.chain()
    fixed = {"micro_batches": 1, **more, **({} if way is None else {"sharding": setting_of(way, ranks)})}
    own = steps.part_of(sample, 0, ranks)
    return memfit.plan(model, own, loss_fn, 1 << 40, steps.adamw, fixed=fixed).to_json()


def close(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def equal(found: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("more_ranks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_go_on_bit_by_bit_and_in_other_ways_other_numbers_and_alone(
    tmp_path: Path, *, more_ranks: bool
) -> None:
    folders = [str(tmp_path / way) for way in WAYS]
    alone = str(tmp_path / "alone")
    ((undisturbed, _),) = saving.saved(0, [planned(None, 1)], steps.chain, [alone])
    two = [planned(way, 2) for way in WAYS]
    trained, said = zip(*on_ranks(2, saving.saved, two, steps.chain, folders)[0], strict=True)
    whole = 3 * sum(parameter.nbytes for parameter in undisturbed)  # with two values of AdamW for each
    assert all(whole <= size < whole + 1000 for size in said)  # and the numbers of its steps
    assert sum(Path(folder, "step-000003", "state", ".metadata").is_file() for folder in folders) == len(WAYS)

    # The same ways, each other's, and what one process wrote.
    again = on_ranks(2, saving.gone_on, [*two, *two, *two], steps.chain, [*folders, *folders[::-1], *[alone] * 4])[0]
    for each, expected in zip(again[:4], trained, strict=True):
        assert equal(each, expected)
        close(each, undisturbed)
    for each in again[4:]:
        close(each, undisturbed)

    if more_ranks:
        three = on_ranks(3, saving.gone_on, [planned(way, 3) for way in WAYS], steps.chain, folders[::-1])
        for each in (each for of_rank in three for each in of_rank):
            close(each, undisturbed)
    for each in saving.gone_on(0, [planned(None, 1)] * 4, steps.chain, folders):
        close(each, undisturbed)


@pytest.mark.slow
def test_what_is_gathered_as_one_unit_goes_on_so_and_block_by_block(tmp_path: Path) -> None:
    folders, ways = [str(tmp_path / "unit"), str(tmp_path / "blocks")], (ONE_UNIT, "zero2")
    two = [planned(way, 2) for way in ways]
    (unit, _), (blocks, _) = on_ranks(2, saving.saved, two, steps.chain, folders)[0]
    assert equal(unit, blocks)
    again = on_ranks(2, saving.gone_on, [*two, *two], steps.chain, [*folders, *folders[::-1]])[0]
    assert all(equal(each, unit) for each in again)


@pytest.mark.slow
def test_state_in_blocks_goes_on_in_as_many_ranks_and_is_refused_in_others(tmp_path: Path) -> None:
    folders = [str(tmp_path / way) for way in ("data", "zero3")]
    two = [planned(way, 2, state_format="8bit") for way in ("data", "zero3")]
    trained = [parameters for parameters, _ in on_ranks(2, saving.saved, two, steps.chain, folders)[0]]

    again = on_ranks(2, saving.gone_on, two, steps.chain, folders)[0]
    assert all(equal(a, b) for a, b in zip(again, trained, strict=True))

    three = [planned(way, 3, state_format="8bit") for way in ("data", "zero3")]
    replicated, sharded = on_ranks(3, saving.gone_on, three, steps.chain, folders)[0]
    assert len(replicated) == len(trained[0])  # whole on every rank, so any number will do
    assert "was saved by 2 ranks in a form that is of their own parts of it alone" in sharded


def test_where_one_rank_cannot_write_none_does_and_the_one_before_stays(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    of_first, of_other = on_ranks(2, saving.failing, planned("zero3", 2), steps.chain, folder)
    assert [told for told, _ in of_first] == [told for told, _ in of_other]
    assert [left for _, left in of_first] == [["step-000003"]] * 3
    *no_space, (too_large, _) = of_first
    for told, _ in no_space:  # where it cannot write, and where what it has written does not reach the disk
        assert told.startswith("rank 1: no space for a snapshot in ")
    assert too_large == (
        f"rank 1: cannot write the snapshot {folder}/step-000003: File too large; step-000003 is as it was: go on from it with `memfit resume {folder}`"
    )
