"""What is written down of a step: each storage with its bytes, birth and death, and what autograd keeps; and nothing of the model is changed."""

from __future__ import annotations

import queue
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import small
from memfit.capture import recorder
from memfit.capture.capture import capture, capture_real
from memfit.capture.source import StepSource
from memfit.errors import CaptureError
from memfit.planner.timeline import Timeline
from memfit.techniques.choices import Choices
from memfit.values.trace import BEFORE_STEP, Category, Phase, Trace
from models import case

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch hides this warning of its own, but not where warnings are errors; then no capture would be a fake one.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

BATCH, WIDTH = 8, 4
ROW = BATCH * WIDTH * 4  # bytes


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


def mean(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    return loss


def named(trace: Trace, name: str, phase: Phase = Phase.FORWARD) -> list[int]:
    return [
        e
        for e, op in enumerate(trace.events)
        if op >= 0 and trace.operations[op].name.split(".")[1] == name and trace.operations[op].phase is phase
    ]


@pytest.mark.parametrize("how", [capture, capture_real], ids=["fake", "real"])
def test_a_known_model_is_written_down_to_the_byte(how: Any) -> None:
    trace = how(StepSource(tiny(), torch.randn(BATCH, WIDTH), mean, lambda p: torch.optim.SGD(p, lr=0.1))).trace
    assert [op.name for op in trace.operations if op.phase is Phase.FORWARD] == [
        "aten.t.default",
        "aten.mm.default",
        "aten.tanh.default",
        "aten.t.default",
        "aten.mm.default",
        "aten.sum.default",
    ]
    assert trace.forward_events == 6
    first, act, second, total = (named(trace, n)[i] for n, i in (("mm", 0), ("tanh", 0), ("mm", 1), ("sum", 0)))
    made = {e: trace.operations[trace.events[e]].makes for e in (first, act, second, total)}
    storages = {e: trace.storages[made[e][0]] for e in made}
    assert all(len(m) == 1 for m in made.values())
    assert [storages[e].bytes for e in (first, act, second, total)] == [ROW, ROW, ROW, 4]
    assert [storages[e].birth for e in (first, act, second, total)] == [first, act, second, total]
    # Without autograd each lives until the next layer has read it.
    assert storages[first].death == act
    assert storages[act].death == second
    assert storages[second].death == total
    assert [storages[e].module for e in (first, act, second)] == ["0", "1", "2"]
    # What is there before: two weights and the batch.
    before = [s for s in trace.storages if s.birth == BEFORE_STEP]
    assert sorted(s.bytes for s in before if s.category is Category.PARAMETER) == [WIDTH * WIDTH * 4] * 2
    assert [s.bytes for s in before if s.category is Category.BATCH] == [ROW]
    assert all(s.death == len(trace.events) for s in before)
    # Autograd saves the batch, what tanh makes (for itself and for the second product), and the second weight.
    saved = [save.storage for save in trace.saves]
    assert saved.count(made[act][0]) == 2
    assert made[first][0] not in saved
    assert made[second][0] not in saved
    assert storages[act].category is Category.ACTIVATION
    assert storages[first].category is Category.TEMPORARY
    # Two gradients of the weights' sizes are made in backward and gone at the end.
    gradients = [s for s in trace.storages if s.category is Category.GRADIENT]
    assert [s.bytes for s in gradients] == [WIDTH * WIDTH * 4] * 2
    assert all(s.birth >= trace.forward_events for s in gradients)


@pytest.mark.parametrize("how", [capture, capture_real], ids=["fake", "real"])
def test_unpacks_come_in_backward_and_are_let_go(how: Any) -> None:
    trace = how(StepSource(small.chain(2), small.rows(16), small.squared_error, small.adamw)).trace
    assert all(save.by < trace.forward_events for save in trace.saves)
    for number, save in enumerate(trace.saves):
        for event, release in save.unpacks:
            assert trace.events[event] == ~number
            assert trace.forward_events <= event <= release <= trace.pass_events
            assert save.freed >= release
    assert sum(code < 0 for code in trace.events) == sum(len(save.unpacks) for save in trace.saves)
    phases = [trace.operations[code].phase for code in trace.events if code >= 0]
    assert phases == sorted(phases, key=list(Phase).index)
    states = [s for s in trace.storages if s.category is Category.OPTIMIZER_STATE]
    weights = sum(s.bytes for s in trace.storages if s.category is Category.PARAMETER)
    assert 2 * weights <= sum(s.bytes for s in states) <= 2 * weights + 4 * len(states)


def test_clipping_has_a_phase_of_its_own() -> None:
    trace = capture(StepSource(small.chain(1), small.rows(16), small.squared_error, small.adamw, clip_norm=1.0)).trace
    assert any(op.phase is Phase.CLIP for op in trace.operations)
    without = capture(StepSource(small.chain(1), small.rows(16), small.squared_error, small.adamw)).trace
    assert not any(op.phase is Phase.CLIP for op in without.operations)


def test_a_write_in_place_and_a_view_are_told_apart() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        h: Tensor = model(x).view(-1).clone()
        h.mul_(2)
        return h[1:].sum()

    trace = capture(StepSource(tiny(), torch.randn(BATCH, WIDTH), loss)).trace
    (clone,), (mul,), (view,) = named(trace, "clone"), named(trace, "mul_"), named(trace, "view")
    (copy,) = trace.operations[trace.events[clone]].makes
    assert trace.operations[trace.events[mul]].writes == (copy,)
    assert trace.operations[trace.events[mul]].makes == ()
    assert trace.operations[trace.events[mul]].outputs == (-1,)
    assert trace.operations[trace.events[view]].makes == ()
    assert trace.operations[trace.events[view]].outputs == (-1,)


def test_random_operations_are_marked() -> None:
    trace = capture(StepSource(small.chain(1, dropout=0.5), small.rows(8), small.squared_error)).trace
    random = {op.name for op in trace.operations if op.random}
    assert random
    assert all("dropout" in name or "bernoulli" in name for name in random)
    certain = capture(StepSource(small.chain(1, dropout=0.5).eval(), small.rows(8), small.squared_error)).trace
    assert not any(op.random for op in certain.operations)


def test_operations_of_equal_shape_share_a_key() -> None:
    captured = capture(StepSource(small.chain(3), small.rows(8), small.squared_error))
    keys = {op.key for op in captured.trace.operations}
    assert keys == set(captured.calls)
    tanh = [op.key for op in captured.trace.operations if op.name == "aten.tanh.default"]
    assert len(tanh) == 3
    assert len(set(tanh)) == 1
    other = capture(StepSource(small.chain(3), small.rows(9), small.squared_error))
    assert not set(tanh) & {op.key for op in other.trace.operations}


# -- fake against real -----------------------------------------------------------------------------------------------------


def outline(trace: Trace) -> Any:
    """What must not depend on how a trace was captured; constants made out of sight aside."""
    return (
        [(op.name, op.module, op.reads, op.writes, op.makes, op.outputs, op.random) for op in trace.operations],
        [(s.bytes, s.category, s.module, s.birth, s.death) for s in trace.storages],
        [(s.storage, s.by, s.unpacks) for s in trace.saves],
        trace.events,
        (trace.forward_events, trace.pass_events),
    )


@pytest.mark.alternate(1)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "name", ["gpt_tied", "frozen", "bert_sdpa", "resnet", "unet", "twice", "channels_last", "mlp_mixer"]
)
def test_a_fake_capture_equals_a_real_one(name: str, micro_batches: int) -> None:
    model, sample, loss_fn = case(name).build()
    fake, real = (
        f(StepSource(model, sample, loss_fn, small.adamw), Choices(micro_batches)).trace
        for f in (capture, capture_real)
    )
    assert (fake.source, real.source) == ("fake", "real")
    for one, other in zip(outline(fake), outline(real), strict=True):
        assert one == other


