"""A configuration becomes the model, data and optimizer it describes, Hugging Face folders included."""

from __future__ import annotations

import json
import logging
import warnings
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memfit.errors import ConfigError, InputError
from memfit.train import run as runs
from memfit.train.assemble import (
    CACHE_OFF,
    Assembly,
    assemble,
    build_model,
    cache_as_read,
    choose_device,
    quietly,
    resolve,
    seed_all,
)
from memfit.train.config import Config, from_json
from train.fakes import Api

BERT = {
    "model_type": "bert",
    "vocab_size": 258,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
    "label2id": {"bad": 0, "good": 1},
    "id2label": {0: "bad", 1: "good"},
}
HF: dict[str, Any] = {"hf": "bert", "init": "random", "task": "sequence-classification"}
TEXT: dict[str, Any] = {
    "train": "lines.jsonl",
    "text": "text",
    "label": "kind",
    "tokenizer": "bytes",
    "max_length": 16,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps(BERT))
    rows = [{"text": "well done" if i % 2 else "oh no", "kind": "good" if i % 2 else "bad"} for i in range(10)]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "text.txt").write_text("a word and another\n" * 20)
    np.savez(tmp_path / "numbers.npz", x=np.zeros((6, 2), np.float32))
    return tmp_path


def config(folder: Path, **sections: dict[str, Any]) -> Config:
    fit = {"budget": "1MiB", "global_batch": 4, "device": "cpu"}
    return from_json({"fit": fit, "model": HF, "data": TEXT, **sections}, folder)


def assembled(folder: Path, **sections: dict[str, Any]) -> Assembly:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        return assemble(config(folder, **sections))


def loss(made: Assembly) -> Tensor:
    value: Tensor = made.model(**made.batches.sample()).loss
    return value


def test_a_classifier_from_a_folder_reads_its_classes_by_name(folder: Path) -> None:
    made = assembled(folder)

    batch = made.batches.samples.batch(range(10), 0)
    assert batch["labels"].tolist() == [0, 1] * 5
    assert batch["input_ids"].shape == (10, 16)
    assert made.model.training
    assert torch.isfinite(loss(made))


def cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of bert under the name "me/bert", as a download leaves it in the Hub's cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    there = folder / "hub" / "models--me--bert" / "snapshots" / "0123"
    there.parent.mkdir(parents=True)
    (folder / "bert").rename(there)
    refs = folder / "hub" / "models--me--bert" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    return there


def test_a_model_that_was_downloaded_is_found_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = cached(folder, monkeypatch)
    from memfit.estimating.models import named

    made = assembled(folder, model={**HF, "hf": "me/bert"})

    assert torch.isfinite(loss(made))
    assert named("me/bert", "masked-lm").title == "me/bert"
    assert config(folder).hf_folder("me/bert") == there
    assert config(folder).hf_folder("me/other") == folder / "me/other"
    (folder / "me" / "bert").mkdir(parents=True)  # a folder of that name comes first
    assert config(folder).hf_folder("me/bert") == folder / "me/bert"


def test_a_tokenizer_that_was_downloaded_is_found_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = cached(folder, monkeypatch)
    (there / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nwell\ndone\noh\nno")

    made = assembled(folder, model={**HF, "hf": "me/bert"}, data={**TEXT, "tokenizer": None})

    assert torch.isfinite(loss(made))


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
def test_language_models_learn_running_text(folder: Path, task: str) -> None:
    data = {"train": "text.txt", "tokenizer": "bytes", "max_length": 16}
    bert = {**BERT, "is_decoder": task == "causal-lm"}
    (folder / "bert" / "config.json").write_text(json.dumps(bert))

    made = assembled(folder, model={**HF, "task": task}, data=data)

    assert torch.isfinite(loss(made))


LLAMA = {
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}


def test_a_decoder_hands_out_no_keys_and_values_while_it_is_trained(folder: Path) -> None:
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA))
    data = {"train": "text.txt", "tokenizer": "bytes", "max_length": 16}
    encoder = assembled(folder)

    made = assembled(folder, model={**HF, "hf": "llama", "task": "causal-lm"}, data=data)

    assert made.model(**made.batches.sample()).past_key_values is None
    assert CACHE_OFF in made.notes
    assert CACHE_OFF not in encoder.notes
    with cache_as_read(made.model, folder / "llama"):
        made.model.save_pretrained(folder / "written")  # type: ignore[operator]
    assert json.loads((folder / "written" / "config.json").read_text())["use_cache"] is True
    assert made.model.config.use_cache is False  # type: ignore[union-attr]


