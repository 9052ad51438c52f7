"""What a rank does in these tests: it trains a small model under a plan for its way, and tells what that took and gave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import memfit
import small
from memfit import batches
from memfit.integrations.ranks import SharedStep
from models import build_gpt
from models.padded import LENGTH, Padded, loss_of, tokens

Built = tuple[nn.Module, Any, Any]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """It divides gradients by their size, so a gradient near zero turns rounding into an update of up to the learning rate: torch's own, not a larger one."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


def chain() -> Built:
    return small.chain(3), small.rows(64), small.squared_error


def uneven() -> Built:
    """Rows that four ranks cannot share out evenly, in a model without repeated blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 7), nn.Tanh(), nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 32))
    return model, small.rows(64), small.squared_error


def gpt() -> Built:
    return build_gpt(layers=4, hidden=64, heads=4, batch=4, tokens=32, vocab=200)


class Repeated(nn.Module):
    """Blocks that are called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = x + block(x)
        return x


def of_two_views(model: nn.Module, batch: Any) -> Tensor:
    """One of them moved along the gradient of the input, which is a constant for the loss."""
    x, y = batch
    moved = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((model(moved) - y).square().sum(), moved)
    return (model(x + 0.01 * gradient.sign()) - y).square().mean() + (model(x.flip(-1)) - y).square().mean()


def repeated() -> Built:
    """Each block is gathered four times in forward."""
    torch.manual_seed(0)
    return Repeated(), small.rows(64), of_two_views


class Tagger(nn.Module):
    """Classes of tokens; of a batch's labels few or many may be masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def of_labels(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def tagger() -> Built:
    """The first samples have one label each, the last ones all."""
    torch.manual_seed(0)
    model = Tagger()
    tokens = torch.randint(0, 50, (8, 12))
    labels = torch.randint(0, 10, (8, 12))
    labels[:4, 1:] = -100
    return model, {"tokens": tokens, "labels": labels}, of_labels


def padded() -> Built:
    """Half of the first samples have padding, none of the last ones."""
    return Padded(), tokens([40, LENGTH, 50, LENGTH, *[LENGTH] * 4]), loss_of


def part_of(sample: Any, rank: int, ranks: int) -> Any:
    """A rank's part of a batch."""
    size = batches.size(sample)
    share = -(-size // ranks)
    return batches.split(sample, [min(share, size - share * r) for r in range(ranks)])[rank]


def whole(model: nn.Module) -> list[Tensor]:
    """All parameters, put together from all ranks."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def judged(
    rank: int,
    plans: Sequence[dict[str, Any]],
    build: Callable[[], Built],
    optimizer: str,
    steps: int = 3,
    *,
    divided: bool = True,
) -> list[tuple[list[float], list[Tensor], int]]:
    """For each plan the losses and the parameters after some steps, and the peak of this rank.

    The peak is the least of eight steps: on a busy computer gloo's own thread may let go of tensors too late for the meter to see it.

    Args:
        rank: of this process.
        plans: as JSON.
        build: makes model, batch and loss.
        optimizer: by name.
        divided: each rank takes its part of the batch; else all of it.
        steps: not metered, before the parameters are looked at.
    """
    found = []
    for data in plans:
        model, sample, loss_fn = build()
        engine = memfit.apply(memfit.Plan.from_json(data), model, loss_fn, OPTIMIZERS[optimizer])
        assert engine.sharded is not None
        own = part_of(sample, rank, engine.sharded.ranks) if divided else sample
        losses = [engine.step(own).loss for _ in range(steps)]
        parameters = whole(model)
        peaks = [engine.step(own, meter=True).peak_bytes or 0 for _ in range(8)]
        assert not any(record.divergences for record in engine.records)
        found.append((losses, parameters, min(peaks)))
        engine.sharded.close()
    return found


def judged_on_all(rank: int, plans: Sequence[dict[str, Any]], build: Callable[[], Built], optimizer: str) -> Any:
    """The same with all of the batch on every rank."""
    return judged(rank, plans, build, optimizer, divided=False)


def alone(
    build: Callable[[], Built], optimizer: str, steps: int = 3, clip_norm: float | None = None
) -> tuple[list[float], list[Tensor]]:
    """Plain PyTorch on the whole batch."""
    model, sample, loss_fn = build()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for _ in range(steps):
        loss = loss_fn(model, sample)
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        stepper.step()
        stepper.zero_grad()
        losses.append(float(loss.detach()))
    return losses, whole(model)


def beside_a_rank_in_trouble(
    rank: int, plans: Sequence[dict[str, Any]], build: Callable[[], Built]
) -> list[tuple[list[str], bool, float]]:
    """For each plan: what steps raise in which the last rank is in trouble, whether anything has changed, and the loss of a step after them.

    In the first step the loss of its first micro-batch is no number, in the others it has twice the samples that were planned for.
    """
    found = []
    for data in plans:
        model, (x, y), loss_fn = build()
        engine = memfit.apply(memfit.Plan.from_json(data), model, loss_fn, sgd)
        assert engine.sharded is not None
        own = part_of((x, y), rank, engine.sharded.ranks)
        before = whole(model)
        worst, larger = (own[0].clone(), own[1]), own
        if rank == engine.sharded.ranks - 1:
            worst[0][0] = math.nan
            larger = batches.repeated(own, 2 * batches.size(own))
        told = []
        for step in (partial(engine.step, worst), partial(engine.step, larger), partial(engine.accumulate, [larger])):
            try:
                step()
            except (memfit.NonFiniteLossError, memfit.BatchError) as error:
                told.append(str(error))
        found.append((told, small.same(whole(model), before), engine.step(own).loss))
        engine.sharded.close()
    return found


def messages(rank: int, plans: Sequence[dict[str, Any]], build: Callable[[], Built]) -> list[int]:
    """For each plan: how often the engine itself sends to the other rank in a step. Torch's engines do so by other ways."""
    found = []
    for data in plans:
        model, sample, loss_fn = build()
        engine = memfit.apply(memfit.Plan.from_json(data), model, loss_fn, sgd)
        assert engine.sharded is not None
        own = part_of(sample, rank, engine.sharded.ranks)
        engine.step(own)
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
            mock.patch.object(dist, "isend", wraps=dist.isend) as sent,
        ):
            engine.step(own)
        found.append(reduced.call_count + sent.call_count)
        engine.sharded.close()
    return found


