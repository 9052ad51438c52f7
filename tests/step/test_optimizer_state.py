"""An optimizer's state, put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit
import small
from memfit.step.optimizer_state import set_optimizer


@pytest.mark.parametrize("make", [memfit.AdamW8bit, small.adamw, torch.optim.RMSprop])
def test_state_goes_back_by_its_names_in_whatever_order_it_was_saved(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Linear(64, 64)
    )  # weights that AdamW8bit keeps in 8 bits, and biases that it does not
    optimizer = make(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()
    backwards = {number: dict(reversed(state.items())) for number, state in saved["state"].items()}

    fresh = make(model.parameters())
    set_optimizer(fresh, {**saved, "state": backwards})

    again = fresh.state_dict()["state"]
    for number, state in saved["state"].items():
        assert again[number].keys() == state.keys()
        for name, value in state.items():
            assert again[number][name].dtype == value.dtype
            assert torch.equal(again[number][name], value)
