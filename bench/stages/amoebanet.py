"""AmoebaNet-D of torchgpipe's and GPipe's benchmarks, built from its description.

A cell takes what the two cells before it made, brings both to its number of channels, and adds up pairs of operations on earlier sums, of which some are
concatenated. Sources: Real et al. 2019 (arXiv:1802.01548), figure 7; what it leaves open is as in the benchmarks of torchgpipe (Kim et al. 2020,
arXiv:2004.09910; benchmarks/models/amoebanet, 0.0.5): which sums a normal cell concatenates, average pooling in place of maximum pooling over 3 x 3, the stem.
Numbers of parameters are compared with those that are published (`run.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# (number of an earlier sum, operation on it), two of which add up to the next one; 0 is the cell before, 1 the one before that.
NORMAL = (
    ((1, "1x1"), (1, "average")),
    ((1, "same"), (0, "1x7 7x1")),
    ((0, "1x1"), (0, "1x7 7x1")),
    ((2, "average"), (2, "same")),
    ((1, "average"), (5, "1x1")),
)
REDUCTION = (
    ((0, "maximum"), (0, "average")),
    ((2, "same"), (1, "3x3")),
    ((2, "1x7 7x1"), (2, "average")),
    ((3, "same"), (1, "maximum")),
    ((2, "average"), (3, "1x1")),
)
JOINED = {"normal": (0, 3, 4, 6), "reduction": (4, 5, 6)}


def convolution(given: int, made: int, kernel: Any = 1, stride: Any = 1, padding: Any = 0) -> nn.Sequential:
    """ReLU, convolution, batch norm."""
    return nn.Sequential(nn.ReLU(), nn.Conv2d(given, made, kernel, stride, padding, bias=False), nn.BatchNorm2d(made))


class Halved(nn.Module):
    """Half the height and width by two 1 x 1 convolutions, of which the second one sees the image one pixel further."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, made // 2, 1, 2, bias=False)
        self.second = nn.Conv2d(given, made // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(made)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to half of the last two."""
        x = functional.relu(x)
        shifted = functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        made: Tensor = self.norm(torch.cat((self.first(x), self.second(shifted)), 1))
        return made


def operation(name: str, channels: int, stride: int) -> nn.Module:
    """One of a cell's operations."""
    few = channels // 4
    if name == "same":
        return nn.Identity() if stride == 1 else Halved(channels, channels)
    if name == "average":
        return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
    if name == "maximum":
        return nn.MaxPool2d(2, stride)
    if name == "1x1":
        return convolution(channels, channels, 1, stride)
    inner = {
        "3x3": [convolution(few, few, 3, stride, 1)],
        "1x7 7x1": [convolution(few, few, (1, 7), (1, stride), (0, 3)), convolution(few, few, (7, 1), (stride, 1), (3, 0))],
    }[name]  # fmt: skip
    return nn.Sequential(convolution(channels, few), *inner, convolution(few, channels))


class Cell(nn.Module):
    """One cell: takes what the last two made, hands on what it made and the later of these."""

    def __init__(self, before_last: int, last: int, channels: int, kind: str, *, after_reduction: bool) -> None:
        super().__init__()
        self.pairs = REDUCTION if kind == "reduction" else NORMAL
        self.joined = JOINED[kind]
        self.last = convolution(last, channels)
        self.before_last: nn.Module = nn.Identity()
        if after_reduction:
            self.before_last = Halved(before_last, channels)
        elif before_last != channels:
            self.before_last = convolution(before_last, channels)
        self.operations = nn.ModuleList(
            operation(name, channels, 2 if kind == "reduction" and number < 2 else 1)
            for pair in self.pairs
            for number, name in pair
        )

    def forward(self, given: Any) -> tuple[Tensor, Tensor]:
        """What the last cell made, and the one before that."""
        last, before_last = given if isinstance(given, tuple) else (given, given)
        sums = [self.last(last), self.before_last(before_last)]
        for n, ((first, _), (second, _)) in enumerate(self.pairs):
            sums.append(self.operations[2 * n](sums[first]) + self.operations[2 * n + 1](sums[second]))
        return torch.cat([sums[number] for number in self.joined], 1), last


class Stem(nn.Module):
    """A convolution that halves height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = convolution(3, channels, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width)."""
        made: Tensor = self.convolution(x)
        return made


class Head(nn.Module):
    """The mean over the image, and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        """Of what the last cell made."""
        made: Tensor = self.linear(functional.avg_pool2d(given[0], 7).flatten(1))
        return made


def amoebanet_d(layers: int, filters: int, classes: int = 1000) -> nn.Sequential:
    """AmoebaNet-D (L, D): three groups of L / 3 normal cells, D / 4 channels in the stem, twice as many after each reduction."""
    channels = filters // 4
    before_last = last = channels
    parts: list[nn.Module] = [Stem(channels)]
    after_reduction = False
    for kind in ("reduction", "reduction", *(("normal",) * (layers // 3) + ("reduction",)) * 3):
        if len(parts) == layers + 5:  # the last group has no reduction behind it
            break
        channels *= 2 if kind == "reduction" else 1
        parts.append(Cell(before_last, last, channels, kind, after_reduction=after_reduction))
        before_last, last = last, channels * len(JOINED[kind])
        after_reduction = kind == "reduction"
    return nn.Sequential(*parts, Head(last, classes))


def amoebanet(samples: int, layers: int, filters: int) -> tuple[Any, Any, Any]:
    """AmoebaNet-D on the meta device, with a batch of 224 x 224 and its loss."""
    with torch.device("meta"):
        model = amoebanet_d(layers, filters)
        sample = {
            "image": torch.empty(samples, 3, 224, 224),
            "label": torch.empty(samples, dtype=torch.int64),
        }
    return model, sample, lambda m, b: functional.cross_entropy(m(b["image"]), b["label"])
