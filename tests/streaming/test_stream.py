"""Streamed layers: the numbers of plain PyTorch, the predicted peak, nothing lost beside steps, and a reason where it cannot be."""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit import batches
from memfit.capture.capture import capture
from memfit.capture.source import StepSource
from memfit.errors import EngineError, InputError, NonFiniteLossError
from memfit.meter import metered
from memfit.planner.timeline import Timeline
from memfit.step.held_tensors import model_tensors
from memfit.step.program import StepProgram, state_tensors
from memfit.streaming.initialisation import filled, from_tensors, reset
from memfit.streaming.stream import LayerStream
from memfit.streaming.watch import Watch
from memfit.techniques.choices import Choices
from memfit.techniques.layer_streaming.blocks import blocks_at
from models import huggingface
from models.built import Built
from models.transformer import build_gpt
from sweeps import by_turns

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 3


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)  # not fused: it makes tensors of its own


def gpt(dropout: float = 0.0, *, tied: bool = False, layers: int = 5) -> Built:
    return build_gpt(layers, 32, 4, 6, 16, 64, dropout, tied=tied)


def frozen() -> Built:
    """The embeddings and the two lowest blocks are not trained: no backward there."""
    model, sample, loss_fn = gpt()
    for part in (model.token, model.position, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)  # type: ignore[union-attr,operator]
    return model, sample, loss_fn


def without_dropout(built: Built) -> Built:
    for module in built[0].modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return built


def parts_of(sample: Any, micro_batches: int) -> tuple[list[Any], list[float | None]]:
    parts = batches.split(sample, batches.micro_batch_sizes(batches.size(sample), micro_batches))
    return parts, [None] if micro_batches == 1 else [1 / micro_batches] * micro_batches


def plainly(built: Built, make: Any = adamw, micro_batches: int = 1, clip: float | None = None) -> tuple[Any, ...]:
    """Losses, parameters, optimizer state and generator after a few plain steps."""
    model, sample, loss_fn = built
    program = StepProgram(model, loss_fn, make(model.parameters()), clip)
    torch.manual_seed(5)
    losses = []
    for _ in range(STEPS):
        for part, weight in zip(*parts_of(sample, micro_batches), strict=True):
            losses.append(program.forward_backward(part, weight))
        program.update()
        program.clear()
    assert program.optimizer is not None
    return losses, dict(model.state_dict()), program.optimizer.state_dict(), torch.get_rng_state()


def streamed(
    built: Built, make: Any = adamw, micro_batches: int = 1, clip: float | None = None, path: str | None = None
) -> tuple[Any, ...]:
    """The same with streamed layers."""
    model, sample, loss_fn = built
    optimizer = make(model.parameters())
    stream = LayerStream(model, path)
    assert all(p.numel() == 0 for layer in stream.layers for p in layer.parameters)
    program = StepProgram(model, loss_fn, optimizer, clip)
    torch.manual_seed(5)
    losses = []
    for _ in range(STEPS):
        losses += stream.step(program, *parts_of(sample, micro_batches))
        program.clear()
    states = torch.get_rng_state()
    stream.close()
    return losses, dict(model.state_dict()), optimizer.state_dict(), states


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


WHOLE: dict[str, Callable[[], Built]] = {
    "gpt": gpt,
    "gpt_dropout": lambda: gpt(0.1),
    "gpt_tied": lambda: gpt(0.1, tied=True),
    "gpt_two_blocks": lambda: gpt(layers=2),
    "frozen": frozen,
    "bert": lambda: huggingface.bert("sdpa"),
    "bert_bf16": lambda: huggingface.bert("eager", bf16=True),
    "llama": huggingface.llama,
    "input_grads": huggingface.input_grads,
    "t5": huggingface.t5,
    "vit": huggingface.vit,
}


@pytest.mark.alternate(0)
@pytest.mark.parametrize(("name", "clip"), by_turns(WHOLE, [None, 0.3]))
def test_one_micro_batch_is_plain_pytorch_to_the_bit(name: str, clip: float | None) -> None:
    build = WHOLE[name]

    assert equal(streamed(build(), clip=clip), plainly(build(), clip=clip))


@pytest.mark.parametrize(("name", "clip"), by_turns(["gpt", "frozen", "bert", "llama", "vit"], [None, 0.3]))
def test_micro_batches_without_dropout_add_up_as_in_accumulation(name: str, clip: float | None) -> None:
    def build() -> Built:
        return without_dropout(WHOLE[name]())

    assert equal(streamed(build(), micro_batches=3, clip=clip), plainly(build(), micro_batches=3, clip=clip))


