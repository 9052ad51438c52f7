"""Small models of the kinds that are cut into stages, each with a batch; always the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.batches import Batch, LossFunction

SAMPLES, LENGTH, WIDTH, WORDS = 8, 6, 16, 50


class Block(nn.Module):
    """Attention over a mask and rotary tables that all blocks share, and a feed-forward layer, both residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor], memory: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if memory is not None:
            k = v = memory
        cos, sin = rotary
        q, k = q * cos + q.roll(1, -1) * sin, k * cos + k.roll(1, -1) * sin
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return x + self.feed(x)


class Rotary(nn.Module):
    """Tables of a buffer and positions; of its first argument only the type counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.logspace(0, -2, WIDTH))

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.rates
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Decoder(nn.Module):
    """A language model with a list of blocks; tied weights if asked for, learned positions outside of modules."""

    def __init__(self, blocks: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.skipped: int | None = None
        self.words = nn.Embedding(WORDS, WIDTH)
        self.start = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.rotary = Rotary()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.start
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=x.device).tril()
        tables = self.rotary(x, torch.arange(ids.shape[1], device=x.device)[None])
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = block(x, mask, tables)
        return self.head(self.norm(x))


class EncoderDecoder(nn.Module):
    """Every block of the second stack reads what the first ended with."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.rotary = Rotary()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = memory = self.words(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=x.device)
        tables = self.rotary(x, torch.arange(ids.shape[1], device=x.device)[None])
        for block in self.encoder:
            memory = block(memory, mask, tables)
        memory = self.norm(memory)
        for block in self.decoder:
            x = block(x, mask.tril(), tables, memory)
        return self.head(x)


class Residual(nn.Module):
    """Two convolutions and a way around them, with activations in place."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, padding=1)
        self.second = nn.Conv2d(out, out, 3, padding=1)
        self.around = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(functional.relu(self.first(x), inplace=True))
        y += self.around(x)
        return functional.relu(y, inplace=True)


class ResNet(nn.Module):
    """Groups of residual blocks, a pooling and a flatten that are no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.groups = nn.Sequential(
            nn.Sequential(Residual(8, 8), Residual(8, 8)), nn.Sequential(Residual(8, 16), Residual(16, 16))
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.groups(functional.relu(self.stem(x))).mean((2, 3)).flatten(1))


def vgg() -> nn.Module:
    """Convolutions, each followed by an activation in place; some pooled."""
    layers: list[nn.Module] = []
    for channels, out, pooled in ((3, 8, False), (8, 8, True), (8, 16, False)):
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if pooled else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class Towers(nn.Module):
    """Each layer adds in place to what the one before returned, outside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = self.layers[0](x)
        for layer in self.layers[1:]:
            total += layer(total.tanh())
        return total


def word_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy over the words that count."""
    return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy over classes."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def square_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean of squares."""
    return model(batch).square().mean()


def words(samples: int = SAMPLES) -> dict[str, Tensor]:
    """Sentences of which different numbers of words count."""
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(0, WORDS, (samples, LENGTH), generator=made)
    labels = ids.roll(-1, 1).clone()
    for row in range(samples):
        labels[row, : (row * 5) % LENGTH] = -100
    return {"ids": ids, "labels": labels}


def images(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Pictures and their classes."""
    made = torch.Generator().manual_seed(4)
    return torch.randn(samples, 3, 8, 8, generator=made), torch.randint(0, 10, (samples,), generator=made)


def rows(samples: int = SAMPLES) -> Tensor:
    """Vectors."""
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(5))


def sequential() -> nn.Module:
    """A chain of layers of which none is repeated alike."""
    sizes = (WIDTH, 24, 8, 40, WIDTH)
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], LossFunction, str]] = {
    "sequential": (sequential, rows, square_loss, "samples"),
    "decoder": (Decoder, words, word_loss, "tokens:labels"),
    "tied": (lambda: Decoder(tied=True), words, word_loss, "tokens:labels"),
    "encoder_decoder": (EncoderDecoder, words, word_loss, "tokens:labels"),
    "resnet": (ResNet, images, class_loss, "samples"),
    "vgg": (vgg, images, class_loss, "samples"),
}


def built(name: str) -> tuple[nn.Module, Batch, LossFunction, str]:
    """A model from seed 0, its batch, its loss, and what its micro-batches count for."""
    make, batch, loss_fn, weights = MODELS[name]
    torch.manual_seed(0)
    return make(), batch(), loss_fn, weights
