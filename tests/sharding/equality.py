"""What a rank does in the tests that compare gradients: it trains, and tells those that the optimizer is given; and the undivided model to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import memfit
from memfit import batches
from memfit.sharding.sharded import ShardedModel
from sharding import steps

STEPS = 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trained:
    """Of some steps.

    Attributes:
        losses: of each.
        gradients: whole, that the optimizer was given in each; None for what has none.
        parameters: whole, after the last.
        skipped: whether each was left out because fp16 overflowed.
        scale: of the gradients after the last; None where they are not scaled.
    """

    losses: list[float]
    gradients: list[list[Tensor | None]]
    parameters: list[Tensor]
    skipped: list[bool] = field(default_factory=list)
    scale: float | None = None


def _whole_gradients(sharded: ShardedModel) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for name, parameter in sharded.named().items():
        if parameter.grad is None:
            found.append(None)
            continue
        placed = sharded.placed(name, parameter.grad.detach())
        found.append((placed.full_tensor() if isinstance(placed, DTensor) else placed).clone())
    return found


def on_rank(
    rank: int, cases: Sequence[tuple[dict[str, Any], Callable[[], steps.Built], str]], hot: float = 1.0
) -> list[Trained]:
    """Each case trained on this rank's part of the batch.

    Args:
        rank: of this process.
        cases: plan as JSON, what makes the model, and the optimizer's name.
        hot: the inputs of the last rank are multiplied by it in the second step.
    """
    found = []
    for data, build, optimizer in cases:
        model, sample, loss_fn = build()
        engine = memfit.apply(memfit.Plan.from_json(data), model, loss_fn, steps.OPTIMIZERS[optimizer])
        sharded = engine.sharded
        assert sharded is not None
        own = steps.part_of(sample, rank, sharded.ranks)
        records = []
        with _noted(engine) as gradients:
            for step in range(STEPS):
                last = rank == sharded.ranks - 1 and step == 1
                records.append(engine.step((own[0] * hot, own[1]) if last and hot != 1.0 else own))
        assert not any(record.divergences for record in records)
        scale = None if engine.scaling is None else float(engine.scaling.scaler.get_scale())
        skipped = [record.skipped for record in records]
        found.append(Trained([r.loss for r in records], gradients, steps.whole(model), skipped, scale))
        sharded.close()
    return found


@contextmanager
def _noted(engine: memfit.Engine) -> Iterator[list[list[Tensor | None]]]:
    """Inside, whole gradients are noted before each update of a sharded engine."""
    sharded = engine.sharded
    assert sharded is not None
    assert engine.optimizer is not None
    gradients: list[list[Tensor | None]] = []
    handle = sharded.stepped(engine.optimizer).register_step_pre_hook(
        lambda *_: gradients.append(_whole_gradients(sharded))
    )
    yield gradients
    handle.remove()


def stepped_and_accumulated(
    rank: int, plans: Sequence[dict[str, Any]], build: Callable[[], steps.Built]
) -> list[tuple[list[Tensor | None], list[Tensor | None]]]:
    """For each plan the gradients of `engine.step` on this rank's part of the batch, and of `engine.accumulate` on a list of its halves."""
    found = []
    for data in plans:
        model, sample, loss_fn = build()
        engine = memfit.apply(memfit.Plan.from_json(data), model, loss_fn, lambda p: torch.optim.SGD(p, lr=0.0))
        sharded = engine.sharded
        assert sharded is not None
        own = steps.part_of(sample, rank, sharded.ranks)
        with _noted(engine) as gradients:
            engine.step(own)
            engine.accumulate(batches.split(own, [batches.size(own) // 2] * 2))
        found.append((gradients[0], gradients[1]))
        sharded.close()
    return found


def undivided(
    build: Callable[[], steps.Built],
    optimizer: str,
    *,
    parts: int = 1,
    precision: str = "full",
    clip_norm: float | None = None,
    frozen: Sequence[str] = (),
    hot: float = 1.0,
) -> Trained:
    """Plain PyTorch on one device, the whole batch at once or in parts of equal size, as torch's own pages have it.

    Args:
        build: makes model, batch and loss, which is a mean over samples where there are several parts.
        optimizer: by name.
        parts: micro-batches.
        precision: of `torch.autocast`; with "fp16" under a `torch.amp.GradScaler`.
        clip_norm: largest norm of all gradients.
        frozen: paths of modules that are not trained.
        hot: the inputs of the last part are multiplied by it in the second step.
    """
    model, sample, loss_fn = build()
    for path in frozen:
        model.get_submodule(path).requires_grad_(requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    stepper = steps.OPTIMIZERS[optimizer](trained)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    losses: list[float] = []
    gradients: list[list[Tensor | None]] = []
    stepper.register_step_pre_hook(
        lambda *_: gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    )
    size = batches.size(sample)
    skipped = []
    for step in range(STEPS):
        loss, scale = 0.0, scaler.get_scale()
        for number, part in enumerate(batches.split(sample, [size // parts] * parts)):
            if step == 1 and number == parts - 1 and hot != 1.0:
                part = part[0] * hot, part[1]  # noqa: PLW2901 - this one alone
            with nullcontext() if precision == "full" else torch.autocast("cpu", DTYPES[precision]):
                own = loss_fn(model, part)
            scaler.scale(own / parts).backward()
            loss += float(own.detach()) / parts
        scaler.unscale_(stepper)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(trained, clip_norm)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
        losses.append(loss)
        skipped.append(scaler.get_scale() < scale)
    return Trained(losses, gradients, steps.whole(model), skipped, scaler.get_scale() if precision == "fp16" else None)


class Choosing(nn.Module):
    """Leaves out the block that its batch names (3: none), and takes the head that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
        self.first, self.second, self.unused = nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(8, 8)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        x, left_out, head = batch
        for number, block in enumerate(self.blocks):
            if number != int(left_out[0]):
                x = x + block(x)
        found: Tensor = (self.second if int(head[0]) else self.first)(x)
        return found


def choosing(left_out: Sequence[int] = (3, 3), head: Sequence[int] = (0, 0)) -> steps.Built:
    """A batch of which each of two ranks' parts names a block and a head."""
    torch.manual_seed(0)
    named = (torch.tensor(each).repeat_interleave(4) for each in (left_out, head))
    return Choosing(), (torch.randn(8, 32), *named), lambda model, batch: model(batch).square().mean()


# The same on both ranks, then others, then the same again.
CHOICES = {
    "whole": (((3, 3), (0, 0)), ((3, 1), (0, 1)), ((1, 1), (1, 1))),
    "blocks": (((3, 3), (0, 0)), ((3, 3), (0, 1)), ((1, 1), (1, 1))),
}


def decayed(parameters: Any) -> torch.optim.Optimizer:
    """What has no gradient stays as it is; with a gradient of zeros it would shrink."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def chosen(rank: int, plans: Sequence[tuple[dict[str, Any], str]]) -> list[list[Tensor]]:
    """Parameters after the steps of `CHOICES`, for each plan and its kind."""
    found = []
    for data, kind in plans:
        model, _, loss_fn = choosing()
        engine = memfit.apply(memfit.Plan.from_json(data), model, loss_fn, decayed)
        assert engine.sharded is not None
        for named in CHOICES[kind]:
            engine.step(steps.part_of(choosing(*named)[1], rank, 2))
        found.append(steps.whole(model))
        engine.sharded.close()
    return found


def chosen_by_one(kind: str) -> list[Tensor]:
    """The same in one process of plain PyTorch, which runs the ranks' parts one after the other."""
    model, _, loss_fn = choosing()
    stepper = decayed(model.parameters())
    for named in CHOICES[kind]:
        for rank in range(2):
            (loss_fn(model, steps.part_of(choosing(*named)[1], rank, 2)) / 2).backward()
        stepper.step()
        stepper.zero_grad()
    return steps.whole(model)


def other_blocks(rank: int, plan: dict[str, Any]) -> str:
    """What is said where one rank leaves out a block under a plan that gathers each by itself; the other one waits until this one has ended."""
    from memfit.ranks import join_group
    from memfit.sharding import unit_calls

    join_group(torch.device("cpu"))
    pytest.MonkeyPatch().setattr(unit_calls, "PATIENCE", timedelta(seconds=1))
    model, sample, loss_fn = choosing(left_out=(3, 1))
    engine = memfit.apply(memfit.Plan.from_json(plan), model, loss_fn, decayed)
    try:
        engine.step(steps.part_of(sample, rank, 2))
    except (memfit.EngineError, RuntimeError) as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""
