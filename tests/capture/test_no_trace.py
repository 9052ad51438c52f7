"""Planning leaves no trace: whatever a forward writes while it is looked at, the model is as before afterwards."""

from __future__ import annotations

import copy
import random
import types
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit.capture import isolation
from memfit.errors import SplitError

pytestmark = pytest.mark.usefixtures("one_thread")


class Momentum(nn.Module):
    """An encoder and its moving average (He et al., 2020), which forward itself moves."""

    def __init__(self, move: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        self.query, self.key = small.chain(2), small.chain(2)
        for parameter in self.key.parameters():
            parameter.requires_grad = False
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self.move(key, query)
        return self.query(x) - self.key(x).detach()


def in_place(key: nn.Parameter, query: nn.Parameter) -> None:
    key.mul_(0.9).add_(query, alpha=0.1)


def through_data(key: nn.Parameter, query: nn.Parameter) -> None:
    key.data.mul_(0.9).add_(query.data, alpha=0.1)


def by_new_data(key: nn.Parameter, query: nn.Parameter) -> None:
    key.data = 0.9 * key.data + 0.1 * query.data


class Remembering(nn.Module):
    """Counts, caches and lazily made tensors as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small.chain(2)
        self.calls = 0
        self.seen: list[int] = []
        self.cache: dict[int, Tensor] = {}
        self.lazy: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.shape[0])
        scale = self.cache.setdefault(x.shape[0], torch.ones(x.shape[-1]))
        if self.lazy is None:
            self.lazy = torch.full((x.shape[-1],), 0.5)
        random.random()
        return self.body(x * scale + self.lazy)


class Counter:
    """No module: an object that a module holds, with a tensor, a list and a generator."""

    def __init__(self) -> None:
        self.calls, self.norms, self.average = 0, [0.0], torch.zeros(small.WIDTH)
        self.generator = torch.Generator().manual_seed(3)


class Remembers(nn.Module):
    """All that a forward can change out of sight of parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small.chain(2)
        self.counter = Counter()
        self.queue: deque[Tensor] = deque([torch.zeros(small.WIDTH)], maxlen=3)
        self.averages: dict[str, Any] = {"input": torch.zeros(small.WIDTH), "pair": (torch.zeros(small.WIDTH), 1)}
        self.nested: list[list[int]] = [[]]
        self.seen: set[int] = set()
        self.numbers, self.python = np.random.default_rng(0), random.Random(0)
        self.teacher = [nn.Sequential(nn.Linear(small.WIDTH, small.WIDTH), nn.BatchNorm1d(small.WIDTH))]
        self.teacher[0][0].weight.grad = torch.ones(small.WIDTH, small.WIDTH)
        self.share = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.counter.calls += 1
        self.counter.norms.append(1.0)
        self.counter.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        x = x + 0.01 * torch.randn(x.shape, generator=self.counter.generator)
        self.queue.append(x.mean(0).detach())
        self.averages["input"].add_(x.mean(0))
        self.averages["pair"][0].add_(1.0)
        self.nested[0].append(len(x))
        self.seen.add(self.counter.calls)
        self.share = 0.5 + 0.1 * self.numbers.random() + 0.1 * self.python.random()
        h = self.body(x * self.share)
        return h + self.queue[0] + self.teacher[0](x) + self.averages["input"]


class SelfTaught(nn.Module):
    """A forward that runs a backward of its own, which adds to gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.probe = small.chain(2), nn.Linear(small.WIDTH, 1)
        self.probe.weight.grad = torch.ones(1, small.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.probe(x).mean().backward()
        return self.body(x)


class Centred(nn.Module):
    """A criterion with a moving centre (Caron et al., 2021), which no model knows."""

    def __init__(self) -> None:
        super().__init__()
        self.centre, self.calls = torch.zeros(small.WIDTH), 0
        self.register_buffer("scale", torch.ones(small.WIDTH))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        loss = ((out - self.centre) * self.scale.clone() - target).square().mean()
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        self.scale.mul_(0.99).add_(out.detach().std(0), alpha=0.01)
        return loss


def state(model: nn.Module) -> Any:
    """Parameters with their storages, versions, gradients and bits, and all plain attributes."""
    parameters = [
        (p.untyped_storage()._cdata, p._version, p.grad, p.requires_grad, p.detach().clone())
        for p in model.parameters()
    ]
    attributes = {
        name: {k: repr(v) for k, v in vars(module).items() if not k.startswith("_")}
        for name, module in model.named_modules()
    }
    return parameters, attributes, random.getstate(), torch.get_rng_state()


def same(one: Any, other: Any) -> bool:
    for a, b in zip(one[0], other[0], strict=True):
        if a[:4] != b[:4] or not torch.equal(a[4], b[4]):
            return False
    return one[1] == other[1] and one[2] == other[2] and bool(torch.equal(one[3], other[3]))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Momentum(in_place),
        lambda: Momentum(through_data),
        lambda: Momentum(by_new_data),
        Remembering,
    ],
    ids=["in place", "through data", "new data", "attributes"],
)
def test_planning_leaves_the_model_as_it_was(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, sample = build(), small.rows(16)
    before = state(model)
    memfit.plan(model, sample, small.squared_error, 1 << 50, small.adamw)
    assert same(before, state(model))
    with suppress(SplitError):  # a forward that writes parameters is refused, without a trace all the same
        memfit.plan(model, sample, small.squared_error, 1 << 50, small.adamw, fixed={"micro_batches": 2})
    assert same(before, state(model))


def remembered(model: nn.Module) -> Any:
    """Everything an object holds, copied as deep as it goes, and which tensors these are."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(vars(model)), [(id(t), id(t.grad), t._version) for t in tensors]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return type(one) is type(other) and bool(torch.equal(one, other)) and alike(one.grad, other.grad)
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, torch.Generator):
        return alike(one.get_state(), other.get_state())
    if isinstance(one, random.Random):
        return bool(one.getstate() == other.getstate())
    if isinstance(one, np.random.Generator):
        return alike(one.bit_generator.state, other.bit_generator.state)
    return (
        alike(vars(one), vars(other))
        if (hasattr(one, "__dict__") and not callable(one)) or isinstance(one, nn.Module)
        else one == other
    )


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("build", [Remembers, SelfTaught])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_that_hangs_on_a_module_changes(build: Callable[[], nn.Module], micro_batches: int) -> None:
    torch.manual_seed(0)
    model, sample = build(), small.rows(16)
    before = remembered(model)
    with suppress(SplitError):  # a batch that does not split is refused, without a trace all the same
        memfit.plan(model, sample, small.squared_error, 1 << 50, small.adamw, fixed={"micro_batches": micro_batches})
    after = remembered(model)
    assert after[1] == before[1]
    for name, value in before[0].items():
        assert alike(value, after[0][name]), name
    assert list(after[0]) == list(before[0])


