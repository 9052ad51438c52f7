"""GPT-style decoders of our own: plain, tied, with dropout, frozen, under autocast, already checkpointed.

Attention is written out (`q @ k^T`, mask, softmax, `@ v`) because its (tokens x tokens) tensors are what
recomputation is for; fused attention hides them in one kernel. The fused and Hugging Face forms are in
`huggingface`.

Source: Radford et al. 2019 (GPT-2); layer order and initialisation follow nanoGPT,
https://github.com/karpathy/nanoGPT. Ours keeps the causal mask as a boolean buffer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .built import Built, cross_entropy, cross_entropy_bf16, tokens_and_targets


class CausalAttention(nn.Module):
    """Multi-head attention in which no token sees a later one, in separate operations."""

    mask: Tensor

    def __init__(self, hidden: int, heads: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.attention_dropout = nn.Dropout(dropout)
        self.out_dropout = nn.Dropout(dropout)
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        self.register_buffer("mask", later, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same shape."""
        # B: batch, T: tokens, C: hidden, H: heads, D: C / H
        b, t, c = x.shape
        q_BHTD, k_BHTD, v_BHTD = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        score_BHTT = q_BHTD @ k_BHTD.transpose(-2, -1) / math.sqrt(c // self.heads)
        weight_BHTT = functional.softmax(score_BHTT.masked_fill(self.mask[:t, :t], float("-inf")), dim=-1)
        y_BTC = (self.attention_dropout(weight_BHTT) @ v_BHTD).transpose(1, 2).reshape(b, t, c)
        mixed: Tensor = self.out_dropout(self.out(y_BTC))
        return mixed


class Block(nn.Module):
    """Pre-norm decoder block: attention and a GELU MLP, each added to the residual stream."""

    def __init__(self, hidden: int, heads: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = CausalAttention(hidden, heads, tokens, dropout)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same shape."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Checkpointed(nn.Module):
    """A block which the user already wrapped in torch's own checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """The block's output; its insides are recomputed by torch in the backward pass."""
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


class GPT(nn.Module):
    """Token and learned position embeddings, blocks, a final norm and a head without bias."""

    def __init__(
        self, *, layers: int, hidden: int, heads: int, tokens: int, vocab: int, dropout: float, tied: bool
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(tokens, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, tokens, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.apply(_initialise)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (batch, tokens) to logits (batch, tokens, vocab)."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.token(ids) + self.position(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def build_gpt(
    layers: int,
    hidden: int,
    heads: int,
    batch: int,
    tokens: int,
    vocab: int,
    dropout: float = 0.0,
    *,
    tied: bool = False,
) -> Built:
    """A GPT of this size in train mode, a batch of random tokens, and the mean cross entropy of the next token."""
    torch.manual_seed(0)
    model = GPT(layers=layers, hidden=hidden, heads=heads, tokens=tokens, vocab=vocab, dropout=dropout, tied=tied)
    return model, tokens_and_targets(batch, tokens, vocab), cross_entropy


def _small(dropout: float = 0.0, *, tied: bool = False) -> Built:
    return build_gpt(layers=3, hidden=64, heads=4, batch=16, tokens=64, vocab=256, dropout=dropout, tied=tied)


def gpt() -> Built:
    """The plain decoder."""
    return _small()


def gpt_dropout() -> Built:
    """Dropout 0.1 on embeddings, attention weights and both residual branches."""
    return _small(dropout=0.1)


def gpt_tied() -> Built:
    """One weight is both embedding and head."""
    return _small(tied=True)


def amp_gpt() -> Built:
    """The forward pass under bfloat16 autocast, whose cache of cast weights lives as long as the context."""
    model, sample, _ = build_gpt(layers=3, hidden=64, heads=4, batch=32, tokens=64, vocab=256)
    return model, sample, cross_entropy_bf16


def frozen() -> Built:
    """Embeddings and the first two of four blocks are frozen: autograd saves nothing for them."""
    model, sample, loss_fn = build_gpt(layers=4, hidden=64, heads=4, batch=16, tokens=64, vocab=256)
    assert isinstance(model, GPT)
    for part in (model.token, model.position, *model.blocks[:2]):
        part.requires_grad_(requires_grad=False)
    return model, sample, loss_fn


def checkpointed() -> Built:
    """Every block, with dropout 0.1, is under `torch.utils.checkpoint` before memfit sees it."""
    model, sample, loss_fn = _small(dropout=0.1)
    assert isinstance(model, GPT)
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return model, sample, loss_fn
