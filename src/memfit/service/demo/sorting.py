"""A small transformer that learns to sort digits. Only processes of runs import this."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

DIGITS = 10
LENGTH = 24


class Sorter(nn.Module):
    """Reads digits, and says at each place which one stands there once they are sorted."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.digits = nn.Embedding(DIGITS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Loss of a batch: x and y are (samples, LENGTH) of int64."""
        found = self.head(self.blocks(self.digits(x) + self.places))
        return nn.functional.cross_entropy(found.flatten(0, 1), y.flatten())


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Random digits, and the same sorted."""

    def __init__(self, samples: int) -> None:
        self.x = torch.randint(DIGITS, (samples, LENGTH), generator=torch.Generator().manual_seed(0))
        self.y = self.x.sort(dim=1).values

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def build(width: int = 64, layers: int = 2) -> nn.Module:
    """The model."""
    torch.set_num_threads(1)  # on several threads, kernels as small as these wait for each other
    return Sorter(width, layers)


def numbers(samples: int = 4096) -> Numbers:
    """The data."""
    return Numbers(samples)