@pytest.mark.filterwarnings("error")
def test_a_fake_capture_hands_backward_no_real_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real stand-ins take memory, hold arbitrary values, and make torch warn; where warnings are errors, fake capture is off."""
    handed: list[Tensor] = []
    unpack = recorder.Recorder._unpack

    def watched(self: recorder.Recorder, placeholder: Any) -> Tensor:
        tensor = unpack(self, placeholder)
        handed.append(tensor)
        return tensor

    monkeypatch.setattr(recorder.Recorder, "_unpack", watched)
    x, y = small.rows(16)
    capture(StepSource(small.chain(2), (x, y), small.squared_error))
    own = {x.data_ptr(), y.data_ptr()}  # the batch stays real
    assert all(isinstance(t, FakeTensor) or t.data_ptr() in own for t in handed)


# -- nothing is changed ----------------------------------------------------------------------------------------------------


class Hoarder(nn.Module):
    """Sets everything a forward can set: attributes, buffers, counters, caches, lists."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.constant = torch.arange(4.0)
        self.cache: Tensor | None = None
        self.made: dict[str, Tensor] = {}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x) + self.constant
        self.calls += 1
        self.seen = self.seen + 1
        self.cache = h.detach()
        self.last = h
        return h.sum()


def everything(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for attribute, value in module.__dict__.items():
            if attribute not in {"_parameters", "_buffers", "_modules", "made"}:
                found[f"{name}.{attribute}"] = value
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                found[f"{name}.{key}"] = tensor
    return found


@pytest.mark.parametrize("how", [capture, capture_real], ids=["fake", "real"])
def test_a_capture_leaves_the_model_as_it_was(how: Any) -> None:
    model = Hoarder()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    gradients = [p.grad for p in model.parameters()]
    before = everything(model)
    values = {k: v.clone() for k, v in before.items() if isinstance(v, Tensor)}
    generator = torch.get_rng_state()
    sample = torch.randn(6, 4)
    generator = torch.get_rng_state()
    sample_before = sample.clone()
    how(StepSource(model, sample, None, small.adamw), Choices(2))
    after = everything(model)
    assert set(after) == set(before)
    assert [k for k in before if after[k] is not before[k]] == []
    assert all(torch.equal(before[k], v) for k, v in values.items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(bool((g == 2).all()) for g in gradients if g is not None)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(sample, sample_before)
    assert not model.inner[0].weight.requires_grad or model.inner[0].weight.grad_fn is None


def test_a_generator_state_counts_from_when_it_is_taken() -> None:
    """What `torch.utils.checkpoint` keeps for a region is not there before the region is reached."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        first, act, last = model.children()
        return last(checkpoint(act, first(x), use_reentrant=False)).sum()  # type: ignore[no-any-return]

    trace = capture(StepSource(tiny(), torch.randn(BATCH, WIDTH), loss_of)).trace
    size = torch.get_rng_state().numel()
    kept = next(s for s in trace.storages if s.bytes == size)
    reached, again = named(trace, "tanh"), named(trace, "tanh", Phase.BACKWARD)
    assert kept.birth == reached[0] > 0
    assert again[0] <= kept.death < len(trace.events)
    levels = Timeline(trace).plain().levels
    assert levels[reached[0]] - levels[reached[0] - 1] == size + ROW


def test_a_generator_state_of_another_thread_is_not_of_the_step() -> None:
    taken: queue.SimpleQueue[Tensor] = queue.SimpleQueue()  # a list would be put back after the capture

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        other = threading.Thread(target=lambda: taken.put(torch.get_rng_state()))
        other.start()
        other.join()
        return model(x).sum()  # type: ignore[no-any-return]

    trace = capture(StepSource(tiny(), torch.randn(BATCH, WIDTH), loss_of)).trace
    assert taken.get().numel() not in {s.bytes for s in trace.storages}


class Keeps(nn.Module):
    """Keeps tensors of its forward in containers that live longer than the call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.by_name: dict[str, Tensor] = {}
        self.listed: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x)
        self.by_name["last"] = h.detach()
        self.listed.append(h.detach())
        return h.sum()


@pytest.mark.parametrize("how", [capture, capture_real], ids=["fake", "real"])
def test_containers_of_the_model_are_put_back_too(how: Any) -> None:
    model = Keeps()
    how(StepSource(model, torch.randn(6, 4)))
    assert model.by_name == {}
    assert model.listed == []


def test_caches_set_in_forward_do_not_leak_fake_tensors() -> None:
    model = Hoarder()
    capture(StepSource(model, torch.randn(6, 4)))
    assert not [k for k, v in everything(model).items() if isinstance(v, FakeTensor)]
    model(torch.randn(6, 4)).backward()  # and the model still runs
    assert model.calls == 1


def test_a_model_that_fails_is_put_back_too() -> None:
    class Fails(Hoarder):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ArithmeticError

    model = Fails()
    before = everything(model)
    with pytest.raises(CaptureError):
        capture(StepSource(model, torch.randn(6, 4)))
    with pytest.raises(ArithmeticError):
        capture_real(StepSource(model, torch.randn(6, 4)))
    assert all(everything(model)[k] is v for k, v in before.items())


def test_tied_weights_are_one_storage() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    trace = capture(StepSource(model, torch.randn(3, 4), mean)).trace
    assert [s.bytes for s in trace.storages if s.category is Category.PARAMETER] == [64]


def test_a_model_on_meta_is_captured_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 12), nn.Tanh(), nn.Linear(1 << 12, 1 << 20))  # 32 GiB
    trace = capture(StepSource(model, torch.empty(2, 1 << 20, device="meta"), mean, small.adamw)).trace
    assert sum(s.bytes for s in trace.storages if s.category is Category.PARAMETER) > 32 << 30
    assert all(p.device.type == "meta" for p in model.parameters())


