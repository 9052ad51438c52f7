"""Programs that are unusual by how modules are called: by the loss, several times, inside each other, under hooks, checkpoints and handled errors.

Each has a model and a loss of a batch of two tensors of rows. What they compute means nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 48

LossOf = Callable[[Any, tuple[Tensor, Tensor]], Tensor]
Program = tuple[nn.Module, LossOf]
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(build: Callable[[], Program]) -> Callable[[], Program]:
    """One of them."""
    PROGRAMS[build.__name__] = build
    return build


def batch(rows: int = 256) -> tuple[Tensor, Tensor]:
    """The same for all."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def mlp() -> nn.Sequential:
    """A block."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Residual(nn.Module):
    """Blocks that add to what they read, between two layers."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(mlp() for _ in range(count))
        self.out = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks[:3]:
            x = x + block(x)
        return x

    def decode(self, x: Tensor) -> Tensor:
        for block in self.blocks[3:]:
            x = x + block(x)
        found: Tensor = self.out(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def once(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(both[0]), both[1])


def twice(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
    other: Tensor = model(both[1])
    return once(model, both) + other.square().mean()


# -- the loss calls --------------------------------------------------------------------------------------------------------------


@program
def two_dropout_masks() -> Program:
    class Dropping(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(super().forward(x), 0.1)

    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        first, second = model(both[0]), model(both[0])
        apart = functional.kl_div(
            functional.log_softmax(first, -1),
            functional.log_softmax(second, -1),
            log_target=True,
            reduction="batchmean",
        )
        return functional.mse_loss(first, both[1]) + apart

    return Dropping(), loss


@program
def parts_of_the_model() -> Program:
    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        code: Tensor = model.encode(both[0])
        return functional.mse_loss(model.decode(code), both[1]) + 0.1 * code.square().mean()

    return Residual(), loss


@program
def one_part_twice() -> Program:
    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        code = model.encode(both[0])
        return functional.mse_loss(model.decode(code), both[1]) + functional.mse_loss(
            model.decode(code.flip(0)), both[1]
        )

    return Residual(), loss


@program
def the_model_and_its_parts() -> Program:
    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        return once(model, both) + functional.mse_loss(model.encode(both[1]), model.encode(both[0]))

    return Residual(), loss


@program
def views_of_a_batch() -> Program:
    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        both_at_once = torch.cat(both)
        first, second = model(both_at_once).chunk(2)
        alone: Tensor = model(both_at_once[::2])
        return functional.mse_loss(first, both[1]) + (first * second).mean() + alone.abs().mean()

    return Residual(), loss


@program
def generator_and_critic() -> Program:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = Residual(), Residual(4)

    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        made = model.generator(both[0])
        judged = functional.softplus(-model.critic(both[1])).mean() + functional.softplus(model.critic(made)).mean()
        return judged + functional.l1_loss(made, both[1])

    return Both(), loss


@program
def step_within_the_loss() -> Program:
    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        weight = model.out.weight
        (gradient,) = torch.autograd.grad(once(model, both), weight, create_graph=True)
        return functional.mse_loss(
            functional.linear(model.decode(model.encode(both[1])), weight - 0.1 * gradient), both[0]
        )

    return Residual(), loss


@program
def gradient_of_the_input() -> Program:
    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        x = both[0].clone().requires_grad_()
        made = model(x)
        (gradient,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        return functional.mse_loss(made, both[1]) + gradient.norm(dim=-1).sub(1).square().mean()

    return Residual(), loss


@program
def parameters_handed_in() -> Program:
    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        scaled = {name: parameter * 1.0 for name, parameter in model.named_parameters()}
        made: Tensor = torch.func.functional_call(model, scaled, (both[0],))
        return functional.mse_loss(made, both[1]) + once(model, both)

    return Residual(), loss


@program
def triplets() -> Program:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Residual(), mlp()

        def forward(self, *each: Tensor) -> list[Tensor]:
            return [self.head(self.encoder(x)) for x in each]

    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        return functional.triplet_margin_loss(*model(*both, both[0].flip(0)))

    return Embedding(), loss


# -- modules call each other -----------------------------------------------------------------------------------------------------


@program
def layers_again() -> Program:
    class Again(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            for _ in range(3):
                for block in self.blocks:
                    x = x + block(x)
            return self.decode(x)

    return Again(), once


class Calls(nn.Module):
    """Calls itself, so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = mlp()

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = x + self.block(x)
        if not times:
            return x
        found: Tensor = self(x, times - 1) + x
        return found


@program
def recursion() -> Program:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.out = Calls(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.calls(x, 2) + self.calls(x.flip(0), 3))
            return found

    return Recursive(), twice


class Tree(nn.Module):
    """Two of its kind below each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.block = mlp()
        self.below = nn.ModuleList([Tree(depth - 1), Tree(depth - 1)] if depth else [])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.block(x)
        for each in self.below:
            x = x + 0.1 * each(x)
        return x


@program
def tree() -> Program:
    return Tree(3), once


@program
def one_module_in_several_places() -> Program:
    class Shared(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[4] = self.blocks[0]
            self.again = self.blocks[2]

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.again(super().forward(x)) + x
            return found

    return Shared(), once


@program
def a_model_around_a_model() -> Program:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Residual(), nn.Linear(WIDTH, WIDTH)

        def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
            return self.head(self.inner(first)), self.head(self.inner(second)), self.inner(first - second)

    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        first, second, apart = model(*both)
        return functional.mse_loss(first, second) + apart.square().mean() + functional.mse_loss(first, both[1])

    return Around(), loss


@program
def keywords_and_dictionaries() -> Program:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = mlp()

        def forward(self, *, x: Tensor, scale: float | None = None) -> dict[str, Tensor]:
            added = self.block(x) if scale is None else self.block(x) * scale
            return {"x": x + added, "also": added.mean()}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.out = nn.ModuleList(Block() for _ in range(5)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            also = x.new_zeros(())
            for number, block in enumerate(self.blocks):
                made = block(x=x, scale=None if number % 2 else 0.5)
                x, also = made["x"], also + made["also"]
            return self.out(x), also

    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        (first, also), (second, other) = model(both[0]), model(both[1])
        return functional.mse_loss(first, both[1]) + also * other + second.abs().mean()

    return Model(), loss


@program
def a_generator() -> Program:
    class Yielding(Residual):
        def states(self, x: Tensor) -> Iterator[Tensor]:
            x = self.into(x)
            for block in self.blocks:
                x = x + block(x)
                yield x

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(torch.stack(list(self.states(x))).sum(0))
            return found

    return Yielding(), twice


@program
def calls_that_run_nothing() -> Program:
    class Idle(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.same, self.kept = nn.Identity(), nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            x = self.same(self.into(self.same(x)))
            for block in self.blocks:
                x = self.kept(self.same(x) + self.kept(block(self.same(x))))
            found: Tensor = self.same(self.out(self.kept(x)))
            return found

    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        idle: Tensor = model.kept(model(both[0] + both[1]))
        return twice(model, both) + idle.abs().mean()

    return Idle(), loss


@program
def every_state_is_judged() -> Program:
    class Judged(Residual):
        def forward(self, x: Tensor) -> Any:
            found, x = [], self.into(x)
            for block in self.blocks:
                x = x + block(x)
                found.append(self.out(x))
            return found

    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        return torch.stack([functional.mse_loss(each, both[1]) for each in model(both[0])]).sum()

    return Judged(), loss


# -- what is around calls --------------------------------------------------------------------------------------------------------


@program
def hooks_that_compute() -> Program:
    model = Residual()
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, output: output * 1.01)
    model.into.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
    return model, twice


@program
def hooks_for_one_forward() -> Program:
    class Looking(Residual):
        def forward(self, x: Tensor) -> Tensor:
            seen: list[Tensor] = []

            def look(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
                seen.append(output)
                return output + 0.1

            handle = self.blocks[2].register_forward_hook(look)
            try:
                return super().forward(x) + seen[0] if seen else super().forward(x)
            finally:
                handle.remove()

    return Looking(), twice


@program
def checkpoints_of_the_users() -> Program:
    class Checkpointing(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            for number, block in enumerate(self.blocks):
                x = x + (checkpoint(block, x, use_reentrant=False) if number % 2 else block(x))
            found: Tensor = self.out(x)
            return found

    return Checkpointing(), twice


@program
def calls_that_fail() -> Program:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(f"no kernel for {tuple(self.layer(x).shape)}")

    class Trying(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.fast = Fails()

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            for block in self.blocks:
                try:
                    x = x + self.fast(x)
                except ValueError:
                    x = x + block(x)
            found: Tensor = self.out(x)
            return found

    return Trying(), twice


@program
def parametrizations() -> Program:
    model = Residual()
    for block in model.blocks:
        assert isinstance(block, nn.Sequential)
        nn.utils.parametrizations.spectral_norm(block[1])
        nn.utils.parametrizations.weight_norm(block[3])
    return model, twice


@program
def a_teacher_that_follows() -> Program:
    class Following(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = Residual()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                for mean, parameter in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mean.lerp_(parameter, 0.01)
                told = self.teacher(y)
            return functional.mse_loss(self.student(x), told) + functional.mse_loss(self.student(y), told)

    def loss(model: Any, both: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = model(*both)
        return found

    return Following(), loss


@program
def adapters() -> Program:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Linear(base.in_features, 4, bias=False)
            self.up = nn.Linear(4, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.base(x) + self.up(self.down(x))
            return found

    model = Residual().requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, nn.Sequential)
        for number in (1, 3):
            base = block[number]
            assert isinstance(base, nn.Linear)
            block[number] = Adapter(base)
    return model, twice