class Detaching(nn.Module):
    """In the forwards named its head's bias gets no gradient; the operations are the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 32)
        self.forwards, self.without = 0, (-1, -1)

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        first, last = self.without
        bias = self.head.bias.detach() if first <= self.forwards <= last else self.head.bias
        return functional.linear(functional.gelu(self.body(x)), self.head.weight, bias)


def detaching() -> Built:
    return Detaching(), small.rows(32), small.squared_error


def without_a_gradient(rank: int, plans: Sequence[dict[str, Any]]) -> list[tuple[str, bool, bool, bool]]:
    """For each plan: what the second of three steps raises, in whose last forward a parameter gets no gradient on the last rank, and what it leaves.

    That is: whether nothing has changed, whether there are gradients, and whether the parameters after all steps are those of a run without it.
    """
    found = []
    for data in plans:
        plan, ends = memfit.Plan.from_json(data), []
        for troubled in (True, False):
            model = Detaching()
            engine = memfit.apply(plan, model, small.squared_error, sgd)
            assert engine.sharded is not None
            own = part_of(small.rows(64), rank, engine.sharded.ranks)
            step = partial(engine.accumulate, [own]) if plan.choices.micro_batches > 1 else partial(engine.step, own)
            step()
            if troubled:
                before = whole(model)
                last = model.forwards + plan.choices.micro_batches
                if rank == engine.sharded.ranks - 1:
                    model.without = last, last
                with pytest.raises(memfit.EngineError) as raised:
                    step()
                model.without = -1, -1  # the failed step has put the number of forwards back
                unchanged, left = small.same(whole(model), before), engine.has_gradients()
            step()
            ends.append(whole(model))
            engine.sharded.close()
        found.append((str(raised.value), unchanged, left, small.same(*ends)))
    return found


def refuse(*_: Any) -> NoReturn:
    raise ValueError("it is enough")


def beside_a_rank_that_fails(
    rank: int, plans: Sequence[dict[str, Any]], where: str, by: str
) -> list[tuple[str, bool, bool]]:
    """For each plan: what the second of three steps raises, in whose last micro-batch the last rank fails, and whether anything has changed.

    And whether the parameters after all steps are those of a run without it.

    Args:
        where: "graph" where its loss requires no gradient, "backward" where that raises half-way, or "forward".
        by: "engine", or "trainer" where the steps are not the engine's.
    """
    found = []
    for data in plans:
        plan, ends = memfit.Plan.from_json(data), []
        for troubled in (True, False):
            model, losses, fails = small.chain(3), [0], [-1]

            def loss_fn(model: nn.Module, batch: Any, losses: list[int] = losses, fails: list[int] = fails) -> Tensor:
                losses[0] += 1
                if losses != fails:
                    return small.squared_error(model, batch)
                if where == "forward":
                    refuse()
                handle = model.get_submodule("4").register_forward_hook(
                    lambda *given: given[-1].register_hook(refuse) and None
                )
                loss = small.squared_error(model, batch)
                handle.remove()
                return loss.detach() if where == "graph" else loss

            engine = memfit.apply(plan, model, loss_fn, sgd)
            assert engine.sharded is not None
            assert engine.optimizer is not None
            own = part_of(small.rows(64), rank, engine.sharded.ranks)
            shared = SharedStep(engine.sharded, accumulates=False)
            for step in range(3 if troubled else 2):
                before = whole(model)
                fails[0] = losses[0] + plan.choices.micro_batches if step == 1 and troubled and rank else -1
                try:
                    if by == "engine":
                        engine.step(own)
                        continue
                    with shared.micro_batch(last=True):
                        with engine.forward():
                            loss = loss_fn(model, own)
                        loss.backward()
                    engine.optimizer.step()
                except (memfit.EngineError, memfit.InputError, RuntimeError, ValueError) as error:
                    told, unchanged = f"{type(error).__name__}: {error}", small.same(whole(model), before)
                engine.optimizer.zero_grad()
            ends.append(whole(model))
            engine.sharded.close()
        found.append((told, unchanged, small.same(*ends)))
    return found


def looped_without_a_gradient(rank: int, plans: Sequence[dict[str, Any]], loop: str) -> list[tuple[str, bool, bool]]:
    """For each plan: what is raised in the second of three steps that are not the engine's, in which a parameter gets no gradient on the last rank.

    And whether anything has changed, and whether the parameters after all steps are those of a run without it.

    Args:
        loop: "clipped" or "accumulated" in a loop of the script's own, "left out" or "skipped" where that rank
            leaves its backward out, or the batch, or "trainer".
    """
    found = []
    for data in plans:
        plan, ends, told, unchanged = memfit.Plan.from_json(data), [], "", False
        for troubled in (True, False):
            model = Detaching()
            engine = memfit.apply(plan, model, small.squared_error, sgd)
            assert engine.sharded is not None
            assert engine.optimizer is not None
            # All ranks leave a batch out, which is no trouble.
            with engine.forward():
                small.squared_error(model, small.rows(16))
            own = part_of(small.rows(64), rank, engine.sharded.ranks)
            shared = SharedStep(engine.sharded, accumulates=False)
            for step in range(3 if troubled else 2):
                lacks = troubled and step == 1 and rank == engine.sharded.ranks - 1
                model.without = (1, 1 << 30) if lacks else (-1, -1)
                before = whole(model)
                try:
                    for _ in range(2 if loop == "accumulated" else 1):
                        with shared.micro_batch(last=True) if loop == "trainer" else nullcontext():
                            with engine.forward():
                                loss = small.squared_error(model, own)
                            if loop not in {"left out", "skipped"} or not lacks:
                                loss.backward()
                    if loop == "clipped":
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    if loop == "skipped" and lacks:
                        with engine.forward():
                            pass
                    engine.optimizer.step()
                except memfit.EngineError as error:
                    told, unchanged = str(error), small.same(whole(model), before)
                engine.optimizer.zero_grad()
            ends.append(whole(model))
            engine.sharded.close()
        found.append((told, unchanged, small.same(*ends)))
    return found


def each(rank: int, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What a function of this module tells of each case, in the same processes."""
    return [function(rank, *case) for case in cases]
