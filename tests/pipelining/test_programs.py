"""Random chains of unlike parts as pipelines: gradients of the same micro-batches on one device, and the predicted peak of each rank, at several budgets."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch

import memfit
from memfit import batches
from models.staged import Halved, square_loss, staged, token_loss
from pipelining import running
from sharding import steps
from sweeps import each_seed

pytestmark = pytest.mark.usefixtures("one_thread")

MICRO_BATCHES = 4
IN_16_BITS = 2**-7  # of the largest gradient: what several stages send of one tensor in bf16 is added up in bf16


def on_one_device(seed: int) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and loss of the batch in micro-batches, in plain PyTorch."""
    model, sample, loss_fn = staged(seed)
    parts = batches.split(sample, [batches.size(sample) // MICRO_BATCHES] * MICRO_BATCHES)
    counts = [int((part["labels"] != -100).sum()) for part in parts]
    total = 0.0
    for part, count in zip(parts, counts, strict=True):
        weight = {token_loss: count / sum(counts), square_loss: 1 / MICRO_BATCHES}.get(loss_fn, 1.0)
        loss = loss_fn(model, part) * weight
        loss.backward()
        total += loss.item()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, total


# Interleaved stages with a parameter that gets no gradient.
@each_seed((5,), 60)
def test_random_chains_in_stages_train_as_on_one_device_and_hold_what_is_predicted(seed: int) -> None:
    model, sample, loss_fn = staged(seed)
    setting = Random(seed).choice(["gpipe/2", "1f1b/2", "interleaved/2"])
    own = steps.part_of(sample, 0, 2)
    fixed = {"sharding": setting, "micro_batches": MICRO_BATCHES}
    roomy = memfit.plan(model, own, loss_fn, 1 << 40, running.OPTIMIZERS["slow sgd"], devices=2, fixed=fixed)
    exact = not any("fake tensors alone" in note for note in roomy.notes)
    least = memfit.smallest_budget(roomy)
    between = (least + roomy.prediction.peak_bytes) // 2
    plans = [roomy, memfit.replan(roomy, between), memfit.replan(roomy, least)]
    gradients, loss = on_one_device(seed)
    coarse = IN_16_BITS if any(isinstance(part, Halved) for part in model.parts) else 0.0
    ran = running.together(2, running.run, [plan.to_json() for plan in plans], partial(staged, seed), "slow sgd")
    for number, plan in enumerate(plans):
        seen: set[str] = set()
        for of_rank in (each[number] for each in ran):
            assert of_rank.losses[0] == pytest.approx(loss, rel=1e-5)
            for name, gradient in of_rank.gradients.items():
                expected = gradients[name]
                most = max(1e-6, coarse * float(expected.abs().max()))
                torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=most, msg=f"plan {number}, {name}")
            seen |= of_rank.gradients.keys()
        assert seen == gradients.keys()
        assert not exact or running.as_predicted([of_rank[number].peak_bytes for of_rank in ran], plan)
