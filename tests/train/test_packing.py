"""Samples that share a row are learnt from as if each had its own, and a step with them takes the bytes that were predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memfit
import small
from memfit.batches import IGNORED_LABEL
from memfit.errors import ConfigError, InfeasibleError
from memfit.train import packing, readers
from memfit.train.assemble import assemble
from memfit.train.config import from_json
from memfit.train.evaluate import evaluate
from memfit.train.packing import PackedSamples, rows_of
from memfit.train.text import ByteEncoder, Conversation, Format, Labels, TokenSamples, samples_of_lines

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning:transformers"),
]
WIDTH = 16
LENGTHS = [5, 15, 3, 9, 2, 7, 15, 4, 6, 8]  # two have a row for themselves, but for one place
SIZES = {
    "vocab_size": 258, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": {**SIZES, "sliding_window": 4},
    "qwen3": SIZES,
    "gemma3_text": {**SIZES, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gpt2": {"vocab_size": 258, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
             "bos_token_id": None, "eos_token_id": None},
}  # fmt: skip


def built(kind: str, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(1)
    settings = transformers.AutoConfig.for_model(kind, **KINDS[kind], attn_implementation=attention)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(settings)
    for parameter in model.parameters():  # larger than at the start, so that what is seen changes much
        if parameter.dim() > 1:
            parameter.data.mul_(8)
    return model


def samples(lengths: Sequence[int] = LENGTHS) -> TokenSamples:
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(1, 257, (length,), generator=generator).tolist() for length in lengths]
    return TokenSamples([(each, None) for each in tokens], Format(ByteEncoder(), WIDTH - 1, "causal-lm"))


def packed(lengths: Sequence[int] = LENGTHS) -> PackedSamples:
    return PackedSamples(samples(lengths), WIDTH, {"use_cache": False})


def whole(of: PackedSamples) -> dict[str, Any]:
    return of.batch(range(len(of)), 0)


# -- which samples share a row ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 15), max_size=60))
def test_every_sample_is_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = rows_of(lengths, 16)

    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    filled = [sum(lengths[sample] for sample in row) for row in rows]
    assert all(0 < tokens <= 16 for tokens in filled)
    # Of two rows that are at most half full, the samples of one would have found space in the other.
    assert sum(tokens <= 8 for tokens in filled) <= 1


def test_a_sample_goes_into_the_fullest_row_that_has_space() -> None:
    assert rows_of([6, 10, 4, 7, 3], 16) == [[0, 1], [2, 3, 4]]
    assert rows_of([9, 12, 3, 6], 16) == [[0, 3], [1, 2]]


@given(st.lists(st.integers(2, 15), min_size=1, max_size=30))
def test_every_row_holds_two_samples_or_one_and_padding(lengths: list[int]) -> None:
    """Transformers leaves the mask out where all rows are one sample each."""
    positions = whole(packed(lengths))["position_ids"]

    assert bool((positions.diff(dim=1) != 1).any(dim=1).all())


def test_a_row_has_positions_that_begin_again_and_no_labels_at_the_boundaries() -> None:
    tokens = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    made = PackedSamples(TokenSamples([(each, None) for each in tokens], Format(ByteEncoder(), 9, "causal-lm")), 10, {})

    batch = made.batch([0], 0)

    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, 7, 8, 9, -100]]
    assert made.filled == 0.9


def test_of_packed_conversations_only_the_answers_are_learnt() -> None:
    talks = [Conversation([1, 2, 3, 4], [False, False, True, True]), Conversation([5, 6], [True, True])]
    form = Format(ByteEncoder(), 7, "causal-lm")

    batch = PackedSamples(TokenSamples([(each, None) for each in talks], form), 8, {}).batch([0], 0)

    assert batch["labels"].tolist() == [[-100, -100, 3, 4, -100, 6, -100, -100]]


# -- losses -------------------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, batch: dict[str, Any]) -> float:
    with torch.no_grad():
        return float(model(**batch).loss)


def own_losses(model: nn.Module, of: TokenSamples) -> tuple[float, int]:
    """The sum of the losses of all tokens, each sample in a row of its own without padding, and how many there are."""
    total, count = 0.0, 0
    for number in range(len(of)):
        tokens = torch.from_numpy(of.tokens(number)[0].astype("int64"))[None]
        total += loss_of(model, {"input_ids": tokens, "labels": tokens}) * (tokens.shape[1] - 1)
        count += tokens.shape[1] - 1
    return total, count


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_samples_in_rows_of_their_own(kind: str, attention: str) -> None:
    model = built(kind, attention).eval()
    total, count = own_losses(model, samples())

    batch = whole(packed())
    loss = loss_of(model, batch)

    assert int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()) == count
    assert loss == pytest.approx(total / count, rel=2e-6)
    # With the keys and values cached, which is what transformers does unless it is told not to, the same rows give another loss.
    assert loss_of(model, {**batch, "use_cache": True}) != pytest.approx(total / count, rel=1e-4)


def test_gradients_are_those_of_padded_samples() -> None:
    one, other = built("llama"), built("llama")
    padded = samples().batch(range(len(LENGTHS)), 0)

    one(**whole(packed())).loss.backward()
    other(**padded).loss.backward()

    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]


def test_an_evaluation_of_packed_data_gives_the_loss_of_the_samples() -> None:
    model = built("llama").eval()
    batches = memfit.train.data.Batches(packed(), 2, None)  # type: ignore[attr-defined]

    loss = evaluate(model, batches, None, largest=1, weights="next_tokens:labels")

    total, count = own_losses(model, samples())
    assert loss == pytest.approx(total / count, rel=2e-6)


# -- bytes --------------------------------------------------------------------------------------------------------------------


def test_steps_take_the_predicted_bytes_whatever_is_in_a_row() -> None:
    """Rows of one sample, of many, and both in one batch: one path, one plan, one peak."""
    lengths = [15, 15, 15, 15, 4, 4, 4, 4, 4, 4, 4, 4, 15, 5, 5, 6]
    rows = packed(lengths)
    sample = rows.batch([0, 1, 4, 5], 0)
    fixed = {"micro_batches": 2}
    with pytest.raises(InfeasibleError) as refused:
        memfit.plan(built("llama"), sample, None, 1000, small.adamw, fixed=fixed)
    budget = refused.value.minimum_bytes
    assert budget is not None

    engine = memfit.fit(built("llama"), sample, None, budget, small.adamw, fixed=fixed)

    assert engine.rehearsal is not None
    assert engine.rehearsal.measured_peak_bytes == engine.plan.prediction.peak_bytes <= budget
    engine.step(sample)  # the optimizer has state from the second step on
    for chosen in ([0, 1, 2, 3], [4, 5, 4, 5], [0, 4, 1, 5], [6, 6, 0, 0]):
        record = engine.step(rows.batch(chosen, 0), meter=True)
        assert record.peak_bytes == engine.plan.prediction.peak_bytes
        assert (record.divergences, record.begun_anew) == ((), ())
        assert record.recomputations > 0


# -- what is refused ----------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Takes positions, and runs through the row all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells, self.head = nn.Embedding(258, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 258)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.cells(self.embedding(input_ids))[0])
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


class WithoutPositions(Recurrent):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return super().forward(input_ids, labels)


def test_a_model_that_mixes_samples_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(
        ConfigError, match=r"in Recurrent samples in one row see each other, .* leave data\.packing out"
    ):
        packing.check(Recurrent(), None, whole(packed()), torch.device("cpu"))


def test_a_model_with_a_cache_that_is_left_on_is_refused() -> None:
    batch = whole(packed())
    del batch["use_cache"]
    with pytest.raises(ConfigError, match="samples in one row see each other"):
        packing.check(built("llama"), None, batch, torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_keeps_them_apart_is_taken_and_left_as_it_was(kind: str) -> None:
    model = built(kind).train()
    state = torch.get_rng_state()
    packing.check(model, None, {**whole(packed()), **packing.constants_for(model, None)}, torch.device("cpu"))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_batch_has_besides_follows_from_the_model() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        built("llama"), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )

    assert packing.constants_for(built("llama"), None) == packing.constants_for(adapted, None) == {"use_cache": False}
    assert packing.constants_for(Recurrent(), None) == {}
    with pytest.raises(ConfigError, match=r"the forward of WithoutPositions takes no position_ids"):
        packing.constants_for(WithoutPositions(), None)


# -- in a run file ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    rows = [{"text": "a few words" if n % 3 else "and a text that is longer than a row"} for n in range(12)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "book.txt").write_text("a word and another\n" * 20)
    return tmp_path


def configured(folder: Path, **data: Any) -> Any:
    return from_json(
        {
            "model": {"hf": "llama", "init": "random", "task": data.pop("task", "causal-lm")},
            "data": {"train": "texts.jsonl", "text": "text", "tokenizer": "bytes", "max_length": 24, "packing": True, **data},
            "fit": {"device": "cpu", "global_batch": 2},
        },
        folder,
    )  # fmt: skip


def test_a_run_file_packs_its_texts_and_says_how(folder: Path) -> None:
    made = assemble(configured(folder))

    assert isinstance(made.batches.samples, PackedSamples)
    cut, packed, cache = made.notes
    assert cut == "data.train: 4 of 12 texts are longer than 23 tokens and were cut"
    assert packed == "data.train: 12 samples are packed into 8 rows of 24 tokens, 94 % filled"
    assert cache.startswith("model.hf: use_cache is off while the model is trained")
    batch = made.batches.sample()
    assert {
        name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)
    } == dict.fromkeys(("input_ids", "position_ids", "labels"), (2, 24))
    assert batch["use_cache"] is False
    unpacked = assemble(configured(folder, packing=False, max_length=23)).batches
    whole_of = lambda batches: batches.samples.batch(range(len(batches.samples)), 0)  # noqa: E731
    model = made.model.eval()
    assert loss_of(model, whole_of(made.batches)) == pytest.approx(loss_of(model, whole_of(unpacked)), rel=2e-6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": "book.txt"}, "book.txt is running text, which fills every row without it"),
        ({"text": None}, "data.packing packs texts of files"),
        ({"max_length": 3}, "rows of 3 tokens hold no two samples"),
        ({"task": "masked-lm"}, "it goes with model.task: causal-lm, not masked-lm"),
    ],
)
def test_packing_that_cannot_be_meant_is_refused(folder: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assemble(configured(folder, **data))


def test_short_samples_are_read_as_ever(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "de"}\n')
    form = Format(ByteEncoder(), 7, "causal-lm")
    read = samples_of_lines(readers.rows([tmp_path / "a.jsonl"]), "text", Labels(), form)

    assert (read.lengths, read.pad) == ([3, 2], 0)
    assert read.tokens(1)[0].tolist() == [101, 102]
