"""Modules found quickly are those that torch finds, in torch's order."""

from __future__ import annotations

from torch import nn

from memfit.step.modules import every_module, modules_of, parameters_of
from models import build_gpt


def shared() -> nn.Module:
    """A module in two places, a parameter in two modules, and a place that is empty."""
    block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = nn.Sequential(block, nn.ModuleList([block[1], nn.Linear(3, 3)]), nn.Identity())
    model[1][1].weight = block[0].weight
    model.register_module("absent", None)
    return model


def test_the_same_modules_and_parameters_in_the_same_order() -> None:
    for model in (shared(), build_gpt(layers=2, hidden=16, heads=2, batch=1, tokens=4, vocab=10)[0], nn.Linear(2, 2)):
        assert list(modules_of(model).items()) == list(model.named_modules())
        assert every_module(model) == list(model.modules())
        found, torchs = parameters_of(model), list(model.parameters())
        assert len(found) == len(torchs)
        assert all(a is b for a, b in zip(found, torchs, strict=True))
