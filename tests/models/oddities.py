"""Small models, each with one habit that breaks naive recomputation.

Shared modules and weights, custom backward passes, aliasing and writes in place, long chains, a loss that compares
the rows of a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from .built import Built, cross_entropy, squared_error, tokens_and_targets


class Twice(nn.Module):
    """One block called twice in a forward pass, between an embedding and a head that share a weight."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.block = nn.Sequential(
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(4 * hidden, hidden),
        )
        self.head = nn.Linear(hidden, vocab)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (batch, tokens) to logits (batch, tokens, vocab)."""
        x = self.token(ids) * 0.1
        x = x + self.block(x)
        x = x + self.block(x)
        logits: Tensor = self.head(x)
        return logits


class SavingNorm(Function):
    """Root-mean-square norm that saves its output, an intermediate and a parameter: the input is derived, not saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """(..., hidden) and (hidden,) to (..., hidden)."""
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        out = x * inverse * weight
        ctx.save_for_backward(out, inverse, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of input and weight; the weight must not be zero anywhere."""
        (grad,) = grads
        out, inverse, weight = ctx.saved_tensors
        normed, scaled = out / weight, grad * weight
        to_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return to_x, (grad * normed).flatten(0, -2).sum(0)


class HoldingSwish(Function):
    """x * sigmoid(x) that keeps its slope as an attribute of ctx, where saved-tensor hooks do not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Any shape."""
        gate = torch.sigmoid(x)
        out = x * gate
        ctx.slope = gate + out * (1 - gate)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient times the slope that was kept."""
        (grad,) = grads
        slope: Tensor = ctx.slope
        return grad * slope


class CustomMLP(nn.Module):
    """Residual MLP whose norm is a custom function and, with `holds`, its activation too."""

    def __init__(self, hidden: int, *, holds: bool) -> None:
        super().__init__()
        self.holds = holds
        self.weight = nn.Parameter(torch.ones(hidden))
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to the same shape."""
        h = self.up(SavingNorm.apply(x, self.weight))  # type: ignore[no-untyped-call]
        y: Tensor = x + self.down(HoldingSwish.apply(h) if self.holds else functional.silu(h))  # type: ignore[no-untyped-call]
        return y


class Views(nn.Module):
    """Views of views, writes through them, indices, and a running mean that each forward pass updates in place."""

    running: Tensor
    rows: Tensor

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.stem = nn.Linear(hidden, hidden)
        self.bias = nn.Parameter(torch.randn(hidden))
        self.patch = nn.Parameter(torch.randn(tokens // 4, hidden))
        self.gate = nn.Linear(hidden // 2, hidden // 2)
        self.register_buffer("running", torch.zeros(hidden))
        self.register_buffer("rows", torch.arange(0, tokens, 4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same shape."""
        b, t, d = x.shape
        h = torch.tanh(self.stem(x))
        # A statistic outside of autograd, written into a buffer and read again below: an update must not run twice.
        with torch.no_grad():
            self.running.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        h = h * (1 + self.running) + self.bias.expand(b, t, d)

        left, right = h.chunk(2, dim=-1)
        first, rest = h.split([t // 4, t - t // 4], dim=1)
        mixed = left * torch.sigmoid(self.gate(right))
        h = torch.cat([mixed, right - mixed.detach()], dim=-1)
        # Views of views: pairs of tokens, one of each pair, the other order, and back.
        pairs = h.view(b, t // 2, 2, d)[:, :, 0].transpose(0, 1)[1:]
        h = h + functional.gelu(pairs).mean(0).unsqueeze(1)

        # Writes through views of a copy, between reads of it: the copy has four versions.
        z = h.clone()
        z[:, :4] += 1
        z.view(b, -1)[:, d : 2 * d].mul_(0.5)
        z.transpose(1, 2)[:, :, -1].copy_(first.mean(1))
        z = z.index_put_((torch.arange(b).unsqueeze(1), self.rows), self.patch.expand(b, -1, -1))

        score = torch.einsum("btd,bsd->bts", z, h).div(d).softmax(-1)
        y = (score @ rest.cumsum(1).div(t).repeat(1, 2, 1)[:, :t]) * z
        best, where = y.max(dim=1, keepdim=True)
        y = y.scatter_add(1, where, best.exp().clamp(max=2.0))
        logs: Tensor = y - y.logsumexp(dim=-1, keepdim=True)
        return logs


class ResidualChain(nn.Module):
    """x + tanh(linear(x)), many times: the shape for which the literature's optimal plans are stated."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        for block in self.blocks:
            assert isinstance(block, nn.Linear)
            nn.init.normal_(block.weight, std=(width * blocks) ** -0.5)
            nn.init.zeros_(block.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


class TwoTowers(nn.Module):
    """Two encoders of sequences and a learned temperature, for pairs that should find each other in the batch."""

    def __init__(self, inner: int, hidden: int) -> None:
        super().__init__()
        self.left = self._tower(inner, hidden)
        self.right = self._tower(inner, hidden)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    @staticmethod
    def _tower(inner: int, hidden: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(inner, 2 * hidden), nn.GELU(), nn.LayerNorm(2 * hidden), nn.Linear(2 * hidden, hidden), nn.GELU()
        )

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Two batches of sequences (batch, tokens, inner) to scores of all pairs (batch, batch)."""
        a = functional.normalize(self.left(left).mean(1), dim=-1)
        b = functional.normalize(self.right(right).mean(1), dim=-1)
        return self.log_scale.exp() * a @ b.T


def contrastive_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Symmetric cross entropy of the pairs of the batch against all other pairings (Radford et al. 2021, CLIP)."""
    scores = model(*batch)
    own = torch.arange(scores.shape[0], device=scores.device)
    return (functional.cross_entropy(scores, own) + functional.cross_entropy(scores.T, own)) / 2


def twice() -> Built:
    """A shared block and a tied head."""
    torch.manual_seed(0)
    return Twice(vocab=128, hidden=64), tokens_and_targets(32, 96, 128), cross_entropy


def _custom(*, holds: bool) -> Built:
    torch.manual_seed(0)
    model = nn.Sequential(*(CustomMLP(64, holds=holds) for _ in range(4)))
    return model, (torch.randn(24, 96, 64), torch.randn(24, 96, 64)), squared_error


def custom_function() -> Built:
    """Four blocks with a custom function that saves an output and an intermediate by `save_for_backward`."""
    return _custom(holds=False)


def custom_function_ctx() -> Built:
    """The same blocks with one more custom function, which holds a tensor on ctx directly."""
    return _custom(holds=True)


def views() -> Built:
    """One pass through everything that aliases."""
    torch.manual_seed(0)
    return Views(tokens=64, hidden=64), (torch.randn(96, 64, 64), torch.randn(96, 64, 64)), squared_error


def build_chain(blocks: int, width: int, batch: int) -> Built:
    """A residual chain of this many blocks with a mean squared error."""
    torch.manual_seed(0)
    return ResidualChain(blocks, width), (torch.randn(batch, width), torch.randn(batch, width)), squared_error


def residual_chain_50() -> Built:
    """Short enough for quick tests."""
    return build_chain(blocks=50, width=64, batch=1024)


def residual_chain_1000() -> Built:
    """Long enough that recursion, quadratic planning or one frame of stack a block show."""
    return build_chain(blocks=1000, width=32, batch=256)


def contrastive() -> Built:
    """The loss compares all rows of the batch, so it does not split."""
    torch.manual_seed(0)
    return TwoTowers(inner=64, hidden=64), (torch.randn(96, 64, 64), torch.randn(96, 64, 64)), contrastive_loss
