"""What a rank does in the tests of planned pipelines: it trains under a plan, and tells what that took and gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
import small
from memfit import batches
from memfit.engine import compiled
from memfit.sharding.pipelined import PipelinedModel
from models import calls
from models.padded import LENGTH, Padded, loss_of, tokens
from parallel import stage_models
from sharding import steps
from sharding.ranks import on_ranks

together = partial(on_ranks, limit=400.0)  # several plans in one start
OPTIMIZERS: dict[str, Any] = {
    **steps.OPTIMIZERS,
    "one by one": partial(torch.optim.AdamW, fused=False, foreach=False),
    "at once": partial(torch.optim.AdamW, foreach=True),
    # For random programs, some of which leave all bounds in a step that is a hundred times as large.
    "slow sgd": partial(torch.optim.SGD, lr=0.001, momentum=0.9),
}
SAMPLES = 32  # of all ranks


def staged(name: str) -> steps.Built:
    """One of the models that are cut into stages."""
    model, _, loss_fn, _ = stage_models.built(name)
    return model, stage_models.MODELS[name][1](SAMPLES), loss_fn


def decoder() -> steps.Built:
    return staged("decoder")


def short_decoder(name: str = "decoder") -> steps.Built:
    """Of two blocks, which are cut into five parts: four stages have enough of them, and eight are too many."""
    model, sample, loss_fn = staged(name)
    blocks: Any = model.blocks
    del blocks[2:]
    return model, sample, loss_fn


def short_double() -> steps.Built:
    """In float64, the loss too."""
    model, sample, loss_fn = short_decoder()
    return model.double(), sample, loss_fn


def half_frozen_double() -> steps.Built:
    """In float64, of which the first half trains nothing."""
    model = small.chain(4).double()
    for layer in list(model)[: len(model) // 2]:
        layer.requires_grad_(False)
    return model, tuple(part.double() for part in small.rows(SAMPLES)), small.squared_error


def short_tied() -> steps.Built:
    return short_decoder("tied")


def weighed() -> steps.Built:
    """With a tensor in the batch that every rank has alike: what each word counts for."""
    model, sample, _ = decoder()

    def loss_fn(one: nn.Module, batch: Any) -> Tensor:
        logits, labels = one(batch["ids"]).flatten(0, 1), batch["labels"].flatten()
        return functional.cross_entropy(logits, labels, batch["weights"], reduction="sum") / 100.0

    return model, {**sample, "weights": torch.linspace(0.5, 1.5, stage_models.WORDS)}, loss_fn


def few_rows() -> steps.Built:
    return small.chain(2), small.rows(4), small.squared_error


def many_rows() -> steps.Built:
    return small.chain(4), small.rows(SAMPLES), small.squared_error


def tied() -> steps.Built:
    return staged("tied")


def blocks_that_share() -> steps.Built:
    """Two blocks with another one between them have a weight in common."""
    model, sample, loss_fn = staged("decoder")
    blocks: Any = model.blocks
    blocks[2].qkv.weight = blocks[0].qkv.weight
    return model, sample, loss_fn


def encoder_decoder() -> steps.Built:
    return staged("encoder_decoder")


def sequential() -> steps.Built:
    return staged("sequential")


def vgg() -> steps.Built:
    return staged("vgg")


def padded() -> steps.Built:
    """Nothing of the first micro-batch is padding, some of all others is."""
    lengths = [LENGTH] * 8 + [LENGTH - 1 - number % 20 for number in range(SAMPLES - 8)]
    return Padded(), tokens(lengths), loss_of


def padded_in_turns() -> steps.Built:
    """The same with padding in every second micro-batch."""
    model, (ids, filled), loss_fn = padded()
    whole, mixed = torch.arange(8), torch.arange(8, SAMPLES)
    turns = torch.cat([whole, mixed[:8], whole, mixed[8:16]])
    return model, (ids[turns], filled[turns]), loss_fn


class PaddedLate(Padded):
    """It asks whether there is padding at its end: till then it runs one path."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, tokens: Tensor, filled: Tensor) -> Tensor:
        x = self.embed(tokens)
        for mix, after in zip(self.mixing, self.after, strict=True):
            x = x + after((mix(x) @ x.transpose(1, 2)).softmax(-1) @ x)
        return x if filled.all() else x * filled[:, :, None]


