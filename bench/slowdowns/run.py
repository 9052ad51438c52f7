"""How much slower a step is under a plan: predicted beside measured, in so many rounds that the median is known.

python bench/slowdowns/run.py [--models gpt,vit] [--missing] [--quick] [--rounds 60]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from math import comb
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
from rivals import asking

QUESTION = "slowdowns"
SHARES = (0.6, 0.25)  # of the way from the smallest plan to plain
CERTAIN = 0.95
# Two models, alike but for where their tensors lie; a plain step takes the mean of both.
COPIES = "plain", "plain again"
KNOWN = 0.01  # a median whose interval is no wider than this to either side needs no more rounds
FEWEST, AT_ONCE = 15, 5  # rounds, and those after which the intervals are looked at

Row = dict[str, Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ask(name: str, *, quick: bool, rounds: int) -> list[Row]:
    """The rows of one model: plain, and plans of the whole batch and of micro-batches at two budgets."""
    from rivals.arrangement import Rival
    from rivals.ours import CHOICES, Ours
    from rivals.subjects import subjects

    (subject,) = subjects(name)
    ours = Ours(subject)
    plain_peak = int(ours.base("recompute only").prediction.plain_peak_bytes)
    arranged: dict[str, Any] = {copy: Rival(subject) for copy in COPIES}
    rows: list[Row] = []
    for choice in list(CHOICES)[: 1 if quick else 2]:
        smallest = ours.smallest(choice)
        for share in SHARES[:1] if quick else SHARES:
            budget = round(smallest + (plain_peak - smallest) * share)
            made, _ = ours.plan(choice, budget)
            if made is None or (choice == "free choice" and made.choices.micro_batches == 1):
                continue
            row = {"row": f"{choice}, {share}", "choice": choice, "share": share}
            row |= {"budget_bytes": budget, "plain_peak_bytes": plain_peak}
            row |= {"micro_batches": made.choices.micro_batches, "predicted_ratio": made.prediction.slowdown}
            row |= {"predicted_seconds": made.prediction.step_seconds, "recomputations": made.script.recomputations}
            arranged[row["row"]] = ours.arranged(made)
            rows.append(row)
    steps = {key: each.step for key, each in arranged.items()}
    times: dict[str, list[float]] = {key: [] for key in steps}
    plain: list[float] = []
    while len(plain) < rounds:
        for key, more in measuring.in_turns(steps, min(AT_ONCE, rounds), after_its_like=True).items():
            times[key] += more
        plain = [mean(each) for each in zip(*(times[copy] for copy in COPIES), strict=True)]
        widths = [wide(interval(ratios(times[row["row"]], plain))) for row in rows]
        say(f"{len(plain)} rounds, medians known to {100 * max(widths, default=0):.1f} points")
        if len(plain) >= FEWEST and max(widths, default=0) <= KNOWN:
            break
    for row in rows:
        row["times"] = times[row["row"]]
    return [
        {"model": subject.name, "words": subject.words, **row}
        for row in [{"row": "plain", "times": plain, "copies": [times[copy] for copy in COPIES]}, *rows]
    ]


def ratios(times: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Of each round."""
    return [a / b for a, b in zip(times, plain, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between two of the values that enclose the true one with the probability `CERTAIN` (a sign test's, whatever the distribution)."""
    ordered, count = sorted(values), len(values)
    outside, out = 0.0, 0
    while 2 * (outside + comb(count, out) / 2**count) <= 1 - CERTAIN:
        outside += comb(count, out) / 2**count
        out += 1
    return ordered[max(0, out - 1)], median(ordered), ordered[min(count - 1, count - out)]


def wide(found: tuple[float, float, float]) -> float:
    """How far the ends of an interval are from its median."""
    low, middle, high = found
    return max(middle - low, high - middle)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown, of each computer by itself."""
    told = measuring.by_computer(rows)
    if len(told) == 1:
        return _table(rows)
    return "\n\n".join(f"On {computer}: {_table(own)}" for computer, own in told.items())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    plain = {row["model"]: row["times"] for row in rows if row["row"] == "plain"}
    body = []
    off: dict[bool, list[float]] = {False: [], True: []}  # of plans that only recompute, and of those in micro-batches
    for row in rows:
        if row["row"] == "plain":
            continue
        low, middle, high = interval(ratios(row["times"], plain[row["model"]]))
        off[row["micro_batches"] > 1].append(abs(row["predicted_ratio"] - middle))
        body.append(
            [
                row["model"],
                f"{row['budget_bytes'] / row['plain_peak_bytes']:.2f}",
                str(row["micro_batches"]),
                f"{row['predicted_ratio']:.3f}",
                f"{middle:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{100 * (row['predicted_ratio'] - middle):+.1f}",
                str(len(row["times"])),
            ]
        )
    words = f"{_within(off[False] + off[True], ' medians are', ' points of what was predicted')}; of plans that only recompute {_within(off[False])}"
    if off[True]:
        words += f"; of those in micro-batches {_within(off[True])}"
    copies = [interval(ratios(*reversed(row["copies"])))[1] for row in rows if "copies" in row]
    if copies:
        words += (
            f". Of two copies of a plain model, alike but for where their tensors lie, the second takes {min(copies):.3f} to {max(copies):.3f} of the first "
            f"(medians of {len(copies)} models, {sum(abs(each - 1) <= 0.01 for each in copies)} within 1 point)"
        )
    return f"{words}.\n\n" + measuring.table(
        ["model", "budget / plain", "micro-batches", "predicted", "measured", "95 % interval", "points", "rounds"], body
    )


def _within(off: Sequence[float], what: str = "", of: str = "") -> str:
    """How many of these are small, and the largest."""
    return f"{sum(each <= 0.03 for each in off)} of {len(off)}{what} within 3{of}, all within {100 * max(off):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="at most")
    asker: Callable[..., list[Row]] = ask
    asking.main(QUESTION, Path(__file__), parser, asker, table, by_computer=True)


if __name__ == "__main__":
    main()
