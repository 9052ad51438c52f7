"""Lightning's Trainer, Fabric and Accelerate on several ranks: the numbers of their own, and each rank's peak as predicted."""

from __future__ import annotations

import pytest
import torch

from integrations import loops_on_ranks
from sharding.ranks import on_ranks

pytest.importorskip("lightning")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

LIMIT_SECONDS = 900.0
ORDER_OF_ADDITIONS = 1e-6
OF_LIGHTNING = 16  # bytes: losses that it keeps beside the step
BATCH_BYTES = 4 * loops_on_ranks.ROWS * loops_on_ranks.WIDTH  # of the inputs


def test_lightning_trains_two_ranks_as_its_own_strategy_does() -> None:
    fits = [None, {"fixed": {"micro_batches": 1}}, {"fixed": {"micro_batches": 2}}]
    for alone, whole, divided in on_ranks(2, loops_on_ranks.by_lightning, fits, joined=False, limit=LIMIT_SECONDS):
        assert whole[0] == alone[0]
        assert all(map(torch.equal, whole[1], alone[1]))
        assert divided[0] == pytest.approx(alone[0], rel=ORDER_OF_ADDITIONS)
        for _, _, predicted, peaks in (whole, divided):
            # Lightning lets go of the batch's inputs before the step ends, on one device, too.
            assert predicted - BATCH_BYTES <= min(peaks) <= predicted + OF_LIGHTNING


def test_a_loop_of_ones_own_goes_on_in_the_group_of_fabric_or_accelerate() -> None:
    """Accelerate deals batches out in turns, Fabric's sampler single rows; so Accelerate's two make the loader's next 32 rows."""
    expected = loops_on_ranks.alone()
    for by_fabric, by_accelerate, said in on_ranks(
        2, loops_on_ranks.in_loops_of_ones_own, "zero2", joined=False, limit=LIMIT_SECONDS
    ):
        assert by_accelerate == pytest.approx(expected, rel=1e-5)
        assert len(by_fabric) == 4
        assert "after fabric.launch() leave it out and call memfit.fit(..., devices=2) on every rank" in said
