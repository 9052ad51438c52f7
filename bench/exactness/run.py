"""Same numbers and true predictions: every model of the tests at budgets from plain to the smallest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

measuring.with_tests_models()


def row_of(case: Any) -> dict[str, Any]:
    """One model: differences from plain PyTorch, prediction errors and gaps over its budgets."""
    from memfit.api import default_optimizer
    from models.outcome import measured_peak, outcome_of, plans_between

    model, sample, loss_fn = case.build()
    outcome_of(model, sample, loss_fn)  # what a model builds once is built here
    reference = outcome_of(model, sample, loss_fn)
    import memfit

    plans = plans_between(model, sample, loss_fn, default_optimizer)
    differences, errors, above = [], [], 0
    for made in plans:
        found = outcome_of(model, sample, loss_fn, memfit.apply(made, model, loss_fn, None))
        difference = found.differs(reference) or found.divergence
        if difference:
            differences.append(difference)
        peak = measured_peak(made, model, sample, loss_fn, default_optimizer)
        errors.append(made.prediction.peak_bytes / peak - 1)
        above += peak > made.budget_bytes
    gaps = sorted(made.gap for made in plans)
    return {
        "model": case.name,
        "forward_operations": len(plans[-1].script.operations),
        "plain_peak_bytes": plans[0].prediction.plain_peak_bytes,
        "smallest_bytes": plans[-1].prediction.peak_bytes,
        "smallest_slowdown": plans[-1].prediction.slowdown,
        "budgets": len(plans),
        "differences": differences,
        "worst_prediction_error": max(errors, key=abs),
        "above_budget": above,
        "median_gap": gaps[len(gaps) // 2],
        "worst_gap": gaps[-1],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    return measuring.table(
        [
            "model",
            "forward operations",
            "plain peak, MiB",
            "smallest / plain",
            "bit-equal",
            "worst prediction error",
            "above budget",
            "gap to the bound: median, worst",
        ],
        [
            [
                row["model"],
                f"{row['forward_operations']:,}",
                f"{row['plain_peak_bytes'] / 2**20:.1f}",
                f"{row['smallest_bytes'] / row['plain_peak_bytes']:.2f}",
                f"{row['budgets'] - len(row['differences'])} of {row['budgets']}",
                f"{100 * row['worst_prediction_error']:+.4f} %",
                f"{row['above_budget']}",
                f"{100 * row['median_gap']:.1f} %, {100 * row['worst_gap']:.1f} %",
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without the slow models (the 1000-block chain)")
    arguments = parser.parse_args()
    import torch

    from models import CASES

    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        if case.slow and arguments.quick:
            continue
        rows.append(row_of(case))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    measuring.keep("exactness", measuring.machine(), rows)


if __name__ == "__main__":
    main()
