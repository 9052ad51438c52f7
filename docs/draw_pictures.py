"""The picture of a report at the top of the README: a small language model trained in 60 % of what plain PyTorch needs, planned and rehearsed on this computer.

python docs/draw_pictures.py
"""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import torch

import memfit
from memfit.api import frontier_points
from memfit.views.svg import svg_file
from memfit.views.write import picture

ROOT = Path(__file__).resolve().parent.parent
SHARE = 0.6
WHOLE = {"micro_batches": 1, "loss_chunks": 1}


def main() -> None:
    """Plan, rehearse, draw."""
    torch.manual_seed(0)
    build = runpy.run_path(str(ROOT / "examples" / "cli" / "byte_gpt.py"))["build"]
    model = build(width=128, depth=4, heads=4, max_length=128)
    tokens = torch.randint(256, (16, 128))
    sample = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    plans = memfit.frontier(model, sample, points=8, fixed=WHOLE)
    budget = round(SHARE * plans[0].prediction.plain_peak_bytes)
    engine = memfit.fit(model, sample, None, budget, fixed=WHOLE)
    report = engine.report("A small GPT in 60 % of the bytes that plain PyTorch needs")
    drawn = picture(replace(report, frontier=frontier_points(plans)))
    (ROOT / "docs" / "pictures" / "report.svg").write_text(svg_file(drawn, also_dark=True), encoding="utf-8")


if __name__ == "__main__":
    main()
