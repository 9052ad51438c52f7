"""How long the ranks of a pipeline wait for each other: measured, predicted by playing the schedule through, and by the textbook's formula.

Parts sleep in forward and backward instead of computing, so that processes on one core run beside each other as on devices of their own, and the
seconds of each part are known.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from memfit.capture.capture import capture
from memfit.capture.part_calls import find_part_calls
from memfit.capture.source import StepSource
from memfit.parallel.pipeline import Division, Pipeline, mesh_of_pipelines
from memfit.parallel.schedule import StageEnds
from memfit.planner.model_parts import part_calls
from memfit.planner.schedules import Action, rank_orders, simulate, textbook_bubble
from memfit.values.stages import Schedule

WIDTH: Final = 8
STEPS: Final = 3  # after a first one, in which torch's schedule makes its buffers
# Schedule, micro-batches, and seconds of forward of each part; backward takes twice as long. Two stages of two parts each.
CASES: Final[Sequence[tuple[str, int, tuple[float, ...]]]] = tuple(
    (schedule, number, seconds)
    for seconds in ((0.1, 0.1, 0.1, 0.1), (0.1, 0.1, 0.1, 0.2))
    for schedule in ("1f1b", "gpipe")
    for number in (2, 4, 8)
)
ENDS: Final = (2, 4)


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # torch's is of any arguments
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Part(nn.Module):
    """A small layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """The layer, late."""
        found: Tensor = _Sleeping.apply(self.layer(x), self.seconds)  # type: ignore[no-untyped-call]
        return found


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean of squares."""
    found: Tensor = model(batch).square().mean()
    return found


def measured(rank: int) -> list[float]:
    """Of each case, the share of the passes in which this rank waits."""
    del rank
    found = []
    for schedule, number, seconds in CASES:
        torch.manual_seed(0)
        model = nn.Sequential(*map(Part, seconds))
        trace = capture(StepSource(model, torch.zeros(1, WIDTH), loss_fn, None)).trace
        paths = [call.module for call in part_calls(trace)]
        calls = find_part_calls(model, torch.zeros(1, WIDTH), loss_fn, paths)
        division = Division.of(model, calls, StageEnds(ENDS, Schedule(schedule), number))

        def look(micro_batch: Tensor, model: nn.Module = model, paths: list[str] = paths) -> Any:
            return find_part_calls(model, micro_batch, loss_fn, paths)

        pipeline = Pipeline(model, loss_fn, look, division, mesh_of_pipelines("cpu", len(ENDS)))
        own = torch.randn(number // 2, WIDTH)
        pipeline.prepare(own)
        shares = []
        for _ in range(1 + STEPS):
            shares.append(pipeline.forward_backward(own, lambda _: nullcontext()).waiting)
            pipeline.clear(accumulates=True)
        found.append(statistics.median(shares[1:]))
    return found


def rows() -> list[dict[str, Any]]:
    """Of each case, both ranks: measured, predicted, and (K - 1)/(M + K - 1)."""
    from sharding.ranks import on_ranks

    by_rank = on_ranks(len(ENDS), measured, limit=1800.0)
    found = []
    for index, (schedule, number, seconds) in enumerate(CASES):
        of_stage = [sum(seconds[first:end]) for first, end in zip((0, *ENDS[:-1]), ENDS, strict=True)]

        def taken(action: Action, of_stage: list[float] = of_stage) -> float:
            return (2 if action.backward else 1) * of_stage[action.stage]

        played = simulate(rank_orders(Schedule(schedule), len(ENDS), number), taken)
        found.append(
            {
                "row": "waiting",
                "ranks": len(ENDS),
                "schedule": schedule,
                "micro_batches": number,
                "stages": [round(each, 3) for each in of_stage],
                "measured": [of_rank[index] for of_rank in by_rank],
                "predicted": [1 - busy / played.seconds for busy in played.busy_seconds],
                "steps": STEPS,
                "textbook": textbook_bubble(len(ENDS), number),
            }
        )
    return found
