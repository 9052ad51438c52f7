"""Modules found quickly are those that torch finds, in torch's order."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import memfit
from memfit.step.modules import (
    every_module,
    forget_modules,
    has_gradients,
    let_go_of_gradients,
    modules_of,
    remembering_modules,
)
from models import build_gpt


def shared() -> nn.Module:
    """A module in two places, a parameter in two modules, and a place that is empty."""
    block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = nn.Sequential(block, nn.ModuleList([block[1], nn.Linear(3, 3)]), nn.Identity())
    model[1][1].weight = block[0].weight
    model.register_module("absent", None)
    return model


def test_the_same_modules_in_the_same_order() -> None:
    for model in (shared(), build_gpt(layers=2, hidden=16, heads=2, batch=1, tokens=4, vocab=10)[0], nn.Linear(2, 2)):
        assert list(modules_of(model).items()) == list(model.named_modules())
        assert every_module(model) == list(model.modules())


def test_modules_are_remembered_until_the_model_runs_and_no_longer() -> None:
    model, other = shared(), nn.Linear(2, 2)
    with remembering_modules():
        first = modules_of(model)
        model.add_module("late", nn.Linear(3, 3))
        assert modules_of(model) is first
        assert every_module(model) == list(first.values())
        assert every_module(other) == [other]
        forget_modules()
        assert list(modules_of(model).items()) == list(model.named_modules())
        assert every_module(model) == list(model.modules())
    with pytest.raises(ValueError, match="stopped"), remembering_modules():
        modules_of(model)
        raise ValueError("stopped")
    del model.late
    assert every_module(model) == list(model.modules())


class Growing(nn.Module):
    """Gets a module in every third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            self.add_module(f"extra{self.calls}", nn.Tanh())
        for module in self.children():
            x = module(x)
        return x


def test_a_step_sees_the_modules_that_forwards_before_it_have_added() -> None:
    model, x = Growing(), torch.ones(2, 4)
    engine = memfit.apply(
        memfit.plan(model, x, lambda m, x: m(x).square().mean(), "1GiB"), model, lambda m, x: m(x).square().mean()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its path changes
        for _ in range(7):
            engine.step(x)
            assert every_module(model) == list(model.modules())
            assert all(parameter.grad is None for parameter in model.parameters())
    assert len(every_module(model)) > 3


def test_gradients_are_found_and_let_go_of_wherever_they_are() -> None:
    for place in range(len(list(shared().parameters()))):
        model = shared()
        assert not has_gradients(model)
        parameter = list(model.parameters())[place]
        parameter.grad = torch.zeros_like(parameter)
        assert has_gradients(model)
        let_go_of_gradients(model)
        assert not has_gradients(model)
        assert parameter.grad is None
