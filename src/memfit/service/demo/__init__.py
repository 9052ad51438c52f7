"""What `memfit serve --demo` offers: a small run that takes less than a minute, and the data that it makes for itself."""

from __future__ import annotations

from typing import Any, Final

MODULE: Final = "memfit.service.demo.sorting"

RUN: Final[dict[str, Any]] = {
    "model": {"python": f"{MODULE}:build"},
    "data": {"python": f"{MODULE}:numbers"},
    "fit": {"budget": "8MiB", "global_batch": 64, "device": "cpu", "fixed": {"micro_batches": 1}},
    "optim": {"lr": 0.002},
    "train": {"steps": 150, "log_every": 1, "save_every": 50, "meter_every": 10},
}
"""A transformer that learns to sort digits; plain PyTorch would take more than its budget."""
