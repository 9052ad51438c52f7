"""Predicted is measured, for optimizer state in 8 bits or in a file and updates inside backward: alone, together, and at the smallest budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import small
from memfit import api
from memfit.choices import Choices, in_words
from memfit.step.lion import Lion
from models import build_gpt, case
from step import ways

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS = [
    Choices(state_format=form, state_place=place, update=update)
    for form in ("32bit", "8bit")
    for place in ("device", "disk")
    for update in ("after", "in_backward")
]


def wide() -> Any:
    """Few tokens in a wide model: the peak is in the update or right before it, its workspace included."""
    return build_gpt(layers=2, hidden=256, heads=4, batch=1, tokens=16, vocab=2000)


def check(way: Choices, build: Callable[[], Any], optimizer: Any = small.adamw) -> int:
    model, sample, loss_fn = build()
    plain = ways.planned(way, model, sample, loss_fn, optimizer, fixed={"micro_batches": 1})
    least = api.replan(plain, plain.runtime.search.smallest()[0])
    for plan in (plain, least):
        measured = ways.peak_of(plan, build()[0], sample, loss_fn)
        assert measured == pytest.approx(plan.prediction.peak_bytes, rel=0.005), plan.prediction.peak_operation
        assert measured <= plan.budget_bytes
    return plain.prediction.peak_bytes


@pytest.mark.parametrize("way", WAYS, ids=lambda way: in_words(way) or "plain")
@pytest.mark.parametrize("name", ["gpt", "bert_eager"])
def test_the_predicted_peak_is_the_measured_one(name: str, way: Choices) -> None:
    check(way, case(name).build)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: in_words(way) or "plain")
@pytest.mark.parametrize(
    "optimizer", [small.adamw, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), Lion], ids=["adamw", "sgd", "lion"]
)
def test_also_where_the_update_is_the_peak(optimizer: Any, way: Choices) -> None:
    check(way, wide, optimizer)


def test_each_technique_saves_what_it_claims() -> None:
    """Of 2,113,024 parameters with AdamW: state of 8 bytes or 2 each, gradients of 4."""
    peaks = {in_words(way): check(way, wide) for way in WAYS}
    count = sum(p.numel() for p in wide()[0].parameters())
    workspace = 6 << 20
    assert peaks[""] - peaks["8-bit optimizer state"] >= 5.9 * count - workspace
    assert peaks[""] - peaks["optimizer state on the disk"] >= 7.9 * count - workspace
    assert peaks[""] - peaks["update inside backward"] >= 3 * count
    together = peaks["optimizer state on the disk, update inside backward"]
    assert peaks[""] - together >= 11 * count - workspace
