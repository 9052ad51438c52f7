"""Published peaks of real cards beside what memfit predicts for them without the card: `memfit.plan(..., device=)` before any plan is made.

python bench/published/run.py [--only tsn] [--missing]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

FOLDER = Path(__file__).resolve().parent
QUESTION = "published"
MIB = 1 << 20
CLOSE = 0.05

Row = dict[str, Any]


def asked() -> list[Row]:
    """The published figures, each with what its source says of all of them."""
    data = json.loads((FOLDER / "published.json").read_text())
    return [{**data["sources"][row["source"]], **row} for row in data["rows"]]


def optimizer_of(name: str) -> Any:
    """The optimizers of these runs: loops over the parameters, as PyTorch had them then."""
    import torch

    if name == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=False)
    return lambda parameters: torch.optim.AdamW(parameters, foreach=False)


def predicted(row: Mapping[str, Any]) -> Row:
    """Bytes of the plain step of one published run.

    Gradients are there from the first forward on: before PyTorch 2.0 they were set to zero, not let go. DistributedDataParallel copies all of them into its
    buckets.
    """
    sys.path.insert(0, str(FOLDER))
    from memfit.capture.trace_source import TraceSource
    from memfit.planner.caching_allocator import allocator_bytes
    from memfit.planner.timeline import Timeline
    from memfit.techniques.choices import BASELINE
    from models import built

    begin = time.perf_counter()
    model, sample, loss_fn = built(row["model"], **row["arguments"])
    source = TraceSource(
        model, sample, loss_fn, optimizer_of(row["optimizer"]), row.get("clip_norm"), row["device"], loader_batches=2
    )
    choices = replace(BASELINE, micro_batches=2).but(precision=row.get("precision", "full"))
    trace = source.trace_of(choices)
    timeline = Timeline(trace)
    copies = row["copies"] * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return {
        "allocated_bytes": timeline.plain().peak_bytes + copies,
        "reserved_bytes": allocator_bytes(timeline, {}).reserved + copies,
        "assumed": trace.notes[0],
        "seconds": time.perf_counter() - begin,
    }


def bytes_of(row: Mapping[str, Any]) -> int:
    """Of what was predicted, what compares with the figure that was published."""
    if row["measure"] == "allocated":
        return int(row["allocated_bytes"])
    return int(row["reserved_bytes"]) + int(row["context_mib"]) * MIB


def error_of(row: Mapping[str, Any]) -> float:
    """Predicted over published, less one."""
    return bytes_of(row) / (row["mib"] * MIB) - 1


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    errors = sorted(abs(error_of(row)) for row in rows)
    close = sum(error <= CLOSE for error in errors)
    parts = [
        (
            f"{len(rows)} published figures; median error {100 * statistics.median(errors):.1f} %, "
            f"{close} within {100 * CLOSE:.0f} %, largest {100 * errors[-1]:.1f} %."
        )
    ]
    for source in dict.fromkeys(row["source"] for row in rows):
        mine = [row for row in rows if row["source"] == source]
        first = mine[0]
        whole = statistics.median(abs(error_of(row)) for row in mine)
        parts += [
            f"### {source}",
            f"[{first['words']}]({first['url']}), {first['date']}; {first['card']}, {first['versions']}. Median error {100 * whole:.1f} %.",
            measuring.table(
                ["run", "published", "predicted", "error", "why"],
                [
                    [
                        row["name"],
                        f"{row['mib']:.0f} MiB",
                        f"{bytes_of(row) / MIB:.0f} MiB",
                        f"{100 * error_of(row):+.1f} %",
                        row.get("why", "") if abs(error_of(row)) > CLOSE else "",
                    ]
                    for row in mine
                ],
            ),
        ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs with this in their name")
    parser.add_argument("--missing", action="store_true", help="only runs that have no result yet")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    have = {row["name"]: row for row in measuring.kept(QUESTION)}
    rows = []
    for row in asked():
        known = have.get(row["name"])
        again = arguments.only in row["name"] and not (arguments.missing and known)
        if not again and known is None:
            continue
        rows.append({**(known or {}), **row, **(predicted(row) if again else {})})
        if again:
            print(f"{row['name']}: {100 * error_of(rows[-1]):+.1f} %", file=sys.stderr, flush=True)
        measuring.keep(QUESTION, measuring.machine(), rows)
    print(table(rows))


if __name__ == "__main__":
    main()
