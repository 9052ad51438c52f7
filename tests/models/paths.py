"""Programs whose forward takes another path from step to step: by chance, by torch's, Python's or numpy's numbers, or by a count of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, CLASSES = 32, 10


class Block(nn.Module):
    """A residual block with dropout; its inside is worth dropping."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))
        return y


class Blocks(nn.Module):
    """All blocks, one after the other; the others say which are run."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def chosen(self) -> Iterator[nn.Module]:
        yield from self.blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.chosen():
            x = block(x)
        y: Tensor = self.head(x)
        return y


class LeftOutByTorch(Blocks):
    """Layer dropout (Fan et al., 2020) as Hugging Face's models draw it."""

    def chosen(self) -> Iterator[nn.Module]:
        return (block for block in self.blocks if torch.rand([]) >= 0.3)


class LeftOutByPython(Blocks):
    def chosen(self) -> Iterator[nn.Module]:
        return (block for block in self.blocks if random.random() >= 0.3)


class LeftOutByNumpy(Blocks):
    def chosen(self) -> Iterator[nn.Module]:
        return (block for block in self.blocks if np.random.uniform(0, 1) >= 0.3)  # noqa: NPY002 - as models do


class EveryOtherStep(Blocks):
    """Leaves blocks out in every second forward, by a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def chosen(self) -> Iterator[nn.Module]:
        self.forwards += 1
        return (block for n, block in enumerate(self.blocks) if n % 2 == 0 or self.forwards % 2 == 0)


class Passes(Blocks):
    """Runs the same two blocks one to four times."""

    def chosen(self) -> Iterator[nn.Module]:
        for _ in range(int(torch.randint(1, 5, (1,)))):
            yield from self.blocks[:2]


class Exchanged(Blocks):
    """One of two alike blocks at each depth: the operations are the same, the parameters that get gradients are not."""

    def __init__(self) -> None:
        super().__init__(6)

    def chosen(self) -> Iterator[nn.Module]:
        return (self.blocks[2 * depth + random.randint(0, 1)] for depth in range(3))


class SelfConditioned(Blocks):
    """Half of the time on what it said before, without gradients (Chen et al., 2022)."""

    def __init__(self, *, gradients: bool = False) -> None:
        super().__init__()
        self.condition = nn.Linear(CLASSES, HIDDEN)
        self.gradients = gradients

    def run(self, x: Tensor, said: Tensor) -> Tensor:
        return Blocks.forward(self, x + self.condition(said))

    def forward(self, x: Tensor) -> Tensor:
        said = torch.zeros(*x.shape[:-1], CLASSES)
        if random.random() < 0.5:
            with torch.set_grad_enabled(self.gradients):
                said = self.run(x, said)
        return self.run(x, said)


class Cropped(Blocks):
    """Sees a random stretch of the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        seen = random.randint(tokens // 4, tokens)
        return functional.pad(super().forward(x[:, :seen]), (0, 0, 0, tokens - seen))


class Quantised(Blocks):
    """A residual quantiser of which some stages are left out (SoundStream)."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.ParameterList(nn.Parameter(0.1 * torch.randn(16, HIDDEN)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        rest, found = x, torch.zeros_like(x)
        for codes in self.codes[: random.randint(1, 4)]:
            nearest = torch.cdist(rest.flatten(0, 1), codes).argmin(-1)
            code = codes[nearest].view_as(x)
            found, rest = found + code, rest - code
        return super().forward(x + (found - x.detach()) + found)


class Augmented(Blocks):
    """Changes its input in one way or another, or not."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            x = x.flip(1)
        if random.random() < 0.5:
            x = x + 0.1 * torch.randn_like(x)
        if random.random() < 0.3:
            x = x * (torch.rand_like(x) > 0.2)
        return super().forward(x)


class Branches(nn.Module):
    """Chance decides inside each block, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.second):
            if torch.rand(1).item() > 0.3:
                x = part(x)
        return x


class LeftOutInside(Blocks):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks.extend(Branches() for _ in range(3))


class OneOfTwo(Blocks):
    """One of two stacks that run other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = nn.ModuleList(Gated() for _ in range(4))

    def chosen(self) -> Iterator[nn.Module]:
        yield from self.blocks if random.random() < 0.5 else self.gated


class Gated(nn.Module):
    """A gated block, wider than `Block`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(HIDDEN, 4 * HIDDEN),
            nn.Linear(HIDDEN, 4 * HIDDEN),
            nn.Linear(4 * HIDDEN, HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(functional.silu(self.gate(x)) * self.up(x).tanh())
        return y


PROGRAMS: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (
        LeftOutByTorch,
        LeftOutByPython,
        LeftOutByNumpy,
        EveryOtherStep,
        Passes,
        Exchanged,
        SelfConditioned,
        Cropped,
        Quantised,
        Augmented,
        LeftOutInside,
        OneOfTwo,
    )
}


def sample(rows: int = 8, tokens: int = 32) -> tuple[Tensor, Tensor]:
    """A batch (rows, tokens, hidden) and its classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, tokens, HIDDEN, generator=generator), torch.randint(
        CLASSES, (rows, tokens), generator=generator
    )


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy over all tokens."""
    x, classes = batch
    return functional.cross_entropy(model(x).flatten(0, 1), classes.flatten())


def seeded(number: int) -> None:
    """Seed every generator that the programs draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - as above
