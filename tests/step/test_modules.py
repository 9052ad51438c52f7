"""Modules found quickly are those that torch finds, in torch's order."""

from __future__ import annotations

import torch
from torch import nn

from memfit.step.modules import every_module, has_gradients, let_go_of_gradients, modules_of
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
