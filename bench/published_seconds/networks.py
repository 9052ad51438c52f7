"""The models whose training steps were timed, built on the meta device from their papers' tables. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

Built = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor] | None]

BERT_WIDTHS = {"base": (768, 12), "large": (1024, 24)}
VIT_WIDTHS = {"tiny": (192, 12), "small": (384, 12), "base": (768, 12), "large": (1024, 24)}


def norm_conv(inner: int, outer: int, size: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution without bias and its batch norm."""
    convolution = nn.Conv2d(inner, outer, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outer))


class Block(nn.Module):
    """Residual block of ResNet, version 1.5 (the stride is in the convolution of size 3): bottleneck where `groups` or `deep` say so, basic otherwise."""

    def __init__(self, inner: int, middle: int, outer: int, stride: int, groups: int, *, deep: bool) -> None:
        super().__init__()
        sizes: tuple[tuple[int, int, int, int, int], ...]
        if deep:
            sizes = ((inner, middle, 1, 1, 1), (middle, middle, 3, stride, groups), (middle, outer, 1, 1, 1))
        else:
            sizes = ((inner, outer, 3, stride, 1), (outer, outer, 3, 1, 1))
        self.layers = nn.ModuleList(norm_conv(a, b, size, stride=s, groups=g) for a, b, size, s, g in sizes)
        self.short = norm_conv(inner, outer, 1, stride=stride) if stride > 1 or inner != outer else None

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for layer in self.layers[:-1]:
            out = F.relu(layer(out), inplace=True)
        out = self.layers[-1](out)
        out += x if self.short is None else self.short(x)
        return F.relu(out, inplace=True)


