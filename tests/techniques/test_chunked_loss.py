"""The loss head in chunks: the same step up to the order of additions, the bytes that are said, and the logits for whoever looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit import batches, dispatch
from memfit.capture.capture import capture
from memfit.capture.source import StepSource
from memfit.planner.head import head_of, sets_peak
from memfit.planner.optimistic import step_facts
from memfit.planner.timeline import Timeline
from memfit.techniques.choices import Choices
from memfit.techniques.chunked_loss import CHUNKED_LOSS, worth_weighing
from memfit.techniques.chunked_loss.head import Logits, chunked_head
from memfit.techniques.freezing.freeze import frozen
from models import build_gpt
from models.outcome import measured_peak
from small import adamw, chain, rows, squared_error

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 2000


def gpt(tied: bool = False) -> tuple[nn.Module, Any]:  # noqa: FBT001, FBT002
    model, sample, _ = build_gpt(2, 32, 4, 4, 32, VOCAB, tied=tied)
    return model, sample


def llama(vocab: int = VOCAB, tokens: int = 64, batch: int = 4) -> tuple[nn.Module, Any]:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(3, vocab, (batch, tokens))
    labels = ids.clone()
    labels[:, -7:] = -100
    return model, {"input_ids": ids, "labels": labels}


def bert() -> tuple[nn.Module, Any]:
    """A masked-language model: a head with a bias, tied to the embeddings."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = torch.randint(3, VOCAB, (4, 32))
    labels = ids.masked_fill(ids % 3 > 0, -100)
    return transformers.BertForMaskedLM(config).train(), {"input_ids": ids, "labels": labels}


def entropy(logits: Tensor, targets: Tensor, **named: Any) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), **named)


def mean(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0]), batch[1])


def summed(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0]), batch[1], reduction="sum") / 17


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def ignoring(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0]), batch[1] % 50, ignore_index=3, label_smoothing=0.2)


def shifted(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0])[..., :-1, :].contiguous(), batch[1][:, 1:])


def picked(model: nn.Module, batch: Any) -> Tensor:
    chosen = batch[1] % 2 == 0
    return entropy(model(batch[0])[chosen], batch[1][chosen])


def flattened(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]).double().flatten(0, 1), batch[1].flatten())


def in_bf16(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mean(model, batch)


def cast_after_bf16(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[0])
    return entropy(logits.float(), batch[1])


def weighted(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0]), batch[1], weight=torch.linspace(1, 2, VOCAB))


def row_by_row(model: nn.Module, batch: Any) -> Tensor:
    return entropy(model(batch[0]), batch[1], reduction="none").mean()


def of_capped(model: nn.Module, batch: Any) -> Tensor:
    return entropy(torch.tanh(model(batch[0]) / 30) * 30, batch[1])


