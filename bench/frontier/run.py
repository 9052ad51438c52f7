"""Bytes against time: memfit beside other ways to train the same model on the same batch in less memory.

python bench/frontier/run.py [--models gpt,vit] [--missing] [--quick] [--rounds 7] [--without "torch.compile,save_on_cpu"]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import comb
from pathlib import Path
from typing import Any

from memfit.planning import planning_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measuring
from rivals import asking

QUESTION = "frontier"
SHARES = (0.6, 0.25)  # of the way from the smallest plan to plain: budgets beside the rivals' own peaks
CHANCE = 0.05  # a difference that chance gives more often is no verdict
SAME = 1.003  # peaks this close are answered by one plan, at the smaller of them

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ask(name: str, *, quick: bool, rounds: int, without: str = "") -> list[Row]:
    """All rows of one model."""
    from rivals.subjects import subjects

    (subject,) = subjects(name)
    found, absent = _rivals(subject, quick=quick, without=without.split(","))
    plain_peak = found[0][2]["peak_bytes"]
    ours, predicted = _ours(subject, plain_peak, [row for _, _, row in found[1:]], quick=quick)
    arranged = {row["row"]: each for each, _, row in (*found, *ours)}
    rows = [row for _, _, row in (*found, *ours)]
    _count(arranged, rows)
    times = measuring.in_turns(
        {key: each.step for key, each in arranged.items()}, rounds, tell=say, after_its_like=True
    )
    for row in rows:
        row["times"] = times[row["row"]]
        arrangement = arranged[row["row"]]
        if divergences := sorted(getattr(arrangement, "divergences", ())):
            row["note"] = f"diverged from the plan: {divergences[0]}"
    return [{"model": subject.name, "words": subject.words, **row} for row in (*rows, *predicted, *absent)]


def _rivals(subject: Any, *, quick: bool, without: Sequence[str]) -> tuple[list[tuple[Any, Any, Row]], list[Row]]:
    """Plain and every setting of every rival, with gradients and peaks; and those that could not be asked, with the reason."""
    from rivals import discovery
    from rivals.arrangement import Rival, difference, first_gradients, peak_of

    plain = Rival(subject)
    gradients, _ = first_gradients(plain)
    found: list[tuple[Any, Any, Row]] = [
        (
            plain,
            gradients,
            {"kind": "rival", "row": "plain", "who": "plain", "setting": "", "peak_bytes": peak_of(plain)},
        )
    ]
    absent: list[Row] = []
    for rival in discovery.techniques():
        reason = discovery.absent(rival) or rival.obstacle(subject)
        reason = "left out when this was run" if rival.NAME in without else reason
        if reason:
            absent.append({"kind": "absent", "who": rival.NAME, "reason": reason})
            continue
        settings = rival.settings(subject)
        for label, arrange in settings[:1] if quick else settings:
            begin = time.perf_counter()
            try:
                arranged = Rival(subject, arrange)
                its_gradients, first_seconds = first_gradients(arranged)
            except Exception as error:  # noqa: BLE001, a rival that fails is a finding, not an end
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                absent.append({"kind": "absent", "who": f"{rival.NAME}, {label}", "reason": reason})
                say(f"{rival.NAME}, {label}: {reason}")
                continue
            row = {
                "kind": "rival",
                "row": f"{rival.NAME}: {label}",
                "who": rival.NAME,
                "setting": label,
                "version": discovery.version(rival),
                "note": rival.NOTE,
                "first_step_seconds": first_seconds,
                "gradients": difference(its_gradients, gradients),
                "peak_bytes": peak_of(arranged),
            }
            found.append((arranged, None, row))
            say(f"{row['row']}: {row['peak_bytes'] / 2**20:.1f} MiB, {time.perf_counter() - begin:.1f} s")
    return found, absent


def _ours(
    subject: Any, plain_peak: int, rivals: Sequence[Row], *, quick: bool
) -> tuple[list[tuple[Any, Any, Row]], list[Row]]:
    """Plans at budgets of their own and at each rival's peak; and rotor's points, which are only predicted."""
    from rivals import rotor
    from rivals.ours import CHOICES, Ours

    ours = Ours(subject)
    begin = time.perf_counter()
    ours.base("recompute only")
    say(f"captured in {time.perf_counter() - begin:.1f} s")
    wanted = _budgets(plain_peak, rivals)
    smallest = {choice: ours.smallest(choice) for choice in CHOICES}
    low = smallest["recompute only"]
    largest = int(ours.base("recompute only").prediction.plain_peak_bytes)
    wanted.append((max(plain_peak, largest), ["no less than plain"]))
    wanted += [
        (round(low + (plain_peak - low) * share), [f"share {share}"]) for share in (SHARES[:1] if quick else SHARES)
    ]
    reference = None
    found: list[tuple[Any, Any, Row]] = []
    known: dict[tuple[int, int, float], Row] = {}
    missed: list[Row] = []
    for choice in CHOICES:
        asked = [] if quick and choice == "free choice" else wanted
        for budget, answers in (*asked, (smallest[choice], ["smallest"])):
            made, seconds = ours.plan(choice, budget)
            if made is None:
                missed.append(
                    {
                        "kind": "infeasible",
                        "choice": choice,
                        "budget_bytes": budget,
                        "answers": answers,
                        "minimum_bytes": smallest[choice],
                    }
                )
                continue
            if choice == "free choice" and made.choices.micro_batches == 1:
                continue  # the same plan as without the choice
            row = known.get((made.choices.micro_batches, made.prediction.peak_bytes, made.prediction.step_seconds))
            if row is not None:  # the same plan again
                row["answers"] += answers
                continue
            row, planned, reference = _our_row(ours, made, reference)
            row |= {"choice": choice, "setting": choice, "budget_bytes": budget, "answers": list(answers)}
            row |= {"row": f"memfit, {choice}: {budget}", "plan_seconds": seconds}
            known[made.choices.micro_batches, made.prediction.peak_bytes, made.prediction.step_seconds] = row
            found.append((planned, None, row))
        say(f"memfit, {choice}: {len(found)} plans so far, {time.perf_counter() - begin:.1f} s")
    predicted = []
    if subject.chain:
        plain_seconds = ours.solver().trace.plain_step_seconds
        # What memfit's budgets hold beside the trace (copies of written buffers, slack), which rotor's points do not.
        beside = planning_of(ours.base("recompute only")).plain_peak() - ours.solver().plain.peak
        points = rotor.points(ours.solver(), subject.block_paths(ours.model))
        for peak, extra in points:
            best, _ = ours.plan("recompute only", peak + beside)
            predicted.append(
                {
                    "kind": "rotor",
                    "peak_bytes": peak,
                    "predicted_ratio": 1 + extra / plain_seconds,
                    "ours_ratio": best.prediction.slowdown if best else None,
                    "ours_bound": best.prediction.bound_seconds / plain_seconds if best else None,
                }
            )
        say(f"rotor: {len(points)} points, {time.perf_counter() - begin:.1f} s")
    return found, [*predicted, *missed]


def _budgets(plain_peak: int, rivals: Sequence[Row]) -> list[tuple[int, list[str]]]:
    """The peaks of rivals that save anything, those close together taken as one, with the rows they stand for."""
    out: list[tuple[int, list[str]]] = []
    for row in sorted(rivals, key=lambda r: r["peak_bytes"]):
        peak = row["peak_bytes"]
        if peak >= plain_peak:
            continue
        if out and peak <= out[-1][0] * SAME:
            out[-1][1].append(row["row"])
        else:
            out.append((peak, [row["row"]]))
    return out


def _our_row(ours: Any, made: Any, reference: Any) -> tuple[Row, Any, Any]:
    from rivals.arrangement import Rival, difference, first_gradients, peak_of

    if reference is None:  # of the plain step, as the rivals' are compared with
        reference, _ = first_gradients(Rival(ours.subject))
    planned = ours.arranged(made)
    gradients, _ = first_gradients(planned)
    return (
        {
            "kind": "memfit",
            "who": "memfit",
            "gradients": difference(gradients, reference),
            "peak_bytes": peak_of(planned),
            "predicted_peak_bytes": made.prediction.peak_bytes,
            "predicted_ratio": made.prediction.slowdown,
            "micro_batches": made.choices.micro_batches,
            "recomputations": made.script.recomputations,
            "gap": made.gap,
        },
        planned,
        reference,
    )


def _count(arranged: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Work of each arrangement, at common prices; none for compiled code, whose kernels cannot be seen."""
    from rivals.arrangement import work_of
    from rivals.work import priced

    seen = [row for row in rows if row["who"] != "torch.compile"]
    works = [work_of(arranged[row["row"]]) for row in seen]
    for row, work, seconds in zip(seen, works, priced(works), strict=True):
        row |= {"flops": work.flops, "work_seconds": seconds}


