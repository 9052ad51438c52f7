"""Forty architectures of the zoo, one of each kind, every second one also with the technique whose turn it is; the whole: python tests/zoo/run.py."""

from __future__ import annotations

import pytest

import memfit
from memfit.planning import planning_of
from zoo.architectures import architectures
from zoo.building import built
from zoo.judging import judged
from zoo.techniques import TECHNIQUES, turn_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own, about names and defaults of other people's models
]

SAMPLE = (
    "albert",
    "bart",
    "beit",
    "bert",
    "blip",
    "bloom",
    "clip",
    "convnext",
    "deberta-v2",
    "detr",
    "distilbert",
    "electra",
    "falcon",
    "gemma",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "llama",
    "llava",
    "longformer",
    "mamba",
    "mistral",
    "mixtral",
    "opt",
    "perceiver",
    "phi3",
    "qwen2",
    "qwen2_vl",
    "qwen3",
    "resnet",
    "roberta",
    "rwkv",
    "segformer",
    "siglip",
    "swin",
    "t5",
    "vit",
    "wav2vec2",
    "whisper",
    "xlnet",
)


# Of each kind one: an encoder, a decoder, both in one that hears, experts, images, images with text. The others at night.
QUICK = {"clip", "deberta-v2", "llama", "mixtral", "vit", "whisper"}


@pytest.mark.alternate(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SAMPLE]
)
def test_half_of_the_memory_gives_the_same_bits_and_the_predicted_peak(name: str) -> None:
    tried = "one" if SAMPLE.index(name) % 2 else "none"
    verdict = judged(name, architectures()[name], tried=tried)
    assert verdict.kind == "exact", verdict
    assert [row["kind"] for row in verdict.techniques] == ["exact"] * (tried == "one"), verdict.techniques


def test_every_technique_has_its_turn() -> None:
    """Of a model to which all of them apply, whatever its name."""
    specimen = built("bert", ["BertForMaskedLM"])
    made = memfit.plan(specimen.model, specimen.batch, specimen.loss_fn, 1 << 50, None, fixed={"micro_batches": 1})
    planning = planning_of(made)
    assert planning is not None
    picked = {turn_of(name, specimen.model, planning).name for name in architectures()}
    assert picked == {technique.name for technique in TECHNIQUES}


def test_every_model_type_of_transformers_is_an_architecture_or_part_of_one() -> None:
    found = architectures()
    assert set(SAMPLE) <= set(found)
    assert len(found) > 300
    assert "clip_text_model" not in found
