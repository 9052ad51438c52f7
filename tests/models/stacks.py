"""Random models of repeated blocks, small enough to train in milliseconds: for what moves whole layers, of which random programs (`programs`) have none.

What blocks consist of is drawn, and so is what lies around them: parts that blocks share or that both ends share, tensors made outside that every block
reads, blocks that are not all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

WIDTH: Final = 8
SHAPE: Final = (6, 4, WIDTH)  # parts of 6, 3 and 2 samples
BLOCKS: Final = (3, 6)  # two of them are on the device at once


class Scale(nn.Module):
    """A factor for each element."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Scaled."""
        return x * self.factor


class Gate(nn.Module):
    """What is read twice in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.open = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gated."""
        return x * torch.sigmoid(self.open(x))


LAYERS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no_bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "scale": Scale,
    "gate": Gate,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "relu_": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.2),
}
WITH_PARAMETERS: Final = ("linear", "no_bias", "wide", "layer_norm", "rms_norm", "scale", "gate")
SHARED: Final = ("nothing", "ends", "inside")
BESIDE: Final = ("nothing", "mask", "learned")


class Block(nn.Module):
    """Layers one after the other.

    Args:
        layers: their names.
        residual: the block's input is added to what they make.
        shared: used in front of them, and elsewhere.
    """

    def __init__(self, layers: Sequence[str], shared: nn.Module | None, *, residual: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(LAYERS[name]() for name in layers))
        self.shared = shared
        self.residual = residual

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """The block's output."""
        y = x if beside is None else x + beside
        if self.shared is not None:
            y = self.shared(y)
        y = self.layers(y * 1)  # a copy: the first layer may write in place
        return x + y if self.residual else y


@dataclass(frozen=True, slots=True)
class Drawn:
    """How a stack is made.

    Attributes:
        blocks: names of the layers of each.
        residual: of the blocks.
        shared: what shares a layer: nothing, both ends of the stack, or the blocks ("inside").
        beside: what every block reads beside its input: nothing, a mask, or something with a gradient.
        seed: of parameters and sample.
        frozen: patterns of what is not trained.
        parts: micro-batches.
    """

    blocks: tuple[tuple[str, ...], ...]
    residual: bool = True
    shared: str = "nothing"
    beside: str = "nothing"
    seed: int = 0
    frozen: tuple[str, ...] = ()
    parts: int = 1

    def sample(self) -> Tensor:
        """A batch of the shape that the stack takes."""
        return torch.randn(SHAPE, generator=torch.Generator().manual_seed(self.seed))


class Stack(nn.Module):
    """Blocks between two layers."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(drawn.seed)
            self.first = nn.Linear(WIDTH, WIDTH)
            self.common = nn.Linear(WIDTH, WIDTH) if drawn.shared == "inside" else None
            self.blocks = nn.ModuleList(Block(layers, self.common, residual=drawn.residual) for layers in drawn.blocks)
            self.last = self.first if drawn.shared == "ends" else nn.Linear(WIDTH, WIDTH)
            self.aside = nn.Linear(WIDTH, WIDTH) if drawn.beside == "learned" else None
        self.masked = drawn.beside == "mask"

    def forward(self, x: Tensor) -> Tensor:
        """All blocks, the layer before and the layer after."""
        beside = (x.detach() > 0).float() if self.masked else None
        if self.aside is not None:
            beside = self.aside(x)
        x = self.first(x)
        for block in self.blocks:
            x = block(x, beside)
        return functional.tanh(self.last(x))


def stack_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean of squares."""
    found: Tensor = model(batch).square().mean()
    return found


def _runs(layers: Sequence[str]) -> bool:
    """Whether there is something to move, and no write into what autograd has saved, which plain PyTorch refuses."""
    spoiled = any(pair in {("tanh", "relu_"), ("relu_", "relu_")} for pair in pairwise(layers))
    return not spoiled and any(name in WITH_PARAMETERS for name in layers)


@st.composite
def stacks(draw: st.DrawFn) -> Drawn:
    """How a stack is made for which streaming promises the bits of plain PyTorch: in parts, nothing is drawn at random and nothing shared."""
    parts = draw(st.integers(1, 3))
    names = [name for name in LAYERS if parts == 1 or name != "dropout"]
    contents = st.lists(st.sampled_from(names), min_size=1, max_size=4).filter(_runs)
    kinds = draw(st.lists(contents.map(tuple), min_size=1, max_size=2))
    count = draw(st.integers(*BLOCKS))
    paths = ["first", "last", *(f"blocks.{number}" for number in range(count))]
    return Drawn(
        tuple(kinds[number % len(kinds)] for number in range(count)),
        draw(st.booleans()),
        draw(st.sampled_from(SHARED)) if parts == 1 else "nothing",
        draw(st.sampled_from(BESIDE)),
        draw(st.integers(0, 99)),
        tuple(draw(st.lists(st.sampled_from(paths), max_size=3, unique=True))),
        parts,
    )
