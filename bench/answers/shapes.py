"""Configurations as the models' makers publish them, without weights: the numbers that decide what a step takes.

Sources: the config.json of each model's own repository.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_LLAMA: Final[dict[str, Any]] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_QWEN: Final[dict[str, Any]] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "gpt2-medium": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024,
    },
    "bert-large": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 512,
    },
    "Qwen2.5-0.5B": {
        **_QWEN, "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "Llama-3.2-3B": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "Mistral-7B": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 32768, "sliding_window": None,
    },
    "Llama-3.1-8B": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
}  # fmt: skip


def write_all(folder: Path) -> None:
    """A folder with a config.json for each, and one whose configuration is half a one."""
    for name, shape in {**SHAPES, "half": {"vocab_size": 1000}}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(shape), encoding="utf-8")
