"""Forty architectures of the zoo, one of each kind; the whole of it takes a quarter of an hour: python tests/zoo/run.py."""

from __future__ import annotations

import pytest

from zoo.architectures import architectures
from zoo.judging import judged

pytestmark = [
    pytest.mark.usefixtures("one_thread", "settled"),
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


@pytest.mark.parametrize("name", SAMPLE)
def test_half_of_the_memory_gives_the_same_bits_and_the_predicted_peak(name: str) -> None:
    verdict = judged(name, architectures()[name])
    assert verdict.kind == "exact", verdict


def test_every_model_type_of_transformers_is_an_architecture_or_part_of_one() -> None:
    found = architectures()
    assert set(SAMPLE) <= set(found)
    assert len(found) > 300
    assert "clip_text_model" not in found
