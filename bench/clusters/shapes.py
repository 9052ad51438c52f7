"""Shapes of models of 7 to 405 billion parameters, built on the meta device from their configurations."""

from __future__ import annotations

from typing import Any

# Hidden size, of the MLP, layers, heads, heads of keys, words: Touvron et al. 2023 (arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783).
SHAPES = {
    "llama2-13b": (5120, 13824, 40, 40, 40, 32_000),
    "llama2-70b": (8192, 28672, 80, 64, 8, 32_000),
    "llama3-8b": (4096, 14336, 32, 32, 8, 128_256),
    "llama3-70b": (8192, 28672, 80, 64, 8, 128_256),
    "llama3-405b": (16384, 53248, 126, 128, 8, 128_256),
}


def llama(name: str, batch: int, tokens: int) -> tuple[Any, Any]:
    """A Llama of this name on the meta device, with a batch; its own loss."""
    import torch
    import transformers

    hidden, inner, layers, heads, of_keys, words = SHAPES[name]
    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=of_keys,
        max_position_embeddings=tokens,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


# Hidden size, blocks, heads: Narayanan et al. 2021 (arXiv:2104.04473), table 1.
GPTS = {"megatron-1.7b": (2304, 24, 24)}


def named(name: str, batch: int, tokens: int) -> tuple[Any, Any]:
    """One of the models above on the meta device, with a batch; its own loss."""
    if name in SHAPES:
        return llama(name, batch, tokens)
    hidden, layers, heads = GPTS[name]
    # Of before fused attention: scores are written out.
    return gpt(hidden, layers, tokens, batch=batch, heads=heads, attention="eager")


def gpt(
    hidden: int, layers: int, tokens: int, *, batch: int = 1, heads: int | None = None, attention: str = "sdpa"
) -> tuple[Any, Any]:
    """A GPT on the meta device, with a batch; its own loss."""
    import torch
    import transformers

    config = transformers.GPT2Config(
        vocab_size=51_200,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads or hidden // 128,
        n_positions=tokens,
        use_cache=False,
        attn_implementation=attention,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}
