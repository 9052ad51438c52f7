"""Graph auto-encoders, whose loss lists what masks choose of all pairs of nodes: predicted to the byte, with what is recomputed and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import small
from models.outcome import measured_peak, plans_between

pytestmark = pytest.mark.usefixtures("one_thread")

NODES, FEATURES, LATENT = 80, 16, 8


class GraphAutoencoder(nn.Module):
    """One layer over a normalised adjacency, and the probability of each pair of nodes (Kipf and Welling, https://arxiv.org/abs/1611.07308)."""

    def __init__(self, *, variational: bool) -> None:
        super().__init__()
        self.inner, self.mean = nn.Linear(FEATURES, 32), nn.Linear(32, LATENT)
        self.deviation = nn.Linear(32, LATENT) if variational else None
        self.divergence = torch.zeros(())

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """(nodes, features) and (nodes, nodes) to (nodes, nodes)."""
        edges = adjacency.float() + torch.eye(len(x))
        degree = edges.sum(1).rsqrt()
        edges = degree[:, None] * edges * degree
        h = functional.dropout(torch.relu(edges @ self.inner(x)), 0.5, self.training)
        z = edges @ self.mean(h)
        if self.deviation is not None:
            logs = edges @ self.deviation(h)
            self.divergence = -0.5 * (1 + 2 * logs - z**2 - (2 * logs).exp()).mean()
            z = z + torch.randn_like(logs) * logs.exp()
        return torch.sigmoid(z @ z.mT)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Of all edges and of all that are none."""
    p = model(*batch)
    edges = batch[1]
    loss: Tensor = -(p[edges] + 1e-15).log().mean() - (1 - p[~edges] + 1e-15).log().mean()
    divergence = model.divergence
    return loss + divergence if isinstance(divergence, Tensor) and divergence.requires_grad else loss


@pytest.mark.parametrize("variational", [False, True])
def test_what_masks_choose_of_all_pairs_is_predicted_under_recomputation(*, variational: bool) -> None:
    def build() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        edges = torch.rand(NODES, NODES) < 0.1
        return GraphAutoencoder(variational=variational), (torch.randn(NODES, FEATURES), edges), loss_of

    plans = plans_between(*build(), small.adamw, fractions=(1.0, 0.0))
    assert plans[-1].script.recomputations
    for plan in plans:
        assert measured_peak(plan, *build(), small.adamw) == plan.prediction.peak_bytes
