"""The page of this question: what was kept, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import measuring

from memfit.techniques.sharding import ONE_UNIT, SHARDING, is_pipeline
from memfit.views.drawing import counted

Rows = Sequence[Mapping[str, Any]]
WORDS = {
    "data": "data parallel",
    "zero1": "ZeRO 1",
    ONE_UNIT: "ZeRO 2, one unit",
    "zero2": "ZeRO 2, block by block",
    "zero3": "ZeRO 3",
}


def page(rows: Rows) -> str:
    """As Markdown."""
    peaks = [row for row in rows if row["row"] == "peak"]
    parts = {
        "Peaks of ranks": _peaks(peaks),
        "Against FSDP2 and checkpoint on every block": _hand(rows),
        "Seconds of plain steps": _seconds([row for row in rows if row["row"] == "seconds"]),
    }
    if any(row["row"] == "other" for row in rows):
        parts["Bytes of DeepSpeed and of a pipeline with equal parameters"] = _others(rows)
    if any(row["row"] == "beside" for row in rows):
        parts["Time in as many bytes"] = _beside(rows)
    waiting = [row for row in rows if row["row"] == "waiting"]
    if waiting:
        parts["How long the ranks of a pipeline wait"] = _waiting(waiting)
    return "\n\n".join(f"### {head}\n\n{told}" for head, told in parts.items())


def _waiting(rows: Rows) -> str:
    def shares(values: Sequence[float]) -> str:
        return ", ".join(f"{100 * each:.1f} %" for each in values)

    off = max(abs(m - p) for row in rows for m, p in zip(row["measured"], row["predicted"], strict=True))
    lines = [
        [
            {"1f1b": "1F1B", "gpipe": "GPipe"}[row["schedule"]],
            str(row["micro_batches"]),
            ", ".join(f"{each:g} s" for each in row["stages"]),
            shares(row["measured"]),
            shares(row["predicted"]),
            f"{100 * row['textbook']:.1f} %",
        ]
        for row in rows
    ]
    heads = ["schedule", "micro-batches", "forward of each stage", "measured", "predicted", "(K - 1)/(M + K - 1)"]
    return (
        f"Of each of {rows[0]['ranks']} ranks, the share of the passes of all micro-batches. The parts sleep in forward, and twice as long in backward; "
        f"the median of {rows[0]['steps']} steps. Measured and predicted shares are at most {100 * off:.1f} points apart.\n\n{measuring.table(heads, lines)}"
    )


def _worded(way: str) -> str:
    return SHARDING.words(way).partition(" on ")[0] if is_pipeline(way) else WORDS[way.partition("/")[0]]


def _peaks(rows: Rows) -> str:
    off = [
        abs(predicted - measured)
        for row in rows
        for predicted, measured in zip(row["predicted_bytes"], row["measured_bytes"], strict=True)
    ]
    lines = [
        [
            str(row["ranks"]),
            _worded(row["way"]),
            str(row["micro_batches"]),
            row["plan"],
            f"{max(row['predicted_bytes']):,}",
            f"{max(row['measured_bytes']):,}",
            f"{max((m - p for p, m in zip(row['predicted_bytes'], row['measured_bytes'], strict=True)), key=abs):+d}",
            ""
            if row["estimate_bytes"] is None
            else f"{row['estimate_bytes']:,} ({100 * (row['estimate_bytes'] / max(row['measured_bytes']) - 1):+.0f} %)",
            _tracked(row),
        ]
        for row in rows
        if row["way"] != "one process"
    ]
    exact = sum(not each for each in off)
    heads = [
        "ranks",
        "way",
        "micro-batches",
        "plan",
        "predicted",
        "measured",
        "off (any rank)",
        "DeepSpeed's estimate",
        "FSDPMemTracker",
    ]
    worst = f"; the largest error is {max(off)} bytes" if max(off) else ""
    return (
        f"Bytes of the fullest rank. Of {len(off)} peaks, of each rank and of one process alone, {exact} are predicted to the byte{worst}.\n\n"
        + measuring.table(heads, lines)
    )


def _tracked(row: Mapping[str, Any]) -> str:
    """What torch's tracker says, and by how many bytes it is off."""
    said = row.get("tracked_bytes")
    return "" if said is None else f"{said:,} ({said - max(row['measured_bytes']):+,})"


