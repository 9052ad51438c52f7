"""The CTC loss, and gradients of masked positions: speech models are captured on fake tensors, so on the meta device and for a GPU that is not here, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import memfit
from memfit.capture.known_results import run_fake
from small import adamw, plan_at

LOSS, LOSS_AS_INTEGERS = torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss.default
BACKWARD = torch.ops.aten._ctc_loss_backward.Tensor


def alike(fake: torch.Tensor, real: torch.Tensor) -> bool:
    return (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_a_fake_one_is_laid_out_as_the_real_one() -> None:
    log_probs = torch.randn(2, 20, 6).log_softmax(-1).transpose(0, 1)
    targets, moments, lengths = torch.randint(1, 6, (7,)), torch.tensor([20, 15]), torch.tensor([3, 4])
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(log_probs)
    real = LOSS(log_probs, targets, moments, lengths)
    gradient = torch.ones(2)
    with mode:
        found = run_fake(LOSS, (fake, targets, moments, lengths), {})
        again = run_fake(LOSS_AS_INTEGERS, (fake, targets, [20, 15], [3, 4]), {})
        back = run_fake(BACKWARD, (mode.from_tensor(gradient), fake, targets, moments, lengths, *found, 0), {})
    assert all(map(alike, found, real))
    assert all(map(alike, again, real))
    assert alike(back, BACKWARD(gradient, log_probs, targets, moments, lengths, *real, 0))


class Speech(nn.Module):
    """Frames, some of them masked by a vector that is learnt, and classes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layers, self.out = (
            nn.Linear(4, 16),
            nn.Sequential(nn.Linear(16, 16), nn.GELU()),
            nn.Linear(16, 6),
        )
        self.masked = nn.Parameter(torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, 3:7] = True
        x[mask] = self.masked
        logits: torch.Tensor = self.out(self.layers(x))
        return logits


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    log_probs = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    labelled = batch["labels"] > 0
    frames = torch.full((log_probs.shape[1],), log_probs.shape[0])
    return functional.ctc_loss(log_probs, batch["labels"][labelled], frames, labelled.sum(-1))


@pytest.mark.parametrize("fraction", [0.5, 0.0])
def test_a_speech_model_is_captured_on_fake_tensors_and_holds_what_is_predicted(fraction: float) -> None:
    torch.manual_seed(0)
    model, labels = Speech(), torch.randint(1, 6, (8, 5))
    labels[0, 3:] = 0
    batch = {"x": torch.randn(8, 40, 4), "labels": labels}
    plan = plan_at(fraction, model, batch, loss_fn)
    engine = memfit.apply(plan, model, loss_fn, adamw)
    engine.step(batch)
    assert not any("captured for real" in note for note in plan.notes)
    assert engine.step(batch, meter=True).peak_bytes == plan.prediction.peak_bytes
