"""How planning time grows with the number of operations: ever deeper residual networks, up to 100,000 operations in a step."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
import torch
from torch import nn

import memfit

BLOCKS = (60, 200, 600, 2000, 6200)
WIDTH = 32
SHARE = 0.5  # of what plain takes beyond the smallest plan


class Block(nn.Module):
    """What transformers are made of, attention left out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


def row_of(blocks: int) -> dict[str, Any]:
    """Processor seconds of each part of planning for so many blocks."""
    os.environ["MEMFIT_CACHE_DIR"] = tempfile.mkdtemp(prefix="memfit-bench-")  # operations are measured afresh
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Block() for _ in range(blocks))), torch.rand(64, WIDTH)
    marks = [time.process_time()]
    bundle = memfit.record(model, batch, loss_of, micro_batches=1)
    trace = bundle.trace
    marks.append(time.process_time())
    low = memfit.replan(bundle, 1 << 50).prediction.plain_peak_bytes
    marks.append(time.process_time())
    made = memfit.replan(bundle, round(low * (1 - SHARE) + trace.bytes_before_step * SHARE))
    marks.append(time.process_time())
    captured, plain, planned = (b - a for a, b in itertools.pairwise(marks))
    return {
        "blocks": blocks,
        "operations": len(trace.operations),
        "capture_seconds": captured,
        "timeline_seconds": plain,
        "plan_seconds": planned,
        "slowdown": made.prediction.slowdown,
        "gap": made.gap,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown; growth is the exponent from the row before: 1 is in proportion."""

    def grown(number: int, what: str) -> str:
        row, before = rows[number], rows[max(0, number - 1)]
        seconds = f"{row[what]:.2f} s"
        if number == 0:
            return seconds
        exponent = math.log(row[what] / before[what]) / math.log(row["operations"] / before["operations"])
        return f"{seconds} ({exponent:.2f})"

    heads = [
        "operations in a step",
        "captured and measured",
        "timeline and plain plan",
        "plan half way down",
        "predicted time / plain",
        "gap to the bound",
    ]
    return measuring.table(
        heads,
        [
            [
                f"{row['operations']:,}",
                *(grown(i, what) for what in ("capture_seconds", "timeline_seconds", "plan_seconds")),
                f"{row['slowdown']:.3f}",
                f"{100 * row['gap']:.1f} %",
            ]
            for i, row in enumerate(rows)
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=BLOCKS[-1], help="blocks of the largest network")
    arguments = parser.parse_args()
    rows = []
    for blocks in BLOCKS:
        if blocks <= arguments.most:
            rows.append(row_of(blocks))
            print(table(rows).splitlines()[-1], flush=True)
    if arguments.most == BLOCKS[-1]:
        measuring.keep("growth", measuring.machine(), rows)


if __name__ == "__main__":
    main()
