"""Snapshots of pipelines: gone on from bit by bit, and in other ways, other numbers of ranks and on one device; and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from pipelining.running import together
from sharding import saving, steps

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(way: str, ranks: int) -> dict[str, Any]:
    """The plan of a way; on one device where it is none."""
    model, sample, loss_fn = steps.chain()
    own = steps.part_of(sample, 0, ranks)
    several: dict[str, Any] = {"devices": ranks} if ranks > 1 else {}
    number = 4 if "1f1b" in way else 1
    fixed = {"micro_batches": number, **({"sharding": way} if way else {})}
    return memfit.plan(model, own, loss_fn, 1 << 40, steps.adamw, fixed=fixed, **several).to_json()


def close(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def equal(found: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_stages_go_on_bit_by_bit_as_shards_alone_and_again_in_stages(tmp_path: Path) -> None:
    stages, shards, alone = planned("1f1b/2", 2), planned("zero3", 2), planned("", 1)
    folders = {name: str(tmp_path / name) for name in ("stages", "shards", "alone")}
    ((undisturbed, _),) = saving.saved(0, [alone], steps.chain, [folders["alone"]])
    trained = together(2, saving.saved, [stages, shards], steps.chain, [folders["stages"], folders["shards"]])[0]

    again = together(
        2,
        saving.gone_on,
        [stages, shards, stages, stages],
        steps.chain,
        [folders[name] for name in ("stages", "stages", "shards", "alone")],
    )[0]
    assert equal(again[0], trained[0][0])
    for each in again:
        close(each, undisturbed)
    (of_one,) = saving.gone_on(0, [alone], steps.chain, [folders["stages"]])
    close(of_one, undisturbed)


@pytest.mark.slow
def test_four_ranks_go_on_from_two_and_two_from_four(tmp_path: Path) -> None:
    two, four = str(tmp_path / "two"), str(tmp_path / "four")
    ((undisturbed, _),) = saving.saved(0, [planned("", 1)], steps.chain, [str(tmp_path / "alone")])
    together(2, saving.saved, [planned("1f1b/2", 2)], steps.chain, [two])
    sharing = planned("1f1b/2x2+zero1", 4)
    together(4, saving.saved, [sharing], steps.chain, [four])
    others = [sharing, planned("1f1b/2x2", 4), planned("zero2", 4), sharing]
    of_four = together(4, saving.gone_on, others, steps.chain, [two, four, four, four])[0]
    of_two = together(2, saving.gone_on, [planned("1f1b/2", 2), planned("data", 2)], steps.chain, [four, four])[0]
    for each in (*of_four, *of_two):
        close(each, undisturbed)
