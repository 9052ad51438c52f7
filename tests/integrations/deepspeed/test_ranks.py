"""What a DeepSpeed configuration describes is trained on two ranks with the losses of DeepSpeed's own run on two ranks, each rank within its prediction."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from integrations.deepspeed import several, trained
from memfit.integrations.deepspeed import VERSION, read
from sharding.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = {"type": "SGD", "params": {"lr": 0.1}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
LIMIT_SECONDS = 900.0
BACKENDS_OWN = 1e-7  # of a loss: DeepSpeed sends the gradients of each micro-batch, memfit those of the step


def of_stage(stage: int, optimizer: dict[str, Any], parts: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": trained.ROWS,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": 0,
        "zero_allow_untested_optimizer": True,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage, **more.pop("zero", {})},
        **more,
    }


# Stage 2 of the articles: gradients in one buffer, sent in buckets while backward runs.
BUCKETS = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5000,
    "allgather_bucket_size": 5000,
}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3, "warmup_type": "linear"}}
RUNS = {
    **{f"stage {stage}, SGD": of_stage(stage, SGD) for stage in range(4)},
    "stage 3, AdamW, two micro-batches": of_stage(3, ADAMW, 2),
    "the article's own": of_stage(2, ADAMW, 4, zero=BUCKETS, gradient_checkpointing=True, scheduler=WARMUP),
}


@pytest.mark.slow
def test_losses_on_two_ranks_are_those_of_deepspeed(tmp_path: Path) -> None:
    if metadata.version("deepspeed") != VERSION:
        pytest.skip(f"{VERSION} is what is followed")
    configs = list(RUNS.values())
    theirs = on_ranks(2, several.by_deepspeed, 2, configs, joined=False, limit=LIMIT_SECONDS)
    moved = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    offloaded = [of_stage(stage, ADAMW, zero=moved) for stage in (1, 2, 3)]
    ours = on_ranks(2, several.by_memfit, 2, [*configs, *offloaded], joined=False, limit=LIMIT_SECONDS)
    for number, config in enumerate(configs):
        both = zip(*(of_rank[number]["losses"] for of_rank in theirs), strict=True)
        expected = [sum(of_two) / 2 for of_two in both]
        losses, rates, _, _, how = ours[0][number]
        once = config["gradient_accumulation_steps"] == 1
        assert losses == (expected if once else pytest.approx(expected, rel=BACKENDS_OWN))
        assert rates == theirs[0][number]["rates"]
        way = ("data", "zero1", "zero2", "zero3")[config["zero_optimization"]["stage"]]
        assert how in {f"{way}/2 device", f"{way}+whole/2 device"}
    for stage, (*_, how) in enumerate(ours[0][len(configs) :], start=1):
        assert how in {f"zero{stage}/2 disk", f"zero{stage}+whole/2 disk"}
    for rank, of_rank in enumerate(ours):
        for _, _, peaks, predicted, _ in of_rank:
            assert min(peaks) == predicted[rank]  # gloo's own thread may hold a collective's buffer a moment longer


def test_the_articles_keys_are_read_for_two_ranks_and_what_has_no_effect_is_told() -> None:
    found = read(RUNS["the article's own"], world_size=2)

    assert found.arguments()["fixed"] == {"micro_batches": 4, "precision": "full", "sharding": "zero2"}
    told = [notice for notice in found.notices if notice.startswith("zero_optimization.")]
    assert [notice.split()[0].rpartition(".")[2] for notice in told] == list(BUCKETS)
    assert all(" has no effect: " in notice for notice in told)
