"""Recurrent networks, differential equations, spikes, memories."""

from __future__ import annotations

from typing import Any

import torch
from programs.program import own_loss, program
from torch.nn import functional


class _Field(torch.nn.Module):
    """The right-hand side of a differential equation."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.Tanh(), torch.nn.Linear(64, width))

    def forward(self, time: Any, x: Any) -> Any:
        return self.body(x) + 0.1 * time


class _Solved(torch.nn.Module):
    """A linear layer, an equation solved over time, a head."""

    def __init__(self, solve: Any, field: Any, width: int = 32) -> None:
        super().__init__()
        self.first, self.field, self.head = torch.nn.Linear(8, width), field, torch.nn.Linear(width, 4)
        self.solve = solve

    def forward(self, x: Any, classes: Any) -> Any:
        x = self.solve(self.field, self.first(x), torch.linspace(0.0, 1.0, 3))
        return functional.cross_entropy(self.head(x[-1]), classes)


def _points(rows: int = 256) -> tuple[Any, Any]:
    return torch.randn(rows, 8), torch.randint(4, (rows,))


def _rk4(field: Any, x: Any, times: Any) -> Any:
    from torchdiffeq import odeint

    return odeint(field, x, times, method="rk4", options={"step_size": 0.25})


def _adjoint(field: Any, x: Any, times: Any) -> Any:
    from torchdiffeq import odeint_adjoint

    return odeint_adjoint(field, x, times, method="rk4", options={"step_size": 0.25})


@program("torchdiffeq", "ODE by Runge-Kutta with fixed steps")
def fixed_steps() -> tuple[Any, Any, Any]:
    import torchdiffeq  # noqa: F401 - said to be missing here, not in the first step

    return _Solved(_rk4, _Field()).train(), _points(), own_loss


@program("torchdiffeq", "ODE with the adjoint method")
def adjoint() -> tuple[Any, Any, Any]:
    import torchdiffeq  # noqa: F401 - as above

    return _Solved(_adjoint, _Field()).train(), _points(), own_loss


@program("torchsde", "stochastic differential equation, Euler")
def stochastic() -> tuple[Any, Any, Any]:
    import torchsde

    class Drift(torch.nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift = _Field(16)
            self.scale = torch.nn.Linear(16, 16)
            self.head = torch.nn.Linear(16, 1)

        def f(self, t: Any, y: Any) -> Any:
            return self.drift(t, y)

        def g(self, t: Any, y: Any) -> Any:  # noqa: ARG002 - the solver's signature
            return self.scale(y).sigmoid()

        def forward(self, x: Any) -> Any:
            path = torchsde.sdeint(self, x, torch.linspace(0.0, 1.0, 3), method="euler", dt=0.25)
            return self.head(path[-1]).square().mean()

    return Drift().train(), (torch.randn(128, 16),), own_loss


@program("snntorch", "leaky spiking neurons over time, surrogate gradients")
def spiking() -> tuple[Any, Any, Any]:
    import snntorch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                (torch.nn.Linear(32, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 10))
            )
            self.neurons = torch.nn.ModuleList(snntorch.Leaky(beta=0.9, learn_beta=True) for _ in self.layers)

        def forward(self, x: Any, classes: Any) -> Any:
            held = [neuron.init_leaky() for neuron in self.neurons]
            total: Any = 0.0
            for now in x.unbind(1):
                y = now
                for n, (layer, neuron) in enumerate(zip(self.layers, self.neurons, strict=True)):
                    y, held[n] = neuron(layer(y), held[n])
                total = total + functional.cross_entropy(held[-1], classes)
            return total

    return Net().train(), (torch.randn(64, 10, 32), torch.randint(10, (64,))), own_loss


@program("discrete-key-value-bottleneck-pytorch", "keys moved by averages, values learned")
def bottleneck() -> tuple[Any, Any, Any]:
    from discrete_key_value_bottleneck_pytorch import DiscreteKeyValueBottleneck

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
            self.keys = DiscreteKeyValueBottleneck(
                dim=64, num_memories=32, dim_memory=32, num_memory_codebooks=2, decay=0.9
            )

        def forward(self, x: Any) -> Any:
            return self.keys(self.body(x)).square().mean()

    return Net().train(), (torch.randn(8, 64, 32),), own_loss


@program("slot-attention", "slots that compete, gated recurrent updates")
def slots() -> tuple[Any, Any, Any]:
    from slot_attention import SlotAttention

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.slots, self.head = (
                torch.nn.Linear(16, 32),
                SlotAttention(num_slots=5, dim=32, iters=3),
                torch.nn.Linear(32, 16),
            )

        def forward(self, x: Any) -> Any:
            return functional.mse_loss(self.head(self.slots(self.first(x))).mean(1), x.mean(1))

    return Net().train(), (torch.randn(16, 64, 16),), own_loss


@program("perceiver-pytorch", "Perceiver IO")
def perceiver() -> tuple[Any, Any, Any]:
    from perceiver_pytorch import PerceiverIO

    model = PerceiverIO(
        dim=32,
        queries_dim=32,
        logits_dim=10,
        depth=2,
        num_latents=16,
        latent_dim=64,
        cross_heads=1,
        latent_heads=4,
        cross_dim_head=16,
        latent_dim_head=16,
        weight_tie_layers=True,
        seq_dropout_prob=0.2,
    )

    def loss(m: Any, b: Any) -> Any:
        x, queries, classes = b
        return functional.cross_entropy(m(x, queries=queries).flatten(0, 1), classes.flatten())

    return model.train(), (torch.randn(8, 128, 32), torch.randn(8, 16, 32), torch.randint(10, (8, 16))), loss


@program("pykan", "Kolmogorov-Arnold network")
def kan() -> tuple[Any, Any, Any]:
    from kan import KAN

    model = KAN(width=[4, 3, 1], grid=3, k=3, seed=0, auto_save=False)
    return model.train(), (torch.rand(256, 4), torch.rand(256, 1)), lambda m, b: functional.mse_loss(m(b[0]), b[1])


@program("g-mlp-pytorch", "gMLP with layers left out", changing=True)
def g_mlp() -> tuple[Any, Any, Any]:
    from g_mlp_pytorch import gMLP

    model = gMLP(num_tokens=256, dim=32, depth=4, seq_len=32, causal=True, prob_survival=0.8)
    return (
        model.train(),
        torch.randint(256, (8, 32)),
        lambda m, x: functional.cross_entropy(m(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()),
    )
