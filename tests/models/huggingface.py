"""Models of Hugging Face transformers, from small configurations: nothing is downloaded.

They are here for what our own models lack: output dataclasses, masks built at run time, losses inside the model,
relative position biases, rotary embeddings, and attention chosen by name (written out or fused).
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
import transformers
from torch import Tensor, nn

from .built import IGNORED, Built


def loss_bf16(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, under bfloat16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(**batch).loss
    return loss


def shifted_labels(sample: dict[str, Tensor]) -> int:
    """The labels that a causal loss averages over: the model shifts them, so the first one of each row is not used."""
    return int((sample["labels"][:, 1:] != IGNORED).sum())


def _padding_mask(batch: int, tokens: int) -> Tensor:
    """Attention mask (batch, tokens): rows end at random lengths from half of the tokens up, the first row is full."""
    lengths = torch.randint(tokens // 2, tokens + 1, (batch, 1))
    lengths[0] = tokens
    return (torch.arange(tokens) < lengths).long()


def bert(attention: Literal["eager", "sdpa"], *, bf16: bool = False) -> Built:
    """BERT with a classification head, dropout 0.1, padded rows."""
    torch.manual_seed(0)
    batch, tokens, vocab, labels = 16, 64, 200, 3
    config = transformers.BertConfig(
        vocab_size=vocab,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=tokens,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=labels,
        attn_implementation=attention,
    )
    model = transformers.BertForSequenceClassification(config).train()
    sample = {
        "input_ids": torch.randint(vocab, (batch, tokens)),
        "attention_mask": _padding_mask(batch, tokens),
        "labels": torch.randint(labels, (batch,)),
    }
    return model, sample, loss_bf16 if bf16 else None


def llama() -> Built:
    """Causal decoder with RMSNorm, rotary positions, grouped queries; its loss averages over unpadded tokens only."""
    torch.manual_seed(0)
    batch, tokens, vocab = 16, 64, 200
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids, mask = torch.randint(3, vocab, (batch, tokens)), _padding_mask(batch, tokens)
    labels = ids.masked_fill(mask == 0, IGNORED)
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}, None


def input_grads() -> Built:
    """The decoder as adapters leave it: all but the last layer and the norms frozen, and `enable_input_require_grads`.

    The hook on the embeddings makes their output a leaf that wants gradients, so backward runs through the frozen layers too.
    """
    model, sample, loss_fn = llama()
    assert isinstance(model, transformers.LlamaForCausalLM)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "layers.2" in name)
    model.enable_input_require_grads()
    return model, sample, loss_fn


def hf_checkpointed() -> Built:
    """The same with transformers' own gradient checkpointing on: torch.utils.checkpoint around every layer."""
    model, sample, loss_fn = input_grads()
    assert isinstance(model, transformers.LlamaForCausalLM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases name it otherwise
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, sample, loss_fn


def t5() -> Built:
    """Encoder and decoder with shared embeddings: every decoder layer reads the encoder's output."""
    torch.manual_seed(0)
    batch, tokens, vocab = 16, 64, 200
    config = transformers.T5Config(
        vocab_size=vocab,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    model = transformers.T5ForConditionalGeneration(config).train()
    targets = torch.randint(1, vocab, (batch, tokens // 2))
    sample = {
        "input_ids": torch.randint(1, vocab, (batch, tokens)),
        "attention_mask": _padding_mask(batch, tokens),
        "labels": targets.masked_fill(_padding_mask(batch, tokens // 2) == 0, IGNORED),
    }
    return model, sample, None


def vit() -> Built:
    """Vision transformer on 32 x 32 images in patches of 4 x 4: 65 tokens."""
    torch.manual_seed(0)
    batch, size, classes = 16, 32, 10
    config = transformers.ViTConfig(
        image_size=size,
        patch_size=4,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=classes,
        attn_implementation="eager",
    )
    model = transformers.ViTForImageClassification(config).train()
    return model, {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(classes, (batch,))}, None