# ------------------------------------------------------------------------------------------------------------- the page


def table(rows: Rows) -> str:
    """As Markdown: verdicts over all models first, then each model's own tables."""
    parts = []
    models = [(name, list(group)) for name, group in groupby(rows, key=lambda row: row["model"])]
    parts += ["### Smallest peaks", "", _smallest_table(models), ""]
    parts += ["### At each rival's peak", "", VERDICT_WORDS, "", _verdict_table(models), ""]
    for name, group in models:
        parts += [f"### {name}", "", f"{group[0]['words']}.", "", _model_table(group), ""]
        if any(row["kind"] == "rotor" for row in group):
            parts += [
                "Predicted: rotor's optimum over whole blocks, beside memfit's plan in the same bytes.",
                "",
                _rotor_table(group),
                "",
            ]
    parts += ["### Not run", "", _absent_table(models)]
    return "\n".join(parts)


VERDICT_WORDS = (
    "memfit's time over the rival's, in the same round, medians and quartiles; memfit's budget is the rival's measured peak. After the semicolon: memfit's "
    f"counted work over the rival's. *Faster* or *slower* where a sign test over the rounds gives less than {CHANCE:.0%} to chance, else *even*. Of a hundred "
    "even pairs a few are called otherwise; `save_on_cpu`, which does nothing here, is set beside a plan that does nothing and shows how often."
)


