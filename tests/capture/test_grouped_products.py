"""Products of the rows of each group with its matrix, as mixtures of experts run them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.capture import arguments
from memfit.capture.calls import describe
from memfit.capture.known_results import run_fake

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