def _hand(rows: Rows) -> str:
    parts = []
    for ranks in sorted({row["ranks"] for row in rows if row["row"] == "hand"}):
        own = [row for row in rows if row["row"] == "hand" and row["ranks"] == ranks]
        hand = max(next(row for row in own if row["name"] == "by hand, every block")["measured_bytes"])
        lines = [
            [
                row["name"],
                f"{max(row['measured_bytes']):,}",
                f"{max(row['measured_bytes']) / hand:.3f}",
                f"{row['time_ratio']:.3f}",
                f"{row['quartiles'][0]:.3f} to {row['quartiles'][1]:.3f}",
                str(row["micro_batches"]),
                _tracked(row),
            ]
            for row in own
        ]
        heads = [
            "ZeRO 3",
            "peak of the fullest rank",
            "peak / every block",
            "time / every block",
            "quartiles",
            "micro-batches",
            "FSDPMemTracker",
        ]
        seconds = next(row for row in own if row["name"] == "by hand, every block")["seconds"]
        parts.append(
            f"{ranks} ranks, {own[0]['rounds']} rounds; every block by hand takes {seconds:.3f} s of processor time a step.\n\n{measuring.table(heads, lines)}"
        )
    return "\n\n".join(parts)


def _others(rows: Rows) -> str:
    lines = []
    for row in rows:
        if row["row"] != "other":
            continue
        way = f"1f1b/{row['ranks']}" if row["way"] == "1f1b" else row["way"]
        plans = [
            each
            for each in rows
            if each["row"] == "peak"
            and (each["ranks"], each["way"]) == (row["ranks"], way)
            # A pipeline was planned for in one number of micro-batches; a rank's own batch is divided by nobody else here.
            and (row["way"] == "1f1b" or each["micro_batches"] == 1)
        ]
        for plan in (each for each in plans if each["plan"] == "plain" or each is plans[-1]):
            hand, ours = max(row["measured_bytes"]), max(plan["measured_bytes"])
            lines.append(
                [
                    str(row["ranks"]),
                    row["name"],
                    f"{hand:,}",
                    _worded(plan["way"]),
                    plan["plan"],
                    f"{ours:,}",
                    f"{ours / hand:.3f}",
                ]
            )
    heads = ["ranks", "by hand", "its peak", "memfit", "plan", "its peak", "of the other's"]
    return "Peaks of the fullest rank.\n\n" + measuring.table(heads, lines)


def _beside(rows: Rows) -> str:
    beside = [row for row in rows if row["row"] == "beside"]
    lines = [
        [
            str(row["ranks"]),
            row["name"],
            f"{max(row['rival_bytes']):,}",
            f"{1e3 * row['rival_seconds']:.0f} ms, {1e3 * row['rival_clock_seconds']:.0f} ms by the clock",
            *(
                cell
                for which in ("plan", "free")
                for cell in (
                    f"{_worded(row[which]['way'])}, {counted(row[which]['micro_batches'], 'micro-batch')}",
                    f"{max(row[which]['measured_bytes']):,}",
                    _with_quartiles(row[which]["quartiles"][0], row[which]["time_ratio"], row[which]["quartiles"][1]),
                    _with_quartiles(*row[which]["clock_ratio"]),
                )
            ),
        ]
        for row in beside
    ]
    of_plan = ["its peak", "processor time over the other's", "by the clock"]
    heads = ["ranks", "by hand", "its peak", "its time", "memfit, in the same way", *of_plan, "memfit, free to choose", *of_plan]  # fmt: skip
    counts = sorted({(row["rounds"], row["starts"]) for row in beside})
    return (
        "Plans in the bytes that the other takes. Processor time of a rank, of all ranks together within a round, and the time by the clock until the last "
        "rank is through, in which ranks wait for each other; medians (and quartiles) of "
        f"{' and '.join(f'{rounds} rounds in {starts} starts of the ranks' for rounds, starts in counts)}.\n\n{measuring.table(heads, lines)}"
    )


def _with_quartiles(low: float, middle: float, high: float) -> str:
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _seconds(rows: Rows) -> str:
    lines = [
        [
            str(row["ranks"]),
            str({"1f1b": "a pipeline (1F1B)", **WORDS}.get(row["way"], row["way"])),
            str(row["micro_batches"]),
            f"{1e3 * row['predicted_seconds']:.0f} ms",
            f"{1e3 * row['clock_seconds'][1]:.0f} ms ({1e3 * row['clock_seconds'][0]:.0f} to {1e3 * row['clock_seconds'][2]:.0f})",
            f"{1e3 * row['processor_seconds']:.0f} ms",
            f"{row['predicted_seconds'] / row['clock_seconds'][1]:.2f}",
        ]
        for row in rows
    ]
    heads = [
        "processes",
        "way",
        "micro-batches",
        "predicted",
        "by the clock",
        "processor time of a rank",
        "predicted / by the clock",
    ]
    return measuring.table(heads, lines)
