"""fitcheck-llm: formulas for fine-tuning decoders, from the model's configuration. Its constant for the CUDA context is left out, as there is none here."""

from __future__ import annotations

from predict.estimators import NotEstimated
from rivals.subjects import Subject

NAME = "fitcheck-llm"
PACKAGE, INSTALL = "fitcheck", "fitcheck-llm==0.3.1"
NOTE = "Dense decoders with a gated MLP only; full fine-tuning, fp32, flash attention; without its overhead for CUDA."
COVERS = "weights, gradients, optimizer, activations by formula"

_NAMES = {"SGD": "sgd", "SGD, momentum": "sgd-momentum", "AdamW, foreach": "adamw", "AdamW, fused": "adamw"}


def estimate(subject: Subject, optimizer: str) -> int:
    from fitcheck.config_parser import ModelConfig
    from fitcheck.estimator import TrainingConfig
    from fitcheck.estimator import estimate as report_for
    from fitcheck.gpu_db import GPU_DB

    if optimizer not in _NAMES:
        raise NotEstimated("no such optimizer")
    model, sample, _ = subject.build()
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "llama":
        raise NotEstimated("dense decoders with a gated MLP only")
    known = ModelConfig(
        name=subject.name,
        num_params=sum(p.numel() for p in model.parameters()),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        head_dim=config.hidden_size // config.num_attention_heads,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    batch, tokens = sample["input_ids"].shape
    training = TrainingConfig(
        precision="fp32",
        optimizer=_NAMES[optimizer],
        batch_size=batch,
        seq_len=tokens,
        lora_rank=None,
        flash_attn=config._attn_implementation == "sdpa",
    )
    report = report_for(known, training, next(iter(GPU_DB.values())))
    return int((report.total_mib - report.overhead_mib) * 2**20)
