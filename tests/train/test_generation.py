"""What a model writes while it is trained is what it would write by itself, takes no more bytes than a step, and leaves the training as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memfit
import small
from memfit.errors import ConfigError
from memfit.step import process_generators
from memfit.train import log, snapshots
from memfit.train.assemble import assemble
from memfit.train.config import TrainConfig, from_json
from memfit.train.data import ArraySamples, Batches
from memfit.train.generation import Generation
from memfit.train.loop import RunOutcome, RunOutput, train
from memfit.train.progress import SilentDisplay
from memfit.train.prompts import GenerateConfig
from memfit.train.text import ByteEncoder
from memfit.values.report import GeneratedText, Report
from memfit.views.page import page
from train.fakes import FakeEngine, plan
from train.test_data import talker
from train.test_loop import Crash, crash_at, losses, same_state

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
WIDTH = 24


class Speaker(nn.Module):
    """A causal model over bytes with dropout; its loss where there are labels, its logits always."""

    def __init__(self, vocabulary: int = 258, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, 0.1, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        length = input_ids.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.tokens(input_ids) + self.places.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=later, is_causal=True)
        logits = self.head(x)
        loss = (
            None
            if labels is None
            else nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        )
        return SimpleNamespace(loss=loss, logits=logits)


def speaker(**sizes: int) -> Speaker:
    torch.manual_seed(3)
    return Speaker(**sizes)


def batches() -> Batches:
    ids = np.random.default_rng(0).integers(1, 257, (10, WIDTH))
    return Batches(ArraySamples({"input_ids": ids, "labels": ids}), 4)


def generation(model: nn.Module, prompts: tuple[str, ...] = ("ab", "hello"), **named: Any) -> Generation:
    settings = GenerateConfig(prompts, **{"every": 3, "max_new_tokens": 5, **named})
    return Generation(settings, ByteEncoder(), model, WIDTH, chat=False)


def run(out: Path, made: Any, steps: int = 8, *, writes: bool = True, **named: Any) -> RunOutcome:
    settings = named.pop("settings", TrainConfig(steps=steps, save_every=4, log_every=1))
    generated = generation(made.model, **named.pop("generate", {})) if writes else None
    return train(
        made,
        named.pop("data", None) or batches(),
        RunOutput(out, **named.pop("output", {})),
        settings,
        generation=generated,
        **named,
    )


def engine(on_step: Any = lambda _: None) -> FakeEngine:
    model = speaker()
    return FakeEngine(model, torch.optim.AdamW(model.parameters(), lr=0.01), on_step=on_step)


# -- what is written ----------------------------------------------------------------------------------------------------------


def tiny_llama(**more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 258,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**sizes, **ends, **more}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(8)
    return model


def tokens_of(model: nn.Module, prompt: str, count: int, **named: Any) -> list[int]:
    """As they are written, before they become text."""
    encoder = ByteEncoder()
    found: list[int] = []
    encoder.decode = lambda tokens: str(found.extend(tokens))  # type: ignore[method-assign, func-returns-value]
    settings = GenerateConfig((prompt,), max_new_tokens=count, **named)
    Generation(settings, encoder, model, 64, chat=False).texts(model, 1, CPU)
    return found


def test_greedy_texts_are_those_of_transformers_own_generation() -> None:
    model = tiny_llama()
    ids = torch.tensor([[byte + 1 for byte in b"once"]])

    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)

    assert tokens_of(model, "once", 12) == theirs[0, 4:].tolist()


def test_a_token_that_ends_texts_ends_one() -> None:
    model = tiny_llama()
    whole = tokens_of(model, "once", 12)
    model.generation_config.eos_token_id = [whole[3]]

    assert tokens_of(model, "once", 12) == whole[: whole.index(whole[3])]


def test_what_is_drawn_depends_on_seed_step_and_prompt_alone() -> None:
    model = speaker()
    drawn = lambda step, **named: generation(model, temperature=1.0, **named).texts(model, step, CPU)  # noqa: E731

    first = drawn(3)
    torch.rand(10)

    assert drawn(3) == first
    assert [t.text for t in drawn(4) or ()] != [t.text for t in first]
    assert [t.text for t in drawn(3, seed=1)] != [t.text for t in first]
    one, other = drawn(3, prompts=("ab", "ab")) or ()  # type: ignore[misc]
    assert one.text != other.text


class Fixed(nn.Module):
    """The same probabilities after whatever comes before."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits.expand(*input_ids.shape, -1)


