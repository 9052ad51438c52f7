"""Activations on the disk below a CPU: memfit's swapping beside hooks that save to files, and beside recomputing in the same bytes.

python bench/offloading/run.py [--models gpt,resnet50] [--missing] [--quick] [--rounds 5]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
from rivals import asking

QUESTION: Final = "offloading"
MODELS: Final = "gpt,bert_base,resnet50,unet"
SHARES: Final = (0.75, 0.5, 0.25)  # of the way from the smallest plan to plain: budgets beside the rival's own peak
HOST_BUDGET: Final = "4GiB"
NOT_HERE: Final = (
    (
        "save_on_cpu",
        "copies a CPU's tensors nowhere: plain with hooks; `bench/gpu` asks it with pinned memory",
    ),
    (
        "Hugging Face's offloaded recompute (`activation_checkpointing_enable(offload=True)`)",
        "what it keeps lies on the host already, so it is its recompute, which bench/frontier has; `bench/gpu` asks it",
    ),
    ("TRL OffloadActivations", "moves activations off an accelerator; `bench/gpu` asks it where it is installed"),
    ("torchtune OffloadActivations", "moves activations off an accelerator; `bench/gpu` asks it where it is installed"),
)

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ask(name: str, *, quick: bool, rounds: int) -> list[Row]:
    """All rows of one model."""
    import torch
    from rivals.arrangement import Rival, adamw, difference, first_gradients, peak_of
    from rivals.subjects import subjects
    from rivals.techniques import save_on_disk

    import memfit

    (subject,) = subjects(name)
    plain = Rival(subject)
    reference, _ = first_gradients(plain)
    hooks = Rival(subject, save_on_disk.settings(subject)[0][1])
    found, _ = first_gradients(hooks)
    rows: list[Row] = [
        {"row": "plain", "peak_bytes": peak_of(plain)},
        {"row": save_on_disk.NAME, "peak_bytes": peak_of(hooks), "difference": difference(found, reference)},
    ]
    steps: dict[str, Any] = {"plain": plain.step, save_on_disk.NAME: hooks.step}
    model, sample, loss_fn = subject.build()
    fixed = {"micro_batches": 1, "state_place": "device"}  # activations alone are the question
    bases = {
        "recompute and swap": memfit.plan(model, sample, loss_fn, 1 << 50, adamw, fixed=fixed, host_budget=HOST_BUDGET),
        "recompute only": memfit.plan(model, sample, loss_fn, 1 << 50, adamw, fixed=fixed),
    }
    high = rows[0]["peak_bytes"]
    low = max(memfit.smallest_budget(base) for base in bases.values())
    budgets = {f"peak of {save_on_disk.NAME}": rows[1]["peak_bytes"]}
    budgets |= {f"{share:.2f}": round(low + share * (high - low)) for share in (SHARES[:1] if quick else SHARES)}
    for what, budget in budgets.items():
        for way, base in bases.items():
            try:
                made = memfit.replan(base, budget)
            except memfit.InfeasibleError as error:
                rows.append({"row": f"memfit, {way}: {what}", "smallest_bytes": error.minimum_bytes})
                continue
            torch.manual_seed(0)
            model, sample, loss_fn = subject.build()
            engine = memfit.apply(made, model)
            gradients, _ = first_gradients(_Planned(engine, sample))
            rows.append(
                {
                    "row": f"memfit, {way}: {what}",
                    "peak_bytes": engine.step(sample, meter=True).peak_bytes,
                    "predicted_bytes": made.prediction.peak_bytes,
                    "predicted_ratio": made.prediction.slowdown,
                    "swapped_bytes": sum(swap.bytes for swap in made.script.swaps.values()),
                    "recomputations": made.script.recomputations,
                    "copy_seconds": made.prediction.copy_seconds,
                    "exposed_seconds": made.prediction.exposed_seconds,
                    "difference": difference(gradients, reference),
                }
            )
            steps[rows[-1]["row"]] = _Planned(engine, sample).step
    times = measuring.in_turns(steps, rounds, tell=say, clock=time.perf_counter)
    for row in rows:
        row["times"] = times.get(row["row"])
    return [{"model": subject.name, "words": subject.words, **row} for row in rows]


class _Planned:
    """An engine and its batch, as an arrangement."""

    def __init__(self, engine: Any, sample: Any) -> None:
        self.engine, self.sample = engine, sample
        self.optimizer = engine.optimizer

    def step(self) -> None:
        self.engine.step(self.sample)

    def present(self) -> list[Any]:
        return []


# -- the page ----------------------------------------------------------------------------------------------------------------


HEADS = (
    "arrangement",
    "peak, MiB",
    "predicted, MiB",
    "time / plain",
    "quartiles",
    "predicted time",
    "swapped, MiB",
    "hidden, by the plan",
    "gradients",
)


def table(rows: Rows) -> str:
    """As Markdown."""
    parts = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        plain = own[0]
        parts += [
            f"### {name}",
            f"{own[0]['words']}. Plain: {measuring.quartiles(plain['times'])[1]:.2f} s on the clock.",
            measuring.table(HEADS, [_cells(row, plain) for row in own]),
        ]
    return "\n\n".join([*parts, "### Not run", measuring.table(["rival", "reason"], [list(each) for each in NOT_HERE])])


def excerpt(rows: Rows, page: str) -> str:
    """For the page about activation offloading: every model at the hooks' own peak and at half of what can be given up."""
    if page != "activation-offloading":
        return ""
    cells = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        told = [row for row in own if row is own[0] or "hooks" in row["row"] or row["row"].endswith(": 0.50")]
        cells += [[name, *_cells(row, own[0])] for row in told]
    return measuring.table(["model", *HEADS], cells)


def _cells(row: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    name = row["row"].replace("memfit", "**memfit**")
    if row.get("smallest_bytes"):
        return [name, f"does not fit; the smallest is {row['smallest_bytes'] / 2**20:.1f}", *[""] * 7]
    ratios = [a / b for a, b in zip(row["times"], plain["times"], strict=True)]
    first, middle, third = measuring.quartiles(ratios)
    apart = row.get("difference")
    return [
        name,
        f"{row['peak_bytes'] / 2**20:.1f}",
        f"{row['predicted_bytes'] / 2**20:.1f}" if "predicted_bytes" in row else "",
        f"{middle:.3f}",
        f"{first:.3f} to {third:.3f}",
        f"{row['predicted_ratio']:.3f}" if "predicted_ratio" in row else "",
        f"{row['swapped_bytes'] / 2**20:.1f}" if row.get("swapped_bytes") else "",
        f"{100 * (1 - row['exposed_seconds'] / row['copy_seconds']):.0f} %" if row.get("copy_seconds") else "",
        "" if apart is None else "bit-equal" if apart == 0 else f"{apart:.0e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of the timing")
    if "--models" not in sys.argv and "--quick" not in sys.argv:
        sys.argv += ["--models", MODELS]
    asking.main(QUESTION, Path(__file__), parser, ask, table)


if __name__ == "__main__":
    main()