@pytest.mark.parametrize(
    "make", [momentum, lambda p: torch.optim.SGD(p, lr=0.1), torch.optim.Adamax, torch.optim.NAdam]
)
def test_other_optimizers_are_stepped_layer_by_layer(make: Any) -> None:
    assert equal(streamed(gpt(0.1), make), plainly(gpt(0.1), make))


def test_groups_with_settings_of_their_own_are_kept() -> None:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for p in parameters:
            (matrices if p.dim() > 1 else others).append(p)
        return torch.optim.AdamW(
            [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}],  # type: ignore[arg-type]
            fused=True,
        )

    assert equal(streamed(gpt(), make), plainly(gpt(), make))


def test_a_tied_embedding_adds_up_within_rounding_over_micro_batches() -> None:
    (_, found, *_), (_, wanted, *_) = (
        run(gpt(tied=True), lambda p: torch.optim.SGD(p, lr=0.1), 3) for run in (streamed, plainly)
    )

    assert all(torch.allclose(found[k], wanted[k], rtol=0, atol=1e-6) for k in wanted)


def test_micro_batches_with_dropout_draw_the_same_masks_in_every_run_and_different_ones_each() -> None:
    model, (ids, targets), loss_fn = gpt(0.5)
    sample = (ids[:2].repeat(3, 1), targets[:2].repeat(3, 1))  # three equal parts: only masks tell them apart

    def losses() -> list[float]:
        again = gpt(0.5)[0]
        stream = LayerStream(again)
        torch.manual_seed(1)
        program = StepProgram(again, loss_fn, adamw(again.parameters()))
        return [x.item() for x in stream.step(program, *parts_of(sample, 3))]

    first = losses()
    torch.manual_seed(1)
    plain = loss_fn(model, (ids[:2], targets[:2])).item()  # type: ignore[misc]

    assert first == losses()
    assert len(set(first)) == 3
    assert first[0] == plain


def test_an_optimizer_that_has_stepped_before_goes_on() -> None:
    def run(*, stream_it: bool) -> Any:
        model, sample, loss_fn = gpt(0.1)
        program = StepProgram(model, loss_fn, adamw(model.parameters()))
        torch.manual_seed(3)
        program.forward_backward(sample)
        program.update()
        program.clear()
        if stream_it:
            stream = LayerStream(model)
            stream.step(program, [sample], [None])
            stream.close()
        else:
            program.forward_backward(sample)
            program.update()
        assert program.optimizer is not None
        return dict(model.state_dict()), program.optimizer.state_dict()

    assert equal(run(stream_it=True), run(stream_it=False))


# ------------------------------------------------------------------------------------------------------------ prediction


@pytest.mark.alternate(1)
@pytest.mark.parametrize(
    ("name", "clip", "micro_batches"), by_turns(["gpt_dropout", "bert", "llama", "frozen"], [None, 0.3], [1, 3])
)
def test_the_predicted_peak_is_the_measured_one(name: str, clip: float | None, micro_batches: int) -> None:
    model, sample, loss_fn = WHOLE[name]()
    how = Choices(micro_batches=micro_batches, streamed=blocks_at(model).path)
    predicted = (
        Timeline(capture(StepSource(model, sample, loss_fn, adamw, clip_norm=clip), how).trace).plain().peak_bytes
    )
    optimizer = adamw(model.parameters())
    program = StepProgram(model, loss_fn, optimizer, clip)
    stream = LayerStream(model)
    parts, weights = parts_of(sample, micro_batches)
    for _ in range(2):
        held = [t for group in stream.buffers().values() for t in group]
        present = [*model.parameters(), *model.buffers(), *model_tensors(model), *batches.leaves(sample)]
        with metered([*present, *held, *state_tensors(optimizer)]) as reading:
            watch = Watch()
            watch.leave_thread, watch.enter_thread = reading.leave_thread, reading.enter_thread  # type: ignore[method-assign]
            stream.step(program, parts, weights, watch=watch)
            program.clear()

    assert predicted == pytest.approx(reading.peak_bytes, rel=0.001)


def test_a_streamed_step_holds_a_part_of_the_plain_one() -> None:
    model, sample, loss_fn = build_gpt(12, 64, 4, 2, 16, 64)
    plain, there = (
        Timeline(capture(StepSource(model, sample, loss_fn, adamw), c).trace).plain().peak_bytes
        for c in (Choices(), Choices(streamed="blocks"))
    )

    assert there < plain / 4


