"""The step of many blocks is told from captures of a few: to the byte where blocks add up alike, and said to be inexact where they do not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit import clusters
from memfit.clusters import ClusterPrediction, predict_cluster, predict_ways, shortened
from memfit.errors import InputError
from memfit.hardware.machine import known_machine
from memfit.hardware.topology import Topology
from models.transformer import build_gpt

LAYERS = 8
RECOMPUTED = tuple(clusters.RECOMPUTED)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def predicted(
    way: str, recompute: tuple[str, ...] = ("none", "blocks"), layers: int = LAYERS, micro_batches: int = 1
) -> tuple[ClusterPrediction, ...]:
    model, sample, loss_fn = build_gpt(layers=layers, hidden=32, heads=4, batch=2, tokens=16, vocab=60)
    return predict_cluster(
        model, sample, loss_fn, devices="2x2xh100", optimizer=adamw, way=way, recompute=recompute, micro_batches=micro_batches
    )  # fmt: skip


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on all blocks are captured."""
    monkeypatch.setattr(clusters, "_counts", lambda total, period: (total,))


def same(told: ClusterPrediction, captured: ClusterPrediction) -> None:
    assert (told.peak_bytes, told.state_bytes, told.exact) == (captured.peak_bytes, captured.state_bytes, True)
    assert (told.blocks, told.recompute) == (captured.blocks, captured.recompute)
    assert told.step_seconds == pytest.approx(captured.step_seconds)
    assert told.overlapped_seconds == pytest.approx(captured.overlapped_seconds)
    assert told.sending_seconds < told.overlapped_seconds < told.step_seconds


@pytest.mark.parametrize(
    ("recompute", "layers", "micro_batches"),
    [
        (("none", "blocks"), LAYERS, 1),
        pytest.param(("selective",), LAYERS, 1, marks=pytest.mark.slow),
        pytest.param(("alternate",), 14, 1, marks=pytest.mark.slow),
        pytest.param(("alternate",), 13, 1, marks=pytest.mark.slow),
        pytest.param(RECOMPUTED, 14, 2, marks=pytest.mark.slow),
    ],
)
def test_the_bytes_of_all_blocks_are_those_of_a_capture_of_them(
    monkeypatch: pytest.MonkeyPatch, recompute: tuple[str, ...], layers: int, micro_batches: int
) -> None:
    from_a_few = predicted("zero3", recompute, layers, micro_batches)
    whole(monkeypatch)
    for told, captured in zip(from_a_few, predicted("zero3", recompute, layers, micro_batches), strict=True):
        same(told, captured)


def test_what_is_rebuilt_makes_a_step_smaller_and_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    whole(monkeypatch)
    none, selective, alternate, blocks = predicted("zero3", RECOMPUTED, 6)
    assert none.peak_bytes > alternate.peak_bytes > blocks.peak_bytes
    assert none.peak_bytes > selective.peak_bytes > blocks.peak_bytes
    assert none.step_seconds < selective.step_seconds < blocks.step_seconds
    # Three of six blocks run again, and all six.
    assert 2 * (alternate.step_seconds - none.step_seconds) == pytest.approx(blocks.step_seconds - none.step_seconds)


@pytest.mark.slow
def test_gradients_are_synchronised_once_in_several_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to gather, more micro-batches send no more bytes."""
    whole(monkeypatch)
    (once,), (twice,) = predicted("data", ("none",), 4), predicted("data", ("none",), 4, micro_batches=2)
    assert twice.sending_seconds == pytest.approx(once.sending_seconds)
    assert (once.samples, twice.samples, twice.micro_batches) == (8, 8, 2)
    (gathered,), (again,) = predicted("zero3", ("none",), 4), predicted("zero3", ("none",), 4, micro_batches=2)
    assert gathered.sending_seconds < again.sending_seconds < 2 * gathered.sending_seconds


@pytest.mark.slow
def test_bytes_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memfit.plan for the same devices, where everything fits."""
    model, sample, loss_fn = build_gpt(layers=LAYERS, hidden=32, heads=4, batch=2, tokens=16, vocab=60)
    plan = memfit.plan(
        model, sample, loss_fn, "80GB", adamw, devices="2x2xh100", fixed={"sharding": "zero3", "micro_batches": 2}
    )
    (told,) = predicted("zero3", ("none",), micro_batches=2)
    assert (told.peak_bytes, told.exact) == (plan.prediction.peak_bytes, True)
    assert told.step_seconds == pytest.approx(plan.prediction.step_seconds)


@pytest.mark.slow
def test_what_zero_1_deals_out_is_that_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has the embedding and nothing of few blocks, but some of many."""
    (told,) = predicted("zero1", ("none",))
    whole(monkeypatch)
    (captured,) = predicted("zero1", ("none",))
    assert (told.exact, captured.exact) == (False, True)
    assert told.peak_bytes == pytest.approx(captured.peak_bytes, rel=0.01)
    assert told.optimizer_bytes == pytest.approx(captured.optimizer_bytes, rel=0.01)
    assert 4 * told.optimizer_bytes >= 2 * told.gradient_bytes  # four ranks have all of it


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
    with pytest.raises(InputError, match="devices names one device, and a step is shared out among two or more"):
        predict_cluster(unequal, torch.zeros(2, 4), devices="1xh100")
    mixed = Topology((known_machine("h100"), known_machine("a100")))
    with pytest.raises(InputError, match=r"these devices are not alike \('h100', 'a100'\)"):
        predict_cluster(unequal, torch.zeros(2, 4), devices=mixed)
    with pytest.raises(InputError, match="way='zero4': there is"):
        predicted(way="zero4")
    with pytest.raises(InputError, match="recompute='every': there is"):
        predicted("zero3", ("every",))
    with pytest.raises(InputError, match="micro_batches=3: the sample of one device has 2"):
        predicted("zero3", micro_batches=3)


class Scaled(nn.Module):
    """With a parameter that is a single number, which fully_shard cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x) * self.scale
        return y


def test_ways_that_a_model_does_not_allow_are_told_beside_the_others() -> None:
    def predict(way: str) -> tuple[ClusterPrediction, ...]:
        return predict_cluster(
            Scaled(), torch.zeros(2, 8), lambda m, b: m(b).sum(), devices="4xh100", way=way, recompute=("none",)
        )

    found, refused = predict_ways(("zero3", "data"), predict)
    assert [each.way for each in found] == ["data"]
    (why,) = refused
    assert why.startswith("zero3: ")
    with pytest.raises(InputError, match="a single number"):
        predict_ways(("zero3",), predict)