def in_fp16(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return mean(model, batch)


def looked_at_before(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    with torch.no_grad():
        assert int(logits.argmax(-1).max()) < VOCAB
    return entropy(logits, batch[1])


class Largest(TorchDispatchMode):
    """Elements of the largest floating-point result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in dispatch.tensors_in(out) if t.is_floating_point())])
        return out


def outcome(model: nn.Module, sample: Any, loss_fn: Any, chunks: int) -> tuple[Tensor, list[Tensor | None], int]:
    """Loss, gradients, and the most elements anything has in forward."""
    with chunked_head(model, chunks), Largest() as largest:
        loss = batches.loss_of(model, sample, loss_fn)
    loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return loss.detach(), gradients, largest.elements


def difference(found: list[Tensor | None], plain: list[Tensor | None]) -> float:
    """Relative, in the 2-norm over all gradients."""
    assert [g is None for g in found] == [g is None for g in plain]
    pairs = [(a.double(), b.double()) for a, b in zip(found, plain, strict=True) if a is not None and b is not None]
    return float((sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)) ** 0.5)


HEADS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "llama": lambda: (*llama(), None),
    "bert": lambda: (*bert(), None),
    "tied": lambda: (*gpt(tied=True), mean),
    **{
        f.__name__: (lambda f=f: (*gpt(), f))  # type: ignore[misc]
        for f in (mean, summed, smoothed, ignoring, shifted, picked, flattened)
    },
}


@pytest.mark.parametrize("name", HEADS)
def test_chunks_give_the_same_step_up_to_the_order_of_additions(name: str) -> None:
    model, sample, loss_fn = HEADS[name]()
    loss, gradients, whole = outcome(model, sample, loss_fn, 1)
    found, chunked, largest = outcome(model, sample, loss_fn, 5)
    assert abs(float(found - loss)) <= 1e-6 * float(loss)
    assert difference(chunked, gradients) < 1e-5
    head = VOCAB * next(p.shape[1] for p in model.parameters() if p.shape[0] == VOCAB)
    assert largest <= max(head, whole // 5 + VOCAB) < whole


@pytest.mark.parametrize("loss_fn", [in_bf16, cast_after_bf16])
def test_under_autocast_the_rounding_is_that_of_16_bits(loss_fn: Any) -> None:
    model, sample = gpt()
    loss, gradients, _ = outcome(model, sample, loss_fn, 1)
    found, chunked, _ = outcome(model, sample, loss_fn, 5)
    assert abs(float(found - loss)) <= 1e-5 * float(loss)
    exact = outcome(model, sample, mean, 1)[1]
    assert difference(chunked, exact) <= 1.1 * difference(gradients, exact)


@pytest.mark.parametrize("loss_fn", [weighted, row_by_row, of_capped, in_fp16, looked_at_before])
def test_whatever_else_is_done_with_logits_is_done_plainly(loss_fn: Any) -> None:
    model, sample = gpt()
    loss, gradients, whole = outcome(model, sample, loss_fn, 1)
    found, chunked, largest = outcome(model, sample, loss_fn, 5)
    assert torch.equal(loss, found)
    assert difference(chunked, gradients) == 0.0
    assert largest == whole


def test_the_output_holds_the_logits_for_whoever_looks() -> None:
    model, sample = llama()
    plain = model(**sample).logits
    with chunked_head(model, 4):
        logits = model(**sample).logits
    assert type(logits) is Logits
    assert isinstance(logits, Tensor)
    assert (logits.shape, logits.dtype, logits.device, logits.requires_grad) == (
        *[plain.shape],
        plain.dtype,
        plain.device,
        True,
    )
    assert (logits.size(-1), logits.dim(), len(logits)) == (VOCAB, 3, 4)
    assert torch.equal(logits[..., -1, :], plain[..., -1, :])
    assert torch.equal(logits + 0, plain)
    assert logits.grad_fn is not None
    assert (logits.argmax(-1) == plain.argmax(-1)).all()


@pytest.mark.parametrize("trained", [True, False])
def test_asking_whether_logits_are_a_leaf_makes_none(trained: bool) -> None:  # noqa: FBT001
    model, sample = llama()
    model.requires_grad_(trained)
    with chunked_head(model, 4):
        logits = model(**{**sample, "labels": None}).logits
        assert isinstance(logits, Logits)
        assert logits.is_leaf is not trained
        assert logits.whole is None
    assert model(**sample).logits.is_leaf is not trained


def test_beside_frozen_parts_the_head_is_in_chunks_from_the_first_forward_on() -> None:
    """Where the first forward made the logits whole, later ones were captured too, to see which way the model goes."""
    model, sample = gpt()
    choices = Choices(loss_chunks=4, frozen=("blocks.0",))
    with frozen(model, choices.frozen):
        captured = capture(StepSource(model, sample, mean, adamw), choices)
    assert captured.repeats


def test_without_gradients_only_the_loss_is_computed() -> None:
    model, sample = gpt()
    with torch.no_grad():
        plain = mean(model, sample)
        with chunked_head(model, 4), Largest() as largest:
            found = mean(model, sample)
    assert float(abs(found - plain)) <= 1e-6 * float(plain)
    assert not found.requires_grad
    assert largest.elements < VOCAB * 4 * 32


def test_a_frozen_head_gets_no_gradient_and_rows_still_do() -> None:
    model, sample = gpt()
    model.get_submodule("head").requires_grad_(requires_grad=False)
    _, gradients, _ = outcome(model, sample, mean, 1)
    _, chunked, _ = outcome(model, sample, mean, 4)
    assert sum(g is None for g in chunked) == 1
    assert difference(chunked, gradients) < 1e-5


def test_a_second_backward_is_refused_in_words() -> None:
    model, sample = gpt()
    with chunked_head(model, 4):
        loss = mean(model, sample)
    loss.backward(retain_graph=True)
    with pytest.raises(memfit.EngineError, match="a second time through a chunked loss head"):
        loss.backward()


# -- in plans --------------------------------------------------------------------------------------------------------------


def planned(model: nn.Module, sample: Any, loss_fn: Any, budget: int = 1 << 50, **fixed: Any) -> memfit.Plan:
    return memfit.plan(model, sample, loss_fn, budget, adamw, fixed={"micro_batches": 1, **fixed})


def test_the_peak_falls_by_the_logits_and_is_as_predicted() -> None:
    vocab, tokens, batch = 32000, 64, 4
    model, sample = llama(vocab, tokens, batch)
    plain = planned(model, sample, None, loss_chunks=1)
    chunked = planned(model, sample, None, loss_chunks=8)
    for made in (plain, chunked):
        measured = measured_peak(made, model, sample, None, adamw)
        assert measured == pytest.approx(made.prediction.peak_bytes, rel=0.0001)
    # Logits, their logarithms and the gradient of these, each tokens x vocabulary x 4 bytes; of two of them an eighth stays, and with them the
    # gradient of the head's weight is there, and that of the rows.
    logits = batch * tokens * vocab * 4
    saved = plain.prediction.peak_bytes - chunked.prediction.peak_bytes
    assert saved == pytest.approx(3 * logits - 2 * logits // 8 - vocab * 64 * 4, rel=0.02)
    assert "up to the order of additions" in chunked.explain()


@pytest.mark.parametrize(("fewer", "more"), [(4, 16), pytest.param(8, 64, marks=pytest.mark.slow)])
def test_more_chunks_save_no_more_than_their_bound(fewer: int, more: int) -> None:
    """By which they are left out where fewer brought nothing."""
    model, sample = llama(32000, 64, 4)
    facts = step_facts(Timeline(capture(StepSource(model, sample, None, adamw), Choices()).trace))
    peaks = [planned(model, sample, None, loss_chunks=number).prediction.peak_bytes for number in (fewer, more)]

    bound = CHUNKED_LOSS.bound_beyond(facts, fewer)

    assert CHUNKED_LOSS.goes_beyond(more, fewer)
    assert not CHUNKED_LOSS.goes_beyond(fewer, more)
    assert bound.saved_bytes is not None
    assert 0 < peaks[0] - peaks[1] <= bound.saved_bytes < peaks[0] // 2


def test_dropping_and_chunks_go_together() -> None:
    model, sample = llama()
    plain = planned(model, sample, None, loss_chunks=4)
    made = memfit.replan(plain, plain.prediction.peak_bytes * 7 // 10)
    assert made.choices.loss_chunks == 4
    assert not made.script.plain
    engine = memfit.apply(made, model, None, None)
    _, gradients, _ = outcome(model, sample, None, 4)
    engine.optimizer = None
    with engine.forward() as follower:
        loss = model(**sample).loss
    loss.backward()
    assert follower is not None
    assert follower.divergence is None
    assert difference([p.grad for p in model.parameters()], gradients) == 0.0
    for parameter in model.parameters():
        parameter.grad = None
    measured = measured_peak(made, model, sample, None, adamw)
    assert measured == pytest.approx(made.prediction.peak_bytes, rel=0.0001)


def test_a_smaller_batch_runs_the_same_operations() -> None:
    model, sample = llama(batch=6)
    made = memfit.recompute(model, sample, None, adamw, every="block", fixed={"loss_chunks": 4})
    engine = memfit.apply(made, model)
    assert engine.step({name: t[:5] for name, t in sample.items()}).divergences == ()


@pytest.mark.slow
def test_the_head_is_found_and_offered_where_it_sets_the_peak() -> None:
    model, sample = llama(batch=8)
    timeline = Timeline(memfit.record(model, sample, None, adamw, micro_batches=1).trace)
    head = head_of(timeline)
    assert head is not None
    assert (head.rows, head.classes, worth_weighing(head)) == (8 * 64, VOCAB, (8,))
    # Logits, their logarithms, what comes back to these and what comes back to the logits.
    assert head.bytes == 4 * head.rows * head.classes * 4
    assert sets_peak(timeline, head)
    plain = planned(model, sample, None, micro_batches=2, loss_chunks=1)
    less = plain.prediction.peak_bytes * 6 // 10
    assert planned(model, sample, None, less, micro_batches=2).choices.loss_chunks == 8
    whole = planned(model, sample, None, 1 << 50, micro_batches=2)
    assert whole.choices == plain.choices or whole.prediction.step_seconds < plain.prediction.step_seconds
    # One micro-batch is asked for, and with it every bit: then the head stays whole.
    with pytest.raises(memfit.InfeasibleError, match="_log_softmax_backward_data"):
        memfit.replan(planned(model, sample, None), less)
    narrow, sample = llama(vocab=16, batch=8)
    timeline = Timeline(memfit.record(narrow, sample, None, adamw, micro_batches=1).trace)
    head = head_of(timeline)
    assert head is not None
    assert not sets_peak(timeline, head)
    assert head_of(Timeline(memfit.record(chain(), rows(), squared_error, adamw, micro_batches=1).trace)) is None


@pytest.mark.parametrize(
    ("loss_fn", "chunks", "words"),
    [
        (of_capped, 4, "fixed loss_chunks=4 cannot be honoured: "),
        (weighted, 4, "the model uses its logits for more than a mean or sum of their cross entropy"),
        (mean, 4 * 32 + 1, "fixed loss_chunks=129 cannot be honoured: its loss head has 128 rows"),
        (lambda model, batch: model(batch[0]).square().mean(), 4, "takes no cross entropy"),
    ],
)
def test_chunks_that_cannot_be_had_are_refused_in_words(loss_fn: Any, chunks: int, words: str) -> None:
    model, sample = gpt()
    with pytest.raises(memfit.InputError) as caught:
        planned(model, sample, loss_fn, loss_chunks=chunks)
    assert words in str(caught.value)