def test_fit_rehearses_a_streamed_plan_and_leaves_no_trace() -> None:
    def losses(fixed: dict[str, Any], function: Any) -> list[float]:
        model, sample, loss_fn = gpt(0.1)
        torch.manual_seed(2)
        engine = function(model, sample, loss_fn, 1 << 40, adamw, fixed={"micro_batches": 1, **fixed}, clip_norm=0.5)
        if engine.stream is not None:
            assert engine.rehearsal.measured_peak_bytes == pytest.approx(engine.plan.prediction.peak_bytes, rel=0.001)
        return [engine.step(sample).loss for _ in range(3)]

    assert losses({"streamed": "blocks"}, memfit.fit) == losses({}, memfit.fit)


# ---------------------------------------------------------------------------------------------------------- beside steps


@pytest.fixture
def trained() -> tuple[LayerStream, StepProgram, Any]:
    """A stream after one step."""
    model, sample, loss_fn = gpt(0.1)
    program = StepProgram(model, loss_fn, adamw(model.parameters()))
    stream = LayerStream(model)
    stream.step(program, [sample], [None])
    return stream, program, sample


def test_gathered_shows_all_and_takes_back_what_was_changed(trained: Any) -> None:
    stream, program, sample = trained
    with stream.gathered() as model:
        first = {k: v.clone() for k, v in model.state_dict().items()}
        state = program.optimizer.state_dict()["state"]
        assert all(s["exp_avg"].numel() for s in state.values())
        doubled = {k: 2 * v if v.is_floating_point() else v for k, v in first.items()}
        model.load_state_dict(doubled)
    assert all(p.numel() == 0 for layer in stream.layers for p in layer.parameters)
    with stream.gathered() as model:
        assert equal(dict(model.state_dict()), doubled)
        assert equal(program.optimizer.state_dict()["state"], state)
    stream.step(program, [sample], [None])