def padded_late() -> steps.Built:
    _, sample, loss_fn = padded()
    return PaddedLate(), sample, loss_fn


def squared() -> steps.Built:
    return small.chain(2), small.rows(SAMPLES), small.squared_error


def checkpointed() -> steps.Built:
    """Blocks in checkpoints of the user's, called twice: with what an earlier stage has, too."""
    torch.manual_seed(0)
    model, loss_fn = calls.PROGRAMS["checkpoints_of_the_users"]()
    return model, calls.batch(2 * SAMPLES), loss_fn


def resnet() -> steps.Built:
    return staged("resnet")


class MaskedFirst(nn.Module):
    """Of a mask that forward makes before its parts the first one alone reads something."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2 * small.WIDTH, small.WIDTH)
        self.others = nn.ModuleList(Widening() for _ in range(5))

    def forward(self, rows: Tensor, filled: Tensor) -> Tensor:
        mask = filled[:, None].expand(-1, 64 * small.WIDTH).float()
        x = self.first(torch.cat([rows, rows * mask[:, : small.WIDTH]], -1))
        for other in self.others:
            x = other(x)
        return x


class Widening(nn.Module):
    """Its forward takes more than its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(small.WIDTH, small.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shift = x.detach().repeat(1, 64).mean(-1, keepdim=True)
        y: Tensor = self.linear(x) - shift
        return y


def masked_first() -> steps.Built:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(SAMPLES, small.WIDTH, generator=generator)
    return MaskedFirst(), (rows, torch.arange(SAMPLES) % 2 == 0), lambda m, b: m(*b).square().mean()


# Since torch 2.15 messages are received into memory of their own. Interleaved, one may wait while another one is computed with, and is counted throughout.
RELEASED = torch.__version__ >= "2.15"


def as_predicted(peaks: Sequence[int], plan: memfit.Plan, close: float = 0.0) -> bool:
    """Whether ranks hold what a plan predicts, up to such a share of it.

    Where messages are released, whether they hold no more, and at most 8 bytes less; where one may wait, as much less as there is.
    """
    waits = plan.choices.sharding.startswith("interleaved")

    def agrees(peak: int, most: int) -> bool:
        if RELEASED:
            return (1 - close) * peak <= most and (waits or most <= (1 + close) * peak + 8)
        return abs(peak - most) <= close * peak

    return all(agrees(peak, rank.peak_bytes) for peak, rank in zip(peaks, plan.prediction.ranks, strict=True))


class Ran(NamedTuple):
    """What one rank has shown."""

    gradients: dict[str, Tensor]
    losses: list[float]
    parameters: dict[str, Tensor]
    whole: dict[str, Tensor]
    peak_bytes: int
    waiting: float


def run(
    rank: int, plans: Sequence[dict[str, Any]], build: Callable[[], steps.Built], optimizer: str, steps_taken: int = 3
) -> list[Ran]:
    """For each plan: gradients of a first pass, then losses and parameters after some steps, and the peak of a metered one."""
    found = []
    for data in plans:
        torch.manual_seed(1)
        model, sample, loss_fn = build()
        plan = memfit.Plan.from_json(data)
        engine = memfit.apply(plan, model, loss_fn, OPTIMIZERS[optimizer])
        sharded = engine.sharded
        assert isinstance(sharded, PipelinedModel)
        # A view would be counted with all that it is a view of.
        own = batches.map_tensors(torch.clone, steps.part_of(sample, rank, sharded.ranks))
        sharded.prepare(own)
        sharded.forward_backward(own, lambda _: nullcontext())
        gradients = {n: p.grad.clone() for n, p in sharded.named().items() if p.grad is not None}
        sharded.clear(accumulates=True)
        losses = [engine.step(own).loss for _ in range(steps_taken)]
        parameters = {name: p.detach().clone() for name, p in sharded.named().items()}
        whole = sharded.whole()
        # As predicted: followed as a whole, a forward's numbers (`x + 0.5`) take 8 bytes more than in stretches that are left alone.
        with patch.object(compiled, "CONFIRMED_EVERY", 0):
            records = [engine.step(own, meter=True) for _ in range(4)]
        assert not any(record.divergences for record in engine.records)
        assert all(record.recomputations == records[0].recomputations for record in records)
        peak = min(record.peak_bytes or 0 for record in records)
        found.append(Ran(gradients, losses, parameters, whole, peak, records[-1].waiting or 0.0))
        sharded.close()
    return found


def of_another_size(
    rank: int, plan: dict[str, Any], build: Callable[[], steps.Built], of_steps: Sequence[Sequence[int]]
) -> list[str]:
    """What is said of each batch of which each rank hands in so many samples."""
    model, sample, loss_fn = build()
    engine = memfit.apply(memfit.Plan.from_json(plan), model, loss_fn, OPTIMIZERS["sgd"])
    told = []
    for sizes in of_steps:
        own = batches.split(sample, [size for size in (*sizes, SAMPLES - sum(sizes)) if size])[rank]
        try:
            engine.step(own)
        except memfit.BatchError as error:
            told.append(str(error))
    return told


def undivided(
    build: Callable[[], steps.Built], optimizer: str, clip_norm: float | None = None
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Plain PyTorch on the whole batch: the same figures."""
    model, sample, loss_fn = build()
    loss_fn(model, sample).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    losses, parameters = steps.alone(build, optimizer, clip_norm=clip_norm)
    return gradients, losses, dict(zip((n for n, _ in model.named_parameters()), parameters, strict=True))


class Recurrent(nn.Module):
    """Each layer has its parameters in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def recurrent() -> steps.Built:
    torch.manual_seed(0)
    return Recurrent(), torch.randn(SAMPLES, 5, 16), lambda model, batch: model(batch).square().mean()


class EitherWay(nn.Module):
    """Calls its layers the other way round where the batch has a number that is far below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers) if bool((x < -1000).any()) else self.layers:
            x = layer(x).tanh()
        return x


def either_way() -> steps.Built:
    torch.manual_seed(0)
    return EitherWay(), torch.randn(16, 32), lambda model, batch: model(batch).square().mean()


def turned_round_on(rank: int, first: int, data: dict[str, Any]) -> tuple[str, float]:
    """What is said of a step whose batch has such a number on this rank and those after it, and the loss of the next, which has none."""
    model, sample, loss_fn = either_way()
    engine = memfit.apply(memfit.Plan.from_json(data), model, loss_fn, OPTIMIZERS["sgd"])
    own = steps.part_of(sample, rank, 4).clone()
    with pytest.raises(memfit.InputError) as told:
        engine.step(own - 1e4 if rank >= first else own)
    return str(told.value), engine.step(own).loss


class Averaging(nn.Module):
    """Its own forward writes moving averages before, between and after its parts, in place and by assigning another tensor."""

    assigned: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        for name in ("early", "between", "late", "assigned"):
            self.register_buffer(name, torch.zeros(32))
        self.register_buffer("calls", torch.zeros(()))

    def _average(self, name: str, x: Tensor) -> None:
        self.get_buffer(name).mul_(0.9).add_(x.detach().mean(0), alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self._average("early", x)
        for number, layer in enumerate(self.layers):
            x = x + layer(x).tanh()
            if number == 0:
                self._average("between", x)
                self.assigned = 0.9 * self.assigned + 0.1 * x.detach().mean(0)
        self._average("late", x)
        self.calls += 1
        return x


def averaging() -> steps.Built:
    torch.manual_seed(0)
    return Averaging(), torch.randn(16, 32), lambda model, batch: model(batch).square().mean()


def averaged(rank: int, plan: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Buffers on this rank after two steps under a plan for two, and what is saved of them."""
    model, sample, loss_fn = averaging()
    engine = memfit.apply(memfit.Plan.from_json(plan), model, loss_fn, OPTIMIZERS["sgd"])
    for _ in range(2):
        engine.step(steps.part_of(sample, rank, 2))
    here, names = dict(model.named_buffers()), [name for name, _ in averaging()[0].named_buffers()]
    saved = engine.state_dict()
    return [{name: found[name] for name in names} for found in ((here, saved) if saved else (here,))]
