"""What torch's engines for several ranks take of a processor beside kernels and collectives: Python around each gathering, each reduction, each parameter.

On a GPU the host hands over work ahead of time, so this hides behind the kernels. Ranks that are processes of a computer wait for it. A stack of tiny blocks is
run under the engine and without it, in a group that sends nothing, and the difference is what the engine takes; two numbers of parameters for each block tell
what is for a block and what for a parameter. It is Python of `fully_shard` and ZeroRedundancyOptimizer; DistributedDataParallel's work for a parameter is C++.
It is much code, run once for each block of a model, and takes about twice as long where a long kernel has emptied the caches; so it is measured after long
kernels, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from memfit.capture.host_time import PRODUCT_WIDTH, ROWS
from memfit.capture.process_group import OnFakeTensors, fake_mesh
from memfit.identity import digest
from memfit.sharding.sharded import ShardedModel
from memfit.sharding.ways import shard
from memfit.step.program import default_optimizer
from memfit.storage.folders import measured_once

BLOCKS: Final = 6
PARAMETERS: Final = (2, 12)  # of each block
WIDTH: Final = 16
ROUNDS: Final = 12  # of which the fastest counts: what else runs only adds
FORMAT: Final = 3


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Processor seconds of one rank, beside those of the collective itself.

    Attributes:
        fixed: of each kind of collective that an engine begins, whatever is sent, with warm caches.
        for_a_parameter: of each kind, for each parameter in it, likewise.
        cold: how many times longer both take after a long kernel.
    """

    fixed: Mapping[str, float]
    for_a_parameter: Mapping[str, float]
    cold: float = 1.0

    def seconds(self, kind: str, parameters: int, emptied: float = 0.0) -> float:
        """Around one collective for so many parameters; none of a kind that was not measured.

        Args:
            kind, parameters: the collective.
            emptied: how much of the caches the kernels before it have emptied, from 0 to 1.
        """
        warm = self.fixed.get(kind, 0.0) + parameters * self.for_a_parameter.get(kind, 0.0)
        return warm * (1.0 + emptied * (self.cold - 1.0))

    def times(self, by: float) -> EngineTime:
        """Of the same computer when all work takes so many times as long."""
        fixed, for_a_parameter = (
            {kind: by * seconds for kind, seconds in each.items()} for each in (self.fixed, self.for_a_parameter)
        )
        return EngineTime(fixed, for_a_parameter, self.cold)


@cache
def engine_time(slowdown: float) -> EngineTime:
    """As slow as this computer is by now: measured once for it and kept.

    Args:
        slowdown: how many times longer than on a quiet computer work takes by now (`CostTable.slowdown`).
    """
    identity = digest("engines", os.cpu_count(), torch.__version__, FORMAT)
    # Kept as on a quiet computer.
    known = measured_once(EngineTime, "collectives", identity, lambda: _measured().times(1 / slowdown))
    return known.times(slowdown)


class _LongKernel(torch.autograd.Function):
    """Hands its input on, after a product that has nothing to do with it; and so backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, factor: Tensor) -> Tensor:
        """The same numbers."""
        ctx.multiplied = rows, factor
        torch.mm(rows, factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """The same gradient."""
        torch.mm(*ctx.multiplied)
        return (*gradients, None, None)


class _Block(nn.Module):
    """So little computing that only what lies around it counts. Of ones: random weights would be drawn from the user's generator.

    Args:
        parameters: how many.
        before: operands of a product that comes first, and last in backward; none where the caches stay warm.
    """

    def __init__(self, parameters: int, before: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(WIDTH, 1)) for _ in range(parameters))
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            x = _LongKernel.apply(x, *self.before)  # type: ignore[no-untyped-call]
        for weight in self.weights:
            x = x * weight
        return x


def _measured() -> EngineTime:
    long = torch.ones(ROWS[-1], PRODUCT_WIDTH), torch.ones(PRODUCT_WIDTH, PRODUCT_WIDTH)
    few, many, cold = _sharded(PARAMETERS[0]), _sharded(PARAMETERS[1]), _sharded(PARAMETERS[1], long)
    fixed, for_a_parameter = {}, {}
    for kind, seconds in many.items():
        each = max(0.0, seconds - few[kind]) / (PARAMETERS[1] - PARAMETERS[0])
        for_a_parameter[kind] = each
        fixed[kind] = max(0.0, few[kind] - PARAMETERS[0] * each)
    # Of two ranks each updates half of the parameters, and both begin the sending of all.
    *_, update = _less(_seconds("zero1", mode=OnFakeTensors), _seconds("", PARAMETERS[1] // 2, mode=OnFakeTensors))
    fixed["broadcast"] = max(0.0, update) / (BLOCKS * PARAMETERS[1])
    return EngineTime(fixed, for_a_parameter, max(1.0, sum(cold.values()) / max(sum(many.values()), 1e-9)))


def _sharded(parameters: int, before: tuple[Tensor, Tensor] | None = None) -> dict[str, float]:
    """Of each block: in forward its parameters are gathered, in backward its gradients reduced."""
    forward, backward, _ = _less(_seconds("zero2", parameters, before), _seconds("", parameters, before))
    return {"all_gather": forward / BLOCKS, "reduce_scatter": backward / BLOCKS}


def _less(more: tuple[float, ...], less: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a - b for a, b in zip(more, less, strict=True))


def _seconds(
    way: str,
    parameters: int = PARAMETERS[1],
    before: tuple[Tensor, Tensor] | None = None,
    mode: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[float, ...]:
    """Of forward, backward and update of the stack: of each the fastest.

    Args:
        way: in which two ranks share it out; "" for plain PyTorch.
        parameters, before: of each block.
        mode: makes what all of it runs inside.
    """
    model = nn.Sequential(*(_Block(parameters, before) for _ in range(BLOCKS)))
    if not way:
        with mode():
            return _fastest(model, default_optimizer(model.parameters()), None)
    setting = f"{way}/2"
    with fake_mesh(setting, "cpu") as mesh, mode():
        sharded = shard(model, setting, mesh.get_group(), mesh, synchronised=False)
        try:
            return _fastest(model, sharded.optimizer(default_optimizer, lambda made: made), sharded)
        finally:
            sharded.close()


def _fastest(model: nn.Module, optimizer: torch.optim.Optimizer, sharded: ShardedModel | None) -> tuple[float, ...]:
    times = []
    x = torch.ones(1, WIDTH, WIDTH, requires_grad=True)
    for _ in range(ROUNDS):
        with nullcontext() if sharded is None else sharded.micro_batch(last=True):
            begin = time.process_time()
            loss = model(x).sum()
            between = time.process_time()
            loss.backward()
            after = time.process_time()
        if sharded is not None:
            sharded.collect()
        stepped = time.process_time()
        optimizer.step()
        times.append((between - begin, after - between, time.process_time() - stepped))
        if sharded is None:
            model.zero_grad()
        else:
            sharded.clear(accumulates=False)
    return tuple(map(min, zip(*times, strict=True)))
