"""What forward itself writes (a momentum encoder, a codebook, a queue of keys, clipped weights): under a plan it is written as in plain PyTorch, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAveragePerChannelMinMaxObserver
from torch.nn import functional

import memfit
import small
from memfit.errors import SplitError

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, CODES, KEYS = 64, 48, 256


class Pair(nn.Module):
    """A trained encoder and one that follows it, which begins as its copy (He et al., 2020)."""

    def __init__(self, *, new_storage: bool = False) -> None:
        super().__init__()
        self.query, self.key = small.chain(3), small.chain(3)
        self.key.requires_grad_(requires_grad=False)
        self.new_storage = new_storage

    def move(self) -> None:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                if self.new_storage:
                    key.data = 0.9 * key.data + 0.1 * query.data
                else:
                    key.mul_(0.9).add_(query, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.move()
        with torch.no_grad():
            target = self.key(x)
        return self.query(x) - target


class Queue(Pair):
    """The same with a queue of earlier keys as negatives, and a pointer into it."""

    keys: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", functional.normalize(torch.randn(small.WIDTH, KEYS), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        query = functional.normalize(self.query(x), dim=1)
        self.move()
        with torch.no_grad():
            key = functional.normalize(self.key(x + 0.1), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.keys.clone()], dim=1) / 0.07
        place = int(self.place)
        self.keys[:, place : place + len(x)] = key.T
        self.place[0] = (place + len(x)) % KEYS
        return logits


class Codebook(nn.Module):
    """A vector quantiser whose codes are moving averages of what falls to them (van den Oord et al., 2017, appendix A.1)."""

    count: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = small.chain(3), small.chain(2)
        self.codes = nn.Parameter(torch.randn(CODES, small.WIDTH), requires_grad=False)
        self.register_buffer("count", torch.ones(CODES))
        self.register_buffer("total", self.codes.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        nearest = functional.one_hot(torch.cdist(z.detach(), self.codes).argmin(1), CODES).to(z.dtype)
        found = nearest @ self.codes
        with torch.no_grad():
            self.count.mul_(0.9).add_(nearest.sum(0), alpha=0.1)
            self.total.mul_(0.9).add_(nearest.T @ z, alpha=0.1)
            self.codes.data.copy_(self.total / (self.count + 1e-5).unsqueeze(1))
        return self.decoder(z + (found - z).detach())


class Clipped(nn.Module):
    """Weights are clipped before they are used (Arjovsky et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small.chain(3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in self.body.parameters():
                parameter.clamp_(-0.1, 0.1)
        return self.body(x)


class ReadsStatistics(nn.Module):
    """Divides by running statistics before a batch norm moves them, as training with fake quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.body = nn.Linear(small.WIDTH, small.WIDTH), small.chain(2)
        self.norm = nn.BatchNorm1d(small.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        spread = (self.norm.running_var + torch.zeros_like(h)).sqrt()
        return self.body(self.norm(h / spread).tanh())


class Observer(nn.Module):
    """Scales each channel by the largest value so far; how many channels there are it learns from its first batch, as observers of torch.ao do."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.into, self.body = nn.Linear(small.WIDTH, small.WIDTH), small.chain(2)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        now = h.detach().abs().amax(0)
        if not self.largest.numel():
            self.largest.resize_(now.shape).zero_()
        self.largest.copy_(torch.maximum(self.largest, now))
        return self.body((h / self.largest).tanh())


class Quantized(nn.Module):
    """Weights rounded as in quantization-aware training, each row by a scale of its own: one kernel finds the scales and gives them their number."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.body = nn.Linear(small.WIDTH, 2 * small.WIDTH, bias=False), small.chain(4)
        self.rounded = FusedMovingAvgObsFakeQuantize(
            MovingAveragePerChannelMinMaxObserver, -128, 127, dtype=torch.qint8, qscheme=torch.per_channel_symmetric
        )

    def forward(self, x: Tensor) -> Tensor:
        h = functional.linear(x, self.rounded(self.into.weight))
        return self.body(h.unflatten(-1, (2, -1)).mean(-2))


def first_is_right(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


WRITING: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "momentum": (Pair, small.squared_error),
    "momentum in new storages": (lambda: Pair(new_storage=True), small.squared_error),
    "queue of keys": (Queue, first_is_right),
    "codebook": (Codebook, small.squared_error),
    "clipped weights": (Clipped, small.squared_error),
    "statistics that were read": (ReadsStatistics, small.squared_error),
    "a buffer that is resized": (Observer, small.squared_error),
    "buffers that a kernel resizes": (Quantized, small.squared_error),
}


def built(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    build, loss_fn = WRITING[name]
    return build(), loss_fn


def batch(step: int) -> tuple[Tensor, ...]:
    return tuple(tensor + 0.01 * step for tensor in small.rows(ROWS))


@pytest.mark.parametrize("name", WRITING)
def test_training_under_a_plan_writes_the_same_bits(name: str) -> None:
    plain, loss_fn = built(name)
    optimizer = small.adamw(p for p in plain.parameters() if p.requires_grad)
    losses = []
    for step in range(4):
        loss = loss_fn(plain, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = memfit.plan(built(name)[0], batch(0), loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    six_tenths = round(0.6 * whole.prediction.plain_peak_bytes)
    for budget in (1 << 50, max(six_tenths, memfit.smallest_budget(whole))):
        made, (model, _) = memfit.replan(whole, budget), built(name)
        engine = memfit.apply(made, model, loss_fn, small.adamw)
        records = [engine.step(batch(step), meter=step == 3) for step in range(4)]
        assert [record.loss for record in records] == losses
        assert small.same(small.state_of(model), small.state_of(plain))
        assert records[-1].peak_bytes == made.prediction.peak_bytes
        assert not any(record.divergences for record in records)
    assert not made.script.plain


def test_a_rehearsal_gives_a_buffer_that_is_resized_its_size_back() -> None:
    model, loss_fn = built("a buffer that is resized")
    memfit.fit(model, batch(0), loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    assert model.get_buffer("largest").shape == (0,)


@pytest.mark.parametrize(
    "name",
    set(WRITING)
    - {
        *("clipped weights", "statistics that were read"),
        *("a buffer that is resized", "buffers that a kernel resizes"),
    },
)
def test_micro_batches_that_would_write_again_are_refused(name: str) -> None:
    model, loss_fn = built(name)
    with pytest.raises(SplitError, match="forward itself writes .* parameters that are not trained"):
        memfit.plan(model, batch(0), loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 2})


@pytest.mark.parametrize("held", ["by the model", "by the loss"])
def test_an_encoder_that_is_hidden_is_left_alone_by_planning_and_refused_in_micro_batches(held: str) -> None:
    pair = Pair()
    follower = pair.key
    del pair.key
    vars(pair)["key"] = follower  # as in a list: it is among no parameters
    model = pair if held == "by the model" else pair.query
    with torch.no_grad():
        for parameter in follower.parameters():
            parameter.add_(0.1)  # else the first moves change nothing
    before = small.state_of(follower)

    def loss_fn(_: nn.Module, x: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = pair(x[0]).square().mean()
        return loss

    with pytest.raises(SplitError, match=r"forward itself writes 12 parameters that are not trained \(Sequential\.0\."):
        memfit.plan(model, batch(0), loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 2})
    memfit.fit(model, batch(0), loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    assert small.same(small.state_of(follower), before)


def test_what_follows_is_left_alone_by_planning_where_forward_reads_a_number() -> None:
    """A pointer into the queue: what real forwards read of the batch is looked at, and the encoder moves in each."""
    model, loss_fn = built("queue of keys")
    with torch.no_grad():
        for parameter in model.get_submodule("key").parameters():
            parameter.add_(0.1)  # else the first moves change nothing
    before = small.state_of(model)
    memfit.plan(model, batch(0), loss_fn, 1 << 50, small.adamw, fixed={"micro_batches": 1})
    assert small.same(small.state_of(model), before)


class Drifting(nn.Module):
    """A buffer that forward moves and the next forward reads."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = small.chain(2)
        self.register_buffer("centre", torch.zeros(small.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) - self.centre.clone()
        self.centre.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return out


def test_micro_batches_that_read_what_an_earlier_one_wrote_are_refused() -> None:
    with pytest.raises(SplitError, match="forward writes what the next forward reads"):
        memfit.plan(Drifting(), batch(0), small.squared_error, 1 << 50, small.adamw, fixed={"micro_batches": 2})
