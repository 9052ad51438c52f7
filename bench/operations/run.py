"""Every differentiable operation and module of PyTorch, on the inputs of its own tests: exact, predicted truly and inside the budget?

python -m pip install expecttest                              # which PyTorch's tests import
python bench/run.py operations
python bench/operations/run.py --only WORD                    # of kind and name; the other rows are kept as they are
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

KINDS: Final = {
    "exact": "all steps have the numbers of plain PyTorch and are inside the budget, with some operations run again",
    "kept plain": "the same, and nothing can be dropped that makes the peak smaller",
    "no gradient": "on none of its inputs it gives a finite number and a gradient",
    "refused": "memfit says why it cannot",
    "not deterministic": "plain PyTorch differs from itself",
    "above budget": "a bug",
    "wrong": "a bug",
    "failed": "an error that is not memfit's own",
}


def row_of(program: Any) -> dict[str, Any]:
    """One operation under the budgets of `bench/programs`, or the reason why not."""
    from programs import run as of_programs

    if not len(program.build()[0].arguments):
        return {**of_programs.named(program), "kind": "no gradient", "reason": ""}
    row = of_programs.alone(program)
    kept: dict[str, Any] = {
        name: row[name] for name in ("package", "program", "kind", "reason", "seconds") if name in row
    }
    if "budgets" not in row:
        return kept
    tried = row["budgets"].values()
    apart = max(abs(each["largest_bytes"] / each["predicted_bytes"] - 1) for each in tried)
    smallest = row["budgets"]["smallest"]["budget_bytes"] / row["plain_peak_bytes"]
    return {**kept, "steps": sum(each["steps"] for each in tried), "apart": apart, "smallest": smallest}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown: how many are of which class, and those that are not exact to the byte."""
    ran = [row for row in rows if "apart" in row]
    counts = Counter((row["kind"], row["package"]) for row in rows)
    forms = ("operation", "in place", "module")
    told = (
        f"{len(ran)} programs, {sum(row['steps'] for row in ran):,} steps, {sum(row['seconds'] for row in ran) / 60:.0f} minutes of processor time. "
        f"Largest peak to the byte as predicted: {sum(row['apart'] == 0 for row in ran)}; within 0.5 %: {sum(row['apart'] <= 0.005 for row in ran)}."
    )
    parts = [
        told,
        measuring.table(
            ["class", "what it means", "operations", "in place", "modules"],
            [
                [kind, words, *(str(counts[kind, form]) for form in forms)]
                for kind, words in KINDS.items()
                if any(counts[kind, form] for form in forms)
            ],
        ),
    ]
    if others := [r for r in rows if r.get("apart", 0) > 0 or (r["reason"] and r["kind"] != "kept plain")]:
        heads = ["kind", "name", "class", "apart from predicted", "reason"]
        parts.append(measuring.table(heads, [_cells(row) for row in others]))
    return "\n\n".join(parts)


def _cells(row: Mapping[str, Any]) -> list[str]:
    apart = f"{100 * row['apart']:.3f} %" if "apart" in row else ""
    return [row["package"], row["program"], row["kind"], apart, row["reason"].replace("|", "/").replace("\n", " ")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="those with this word in kind or name")
    arguments = parser.parse_args()
    import torch
    from operations.databases import programs

    torch.set_num_threads(1)
    found = list(programs())
    known = {
        (row["package"], row["program"]): {n: value for n, value in row.items() if n not in {"bench", "machine"}}
        for row in measuring.kept("operations")
    }
    about = measuring.machine()
    for program in found:
        title = f"{program.package}: {program.name}"
        if not arguments.only or any(word in title for word in arguments.only):
            row = row_of(program)
            print(f"{row['kind']:13} {title}  {row['reason']}", flush=True)
            known[program.package, program.name] = row
            keys = ((each.package, each.name) for each in found)
            measuring.keep("operations", about, [known[key] for key in keys if key in known])


if __name__ == "__main__":
    main()