def test_initial_weights_depend_on_the_seed_alone(folder: Path) -> None:
    one = assembled(folder)
    torch.rand(10)
    same, other = assembled(folder), assembled(folder, train={"seed": 1})

    def weights(made: Assembly) -> Tensor:
        return torch.cat([p.detach().flatten() for p in made.model.parameters()])

    assert torch.equal(weights(one), weights(same))
    assert not torch.equal(weights(one), weights(other))


def test_without_weights_the_model_takes_no_memory(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = assemble(config(folder, model={**HF, "init": "weights"}), weights=False)

    assert all(parameter.is_meta for parameter in made.model.parameters())


def test_the_optimizer_is_the_one_described(folder: Path) -> None:
    made = assembled(folder, optim={"name": "sgd", "lr": 0.5, "momentum": 0.9, "fused": False})

    optimizer = made.optimizer(made.model.parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"], optimizer.defaults["fused"]) == (0.5, 0.9, False)


def test_what_is_cut_and_what_is_small_is_said(folder: Path) -> None:
    fit = {"budget": "1MiB", "global_batch": 32, "device": "cpu"}

    made = assembled(folder, fit=fit, data={**TEXT, "max_length": 6})

    assert made.notes == (
        "data.train: 5 of 10 texts are longer than 6 tokens and were cut",
        "the data holds 10 samples: each step takes all of them, not 32",
    )
    assert made.batches.size == 10


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {**HF, "hf": "gone"}}, "model.hf: there is no .*config.json .*downloads nothing"),
        ({"model": {**HF, "init": "weights"}}, "holds no weights; to start from fresh ones, set model.init: random"),
        ({"data": {**TEXT, "max_length": None}}, "data.max_length is missing"),
        ({"data": {**TEXT, "max_length": 4096}}, r"data.max_length: 4096: this model has positions for \d+ tokens"),
        ({"data": {**TEXT, "text": None}}, "data.text is missing"),
        ({"data": {**TEXT, "label": None}}, "data.label is missing"),
        ({"data": {**TEXT, "tokenizer": None}}, "data.tokenizer: .*bert holds no tokenizer"),
        ({"data": {**TEXT, "tokenizer": "gone"}}, "data.tokenizer: there is no folder"),
        ({"data": {**TEXT, "train": "text.txt"}}, "running text for causal-lm and masked-lm"),
        ({"data": {"python": "json:JSONDecoder"}}, "data.python: json:JSONDecoder returned JSONDecoder, which has no"),
        ({"data": {"python": "math:tau"}}, "has no function 'tau'"),
        ({"data": {"python": "math:sqrtt"}}, "has no function 'sqrtt'; did you mean math:sqrt"),
        ({"data": {"python": "math.py:sqrt"}}, "there is no module 'math.py' .*; write math:sqrt"),
        ({"data": {**TEXT, "label": "text"}}, "label 'oh no' is no class of the model; there are: bad, good"),
    ],
)
def test_what_is_missing_is_named(folder: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        assembled(folder, **sections)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"", b"\x10\0\0\0\0\0\0\0{"])
def test_weights_that_cannot_be_read_are_named(folder: Path, content: bytes) -> None:
    (folder / "bert" / "model.safetensors").write_bytes(content)

    with pytest.raises(
        ConfigError, match=r"model\.hf: the weights in .*bert cannot be read \(SafetensorError: .*copy them again"
    ):
        assembled(folder, model={**HF, "init": "weights"})


