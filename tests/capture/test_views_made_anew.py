"""Writes into parts of a tensor, after which autograd makes views anew: captured on fake tensors, as real ones run and hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memfit
import small
from memfit.capture.comparing import forward_names
from memfit.capture.confirmation import trustworthy
from memfit.capture.source import StepSource

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, ROWS = 16, 512  # Numbers of Python would be tensors of eight bytes that nobody sees.


def parts_of_a_new_tensor(h: Tensor, x: Tensor) -> Tensor:
    made = torch.empty_like(h).unflatten(1, (4, 4))
    h = h.unflatten(1, (4, 4))
    made[..., 0::2] = h[..., 0::2] * 2 - h[..., 1::2]
    made[..., 1::2] = h[..., 1::2] + h[..., 0::2]
    return made.flatten(1) * x


def rows_in_a_loop(h: Tensor, x: Tensor) -> Tensor:
    made = h.new_empty(3, *h.shape)
    for row in range(3):
        made[row, :, row:] = h[:, row:]
        made[row, :, :row] = x[:, :row]
    return made.sum(0) * x


def the_same_part_again_and_again(h: Tensor, x: Tensor) -> Tensor:
    made = h * 2
    for _ in range(3):
        made[:, :8] += x[:, 8:]
        made[0] = x[0]
    return made


def views_of_what_is_written_later(h: Tensor, x: Tensor) -> Tensor:
    made = h * 2
    turned, folded = made[:, 2:6].t(), made.view(-1, 4, 4)
    made[:, :4] = x[:, :4]
    turned.mul_(x[:, 2:6].t())
    return made + turned.mean() + folded.sum(1).repeat(1, 4)


def a_view_that_is_written_and_read(h: Tensor, x: Tensor) -> Tensor:
    made = h.clone()
    view = made.view(-1, 2, 8)
    view.add_(1.0).mul_(x.view(-1, 2, 8))
    functional.relu_(view)
    return view.flatten(1) * 2


def diagonals_and_columns(h: Tensor, x: Tensor) -> Tensor:
    made = h.clone()
    made.diagonal().fill_(0.0)
    made.t()[1].copy_(x[:, 1])
    made.narrow(0, 0, 3).clamp_(min=0)
    return made


def in_a_checkpoint(h: Tensor, x: Tensor) -> Tensor:
    return checkpoint(rows_in_a_loop, h, x, use_reentrant=False)  # type: ignore[no-any-return]


class Blocks(nn.Module):
    def __init__(self, written: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.written(block(x), x)
        return x


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.alternate(1)
@pytest.mark.parametrize(
    "written",
    [
        parts_of_a_new_tensor,
        rows_in_a_loop,
        the_same_part_again_and_again,
        views_of_what_is_written_later,
        a_view_that_is_written_and_read,
        diagonals_and_columns,
        in_a_checkpoint,
    ],
)
def test_writes_into_views_are_captured_on_fake_tensors_and_predicted_to_the_byte(written: Any) -> None:
    assert trustworthy(StepSource(Blocks(written), rows(), squares)).trace.source == "fake"
    roomy = memfit.plan(Blocks(written), rows(), squares, 1 << 40, small.adamw, fixed={"micro_batches": 1})
    for plan in (roomy, memfit.replan(roomy, memfit.smallest_budget(roomy))):
        engine = memfit.apply(plan, Blocks(written), squares)
        records = [engine.step(rows(), meter=True) for _ in range(2)]
        assert records[-1].peak_bytes == plan.prediction.peak_bytes
        assert not records[-1].divergences


class Halved(torch.autograd.Function):
    """No mode is told what it is given."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x / 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / 2


def handed_to_a_custom_function(h: Tensor, x: Tensor) -> Tensor:
    made = h.clone()
    part = made[:, :8]
    made[:, 8:] = x[:, 8:]
    return made + Halved.apply(part).repeat(1, 2)  # type: ignore[no-untyped-call]


def test_a_view_made_anew_for_a_custom_function_is_captured_on_real_tensors() -> None:
    captured = trustworthy(StepSource(Blocks(handed_to_a_custom_function), rows(), squares))
    assert captured.trace.source == "real"
    assert forward_names(captured.trace).count("aten.slice.Tensor") == 3 * len(
        Blocks(handed_to_a_custom_function).blocks
    )
