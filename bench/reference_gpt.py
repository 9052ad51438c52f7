"""Speed on the reference GPT: memfit at byte budgets against plain PyTorch and against torch.utils.checkpoint on every block.

8 pre-norm layers, hidden 256, 4 heads, explicit softmax attention, batch 16, 256 tokens, vocabulary 1000, fp32, no dropout, one thread. Each round runs every
arrangement once, in turn; a figure is the median over rounds of processor time against plain in the same round. Peaks are metered.

    .venv/bin/python bench/reference_gpt.py --rounds 15
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import batches
from memfit.meter import metered
from models.transformer import build_gpt


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Plain:
    """A step as people write it; `every_block` wraps each block in torch's checkpoint."""

    def __init__(self, *, every_block: bool) -> None:
        self.model, self.sample, self.loss_fn = build_gpt(8, 256, 4, 16, 256, 1000)
        self.optimizer = adamw(self.model.parameters())
        if every_block:
            for block in self.model.blocks:
                block.forward = _checkpointed(block.forward)

    def step(self) -> None:
        loss = self.loss_fn(self.model, self.sample)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def peak(self) -> int:
        present = [*self.model.parameters(), *self.model.buffers(), *batches.leaves(self.sample)]
        present += [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        with metered(present) as reading:
            self.step()
        return reading.peak_bytes


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


class Planned:
    """A step under a plan."""

    def __init__(self, budget: int, fixed: dict[str, int] | None) -> None:
        self.model, self.sample, self.loss_fn = build_gpt(8, 256, 4, 16, 256, 1000)
        self.plan = memfit.plan(self.model, self.sample, self.loss_fn, budget, adamw, fixed=fixed)
        self.engine = memfit.apply(self.plan, self.model)

    def step(self) -> None:
        self.engine.step(self.sample)

    def peak(self) -> int:
        return self.engine.step(self.sample, meter=True).peak_bytes or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("out/bench/reference_gpt.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plain, blocks = Plain(every_block=False), Plain(every_block=True)
    for warm in (plain, blocks):
        warm.step()
    plain_peak, blocks_peak = plain.peak(), blocks.peak()
    rows: dict[str, Any] = {"plain": plain, "torch checkpoint, every block": blocks}
    for name, fixed in (("recompute only", {"micro_batches": 1}), ("free choice", None)):
        rows[f"plan that drops nothing, {name}"] = Planned(plain_peak + (1 << 20), fixed)
        for share in (0.70, 0.50, 0.35):
            rows[f"budget {share:.2f}, {name}"] = Planned(int(plain_peak * share), fixed)
        rows[f"peak of every block, {name}"] = Planned(blocks_peak, fixed)
        smallest = rows[f"peak of every block, {name}"].plan.runtime.search.smallest()[0]
        rows[f"smallest budget, {name}"] = Planned(smallest, fixed)
    times: dict[str, list[float]] = {name: [] for name in rows}
    peaks: dict[str, int] = {}
    for name, row in rows.items():
        row.step()
        peaks[name] = row.peak()
    for _ in range(arguments.rounds):
        for name, row in rows.items():
            begin = time.process_time()
            row.step()
            times[name].append(time.process_time() - begin)
    machine = f"{platform.processor() or platform.machine()}, 1 thread, torch {torch.__version__}, Python {platform.python_version()}"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    print(
        f"{machine}; plain {plain_peak / 2**20:.0f} MiB, {statistics.median(times['plain']):.2f} s; medians of {arguments.rounds} rounds"
    )
    print("| arrangement | peak / plain | time / plain | predicted | quartiles | micro-batches | gap to the bound |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        ratios = sorted(a / b for a, b in zip(times[name], times["plain"], strict=True))
        median = statistics.median(ratios)
        low, high = ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]
        made = getattr(row, "plan", None)
        predicted = f"{made.prediction.slowdown:.3f}" if made else ""
        parts = made.choices.micro_batches if made else 1
        gap = f"{100 * made.gap:.1f} %" if made else ""
        print(
            f"| {name} | {peaks[name] / plain_peak:.3f} | {median:.3f} | {predicted} | {low:.3f} to {high:.3f} | {parts} | {gap} |"
        )
        lines.append(
            {
                "bench": "reference_gpt",
                "machine": machine,
                "row": name,
                "peak_bytes": peaks[name],
                "plain_peak_bytes": plain_peak,
                "time_ratio": median,
                "quartiles": [low, high],
                "predicted_ratio": made.prediction.slowdown if made else None,
                "predicted_peak_bytes": made.prediction.peak_bytes if made else None,
                "micro_batches": parts,
                "gap": made.gap if made else None,
            }
        )
    arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