def test_what_is_gathered_to_be_saved_writes_nothing_and_is_gone_after(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, program, sample = trained
    with stream.gathered():
        expected = {name: p.clone() for name, p in stream.model.state_dict().items()}
        state = copy.deepcopy(program.optimizer.state_dict()["state"])
    with monkeypatch.context() as patch:
        patch.setattr(stream.tier, "write", None)
        with stream.gathered(on_host=True, changed=False) as model:
            assert equal(dict(model.state_dict()), expected)
            assert equal(program.optimizer.state_dict()["state"], state)
    assert all(p.numel() == 0 for layer in stream.layers for p in layer.parameters)
    assert all(v.numel() <= 1 for p in stream.layers[0].parameters for v in program.optimizer.state[p].values())
    stream.step(program, [sample], [None])
    with stream.gathered(changed=False) as model:
        assert not equal(dict(model.state_dict()), expected)


def test_reading_evaluates_layer_by_layer(trained: Any) -> None:
    stream, _, (ids, _) = trained
    model = stream.model.eval()
    with stream.gathered(), torch.no_grad():
        wanted = model(ids)
    with stream.reading(), torch.no_grad():
        assert torch.equal(model(ids), wanted)
        assert torch.equal(model(ids), wanted)
    with stream.reading(), pytest.raises(EngineError, match="gradients on outside of a step"):
        model(ids)


def test_every_parameter_is_named_with_its_value(trained: Any) -> None:
    stream = trained[0]
    found = {name: value.clone() for name, value in stream.named_parameters()}
    with stream.gathered() as model:
        wanted = {name: p.detach() for name, p in model.named_parameters()}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_undone_steps_leave_no_trace(trained: Any) -> None:
    stream, program, sample = trained
    kept = [p.detach().clone() for p in stream.resident]

    def everything() -> Any:
        with stream.gathered() as model:
            moments = [s["exp_avg"].clone() for p, s in program.optimizer.state.items() if id(p) in streamed_ids]
            return {n: p.detach().clone() for n, p in model.named_parameters()}, moments

    streamed_ids = {id(p) for layer in stream.layers for p in layer.parameters}
    before = everything()
    with stream.undone():
        for _ in range(2):
            stream.step(program, [sample], [None])
        with torch.no_grad():
            for p, value in zip(stream.resident, kept, strict=True):
                p.copy_(value)

    assert equal(everything(), before)


def test_the_modules_are_as_they_were_after_a_failure() -> None:
    model, sample, loss_fn = gpt()
    before = [dict(block.__dict__) for block in model.blocks]  # type: ignore[union-attr]
    stream = LayerStream(model)
    program = StepProgram(model, loss_fn, adamw(model.parameters()))
    values = {n: v.clone() for n, v in stream.named_parameters()}

    def failing(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) * float("nan")  # type: ignore[misc]

    with pytest.raises(NonFiniteLossError):
        stream.step(StepProgram(model, failing, program.optimizer), *parts_of(sample, 3), check_finite=True)

    assert not stream.updating
    assert [block.__dict__.keys() for block in model.blocks] == [b.keys() for b in before]  # type: ignore[union-attr]
    assert equal(values, {n: v.clone() for n, v in stream.named_parameters()})
    assert not [t for t in threading.enumerate() if t.name == "memfit micro-batch"]
    stream.step(program, *parts_of(sample, 3))


def test_an_interrupt_ends_the_micro_batches_and_changes_nothing() -> None:
    model, sample, loss_fn = gpt()
    stream = LayerStream(model)
    values = {n: v.clone() for n, v in stream.named_parameters()}
    calls: list[int] = []

    def interrupted(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return loss_fn(model, batch)  # type: ignore[misc]

    with pytest.raises(KeyboardInterrupt):
        stream.step(StepProgram(model, interrupted, adamw(model.parameters())), *parts_of(sample, 3))

    assert not [t for t in threading.enumerate() if t.name == "memfit micro-batch"]
    assert equal(values, {n: v.clone() for n, v in stream.named_parameters()})


def test_what_a_layer_took_says_whether_transfers_hide(trained: Any) -> None:
    stream = trained[0]
    said = stream.hiding()

    assert said.tokens == 6 * 16
    assert said.forward_tokens > 0
    assert said.hides == (said.tokens >= max(said.forward_tokens, said.backward_tokens))
    assert "96 tokens pass each layer" in str(said)


# ------------------------------------------------------------------------------------------------------------------ meta


def test_a_model_is_filled_layer_by_layer_as_it_would_be_at_once() -> None:
    with torch.device("meta"):
        one, two = (chain(4) for _ in range(2))
    torch.manual_seed(0)
    for _ in filled(one, reset, torch.device("cpu")):
        pass
    torch.manual_seed(0)
    stream = LayerStream(two)

    assert equal(
        {n: v.clone() for n, v in stream.named_parameters()}, {n: p.detach() for n, p in one.named_parameters()}
    )


def test_a_model_is_filled_from_a_file(tmp_path: Path) -> None:
    source, sample, loss_fn = gpt()
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    with torch.device("meta"):
        model = gpt()[0]
    saved = torch.load(tmp_path / "weights.pt", mmap=True)
    there = from_tensors({**saved, **dict(source.named_buffers())})  # the mask is not in a state_dict
    made = memfit.plan(model, sample, loss_fn, 1 << 40, adamw, fixed={"streamed": "blocks", "micro_batches": 1})
    engine = memfit.apply(made, model, fill=there, lower_tier=tmp_path)
    plain = StepProgram(source, loss_fn, adamw(source.parameters()))

    for _ in range(2):
        wanted = plain.forward_backward(sample)
        plain.update()
        plain.clear()
        assert engine.step(sample).loss == float(wanted)


def test_a_module_that_cannot_be_filled_is_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    with torch.device("meta"):
        model = nn.Sequential(Scale(), Scale())
    with pytest.raises(InputError, match=r"0 \(Scale\) is on the meta device and has no reset_parameters"):
        LayerStream(model)
    with pytest.raises(InputError, match="no tensor named '0.weight'"):
        LayerStream(model, fill=from_tensors({}))


# ------------------------------------------------------------------------------------------------------------ refusals


class Steps(nn.Module):
    """Blocks called by a function of the test's choice."""

    def __init__(self, call: Callable[[nn.ModuleList, Tensor], Tensor], block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layers, self.first(x).tanh())


def chain(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(blocks) for m in (nn.Linear(8, 8), nn.Tanh())))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return functional.mse_loss(model(x), x)


def step_of(model: nn.Module, make: Any = adamw) -> None:
    x = torch.randn(6, 8)
    stream = LayerStream(model, "layers")
    stream.step(StepProgram(model, square, make(model.parameters())), *parts_of(x, 2))


def in_order(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def with_cache(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, [object()])
    return x


def around(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = x + layer(x.sin())
    return x


def changed_after(layers: nn.ModuleList, x: Tensor) -> Tensor:
    mask = torch.ones(8)
    for layer in layers:
        x = layer(x, mask)
        mask += 1
    return x


def scaled_for_a_while(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for number, layer in enumerate(layers):
        layer.scale = number  # type: ignore[assignment]
    x = in_order(layers, x)
    for layer in layers:
        layer.scale = 1.0  # type: ignore[assignment]
    return x


def in_eval_mode(layers: nn.ModuleList, x: Tensor) -> Tensor:
    layers.eval()
    x = in_order(layers, x)
    layers.train()
    return x


def with_skip(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return in_order(layers, x) * x.sin()


class Cached(nn.Linear):
    def forward(self, x: Tensor, cache: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Masked(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * mask


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Drawing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Counting(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)  # type: ignore[arg-type]
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1  # type: ignore[operator, assignment]
        return super().forward(x)


@pytest.mark.parametrize(
    ("call", "block", "message"),
    [
        (lambda ls, x: ls[1](ls[0](x)), nn.Linear, "ended without calling layers.2"),
        (lambda ls, x: ls[2](ls[1](x)), nn.Linear, "called layers.1 where layers.0 was next"),
        (lambda ls, x: ls[0](ls[0](x)), nn.Linear, "called layers.0 a second time"),
        (with_cache, Cached, "object of type object"),
        (in_order, Doubling, "in place"),
        (changed_after, Masked, "changed a tensor in place that it had given to layers.2"),
        (in_order, Counting, "writes its buffer 'seen'"),
        (in_order, Drawing, "layers.0 draws random numbers of Python's"),
        (scaled_for_a_while, Scaled, "layers.2 would find something else"),
        (in_eval_mode, nn.Linear, "layers.2 would find something else"),
        (with_skip, nn.Linear, "before layers.0 is read by that block and by later parts"),
        (around, nn.Linear, "is read by that block and by later parts"),
    ],
    ids=[
        *("too few", "out of order", "twice", "cache", "in place", "changed after", "buffer"),
        *("draws", "an attribute", "another mode", "skip", "skips around"),
    ],
)
def test_what_cannot_be_streamed_is_refused_with_the_reason(call: Any, block: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        step_of(Steps(call, lambda: block(8, 8)))


def test_what_a_block_returned_may_be_written_in_place() -> None:
    def written(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
            x *= 2
            x = x.relu_() + 1
        return x

    def build() -> Built:
        torch.manual_seed(0)
        return Steps(written, lambda: nn.Linear(8, 8)), torch.randn(6, 8), square

    assert equal(streamed(build(), path="layers"), plainly(build()))


def test_an_output_that_two_later_blocks_read_adds_up_as_in_one_graph() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x if other is None else x * other + other.sin())

    def across(layers: nn.ModuleList, x: Tensor) -> Tensor:
        a = layers[0](x)
        b = layers[1](a)
        return layers[2](b, other=a).tanh() + a + b.cos()

    def build() -> Built:
        torch.manual_seed(0)
        return Steps(across, lambda: Two(8, 8)), torch.randn(6, 8), square

    assert equal(streamed(build(), path="layers"), plainly(build()))


def test_batch_norm_is_refused() -> None:
    with pytest.raises(
        EngineError, match="writes its buffer '1.running_mean'|writes its buffer '1.num_batches_tracked'"
    ):
        step_of(Steps(in_order, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))))


def test_an_optimizer_that_counts_in_its_groups_is_refused() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for group in self.param_groups:
                group["done"] = group.get("done", 0) + 1
            return super().step(closure)

    with pytest.raises(EngineError, match="Counts keeps 'done'"):
        step_of(Steps(in_order, lambda: nn.Linear(8, 8)), lambda p: Counts(p, lr=0.1))


def test_without_an_optimizer_nothing_is_streamed() -> None:
    model = Steps(in_order, lambda: nn.Linear(8, 8))
    with pytest.raises(InputError, match="there is no optimizer"):
        LayerStream(model).step(StepProgram(model, square), [torch.randn(2, 8)], [None])


def test_the_engine_refuses_its_own_loop_and_plans_that_stream_otherwise() -> None:
    model, sample, loss_fn = gpt()
    made = memfit.plan(model, sample, loss_fn, 1 << 40, adamw, fixed={"streamed": "blocks", "micro_batches": 1})
    plain = memfit.plan(model, sample, loss_fn, 1 << 40, adamw, fixed={"micro_batches": 1})
    engine = memfit.apply(made, model)
    with pytest.raises(EngineError, match="use engine.step"), engine.forward():
        pass
    with pytest.raises(EngineError, match="must stream alike"):
        engine.add(plain)
    engine.replace_plan(plain)
    assert engine.stream is None
    assert engine.step(sample).loss > 0


def test_the_loss_falls_over_many_streamed_steps() -> None:
    model, sample, loss_fn = gpt()
    stream = LayerStream(model)
    program = StepProgram(model, loss_fn, adamw(model.parameters()))
    losses = [float(stream.step(program, [sample], [None])[0]) for _ in range(8)]

    assert all(b < a for a, b in pairwise(losses))
