"""Optimizers of other people: they put new tensors in place of their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.errors import EngineError
from small import chain, rows, squared_error

pytestmark = pytest.mark.usefixtures("one_thread")

Parameters = Iterable[nn.Parameter]


class Renewing(torch.optim.Optimizer):
    """A moving average that is a new tensor after each update, as in Shampoo's factors.

    Args:
        parameters: to update.
        kept: puts the average into a state.
        read: finds it there.
    """

    def __init__(
        self,
        parameters: Parameters,
        kept: Callable[[Tensor], Any] = lambda x: x,
        read: Callable[[Any], Any] = lambda x: x,
    ) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.kept, self.read = kept, read
        self.fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                average = self.read(state["average"]) if state else torch.zeros_like(parameter)
                state["average"] = self.kept(average * 0.9 + parameter.grad * 0.1)
                del average
                if self.fails:
                    raise MemoryError("no room for the next one")
                parameter.sub_(group["lr"] * self.read(state["average"]))


WAYS_TO_KEEP: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tensor": (lambda x: x, lambda x: x),
    "a view": (lambda x: x[None], lambda x: x[0]),
    "a list": (lambda x: [x, 3], lambda x: x[0]),
    "a dictionary": (lambda x: {"of it": (x,)}, lambda x: x["of it"][0]),
}


@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("way", WAYS_TO_KEEP)
def test_state_that_is_replaced_is_let_go_of_in_the_update(way: str, micro_batches: int) -> None:
    """It stayed until the update's end, so the step held all of the old state beside the new one."""

    def optimizer(parameters: Parameters) -> torch.optim.Optimizer:
        return Renewing(parameters, *WAYS_TO_KEEP[way])

    batch = rows(8)  # so few that the update holds most
    model = chain()
    made = memfit.plan(model, batch, squared_error, 1 << 40, optimizer, fixed={"micro_batches": micro_batches})
    engine = memfit.apply(made, model, squared_error, optimizer)
    peaks = [engine.step(batch, meter=True).peak_bytes for _ in range(3)]
    assert max(peak or 0 for peak in peaks) == made.prediction.peak_bytes


def test_an_update_that_has_replaced_state_alone_has_begun() -> None:
    batch, model = rows(8), chain()
    made = memfit.plan(model, batch, squared_error, 1 << 40, Renewing)
    engine = memfit.apply(made, model, squared_error, Renewing)
    engine.step(batch)
    assert isinstance(engine.optimizer, Renewing)
    engine.optimizer.fails = True
    with pytest.raises(EngineError, match="failed half way"):
        engine.step(batch)
