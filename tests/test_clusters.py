"""The step of many blocks is told from captures of a few: to the byte where blocks add up alike, and said to be inexact where they do not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from memfit import clusters
from memfit.clusters import ClusterPrediction, predict_cluster, shortened
from memfit.errors import InputError
from models.transformer import build_gpt

LAYERS = 8


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def predicted(way: str) -> tuple[ClusterPrediction, ...]:
    model, sample, loss_fn = build_gpt(layers=LAYERS, hidden=32, heads=4, batch=2, tokens=16, vocab=60)
    return predict_cluster(model, sample, loss_fn, devices="2x2xh100", optimizer=adamw, way=way)


def test_the_bytes_of_all_blocks_are_those_of_a_capture_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from_a_few = predicted(way="zero3")
    monkeypatch.setattr(clusters, "MOST", LAYERS)  # not one more than are captured
    monkeypatch.setattr(clusters, "FEWEST", LAYERS)
    for told, whole in zip(from_a_few, predicted(way="zero3"), strict=True):
        assert (told.peak_bytes, told.state_bytes, told.exact) == (whole.peak_bytes, whole.state_bytes, True)
        assert (told.blocks, told.recompute) == (LAYERS, whole.recompute)
        assert told.step_seconds == pytest.approx(whole.step_seconds)
        assert told.overlapped_seconds == pytest.approx(whole.overlapped_seconds)
        assert told.sending_seconds < told.overlapped_seconds < told.step_seconds


def test_a_model_is_left_as_it_was() -> None:
    model = build_gpt(layers=5, hidden=16, heads=2, batch=1, tokens=4, vocab=11)[0]
    before = [name for name, _ in model.named_modules()]
    with shortened(model, 2):
        assert len(model.blocks) == 2  # type: ignore[arg-type]
    assert [name for name, _ in model.named_modules()] == before


def test_what_cannot_be_told_from_a_few_blocks_is_refused() -> None:
    unequal = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 2))
    with pytest.raises(InputError, match="the model has no list of repeated blocks that are alike"):
        predict_cluster(unequal, torch.zeros(2, 4), lambda m, b: m(b).sum(), devices="4xh100")
    with pytest.raises(InputError, match="a step is shared out among two or more devices that are alike"):
        predict_cluster(unequal, torch.zeros(2, 4), devices="1xh100")
    with pytest.raises(InputError, match="way='zero4': there is"):
        predicted(way="zero4")