@pytest.mark.parametrize("named", ["closed over", "default", "bound", "partial"])
def test_a_criterion_of_the_loss_function_is_as_before(named: str) -> None:
    model, sample, criterion = small.chain(2), small.rows(16), Centred()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return criterion(model(batch[0]), batch[1])

    def with_default(model: nn.Module, batch: Any, judge: nn.Module = criterion) -> Tensor:
        return judge(model(batch[0]), batch[1])

    def given(judge: nn.Module, model: nn.Module, batch: Any) -> Tensor:
        return judge(model(batch[0]), batch[1])

    ways: dict[str, Any] = {
        "closed over": loss,
        "default": with_default,
        "bound": types.MethodType(given, criterion),
        "partial": partial(given, criterion),
    }
    before = remembered(criterion)
    memfit.plan(model, sample, ways[named], 1 << 50, small.adamw)
    after = remembered(criterion)
    assert alike(before[0], after[0])
    assert after[1] == before[1]
    assert type(criterion.centre) is Tensor


class Meter:
    """As metrics are kept beside a loss."""

    def __init__(self) -> None:
        self.count, self.history, self.of = 0, [], {"mean": [0.5]}  # type: ignore[var-annotated]

    def update(self, loss: Tensor) -> None:
        self.count += 1
        self.history.append(loss.detach())
        self.of["mean"].append(loss.item())
        self.of.setdefault("largest", []).append(loss.item())


@pytest.mark.parametrize("bound", [False, True])
def test_what_a_loss_function_notes_besides_is_as_before(*, bound: bool) -> None:
    model, sample = small.chain(2), small.rows(8)
    history: list[Tensor] = []
    meter = Meter()

    def closes_over(model: nn.Module, batch: Any) -> Tensor:
        loss = small.squared_error(model, batch)
        history.append(loss)
        meter.update(loss)
        return loss

    class Own:
        def __init__(self) -> None:
            self.history, self.steps = history, 0

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            self.steps += 1
            return closes_over(model, batch)

    own = Own()
    engine = memfit.fit(model, sample, own.loss if bound else closes_over, "1GiB", small.adamw)
    assert (history, own.steps, vars(meter)) == ([], 0, vars(Meter()))
    engine.step(sample)
    assert (len(history), own.steps, meter.count) == (1, int(bound), 1)
    assert meter.of["mean"] == [0.5, history[0].item()]


