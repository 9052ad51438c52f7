"""Complex tensors that are marked as conjugated and not computed yet: products copy them first, and what that takes is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
from small import WIDTH

pytestmark = pytest.mark.usefixtures("one_thread")


def einsum(x: Tensor) -> Tensor:
    z = x.to(torch.complex64)
    return torch.einsum("amb,anb->mnb", z, z).abs()


def product(x: Tensor) -> Tensor:
    z = x.flatten(0, 1).to(torch.complex64)
    return (z.mH @ z).abs()


def spectrum(x: Tensor) -> Tensor:
    z = torch.fft.rfft(x, dim=1)
    return torch.fft.irfft(z * z.conj(), dim=1)


@pytest.mark.parametrize("mixed", [einsum, product, spectrum])
def test_products_of_conjugated_tensors_are_predicted(mixed: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(512, 4, WIDTH)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return mixed(model(x)).square().mean()

    plain = memfit.plan(model, x, loss_of, 1 << 40, None, fixed={"micro_batches": 1})
    for made in (plain, memfit.replan(plain, memfit.smallest_budget(plain))):
        engine = memfit.apply(made, model, loss_of, None)
        assert engine.step(x, meter=True).peak_bytes == made.prediction.peak_bytes
        model.zero_grad()
