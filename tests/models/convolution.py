"""Models on images: residual networks, U-Nets, an MLP-Mixer.

Residual networks are here for batch statistics and writes in place (`ReLU(inplace=True)`, `out += identity`),
U-Nets for skips that are saved early and read late, where one segment cannot serve.

Sources: He et al. 2016 (ResNet; ours has the 3 x 3 stem of the CIFAR form), Ronneberger et al. 2015 (U-Net; ours
pads so that sizes match), Tolstikhin et al. 2021 (MLP-Mixer).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from .built import Built, cross_entropy


def _shortcut(inner: int, outer: int, stride: int) -> nn.Module:
    if stride == 1 and inner == outer:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions, added in place to the identity."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.shortcut = _shortcut(inner, outer, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inner, H, W) to (batch, outer, H / stride, W / stride)."""
        identity = self.shortcut(x)
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += identity
        y: Tensor = self.relu(out)
        return y


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 convolutions with a quarter of the channels inside."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        narrow = outer // 4
        self.conv1 = nn.Conv2d(inner, narrow, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(narrow)
        self.conv3 = nn.Conv2d(narrow, outer, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outer)
        self.shortcut = _shortcut(inner, outer, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inner, H, W) to (batch, outer, H / stride, W / stride)."""
        identity = self.shortcut(x)
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        out += identity
        y: Tensor = self.relu(out)
        return y


class ResNet(nn.Module):
    """Stem, stages that halve the image, adaptive pooling, linear head."""

    def __init__(self, block: Callable[[int, int, int], nn.Module], channels: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels[0], 3, padding=1, bias=False), nn.BatchNorm2d(channels[0]), nn.ReLU(inplace=True)
        )
        stages: list[nn.Module] = [block(channels[0], channels[0], 1), block(channels[0], channels[0], 1)]
        for inner, outer in pairwise(channels):
            stages += [block(inner, outer, 2), block(outer, outer, 1)]
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, H, W) to logits (batch, classes)."""
        logits: Tensor = self.head(self.pool(self.stages(self.stem(x))).flatten(1))
        return logits


class DoubleConv(nn.Sequential):
    """Two 3 x 3 convolutions with norm and in-place ReLU."""

    def __init__(self, inner: int, outer: int, norm: Callable[[int], nn.Module]) -> None:
        layers: list[nn.Module] = []
        for first in (inner, outer):
            layers += [nn.Conv2d(first, outer, 3, padding=1, bias=False), norm(outer), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """Encoder and decoder of the same depth; each level of the encoder is concatenated to that of the decoder."""

    def __init__(self, channels: tuple[int, ...], classes: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        steps = tuple(pairwise(channels))
        self.first = DoubleConv(3, channels[0], norm)
        self.down = nn.ModuleList(DoubleConv(inner, outer, norm) for inner, outer in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(outer, inner, 2, 2) for inner, outer in reversed(steps))
        self.merge = nn.ModuleList(DoubleConv(2 * inner, inner, norm) for inner, _ in reversed(steps))
        self.head = nn.Conv2d(channels[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, H, W) to a class score for each pixel, (batch, H, W, classes)."""
        x = self.first(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(functional.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        scores: Tensor = self.head(x)
        return scores.permute(0, 2, 3, 1)


class MixerBlock(nn.Module):
    """An MLP over tokens, then one over channels."""

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.across = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.norm2 = nn.LayerNorm(hidden)
        self.within = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same shape."""
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        y: Tensor = x + self.within(self.norm2(x))
        return y


class Mixer(nn.Module):
    """Patches, mixer blocks, mean over tokens, linear head."""

    def __init__(self, size: int, patch: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.blocks = nn.Sequential(*(MixerBlock((size // patch) ** 2, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, H, W) to logits (batch, classes)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


def _images_and_classes(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


def resnet() -> Built:
    """Three stages of two basic blocks, batch norm in train mode."""
    torch.manual_seed(0)
    return ResNet(BasicBlock, (16, 32, 64), 10), _images_and_classes(16, 32, 10), cross_entropy


def resnet_bottleneck() -> Built:
    """Three stages of two bottleneck blocks."""
    torch.manual_seed(0)
    return ResNet(Bottleneck, (32, 64, 128), 10), _images_and_classes(16, 32, 10), cross_entropy


def channels_last() -> Built:
    """The residual network with weights and images in channels-last order: strides must survive recomputation."""
    model, sample, loss_fn = resnet()
    assert isinstance(sample, tuple)
    x, y = sample
    last = torch.channels_last
    model.to(memory_format=last)  # type: ignore[call-overload]
    return model, (x.contiguous(memory_format=last), y), loss_fn


def _unet(norm: Callable[[int], nn.Module]) -> Built:
    torch.manual_seed(0)
    batch, size, classes = 16, 48, 4
    sample = torch.randn(batch, 3, size, size), torch.randint(classes, (batch, size, size))
    return UNet((8, 16, 32, 64), classes, norm), sample, cross_entropy


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def unet() -> Built:
    """U-Net of four levels with group norm, so that the loss splits over the batch."""
    return _unet(_group_norm)


def unet_batchnorm() -> Built:
    """The same U-Net with batch norm."""
    return _unet(nn.BatchNorm2d)


def mlp_mixer() -> Built:
    """MLP-Mixer on 32 x 32 images in patches of 4 x 4."""
    torch.manual_seed(0)
    return Mixer(size=32, patch=4, hidden=64, layers=3, classes=10), _images_and_classes(32, 32, 10), cross_entropy
