"""Chunked optimizers: the same bits in 32-bit state wherever it lies, a small error in 8 bits, no more than the promised bytes."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.errors import EngineError, InfeasibleError, InputError
from memfit.optimizers import chunked
from memfit.optimizers.alike import alike
from memfit.optimizers.chunked import ChunkedOptimizer
from memfit.optimizers.eight_bit import AdamW8bit, Lion8bit, SGD8bit, eight_bit
from memfit.optimizers.formats import BLOCK, blocks, dequantise, quantise
from memfit.optimizers.lion import Lion
from memfit.step.program import state_tensors
from models import build_gpt
from sweeps import at_night, by_turns

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
}
IN_8_BITS = ["adamw_fused", "adamw", "adam", "sgd", "sgd_fused", "lion"]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Of all sizes and layouts: more than a chunk, no whole number of blocks, fewer than a block, permuted, one element, none."""
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = [
        values(700, 513),
        values(300),
        values(7),
        values(8, 20, 3, 3).to(memory_format=torch.channels_last),
        values(40, 60).t(),
        values(()),  # type: ignore[arg-type]
        values(0, 3),
    ]
    return [nn.Parameter(t) for t in tensors]


def train(
    optimizer: torch.optim.Optimizer, own: Sequence[nn.Parameter], steps: range = range(4), scale: float = 1.0
) -> list[Tensor]:
    """Random gradients, laid out as autograd lays them out; the same for each number of step."""
    for number in steps:
        generator = torch.Generator().manual_seed(100 + number)
        for p in own:
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator) * scale)
        optimizer.step()
    return [p.detach().clone() for p in own]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK", {"cpu": 4 * BLOCK, "cuda": 4 * BLOCK})


# ---------------------------------------------------------------------------------------------------------------- 32 bits


