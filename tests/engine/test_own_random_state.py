"""Operations that draw from a state of their own, as cuDNN's recurrent layers do with dropout, which is set up anew after each seed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
import small
from memfit import dispatch
from memfit.capture import recorder
from memfit.capture.trace_source import TraceSource
from memfit.techniques.choices import BASELINE

pytestmark = pytest.mark.usefixtures("one_thread")

SETS_UP = frozenset({"aten::empty", "aten::random_", "aten::_local_scalar_dense"})


class Layer(nn.Module):
    """Sets up what its kernel draws from where that was not done since the last seed."""

    set_up = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if not Layer.set_up:
            torch.empty((), dtype=torch.int64).random_().item()
            Layer.set_up = True
        return functional.dropout(torch.erf(x), 0.1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(6)))


@pytest.fixture
def erf_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel in place of cuDNN's, which asks for a GPU."""
    monkeypatch.setattr(Layer, "set_up", True)
    monkeypatch.setattr(dispatch, "SETS_UP", {"aten::erf": SETS_UP})


def seeded() -> None:
    torch.manual_seed(7)
    Layer.set_up = False


@pytest.mark.usefixtures("erf_draws")
def test_a_step_in_which_the_state_is_set_up_is_followed() -> None:
    rows = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), torch.zeros(32, 64)
    plain = memfit.plan(network(), rows, small.squared_error, 1 << 40, small.adamw, fixed={"micro_batches": 1})
    budget = memfit.smallest_budget(plain)
    trained = network()
    engine = memfit.apply(memfit.replan(plain, budget), trained, small.squared_error, small.adamw)
    by_hand = copy.deepcopy(network())
    optimizer = small.adamw(by_hand.parameters())
    seeded()
    records = [engine.step(rows, meter=True) for _ in range(3)]
    seeded()
    for record in records:
        loss = small.squared_error(by_hand, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        assert record.loss == loss.item()
        assert not record.divergences
    assert max(record.peak_bytes or 0 for record in records[1:]) <= budget
    assert all(map(torch.equal, trained.parameters(), by_hand.parameters()))


def test_other_operations_there_are_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "set_up", True)
    rows = torch.randn(32, 64), torch.zeros(32, 64)
    plain = memfit.plan(network(), rows, small.squared_error, 1 << 40, small.adamw, fixed={"micro_batches": 1})
    smallest = memfit.replan(plain, memfit.smallest_budget(plain))
    engine = memfit.apply(smallest, network(), small.squared_error, small.adamw)
    seeded()
    with engine.forward() as follower:
        small.squared_error(engine.model, rows)
    assert "the plan has aten.erf.default" in str(follower.divergence)


@pytest.mark.parametrize("own", [True, False])
def test_nothing_that_draws_is_run_again_where_the_generator_must_not_be_set(
    monkeypatch: pytest.MonkeyPatch, own: object
) -> None:
    if own:
        monkeypatch.setattr(recorder, "_OWN_RANDOM_STATE", ("aten.bernoulli_.",))
    monkeypatch.setattr(Layer, "set_up", True)
    rows = torch.randn(32, 64), torch.zeros(32, 64)
    operations = TraceSource(network(), rows, small.squared_error, small.adamw).trace_of(BASELINE).operations
    drawing = [each for each in operations if each.random]
    assert drawing
    assert any(each.rerunnable for each in drawing) != own
    assert any(each.rerunnable for each in operations)
