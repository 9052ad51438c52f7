"""Same numbers and true predictions, as a table: every model at budgets from plain to the smallest.

For each model: budgets tried, whether loss, gradients and buffers were bit-equal to plain PyTorch at all of them, the largest difference between
predicted and measured peak, whether any measured peak was above its budget, and the largest gap to the lower bound.

    .venv/bin/python bench/exactness.py
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch

import memfit
from memfit import batches
from models import CASES, Case

FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the way from the smallest plan to plain


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def numbers(model: torch.nn.Module, sample: Any, loss_fn: Any, engine: Any) -> list[torch.Tensor | None]:
    """Loss, gradients and buffers of one forward and backward; the model is left as it was."""
    before = [b.clone() for b in model.buffers()]
    torch.manual_seed(7)
    if engine is None:
        loss = batches.loss_of(model, sample, loss_fn)
    else:
        with engine.forward():
            loss = batches.loss_of(model, sample, loss_fn)
    loss.backward()
    found = [loss.detach().clone(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
    found += [b.clone() for b in model.buffers()]
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    return found


def row_of(case: Case) -> dict[str, Any]:
    model, sample, loss_fn = case.build()
    plain = memfit.plan(model, sample, loss_fn, 1 << 50, adamw, fixed={"micro_batches": 1})
    search = plain.runtime.search
    largest, smallest = search.plain_peak(), search.smallest()[0]
    numbers(model, sample, loss_fn, None)
    reference = numbers(model, sample, loss_fn, None)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    equal, errors, above, gaps = True, [], 0, []
    for fraction in FRACTIONS:
        made = search.plan(round(smallest + (largest - smallest) * fraction))
        found = numbers(model, sample, loss_fn, memfit.apply(made, model, loss_fn, None))
        equal &= all(
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(reference, found, strict=True)
        )
        model.load_state_dict(state)
        engine = memfit.apply(made, model, loss_fn, adamw)
        for meter in (False, True):
            model.load_state_dict(state)
            torch.manual_seed(7)
            record = engine.step(sample, meter=meter)
        assert record.peak_bytes is not None
        errors.append(made.prediction.peak_bytes / record.peak_bytes - 1)
        above += record.peak_bytes > made.budget_bytes
        gaps.append(made.gap)
        model.load_state_dict(state)
    return {
        "bench": "exactness",
        "model": case.name,
        "plain_peak_bytes": largest,
        "smallest_bytes": smallest,
        "budgets": len(FRACTIONS),
        "bit_equal": equal,
        "worst_prediction_error": max(errors, key=abs),
        "above_budget": above,
        "worst_gap": max(gaps),
        "median_gap": sorted(gaps)[len(gaps) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench/exactness.jsonl"))
    parser.add_argument("--slow", action="store_true", help="the slow models too (the 1000-block chain)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{platform.machine()}, 1 thread, torch {torch.__version__}, Python {platform.python_version()}")
    print(
        "| model | smallest / plain | bit-equal at all budgets | worst prediction | above budget | gap, median and worst |"
    )
    print("|---|---|---|---|---|---|")
    with arguments.out.open("w") as out:
        for case in CASES:
            if case.slow and not arguments.slow:
                continue
            row = row_of(case)
            out.write(json.dumps(row) + "\n")
            print(
                f"| {case.name} | {row['smallest_bytes'] / row['plain_peak_bytes']:.3f} | {'yes' if row['bit_equal'] else 'NO'} "
                f"| {100 * row['worst_prediction_error']:+.4f} % | {row['above_budget']} of {row['budgets']} "
                f"| {100 * row['median_gap']:.1f} %, {100 * row['worst_gap']:.1f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
