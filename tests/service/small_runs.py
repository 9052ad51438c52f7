"""Run files that take a second or two to train, with their code and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

NET = """
import time
from torch import nn

class Net(nn.Module):
    def __init__(self, width, slow):
        super().__init__()
        self.slow = slow
        self.body = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, x, y):
        time.sleep(self.slow)
        return (self.body(x).squeeze(-1) - y).square().mean()

def build(width=64, slow=0.0):
    return Net(width, slow)
"""


def code(folder: Path) -> Path:
    """A folder with a model and its data, as somebody would send it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_text(NET, encoding="utf-8")
    random = np.random.default_rng(0)
    x = random.standard_normal((256, 8)).astype(np.float32)
    np.savez(folder / "train.npz", x=x, y=np.sin(x.sum(1)).astype(np.float32))
    return folder


def run_file(*, budget: int | str = "400KiB", steps: int = 6, slow: float = 0.0, **sections: Any) -> dict[str, Any]:
    """The content of a run file; sections are merged into it."""
    content: dict[str, dict[str, Any]] = {
        "model": {"python": "net:build", "args": {"slow": slow}},
        "data": {"train": "train.npz"},
        "fit": {"budget": budget, "global_batch": 64, "fixed": {"micro_batches": 1}, "device": "cpu"},
        "train": {"steps": steps, "log_every": 1, "save_every": 2, "meter_every": 1},
    }
    for name, section in sections.items():
        content[name] = {**content.get(name, {}), **section}
    return content
