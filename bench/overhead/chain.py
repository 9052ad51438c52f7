"""The model on which the engine's host time is measured, and its forward and backward, plainly and under a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

import memfit
from memfit.engine.compiled import CompiledScript
from memfit.engine.follower import Follower
from memfit.planning import planning_of
from memfit.values.script import KEPT

LAYERS = 100


class Chain(nn.Module):
    """Matrix product, addition, activation, over and over, on tensors so small that only overhead counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(torch.tanh(layer(x)) * 0.5) + x
        return x


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


def chain_and_batch() -> tuple[Chain, torch.Tensor]:
    """The chain and its batch, on the default device."""
    torch.manual_seed(0)
    return Chain(), torch.rand(16, 8)


def engines_between(
    model: nn.Module, batch: torch.Tensor, shares: tuple[float, ...]
) -> tuple[int, tuple[memfit.Engine, ...]]:
    """Number of forward operations, and an engine for each budget this share of the way from the smallest to plain."""
    plain = memfit.plan(model, batch, loss_of, 1 << 40, None, fixed={"micro_batches": 1})
    search = planning_of(plain)
    low, high = search.smallest()[0], plain.prediction.plain_peak_bytes
    plans = (memfit.replan(plain, round(low + (high - low) * share)) for share in shares)
    return search.solver(1).trace.forward_operations, tuple(memfit.apply(made, model) for made in plans)


def plainly(model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    """Forward and backward; gradients are let go."""

    def run() -> None:
        loss_of(model, batch).backward()
        model.zero_grad(set_to_none=True)

    return run


def planned(engine: memfit.Engine, batch: torch.Tensor) -> Callable[[], None]:
    """The same, as a plan says."""

    def run() -> None:
        with engine.forward():
            loss = loss_of(engine.model, batch)
        loss.backward()
        engine.model.zero_grad(set_to_none=True)

    return run


def all_followed(engine: memfit.Engine, batch: torch.Tensor) -> Callable[[], None]:
    """Each operation and each saved tensor compared with the engine's plan, nothing dropped, and no stretch left out."""
    script = engine.plan.script
    kept = replace(script, steps=(), saves=(KEPT,) * len(script.saves), makes={}, recorded={}, kept_stretches=())
    compiled = CompiledScript(kept)

    def run() -> None:
        follower = Follower(compiled)
        with follower.following():
            loss = loss_of(engine.model, batch)
        loss.backward()
        follower.end()
        if follower.divergence is not None:
            raise AssertionError(follower.divergence)
        engine.model.zero_grad(set_to_none=True)

    return run
