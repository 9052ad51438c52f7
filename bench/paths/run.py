"""Programs whose forward takes another path from step to step: every step inside the budget, with the numbers of plain PyTorch?

python bench/paths/run.py [--steps 100] [--only NAME]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

measuring.with_tests_models()

SHARE = 0.6  # of the plain peak
Build = Callable[[], tuple[Any, Any, Any]]
"""A model, a batch, and the loss (None for the model's own)."""


def whisper() -> tuple[Any, Any, None]:
    """Whisper in its default training mode: layer dropout in encoder and decoder, SpecAugment drawn in forward."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=200,
        num_mel_bins=16,
        encoder_layers=4,
        decoder_layers=4,
        d_model=64,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=50,
        max_target_positions=40,
        encoder_layerdrop=0.2,
        decoder_layerdrop=0.2,
        dropout=0.1,
        apply_spec_augment=True,
        mask_time_length=4,
        mask_time_prob=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    batch = {"input_features": torch.randn(8, 16, 100), "labels": torch.randint(3, 200, (8, 20))}
    return WhisperForConditionalGeneration(config).train(), batch, None


def wav2vec2() -> tuple[Any, Any, None]:
    """wav2vec 2.0 in its default training mode: layer dropout, and masked stretches of time."""
    import torch
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=128,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.2,
        mask_time_length=2,
    )
    batch = {"input_values": torch.randn(4, 2000), "labels": torch.randint(1, 32, (4, 8))}
    return Wav2Vec2ForCTC(config).train(), batch, None


def bart() -> tuple[Any, Any, None]:
    """BART with layer dropout in encoder and decoder."""
    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=200,
        d_model=64,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=64,
        encoder_layerdrop=0.3,
        decoder_layerdrop=0.3,
        use_cache=False,
    )
    batch = {"input_ids": torch.randint(3, 200, (8, 30)), "labels": torch.randint(3, 200, (8, 20))}
    return BartForConditionalGeneration(config).train(), batch, None


def opt() -> tuple[Any, Any, None]:
    """OPT with layer dropout."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=4,
        ffn_dim=128,
        num_attention_heads=2,
        max_position_embeddings=64,
        word_embed_proj_dim=64,
        layerdrop=0.3,
        use_cache=False,
    )
    tokens = torch.randint(3, 200, (8, 30))
    return OPTForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}, None


def bert_padded() -> tuple[Any, Any, None]:
    """BERT, of whose micro-batches half have padding: forward makes a mask or none."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
    )
    return BertForSequenceClassification(config).train(), _padded(torch.randint(0, 2, (32,))), None


def gpt2_padded() -> tuple[Any, Any, None]:
    """GPT-2, likewise."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=200, n_embd=64, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2, use_cache=False
    )
    return GPT2LMHeadModel(config).train(), _padded(None), None


def _padded(labels: Any) -> dict[str, Any]:
    import torch

    tokens, mask = torch.randint(3, 200, (32, 64)), torch.ones(32, 64, dtype=torch.long)
    mask[:16, 48:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone() if labels is None else labels}


PARTS = {"BERT, half padded": 4, "GPT-2, half padded": 4}
"""Programs that are run in micro-batches, compared with the same ones under a plan that keeps everything; all others are whole, and beside plain PyTorch."""


def programs() -> dict[str, Build]:
    """Those of the tests, and models of Hugging Face's transformers."""
    from models import paths

    def small(cls: Any) -> Build:
        return lambda: (cls(), paths.sample(), paths.loss_of)

    own = {name: small(cls) for name, cls in paths.PROGRAMS.items()}
    padded = dict(zip(PARTS, (bert_padded, gpt2_padded), strict=True))
    return {**own, "Whisper": whisper, "wav2vec 2.0": wav2vec2, "BART": bart, "OPT": opt, **padded}


def row_of(name: str, build: Build, share: float | None, steps: int) -> dict[str, Any]:
    """One program under one budget: a share of the plain peak, or the smallest for None."""
    import torch

    import memfit
    from memfit import batches
    from memfit.api import default_optimizer
    from memfit.planning import planning_of
    from models.paths import seeded

    def made() -> tuple[Any, Any, Any]:
        seeded(0)
        return build()

    model, batch, loss_fn = made()
    fixed = {
        "micro_batches": PARTS.get(name, 1),
        "loss_chunks": 1,
    }  # chunks of the loss head are added up in another order
    plain = memfit.plan(model, batch, loss_fn, 1 << 50, default_optimizer, fixed=fixed)
    smallest = memfit.smallest_budget(plain)
    budget = smallest if share is None else max(smallest, int(share * plain.prediction.plain_peak_bytes))
    plan = memfit.replan(plain, budget)
    planning = planning_of(plain)
    assert planning is not None
    solver = planning.solver(PARTS.get(name, 1))
    engine = memfit.apply(plan, model, loss_fn, default_optimizer)
    reference = made()[0]
    if name in PARTS:
        keeping = memfit.apply(plain, reference, loss_fn, default_optimizer)
    optimizer = default_optimizer(reference.parameters())
    peaks, different, diverged = [], 0, 0
    for step in range(steps):
        seeded(1000 + step)
        record = engine.step(batch, meter=True)
        seeded(1000 + step)
        if name in PARTS:
            expected = keeping.step(batch).loss
        else:
            loss = batches.loss_of(reference, batch, loss_fn)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected = loss.item()
        peaks.append(record.peak_bytes or 0)
        different += record.loss != expected
        diverged += bool(record.divergences)
    equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    return {
        "program": name,
        "budget_bytes": budget,
        "plain_peak_bytes": plain.prediction.plain_peak_bytes,
        "paths": 1 + len(solver.trace.paths) + len(solver.branches),
        "predicted_bytes": plan.prediction.peak_bytes,
        "largest_bytes": max(peaks),
        "peaks": len(set(peaks)),
        "steps": steps,
        "above_budget": sum(peak > budget for peak in peaks),
        "diverged": diverged,
        "equal": equal and not different,
        "slowdown": plan.prediction.slowdown,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    return measuring.table(
        [
            "program",
            "budget / plain",
            "paths seen in planning",
            "steps",
            "different peaks",
            "largest peak / predicted",
            "steps above budget",
            "diverged",
            "bit-equal",
            "predicted time / plain",
        ],
        [
            [
                row["program"],
                f"{row['budget_bytes'] / row['plain_peak_bytes']:.2f}",
                f"{row['paths']}",
                f"{row['steps']}",
                f"{row['peaks']}",
                f"{row['largest_bytes'] / row['predicted_bytes']:.4f}",
                f"{row['above_budget']}",
                f"{row['diverged']}",
                "yes" if row["equal"] else "no",
                f"{row['slowdown']:.2f}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="at each of the two budgets")
    parser.add_argument("--only", help="one program; nothing is kept")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name, build in programs().items():
        if arguments.only in (None, name):
            for share in (SHARE, None):
                rows.append(row_of(name, build, share, arguments.steps))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    if arguments.only is None:
        measuring.keep("paths", measuring.machine(), rows)


if __name__ == "__main__":
    main()
