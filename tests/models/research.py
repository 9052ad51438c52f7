"""Models after published ideas, each with a habit that was once predicted wrongly or not at all.

They are small: a plan takes about a second. What each is for stands with its class.
"""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
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


class Recomputed(Function):
    """What a layer makes is forgotten and made anew in backward, in a graph that the first walk through it leaves as it is (Gomez et al., 2017)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        """(batch, hidden) to the same shape."""
        ctx.layer = layer
        ctx.save_for_backward(x)
        y: Tensor = layer(x) * 0.5
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        """Gradients of the input; those of the layer are added to its parameters."""
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x) * 0.5
        torch.autograd.backward(y, gradients[0], retain_graph=True)
        assert x.grad is not None
        return x.grad + (x * y).detach(), None


class NumbersRetained(nn.Module):
    """Products with numbers in a graph that is gone through and kept: their numbers stay."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, hidden) to the same shape."""
        y: Tensor = self.second(Recomputed.apply(self.first(x), self.second))
        return y


def numbers_retained() -> Built:
    """One layer pair, of which the second is run in a function of its own besides."""
    torch.manual_seed(0)
    return NumbersRetained(16), (torch.randn(32, 16), torch.randn(32, 16)), squared_error


def by_a_copy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A copy takes a step on one half of the batch, and the model learns from the other half what that has given (Nichol et al., 2018)."""
    x, target = batch
    copied = copy.deepcopy(model)
    parameters = list(copied.parameters())
    gradients = torch.autograd.grad(functional.mse_loss(copied(x[::2]), target[::2]), parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient, alpha=0.1)
        aim = copied(x[1::2])
    return functional.mse_loss(model(x[1::2]), aim)


def learns_by_a_copy() -> Built:
    """Layers that the loss function copies."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    return model, (torch.randn(64, 16), torch.randn(64, 16)), by_a_copy


class NumbersNotKept(nn.Module):
    """Numbers that torch multiplies by in C++: the scale of attention with dropout, which a CPU computes by formulas, and a product by name."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, hidden) to the same shape."""
        y = self.first(x)
        heads = y.unflatten(1, (2, -1)).unsqueeze(0)
        y = y + functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).flatten(2)[0]
        z: Tensor = self.second(torch.ops.aten.div.Scalar(torch.ops.aten.mul.Scalar(y, 0.3), 1.1))
        return z


def numbers_not_kept() -> Built:
    """One layer pair with numbers that autograd keeps as they are."""
    torch.manual_seed(0)
    return NumbersNotKept(16), (torch.randn(32, 16), torch.randn(32, 16)), squared_error


class Aggregates(nn.Module):
    """A graph layer that gathers messages by mean, largest, smallest and spread, each scaled by degrees (Corso et al., 2020)."""

    target: Tensor
    source: Tensor

    def __init__(self, hidden: int, nodes: int, edges: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * hidden, hidden), nn.Linear(13 * hidden, hidden)
        self.register_buffer("target", torch.randint(nodes, (edges,)))
        self.register_buffer("source", torch.randint(nodes, (edges,)))

    def forward(self, x: Tensor) -> Tensor:
        """(nodes, hidden) to the same shape."""
        message = self.message(torch.cat([x[self.target], x[self.source]], dim=1))
        empty, place = torch.zeros_like(x), self.target.unsqueeze(1).expand_as(message)
        degree = torch.zeros(len(x)).index_add_(0, self.target, torch.ones(len(message))).clamp(min=1).unsqueeze(1)
        mean = empty.index_add(0, self.target, message) / degree
        square = empty.index_add(0, self.target, message * message) / degree
        largest = empty.scatter_reduce(0, place, message, "amax", include_self=False)
        smallest = empty.scatter_reduce(0, place, message, "amin", include_self=False)
        gathered = torch.cat([mean, largest, smallest, (square - mean * mean).relu().add(1e-5).sqrt()], dim=1)
        scale = degree.log1p()
        y: Tensor = self.update(torch.cat([x, gathered, gathered * scale / 1.5, gathered * 1.5 / scale], dim=1))
        return y.relu()


