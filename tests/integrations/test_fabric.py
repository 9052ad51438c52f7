"""`memfit.fit(..., fabric=fabric)`: Fabric's own losses, its backward and its update, the peak as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.errors import InputError
from memfit.planning import planning_of
from small import adamw, chain, plan_at, rows, squared_error

lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 4


def fabric(**named: Any) -> Any:
    return lightning.Fabric(accelerator="cpu", devices=1, **named)


def batches() -> list[Any]:
    x, y = rows(STEPS * 256)
    return list(zip(x.split(256), y.split(256), strict=True))


def own_loop(data: Sequence[Any], dropout: float) -> tuple[list[float], Any]:
    """A loop with Fabric as its users write it."""
    through = fabric()
    model = chain(dropout=dropout)
    model, optimizer = through.setup(model, adamw(model.parameters()))
    torch.manual_seed(1)
    losses = []
    for batch in data:
        loss = squared_error(model, batch)
        through.backward(loss)
        through.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("parts", [1, 2])
def test_losses_are_those_of_fabrics_own_loop_and_the_peak_is_predicted(parts: int) -> None:
    data = batches()
    dropout = 0.1 if parts == 1 else 0.0  # each part would draw masks of its own
    losses, plainly = own_loop(data, dropout)
    budget = plan_at(0.5, chain(dropout=dropout), data[0], clip_norm=1.0).prediction.peak_bytes + 1024
    named: Any = {"clip_norm": 1.0, "fixed": {"micro_batches": parts}, "fabric": fabric()}
    engine = memfit.fit(chain(dropout=dropout), data[0], squared_error, budget, adamw, **named)
    torch.manual_seed(1)
    records = [engine.step(batch, meter=True) for batch in data]

    assert engine.fabric_model is not None
    assert type(engine.optimizer).__name__ == "FabricAdamW"
    predicted = engine.plan.prediction.peak_bytes
    assert [r.peak_bytes for r in records[1:]] == [pytest.approx(predicted, rel=0.01)] * (STEPS - 1)
    assert predicted <= budget
    if parts == 1:
        assert not engine.plan.script.plain
        assert [r.loss for r in records] == losses
        assert all(map(torch.equal, engine.model.parameters(), plainly.parameters()))
    else:
        assert [r.loss for r in records] == pytest.approx(losses, rel=1e-5)


class Counting:
    """What goes through a Fabric."""

    def __init__(self, through: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backward = self.steps = 0
        own_backward, own_step = through.backward, through.strategy.optimizer_step

        def backward(*args: Any, **named: Any) -> None:
            self.backward += 1
            own_backward(*args, **named)

        def step(*args: Any, **named: Any) -> Any:
            self.steps += 1
            return own_step(*args, **named)

        monkeypatch.setattr(through, "backward", backward)
        monkeypatch.setattr(through.strategy, "optimizer_step", step)


def test_backward_and_update_go_through_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    through = fabric()
    counted = Counting(through, monkeypatch)
    engine = memfit.fit(chain(1), rows(), squared_error, "1GiB", adamw, fixed={"micro_batches": 2}, fabric=through)
    before = counted.backward, counted.steps  # of the rehearsal
    engine.step(rows())

    assert (counted.backward - before[0], counted.steps - before[1]) == (2, 1)


def fit(**named: Any) -> memfit.Engine:
    return memfit.fit(named.pop("model", None) or chain(1), rows(), squared_error, "1GiB", adamw, **named)


def test_room_below_is_the_plans_as_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_OFFLOAD_DIR", str(tmp_path))
    plain = fit(fabric=fabric())
    below = fit(fabric=fabric(), host_budget="64MiB", fixed={"state_place": "disk", "micro_batches": 1})

    assert planning_of(below.plan).bundle.lower_tier.free_bytes == 64 << 20  # type: ignore[attr-defined]
    assert [below.step(rows()).loss for _ in range(3)] == [plain.step(rows()).loss for _ in range(3)]
    with pytest.raises(InputError, match="host_budget=100 is less than the optimizer state"):
        fit(fabric=fabric(), host_budget=100, fixed={"state_place": "disk"})
    with pytest.raises(InputError, match=r"disk_budget='1GiB' is for the disk below a GPU's host memory"):
        fit(fabric=fabric(), host_budget="64MiB", disk_budget="1GiB")


def test_what_fabric_and_a_plan_both_decide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="Fabric's precision is 'bf16-mixed'"):
        fit(fabric=fabric(precision="bf16-mixed"))
    with pytest.raises(InputError, match="'in_backward' runs backward or the update otherwise"):
        fit(fabric=fabric(), allow=["in_backward"])
    with pytest.raises(InputError, match="'fp16' runs backward or the update otherwise"):
        fit(fabric=fabric(), fixed={"precision": "fp16"})
    with pytest.raises(InputError, match="'streamed' brings an order of its own"):
        fit(fabric=fabric(), fixed={"streamed": "layers"})
    with pytest.raises(InputError, match="has been set up by Fabric already"):
        fit(fabric=fabric(), model=fabric().setup(chain(1)))
    with pytest.raises(InputError, match="a lightning.Fabric is needed"):
        fit(fabric="fabric")
    two = fabric()
    monkeypatch.setattr(type(two), "world_size", 2)
    with pytest.raises(InputError, match=r"on 2 devices, and fabric= is for one: after fabric.launch\(\) leave it out"):
        fit(fabric=two)
