"""Random models of repeated blocks, trained plainly and with their layers streamed: the same parameters and optimizer state, and the predicted peak."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memfit
from engine.test_programs import (
    OPTIMIZERS,
    UNSEEN_BYTES,
    Loop,
    Optimizer,
    Technique,
    few,
    many,
    optimizers,
    state_of,
    told,
)
from memfit import batches
from memfit.capture.confirmation import NOT_AS_STREAMED
from models.outcome import same
from models.stacks import Drawn, Stack, stack_loss, stacks

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3


def check(drawn: Drawn, optimizer: Optimizer) -> bool:
    """Assert that streamed steps are plain PyTorch's, to the last bit, and hold what is predicted; whether this stack is streamed at all."""
    model, sample = Stack(drawn), drawn.sample()
    fixed: dict[str, Any] = {"streamed": "blocks", "micro_batches": drawn.parts}
    try:
        made = memfit.plan(model, sample, stack_loss, 1 << 50, optimizer, freeze=drawn.frozen, fixed=fixed)
    except memfit.MemfitError as error:  # anything else is a crash
        told(f"refused: {type(error).__name__}: {str(error)[:90]}")
        return False
    made = memfit.replan(made, memfit.smallest_budget(made))
    assert made.choices.streamed == "blocks"
    known = NOT_AS_STREAMED not in made.notes
    plainly = copy.deepcopy(model)
    for path in drawn.frozen:
        plainly.get_submodule(path).requires_grad_(False)
    plain = Loop(plainly, stack_loss, optimizer, Technique())
    engine = memfit.apply(made, model)
    assert engine.optimizer is not None
    for number in range(STEPS):
        batch = sample.roll(number, 0).clone()
        parts, shares = [batch], [1.0]
        if drawn.parts > 1:
            sizes = batches.micro_batch_sizes(len(batch), -(-len(batch) // made.choices.micro_batch_size))
            parts = batches.split(batch, sizes)
            shares = batches.shares(parts, made.choices.weights) or []
        torch.manual_seed(number)
        loss = plain.step(parts, shares)
        torch.manual_seed(number)
        record = engine.step(batch, meter=True)
        assert record.loss == loss, (number, record.loss, loss)
        with engine.gathered():
            mine, others = state_of(model, engine.optimizer), state_of(plainly, plain.optimizer)
            assert all(same(a, b) for a, b in zip(mine, others, strict=True)), number
        assert record.peak_bytes is not None
        assert not known or record.peak_bytes <= made.budget_bytes, (number, record.peak_bytes, made.budget_bytes)
    measured, predicted = record.peak_bytes, made.prediction.peak_bytes
    close = max(0.005 * measured, UNSEEN_BYTES)
    assert not known or measured - close <= predicted <= measured + close, (predicted, measured)
    told("streamed" if known else "streamed, the plan says that its bytes are not known exactly")
    return True


@few
@given(stacks(), optimizers)
def test_any_stack_of_blocks_streams_as_plain(drawn: Drawn, optimizer: Optimizer) -> None:
    check(drawn, optimizer)


@pytest.mark.slow
@many
@given(stacks(), optimizers)
def test_five_hundred_stacks_of_blocks_stream_as_plain(drawn: Drawn, optimizer: Optimizer) -> None:
    check(drawn, optimizer)


@pytest.mark.alternate(1)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("parts", [1, 2])
def test_a_stack_as_models_have_it_is_streamed(name: str, parts: int) -> None:
    block = ("layer_norm", "wide", *(["dropout"] if parts == 1 else []))
    assert check(Drawn((block,) * 4, frozen=("first", "blocks.0"), parts=parts), OPTIMIZERS[name])


@pytest.mark.parametrize(
    "drawn",
    [
        Drawn((("linear",),) * 3, frozen=("blocks.1",)),
        Drawn((("linear",),) * 3, parts=2),
        Drawn((("linear",),) * 5, parts=3),
    ],
    ids=["a frozen block between trained ones", "two parts", "three parts"],
)
def test_what_is_held_beside_tensors_of_kernels_is_predicted_closely(drawn: Drawn) -> None:
    """In so small a model states of generators, 5 KB each, set the peak: each counts from when it is taken until it is let go."""
    assert check(drawn, OPTIMIZERS["adamw"])


def test_a_write_into_a_view_is_streamed_as_predicted() -> None:
    """Autograd makes the view anew, by other operations on fake tensors than on real ones."""
    assert check(Drawn((("linear", "relu_"),) * 3), OPTIMIZERS["adamw"])


class ByTensor(nn.Module):
    """Runs one operation more on real tensors than on fake ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x if isinstance(x, FakeTensor) else x.neg().neg()


def test_where_fake_tensors_show_other_operations_a_streamed_plan_says_so() -> None:
    def streamed(block: Callable[[], nn.Module]) -> memfit.Plan:
        model = nn.Sequential(*(block() for _ in range(3)))
        fixed = {"streamed": ".", "micro_batches": 1}
        return memfit.plan(model, torch.randn(8, 16), stack_loss, 1 << 50, OPTIMIZERS["adamw"], fixed=fixed)

    assert NOT_AS_STREAMED in streamed(ByTensor).notes
    assert NOT_AS_STREAMED not in streamed(partial(nn.Linear, 16, 16)).notes
