"""A Python number beside a tensor (`x + 0.5`) takes bytes of its own while it runs: one tensor of it in the plain step, two where the engine follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit.planning import planning_of

pytestmark = pytest.mark.usefixtures("one_thread")

WITH_A_NUMBER: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda h: h + 0.5,
    "sub": lambda h: h - 2,
    "mul": lambda h: h * 0.5,
    "div": lambda h: h / 3,
    "floor_divide": lambda h: h // 2,
    "from the left": lambda h: 1 - h,  # another kernel, which takes the number as it is
    "a power": lambda h: h**2,
    "no number": lambda h: h + h,
}


class PeakAtTheNumber(nn.Module):
    """Where its forward takes the number, it holds most."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.wide, self.last = nn.Linear(32, 32), nn.Linear(32, 512), nn.Linear(32, 32)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.first(x))
        with torch.no_grad():
            wide = self.operation(self.wide(x))
            few = wide[:, :32].clone()
            del wide
        return self.last(x * few)


@pytest.mark.alternate(1)
@pytest.mark.parametrize("name", WITH_A_NUMBER)
def test_a_number_is_predicted_to_the_byte_with_and_without_recomputation(name: str) -> None:
    model, batch = PeakAtTheNumber(WITH_A_NUMBER[name]), torch.randn(256, 32)
    fixed = {"micro_batches": 1}
    plain = memfit.plan(model, batch, lambda m, b: m(b).square().mean(), 1 << 30, small.adamw, fixed=fixed)
    known = planning_of(plain)
    assert known is not None
    for made in (plain, memfit.replan(plain, known.smallest()[0])):
        assert made.prediction.peak_phase == "forward"
        engine = memfit.apply(made, model)
        engine.step(batch)
        assert engine.step(batch, meter=True).peak_bytes == made.prediction.peak_bytes
    assert not made.script.plain