def test_tokens_are_drawn_by_their_probabilities_among_the_likely_ones() -> None:
    model = Fixed([1e-9, 0.5, 0.3, 0.15, 0.05])

    def counts(**named: Any) -> Any:
        drawn = [
            token for seed in range(30) for token in tokens_of(model, "a", 40, temperature=1.0, seed=seed, **named)
        ]
        return np.bincount(drawn, minlength=5) / len(drawn)

    assert counts() == pytest.approx([0, 0.5, 0.3, 0.15, 0.05], abs=0.05)
    assert counts(top_p=0.8) == pytest.approx([0, 0.625, 0.375, 0, 0], abs=0.05)
    assert counts(top_p=0.81) == pytest.approx([0, 0.526, 0.316, 0.158, 0], abs=0.05)
    assert counts(top_p=0.1).tolist() == [0, 1, 0, 0, 0]
    assert set(tokens_of(model, "a", 20)) == {1}


def test_in_a_chat_a_prompt_is_what_a_user_says(tmp_path: Path) -> None:
    encoder = talker(tmp_path)

    assert encoder.decode(encoder.prompt("how are you", chat=True)) == "<user> how are you <end> <assistant>"
    assert encoder.decode(encoder.prompt("how are", chat=False)) == "how are"
    with pytest.raises(ConfigError, match="no chat template"):
        talker(tmp_path / "other", None).prompt("how", chat=True)


def test_bytes_become_the_text_that_they_were() -> None:
    encoder = ByteEncoder()
    assert encoder.decode(encoder.prompt("größer", chat=False)) == "größer"
    assert encoder.decode([0, 257, 98]) == "a"


# -- beside the training ------------------------------------------------------------------------------------------------------


def test_the_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    silent, writing = engine(), engine()

    run(tmp_path / "silent", silent, writes=False)
    run(tmp_path / "writing", writing, generate={"temperature": 1.0})

    assert losses(tmp_path / "silent") == losses(tmp_path / "writing")
    assert same_state(silent, writing)
    assert {t.step for t in log.texts(tmp_path / "writing")} == {3, 6, 8}
    assert not log.texts(tmp_path / "silent")


def test_modes_and_generators_are_put_back() -> None:
    model = speaker()
    model.blocks[0].eval()
    before, modes = process_generators.generators(), [m.training for m in model.modules()]

    generation(model, temperature=1.0).texts(model, 1, CPU)

    assert [m.training for m in model.modules()] == modes
    assert torch.equal(before["torch"], torch.get_rng_state())


@pytest.mark.parametrize("at", [4, 6, 7, 8])
def test_a_run_that_crashed_writes_each_text_once(tmp_path: Path, at: int) -> None:
    run(tmp_path / "whole", engine(), generate={"temperature": 0.7})
    with pytest.raises(Crash):
        run(tmp_path / "cut", engine(crash_at(at)), generate={"temperature": 0.7})
    snapshot = snapshots.latest(tmp_path / "cut", pytest.fail) if at > 4 else None

    run(tmp_path / "cut", engine(), snapshot=snapshot, generate={"temperature": 0.7})

    assert log.texts(tmp_path / "cut") == log.texts(tmp_path / "whole")
    again = engine()
    run(tmp_path / "cut", again, snapshot=snapshots.latest(tmp_path / "cut", pytest.fail))
    assert again.records == []
    assert log.texts(tmp_path / "cut") == log.texts(tmp_path / "whole")


def test_a_stop_while_the_model_writes_is_obeyed_and_the_text_written_after(tmp_path: Path) -> None:
    import os
    import signal

    made = engine()
    run(tmp_path / "whole", engine())
    forward = made.model.forward

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if not made.model.training:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(*arguments, **named)

    made.model.forward = interrupted  # type: ignore[method-assign]
    outcome = run(tmp_path / "cut", made)
    assert (outcome.step, log.texts(tmp_path / "cut")) == (3, ())
    assert made.model.training

    run(tmp_path / "cut", engine(), snapshot=snapshots.latest(tmp_path / "cut", pytest.fail))
    assert log.texts(tmp_path / "cut") == log.texts(tmp_path / "whole")


# -- bytes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [258, 2000])
def test_writing_takes_less_than_the_smallest_step(tmp_path: Path, vocabulary: int) -> None:
    """Of one sample as long as what is written, under the smallest plan, where a step keeps least."""
    data = replace(batches(), size=1)
    smallest = small.plan_at(0.0, speaker(vocabulary=vocabulary), data.sample(), None)
    made = memfit.apply(smallest, speaker(vocabulary=vocabulary), None, small.adamw)
    longest = {"prompts": ("a text of 19 bytes.",), "max_new_tokens": 5}

    outcome = run(
        tmp_path, made, 6, data=data, generate=longest, settings=TrainConfig(steps=6, meter_every=1, log_every=1)
    )

    lines = [line for line in log.read(tmp_path) if "generated" in line]
    assert [line["step"] for line in lines] == [3, 6]
    peak = lines[0]["generating_peak_bytes"]
    assert outcome.peak_bytes is not None
    assert (
        sum(p.nbytes for p in made.model.parameters()) * 3 < peak < outcome.peak_bytes == smallest.prediction.peak_bytes
    )
    assert "generating_peak_bytes" not in lines[1]


