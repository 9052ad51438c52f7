"""Small searches that tests share: a command that is a formula, and a run of memfit on a few numbers."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from memfit.tune import Search, read_search

TOY = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, x, y):
        return (self.body(x).squeeze(-1) - y).square().mean()

def build(width=64):
    return Net(width)
"""

QUADRATIC = "import sys; x, y = map(float, sys.argv[1:]); print(f'value={(x - 1) ** 2 + (y + 2) ** 2!r}')"


def command(folder: Path, code: str = QUADRATIC, space: dict[str, Any] | None = None, **search: Any) -> Search:
    """A search whose trials are Python, without site packages, which takes a fiftieth of a second."""
    space = space or {"x": {"low": -5.0, "high": 5.0}, "y": {"low": -5.0, "high": 5.0}}
    words = [sys.executable, "-S", "-c", code, *(f"{{{name}}}" for name in space)]
    told = {"objective": "value", "trials": 5, "out": "out", **search}
    return read_search({"search": {"command": words, "space": space, **told}}, folder)


def study_in(store: str) -> optuna.Study:
    """The study of a search, whose connections are closed with it: Optuna leaves them open."""
    storage = optuna.storages.RDBStorage(store)
    weakref.finalize(storage, storage.engine.dispose)
    return optuna.load_study(study_name="search", storage=storage)


def toy(folder: Path, space: dict[str, Any], fit: dict[str, Any] | None = None, **search: Any) -> Search:
    """A search over runs of a small model."""
    return read_search(toy_file(folder, space, fit, **search), folder)


def toy_file(folder: Path, space: dict[str, Any], fit: dict[str, Any] | None = None, **search: Any) -> dict[str, Any]:
    """What such a search's file holds; model and data are written beside it."""
    (folder / "toy.py").write_text(TOY, encoding="utf-8")
    random = np.random.default_rng(0)
    for name, samples in (("train", 256), ("validation", 64)):
        x = random.standard_normal((samples, 8)).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=np.sin(x.sum(1)).astype(np.float32))
    return {
        "model": {"python": "toy:build"},
        "data": {"train": "train.npz", "validation": "validation.npz"},
        "fit": {"budget": "400KiB", "global_batch": 64, "fixed": {"micro_batches": 1}, **(fit or {})},
        "train": {"steps": 6, "eval_every": 2, "log_every": 1, "save_every": 2},
        "search": {
            "space": space,
            "objective": "validation_loss",
            "sampler": "random",
            "trials": 3,
            "out": "out",
            **search,
        },
    }
