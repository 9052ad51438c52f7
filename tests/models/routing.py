"""Models whose computation depends on data: which expert, which rows, which branch.

In `moe_like` only values depend on data, so shapes are known beforehand; in `nonzero_model` shapes do, so fake
tensors cannot run it; in `item_control_flow` the list of operations does, so a plan made on one batch may not fit
another.

Source of the first: Shazeer et al. 2017 (top-k gating) and Lepikhin et al. 2020 (GShard, dispatch with a capacity).
Ours counts capacity within each sequence, so that the loss splits over the batch, and has no balancing loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .built import Built, squared_error


class DenselyRouted(nn.Module):
    """Top-2 experts for each token; tokens travel by one-hot positions, gather and scatter, never by nonzero."""

    def __init__(self, hidden: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.norm = nn.LayerNorm(hidden)
        self.gate = nn.Linear(hidden, experts)
        self.up = nn.Parameter(torch.randn(experts, hidden, 2 * hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * hidden, hidden) * (2 * hidden) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same shape; tokens beyond an expert's capacity keep only the residual."""
        # B: batch, T: tokens, D: hidden, K: choices, E: experts, S: slots = experts * capacity and one for the overflow
        b, t, d = x.shape
        h_BTD = self.norm(x)
        weight_BTE = functional.softmax(self.gate(h_BTD), dim=-1)
        top_BTK, expert_BTK = weight_BTE.topk(2, dim=-1)
        hot_BTKE = functional.one_hot(expert_BTK, self.experts)
        # The place of a choice in its expert's queue: how many choices of the sequence went there before.
        queue_BTKE = hot_BTKE.flatten(1, 2).cumsum(1).view_as(hot_BTKE) - 1
        place_BTK = (queue_BTKE * hot_BTKE).sum(-1)
        overflow = self.experts * self.capacity
        slot_BTK = torch.where(place_BTK < self.capacity, expert_BTK * self.capacity + place_BTK, overflow)
        slot_BND = slot_BTK.flatten(1).unsqueeze(-1).expand(-1, -1, d)

        sent_BND = h_BTD.unsqueeze(2).expand(b, t, 2, d).reshape(b, -1, d)
        slots_BSD = x.new_zeros(b, overflow + 1, d).scatter_add(1, slot_BND, sent_BND)
        queues = slots_BSD[:, :overflow].unflatten(1, (self.experts, self.capacity))
        hidden = functional.gelu(torch.einsum("becd,edf->becf", queues, self.up))
        done_BSD = torch.einsum("becf,efd->becd", hidden, self.down).flatten(1, 2)
        done_BSD = functional.pad(done_BSD, (0, 0, 0, 1))  # the overflow slot answers zero

        back_BTKD = done_BSD.gather(1, slot_BND).view(b, t, 2, d)
        y: Tensor = x + (back_BTKD * top_BTK.unsqueeze(-1)).sum(2)
        return y


class SparselyRouted(nn.Module):
    """Top-1 expert for each token, each expert run on the rows that nonzero found; then a mask picks large rows."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))
            for _ in range(experts)
        )
        self.polish = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same shape."""
        rows = x.flatten(0, 1)
        weight, chosen = functional.softmax(self.gate(rows), dim=-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, where, expert(rows[where]) * weight[where].unsqueeze(-1))
        large = out.norm(dim=-1) > out.shape[-1] ** 0.5 / 4
        out[large] = torch.tanh(self.polish(out[large]))
        return x + out.view_as(x)


class Branching(nn.Module):
    """A layer that reads a number off its input and chooses, from that, a branch and how often to run it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.calm = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))
        self.wild = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same shape."""
        spread = x.std().item()
        if spread < 1.25:  # about the middle of what the six layers see
            doubled: Tensor = x + 2 * self.calm(x)
            return doubled
        for _ in range(1 + int(4 * spread) % 2):
            x = x + self.wild(x)
        scaled: Tensor = x / spread
        return scaled


def _regression(model: nn.Module, batch: int, tokens: int, hidden: int) -> Built:
    return model, (torch.randn(batch, tokens, hidden), torch.randn(batch, tokens, hidden)), squared_error


def moe_like() -> Built:
    """Three layers of four experts with a capacity that some tokens exceed."""
    torch.manual_seed(0)
    layers = (DenselyRouted(hidden=64, experts=4, capacity=36) for _ in range(3))
    return _regression(nn.Sequential(*layers), 32, 64, 64)


def nonzero_model() -> Built:
    """Three layers of four experts; sizes of tensors depend on values."""
    torch.manual_seed(0)
    layers = (SparselyRouted(hidden=64, experts=4) for _ in range(3))
    return _regression(nn.Sequential(*layers), 32, 64, 64)


def item_control_flow() -> Built:
    """Six layers that take both branches between them, as `.item()` tells."""
    torch.manual_seed(0)
    layers = (Branching(hidden=64) for _ in range(6))
    return _regression(nn.Sequential(*layers), 32, 64, 64)
