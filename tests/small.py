"""Models, batches and plans so small that a test of one property can make its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit import api
from memfit.planning import planning_of

WIDTH = 32


def chain(blocks: int = 4, *, batch_norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """Linear, (batch norm,) tanh, linear, gelu, (dropout,), and so on; in train mode, from seed 0."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers.append(nn.Linear(WIDTH, WIDTH))
        if batch_norm:
            layers.append(nn.BatchNorm1d(WIDTH))
        layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def rows(count: int = 256) -> tuple[Tensor, Tensor]:
    """Inputs and targets for `chain`, always the same."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, WIDTH, generator=generator), torch.randn(count, WIDTH, generator=generator)


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    """Mean squared error of `model(x)`."""
    x, y = batch
    return functional.mse_loss(model(x), y)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of most tests."""
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def plan_at(fraction: float, model: nn.Module, sample: Any, loss_fn: Any = squared_error, **named: Any) -> memfit.Plan:
    """A plan for one whole batch, this fraction of the way from the smallest to the plain one."""
    optimizer = named.pop("optimizer", adamw)
    plain = memfit.plan(model, sample, loss_fn, 1 << 50, optimizer, fixed={"micro_batches": 1}, **named)
    assert plain.script.plain
    search = planning_of(plain)
    smallest, largest = search.smallest()[0], search.plain_peak()
    return api.replan(plain, round(smallest + fraction * (largest - smallest)))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """Copies of all that a step may change: parameters, buffers, optimizer state, the generator."""
    found = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    if optimizer is not None:
        found += [
            v.clone() for state in optimizer.state.values() for _, v in sorted(state.items()) if isinstance(v, Tensor)
        ]
    return [*found, torch.get_rng_state()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit-equal, tensor by tensor."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
