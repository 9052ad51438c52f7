"""How long planning takes: BERT-large, a 1000-block residual chain, and another budget from what was captured.

Operation costs are measured afresh (the cache of costs is pointed at an empty folder).

    .venv/bin/python bench/planning.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["MEMFIT_CACHE_DIR"] = tempfile.mkdtemp(prefix="memfit-bench-")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch

import memfit
from memfit.api import replan
from memfit.planner.prices import Solver
from memfit.planner.timeline import Timeline
from models import case


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def bert_large() -> tuple[Any, Any, Any]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    sample = {
        "input_ids": torch.randint(0, config.vocab_size, (32, 128)),
        "attention_mask": torch.ones(32, 128, dtype=torch.long),
        "labels": torch.zeros(32, dtype=torch.long),
    }
    return BertForSequenceClassification(config), sample, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench/planning.jsonl"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    builders = {"BERT-large, batch 32, 128 tokens": bert_large, "1000-block chain": case("residual_chain_1000").build}
    for name, build in builders.items():
        model, sample, loss_fn = build()
        for choice, fixed in (("recompute only", {"micro_batches": 1}), ("free choice", None)):
            begin, cpu = time.perf_counter(), time.process_time()
            plain = memfit.plan(model, sample, loss_fn, 1 << 50, adamw, fixed=fixed)
            captured = time.perf_counter() - begin
            budget = plain.prediction.plain_peak_bytes * 6 // 10
            made = replan(plain, budget)
            whole, whole_cpu = time.perf_counter() - begin, time.process_time() - cpu
            begin = time.perf_counter()
            other = replan(plain, plain.prediction.plain_peak_bytes * 7 // 10)
            again = time.perf_counter() - begin
            trace = plain.runtime.search.solver(1).trace
            begin = time.perf_counter()
            Solver(Timeline(trace)).solve(budget)
            from_trace = time.perf_counter() - begin
            row = {
                "bench": "planning",
                "model": name,
                "choice": choice,
                "operations": len(trace.operations),
                "capture_seconds": captured,
                "capture_and_plan_seconds": whole,
                "cpu_seconds": whole_cpu,
                "other_budget_seconds": again,
                "solve_from_trace_seconds": from_trace,
                "slowdown": made.prediction.slowdown,
                "gap": made.gap,
                "other_gap": other.gap,
            }
            rows.append(row)
            print(
                f"{name}, {choice}: {row['operations']} operations, captured in {captured:.1f} s, captured and planned in {whole:.1f} s "
                f"(processor {whole_cpu:.1f} s), another budget in {again:.2f} s, from the trace alone {from_trace:.2f} s; "
                f"predicted {made.prediction.slowdown:.3f} x plain, gap {100 * made.gap:.1f} %",
                flush=True,
            )
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    arguments.out.write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main()
