"""`lora:` and `model.weights:` of a run file: what is trained are PEFT's adapters, what is frozen is kept as said, and what is written can be read by PEFT."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.errors import ConfigError
from memfit.techniques.frozen_weights.four_bit import FourBitLinear
from memfit.train import log
from memfit.train import run as runs
from memfit.train.adapters import injected, merged
from memfit.train.assemble import assemble
from memfit.train.config import Config, from_json
from memfit.train.plans import plan_arguments

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
MODEL: dict[str, Any] = {"hf": "llama", "init": "random", "task": "causal-lm"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "text.txt").write_text("a word and another\n" * 20)
    return tmp_path


def config(folder: Path, model: dict[str, Any], **sections: Any) -> Config:
    data = {"train": "text.txt", "tokenizer": "bytes", "max_length": 16}
    fit = {"budget": "1GiB", "global_batch": 4, "device": "cpu", "fixed": {"micro_batches": 1}}
    train = {"steps": 2, "log_every": 1, "meter_every": 1}
    return from_json({"model": {**MODEL, **model}, "data": data, "fit": fit, "train": train, **sections}, folder)


def test_adapters_beside_4_bit_weights_are_trained_predicted_and_merged(folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run = config(folder, {"weights": "4bit"}, lora={"rank": 4, "merge": True}, report={"html": False})

    result = runs.start(run)

    records = [each for each in log.records(run.out) if each.peak_bytes]
    assert [each.peak_bytes for each in records[1:]] == [result.plan.prediction.peak_bytes] * (len(records) - 1)
    assert (run.out / "model" / "adapter_config.json").is_file()
    whole = transformers.AutoModelForCausalLM.from_pretrained(run.out / "merged")
    assert not any("lora" in name for name, _ in whole.named_parameters())
    plain = assemble(run).model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    now = whole.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(plain, now)
    assert torch.allclose(plain.float(), now.float(), atol=0.02)  # rounded to 4 bits, and a little trained


def test_what_is_merged_computes_what_the_adapters_compute(folder: Path) -> None:
    made = assemble(config(folder, {"weights": "fp32"}, lora={"rank": 4}))
    model, sample = made.model.eval(), made.batches.sample()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
        before = model(**sample).loss
        after = merged(model)(**sample).loss
        assert model(**sample).loss == before
    assert torch.allclose(before, after, rtol=1e-5)


def test_what_is_trained_and_in_which_numbers_is_as_said(folder: Path) -> None:
    lora = assemble(config(folder, {"weights": "bf16"}, lora={"rank": 4, "targets": ["q_proj"]}))
    trained = [name for name, p in lora.model.named_parameters() if p.requires_grad]
    assert len(trained) == 2
    assert all("q_proj.lora_" in name for name in trained)
    assert {p.dtype for p in lora.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    whole = config(folder, {"weights": "bf16"})
    assert plan_arguments(whole, assemble(whole))["fixed"] == {"micro_batches": 1, "parameters": "bf16"}
    assert not any(isinstance(m, FourBitLinear) for m in lora.model.modules())


def test_a_configuration_with_adapters_is_read_as_it_was_written(folder: Path) -> None:
    run = config(folder, {"weights": "4bit"}, lora=None)
    assert run.lora is not None
    assert run.lora.rank == 16
    assert from_json(run.to_json(), folder) == run
    assert from_json(config(folder, {}).to_json(), folder).lora is None


@pytest.mark.parametrize(
    ("model", "sections", "sentence"),
    [
        ({"weights": "4bit"}, {}, r"weights in 4 bits cannot be trained: add lora: \{rank: 16\}"),
        ({"weights": "8bit"}, {"lora": {}}, "model.weights: expected one of fp32, bf16, 4bit, found '8bit'"),
        ({}, {"lora": {"rank": 0}}, "lora.rank: 0 is less than 1"),
        ({}, {"lora": {"r": 8}}, "lora.r: no such key; did you mean lora.rank"),
        ({}, {"lora": {"merge": True}, "fit": {"devices": 2}}, "lora.merge goes with model.hf and one device"),
        ({}, {"lora": {"dropout": 1.0}}, "lora.dropout: 1.0 is no share"),
        (
            {"weights": "4bit"},
            {"lora": {}, "fit": {"fixed": {"frozen_weights": "full"}}},
            "model.weights: 4bit says otherwise than fit.fixed.frozen_weights: full",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    folder: Path, model: dict[str, Any], sections: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(folder, model, **sections)


def test_targets_that_the_model_lacks_are_refused(folder: Path) -> None:
    with warnings.catch_warnings(), pytest.raises(ConfigError, match=r"lora\.targets: PEFT finds no layers"):
        assemble(config(folder, {}, lora={"targets": ["nothing"]}))


SMALL = {**LLAMA, "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 1}
ROUTED = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 1}
GROUPED = {
    **SMALL,
    "head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "q_lora_rank": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "qk_rope_head_dim": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
}


@pytest.mark.parametrize(
    ("shape", "without"),
    [
        ({**ROUTED, "model_type": "llama4_text", "head_dim": 8, "interleave_moe_layer_step": 1}, ("router",)),
        ({**ROUTED, "model_type": "phimoe"}, ("router",)),
        ({**GROUPED, "model_type": "deepseek_v4"}, ("o_a_proj",)),
        ({**SMALL, "model_type": "falcon"}, ()),  # another forward, the same form
    ],
)
def test_layers_whose_result_is_of_another_form_get_no_adapters(
    shape: dict[str, Any], without: tuple[str, ...]
) -> None:
    """The router of a Llama 4 is a linear layer that returns a pair: an adapter asked it for its dtype."""
    config = transformers.AutoConfig.for_model(**shape)
    model = transformers.AutoModelForCausalLM.from_config(config)

    adapted, left_out = injected(model, peft.LoraConfig(r=4, target_modules="all-linear"))

    assert left_out == without
    tokens = torch.zeros(2, 8, dtype=torch.long)
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    assert any(p.grad is not None for p in adapted.parameters())
