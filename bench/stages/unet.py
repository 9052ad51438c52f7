"""The U-Net of torchgpipe's benchmarks, built from its description: depth 5, 5 convolutions in each cell, 64 channels.

An encoder cell halves height and width and hands what it made to the decoder cell of the same size, past all between. Source: Kim et al. 2020,
arXiv:2004.09910, and the repository's benchmarks/models/unet.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Unit(nn.Sequential):
    """A 3 x 3 convolution with dropout, instance norm and a leaky ReLU."""

    def __init__(self, given: int, made: int) -> None:
        convolution = nn.Conv2d(given, made, 3, padding=1, bias=False)
        super().__init__(convolution, nn.Dropout2d(0.1), nn.InstanceNorm2d(made), nn.LeakyReLU(0.01))


def cell(given: int, between: int, made: int, convolutions: int) -> list[Unit]:
    """Convolutions one after the other."""
    widths = [given, *[between] * (convolutions - 1), made]
    return [Unit(a, b) for a, b in pairwise(widths)]


class UNet(nn.Module):
    """Encoder cells, a bottleneck, decoder cells, and a 1 x 1 convolution to the segmentation."""

    def __init__(self, depth: int = 5, convolutions: int = 5, channels: int = 64) -> None:
        super().__init__()
        self.convolutions = convolutions
        self.depth = depth
        units: list[Unit] = []
        for level in range(depth):
            wide = channels * 2**level
            units += cell(3 if level == 0 else wide // 2, wide, wide, convolutions)
        deepest = channels * 2 ** (depth - 1)
        units += cell(deepest, 2 * deepest, deepest, convolutions)
        for level in reversed(range(depth)):
            narrow = channels * 2**level // 2
            units += cell(4 * narrow, narrow, narrow, convolutions)
        self.units = nn.ModuleList(units)
        self.segment = nn.Conv2d(channels // 2, 1, 1, bias=False)

    def _cell(self, number: int, x: Tensor) -> Tensor:
        for unit in self.units[number * self.convolutions : (number + 1) * self.convolutions]:
            x = unit(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, 1, height, width); height and width are multiples of 2 ** depth."""
        skips = []
        for number in range(self.depth):
            x = self._cell(number, x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self._cell(self.depth, x)
        for number in range(self.depth):
            x = functional.interpolate(x, scale_factor=2)
            x = self._cell(self.depth + 1 + number, torch.cat((x, skips.pop()), 1))
        made: Tensor = self.segment(x)
        return made


def unet(samples: int, convolutions: int = 5, channels: int = 64) -> tuple[Any, Any, Any]:
    """The U-Net on the meta device, with a batch of 192 x 192 and its loss."""
    with torch.device("meta"):
        model = UNet(convolutions=convolutions, channels=channels)
        sample = {"image": torch.empty(samples, 3, 192, 192), "target": torch.empty(samples, 1, 192, 192)}
    return model, sample, lambda m, b: functional.binary_cross_entropy_with_logits(m(b["image"]), b["target"])
