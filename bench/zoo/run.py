"""Every architecture that transformers builds from a small configuration: how many train in half of their memory with the same bits, as predicted?"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring

COMMAND = measuring.FOLDER.parent / "tests" / "zoo" / "run.py"
REASONS = 12  # of a class are listed; the rest, mostly of configurations that our shrinking does not fit, is counted


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown: the classes, then why a model is not in the first one."""
    measuring.with_tests_models()
    from zoo.comparing import grouped
    from zoo.judging import CLASSES

    counts = Counter(row["kind"] for row in rows)
    exact = [row for row in rows if row["kind"] == "exact"]
    off = max((abs(row["predicted_bytes"] / row["metered_bytes"] - 1) for row in exact), default=0.0)
    same = sum(row["predicted_bytes"] == row["metered_bytes"] for row in exact)
    budgets = sorted(row["budget_bytes"] / row["plain_bytes"] for row in exact)
    halves = sum(row["budget_bytes"] <= row["plain_bytes"] // 2 for row in exact)
    tried = [row for each in rows for row in each.get("techniques", ())]
    minutes = sum(row["seconds"] for row in (*rows, *tried)) / 60
    lines = [
        f"{len(rows)} architectures of transformers {rows[0]['machine']['transformers']}, {minutes:.0f} minutes.",
        "",
        measuring.table(["class", "architectures"], [[kind, str(counts[kind])] for kind in CLASSES]),
        "",
        f"Of the exact ones, {halves} ran in half of their plain peak or less, the others in the least that there is for them "
        f"(median budget {100 * budgets[len(budgets) // 2]:.0f} % of plain); "
        f"{same} peaks were predicted to the byte, the worst is {100 * off:.2f} % off."
        if exact
        else "",
        "",
    ]
    reasons = []
    for kind in CLASSES:
        found = Counter(grouped(row["reason"]) for row in rows if row["kind"] == kind and row["reason"])
        reasons += [[kind, reason.replace("|", "/"), str(count)] for reason, count in found.most_common(REASONS)]
        rest = sum(count for _, count in found.most_common()[REASONS:])
        if rest:
            reasons.append([kind, "other reasons, mostly of one architecture each", str(rest)])
    parts = ["\n".join([*lines, measuring.table(["class", "reason", "architectures"], reasons)])]
    return "\n\n".join([*parts, *_of_techniques(tried)] if tried else parts)


PAGES = {
    "8-bit-state": "8-bit state",
    "activation-offloading": "swap",
    "freezing": "freezing",
    "loss-head": "loss in chunks",
    "mixed-precision": "bf16",
    "optimizer-state-offloading": "state on disk",
    "streaming": "streaming",
    "update-in-backward": "update in backward",
}
"""Page of docs/techniques -> what the technique is called here."""


def excerpt(rows: Sequence[dict[str, Any]], page: str) -> str:
    """What came of the technique that a page is about, in words."""
    if page not in PAGES:
        return ""
    measuring.with_tests_models()
    from zoo.techniques import CLASSES, worst

    own = [row for each in rows for row in each.get("techniques", ()) if row["technique"] == PAGES[page]]
    counts = Counter(row["kind"] for row in own)
    exact = [row for row in own if row["kind"] == "exact"]
    same = sum(row["predicted_bytes"] == row["metered_bytes"] for row in exact)
    found = ", ".join(f"{counts[kind]} {kind}" for kind in CLASSES if counts[kind])
    return (
        f"{len(own)} architectures of transformers were trained with {PAGES[page]}: {found}. Of the exact ones {same} peaks were predicted to the byte, "
        f"the worst is {100 * worst(exact):.2f} % off. [What these words mean, and the reasons](../figures.md#every-architecture-of-transformers)."
    )


def _of_techniques(tried: Sequence[dict[str, Any]]) -> list[str]:
    """What came of each technique, and why where it is not exact."""
    from zoo.comparing import grouped
    from zoo.techniques import CLASSES, TECHNIQUES, worst

    table, reasons = [], []
    for technique in TECHNIQUES:
        own = [row for row in tried if row["technique"] == technique.name]
        counts = Counter(row["kind"] for row in own)
        exact = [row for row in own if row["kind"] == "exact"]
        same = sum(row["predicted_bytes"] == row["metered_bytes"] for row in exact)
        numbers = [str(counts[kind]) for kind in CLASSES]
        table.append([technique.name, str(len(own)), *numbers, str(same), f"{100 * worst(exact):.2f} %"])
        told = Counter((row["kind"], grouped(row["reason"])) for row in own if row["reason"])
        reasons += [[technique.name, kind, why.replace("|", "/"), str(n)] for (kind, why), n in told.most_common()]
    parts = [
        "Each architecture that trains, with one technique more, by turns:",
        measuring.table(["technique", "tried", *CLASSES, "to the byte", "worst of the exact"], table),
    ]
    return [*parts, measuring.table(["technique", "class", "reason", "architectures"], reasons)] if reasons else parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--from", dest="results", type=Path, help="what tests/zoo/run.py --out wrote, instead of running it"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.results or Path(folder) / "zoo.jsonl"
        if arguments.results is None:
            subprocess.run(
                [sys.executable, str(COMMAND), "--out", str(out)], check=False
            )  # 1: something is wrong; the table says what
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    import torch

    torch.set_num_threads(1)  # as the zoo ran
    measuring.keep("zoo", measuring.machine(), sorted(rows, key=lambda row: str(row["architecture"])))
    print(table(measuring.kept("zoo")))


if __name__ == "__main__":
    main()
