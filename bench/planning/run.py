"""How long planning takes: BERT-large, a 1000-block residual chain, and another budget from a saved trace."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memfit.planning import planning_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

measuring.with_tests_models()


def bert_large() -> tuple[Any, Any, Any]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    sample = {
        "input_ids": torch.randint(0, config.vocab_size, (32, 128)),
        "attention_mask": torch.ones(32, 128, dtype=torch.long),
        "labels": torch.zeros(32, dtype=torch.long),
    }
    return BertForSequenceClassification(config), sample, None


def row_of(name: str, built: tuple[Any, Any, Any], choice: str, fixed: dict[str, int] | None) -> dict[str, Any]:
    """Wall time of one plan from nothing, of another budget in the same process, and of one from the trace on disk."""
    import memfit

    os.environ["MEMFIT_CACHE_DIR"] = tempfile.mkdtemp(prefix="memfit-bench-")  # operations are measured afresh
    model, sample, loss_fn = built
    begin = time.perf_counter()
    plain = memfit.plan(model, sample, loss_fn, 1 << 50, fixed=fixed)
    captured = time.perf_counter() - begin
    budget = plain.prediction.plain_peak_bytes * 6 // 10
    made = memfit.replan(plain, budget)
    whole = time.perf_counter() - begin
    trace = planning_of(plain).solver(1).trace
    path = Path(os.environ["MEMFIT_CACHE_DIR"]) / "trace.gz"
    trace.save(path)
    again = []
    for share in (6, 4, 8):
        begin = time.perf_counter()
        memfit.replan(memfit.Trace.load(path), plain.prediction.plain_peak_bytes * share // 10)
        again.append(time.perf_counter() - begin)
    return {
        "model": name,
        "choice": choice,
        "operations": len(trace.operations),
        "capture_seconds": captured,
        "whole_seconds": whole,
        "trace_bytes": path.stat().st_size,
        "again_seconds": again,
        "micro_batches": made.choices.micro_batches,
        "slowdown": made.prediction.slowdown,
        "gap": made.gap,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    return measuring.table(
        [
            "model",
            "choice",
            "operations",
            "captured and measured",
            "captured and planned at 0.6 of plain",
            "another budget, the trace read from disk (0.6, 0.4, 0.8)",
            "predicted time / plain",
            "gap to the bound",
        ],
        [
            [
                row["model"],
                row["choice"],
                f"{row['operations']:,}",
                f"{row['capture_seconds']:.1f} s",
                f"{row['whole_seconds']:.1f} s",
                ", ".join(f"{s:.2f} s" for s in row["again_seconds"]),
                f"{row['slowdown']:.3f}",
                f"{100 * row['gap']:.1f} %",
            ]
            for row in rows
        ],
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    from models import case

    rows = []
    for name, build in {
        "BERT-large, batch 32, 128 tokens": bert_large,
        "1000-block chain": case("residual_chain_1000").build,
    }.items():
        built = build()
        for choice, fixed in (("recompute only", {"micro_batches": 1}), ("free choice", None)):
            rows.append(row_of(name, built, choice, fixed))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    measuring.keep("planning", measuring.machine(), rows)


if __name__ == "__main__":
    main()
