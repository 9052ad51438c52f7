"""Products of the rows of each group with its matrix, as mixtures of experts run them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
from memfit.capture import arguments
from memfit.capture.calls import describe
from memfit.capture.known_results import run_fake
from memfit.capture.roofline import flops_of
from small import adamw, plan_at, squared_error

PRODUCT = torch.ops.aten._grouped_mm.default
ENDS = torch.tensor([2, 5, 10], dtype=torch.int32)
SHAPES = {
    "experts": (torch.randn(10, 8), torch.randn(3, 7, 8).mT, ENDS),
    "gradients of weights": (torch.randn(10, 8).T, torch.randn(10, 16), ENDS),
    "a matrix for each": (torch.randn(3, 5, 8), torch.randn(3, 6, 8).mT, None),
    "columns": (torch.randn(3, 5, 8), torch.randn(10, 8).T, ENDS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shapes", SHAPES)
def test_a_fake_one_is_laid_out_as_the_real_one(shapes: str, dtype: torch.dtype) -> None:
    left, right, ends = SHAPES[shapes]
    left, right = left.to(dtype), right.to(dtype)
    real = PRODUCT(left, right, ends)
    mode = FakeTensorMode()
    fakes = [None if t is None else mode.from_tensor(t) for t in (left, right, ends)]
    with mode:
        fake = run_fake(PRODUCT, tuple(fakes), {})
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


@pytest.mark.parametrize("shapes", ["experts", "gradients of weights", "columns"])
def test_what_is_timed_has_all_rows_in_groups(shapes: str) -> None:
    left, right, ends = SHAPES[shapes]
    _, call = describe(PRODUCT, (left, right, ends), {})
    (*_, made), _ = arguments.build(call, torch.device("cpu"), arguments.Filled(torch.device("cpu")))
    assert made.tolist() == [3, 6, 10]


@pytest.mark.parametrize("shapes", SHAPES)
def test_its_arithmetic_is_that_of_the_products_of_all_groups(shapes: str) -> None:
    left, right, ends = SHAPES[shapes]
    edges = [0, *(ENDS.tolist())]
    flops = 0
    for number in range(3):
        some = slice(None) if ends is None else slice(edges[number], edges[number + 1])
        one = left[number] if left.dim() == 3 else left[some] if right.dim() == 3 else left[:, some]
        other = right[number] if right.dim() == 3 else right[:, some] if left.dim() == 3 else right[some]
        flops += 2 * one.shape[0] * one.shape[1] * other.shape[1]

    _, call = describe(PRODUCT, (left, right, ends), {})

    assert flops_of(call) == flops


class Experts(nn.Module):
    """Each row goes to the expert that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.weights = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.indices.argsort()
        ends = (chosen.indices.unsqueeze(1) == torch.arange(3)).sum(0).cumsum(0).int()
        given = nn.functional.grouped_mm(x[order], self.weights, offs=ends)
        return given[order.argsort()] * chosen.values.unsqueeze(-1)


@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_a_mixture_of_experts_is_captured_on_fake_tensors_and_holds_what_is_predicted(fraction: float) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(Experts(), nn.Tanh(), Experts()), (torch.randn(96, 8), torch.randn(96, 8))
    plan = plan_at(fraction, model, batch)

    engine = memfit.apply(plan, model, squared_error, adamw)
    engine.step(batch)

    assert not any("captured for real" in note for note in plan.notes)
    assert engine.step(batch, meter=True).peak_bytes == plan.prediction.peak_bytes
