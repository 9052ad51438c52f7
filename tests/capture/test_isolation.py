"""A model whose tensors are exchanged for a capture is wired as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.capture import capture, capture_real
from memfit.capture.isolation import lent
from memfit.capture.source import StepSource
from memfit.techniques.choices import BASELINE
from memfit.values.trace import Category


class Head(nn.Module):
    """Puts its output into a list that belongs to another module as well, as networks with deep supervision do."""

    def __init__(self, outputs: list[Tensor], place: int) -> None:
        super().__init__()
        self.outputs, self.place = outputs, place
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) to the same shape."""
        x = torch.tanh(self.body(x))
        self.outputs[self.place] = x
        return x


class Supervised(nn.Module):
    """Sums what its blocks have put into the list that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = [torch.rand(1), torch.rand(1)]
        self.blocks = nn.Sequential(Head(self.outputs, 0), Head(self.outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) to (batch, 16)."""
        self.blocks(x)
        return torch.cat(self.outputs, dim=1)


def test_a_list_that_modules_share_stays_one_list() -> None:
    model = Supervised()
    shared, before = model.outputs, model.outputs[0]
    with lent(model, torch.clone):
        lists = {id(module.outputs) for module in (model, *model.blocks)}
        assert len(lists) == 1
        assert model.outputs[0] is not before
    assert all(module.outputs is shared for module in (model, *model.blocks))
    assert model.outputs[0] is before


@pytest.mark.usefixtures("one_thread")
def test_a_model_that_collects_outputs_in_a_shared_list_is_planned() -> None:
    plan = memfit.plan(Supervised(), torch.randn(4, 8), lambda m, x: m(x).square().mean(), "1GiB")
    assert plan.prediction.peak_bytes > 0


class Leaving(nn.Module):
    """Leaves a tensor for whoever asks, as a variational encoder its mean: it is there until the next forward makes another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) to the same shape."""
        self.left = torch.tanh(self.layer(x))
        return self.left


def test_what_the_step_before_left_is_there_in_every_capture() -> None:
    source = StepSource(Leaving(), torch.randn(4, 8), lambda m, x: m(x).square().mean())
    first = capture(source, BASELINE)
    for captured in (first, capture(source, BASELINE, after=first)):
        assert captured.graded is None
        assert captured.trace.bytes_of(Category.BUFFER) == 4 * 8 * 4


def test_a_capture_on_real_tensors_leaves_what_the_loss_holds() -> None:
    """It runs operations below the mode that undoes writes: a moving average in the loss went on with each capture."""
    model, average = nn.Linear(8, 8), nn.Linear(8, 8)
    before = {name: value.clone() for name, value in average.state_dict().items()}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made = model(x)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        return (made - average(x)).square().mean()

    capture_real(StepSource(model, torch.rand(4, 8), loss), BASELINE)
    assert all(torch.equal(value, before[name]) for name, value in average.state_dict().items())