def _plain(group: Rows) -> Mapping[str, Any]:
    return next(row for row in group if row["row"] == "plain")


def _measured(group: Rows) -> list[Mapping[str, Any]]:
    return [row for row in group if row["kind"] in {"rival", "memfit"}]


def _ratio(row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float, float]:
    return measuring.quartiles(a / b for a, b in zip(row["times"], other["times"], strict=True))


def _gradients(row: Mapping[str, Any]) -> str:
    if "gradients" not in row:
        return ""
    found = row["gradients"]
    if found is None:
        return "others missing"
    return "bit-equal" if found == 0 else f"{found:.0e}"


def _label(row: Mapping[str, Any]) -> str:
    if row["who"] != "memfit":
        return str(row["row"])
    parts = f", {row['micro_batches']} micro-batches" if row["micro_batches"] > 1 else ""
    return f"**memfit**, {row['choice']}{parts}"


def _model_table(group: Rows) -> str:
    plain = _plain(group)
    body = []
    for row in sorted(_measured(group), key=lambda r: -r["peak_bytes"]):
        low, median, high = _ratio(row, plain)
        body.append(
            [
                _label(row),
                f"{row['peak_bytes'] / 2**20:.1f}",
                f"{row['peak_bytes'] / plain['peak_bytes']:.3f}",
                f"{median:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{row['work_seconds'] / plain['work_seconds']:.3f}" if "work_seconds" in row else "",
                f"{row['flops'] / plain['flops']:.3f}" if row.get("flops") and plain["flops"] else "",
                f"{row['predicted_ratio']:.3f}" if "predicted_ratio" in row else "",
                _gradients(row),
            ]
        )
    heads = ["arrangement", "peak, MiB", "peak / plain", "time / plain", "quartiles", "work / plain", "FLOPs / plain"]
    seconds = measuring.quartiles(plain["times"])[1]
    return f"Plain: {seconds:.2f} s of processor time a step, {len(plain['times'])} rounds.\n\n" + measuring.table(
        [*heads, "predicted time", "gradients"], body
    )


def answered(group: Rows, rival: Mapping[str, Any], choice: str) -> Mapping[str, Any] | None:
    """The row of memfit at a rival's peak; where free choice found nothing other than the whole batch, that."""
    plain = _plain(group)
    key = rival["row"] if rival["peak_bytes"] < plain["peak_bytes"] else "no less than plain"
    for wanted in (choice, "recompute only"):
        for row in group:
            if row["kind"] in {"memfit", "infeasible"} and row["choice"] == wanted and key in row["answers"]:
                return row
    return None


