"""Speed on the reference GPT: memfit at byte budgets against plain PyTorch and against torch.utils.checkpoint on every block."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

measuring.with_tests_models()

SHARES = (0.70, 0.50, 0.35)


def adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def build() -> tuple[Any, Any, Any]:
    from models.transformer import build_gpt

    return build_gpt(8, 256, 4, 16, 256, 1000)


class Plain:
    """A step as people write it; `every_block` wraps each block in torch's checkpoint."""

    plan = None

    def __init__(self, *, every_block: bool) -> None:
        self.model, self.sample, self.loss_fn = build()
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
        from memfit import batches
        from memfit.meter import metered
        from memfit.step.program import state_tensors

        present = [*self.model.parameters(), *self.model.buffers(), *batches.leaves(self.sample)]
        with metered([*present, *state_tensors(self.optimizer)]) as reading:
            self.step()
        return reading.peak_bytes


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


class Planned:
    """A step under a plan."""

    def __init__(self, budget: int, fixed: dict[str, int] | None) -> None:
        import memfit

        self.model, self.sample, self.loss_fn = build()
        self.plan = memfit.plan(self.model, self.sample, self.loss_fn, budget, adamw, fixed=fixed)
        self.engine = memfit.apply(self.plan, self.model)

    def step(self) -> None:
        self.engine.step(self.sample)

    def peak(self) -> int:
        return self.engine.step(self.sample, meter=True).peak_bytes or 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    return _table(rows, lambda _: True)


PAGES: Mapping[str, Callable[[str], bool]] = {
    "accumulation": lambda row: row == "plain" or row.endswith("free choice"),
    "recompute": lambda row: not row.endswith("free choice"),
    "recompute-by-hand": lambda row: (
        row in {"plain", "torch checkpoint, every block", "peak of every block, recompute only"}
    ),
}
"""Page of docs/techniques -> which arrangements belong there."""


EXCERPT_WORDS = (
    "The reference GPT: 8 layers, hidden 256, batch 16, 256 tokens, fp32. Budgets are shares of plain PyTorch's peak. *Recompute only*: the batch is whole, "
    "results are bit-equal. *Free choice*: memfit may split the batch, too. *Predicted* is the time that the plan tells. "
    "*Gap to the bound*: how much faster, at most, another plan in these bytes could be."
)


def excerpt(rows: Sequence[dict[str, Any]], page: str) -> str:
    """The arrangements that a page about a technique is about, with what the columns mean."""
    return f"{EXCERPT_WORDS}\n\n{_table(rows, PAGES[page])}" if page in PAGES else ""


def _table(rows: Sequence[dict[str, Any]], wanted: Callable[[str], bool]) -> str:
    plain = rows[0]["plain_peak_bytes"]
    return (
        f"Plain peak {plain / 2**20:.0f} MiB, {rows[0]['seconds']:.2f} s of processor time a step; {rows[0]['rounds']} rounds.\n\n"
    ) + measuring.table(
        ["arrangement", "peak / plain", "time / plain", "quartiles", "predicted", "micro-batches", "gap to the bound"],
        [
            [
                row["row"],
                f"{row['peak_bytes'] / plain:.3f}",
                f"{row['time_ratio']:.3f}",
                f"{row['quartiles'][0]:.3f} to {row['quartiles'][1]:.3f}",
                "" if row["predicted_ratio"] is None else f"{row['predicted_ratio']:.3f}",
                str(row["micro_batches"]),
                "" if row["gap"] is None else f"{100 * row['gap']:.1f} %",
            ]
            for row in rows
            if wanted(row["row"])
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    measuring.steady_allocator()
    import torch

    import memfit

    torch.set_num_threads(1)
    plain, blocks = Plain(every_block=False), Plain(every_block=True)
    for warm in (plain, blocks):
        warm.step()
    plain_peak, blocks_peak = plain.peak(), blocks.peak()
    rows: dict[str, Any] = {"plain": plain, "torch checkpoint, every block": blocks}
    # Activations alone, as other tables count: the share of what is neither parameter, gradient nor optimizer state.
    lasting = sum(4 * p.numel() * p.element_size() for p in plain.model.parameters())
    for name, fixed in (("recompute only", {"micro_batches": 1}), ("free choice", None)):
        rows[f"plan that drops nothing, {name}"] = Planned(plain_peak + (1 << 20), fixed)
        for share in SHARES:
            rows[f"budget {share:.2f}, {name}"] = Planned(int(plain_peak * share), fixed)
        if fixed is not None:
            for share in SHARES:
                budget = lasting + int((plain_peak - lasting) * share)
                rows[f"budget {share:.2f} of the activations, {name}"] = Planned(budget, fixed)
        rows[f"peak of every block, {name}"] = Planned(blocks_peak, fixed)
        smallest = memfit.smallest_budget(rows[f"peak of every block, {name}"].plan)
        rows[f"smallest budget, {name}"] = Planned(smallest, fixed)
        print(f"planned: {name}", file=sys.stderr, flush=True)
    peaks: dict[str, int] = {}
    for name, row in rows.items():
        row.step()
        peaks[name] = row.peak()
    times = measuring.in_turns(
        {name: row.step for name, row in rows.items()},
        arguments.rounds,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
    )
    found = []
    for name, row in rows.items():
        low, median, high = measuring.quartiles(a / b for a, b in zip(times[name], times["plain"], strict=True))
        made = row.plan
        found.append(
            {
                "row": name,
                "rounds": arguments.rounds,
                "seconds": measuring.quartiles(times[name])[1],
                "peak_bytes": peaks[name],
                "plain_peak_bytes": plain_peak,
                "time_ratio": median,
                "quartiles": [low, high],
                "predicted_ratio": made.prediction.slowdown if made else None,
                "predicted_peak_bytes": made.prediction.peak_bytes if made else None,
                "micro_batches": made.choices.micro_batches if made else 1,
                "gap": made.gap if made else None,
            }
        )
    measuring.keep("reference_gpt", measuring.machine(), found)
    print(table(found))


if __name__ == "__main__":
    main()
