"""Published seconds of training steps on real cards beside what memfit predicts for them without the card.

python bench/published_seconds/run.py [--only A100] [--fit]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

FOLDER = Path(__file__).resolve().parent
QUESTION = "published_seconds"

Row = dict[str, Any]


def published() -> tuple[list[Row], list[Row]]:
    """Steps and single operations, each with what its source says of all of them; of steps their seconds."""
    data = json.loads((FOLDER / "published.json").read_text())
    steps = [{**data["sources"][row["source"]], **row} for row in data["steps"]]
    for row in steps:
        row["seconds"] = row["batch"] / row["per_second"]
    return steps, [{**data["sources"][row["source"]], **row} for row in data["operations"]]


def with_its_modules() -> None:
    """Let the modules of this folder be found, whoever loaded this file."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))


def captured(rows: Sequence[Row]) -> list[Any]:
    """What the operations of each row do; rows that run the same are captured once."""
    with_its_modules()
    from work import capture_key, works_of

    known: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        if capture_key(row) not in known:
            print(f"  {row['name']}", file=sys.stderr, flush=True)
            known[capture_key(row)] = works_of(row)
    return [known[capture_key(row)] for row in rows]


def answered(rows: Sequence[Row], operations: Sequence[Row], works: Sequence[Any], *, fit: bool) -> list[Row]:
    """Each row with what is predicted, what was before, and what would be if the fit had not seen its GPU."""
    with_its_modules()
    from fitting import fitted
    from work import former_seconds, large, operation_seconds, step_seconds

    from memfit.hardware.efficiency import FITTED

    pairs = [(row, w) for row, w in zip(rows, works, strict=True) if "unlike" not in row]
    single = large(operations)
    constants, blind = FITTED, {}
    if fit:
        constants = fitted(pairs, single)
        print(json.dumps(asdict(constants), indent=1), flush=True)
    for device in dict.fromkeys(row["device"] for row in rows):
        others = [(row, w) for row, w in pairs if row["device"] != device]
        blind[device] = fitted(others, [o for o in single if o["device"] != device])
        print(f"  without {device}", file=sys.stderr, flush=True)
    out = []
    for row, w in zip(rows, works, strict=True):
        predicted = step_seconds(w, row["device"], constants)
        former, unseen = former_seconds(w, row["device"]), step_seconds(w, row["device"], blind[row["device"]])
        out.append({"kind": "step", **row, "predicted": predicted, "former": former, "unseen": unseen})
    for row in operations:
        predicted, seconds = operation_seconds(row, constants)
        out.append({**row, "kind": "operation", "of": row["kind"], "seconds": seconds, "predicted": predicted})
    return out


def error_of(row: Mapping[str, Any], name: str = "predicted") -> float:
    """Predicted over published, less one."""
    return float(row[name] / row["seconds"] - 1)


def median_of(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Of the sizes of errors."""
    return f"{100 * statistics.median(abs(error_of(row, name)) for row in rows):.0f} %"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    steps = [row for row in rows if row["kind"] == "step"]
    operations = [row for row in rows if row["kind"] == "operation"]
    fitted = [row for row in steps if "unlike" not in row]
    of_gpus = [
        [
            card,
            str(len(mine)),
            *(median_of(mine, name) for name in ("former", "predicted", "unseen")),
            f"{100 * statistics.median(error_of(row, 'unseen') for row in mine):+.0f} %",
        ]
        for card in sorted({row["device"] for row in steps})
        for mine in [[row for row in steps if row["device"] == card]]
    ]
    within = sum(abs(error_of(row, "unseen")) <= 0.2 for row in steps)
    largest = max(fitted, key=lambda row: abs(error_of(row, "unseen")))
    parts = [
        (
            f"{len(steps)} published steps of {len(of_gpus)} GPUs. Median error: {median_of(steps, 'predicted')}; where the fit has not seen the GPU "
            f"{median_of(steps, 'unseen')}, {within} of them within 20 %; before, with two constants, {median_of(steps, 'former')}. "
            f"The largest of a row that was fitted, its GPU unseen: {100 * error_of(largest, 'unseen'):+.0f} % ({largest['name']})."
        ),
        measuring.table(
            ["GPU", "rows", "before", "now", "GPU not in the fit", "its median with sign"],
            of_gpus,
        ),
    ]
    for source in dict.fromkeys(row["source"] for row in steps):
        mine = [row for row in steps if row["source"] == source]
        first = mine[0]
        parts += [
            f"### {source}",
            f"[{first['words']}]({first['url']}), {first['date']}; {first['versions']}.",
            measuring.table(
                ["step", "published", "before", "now", "error", "GPU not in the fit", "not in any fit, because"],
                [
                    [
                        row["name"],
                        f"{1000 * row['seconds']:.0f} ms",
                        f"{1000 * row['former']:.0f} ms",
                        f"{1000 * row['predicted']:.0f} ms",
                        f"{100 * error_of(row):+.0f} %",
                        f"{100 * error_of(row, 'unseen'):+.0f} %",
                        row.get("unlike", ""),
                    ]
                    for row in mine
                ],
            ),
        ]
    parts.append("### Single operations")
    for source in dict.fromkeys(row["source"] for row in operations):
        mine = [row for row in operations if row["source"] == source]
        first = mine[0]
        parts += [
            f"[{first['words']}]({first['url']}), {first['date']}; {first['versions']}.",
            measuring.table(["operation", "published", "now", "error"], [_of_operation(row) for row in mine]),
        ]
    return "\n\n".join(parts)


def _of_operation(row: Mapping[str, Any]) -> list[str]:
    if row["of"] == "copy":
        what = f"{row['card']}, {row['bytes'] / 1e6:.0f} MB read and written"
        rates = [f"{row['bytes'] / seconds / 1e9:.0f} GB/s" for seconds in (row["seconds"], row["predicted"])]
    else:
        units = {"half": "16 bits", "tf32": "TF32", "fp32": "fp32"}[row["units"]]
        what = f"{row['card']}, {row['m']} x {row['k']} times {row['k']} x {row['n']}, {units}"
        flops = 2 * row["m"] * row["n"] * row["k"]
        rates = [f"{flops / seconds / 1e12:.1f} TFLOP/s" for seconds in (row["seconds"], row["predicted"])]
    return [what, *rates, f"{100 * error_of(row):+.0f} %"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="print rows with this in their name; nothing is kept")
    parser.add_argument("--fit", action="store_true", help="fit the constants anew, print them, and predict with them")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    steps, operations = published()
    if arguments.only:
        with_its_modules()
        from work import former_seconds, step_seconds

        chosen = [row for row in steps if arguments.only in row["name"]]
        for row, works in zip(chosen, captured(chosen), strict=True):
            said = {"predicted": step_seconds(works, row["device"]), "former": former_seconds(works, row["device"])}
            errors = (error_of(row | said, name) for name in ("predicted", "former"))
            print("{}: {:+.0f} %, before {:+.0f} %".format(row["name"], *(100 * error for error in errors)))
        return
    rows = answered(steps, operations, captured(steps), fit=arguments.fit)
    measuring.keep(QUESTION, measuring.machine(), rows)
    print(table(rows))


if __name__ == "__main__":
    main()
