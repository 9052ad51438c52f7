"""What fits: the smallest bytes each way of training needs, and the largest batch each gets into a budget.

python bench/fit/run.py [--models gpt,vit] [--budgets 512MiB,1GiB] [--missing] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
from rivals import asking

QUESTION = "fit"
LARGEST_BATCH = (
    "gpt",
    "bert_base",
    "llama",
    "resnet50",
    "unet",
    "small_gpt",
)  # the others would take their step a dozen times at ten times the size
SKIPPED = {
    "torch.compile": "compiles anew for each batch; its peaks are in bench/frontier",
    "save_on_cpu": "copies nothing when the model is on the CPU: as plain",
}
CLOSE = 0.03  # the largest batch is found to within this part of it
MOST_TRIES = 8

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ask(name: str, *, quick: bool, budgets: str = "") -> list[Row]:
    """All rows of one model."""
    from rivals.subjects import subjects

    from memfit.units import parse_bytes

    (subject,) = subjects(name)
    rivals, absent = _rivals(subject, quick=quick)
    rows: list[Row] = [_smallest_of_ours(subject, choice) for choice in ("recompute only", "free choice")]
    best: dict[str, tuple[Any, Row]] = {}
    for arrange, row in rivals:
        rows.append(row)
        if row["who"] not in best or row["peak_bytes"] < best[row["who"]][1]["peak_bytes"]:
            best[row["who"]] = (arrange, row)
    if subject.name in LARGEST_BATCH:
        for text in ["64MiB"] if quick else budgets.split(","):
            budget = parse_bytes(text)
            for who, (arrange, row) in list(best.items())[: 2 if quick else None]:
                rows.append(_largest(who, row["setting"], subject, budget, _peak_of_rival(subject, arrange)))
            mine = _largest("memfit", "recompute only", subject, budget, _peak_of_ours(subject))
            mine["measured_bytes"] = _measured(subject.with_batch(mine["batch"]), budget) if mine["batch"] else None
            rows.append(mine)
    return [{"model": subject.name, "words": subject.words, **row} for row in (*rows, *absent)]


def _rivals(subject: Any, *, quick: bool) -> tuple[list[tuple[Any, Row]], list[Row]]:
    """Every setting of every rival at the usual batch, with its peak."""
    from rivals import discovery

    found: list[tuple[Any, Row]] = []
    absent: list[Row] = []
    asked: list[tuple[str, str, Any]] = [("plain", "", None)]
    for rival in discovery.techniques():
        reason = discovery.absent(rival) or SKIPPED.get(rival.NAME) or rival.obstacle(subject)
        if reason:
            absent.append({"kind": "absent", "who": rival.NAME, "reason": reason})
            continue
        asked += [(rival.NAME, label, arrange) for label, arrange in rival.settings(subject)[: 1 if quick else None]]
    for who, label, arrange in asked:
        try:
            peak = _peak_of_rival(subject, arrange)(subject.batch)
        except Exception as error:  # noqa: BLE001, a rival that fails is a finding, not an end
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            absent.append({"kind": "absent", "who": f"{who}, {label}", "reason": reason})
            continue
        found.append((arrange, {"kind": "smallest", "who": who, "setting": label, "peak_bytes": peak}))
        say(f"{who}, {label}: {peak / 2**20:.1f} MiB")
    return found, absent


def _peak_of_rival(subject: Any, arrange: Any) -> Callable[[int], int]:
    from rivals.arrangement import Rival, peak_of

    def peak(batch: int) -> int:
        gc.collect()
        rival = Rival(subject.with_batch(batch), arrange)
        rival.make_state()
        return peak_of(rival)

    return peak


def _peak_of_ours(subject: Any) -> Callable[[int], int]:
    from rivals.ours import Ours

    return lambda batch: Ours(subject.with_batch(batch)).smallest("recompute only")


def _measured(subject: Any, budget: int) -> int | None:
    """What a step really holds when it is planned for the budget."""
    from rivals.arrangement import first_gradients, peak_of
    from rivals.ours import Ours

    ours = Ours(subject)
    made, _ = ours.plan("recompute only", budget)
    if made is None:
        return None
    planned = ours.arranged(made)
    first_gradients(planned)
    return peak_of(planned)


def _smallest_of_ours(subject: Any, choice: str) -> Row:
    from rivals.arrangement import first_gradients, peak_of
    from rivals.ours import Ours

    ours = Ours(subject)
    budget = ours.smallest(choice)
    made, _ = ours.plan(choice, budget)
    assert made is not None, "the smallest budget has a plan"
    planned = ours.arranged(made)
    first_gradients(planned)
    row = {
        "kind": "smallest",
        "who": "memfit",
        "setting": choice,
        "budget_bytes": budget,
        "peak_bytes": peak_of(planned),
        "predicted_ratio": made.prediction.slowdown,
        "micro_batches": made.choices.micro_batches,
    }
    say(f"memfit, {choice}: {row['peak_bytes'] / 2**20:.1f} MiB")
    return row


def _largest(who: str, setting: str, subject: Any, budget: int, peak: Callable[[int], int]) -> Row:
    """The largest batch whose peak is within the budget, to within `CLOSE`; peaks grow with the batch, nearly straight."""
    known = {count: peak(count) for count in (max(1, subject.batch // 4), max(2, subject.batch // 2))}
    for _ in range(MOST_TRIES):
        fitting = [b for b, size in known.items() if size <= budget]
        above = [b for b, size in known.items() if size > budget]
        low, high = max(fitting, default=0), min(above, default=0)
        if high and high - low <= max(1, CLOSE * low):
            break
        (x1, y1), (x2, y2) = sorted(sorted(known.items(), key=lambda item: abs(item[1] - budget))[:2])
        guess = x1 + (budget - y1) * (x2 - x1) / (y2 - y1) if y2 > y1 else 2 * x2
        guess = max(1, int(guess), low + 1)
        guess = min(guess, high - 1) if high else min(guess, 8 * x2)
        if guess in known:  # the line says what is known already: its neighbour closes the bracket
            guess += 1
        if guess < 1 or guess in known:
            break
        known[guess] = peak(guess)
    batch = max((b for b, size in known.items() if size <= budget), default=0)
    say(f"{who}, {setting}: batch {batch} in {budget / 2**20:.0f} MiB, {len(known)} peaks")
    return {
        "kind": "batch",
        "who": who,
        "setting": setting,
        "budget_bytes": budget,
        "batch": batch,
        "peak_bytes": known.get(batch),
        "tries": len(known),
    }


# ------------------------------------------------------------------------------------------------------------- the page


def table(rows: Rows) -> str:
    """As Markdown."""
    models = [(name, list(group)) for name, group in groupby(rows, key=lambda row: row["model"])]
    parts = ["### The smallest peak", "", SMALLEST_WORDS, "", _smallest_table(models), ""]
    if any(row["kind"] == "batch" for row in rows):
        parts += ["### The largest batch", "", BATCH_WORDS, "", _batch_table(models), ""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, group in models:
        for row in group:
            if row["kind"] == "absent":
                reasons.setdefault((row["who"], row["reason"]), []).append(name)
    body = [[who, reason, ", ".join(names)] for (who, reason), names in reasons.items()]
    return "\n".join([*parts, "### Not run", "", measuring.table(["rival", "reason", "models"], body)])


SMALLEST_WORDS = (
    "MiB, measured, parameters, gradients, optimizer state and batch included; over each one's settings. In bold what is smaller than memfit "
    "with the whole batch at once. *Free choice* cuts the batch; any of the others could be used with gradient accumulation by hand as well."
)
BATCH_WORDS = (
    f"Samples in a step, the whole batch at once, found to within {CLOSE:.0%}; each in its smallest setting. In bold what is more than memfit's. With "
    "micro-batches memfit takes any batch whose samples themselves fit, and so do the others with gradient accumulation."
)


def _names(models: Sequence[tuple[str, Rows]], kind: str) -> list[str]:
    return sorted({row["who"] for _, group in models for row in group if row["kind"] == kind} - {"plain", "memfit"})


def _smallest_table(models: Sequence[tuple[str, Rows]]) -> str:
    who = _names(models, "smallest")
    body = []
    for name, group in models:
        rows = [row for row in group if row["kind"] == "smallest"]
        least = {}
        for row in rows:
            key = row["setting"] if row["who"] == "memfit" else row["who"]
            least[key] = min(row["peak_bytes"], least.get(key, row["peak_bytes"]))
        ours = least["recompute only"]
        cells = [name, f"{least['plain'] / 2**20:.1f}", f"{ours / 2**20:.1f}", f"{least['free choice'] / 2**20:.1f}"]
        for rival in who:
            cell = f"{least[rival] / 2**20:.1f}" if rival in least else ""
            cells.append(f"**{cell}**" if cell and least[rival] < ours else cell)
        body.append(cells)
    return measuring.table(["model", "plain", "memfit, recompute only", "memfit, free choice", *who], body)


def _batch_table(models: Sequence[tuple[str, Rows]]) -> str:
    who = _names(models, "batch")
    body = []
    for name, group in models:
        rows = [row for row in group if row["kind"] == "batch"]
        for budget in sorted({row["budget_bytes"] for row in rows}):
            found = {row["who"]: row["batch"] for row in rows if row["budget_bytes"] == budget}
            mine = next(row for row in rows if row["budget_bytes"] == budget and row["who"] == "memfit")
            measured = mine.get("measured_bytes")
            cells = [name, f"{budget / 2**20:.0f} MiB", f"{found['plain']}", f"{found['memfit']}"]
            cells.append("" if measured is None else f"{measured / 2**20:.1f}")
            for rival in who:
                cell = f"{found[rival]}" if rival in found else ""
                cells.append(f"**{cell}**" if cell and found[rival] > found["memfit"] else cell)
            body.append(cells)
    return measuring.table(["model", "budget", "plain", "memfit, recompute only", "its measured peak, MiB", *who], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="512MiB", help="for the largest batch, separated by commas")
    asking.main(QUESTION, Path(__file__), parser, ask, table)


if __name__ == "__main__":
    main()