def test_anomaly_detection_reads_no_fake_gradient() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    source = StepSource(model, torch.empty(2, 8, device="meta"), mean, small.adamw)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        watched = capture(source).trace
        assert torch.is_anomaly_enabled()
    assert watched == capture(source).trace


@pytest.mark.alternate(0)
@pytest.mark.parametrize("name", ["gpt_tied", "frozen", "bert_sdpa_bf16", "resnet", "twice", "moe_like", "lstm"])
def test_a_capture_after_another_needs_no_first_pass(name: str) -> None:
    model, sample, loss_fn = case(name).build()
    one = capture(StepSource(model, sample, loss_fn, small.adamw))
    assert one.graded is not None
    usual = capture(StepSource(model, sample, loss_fn, small.adamw), Choices(2))
    after = capture(StepSource(model, sample, loss_fn, small.adamw), Choices(2), after=one)
    assert after.trace == usual.trace
    assert after.calls.keys() == usual.calls.keys()


def test_the_gradient_of_a_class_token_is_a_part_of_a_larger_storage_with_one_sample() -> None:
    """With several samples it is their sum, which has a storage of its own."""

    class Classified(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, 32))
            self.inner = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0]
            return out

    source = StepSource(Classified(), (torch.randn(4, 16, 32), torch.randn(4, 32)), small.squared_error, small.adamw)
    one = capture(source)
    assert one.graded is not None
    for number in (2, 4):
        usual = capture(source, Choices(number))
        assert capture(source, Choices(number), after=one).trace == usual.trace
        gradients = [s.bytes for s in usual.trace.storages if s.category is Category.GRADIENT]
        token = 32 * 4 * (17 if number == 4 else 1)
        assert sorted(gradients) == sorted([token, 32 * 32 * 4, 32 * 4])


def test_a_model_that_builds_something_once_gets_its_first_pass() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)
            self.table: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if len(x) not in self.table:
                self.table[len(x)] = torch.arange(len(x)).float().unsqueeze(1).sin()
            out: Tensor = self.inner(x) + self.table[len(x)]
            return out

    assert capture(StepSource(Caching(), small.rows(16), small.squared_error)).graded is None
