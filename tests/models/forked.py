"""Programs whose forward looks at a value of its batch early on and then takes one of a few paths: random ones, by their seed."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN = 32


class Residual(nn.Module):
    """A block that repeats: worth making again as a whole."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))
        return y


class Forked(nn.Module):
    """Something at the beginning, a look at the batch, a path by what is there, a head.

    Args:
        draw: decides what the program is.
        paths: how many.
    """

    def __init__(self, draw: Random, paths: int) -> None:
        super().__init__()
        torch.manual_seed(draw.randrange(1 << 20))
        dropout = draw.choice([0.0, 0.1])
        self.before = nn.ModuleList(
            draw.choice([nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.Dropout(0.1), nn.Tanh()])
            for _ in range(draw.randint(1, 4))
        )
        self.blocks = nn.ModuleList(Residual(dropout) for _ in range(draw.randint(3, 5)))
        self.head = nn.Linear(HIDDEN, HIDDEN)
        self.begins = [draw.choice(["sin", "times", "softmax", "gelu", "cat"]) for _ in range(paths)]
        self.runs = [
            sorted(draw.sample(range(len(self.blocks)), draw.randint(2, len(self.blocks)))) for _ in range(paths)
        ]
        self.wide = [draw.random() < 0.5 for _ in range(paths)]  # runs something between modules
        self.comes_back = [draw.random() < 0.5 for _ in range(paths)]  # to what was made before the path was known
        self.in_place = [draw.random() < 0.3 for _ in range(paths)]

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        """(rows, tokens, width) and (rows,) of numbers of paths: samples are treated apart, each on its own path."""
        if len(x) > 1:
            return torch.cat([self(*row) for row in zip(x.split(1), kind.split(1), strict=True)])
        for layer in self.before:
            x = layer(x)
        first = torch.sigmoid(x)
        path = int(kind)
        x = _BEGINS[self.begins[path]](x * 1.0 if self.begins[path] == "gelu" else x)
        if self.in_place[path]:
            x = x.exp().clamp(max=2.0).mul_(0.5)
        for number in self.runs[path]:
            x = self.blocks[number](x)
            if self.wide[path] and number % 2 == 0:
                x = torch.cat([x, x.cos()], -1).sin()[..., :HIDDEN] + x
        if self.comes_back[path]:
            x = torch.tanh(x * first) + first
        y: Tensor = self.head(x)
        return y


_BEGINS = {
    "sin": torch.sin,
    "times": lambda x: x * x,  # autograd saves its input before it runs
    "softmax": lambda x: x.softmax(-1),
    "gelu": functional.gelu,
    "cat": lambda x: torch.cat([x, x], -1).exp()[..., :HIDDEN].clamp(max=3.0),
}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Of `Forked`."""
    x, kind = batch
    return (model(x, kind) ** 2).mean()


def batch_of(kinds: list[int], tokens: int = 24) -> tuple[Tensor, Tensor]:
    """A row for each number of a path."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(kinds), tokens, HIDDEN, generator=generator), torch.tensor(kinds)