def resnet(depth: int, *, groups: int = 1, width: int = 64) -> nn.Module:
    """ResNet, ResNeXt (`groups`, `width` of a group) or wide ResNet (`width` 128)."""
    counts = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]
    deep = depth >= 50
    layers: list[nn.Module] = [norm_conv(3, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inner = 64
    for stage, count in enumerate(counts):
        base = 64 << stage
        outer = 4 * base if deep else base
        for number in range(count):
            stride = 2 if stage and not number else 1
            layers.append(Block(inner, base * width * groups // 64, outer, stride, groups, deep=deep))
            inner = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 1000))


def vgg16(*, norm: bool = False) -> nn.Module:
    """VGG of 13 convolutions and three linear layers."""
    layers: list[nn.Module] = []
    inner = 3
    for outer, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(nn.Conv2d(inner, outer, 3, padding=1))
            layers += [nn.BatchNorm2d(outer)] if norm else []
            layers.append(nn.ReLU(inplace=True))
            inner = outer
        layers.append(nn.MaxPool2d(2))
    head: list[nn.Module] = [nn.Flatten()]
    for inner, outer in ((512 * 49, 4096), (4096, 4096)):
        head += [nn.Linear(inner, outer), nn.ReLU(inplace=True), nn.Dropout(0.0)]
    return nn.Sequential(*layers, *head, nn.Linear(4096, 1000))


class Inverted(nn.Module):
    """Inverted residual of MobileNetV2: expand, depthwise, project."""

    def __init__(self, inner: int, outer: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inner * expansion
        parts: list[nn.Module] = [norm_conv(inner, wide, 1), nn.ReLU6(inplace=True)] if expansion > 1 else []
        parts += [norm_conv(wide, wide, 3, stride=stride, groups=wide), nn.ReLU6(inplace=True)]
        self.layers = nn.Sequential(*parts, norm_conv(wide, outer, 1))
        self.residual = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out + x if self.residual else out


def mobilenet_v2() -> nn.Module:
    """MobileNetV2 of width 1."""
    layers: list[nn.Module] = [norm_conv(3, 32, 3, stride=2), nn.ReLU6(inplace=True)]
    inner = 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, outer, count, stride in stages:
        for number in range(count):
            layers.append(Inverted(inner, outer, 1 if number else stride, expansion))
            inner = outer
    head = (norm_conv(inner, 1280, 1), nn.ReLU6(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *head, nn.Linear(1280, 1000))


class Attention(nn.Module):
    """Self-attention of heads of size 64, with its weights written out, as libraries had it before fused attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.inside, self.outside = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        query, key, value = self.inside(x).reshape(samples, tokens, 3, self.heads, 64).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((query @ key.transpose(-2, -1)) * 0.125).softmax(-1)
        return self.outside((weights @ value).transpose(1, 2).reshape(samples, tokens, width))


class Mixing(nn.Module):
    """The multilayer perceptron over the tokens of MLP-Mixer."""

    def __init__(self, tokens: int, wide: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(tokens, wide), nn.GELU(), nn.Linear(wide, tokens))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.transpose(1, 2)).transpose(1, 2)


class Encoder(nn.Module):
    """Blocks over the patches of an image of 224: vision transformer with a class token, or MLP-Mixer (its base size)."""

    def __init__(self, width: int, blocks: int, *, mixer: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = None if mixer else nn.Parameter(torch.zeros(1, 1, width))
        self.places = None if mixer else nn.Parameter(torch.zeros(1, 197, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks + 1))
        self.firsts = nn.ModuleList(Mixing(196, width // 2) if mixer else Attention(width) for _ in range(blocks))
        self.seconds = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.places
        for number, (first, second) in enumerate(zip(self.firsts, self.seconds, strict=True)):
            x = x + first(self.norms[2 * number](x))
            x = x + second(self.norms[2 * number + 1](x))
        x = self.norms[-1](x)
        return self.head(x.mean(1) if self.token is None else x[:, 0])


IMAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: resnet(18),
    "resnet50": lambda: resnet(50),
    "resnet101": lambda: resnet(101),
    "resnet152": lambda: resnet(152),
    "resnext50_32x4d": lambda: resnet(50, groups=32, width=4),
    "resnext101_32x4d": lambda: resnet(101, groups=32, width=4),
    "wide_resnet50_2": lambda: resnet(50, width=128),
    "vgg16": vgg16,
    "vgg16_bn": lambda: vgg16(norm=True),
    "mobilenetv2": mobilenet_v2,
    "mixer_base": lambda: Encoder(768, 12, mixer=True),
    **{f"vit_{size}": lambda shape=shape: Encoder(*shape) for size, shape in VIT_WIDTHS.items()},  # type: ignore[misc]
}


def bert(size: str, head: str, batch: int, tokens: int) -> Built:
    """BERT with eager attention, as it was then.

    Args:
        size: "base" or "large".
        head: "pretraining" (words at the masked places alone are predicted, at most 0.16 of all) or "squad" (begin and end of an answer).
        batch, tokens: of the sample.
    """
    from transformers import BertConfig, BertForPreTraining, BertForQuestionAnswering

    width, layers = BERT_WIDTHS[size]
    config = BertConfig(
        vocab_size=30528,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        attn_implementation="eager",
    )
    words, one = torch.empty(batch, tokens, dtype=torch.long), torch.empty(batch, dtype=torch.long)
    sample = {"input_ids": words, "attention_mask": torch.empty_like(words), "token_type_ids": words}
    if head == "squad":
        return BertForQuestionAnswering(config).train(), sample | {"start_positions": one, "end_positions": one}, None
    masked = torch.empty(batch, tokens * 20 // 128, dtype=torch.long)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        hidden, pooled = model.bert(*batch[:3], return_dict=False)[:2]
        places = batch[3].unsqueeze(-1).expand(-1, -1, width)
        scores, following = model.cls(hidden.gather(1, places), pooled)
        return F.cross_entropy(scores.flatten(0, 1), batch[4].flatten()) + F.cross_entropy(following, batch[5])

    return BertForPreTraining(config).train(), (*sample.values(), masked, masked, one), loss


def built(
    model: str, batch: int, *, tokens: int = 0, channels_last: bool = False, half_parameters: bool = False
) -> Built:
    """A model of this file, its batch and its loss, on the meta device.

    Args:
        model: a name of IMAGE_MODELS, or bert_SIZE_HEAD.
        batch, tokens: of the sample; images are 224 x 224.
        channels_last: memory format of images and weights.
        half_parameters: BERT's parameters, and so all of its operations, are of fp16.
    """
    with torch.device("meta"):
        if model.startswith("bert"):
            _, size, head = model.split("_")
            network, sample, loss = bert(size, head, batch, tokens)
            return (network.half() if half_parameters else network), sample, loss
        layout = torch.channels_last if channels_last else torch.contiguous_format
        network = IMAGE_MODELS[model]().train()
        for parameter in network.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=layout)
        image = torch.empty(batch, 3, 224, 224).contiguous(memory_format=layout)
        labels = torch.empty(batch, dtype=torch.long)
    return network, (image, labels), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