def verdict(ratios: Sequence[float]) -> str:
    """Of memfit's times over a rival's, round by round: a two-sided sign test."""
    count = len(ratios)
    below = sum(ratio < 1 for ratio in ratios)
    fewer = min(below, count - below)
    chance = 2 * sum(comb(count, k) for k in range(fewer + 1)) / 2**count
    if 2 / 2**count > CHANCE:
        return "too few rounds"
    if chance > CHANCE:
        return "even"
    return "faster" if below > fewer else "slower"


def _verdict_table(models: Sequence[tuple[str, Rows]]) -> str:
    body = []
    for name, group in models:
        plain = _plain(group)
        for rival in (row for row in group if row["kind"] == "rival" and row["row"] != "plain"):
            cells = [
                name,
                rival["row"],
                f"{rival['peak_bytes'] / plain['peak_bytes']:.3f}",
                f"{_ratio(rival, plain)[1]:.3f}",
            ]
            for choice in ("recompute only", "free choice"):
                row = answered(group, rival, choice)
                if row is None:
                    cells.append("")
                elif row["kind"] == "infeasible":
                    cells.append(f"**loses**: needs {row['minimum_bytes'] / plain['peak_bytes']:.3f}")
                else:
                    low, median, high = _ratio(row, rival)
                    word = verdict([a / b for a, b in zip(row["times"], rival["times"], strict=True)])
                    word = f"**{word}**" if word == "slower" else word
                    counted = "work_seconds" in rival and "work_seconds" in row
                    work = f"; {row['work_seconds'] / rival['work_seconds']:.3f}" if counted else ""
                    cells.append(f"{median:.3f} ({low:.3f} to {high:.3f}){work}, {word}")
            body.append(cells)
    return measuring.table(
        ["model", "rival", "its peak / plain", "its time / plain", "memfit, recompute only", "memfit, free choice"],
        body,
    )


def _smallest_table(models: Sequence[tuple[str, Rows]]) -> str:
    who = sorted({row["who"] for _, group in models for row in group if row["kind"] == "rival"} - {"plain"})
    body = []
    for name, group in models:
        plain = _plain(group)["peak_bytes"]
        cells = [name, f"{plain / 2**20:.1f}"]
        for choice in ("recompute only", "free choice"):
            sizes = [
                row["peak_bytes"]
                for row in group
                if row["kind"] == "memfit" and row["choice"] in {choice, "recompute only"}
            ]
            cells.append(f"{min(sizes) / plain:.3f}")
        ours = [float(cell) for cell in cells[2:]]
        for rival in who:
            sizes = [row["peak_bytes"] for row in group if row["kind"] == "rival" and row["who"] == rival]
            cell = f"{min(sizes) / plain:.3f}" if sizes else ""
            cells.append(f"**{cell}**" if cell and float(cell) < min(ours) else cell)
        body.append(cells)
    words = "Peak over plain's, over each one's settings; bold where it is smaller than anything memfit has.\n\n"
    return words + measuring.table(["model", "plain, MiB", "memfit, recompute only", "memfit, free choice", *who], body)


def _rotor_table(group: Rows) -> str:
    plain = _plain(group)
    return measuring.table(
        ["peak / plain", "rotor, time / plain", "memfit, time / plain", "no plan can be below"],
        [
            [
                f"{row['peak_bytes'] / plain['peak_bytes']:.3f}",
                f"{row['predicted_ratio']:.4f}",
                "does not fit" if row["ours_ratio"] is None else f"{row['ours_ratio']:.4f}",
                "" if row["ours_bound"] is None else f"{row['ours_bound']:.4f}",
            ]
            for row in group
            if row["kind"] == "rotor"
        ],
    )


def _absent_table(models: Sequence[tuple[str, Rows]]) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, group in models:
        for row in group:
            if row["kind"] == "absent":
                reasons.setdefault((row["who"], row["reason"]), []).append(name)
    return measuring.table(
        ["rival", "reason", "models"], [[who, reason, ", ".join(names)] for (who, reason), names in reasons.items()]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--without", default="", help="rivals to leave out, by the names on the page, separated by commas"
    )
    asker: Callable[..., list[Row]] = ask
    asking.main(QUESTION, Path(__file__), parser, asker, table)


if __name__ == "__main__":
    main()
