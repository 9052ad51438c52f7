"""Recurrent language models: the whole sequence is one kernel or a loop of small ones, as torch decides.

On the CPU `nn.LSTM` runs as one oneDNN kernel a layer that returns a workspace next to its output, `nn.GRU` as a
loop of operations on each token; so the two are different programs for memfit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .built import Built, cross_entropy, tokens_and_targets


class RecurrentLM(nn.Module):
    """Embedding, two recurrent layers with dropout between them, head."""

    def __init__(self, cell: type[nn.LSTM | nn.GRU], vocab: int, hidden: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.layers = cell(hidden, hidden, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (batch, tokens) to logits (batch, tokens, vocab)."""
        states, _ = self.layers(self.token(ids))
        logits: Tensor = self.head(states)
        return logits


def _language_model(cell: type[nn.LSTM | nn.GRU], batch: int, tokens: int) -> Built:
    torch.manual_seed(0)
    vocab, hidden = 128, 64
    return RecurrentLM(cell, vocab, hidden), tokens_and_targets(batch, tokens, vocab), cross_entropy


def lstm() -> Built:
    """Two LSTM layers over 64 tokens."""
    return _language_model(nn.LSTM, batch=64, tokens=64)


def gru() -> Built:
    """Two GRU layers over 48 tokens."""
    return _language_model(nn.GRU, batch=32, tokens=48)
