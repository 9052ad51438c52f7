"""Graphs, molecules and other geometry."""

from __future__ import annotations

from typing import Any

import torch
from programs.program import program
from torch.nn import functional


def _graph(nodes: int = 200, edges: int = 800, features: int = 16) -> dict[str, Any]:
    return {
        "x": torch.randn(nodes, features),
        "edges": torch.randint(nodes, (2, edges)),
        "classes": torch.randint(4, (nodes,)),
    }


def _nodes(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch["x"], batch["edges"]), batch["classes"])


@program("torch_geometric", "GAT, dropout of attention")
def gat() -> tuple[Any, Any, Any]:
    from torch_geometric.nn import GAT

    return GAT(16, 32, 3, out_channels=4, heads=4, dropout=0.3, v2=True).train(), _graph(), _nodes


@program("torch_geometric", "GraphSAGE with jumping knowledge and batch norm")
def sage() -> tuple[Any, Any, Any]:
    from torch_geometric.nn import GraphSAGE

    return GraphSAGE(16, 64, 3, out_channels=4, jk="cat", norm="batch_norm", dropout=0.2).train(), _graph(), _nodes


@program("torch_geometric", "PNA")
def pna() -> tuple[Any, Any, Any]:
    from torch_geometric.nn import PNA

    model = PNA(
        16,
        32,
        3,
        out_channels=4,
        aggregators=["mean", "min", "max", "std"],
        scalers=["identity", "amplification"],
        deg=torch.tensor([0, 20, 60, 60, 60]),
    )
    return model.train(), _graph(), _nodes


@program("torch_geometric", "edges left out", changing=True)
def dropped_edges() -> tuple[Any, Any, Any]:
    from torch_geometric.nn import GCN
    from torch_geometric.utils import dropout_edge

    def loss(m: Any, b: Any) -> Any:
        edges, _ = dropout_edge(b["edges"], p=0.3, training=m.training)
        return functional.cross_entropy(m(b["x"], edges), b["classes"])

    return GCN(16, 64, 4, out_channels=4).train(), _graph(), loss


@program("torch_geometric", "graph autoencoder with negative edges drawn in the loss")
def graph_autoencoder() -> tuple[Any, Any, Any]:
    from torch_geometric.nn import GCN, VGAE

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = GCN(16, 64, 2, out_channels=64)
            self.mean, self.scale = torch.nn.Linear(64, 16), torch.nn.Linear(64, 16)

        def forward(self, x: Any, edges: Any) -> Any:
            x = self.body(x, edges).relu()
            return self.mean(x), self.scale(x)

    def loss(m: Any, b: Any) -> Any:
        z = m.encode(b["x"], b["edges"])
        return m.recon_loss(z, b["edges"]) + m.kl_loss() / 200

    return VGAE(Encoder()).train(), _graph(), loss


@program("torch_geometric", "Graph U-Net: nodes pooled away by score")
def graph_unet() -> tuple[Any, Any, Any]:
    from torch_geometric.nn import GraphUNet

    return GraphUNet(16, 32, 4, depth=2, pool_ratios=0.5).train(), _graph(), _nodes


@program("torch_geometric", "SchNet: energies of molecules and forces by a gradient in the loss")
def schnet() -> tuple[Any, Any, Any]:
    from torch_geometric.nn import SchNet

    class Forces(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = SchNet(
                hidden_channels=32,
                num_filters=32,
                num_interactions=2,
                num_gaussians=16,
                cutoff=5.0,
                interaction_graph=_pairs,
            )

        def forward(self, z: Any, places: Any, molecule: Any) -> Any:
            places = places.detach().requires_grad_()
            energy = self.body(z, places, molecule)
            (force,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
            return energy, force

    def loss(m: Any, b: Any) -> Any:
        energy, force = m(b["z"], b["places"], b["molecule"])
        return functional.mse_loss(energy, b["energy"]) + functional.mse_loss(force, b["force"])

    batch = {
        "z": torch.randint(1, 9, (48,)),
        "places": torch.randn(48, 3),
        "molecule": torch.arange(4).repeat_interleave(12),
        "energy": torch.randn(4, 1),
        "force": torch.randn(48, 3),
    }
    return Forces().train(), batch, loss


def _pairs(places: Any, molecule: Any) -> Any:
    """All pairs within a molecule, in place of a search for neighbours that needs a compiled package."""
    near = (molecule[:, None] == molecule[None]) & ~torch.eye(len(molecule), dtype=torch.bool)
    edges = near.nonzero().T
    return edges, (places[edges[0]] - places[edges[1]]).norm(dim=-1)


@program("e3nn", "equivariant linear layers, gates and tensor products")
def equivariant() -> tuple[Any, Any, Any]:
    from e3nn import o3

    class Body(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            irreps = o3.Irreps("8x0e + 8x1o")
            self.first = o3.Linear("4x0e + 1x1o", irreps)
            self.products = torch.nn.ModuleList(
                o3.FullyConnectedTensorProduct(irreps, "1x0e + 1x1o", irreps) for _ in range(3)
            )
            self.head = o3.Linear(irreps, "1x0e")

        def forward(self, x: Any, y: Any) -> Any:
            x = self.first(x)
            for product in self.products:
                x = x + product(x, o3.spherical_harmonics("1x0e + 1x1o", y, normalize=True)).tanh()
            return self.head(x)

    return Body().train(), (torch.randn(256, 7), torch.randn(256, 3)), lambda m, b: m(*b).square().mean()


@program("egnn-pytorch", "equivariant network over nearest neighbours")
def egnn() -> tuple[Any, Any, Any]:
    from egnn_pytorch import EGNN_Network

    model = EGNN_Network(
        num_tokens=21,
        num_positions=32,
        dim=16,
        depth=3,
        num_nearest_neighbors=6,
        norm_coors=True,
        coor_weights_clamp_value=2.0,
    )

    def loss(m: Any, b: Any) -> Any:
        x, places = m(*b)
        return x.square().mean() + places.square().mean()

    return model.train(), (torch.randint(21, (2, 32)), torch.randn(2, 32, 3)), loss