def test_without_the_extra_the_command_to_install_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)

    with pytest.raises(InputError, match=r"model\.hf needs transformers: pip install 'memfit\[transformers\]'"):
        assemble(config(folder))


def test_a_device_that_is_not_here_is_refused() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"fit\.device: torch cannot use 'cuda:9' here"):
        choose_device("cuda:9")
    with pytest.raises(ConfigError, match=r"fit\.device: '4090' is the name of a GPU, .* write cuda"):
        choose_device("4090")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_process_of_a_computer_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device(name) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"it has 2, and this is process 3: start as many as there are GPUs"):
        choose_device(name)


def test_a_module_that_fails_on_import_says_so_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (folder / "broken_module.py").write_text("import a_module_that_is_not_there\n")

    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        resolve("broken_module:build", config(folder), "model.python")


def test_python_data_comes_with_or_without_validation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (folder / "our_data.py").write_text(
        "def both():\n    return [(1.0, 2)] * 6, [(3.0, 4)] * 2\ndef one():\n    return [(1.0, 2)] * 6\n"
    )

    both, one = assembled(folder, data={"python": "our_data:both"}), assembled(folder, data={"python": "our_data:one"})

    assert both.validation is not None
    assert len(both.validation.samples) == 2
    assert one.validation is None
    assert [t.tolist() for t in one.batches.sample()] == [[1.0] * 4, [2] * 4]


def test_a_trained_folder_can_be_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From folder to folder: train, save, load the result as the next run's model."""
    monkeypatch.setattr(runs, "api", Api())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = runs.start(config(folder, train={"steps": 2, "out": "out"}, report={"html": False}))

    assert result.model == folder / "out" / "model"
    again = assembled(folder, model={**HF, "hf": "out/model", "init": "weights"})
    state = torch.load(folder / "out" / "step-000002" / "model.pt", weights_only=True)["state"]
    assert all(torch.equal(value, state[name]) for name, value in again.model.state_dict().items())


def test_a_tokenizer_from_a_folder_cuts_pads_and_goes_with_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, "oh": 3, "no": 4, "well": 5}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")  # noqa: S106 - no secret
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder / "bert")
    data = {**TEXT, "tokenizer": None, "max_length": 4}

    read = assembled(folder, data=data)

    batch = read.batches.samples.batch([0, 1], 0)
    assert batch["input_ids"].tolist() == [[3, 4, 0, 0], [5, 1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0]] * 2
    monkeypatch.setattr(runs, "api", Api())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = runs.start(config(folder, data=data, train={"steps": 1, "out": "out"}, report={"html": False}))
    assert result.model is not None
    assert any(result.model.glob("tokenizer*"))


def test_to_plan_for_another_device_a_large_model_of_a_function_takes_no_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "built_here.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(8, 8)\n")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    here = config(folder, model={"python": "built_here:build"})
    seed_all(here.train.seed)
    built, _ = build_model(here)
    seed_all(here.train.seed)
    small, _ = build_model(here, weights=False)
    for a, b in zip(small.parameters(), built.parameters(), strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr("memfit.train.assemble.LARGE_BYTES", 1)
    large, _ = build_model(here, weights=False)
    assert all(parameter.is_meta for parameter in large.parameters())


def test_deepspeed_does_not_say_between_results_that_there_is_no_gpu() -> None:
    deepspeed, heard = logging.getLogger("DeepSpeed"), BufferingHandler(10)
    deepspeed.addHandler(heard)
    try:
        with quietly():
            deepspeed.warning("Setting accelerator to CPU. If you have GPU, we were unable to detect it.")
            deepspeed.warning("something else")
        deepspeed.warning("Setting accelerator to CPU.")
    finally:
        deepspeed.removeHandler(heard)

    assert [record.getMessage() for record in heard.buffer] == ["something else", "Setting accelerator to CPU."]
