"""Chains of unlike parts, with what models do between them: random ones, by their seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, WORDS = 32, 12, 60
Built = tuple[nn.Module, Any, Any]


class Part(nn.Module):
    """Makes of a stream and of what else is known of a batch the next stream, and of what it may carry on the next."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        hidden = draw.choice([WIDTH, 2 * WIDTH, 4 * WIDTH])
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=draw.random() < 0.5)

    def feed(self, x: Tensor) -> Tensor:
        """Twice linear."""
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Feed(Part):
    """As most blocks are."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.norm(x))


class InPlace(Part):
    """Writes into what it has made."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.feed(x)
        y += x
        return y.relu_()


class Attention(Part):
    """Takes a mask and tables that all such parts share, by their names."""

    def forward(self, x: Tensor, *, mask: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        h = self.norm(x)
        turned = h * tables[0] + h.roll(1, -1) * tables[1]
        return x + functional.scaled_dot_product_attention(turned, turned, self.feed(h), attn_mask=mask)


class Reading(Part):
    """Reads what an earlier part ended with."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + (self.norm(x) @ memory.transpose(1, 2)).softmax(-1) @ self.feed(memory)


class Carrying(Part):
    """Has a second result, of another shape, for the next of its kind."""

    def forward(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        y = self.feed(self.norm(x))
        mean = y.mean(1, keepdim=True)
        return x + y + (0.0 if carried is None else carried), mean.tanh()


class Named(Part):
    """Gives its results by name, one of which nobody reads."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"unread": x.sin(), "hidden": x + self.feed(self.norm(x))}


class Viewing(Part):
    """Its result is not contiguous, and a view of something larger."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([x, self.feed(self.norm(x))], -1).transpose(1, 2)
        return wide[:, WIDTH:].transpose(1, 2)


class Passing(Part):
    """Gives back what it was given, as an identity does."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Checkpointed(Part):
    """Recomputed by the user's own checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda h: h + self.feed(self.norm(h)), x, use_reentrant=False)
        return y


class Halved(Part):
    """What it hands on has 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.feed(self.norm(x))).bfloat16()


class Choosing(Part):
    """Hands on numbers of tokens too, which take no gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.feed(self.norm(x))
        return y, y.detach().abs().sum(-1).argsort(-1)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1.0, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < 1.0)


class Own(Part):
    """With a function whose backward is written by hand, and a buffer."""

    def __init__(self, draw: Random) -> None:
        super().__init__(draw)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Own.apply(self.feed(self.norm(x)) * self.scale)  # type: ignore[no-untyped-call]
        return x + y


KINDS: tuple[Callable[[Random], Part], ...] = (
    *(Feed, Feed, InPlace, Attention, Attention, Reading, Carrying, Carrying),
    *(Named, Viewing, Passing, Checkpointed, Halved, Choosing, Own),
)
BETWEEN = ("", "", "", "", "scale", "skip", "cat", "norm", "bias")


class Staged(nn.Module):
    """An embedding, some parts, a head.

    Args:
        draw: decides what the program is.
    """

    def __init__(self, draw: Random) -> None:
        super().__init__()
        torch.manual_seed(draw.randrange(1 << 20))
        self.words = nn.Embedding(WORDS, WIDTH)
        kinds = [draw.choice(KINDS) for _ in range(draw.randint(3, 7))]
        self.parts = nn.ModuleList(kind(draw) for kind in kinds)
        self.between = [draw.choice(BETWEEN) for _ in kinds]
        self.comes_from = [draw.randint(0, number) for number in range(len(kinds))]  # what is skipped to, or read
        self.scale = nn.Parameter(torch.ones(WIDTH)) if "scale" in self.between else None
        self.bias = nn.ParameterList(torch.zeros(LENGTH, WIDTH) for each in self.between if each == "bias")
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if draw.random() < 0.3:
            self.head.weight = self.words.weight
        alike = [n for n, part in enumerate(self.parts) if part.up.out_features == 2 * WIDTH]
        if len(alike) > 1 and draw.random() < 0.3:
            self.parts[alike[-1]].up.weight = self.parts[alike[0]].up.weight
        for part in self.parts:
            if draw.random() < 0.15:
                part.requires_grad_(False)
        if draw.random() < 0.15:
            self.words.requires_grad_(False)

    def forward(self, ids: Tensor, filled: Tensor) -> Tensor:
        """(rows, tokens) of words, and which of them are read."""
        x = self.words(ids)
        mask = filled[:, None, :] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        angles = torch.arange(LENGTH)[:, None] * torch.logspace(0, -2, WIDTH)
        tables = angles.cos(), angles.sin()
        seen, carried, order, biases = [x], None, None, iter(self.bias)
        for number, (part, between) in enumerate(zip(self.parts, self.between, strict=True)):
            earlier = seen[self.comes_from[number]]
            if isinstance(part, Attention):
                x = part(x, mask=mask, tables=tables)
            elif isinstance(part, Reading):
                x = part(x, earlier)
            elif isinstance(part, Carrying):
                x, carried = part(x, carried)
            elif isinstance(part, Choosing):
                x, order = part(x)
            elif isinstance(part, Named):
                x = part(x)["hidden"]
            else:
                x = part(x).float()
            if between == "scale":
                x = x * self.scale
            elif between == "skip":
                x = x + earlier
            elif between == "cat":
                x = torch.cat([x, earlier.exp()], -1)[..., WIDTH // 2 : WIDTH + WIDTH // 2]
            elif between == "norm":
                x = functional.layer_norm(x, (WIDTH,))
            elif between == "bias":
                x = x + next(biases)
            seen.append(x)
        if order is not None:
            x = x.gather(1, order[..., None].expand_as(x))
        logits: Tensor = self.head(x)
        return logits


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    """A mean over the words that count."""
    return functional.cross_entropy(model(batch["ids"], batch["filled"]).flatten(0, 1), batch["labels"].flatten())


def sum_loss(model: nn.Module, batch: Any) -> Tensor:
    """Adds up over samples."""
    logits = model(batch["ids"], batch["filled"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / 1000.0


def square_loss(model: nn.Module, batch: Any) -> Tensor:
    """A mean over samples that reads no labels."""
    return model(batch["ids"], batch["filled"]).square().mean()


def staged(seed: int, samples: int = 32) -> Built:
    """A program, a batch and a loss."""
    draw = Random(seed)
    model = Staged(draw)
    loss_fn = draw.choice([token_loss, token_loss, sum_loss, square_loss])
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (samples, LENGTH), generator=generator)
    filled = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH, (samples, 1), generator=generator)
    return model, {"ids": ids, "filled": filled, "labels": ids.roll(-1, 1).where(filled, -100)}, loss_fn