@pytest.mark.alternate(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_in_a_file_gives_the_same_bits(name: str, dtype: torch.dtype, small_chunks: None) -> None:
    make = OPTIMIZERS[name]
    plain = parameters(dtype)
    expected = train(make(plain), plain)
    own = parameters(dtype)
    optimizer = ChunkedOptimizer(make(own), state_place="disk")
    assert equal(train(optimizer, own), expected)
    assert all(t.dim() == 0 for t in state_tensors(optimizer)), "nothing but counters is left in memory"


@pytest.mark.parametrize("form", ["32bit", "8bit"])
def test_a_parameter_whose_memory_has_gaps_is_updated_as_one_without(form: str, small_chunks: None) -> None:
    """The fused kernels of torch itself take the gaps for elements."""
    make = OPTIMIZERS["adamw_fused"]
    start = parameters()[0].detach()
    found = []
    for own in ([nn.Parameter(start.clone()[:, ::2])], [nn.Parameter(start[:, ::2].contiguous())]):
        found.append(train(ChunkedOptimizer(make(own), state_format=form, state_place="disk"), own))
    assert equal(*found)
    assert not torch.equal(found[0][0], start[:, ::2])


def test_a_parameter_that_gets_its_first_gradient_late_begins_late(small_chunks: None) -> None:
    make = OPTIMIZERS["adamw_fused"]

    def run(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> list[Tensor]:
        own = parameters()
        optimizer = wrap(make(own))
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            for place, p in enumerate(own):
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
                if number < 2 and place % 2:
                    p.grad = None
            optimizer.step()
        return [p.detach().clone() for p in own]

    assert equal(run(lambda o: ChunkedOptimizer(o, state_place="disk")), run(lambda o: o))


@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_of_the_fused_kernel_are_the_fused_kernel(threads: int) -> None:
    """Threads share a tensor out by its size, so another size is shared out otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        make = OPTIMIZERS["adamw_fused"]
        plain, own = ([nn.Parameter(torch.linspace(-1, 1, 700_001))] for _ in range(2))
        expected = train(make(plain), plain)
        assert equal(train(ChunkedOptimizer(make(own), state_place="disk"), own), expected)
    finally:
        torch.set_num_threads(before)


def test_learning_rates_and_groups_are_those_of_the_moment(small_chunks: None) -> None:
    def run(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> list[Tensor]:
        own = parameters()
        groups = [{"params": own[:2], "weight_decay": 0.3}, {"params": own[2:], "lr": 1e-3}]
        optimizer = wrap(torch.optim.AdamW(groups, lr=1e-2, fused=True))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for number in range(3):
            train(optimizer, own, range(number, number + 1))
            schedule.step()
        return [p.detach().clone() for p in own]

    assert equal(run(lambda o: ChunkedOptimizer(o, state_place="disk")), run(lambda o: o))


def test_hooks_of_the_step_run_once_a_step(small_chunks: None) -> None:
    own = parameters()
    optimizer = ChunkedOptimizer(torch.optim.AdamW(own), state_place="disk")
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, own, range(2))
    assert calls == ["before", "after"] * 2


# ----------------------------------------------------------------------------------------------------------------- 8 bits


def error(found: Sequence[Tensor], expected: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """Of the whole update, relative, in the 2-norm."""
    off = sum((a.double() - b.double()).square().sum().item() for a, b in zip(found, expected, strict=True))
    way = sum((b.double() - s.double()).square().sum().item() for b, s in zip(expected, start, strict=True))
    return math.sqrt(off / way)


@pytest.mark.alternate(1)
@pytest.mark.parametrize(("name", "dtype"), by_turns(IN_8_BITS, [torch.float32, torch.float64]), ids=str)
def test_8_bits_lose_little_and_the_same_in_a_file(name: str, dtype: torch.dtype, small_chunks: None) -> None:
    make = OPTIMIZERS[name]
    reference, own, filed = (parameters(dtype) for _ in range(3))
    start = [p.detach().clone() for p in reference]
    expected = train(make(reference), reference)
    found = train(ChunkedOptimizer(make(own), state_format="8bit"), own)
    assert equal(train(ChunkedOptimizer(make(filed), state_format="8bit", state_place="disk"), filed), found)
    assert error(found, expected, start) < (
        0.1 if name == "lion" else 0.02
    )  # Lion's sign flips where the average is near nothing


@pytest.mark.alternate(0)
@pytest.mark.parametrize("name", at_night(IN_8_BITS, {"adam", "adamw", "sgd"}))
def test_16_bit_parameters_are_updated_in_32_bits(name: str, small_chunks: None) -> None:
    """As a step of float32 parameters that are rounded after it; their state is that of those, too."""
    make = OPTIMIZERS[name]
    own, wide = parameters(torch.bfloat16), [nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    optimizer, reference = (ChunkedOptimizer(make(p), state_format="8bit", state_place="disk") for p in (own, wide))
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        for p, q in zip(own, wide, strict=True):
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
            q.grad = torch.empty_like(q).copy_(p.grad)
        optimizer.step()
        reference.step()
        for p, q in zip(own, wide, strict=True):
            q.data.copy_(q.data.bfloat16())
            if p.numel() >= BLOCK:
                assert torch.equal(p.float(), q)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-7])
def test_the_error_is_no_larger_than_that_of_bitsandbytes(scale: float) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", "0.50", reason="the reference for 8-bit optimizers is an extra")

    def weights() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(2)
        return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((512, 256), (4097,), (300,))]

    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1e-2}
    exact, ours, theirs = weights(), weights(), weights()
    start = [p.detach().clone() for p in exact]
    expected = train(torch.optim.AdamW(exact, **settings), exact, range(60), scale)
    mine = error(train(AdamW8bit(ours, **settings), ours, range(60), scale), expected, start)
    reference = bitsandbytes.optim.AdamW8bit(theirs, **settings, min_8bit_size=1)
    assert mine <= error(train(reference, theirs, range(60), scale), expected, start)


def test_on_gradients_of_a_training_the_error_is_well_below_that_of_bitsandbytes() -> None:
    """Elements of a block are of unlike sizes there, as tokens are rare and common, which random numbers are not: in blocks of 256 it is as large."""
    bitsandbytes = pytest.importorskip("bitsandbytes", "0.50", reason="the reference for 8-bit optimizers is an extra")
    vocab = 256
    model, _, loss_fn = build_gpt(2, 128, 4, 8, 32, vocab)
    exact = list(model.parameters())
    ours, theirs = ([nn.Parameter(p.detach().clone()) for p in exact] for _ in range(2))
    start = [p.detach().clone() for p in exact]
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1e-2}
    optimizers = {
        "exact": torch.optim.AdamW(exact, **settings),
        "ours": AdamW8bit(ours, **settings),
        "theirs": bitsandbytes.optim.AdamW8bit(theirs, **settings),
    }
    generator = torch.Generator().manual_seed(1)
    shares = 1 / torch.arange(1, vocab + 1)
    for _ in range(30):
        model.zero_grad()
        tokens = torch.multinomial(shares, 8 * 32, replacement=True, generator=generator).view(8, 32)
        loss_fn(model, (tokens, (3 * tokens + 1) % vocab)).backward()  # type: ignore[misc]
        for p, mine, other in zip(exact, ours, theirs, strict=True):
            assert p.grad is not None
            mine.grad, other.grad = p.grad.clone(), p.grad.clone()
        for optimizer in optimizers.values():
            optimizer.step()
    expected = [p.detach() for p in exact]
    assert error(ours, expected, start) <= 0.8 * error(theirs, expected, start)


@pytest.mark.parametrize(
    ("make", "limit"), [(AdamW8bit, 2.1), (Lion8bit, 1.05), (SGD8bit, 1.05)], ids=["adamw", "lion", "sgd"]
)
def test_bytes_of_state_for_each_parameter(make: Any, limit: float) -> None:
    model = nn.TransformerEncoderLayer(128, 4, 512)
    optimizer = make(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    count = sum(p.numel() for p in model.parameters())
    assert sum(t.untyped_storage().nbytes() for t in state_tensors(optimizer)) <= limit * count


def test_a_first_moment_is_never_divided_by_a_second_one_that_was_rounded_away() -> None:
    """One element's gradients are large and cancel, its neighbour's are small and do not: in 8 bits, the neighbour's second moment is next to nothing."""
    weight = nn.Parameter(torch.zeros(BLOCK))
    optimizer = AdamW8bit([weight], lr=1e-3, weight_decay=0.0)
    steps = 100
    for number in range(steps):
        weight.grad = torch.full((BLOCK,), 1e-3)
        weight.grad[0] = (-1.0) ** number
        optimizer.step()
    assert weight.detach().abs().max() <= 1e-3 * steps * 1.5


def test_moments_without_gradients_fade_as_in_32_bits() -> None:
    """Each step takes 0.05 % from the root of the second moment, less than half a code: scales carry the decay."""
    runs = []
    for make in (AdamW8bit, torch.optim.AdamW):
        weight = nn.Parameter(torch.zeros(2 * BLOCK))
        optimizer = make([weight], lr=1e-3, weight_decay=0.0)
        weight.grad = torch.linspace(0.5, 1.0, 2 * BLOCK)
        optimizer.step()
        weight.grad = torch.zeros(2 * BLOCK)
        for _ in range(2000):
            optimizer.step()
        runs.append(optimizer)
    packed, plain = ({n: v for n, v in r.state_dict()["state"][0].items() if n != "step"} for r in runs)
    values, scratch = torch.empty(2 * BLOCK), torch.empty(2 * BLOCK)
    dequantise(packed["exp_avg_sq_codes"], packed["exp_avg_sq_scales"], values, scratch)
    torch.testing.assert_close(values, plain["exp_avg_sq"], rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("count", [1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e30])
def test_a_round_trip_is_off_by_half_a_code_at_most(dtype: torch.dtype, count: int, size: float) -> None:
    generator = torch.Generator().manual_seed(count)
    true = torch.randn(count, generator=generator) * size
    if dtype is torch.uint8:
        true = true.square() if size < 1e19 else true.abs()
    length = blocks(count)
    codes, scales = torch.empty(count, dtype=dtype), torch.empty(length)
    values, scratch = torch.full((length * BLOCK,), float("nan")), torch.empty(length * BLOCK)
    values[:count] = true
    quantise(values, count, codes, scales, scratch)
    dequantise(codes, scales, values, scratch)
    assert (values[count:] == 0).all()
    found = values[:count]
    largest = scales.repeat_interleave(BLOCK)[:count]
    if dtype is torch.int8:
        # y = 2x / (1 + |x|) falls from a slope of 2 to one of 1/2, and codes are 1/127 of y apart.
        x = (true / largest.clamp(min=1e-37)).abs()
        allowed = largest * ((1 + x).square() / 2 / 254 * 1.02 + 1e-6)
        assert ((found - true).abs() <= allowed + 1e-37).all()
    else:
        off = (found.sqrt() - true.sqrt()).abs()
        assert (off <= largest / 255 * torch.where(true.sqrt() < largest / 510, 1.0, 0.5) * 1.001 + 1e-37).all()


def test_not_a_number_stays_visible() -> None:
    weight = nn.Parameter(torch.zeros(BLOCK))
    optimizer = AdamW8bit([weight])
    weight.grad = torch.full((BLOCK,), float("nan"))
    optimizer.step()
    weight.grad = torch.ones(BLOCK)
    optimizer.step()
    assert weight.isnan().all()


# ------------------------------------------------------------------------------------------- exceptions, saving, refusals


def test_parameters_named_by_a_pattern_keep_32_bits() -> None:
    model = nn.ModuleDict({"embeddings": nn.Embedding(50, 32), "body": nn.Linear(32, 32)})
    optimizer = AdamW8bit(model.named_parameters(), in_32bit=["*embed*"])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[model["embeddings"].weight]["exp_avg"].dtype is torch.float32
    assert optimizer.state[model["body"].weight]["exp_avg_codes"].dtype is torch.int8
    for pattern in ("body", "body.weight", "b*.w*"):
        named = eight_bit(
            torch.optim.AdamW(model.parameters()), in_32bit=[pattern], names=dict(model.named_parameters())
        )
        train(named, [model["body"].weight], range(1))  # type: ignore[list-item]
        assert "exp_avg" in named.state[model["body"].weight]


@pytest.mark.alternate(1)
@pytest.mark.parametrize(
    ("name", "form", "place", "dtype"),
    by_turns(
        ["adamw_fused", "adamw", "sgd", "lion"],
        ["32bit", "8bit"],
        ["device", "disk"],
        [torch.float32, torch.bfloat16],
    ),
    ids=str,
)
def test_a_saved_state_goes_on_bit_for_bit(
    name: str, form: str, place: str, dtype: torch.dtype, small_chunks: None, tmp_path: Any
) -> None:
    def build(own: list[nn.Parameter]) -> ChunkedOptimizer:
        return ChunkedOptimizer(OPTIMIZERS[name](own), state_format=form, state_place=place)

    first = parameters(dtype)
    optimizer = build(first)
    half = train(optimizer, first, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    expected = train(optimizer, first, range(3, 6))
    second = [nn.Parameter(torch.empty_like(p).copy_(h)) for p, h in zip(parameters(dtype), half, strict=True)]
    other = build(second)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True, mmap=True))
    assert equal(train(other, second, range(3, 6)), expected)
    saved, loaded = (o.state_dict()["state"] for o in (optimizer, other))
    for index, state in saved.items():
        assert {n: v.dtype for n, v in state.items()} == {n: v.dtype for n, v in loaded[index].items()}
        assert all(torch.equal(v, loaded[index][n]) for n, v in state.items())


def test_32_bit_state_goes_from_place_to_place_and_to_and_from_torch(small_chunks: None) -> None:
    make = OPTIMIZERS["adamw_fused"]
    plain, filed = parameters(), parameters()
    one, other = make(plain), ChunkedOptimizer(make(filed), state_place="disk")
    for number in range(3):
        train(one, plain, range(number, number + 1))
        train(other, filed, range(number, number + 1))
        here, there = one.state_dict(), other.state_dict()
        assert all(torch.equal(v, there["state"][i][n]) for i, s in here["state"].items() for n, v in s.items())
        one.load_state_dict(copy.deepcopy(there))
        other.load_state_dict(here)
    assert equal([p.detach() for p in plain], [p.detach() for p in filed])


@pytest.mark.parametrize("place", ["device", "disk"])
def test_an_optimizer_with_state_can_change_to_8_bits_and_back(place: str, small_chunks: None) -> None:
    make = OPTIMIZERS["adamw_fused"]
    plain, own = parameters(), parameters()
    one, other = make(plain), make(own)
    start = train(one, plain, range(3))
    train(other, own, range(3))
    packed = ChunkedOptimizer(other, state_format="8bit", state_place=place)
    expected = train(one, plain, range(3, 6))
    assert error(train(packed, own, range(3, 6)), expected, start) < 0.02
    back = make(third := parameters())
    full = ChunkedOptimizer(back, state_place="disk" if place == "device" else "device")
    full.load_state_dict(packed.state_dict())
    for p, q in zip(third, own, strict=True):
        p.data.copy_(q.data)
    assert error(train(full, third, range(6, 8)), train(one, plain, range(6, 8)), start) < 0.02


def test_state_that_is_cleared_begins_anew(small_chunks: None) -> None:
    """What a rehearsal does: the file still holds the old state."""
    for form in ("32bit", "8bit"):
        own = parameters()
        optimizer = ChunkedOptimizer(torch.optim.AdamW(own), state_format=form, state_place="disk")
        start = [p.detach().clone() for p in own]
        expected = train(optimizer, own, range(2))
        optimizer.state.clear()
        for p, value in zip(own, start, strict=True):
            p.data.copy_(value)
        assert equal(train(optimizer, own, range(2)), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.Adagrad, "Adagrad has no 8-bit state: supported are AdamW and Adam"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "AdamW with amsgrad=True has no 8-bit state"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD without momentum keeps no state"),
        (torch.optim.LBFGS, "LBFGS has no 8-bit state"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable=True updates whole parameters"),
    ],
)
def test_what_has_no_8_bits_is_refused(make: Make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        eight_bit(make([nn.Parameter(torch.ones(3))]))


def test_a_subclass_is_not_believed_to_be_its_base() -> None:
    class Mine(torch.optim.AdamW):
        pass

    with pytest.raises(InputError, match="the state of Mine stays on the device"):
        ChunkedOptimizer(Mine([nn.Parameter(torch.ones(3))]), state_place="disk")


def test_what_cannot_be_is_said() -> None:
    weight = nn.Parameter(torch.ones(300, 2))
    with pytest.raises(InputError, match="the device is the CPU, whose memory is host memory"):
        ChunkedOptimizer(torch.optim.AdamW([weight]), state_place="host")
    with pytest.raises(InputError, match="without momentum keeps no state that could be offloaded"):
        ChunkedOptimizer(torch.optim.SGD([weight], lr=0.1), state_place="disk")
    with pytest.raises(InputError, match="'head' matches no parameter of the optimizer; names are like 'body.weight'"):
        AdamW8bit([("body.weight", weight)], in_32bit=["head"])
    unnamed = AdamW8bit([weight], in_32bit=["head"])
    weight.grad = torch.ones_like(weight)
    with pytest.raises(InputError, match="speaks of names, which the optimizer does not know"):
        unnamed.step()
    with pytest.raises(InputError, match="has no 'exp_avg' for a parameter"):
        AdamW8bit([weight]).load_state_dict(
            {
                "state": {0: {"square_avg": weight.detach()}},
                "param_groups": AdamW8bit([weight]).state_dict()["param_groups"],
            }
        )
    with pytest.raises(InputError, match="there is 'memfit' and 'bitsandbytes'"):
        eight_bit(torch.optim.AdamW([weight]), backend="theirs")


def test_a_sparse_gradient_is_refused_before_anything_moves() -> None:
    table = nn.Embedding(300, 4, sparse=True)
    other = nn.Parameter(torch.ones(300))
    optimizer = ChunkedOptimizer(torch.optim.AdamW([other, table.weight]), state_place="disk")
    (table(torch.tensor([1])).sum() + other.sum()).backward()
    with pytest.raises(InputError, match="has a sparse gradient, which cannot be cut into chunks"):
        optimizer.step()
    assert torch.equal(other, torch.ones(300))


def test_bitsandbytes_takes_over_groups_and_settings() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", "0.50", reason="an extra")
    own = [nn.Parameter(torch.randn(128, 64)) for _ in range(2)]
    groups = [{"params": own[:1], "lr": 1e-2}, {"params": own[1:], "weight_decay": 0.5}]
    made = eight_bit(torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9)), backend="bitsandbytes")
    assert isinstance(made, bitsandbytes.optim.AdamW8bit)
    assert [(g["lr"], g["weight_decay"], tuple(g["betas"])) for g in made.param_groups] == [
        (1e-2, 1e-2, (0.8, 0.9)),
        (1e-3, 0.5, (0.8, 0.9)),
    ]
    train(made, own, range(1, 3))
    assert all(made.state[p]["state1"].dtype is torch.uint8 for p in own)
    with pytest.raises(InputError, match="bitsandbytes has no maximize=True"):
        eight_bit(torch.optim.AdamW(own, maximize=True), backend="bitsandbytes")
    with pytest.raises(InputError, match="a register of the whole process"):
        eight_bit(torch.optim.AdamW(own), backend="bitsandbytes", in_32bit=["*"])


# ---------------------------------------------------------------------------------------------------------------- the file


def test_the_file_has_no_name_and_goes_with_its_optimizer(tmp_path: Any) -> None:
    own = parameters()
    optimizer = ChunkedOptimizer(torch.optim.AdamW(own), state_place="disk", folder=tmp_path)
    train(optimizer, own)
    assert list(tmp_path.iterdir()) == []
    tmp_path.rmdir()  # and nobody can take it away
    train(optimizer, own)


def test_no_room_is_met_before_anything_is_trained(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = parameters()
    with pytest.raises(
        EngineError, match=r"^optimizer states are written to disk, and no file can be created in .*nowhere"
    ):
        ChunkedOptimizer(torch.optim.AdamW(own), state_place="disk", folder=tmp_path / "nowhere")
    full = r"^optimizer states need .* on disk, .*: free space there, set MEMFIT_OFFLOAD_DIR .*, or keep the state on the device"
    with pytest.raises(InfeasibleError, match=full):
        ChunkedOptimizer(
            torch.optim.AdamW([nn.Parameter(torch.empty(1 << 58, device="meta"))]), state_place="disk", folder=tmp_path
        )


def test_a_file_cut_short_is_noticed(tmp_path: Any) -> None:
    own = [nn.Parameter(torch.ones(1000))]
    optimizer = ChunkedOptimizer(torch.optim.AdamW(own), state_place="disk", folder=tmp_path)
    train(optimizer, own, range(1))
    before = own[0].detach().clone()
    os.ftruncate(optimizer._storage._file._file, 100)  # type: ignore[union-attr]
    with pytest.raises(EngineError, match=r"ends before 8\.00 KiB, something cut it .*: load the last snapshot"):
        train(optimizer, own, range(1, 2))
    assert torch.equal(own[0], before)


def test_a_twin_steps_its_own_parameters_where_a_schedule_has_wrapped_step() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    own = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(own, 1)
    twin = alike(own, model)(other.parameters())
    before = [p.detach().clone() for p in (*model.parameters(), *other.parameters())]
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.grad = torch.ones_like(parameter)
    twin.step()
    assert [torch.equal(p, was) for p, was in zip((*model.parameters(), *other.parameters()), before, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    assert (len(own.state), len(twin.state)) == (0, 2)
    assert hasattr(own.step, "_wrapped_by_lr_sched")  # the schedule's own is left alone
