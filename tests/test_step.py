"""One step of the program is one step of a plain training loop, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import small
from memfit.errors import NonFiniteLossError
from memfit.step.loss_value import LossValue
from memfit.step.program import StepProgram


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = small.squared_error(model, small.rows(32))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clip", [None, 1e-3, 1e3])
def test_steps_are_those_of_a_plain_loop(clip: float | None) -> None:
    one, other = (small.chain(2, batch_norm=True, dropout=0.2) for _ in range(2))
    optimizers = [small.adamw(m.parameters()) for m in (one, other)]
    torch.manual_seed(5)
    losses = plain_loop(one, optimizers[0], clip, 3)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    program = StepProgram(other, small.squared_error, optimizers[1], clip)
    mine = []
    for _ in range(3):
        mine.append(program.forward_backward(small.rows(32), check_finite=True).item())
        program.update()
        program.clear()
    assert mine == losses
    assert torch.equal(torch.get_rng_state(), after)
    assert small.same(small.state_of(one, optimizers[0]), small.state_of(other, optimizers[1]))
    assert all(p.grad is None for p in other.parameters())


def test_weighted_parts_add_up_to_the_whole() -> None:
    model = small.chain(2).double()
    x, y = (t.double() for t in small.rows(30))
    program = StepProgram(model, small.squared_error)
    program.forward_backward((x, y))
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    program.clear()
    for start, stop in ((0, 20), (20, 30)):
        loss = program.forward_backward((x[start:stop], y[start:stop]), (stop - start) / 30)
        assert not loss.requires_grad
        assert loss.item() == pytest.approx(small.squared_error(model, (x[start:stop], y[start:stop])).item())
    parts = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_no_number_stops_before_backward(value: float) -> None:
    model = small.chain(1)
    program = StepProgram(model, lambda m, b: small.squared_error(m, b) * value)
    with pytest.raises(NonFiniteLossError, match=f"the loss is {value}: the step was not taken"):
        program.forward_backward(small.rows(8), check_finite=True)
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_is_still_on_its_way_stops_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which would have to be waited for between forward and backward."""
    monkeypatch.setattr(LossValue, "here", property(lambda _: False))
    model = small.chain(1)
    program = StepProgram(model, lambda m, b: small.squared_error(m, b) * float("nan"))
    with pytest.raises(NonFiniteLossError, match="the loss is nan: the step was not taken"):
        program.forward_backward(small.rows(8), check_finite=True)
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(NonFiniteLossError):
        program.forward_backward(small.rows(8), check_finite=True, around_backward=refused())  # an update inside it


@contextmanager
def refused() -> Iterator[None]:
    raise AssertionError("backward has begun")
    yield


def test_the_context_surrounds_forward_and_loss_only() -> None:
    events: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        events.append("enter")
        yield
        events.append("leave")

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        events.append("loss")
        loss: Tensor = model(batch).sum()
        loss.register_hook(lambda _: events.append("backward"))
        return loss

    program = StepProgram(nn.Linear(3, 3), loss_fn)
    program.forward_backward(torch.ones(2, 3), None, around(), after_forward=lambda: events.append("after"))
    assert events == ["enter", "loss", "leave", "after", "backward"]


def test_frozen_parameters_get_no_gradient_and_are_not_clipped() -> None:
    model = small.chain(1)
    first = next(model.parameters())
    first.requires_grad_(False)
    program = StepProgram(model, small.squared_error, torch.optim.SGD(model.parameters(), lr=0.1), 1.0)
    assert len(program.trainable()) == len(list(model.parameters())) - 1
    before = first.clone()
    program.forward_backward(small.rows(8))
    program.update()
    assert first.grad is None
    assert torch.equal(first, before)


def test_without_an_optimizer_nothing_moves() -> None:
    model = small.chain(1)
    before = small.state_of(model)
    program = StepProgram(model, small.squared_error)
    program.forward_backward(small.rows(8))
    program.update()
    assert small.same(small.state_of(model), before)
