"""Models after published ideas, each with a habit that was once predicted wrongly or not at all.

They are small: a plan takes about a second. What each is for stands with its class.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .built import Built, cross_entropy, squared_error, tokens_and_targets


class ScaledAttention(nn.Module):
    """Causal attention whose mask is a buffer of numbers and whose scores are multiplied by a Python number, which autograd keeps.

    Source: Radford et al. 2019 (GPT-2), in separate operations as teaching implementations write them.
    """

    lower: Tensor

    def __init__(self, hidden: int, heads: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.drop_weights, self.drop_out = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("lower", torch.ones(tokens, tokens).tril().view(1, 1, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same shape."""
        b, t, c = x.shape
        q_BHTD, k_BHTD, v_BHTD = (h.view(b, t, self.heads, -1).transpose(1, 2) for h in self.qkv(x).split(c, dim=2))
        score_BHTT = (q_BHTD @ k_BHTD.transpose(-2, -1)) * (1.0 / math.sqrt(k_BHTD.shape[-1]))
        score_BHTT = score_BHTT.masked_fill(self.lower[:, :, :t, :t] == 0, -math.inf)
        y_BHTD = self.drop_weights(functional.softmax(score_BHTT, dim=-1)) @ v_BHTD
        y: Tensor = self.drop_out(self.out(y_BHTD.transpose(1, 2).contiguous().view(b, t, c)))
        return y


class TanhGELU(nn.Module):
    """GELU by its tanh formula (Hendrycks and Gimpel 2016), written out: three products with Python numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3.0))))


class ScaledBlock(nn.Module):
    """Pre-norm block of the two above."""

    def __init__(self, hidden: int, heads: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(hidden), ScaledAttention(hidden, heads, tokens, dropout))
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), TanhGELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same shape."""
        x = x + self.attention(x)
        y: Tensor = x + self.mlp(x)
        return y


def scaled_attention_gpt(tokens: int = 32, positions: int = 40) -> Built:
    """Two blocks of explicit attention over fewer tokens than the mask has positions."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(65, 48), *(ScaledBlock(48, 4, positions, 0.1) for _ in range(2)), nn.Linear(48, 65)
    )
    return model, tokens_and_targets(8, tokens, 65), cross_entropy


class NumbersKept(nn.Module):
    """Products with Python numbers of several kinds, in place, under checkpointing, of what asks for no gradient, and in a branch that nothing reads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, hidden) to the same shape."""
        h = self.first(x * 0.5)
        unread = (h * 3.0).detach()
        h = (h + 1.0).mul_(2).div_(3.0) / 1.5
        h = checkpoint(lambda y: (y * 0.25).sin() / 7, h, use_reentrant=False)
        y: Tensor = self.second(h * True) + 0.0 * unread
        return 2.0 / (y.square() + 1.0)


def numbers_kept() -> Built:
    """One layer pair with every kind of product with a number."""
    torch.manual_seed(0)
    return NumbersKept(16), (torch.randn(32, 16), torch.randn(32, 16)), squared_error