def aggregates() -> Built:
    """Two layers over a random graph of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Aggregates(16, nodes=64, edges=400) for _ in range(2)))
    return model, (torch.randn(64, 16), torch.randn(64, 16)), squared_error


class Adjoint(Function):
    """Euler's method whose backward runs forward again, step by step and back in time (Chen et al., 2018)."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, z: Tensor, steps: int, *parameters: Tensor) -> Tensor:
        """The state at the end, of the same shape as `z`."""
        ctx.field, ctx.steps = field, steps
        for _ in range(steps):
            z = z + field(z) / steps
        ctx.save_for_backward(z, *parameters)
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the state at the beginning and of the field's parameters."""
        (adjoint,) = grads
        z, *parameters = ctx.saved_tensors
        sums = [torch.zeros_like(p) for p in parameters]
        for _ in range(ctx.steps):
            with torch.enable_grad():
                before = z.detach().requires_grad_()
                slope = ctx.field(before)
                to_z, *to_parameters = torch.autograd.grad(slope, (before, *parameters), adjoint)
            z = z - slope.detach() / ctx.steps
            adjoint = adjoint + to_z / ctx.steps
            sums = [total + found / ctx.steps for total, found in zip(sums, to_parameters, strict=True)]
        return None, adjoint, None, *sums


class Solved(nn.Module):
    """A linear layer, a differential equation, a linear layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.field = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.Tanh(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, hidden) to the same shape."""
        z: Tensor = Adjoint.apply(self.field, self.first(x), 6, *self.field.parameters())  # type: ignore[no-untyped-call]
        y: Tensor = self.last(z)
        return y


def adjoint_solver() -> Built:
    """Six steps of Euler's method."""
    torch.manual_seed(0)
    return Solved(16), (torch.randn(96, 16), torch.randn(96, 16)), squared_error


class Chosen(nn.Module):
    """Entries and rows that masks choose: kernels list the places first, which takes more than the mask."""

    entries: Tensor
    rows: Tensor

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(hidden, hidden), nn.Linear(hidden, 1)
        self.register_buffer("entries", torch.rand(rows, hidden) < 0.9)
        self.register_buffer("rows", torch.rand(rows) < 0.8)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, hidden) to a scalar."""
        h = self.first(x).sigmoid()
        chosen: Tensor = h[self.entries].square().mean() - h[~self.entries].log().mean()
        return chosen + self.last(h[self.rows]).square().mean()


def chosen_by_masks() -> Built:
    """Two masks of entries and one of rows."""
    torch.manual_seed(0)
    return Chosen(128, 32), torch.randn(128, 32), lambda model, x: model(x)


class DeeplySupervised(nn.Module):
    """A U-Net that gives an output at each level, all interpolated to the size of the image (Dou et al., 2016)."""

    def __init__(self, channels: tuple[int, ...], classes: int) -> None:
        super().__init__()
        steps = tuple(pairwise(channels))
        self.first = nn.Conv2d(3, channels[0], 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(steps))
        self.merge = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a, _ in reversed(steps))
        self.heads = nn.ModuleList(nn.Conv2d(width, classes, 1) for width in reversed(channels))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Images (batch, 3, H, W) to a list of scores (batch, classes, H, W), coarsest first."""
        size, skips = x.shape[2:], []
        x = self.first(x).relu()
        for down in self.down:
            skips.append(x)
            x = down(functional.max_pool2d(x, 2)).relu()
        found = [x]
        for up, merge in zip(self.up, self.merge, strict=True):
            found.append(merge(torch.cat([skips.pop(), up(found[-1])], dim=1)).relu())
        scores = (head(x) for head, x in zip(self.heads, found, strict=True))
        return [functional.interpolate(each, size=size, mode="bilinear") for each in scores]


def at_every_depth(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The sum of the cross entropies at all levels, the finer ones counting more."""
    x, y = batch
    return torch.stack([functional.cross_entropy(each, y) * 2**level for level, each in enumerate(model(x))]).sum()


def deeply_supervised() -> Built:
    """Three levels, three outputs."""
    torch.manual_seed(0)
    sample = torch.randn(4, 3, 16, 16), torch.randint(3, (4, 16, 16))
    return DeeplySupervised((4, 8, 16), 3), sample, at_every_depth
