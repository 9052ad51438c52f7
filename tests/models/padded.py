"""A model that makes a mask only where some token of its batch is padding: its forward takes one of two paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import small

LENGTH = 64


class Padded(nn.Module):
    """Attention over tokens, with a mask only where some token is padding: as in most language models."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forwards = 0  # whole ones
        self.embed = nn.Embedding(50, small.WIDTH)
        self.mixing = nn.ModuleList(nn.Linear(small.WIDTH, small.WIDTH) for _ in range(blocks))
        self.after = nn.ModuleList(nn.Sequential(nn.Linear(small.WIDTH, small.WIDTH), nn.GELU()) for _ in range(blocks))

    def forward(self, tokens: Tensor, filled: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = None if bool(filled.all()) else filled[:, None, :]
        for mix, after in zip(self.mixing, self.after, strict=True):
            scores = mix(x) @ x.transpose(1, 2)
            if mask is not None:
                scores = torch.where(mask, scores, -1e4)
            x = x + after(scores.softmax(-1) @ x)
        self.forwards += 1
        return x


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    tokens, filled = batch
    return (model(tokens, filled) ** 2).mean()


def tokens(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of so many tokens, and where there are some."""
    generator = torch.Generator().manual_seed(1)
    filled = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    return torch.randint(1, 50, (len(lengths), LENGTH), generator=generator) * filled, filled
