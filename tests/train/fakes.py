"""An engine that steps plainly and follows no plan, so that what stands around an engine is tested without one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import NonFiniteLossError
from memfit.step.program import StepProgram
from memfit.techniques.choices import Choices
from memfit.values.plan import Plan
from memfit.values.prediction import Prediction
from memfit.values.report import Report, StepRecord
from memfit.values.script import Script

Progress = Callable[[str, float], None] | None


def plan(budget_bytes: int = 2**20, micro_batches: int = 1, peak_bytes: int = 2**19) -> Plan:
    return Plan(
        budget_bytes=budget_bytes,
        choices=Choices(micro_batches=micro_batches, weights="samples" if micro_batches > 1 else "whole"),
        script=Script(),
        prediction=Prediction(peak_bytes, 2 * peak_bytes, 0.02, 0.01, 0.015, "measured"),
        signature="x float32[4, 3]",
        model="fake",
        device="cpu",
        torch_version=torch.__version__,
    )


class FakeEngine:
    """Plain steps; `on_step` may raise before the one of that number (from 1)."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        made: Plan | None = None,
        on_step: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.model, self.optimizer, self.plan, self.on_step = model, optimizer, made or plan(), on_step
        self.rehearsal = None
        self.scaling = None
        self.sharded = None
        self.records: list[StepRecord] = []
        self.batches: list[Any] = []
        self._program = StepProgram(model, loss_fn, optimizer)

    def step(self, batch: Any, *, meter: bool = False) -> StepRecord:
        self.on_step(len(self.records) + 1)
        loss = self._program.forward_backward(batch, check_finite=True)
        self._program.update()
        self._program.clear()
        self.batches.append(batch)
        record = StepRecord(len(self.records) + 1, float(loss), 0.001, peak_bytes=500_000 if meter else None)
        self.records.append(record)
        return record

    def gathered(self, *, on_host: bool = False, changed: bool = True) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.model)

    def evaluating(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.model)

    def present(self, batch: Any) -> list[Tensor]:
        return list(self.model.parameters())

    def report(self, title: str) -> Report:
        return Report(title, self.plan, records=tuple(self.records))


class Api(SimpleNamespace):
    """Stands in for `memfit.api`; notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(calls=[], error=None, on_step=lambda _: None)

    def _called(self, name: str, *arguments: Any, **named: Any) -> None:
        self.calls.append((name, arguments, named))
        if named.get("progress"):
            named["progress"]("planning", 0.5)
        if self.error is not None:
            raise self.error

    def plan(self, model: nn.Module, sample: Any, loss_fn: Any, budget: Any, optimizer: Any, **named: Any) -> Plan:
        self._called("plan", model, sample, budget, **named)
        return plan()

    def record(self, model: nn.Module, sample: Any, loss_fn: Any, optimizer: Any, **named: Any) -> SimpleNamespace:
        self._called("record", model, sample, **named)
        return SimpleNamespace(save=lambda path: path.write_text("a trace", encoding="utf-8"))

    def frontier(self, model: nn.Module, sample: Any, loss_fn: Any, optimizer: Any, **named: Any) -> tuple[Plan, ...]:
        self._called("frontier", model, sample, **named)
        return tuple(plan(2**20 >> i, peak_bytes=2**19 >> i) for i in range(named["points"]))

    def fit(self, model: nn.Module, sample: Any, loss_fn: Any, budget: Any, optimizer: Any, **named: Any) -> FakeEngine:
        self._called("fit", model, sample, budget, **named)
        torch.rand(7)  # planning may draw
        return FakeEngine(model, optimizer(model.parameters()), loss_fn, plan(), self.on_step)

    def apply(self, made: Plan, model: nn.Module, loss_fn: Any, optimizer: Any) -> FakeEngine:
        self._called("apply", made)
        return FakeEngine(model, optimizer(model.parameters()), loss_fn, made, self.on_step)


class Noisy(nn.Module):
    """A regression with dropout (draws), batch norm (buffers), and a buffer that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)  # type: ignore[assignment]
        return (self.inner(x).squeeze(-1) - y).square().mean() + 0 * self.seen


def non_finite(_: int) -> None:
    raise NonFiniteLossError("the loss is nan")
