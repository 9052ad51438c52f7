"""A step that fails leaves everything as it was after the step before, says why, and the next one works: out of memory anywhere, batches that are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from faults.runs import alike

pytestmark = pytest.mark.usefixtures("one_thread")

# As torch words them, for the CPU and for a GPU.
ERRORS = {
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 1099511627776 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "gpu": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
}
STEPS = 6
FAILING = 3  # from 0


class Net(nn.Module):
    """Dropout, batch norm, enough activations to drop some."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU(), nn.Tanh()
        )
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean()
    return found


def batch(number: int, size: int = 64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 8, generator=generator)
    return {"x": x, "y": x.sum(1).sin()}


def engine() -> memfit.Engine:
    torch.manual_seed(5)
    made = memfit.plan(
        Net(), batch(0), loss_of, 1 << 40, lambda p: torch.optim.AdamW(p, lr=0.01), fixed={"micro_batches": 1}
    )
    made = memfit.replan(made, made.runtime.search.smallest()[0])
    assert not made.script.plain
    torch.manual_seed(5)
    return memfit.apply(made, Net())


def state_of(made: memfit.Engine) -> dict[str, Any]:
    assert made.optimizer is not None
    return {
        "model": {name: value.clone() for name, value in made.model.state_dict().items()},
        "gradients": [p.grad for p in made.model.parameters()],
        "optimizer": [
            {name: value.clone() for name, value in made.optimizer.state[p].items()}
            for p in made.model.parameters()
            if p in made.optimizer.state
        ],
        "generator": torch.get_rng_state(),
    }


@pytest.fixture(scope="module")
def untouched() -> list[dict[str, Any]]:
    """State after each step when nothing happens."""
    made = engine()
    torch.manual_seed(11)
    states = []
    for number in range(STEPS):
        made.step(batch(number))
        states.append(state_of(made))
    return states


@contextmanager
def in_a_layer(made: memfit.Engine, error: BaseException) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise error

    hook = made.model.body[4].register_forward_hook(fail)  # type: ignore[index,union-attr]
    yield
    hook.remove()


@contextmanager
def in_the_loss(made: memfit.Engine, error: BaseException) -> Iterator[None]:
    before = made.loss_fn

    def fail(model: nn.Module, given: Any) -> Tensor:
        model(given["x"])
        raise error

    made.loss_fn = fail
    yield
    made.loss_fn = before


def _in_backward_of(place: int) -> Callable[[memfit.Engine, BaseException], Any]:
    @contextmanager
    def failing(made: memfit.Engine, error: BaseException) -> Iterator[None]:
        def fail(gradient: Tensor) -> None:
            raise error

        hook = list(made.model.parameters())[place].register_hook(fail)
        yield
        hook.remove()

    return failing


@contextmanager
def before_the_update(made: memfit.Engine, error: BaseException) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise error

    assert made.optimizer is not None
    hook = made.optimizer.register_step_pre_hook(fail)
    yield
    hook.remove()


@contextmanager
def in_the_middle_of_the_update(made: memfit.Engine, error: BaseException) -> Iterator[None]:
    """After the first parameter has changed: a copy of all of them, which undoing takes, is what nobody has room for."""
    optimizer = made.optimizer
    assert optimizer is not None
    step = optimizer.step

    def fail(*_: Any) -> None:
        rest = [p for p in made.model.parameters() if p.grad is not None][1:]
        for parameter in rest:
            parameter.grad = None
        step()
        raise error

    optimizer.step = fail  # type: ignore[method-assign,assignment]
    yield
    optimizer.step = step  # type: ignore[method-assign]


PLACES: dict[str, Callable[[memfit.Engine, BaseException], Any]] = {
    "forward": in_a_layer,
    "loss": in_the_loss,
    "backward, first": _in_backward_of(-1),
    "backward, last": _in_backward_of(0),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_changes_nothing_and_the_next_step_works(
    untouched: list[dict[str, Any]], place: str, error: str
) -> None:
    out_of_memory(untouched, PLACES[place], ERRORS[error]())


def out_of_memory(untouched: list[dict[str, Any]], place: Callable[..., Any], error: BaseException) -> None:
    made = engine()
    torch.manual_seed(11)
    for number in range(FAILING):
        made.step(batch(number))
    for _ in range(2):  # and once more, for what the first time may have left behind
        with place(made, error), pytest.raises(type(error)) as caught:
            made.step(batch(FAILING))
        assert caught.value is error, "the user's own error, with what torch has to say"
        assert alike(state_of(made), untouched[FAILING - 1])
    for number in range(FAILING, STEPS):
        made.step(batch(number))
        assert alike(state_of(made), untouched[number]), number


@pytest.mark.parametrize("error", ERRORS)
def test_out_of_memory_before_the_update_changes_nothing(untouched: list[dict[str, Any]], error: str) -> None:
    out_of_memory(untouched, before_the_update, ERRORS[error]())


def test_out_of_memory_in_the_middle_of_the_update_is_not_trained_on() -> None:
    """It cannot be undone, so it has to be said, and no step may go on from it."""
    made = engine()
    made.step(batch(0))
    error = ERRORS["cpu"]()

    with in_the_middle_of_the_update(made, error), pytest.raises(memfit.EngineError, match="snapshot"):
        made.step(batch(1))
    with pytest.raises(memfit.EngineError):
        made.step(batch(2))


@pytest.mark.parametrize("at", range(1, STEPS))
def test_a_batch_longer_than_planned_is_refused_and_training_goes_on(untouched: list[dict[str, Any]], at: int) -> None:
    made = engine()
    torch.manual_seed(11)
    for number in range(STEPS):
        if number == at:
            with pytest.raises(
                memfit.BatchError, match=r"plan again with a sample of the largest shape, or cut the batch"
            ):
                made.step(batch(99, size=65))
            assert alike(state_of(made), untouched[number - 1])
        made.step(batch(number))
        assert alike(state_of(made), untouched[number]), number
