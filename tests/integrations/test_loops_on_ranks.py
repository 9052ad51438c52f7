"""Lightning's Trainer, Fabric and Accelerate on several ranks: the numbers of their own, and each rank's peak as predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from integrations import loops_on_ranks
from integrations.loops_on_ranks import Run, Told
from memfit.techniques.sharding import WAYS
from sharding.ranks import on_ranks

pytest.importorskip("lightning")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

LIMIT_SECONDS = 900.0
ORDER_OF_ADDITIONS = 1e-6
SEVERAL = 6  # metered steps, of which the least counts
OF_LIGHTNING = 4 * 24  # bytes: losses that it may keep beside the step; eight micro-batches are the most here
BATCH_BYTES = 4 * loops_on_ranks.ROWS * loops_on_ranks.WIDTH  # of the inputs


def told_of(runs: list[Run]) -> list[list[Told]]:
    told: list[list[Told]] = on_ranks(2, loops_on_ranks.by_lightning, runs, joined=False, limit=LIMIT_SECONDS)
    return told


def compared(found: Told, alone: Told, near: float) -> None:
    """Losses, rates and weights; and the peak with what was predicted."""
    assert found.losses == (pytest.approx(alone.losses, rel=near) if near else alone.losses)
    assert found.rates == alone.rates
    assert found.evaluated == pytest.approx(alone.evaluated, rel=near or 1e-7)
    for mine, expected in zip(found.weights, alone.weights, strict=True):
        torch.testing.assert_close(mine, expected, rtol=near, atol=near)
    # Lightning lets go of the batch's inputs before the step ends, on one device, too. The first step has no state yet.
    # gloo releases in a thread that the meter does not see, so a step may show a collective's buffer too much: of several the least counts.
    assert len(found.peaks) > SEVERAL
    assert found.predicted - BATCH_BYTES - OF_LIGHTNING <= min(found.peaks[1:]) <= found.predicted


def test_lightning_trains_two_ranks_shared_out_in_every_way_as_its_own_strategy_does() -> None:
    settings = {"max_epochs": 2}
    fits = [Run(settings, {"sharding": way, "micro_batches": 1}) for way in WAYS]
    divided = [Run(settings, {"sharding": way, "micro_batches": 2}) for way in ("data", "zero3")]
    for alone, *others in told_of([Run(settings), *fits, *divided]):
        for way, found in zip(WAYS, others, strict=False):
            compared(found, alone, 0.0 if way in {"data", "zero1"} else ORDER_OF_ADDITIONS)
        for found in others[len(fits) :]:
            compared(found, alone, ORDER_OF_ADDITIONS)


def test_lightning_adds_up_batches_of_ranks_and_clips_their_gradients_as_its_own_strategy_does() -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 4}
    fits = [Run(settings, {"sharding": way, "micro_batches": 2}) for way in WAYS]
    divided = Run(settings, {"sharding": "zero3", "micro_batches": 4})
    for alone, *others in told_of([Run(settings), *fits, divided]):
        for found in others:
            compared(found, alone, ORDER_OF_ADDITIONS)


@pytest.mark.parametrize(("first", "second"), [("zero3", "zero1"), ("zero1", "zero2")])
def test_lightnings_checkpoints_go_on_shared_out_in_another_way_or_without_memfit(
    tmp_path: Path, first: str, second: str
) -> None:
    there, end, other = (str(tmp_path / name) for name in ("half.ckpt", "end.ckpt", "other.ckpt"))
    twice = {"max_epochs": 2}
    whole = Run(twice, {"sharding": first, "micro_batches": 1}, "adamw", save=end)
    half = replace(whole, settings={}, save=there)
    on = Run(twice, {"sharding": second, "micro_batches": 1}, "adamw", begin=there, save=other)
    plain = Run(twice, None, "adamw", begin=there)
    for undisturbed, before, after, alone in told_of([whole, half, on, plain]):
        assert before.losses + after.losses == undisturbed.losses == before.losses + alone.losses
        assert before.rates + after.rates == undisturbed.rates
        for mine, plainly, expected in zip(after.weights, alone.weights, undisturbed.weights, strict=True):
            assert torch.equal(mine, expected)
            assert torch.equal(plainly, expected)


def test_lightnings_checkpoint_of_ranks_goes_on_on_one_device(tmp_path: Path) -> None:
    """Which has the batches of both together, so its sums are in another order."""
    there, end = (str(tmp_path / name) for name in ("half.ckpt", "end.ckpt"))
    once = {
        "use_distributed_sampler": False
    }  # as Lightning's shuffles rows, which one device would have in another order
    twice = {**once, "max_epochs": 2}
    whole = Run(twice, {"sharding": "zero3", "micro_batches": 1}, save=end)
    first, second = told_of([whole, replace(whole, settings=once, save=there)])
    on = Run(twice, {"micro_batches": 1}, begin=there, devices=1)
    (one,) = on_ranks(1, loops_on_ranks.by_lightning, [on], joined=False, limit=LIMIT_SECONDS)[0]
    of_both = [sum(losses) / 2 for losses in zip(first[0].losses, second[0].losses, strict=True)]
    assert one.losses == pytest.approx(of_both[len(one.losses) :], rel=ORDER_OF_ADDITIONS)
    assert one.rates == first[0].rates[len(one.rates) :]
    for mine, expected in zip(one.weights, first[0].weights, strict=True):
        torch.testing.assert_close(mine, expected, rtol=ORDER_OF_ADDITIONS, atol=ORDER_OF_ADDITIONS)


def test_a_loop_of_ones_own_goes_on_in_the_group_of_fabric_or_accelerate() -> None:
    """Accelerate deals batches out in turns, Fabric's sampler single rows; so Accelerate's two make the loader's next 32 rows."""
    expected = loops_on_ranks.alone()
    for by_fabric, by_accelerate, said in on_ranks(
        2, loops_on_ranks.in_loops_of_ones_own, "zero2", joined=False, limit=LIMIT_SECONDS
    ):
        assert by_accelerate == pytest.approx(expected, rel=1e-5)
        assert len(by_fabric) == 4
        assert "after fabric.launch() leave it out and call memfit.fit(..., devices=2) on every rank" in said
