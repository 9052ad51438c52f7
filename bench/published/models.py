"""The published models, built on the meta device from what their configurations say. Nothing is loaded.

Where a library of today still has the model, it is that library's; the networks of OpenMMLab are written here, operation for operation as their training
runs them: what a layer computes decides what autograd saves, names do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

Built = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor] | None]


class _Softmax(torch.autograd.Function):
    """A softmax, or its logarithm, that saves its input beside its result, as PyTorch's did before 1.11 (later ones save the input's type)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, log: bool) -> Tensor:  # noqa: FBT001 - autograd passes arguments by position
        made = F.log_softmax(x, dim) if log else F.softmax(x, dim)
        ctx.save_for_backward(x, made)
        ctx.dim, ctx.log = dim, log
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, made = ctx.saved_tensors
        operation = torch.ops.aten._log_softmax_backward_data if ctx.log else torch.ops.aten._softmax_backward_data
        return operation(gradients[0], made, ctx.dim, x.dtype), None, None


def softmax(x: Tensor, dim: int = -1, *, log: bool = False) -> Tensor:
    """The softmax of PyTorch 1.10 and before."""
    made: Tensor = _Softmax.apply(x, dim, log)  # type: ignore[no-untyped-call]
    return made


def conv_norm(inner: int, outer: int, size: int, *, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """A convolution without bias and its batch norm."""
    padding = dilation * (size // 2)
    return nn.Sequential(nn.Conv2d(inner, outer, size, stride, padding, dilation, bias=False), nn.BatchNorm2d(outer))


class Residual(nn.Module):
    """A block of ResNet: bottleneck (three convolutions) or basic (two), with ReLU in place."""

    def __init__(self, inner: int, width: int, *, deep: bool, stride: int, dilation: int) -> None:
        super().__init__()
        outer = width * (4 if deep else 1)
        middle = conv_norm(width if deep else inner, width, 3, stride=stride, dilation=dilation)
        layers = (
            [conv_norm(inner, width, 1), middle, conv_norm(width, outer, 1)]
            if deep
            else [middle, conv_norm(width, outer, 3, dilation=dilation)]
        )
        self.layers = nn.ModuleList(layers)
        self.short = conv_norm(inner, outer, 1, stride=stride) if stride > 1 or inner != outer else None

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for number, layer in enumerate(self.layers):
            out = layer(out)
            if number < len(self.layers) - 1:
                out = F.relu(out, inplace=True)
        out += x if self.short is None else self.short(x)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """The features of all four stages.

    Args:
        depth: 18, 50 or 101.
        strides, dilations: of the stages.
        three: the stem is three convolutions of size 3 (version c) in place of one of size 7.
    """

    def __init__(
        self,
        depth: int,
        strides: tuple[int, ...] = (1, 2, 2, 2),
        dilations: tuple[int, ...] = (1, 1, 1, 1),
        *,
        three: bool = False,
    ) -> None:
        super().__init__()
        counts = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}[depth]
        stem = (
            [conv_norm(3, 32, 3, stride=2), conv_norm(32, 32, 3), conv_norm(32, 64, 3)]
            if three
            else [conv_norm(3, 64, 7, stride=2)]
        )
        self.stem = nn.Sequential(*(part for layer in stem for part in (layer, nn.ReLU(inplace=True))))
        self.pool = nn.MaxPool2d(3, 2, 1)
        inner, self.stages = 64, nn.ModuleList()
        deep = depth >= 50
        for number, count in enumerate(counts):
            width, blocks = 64 << number, []
            for block in range(count):
                # The first block of a dilated stage still has the dilation of the one before it.
                dilation = dilations[number] // 2 if dilations[number] > 1 and not block else dilations[number]
                stride = 1 if block else strides[number]
                blocks.append(Residual(inner, width, deep=deep, stride=stride, dilation=dilation))
                inner = width * (4 if deep else 1)
            self.stages.append(nn.Sequential(*blocks))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, features = self.pool(self.stem(x)), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features


class Frames(nn.Module):
    """Temporal segment network: a ResNet on every frame, scores averaged over the frames of a video."""

    def __init__(self, depth: int, frames: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.backbone, self.frames = ResNet(depth), frames
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(2048, classes)

    def forward(self, video: Tensor) -> Tensor:
        x = self.backbone(video.flatten(0, 1))[-1]
        x = F.adaptive_avg_pool2d(x, 1)
        x = x.reshape(-1, self.frames, *x.shape[1:]).mean(1, keepdim=True).squeeze(1)
        return self.head(self.dropout(x).flatten(1))


def tsn(depth: int, videos: int, frames: int, classes: int, dropout: float, *, frozen_norm: bool, many: bool) -> Built:
    """A temporal segment network.

    Args:
        depth, frames, classes, dropout: of the network.
        videos: of a batch.
        frozen_norm: batch norms use their running statistics.
        many: a video may have several labels.
    """
    model = Frames(depth, frames, classes, dropout).train()
    if frozen_norm:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    labels = torch.zeros(videos, classes) if many else torch.zeros(videos, dtype=torch.long)
    loss = F.binary_cross_entropy_with_logits if many else F.cross_entropy
    video = torch.empty(videos, frames, 3, 224, 224, device="meta")
    return model, (video, labels), lambda model, batch: loss(model(batch[0]), batch[1])


class FullyConvolutional(nn.Module):
    """FCN on a dilated ResNet, with an auxiliary head, as MMSegmentation trains it."""

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        self.backbone = ResNet(depth, (1, 2, 1, 1), (1, 1, 2, 4), three=True)
        last, before = (2048, 1024) if depth >= 50 else (512, 256)
        width, aside = last // 4, before // 4
        self.first, self.second = conv_norm(last, width, 3), conv_norm(width, width, 3)
        self.joined, self.head = conv_norm(last + width, width, 3), nn.Conv2d(width, classes, 1)
        self.aside, self.aside_head = conv_norm(before, aside, 3), nn.Conv2d(aside, classes, 1)
        self.dropout, self.aside_dropout = nn.Dropout2d(0.1), nn.Dropout2d(0.1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        *_, before, last = self.backbone(image)
        out = F.relu(self.first(last), inplace=True)
        out = F.relu(self.second(out), inplace=True)
        out = F.relu(self.joined(torch.cat([last, out], 1)), inplace=True)
        aside = F.relu(self.aside(before), inplace=True)
        return self.head(self.dropout(out)), self.aside_head(self.aside_dropout(aside))


def fcn(depth: int, images: int, height: int, width: int, classes: int) -> Built:
    """FCN on crops of this size."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        image, labels = batch
        parts = []
        for logits in model(image):
            large = F.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
            logarithms = softmax(large, 1, log=True)
            parts.append(F.nll_loss(logarithms, labels, reduction="none", ignore_index=255).mean())
        return parts[0] + 0.4 * parts[1]

    image = torch.empty(images, 3, height, width, device="meta")
    labels = torch.empty(images, height, width, dtype=torch.long, device="meta")
    return FullyConvolutional(depth, classes).train(), (image, labels), loss


def c3d(videos: int, frames: int, size: int, classes: int) -> Built:
    """C3D: eight 3-d convolutions, two hidden linear layers."""
    layers: list[nn.Module] = []
    inner = 3
    for outer, pool in ((64, (1, 2, 2)), (128, 2), (256, 0), (256, 2), (512, 0), (512, 2), (512, 0), (512, 2)):
        layers += [nn.Conv3d(inner, outer, 3, padding=1), nn.ReLU()]
        if pool:
            layers.append(nn.MaxPool3d(pool, pool, (0, 1, 1) if len(layers) == 23 else 0))
        inner = outer
    layers = [*layers[:-1], nn.MaxPool3d(2, 2, (0, 1, 1))]
    for outer, inner in ((4096, 8192), (4096, 4096)):
        layers += [nn.Flatten()] if inner == 8192 else []
        layers += [nn.Linear(inner, outer), nn.ReLU(), nn.Dropout(0.5)]
    model = nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(4096, classes)).train()
    video = torch.empty(videos, 3, frames, size, size, device="meta")
    return model, (video, torch.zeros(videos, dtype=torch.long)), lambda m, b: F.cross_entropy(m(b[0]), b[1])


class Attention(nn.Module):
    """Self-attention of twelve heads with the mean of its weights, as MMCV calls `nn.MultiheadAttention` of PyTorch 1.9 and 1.10.

    MMCV transposes queries, keys and values one by one, so they are three tensors, which those versions project separately; each projection saves a copy of its
    input. Which version was used is not told.
    """

    def __init__(self, width: int, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.inside, self.outside = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.transpose(0, 1)
        length, samples, width = tokens.shape
        size = width // self.heads
        projected = (
            F.linear(tokens, weight, bias)
            for weight, bias in zip(self.inside.weight.chunk(3), self.inside.bias.chunk(3), strict=True)
        )
        query, key, value = (t.view(length, samples * self.heads, size).transpose(0, 1) for t in projected)
        weights = softmax(torch.bmm(query / size**0.5, key.transpose(1, 2)))
        out = torch.bmm(weights, value).transpose(0, 1).contiguous().view(length, samples, width)
        out = self.outside(out)
        weights.view(samples, self.heads, length, length).sum(1) / self.heads
        return out.transpose(0, 1)


def dropped_path(x: Tensor, probability: float) -> Tensor:
    """Stochastic depth."""
    if not probability:
        return x
    keep = 1 - probability
    mask = keep + torch.rand((x.shape[0],) + (1,) * (x.dim() - 1), dtype=x.dtype, device=x.device)
    return x.div(keep) * mask.floor()


class SpaceTime(nn.Module):
    """A layer of TimeSformer: attention over time, over space, or over both at once; then two linear layers.

    Args:
        kind: "divided", "joint" or "space".
        frames: of a video.
        drop: probability of leaving a branch out.
    """

    def __init__(self, kind: str, frames: int, drop: float, width: int = 768) -> None:
        super().__init__()
        self.kind, self.frames, self.drop = kind, frames, drop
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.wide, self.narrow, self.last_norm = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.LayerNorm(width),
        )
        if kind == "divided":
            self.temporal, self.temporal_norm = Attention(width), nn.LayerNorm(width)
            self.between = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self._over_space(self._over_time(x)) if self.kind == "divided" else self._over_both(x)
        out = self.narrow(F.gelu(self.wide(self.last_norm(x))))
        return x + dropped_path(out, self.drop)

    def _over_both(self, x: Tensor) -> Tensor:
        return x + dropped_path(self.attention(self.norm(x)), self.drop)

    def _over_time(self, x: Tensor) -> Tensor:
        samples, width = x.shape[0], x.shape[-1]
        first, rest = x[:, :1], x[:, 1:]
        series = rest.reshape(-1, self.frames, width)
        out = dropped_path(self.temporal(self.temporal_norm(series)), self.drop)
        out = self.between(out).reshape(samples, -1, width)
        return torch.cat((first, rest + out), 1)

    def _over_space(self, x: Tensor) -> Tensor:
        samples, width, frames = x.shape[0], x.shape[-1], self.frames
        patches = (x.shape[1] - 1) // frames
        first = x[:, :1].repeat(1, frames, 1).reshape(samples * frames, 1, width)
        pictures = x[:, 1:].reshape(samples, patches, frames, width).transpose(1, 2).reshape(-1, patches, width)
        out = dropped_path(self.attention(self.norm(torch.cat((first, pictures), 1))), self.drop)
        middle = out[:, 0].reshape(samples, frames, width).mean(1, keepdim=True)
        rest = out[:, 1:].reshape(samples, frames, patches, width).transpose(1, 2).reshape(samples, -1, width)
        return x + torch.cat((middle, rest), 1)


class TimeSformer(nn.Module):
    """Vision transformer on the patches of all frames."""

    def __init__(self, kind: str, frames: int, classes: int, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.kind, self.frames = kind, frames
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token, self.places = nn.Parameter(torch.empty(1, 1, width)), nn.Parameter(torch.empty(1, 197, width))
        self.times = nn.Parameter(torch.empty(1, frames, width)) if kind != "space" else None
        drops = [0.1 * number / (layers - 1) for number in range(layers)]
        self.layers = nn.Sequential(*(SpaceTime(kind, frames, drop) for drop in drops))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, video: Tensor) -> Tensor:
        samples = video.shape[0]
        x = self.patches(video.transpose(1, 2).reshape(-1, *video.shape[1:2], *video.shape[3:]))
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.places
        width = x.shape[-1]
        if self.times is not None:
            first = x[:samples, :1]
            rest = x[:, 1:].reshape(samples, self.frames, -1, width).transpose(1, 2).reshape(-1, self.frames, width)
            x = torch.cat((first, (rest + self.times).reshape(samples, -1, width)), 1)
        x = self.layers(x)
        if self.kind == "space":
            x = x.view(samples, self.frames, *x.shape[1:]).mean(1)
        return self.head(self.norm(x)[:, 0])


def timesformer(kind: str, videos: int, frames: int, classes: int) -> Built:
    """TimeSformer on videos of 224 x 224."""
    video = torch.empty(videos, 3, frames, 224, 224, device="meta")
    labels = torch.zeros(videos, dtype=torch.long)
    model = TimeSformer(kind, frames, classes).train()
    return model, (video, labels), lambda m, b: F.cross_entropy(m(b[0]), b[1])


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The attention of Transformers' BERT, with the softmax of then."""
    scores = torch.matmul(query, key.transpose(2, 3)) * (scaling or query.shape[-1] ** -0.5)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.dropout(softmax(scores), dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def bert_large(batch: int, tokens: int, *, recompute: bool) -> Built:
    """BERT-large with a head for two classes, no mask given, eager attention."""
    from transformers import AttentionInterface, BertConfig, BertForSequenceClassification

    AttentionInterface.register("eager_of_2022", eager_attention)
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager_of_2022",
        num_labels=2,
    )
    model = BertForSequenceClassification(config).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sample = {
        "input_ids": torch.randint(100, 30000, (batch, tokens), device="cpu"),
        "labels": torch.zeros(batch, dtype=torch.long, device="cpu"),
    }
    return model, sample, None


BUILDERS: dict[str, Callable[..., Built]] = {
    "tsn": tsn,
    "fcn": fcn,
    "c3d": c3d,
    "timesformer": timesformer,
    "bert_large": bert_large,
}


def built(model: str, **arguments: Any) -> Built:
    """A model of this file, its batch and its loss, on the meta device."""
    with torch.device("meta"):
        return BUILDERS[model](**arguments)
