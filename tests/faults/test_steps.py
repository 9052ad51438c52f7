"""A step that fails leaves everything as it was after the step before, says why, and the next one works: out of memory anywhere, batches that are too long.

Under every technique; where an update begins before backward has ended, only up to there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from faults.runs import alike
from memfit.hardware.machine import Link
from memfit.planner.recipes import Recipes
from memfit.planner.schedule import recomputations_for
from memfit.planner.script_compiler import compile_script
from memfit.planning import changed, planning_of

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


# What is done beside dropping: arguments of `memfit.plan`. Streamed layers are clipped, so that all of backward comes before the first update.
TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"fixed": {"precision": "bf16"}},
    "fp16": {"fixed": {"precision": "fp16"}, "clip_norm": 1.0},
    "8-bit state": {"fixed": {"state_format": "8bit"}},
    "8-bit state on disk": {"fixed": {"state_format": "8bit", "state_place": "disk"}},
    "frozen": {"freeze": ["body.0"]},
    "update in backward": {"fixed": {"update": "in_backward"}},
    "swap": {},
    "streamed layers": {"fixed": {"streamed": "blocks"}, "clip_norm": 1.0},
}


class Tower(nn.Module):
    """Repeated blocks, which can be streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(3))
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


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


def build(technique: str) -> nn.Module:
    torch.manual_seed(5)
    return Tower() if technique == "streamed layers" else Net()


@cache
def planned(technique: str) -> memfit.Plan:
    """Under everything but streaming the smallest plan, so that it drops."""
    named = TECHNIQUES[technique]
    fixed = {"micro_batches": 1, **named.get("fixed", {})}
    made = memfit.plan(
        build(technique),
        batch(0),
        loss_of,
        1 << 40,
        lambda p: torch.optim.AdamW(p, lr=0.01),
        **{**named, "fixed": fixed},
    )
    if technique == "swap":
        return offloading(made)
    if technique == "streamed layers":
        return made
    made = memfit.replan(made, memfit.smallest_budget(made))
    assert not made.script.plain
    return made


def engine(technique: str = "plain") -> memfit.Engine:
    return memfit.apply(planned(technique), build(technique))


def offloading(plain: memfit.Plan) -> memfit.Plan:
    """The plan, with whatever backward reads offloaded."""
    recipes = Recipes(planning_of(plain).solver(1).trace, Link("disk", 1e9, 1e9, 1e-4, least_bytes=1))
    offloaded = {s: ways[1] for s, ways in recipes.reloads_of.items() if s in recipes.saved}
    script = compile_script(recipes, recomputations_for(recipes, (), offloaded=offloaded))
    assert script.swaps
    return changed(plain, script=script)


def state_of(made: memfit.Engine) -> dict[str, Any]:
    assert made.optimizer is not None
    with made.gathered(changed=False) as model:
        return {
            "model": {name: value.clone() for name, value in model.state_dict().items()},
            "gradients": [p.grad for p in model.parameters()],
            "optimizer": copy.deepcopy(made.optimizer.state_dict()["state"]),
            "scaling": None if made.scaling is None else made.scaling.state(),
            "generator": torch.get_rng_state(),
        }


@cache
def untouched(technique: str = "plain") -> list[dict[str, Any]]:
    """State after each step when nothing happens."""
    made = engine(technique)
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

    layer = made.model.blocks[1] if isinstance(made.model, Tower) else made.model.body[4]  # type: ignore[index]
    hook = layer.register_forward_hook(fail)
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

        hook = [p for p in made.model.parameters() if p.requires_grad][place].register_hook(fail)
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
def test_out_of_memory_changes_nothing_and_the_next_step_works(place: str, error: str) -> None:
    out_of_memory("plain", PLACES[place], ERRORS[error]())


def out_of_memory(technique: str, place: Callable[..., Any], error: BaseException) -> None:
    states = untouched(technique)
    made = engine(technique)
    torch.manual_seed(11)
    for number in range(FAILING):
        made.step(batch(number))
    for _ in range(2):  # and once more, for what the first time may have left behind
        with place(made, error), pytest.raises(type(error)) as caught:
            made.step(batch(FAILING))
        assert caught.value is error, "the user's own error, with what torch has to say"
        assert alike(state_of(made), states[FAILING - 1])
    for number in range(FAILING, STEPS):
        made.step(batch(number))
        assert alike(state_of(made), states[number]), number


@pytest.mark.parametrize("error", ERRORS)
def test_out_of_memory_before_the_update_changes_nothing(error: str) -> None:
    out_of_memory("plain", before_the_update, ERRORS[error]())


BEGUN = {  # when an update has begun already
    ("update in backward", "backward, last"),
    ("update in backward", "update"),
    ("streamed layers", "update"),
}


@pytest.mark.alternate(1)
@pytest.mark.parametrize("place", [*PLACES, "update"])
@pytest.mark.parametrize("technique", [name for name in TECHNIQUES if name != "plain"])
def test_out_of_memory_under_any_technique_changes_nothing_or_is_not_trained_on(technique: str, place: str) -> None:
    failing, error = {**PLACES, "update": before_the_update}[place], ERRORS["cpu"]()
    if (technique, place) not in BEGUN:
        out_of_memory(technique, failing, error)
        return
    made = engine(technique)
    made.step(batch(0))
    with failing(made, error), pytest.raises(memfit.EngineError, match=r"failed half way .* load the last snapshot"):
        made.step(batch(1))
    with pytest.raises(memfit.EngineError, match="failed half way"):
        made.step(batch(2))


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
def test_a_batch_longer_than_planned_is_refused_and_training_goes_on(at: int) -> None:
    states = untouched()
    made = engine()
    torch.manual_seed(11)
    for number in range(STEPS):
        if number == at:
            with pytest.raises(
                memfit.BatchError,
                match=r"plan again with a sample of the largest shape that will come, or cut the batch",
            ):
                made.step(batch(99, size=65))
            assert alike(state_of(made), states[number - 1])
        made.step(batch(number))
        assert alike(state_of(made), states[number]), number
