"""Hugging Face's Trainer on several ranks: the numbers of its own DistributedDataParallel, each rank's peak as predicted, saving and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from integrations import trainer_ranks
from sharding.ranks import on_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT_SECONDS = 900.0  # importing Trainer takes most of it where the machine is busy
ORDER_OF_ADDITIONS = 1e-5
FROM_THE_START = 8  # bytes: two losses, which are counted throughout and are there from the first backward on; a peak may be in forward


def fixed(way: str, parts: int = 1) -> dict[str, Any]:
    return {"fixed": {"sharding": way, "micro_batches": parts}}


def compared(folder: Path, kind: str, arguments: dict[str, Any], fits: list[dict[str, Any]], *, exactly: bool) -> None:
    """Each fit with Trainer alone, on two ranks: losses, norms and parameters; and the peak of each rank with what is predicted for it."""
    runs = [(kind, arguments, None), *((kind, arguments, each) for each in fits)]
    told = on_ranks(2, trainer_ranks.trained, str(folder), runs, joined=False, limit=LIMIT_SECONDS)
    for rank, (alone, *fitted) in enumerate(told):
        for losses, norms, parameters, predicted, measured, recorded, evaluated in fitted:
            near = ORDER_OF_ADDITIONS if not exactly else 0.0
            if rank == 0:  # which logs
                assert losses == (alone[0] if exactly else pytest.approx(alone[0], rel=near))
                assert norms == pytest.approx(
                    alone[1], rel=ORDER_OF_ADDITIONS
                )  # of shards, squares are added up shard by shard
                assert recorded == pytest.approx(alone[0], rel=ORDER_OF_ADDITIONS)
                assert evaluated == pytest.approx(alone[6], rel=ORDER_OF_ADDITIONS)
            for mine, expected in zip(parameters, alone[2], strict=True):
                torch.testing.assert_close(mine, expected, rtol=near, atol=near)
            # gloo releases in a thread that the meter does not see, so a step may show a collective's buffer too much.
            assert 0 <= predicted[rank] - min(measured) <= FROM_THE_START


def test_losses_are_those_of_trainers_own_ranks_and_every_peak_is_predicted(tmp_path: Path) -> None:
    compared(tmp_path, "classifier", {}, [fixed("zero3")], exactly=True)


@pytest.mark.slow
def test_every_way_trains_as_trainer_does(tmp_path: Path) -> None:
    compared(tmp_path, "classifier", {}, [fixed(way) for way in ("data", "zero1", "zero2")], exactly=True)


@pytest.mark.slow
def test_tokens_of_all_ranks_count_where_batches_are_accumulated_and_divided(tmp_path: Path) -> None:
    """The parts of one of the user's batches are on both ranks."""
    arguments = {"gradient_accumulation_steps": 2}
    ways = [fixed(way, parts) for way, parts in (("data", 2), ("data", 4), ("zero1", 4), ("zero3", 4))]
    compared(tmp_path, "language model", arguments, ways, exactly=False)


@pytest.mark.slow
def test_evaluation_is_trainers_own_on_several_ranks(tmp_path: Path) -> None:
    arguments = {"eval_strategy": "steps", "eval_steps": 2}
    compared(tmp_path, "classifier", arguments, [fixed(way) for way in ("zero1", "zero2", "zero3")], exactly=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments"), [("adapters", {}), ("language model", {"bf16": True})], ids=["adapters", "bf16"]
)
def test_adapters_and_bf16_are_trainers_own_on_several_ranks(
    tmp_path: Path, kind: str, arguments: dict[str, Any]
) -> None:
    pytest.importorskip("peft")
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, **arguments}
    compared(tmp_path, kind, evaluated, [fixed(way) for way in ("zero1", "zero2", "zero3")], exactly=False)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("zero3", "zero1"), ("zero1", "zero2")])
def test_a_run_goes_on_shared_out_in_another_way_or_without_memfit(tmp_path: Path, first: str, second: str) -> None:
    (whole, other, alone), _ = on_ranks(
        2, trainer_ranks.saved_and_resumed, str(tmp_path), first, second, joined=False, limit=LIMIT_SECONDS
    )
    assert (
        other[0] == whole[0][2:] or other[0] == whole[0]
    )  # Trainer's log of a resumed run begins with the earlier one's
    assert other[0][-2:] == alone[0][-2:] == whole[0][-2:]
    for mine, second_, third in zip(whole[2], other[2], alone[2], strict=True):
        assert torch.equal(mine, second_)
        assert torch.equal(mine, third)


@pytest.mark.slow
def test_what_ranks_cannot_do_is_refused(tmp_path: Path) -> None:
    for best, other in on_ranks(2, trainer_ranks.refused, str(tmp_path), joined=False, limit=LIMIT_SECONDS):
        assert (
            "load_best_model_at_end=True loads whole weights into the model, of which a rank has a part under zero3"
            in best
        )
        assert "fixed sharding='zero4': there is 'data', 'zero1', 'zero2', 'zero3'" in other


def test_a_way_of_sharing_out_needs_ranks(tmp_path: Path) -> None:
    with pytest.raises(memfit.InputError, match="fixed sharding='zero3': this process is alone"):
        memfit.transformers.fit(trainer_ranks.trainer("classifier", str(tmp_path)), 1 << 40, **fixed("zero3"))


@pytest.mark.parametrize("drops", [False, True])
def test_micro_batches_make_up_the_rounds_of_the_users_batches(*, drops: bool) -> None:
    """As Accelerate fills up, or drops, the last round of an epoch."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    from memfit.integrations.transformers.several_ranks import WholeRounds

    ranks, size = 2, 4

    def dealt(batches: Any) -> list[list[list[int]]]:
        """Per round, the rows of all ranks."""
        return [
            list(each) for each in zip(*(BatchSamplerShard(batches, ranks, rank) for rank in range(ranks)), strict=True)
        ]

    for rows in range(size * ranks, 41):
        own = dealt(BatchSampler(range(rows), size, drops))
        for divisor in (2, 4):
            small = BatchSampler(range(rows), size // divisor, drops)
            rounds = dealt(WholeRounds(small, ranks * divisor))
            assert len(rounds) == len(own) * divisor == len(WholeRounds(small, ranks * divisor)) // ranks
            for number, expected in enumerate(own):
                parts = rounds[number * divisor : (number + 1) * divisor]
                assert sorted(row for part in parts for each in part for row in each) == sorted(
                    row for each in expected for row in each
                )