class Notes(SilentDisplay):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_peak_above_the_budget_would_be_said(tmp_path: Path) -> None:
    made, notes = engine(), Notes()
    made.plan = plan(budget_bytes=1000)

    run(tmp_path, made, 3, output={"display": notes})

    (said,) = (note for note in notes.notes if "budget" in note)
    assert said.startswith("generating took ")
    assert "above the budget of 1000 B" in said
    assert sum("goes on" in note for note in notes.notes) == 2


# -- reports ------------------------------------------------------------------------------------------------------------------


def test_a_report_holds_the_texts_as_they_are() -> None:
    texts = (GeneratedText(5, "<b>once</b>", "upon\na time"), GeneratedText(10, "<b>once</b>", "more"))
    report = Report("t", plan(), texts=texts)

    assert Report.from_json(report.to_json()) == report
    shown = page(report)
    assert "Generated text" in shown
    assert "&lt;b&gt;once&lt;/b&gt;" in shown
    assert shown.index(">10<") < shown.index(">5<")
    before = {key: value for key, value in report.to_json().items() if key != "texts"}  # a report of before
    assert Report.from_json(before) == replace(report, texts=())


# -- what is refused ----------------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_a_sample_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"generate\.prompts: 'a text of 20 bytes\.\.' has 20 tokens, and with generate\.max_new_tokens: 5 that is more than the 24 of a sample",
    ):
        generation(speaker(), ("a text of 20 bytes..",))


class Wants(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        return input_ids.float()


class LossAlone(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (input_ids * attention_mask).float().mean()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Wants(), "the forward of Wants needs labels besides: give it a default"),
        (LossAlone(), r"LossAlone gave a tensor of shape \(\): return them, as a tensor or as logits"),
        (nn.Identity(), "the forward of Identity needs input besides"),
    ],
)
def test_a_model_without_logits_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generation(model).check(model, CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "generate.prompts is missing"),
        ({"prompts": []}, "generate.prompts: give texts"),
        ({"prompts": ["a", ""]}, "generate.prompts: give texts"),
        ({"prompts": "a", "every": 0}, "generate.every: 0 is less than 1"),
        ({"prompts": "a", "max_new_tokens": 0}, "generate.max_new_tokens: 0 is less than 1"),
        ({"prompts": "a", "temperature": -1}, "generate.temperature: -1.0 is no temperature"),
        ({"prompts": "a", "temperature": 1, "top_p": 0}, "generate.top_p: 0.0 is no share"),
        ({"prompts": "a", "top_p": 0.9}, "generate.top_p: at temperature 0 nothing is drawn"),
        ({"prompts": "a", "max_tokens": 3}, "did you mean generate.max_new_tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    model = {"python": "a:b", "task": "causal-lm"}
    with pytest.raises(ConfigError, match=message):
        from_json({"model": model, "data": {"train": "a.txt"}, "generate": settings}, Path())


def test_other_tasks_write_nothing() -> None:
    model = {"python": "a:b", "task": "masked-lm"}
    with pytest.raises(ConfigError, match=r"it goes with model\.task: causal-lm, not masked-lm"):
        from_json({"model": model, "data": {"train": "a.txt"}, "generate": {"prompts": "a"}}, Path())


MODEL = """
from train.test_generation import Speaker

def build():
    return Speaker()

def numbers():
    import torch
    return torch.utils.data.TensorDataset(torch.zeros(8, 3))
"""


def test_a_run_file_is_read_with_its_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "speaking.py").write_text(MODEL)
    (tmp_path / "book.txt").write_text("a word and another\n" * 20)
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    run_file: dict[str, Any] = {
        "model": {"python": "speaking:build", "task": "causal-lm"},
        "data": {"train": "book.txt", "tokenizer": "bytes", "max_length": 16},
        "fit": {"device": "cpu", "global_batch": 4},
        "generate": {"prompts": ["a word"], "max_new_tokens": 10},
    }

    made = assemble(from_json(run_file, tmp_path))

    assert made.generation is not None
    (text,) = made.generation.texts(made.model, 7, CPU) or ()
    assert (text.step, text.prompt) == (7, "a word")
    with pytest.raises(ConfigError, match=r"more than the 16 of a sample"):
        assemble(from_json({**run_file, "generate": {"prompts": ["a word"], "max_new_tokens": 11}}, tmp_path))
    with pytest.raises(ConfigError, match=r"generate needs batches with input_ids"):
        assemble(from_json({**run_file, "data": {"python": "speaking:numbers"}}, tmp_path))