class Normalises(nn.Module):
    """Changes what it is given: in place (Whisper masks its features so), and each sample by itself, so that the batch splits.

    Args:
        reads: forward asks an activation for a number, so that it is captured for real.
    """

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.body, self.reads = small.chain(2), reads

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(x.mean(1, keepdim=True)).div_(1 + x.std(1, keepdim=True))
        made: Tensor = self.body(x)
        return made * 2 if self.reads and made.sum().item() > 1e9 else made


@pytest.mark.alternate(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fixed", [{"micro_batches": 1}, {"micro_batches": 4}])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_sample_that_forward_writes_into_is_as_before(fixed: dict[str, int], ranks: int, *, reads: bool) -> None:
    torch.manual_seed(0)
    model, sample = Normalises(reads=reads), small.rows(16)
    before = [(each.clone(), each._version) for each in sample]
    with suppress(memfit.InputError):  # ranks of a model that reads an activation
        memfit.plan(model, sample, small.squared_error, 1 << 50, small.adamw, fixed=fixed, devices=ranks)
    assert all(torch.equal(now, then) for now, (then, _) in zip(sample, before, strict=True))
    assert [each._version for each in sample] == [version for _, version in before]


def test_a_sample_that_a_loss_differentiates_by_and_a_rehearsal_writes_into_is_as_before() -> None:
    sample = small.rows(16)
    before = [each.clone() for each in sample]

    def penalty(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        made = model(x)
        (slope,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        return slope.square().mean()

    memfit.fit(small.chain(2), sample, penalty, 1 << 50, small.adamw)
    assert not sample[0].requires_grad
    assert sample[0].grad is None
    memfit.fit(Normalises(), sample, small.squared_error, 1 << 50, small.adamw)
    assert all(torch.equal(now, then) for now, then in zip(sample, before, strict=True))


def test_a_dataset_that_the_sample_is_a_part_of_is_as_before() -> None:
    data, targets = torch.randn(64, small.WIDTH), torch.randn(64, small.WIDTH)
    before = data.clone()
    memfit.plan(Normalises(), (data[8:24], targets[8:24]), small.squared_error, 1 << 50, small.adamw)
    assert torch.equal(data, before)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_function_may_take_entries_out_of_its_batch(micro_batches: int) -> None:
    torch.manual_seed(0)
    model, (x, y) = small.chain(2), small.rows(16)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, rest = batch
        labels = inputs.pop("labels")
        rest.append(inputs["x"].mean())
        inputs["x"] = inputs["x"] + 1
        return (model(inputs["x"]) - labels).square().mean()

    kept: list[Any] = []
    sample = ({"x": x, "labels": y}, kept)
    plan = memfit.plan(model, sample, loss, 1 << 50, small.adamw, fixed={"micro_batches": micro_batches})
    memfit.apply(plan, model, loss).step(sample)
    assert list(sample[0]) == ["x", "labels"]
    assert sample[0]["x"] is x
    assert not kept


class Listed(nn.Module):
    """Blocks in a plain list of lists, and their parameters in a list that is registered (as N-BEATS has them)."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = [[small.chain(1), small.chain(1)], [small.chain(1)]]
        self.registered = nn.ParameterList(p for stack in self.stacks for block in stack for p in block.parameters())

    def forward(self, x: Tensor) -> Tensor:
        for stack in self.stacks:
            for block in stack:
                x = x + block(x)
        return x


def test_modules_in_plain_lists_are_captured_like_others() -> None:
    model = Listed()
    plan = memfit.plan(model, small.rows(), small.squared_error, 1 << 40, small.adamw, fixed={"micro_batches": 1})
    assert all(p.grad is None for p in model.parameters())
    engine = memfit.apply(plan, model, small.squared_error, small.adamw)
    engine.step(small.rows())
    peak = engine.step(small.rows(), meter=True).peak_bytes
    assert peak == pytest.approx(plan.prediction.peak_bytes, abs=512)


def test_large_tensors_in_containers_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set in a dictionary is no state of the model."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small.chain(1)
            self.rows = {"small": torch.zeros(small.WIDTH), "large": torch.zeros(64, small.WIDTH)}

        def forward(self, x: Tensor) -> Tensor:
            seen.append({name: rows.data_ptr() for name, rows in self.rows.items()})
            out: Tensor = self.body(x + self.rows["small"] + self.rows["large"][0])
            return out

    seen: list[dict[str, int]] = []
    monkeypatch.setattr(isolation, "LARGEST_PRIVATE_BYTES", 16 * small.WIDTH)
    model = Holds()
    own = {name: rows.data_ptr() for name, rows in model.rows.items()}
    memfit.plan(model, small.rows(8), small.squared_error, 1 << 50, small.adamw)
    assert seen
    assert all(each["small"] != own["small"] and each["large"] == own["large"] for each in seen)
