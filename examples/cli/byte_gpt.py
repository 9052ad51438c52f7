"""A small language model over bytes, in plain PyTorch: what `model.python` of a configuration may name."""

from __future__ import annotations

import torch
from torch import nn


class ByteGpt(nn.Module):
    """Decoder-only transformer; a token is a byte plus one, 0 pads (the tokenizer called "bytes")."""

    def __init__(self, width: int, depth: int, heads: int, max_length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(258, width)
        self.places = nn.Embedding(max_length, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 258, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss over bytes that have one before them."""
        del attention_mask  # padding comes last, so no token that counts looks at it
        length = input_ids.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        x = self.tokens(input_ids) + self.places.weight[:length]
        logits = self.head(self.norm(self.blocks(x, mask=later, is_causal=True)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def build(width: int = 128, depth: int = 4, heads: int = 4, max_length: int = 128) -> ByteGpt:
    """What the configuration calls; it may return (model, loss_fn) as well."""
    return ByteGpt(width, depth, heads, max_length)
