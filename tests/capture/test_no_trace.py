"""Planning leaves no trace: whatever a forward writes while it is looked at, the model is as before afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
import small

pytestmark = pytest.mark.usefixtures("one_thread")


class Momentum(nn.Module):
    """An encoder and its moving average (He et al., 2020), which forward itself moves."""

    def __init__(self, move: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        self.query, self.key = small.chain(2), small.chain(2)
        for parameter in self.key.parameters():
            parameter.requires_grad = False
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self.move(key, query)
        return self.query(x) - self.key(x).detach()


def in_place(key: nn.Parameter, query: nn.Parameter) -> None:
    key.mul_(0.9).add_(query, alpha=0.1)


def through_data(key: nn.Parameter, query: nn.Parameter) -> None:
    key.data.mul_(0.9).add_(query.data, alpha=0.1)


def by_new_data(key: nn.Parameter, query: nn.Parameter) -> None:
    key.data = 0.9 * key.data + 0.1 * query.data


class Remembering(nn.Module):
    """Counts, caches and lazily made tensors as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small.chain(2)
        self.calls = 0
        self.seen: list[int] = []
        self.cache: dict[int, Tensor] = {}
        self.lazy: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.shape[0])
        scale = self.cache.setdefault(x.shape[0], torch.ones(x.shape[-1]))
        if self.lazy is None:
            self.lazy = torch.full((x.shape[-1],), 0.5)
        random.random()
        return self.body(x * scale + self.lazy)


def state(model: nn.Module) -> Any:
    """Parameters with their storages, versions, gradients and bits, and all plain attributes."""
    parameters = [
        (p.untyped_storage()._cdata, p._version, p.grad, p.requires_grad, p.detach().clone())
        for p in model.parameters()
    ]
    attributes = {
        name: {k: repr(v) for k, v in vars(module).items() if not k.startswith("_")}
        for name, module in model.named_modules()
    }
    return parameters, attributes, random.getstate(), torch.get_rng_state()


def same(one: Any, other: Any) -> bool:
    for a, b in zip(one[0], other[0], strict=True):
        if a[:4] != b[:4] or not torch.equal(a[4], b[4]):
            return False
    return one[1] == other[1] and one[2] == other[2] and bool(torch.equal(one[3], other[3]))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Momentum(in_place),
        lambda: Momentum(through_data),
        lambda: Momentum(by_new_data),
        Remembering,
    ],
    ids=["in place", "through data", "new data", "attributes"],
)
def test_planning_leaves_the_model_as_it_was(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, sample = build(), small.rows(16)
    before = state(model)
    memfit.plan(model, sample, small.squared_error, 1 << 50, small.adamw)
    assert same(before, state(model))
    memfit.plan(model, sample, small.squared_error, 1 << 50, small.adamw, fixed={"micro_batches": 2})
    assert same(before, state(model))


class Listed(nn.Module):
    """Blocks in a plain list of lists, and their parameters in a list that is registered (as N-BEATS has them)."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = [[small.chain(1), small.chain(1)], [small.chain(1)]]
        self.registered = nn.ParameterList(p for stack in self.stacks for block in stack for p in block.parameters())

    def forward(self, x: Tensor) -> Tensor:
        for stack in self.stacks:
            for block in stack:
                x = x + block(x)
        return x


def test_modules_in_plain_lists_are_captured_like_others() -> None:
    model = Listed()
    plan = memfit.plan(model, small.rows(), small.squared_error, 1 << 40, small.adamw, fixed={"micro_batches": 1})
    assert all(p.grad is None for p in model.parameters())
    engine = memfit.apply(plan, model, small.squared_error, small.adamw)
    engine.step(small.rows())
    peak = engine.step(small.rows(), meter=True).peak_bytes
    assert peak == pytest.approx(plan.prediction.peak_bytes, abs=512)
