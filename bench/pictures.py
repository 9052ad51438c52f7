"""The charts of each question, from its kept results: what stands on which axis, and the sentence that says what a chart shows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

import charts
import measuring
from charts import Axis, Curve, Head, Key, Picture, Point, Row, Run, Strip, rounded_up, ticks

from memfit.views import colours

Rows = Sequence[Row]
MIB: Final = 1 << 20
PLAIN: Final = "plain PyTorch"


def exactness(rows: Rows, _: Any) -> dict[str, Picture]:
    """The smallest peak of each model beside its plain one, and how far the worst prediction is off."""
    smallest = Key("smallest plan, measured", charts.MEMFIT)
    worst = max(abs(row["worst_prediction_error"]) for row in rows)
    budgets, equal = sum(row["budgets"] for row in rows), sum(row["budgets"] - len(row["differences"]) for row in rows)
    shares = [row["smallest_bytes"] / row["plain_peak_bytes"] for row in rows]
    head = Head(
        "Smallest peak of each model, as a share of plain PyTorch's",
        "Behind each row: that share, and the largest error of the predicted peak over five budgets.",
        f"{len(rows)} models in five budgets each: {equal} of {budgets} steps are bit-equal to plain PyTorch, and no predicted peak is further than "
        f"{100 * worst:.4f} % from the measured one. The smallest peaks are {100 * min(shares):.0f} to {100 * max(shares):.0f} % of plain PyTorch's.",
    )
    strips = [
        Strip(
            row["model"],
            bar=(share, smallest),
            end=f"{100 * share:.0f} %, error {100 * abs(row['worst_prediction_error']):.4f} %",
        )
        for share, row in sorted(zip(shares, rows, strict=True), key=lambda pair: pair[0])
    ]
    every = [(n / 100, f"{n} %") for n in (0, 25, 50, 75, 100)]
    axis = Axis(0, 1, every, "of plain PyTorch's peak", every[::2])
    return {"exactness": partial(charts.rows_chart, head, strips, axis)}


def slowdowns(rows: Rows, asked: Any) -> dict[str, Picture]:
    """Predicted slowdowns against measured ones, with the intervals of the latter."""
    keys = {
        "recompute only": Key("recompute only", charts.MEMFIT),
        "free choice": Key("micro-batches, too", charts.ORANGE, square=True),
    }
    computers = measuring.by_computer(rows)
    models = {row["model"] for row in rows}
    points = []
    for own in computers.values():
        plain = {row["model"]: row["times"] for row in own if row["row"] == "plain"}
        for row in own:
            if row["row"] == "plain":
                continue
            low, middle, high = asked.interval(asked.ratios(row["times"], plain[row["model"]]))
            title = f"{row['model']}, {row['row']}: predicted {row['predicted_ratio']:.3f}, measured {middle:.3f}"
            points.append(Point(row["predicted_ratio"], middle, keys[row["choice"]], title, low, high))
    off = [abs(point.y - point.x) for point in points]
    on = f" on {len(computers)} computers" if len(computers) > 1 else ""
    ends = [value for point in points for value in (point.x, point.low or point.y, point.high or point.y)]
    low, high = min(0.9, min(ends) - 0.02), rounded_up(max(ends), 0.1)
    every = [n / 10 for n in range(9, round(10 * high) + 1)]
    head = Head(
        "Predicted slowdowns beside measured ones",
        "Time of a step over the plain step's. Lines through points: 95 % intervals. Dotted: 3 points off.",
        f"Slowdowns of {len(models)} models in {len(points)} plans{on}: {sum(each <= 0.03 for each in off)} are within 3 points of what was predicted, all "
        f"within {100 * max(off):.1f}.",
        [*keys.values(), Key("predicted = measured", colours.QUIET, line=True)],
    )
    axis = Axis(
        low, high, ticks(every[:: 1 if len(every) < 9 else 2], "{:.1f}"), "predicted", ticks(every[1::2], "{:.1f}")
    )
    return {"slowdowns": lambda layout: charts.scatter(head, points, axis, "measured", layout, beside=0.03)}


RIVALS: Final = {
    "torch checkpoint, blocks": Key("torch checkpoint", charts.ORANGE),
    "torch checkpoint, segments": Key("torch checkpoint", charts.ORANGE),
    "torch selective checkpoint": Key("selective checkpoint", charts.RED),
    "HF activation checkpointing": Key("Hugging Face's", charts.PINK),
    "torch.compile": Key("torch.compile", charts.GREEN),
    "hooks that save to disk": Key("hooks that save to disk", charts.GREY),
}
WHOLE: Final = Key("memfit, batch whole", charts.MEMFIT)
# The sky blue of the palette is like the blue of memfit on a dark screen.
SPLIT: Final = Key("memfit, micro-batches, too", colours.INK, square=True)


def frontier(rows: Rows, _: Any) -> dict[str, Picture]:
    """Peak against time of ten models, memfit's plans and what other tools do; `save_on_cpu`, which does nothing on a CPU, is left out."""
    parts, best = [], []
    for model, group in groupby(rows, key=lambda row: row["model"]):
        own = [row for row in group if row["kind"] in {"rival", "memfit"} and row["who"] != "save_on_cpu"]
        plain = next(row for row in own if row["row"] == "plain")
        curves: dict[str, list[tuple[float, float, str]]] = {}
        keys: dict[str, Key] = {}
        for row in own:
            key = (
                Key(PLAIN, colours.PLAIN, ring=True)
                if row is plain
                else RIVALS[row["who"]]
                if row["who"] != "memfit"
                else WHOLE
                if row["choice"] == "recompute only"
                else SPLIT
            )
            ratio = measuring.quartiles(a / b for a, b in zip(row["times"], plain["times"], strict=True))[1]
            share = row["peak_bytes"] / plain["peak_bytes"]
            words = f"{row['who']}, {row['setting']}: {share:.2f} of the plain peak, {ratio:.2f} of the plain time"
            curves.setdefault(key.name, []).append((share, ratio, words))
            keys[key.name] = key
        best.append(min(share for share, _, _ in curves[WHOLE.name]))
        shown = [Curve(points, keys[name], joined=keys[name] in {WHOLE, SPLIT}) for name, points in curves.items()]
        parts.append((f"{model}, {plain['peak_bytes'] / MIB:.0f} MiB", shown))
    head = Head(
        "Peak against time, beside other tools",
        "Across: peak. Up: time of a step. Both over plain PyTorch's; its peak stands beside the name. ↑: above the axis.",
        f"Peaks and times of {len(parts)} models beside plain PyTorch's. With the batch whole, memfit's smallest plans take {100 * min(best):.0f} to "
        f"{100 * max(best):.0f} % of the plain peak; five other ways to save activations stand beside them.",
        [WHOLE, SPLIT, *dict.fromkeys(RIVALS.values()), Key(PLAIN, colours.PLAIN, ring=True)],
    )
    x_axis = Axis(0, 1.1, ticks((0, 0.25, 0.5, 0.75, 1), "{:.2g}"), "peak / plain peak", ticks((0, 0.5, 1), "{:.2g}"))
    y_axis = Axis(0.5, 2.75, ticks((0.5, 1, 1.5, 2, 2.5), "{:.1f}"), "time / plain time")
    return {"frontier": partial(charts.panels, head, parts, x_axis, y_axis)}


def published(rows: Rows, asked: Any) -> dict[str, Picture]:
    """Each published peak with the predicted one."""
    there, ours = Key("published", colours.INK, ring=True), Key("predicted", charts.MEMFIT)
    errors = [abs(asked.error_of(row)) for row in rows]
    strips, before = [], ""
    for row in rows:
        figure, predicted = row["mib"] / 1024, asked.bytes_of(row) / 2**30
        marks = [
            (figure, there, f"published: {row['mib']:,} MiB"),
            (predicted, ours, f"predicted: {predicted * 1024:,.0f} MiB"),
        ]
        group = "" if row["source"] == before else f"{row['source']}, {row['card']}"
        before = row["source"]
        strips.append(
            Strip(
                row["name"], marks, joined=(figure, predicted), end=f"{100 * asked.error_of(row):+z.1f} %", group=group
            )
        )
    head = Head(
        "Published peaks beside predicted ones",
        "Predicted on a computer without a GPU. Behind each row: predicted over published, less one.",
        f"{len(rows)} published peaks of V100s: the predicted ones are off by {100 * statistics.median(errors):.1f} % (median), "
        f"{sum(error <= 0.05 for error in errors)} by at most 5 %, the worst by {100 * max(errors):.1f} %.",
        [there, ours],
    )
    high = rounded_up(max(row["mib"] / 1024 for row in rows), 5)
    every = ticks((5.0 * n for n in range(int(high // 5) + 1)), "{:.0f} GiB")
    axis = Axis(0, high, every, "peak of a training step", every[::2])
    return {"published": partial(charts.rows_chart, head, strips, axis)}


def published_seconds(rows: Rows, asked: Any) -> dict[str, Picture]:
    """Errors of predicted seconds by GPU, each predicted by constants that were fitted without that GPU."""
    steps = [row for row in rows if row["kind"] == "step"]
    one, middle = Key("a published step", charts.MEMFIT), Key("median of the GPU", charts.ORANGE, line=True)
    errors = [abs(asked.error_of(row, "unseen")) for row in steps]
    end, strips = 0.5, []
    for device in sorted({row["device"] for row in steps}):
        mine = [row for row in steps if row["device"] == device]
        found = [asked.error_of(row, "unseen") for row in mine]
        beyond = [each for each in found if each > end]
        marks = [
            (error, one, f"{row['name']}: {100 * error:+.0f} %")
            for error, row in zip(found, mine, strict=True)
            if error <= end
        ]
        marks.append((statistics.median(found), middle, f"median {100 * statistics.median(found):+.0f} %"))
        told = f"{len(mine)} steps" + (f", {len(beyond)} beyond: up to {100 * max(beyond):+.0f} %" if beyond else "")
        strips.append(Strip(device, marks, end=told))
    head = Head(
        "Predicted seconds of published steps: the error on each GPU",
        "Predicted over published, less one; the constants were fitted without that GPU. Grey: within 20 %.",
        f"{len(steps)} published steps of {len(strips)} GPUs, each predicted by constants that were fitted without its GPU: "
        f"{sum(each <= 0.2 for each in errors)} are within 20 %, the median error is {100 * statistics.median(errors):.0f} %.",
        [one, middle],
    )
    axis = Axis(
        -end, end, [(n / 100, f"{n:+d} %" if n else "0") for n in range(-40, 41, 20)], "error",
        [(n / 100, f"{n:+d} %" if n else "0") for n in (-40, 0, 40)],
    )  # fmt: skip
    return {"published-seconds": partial(charts.rows_chart, head, strips, axis, shaded=(-0.2, 0.2))}


def sharding(rows: Rows, asked: Any) -> dict[str, Picture]:
    """Peaks of the fullest of two ranks, and seconds of plain steps."""
    del asked
    from sharding.tables import WORDS  # a folder of the question's own

    return {"sharding-peaks": _sharding_peaks(rows, WORDS), "sharding-seconds": _sharding_seconds(rows, WORDS)}


def _sharding_peaks(rows: Rows, words: Mapping[str, str]) -> Picture:
    keys = {
        "plain": Key("nothing recomputed", colours.PLAIN),
        "half way": Key("half way between", charts.PINK),
        "85 % of plain": Key("a budget of 85 %", charts.GREEN),
        "smallest": Key("smallest plan", charts.MEMFIT),
    }
    guess = Key("DeepSpeed's estimate, without activations", charts.ORANGE, ring=True)
    peaks = [row for row in rows if row["row"] == "peak" and row["ranks"] == 2]
    every = [
        abs(predicted - measured)
        for row in rows
        if row["row"] == "peak"
        for predicted, measured in zip(row["predicted_bytes"], row["measured_bytes"], strict=True)
    ]
    order = sorted(peaks, key=lambda row: (row["way"] not in words, row["way"], row["micro_batches"]))
    strips = []
    for (way, parts), group in groupby(order, key=lambda row: (row["way"], row["micro_batches"])):
        own = list(group)
        marks = [
            (
                max(row["measured_bytes"]) / MIB,
                keys[row["plan"]],
                f"{row['plan']}: {max(row['measured_bytes']):,} bytes",
            )
            for row in own
        ]
        joined = min(value for value, _, _ in marks), max(value for value, _, _ in marks)
        if own[0]["estimate_bytes"] is not None:
            marks.append((own[0]["estimate_bytes"] / MIB, guess, f"estimate: {own[0]['estimate_bytes']:,} bytes"))
        several = f", {parts} micro-batches" if parts > 1 else ""
        name = (
            words.get(way)
            or {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "interleaved 1F1B"}[way.partition("/")[0]]
        )
        strips.append(Strip(f"{name}{several}", marks, joined=joined))
    high = rounded_up(max(value for strip in strips for value, _, _ in strip.marks), 5)
    ends = ticks((5.0 * n for n in range(int(high // 5) + 1)), "{:.0f} MiB")
    exact = sum(not each for each in every)
    told = f"{exact} of {len(every)} measured peaks of ranks are the predicted ones to the byte, the worst is {max(every):,} bytes off."
    head = Head(
        "Peak of the fullest of two ranks",
        "A small GPT in gloo processes on a CPU; measured.",
        told if exact < len(every) else f"All {exact} measured peaks of ranks are the predicted ones to the byte.",
        [*keys.values(), guess],
    )
    return partial(charts.rows_chart, head, strips, Axis(0, high, ends, "bytes at the peak", ends[::2]))


def _sharding_seconds(rows: Rows, words: Mapping[str, str]) -> Picture:
    steps = [row for row in rows if row["row"] == "seconds"]
    predicted, measured = Key("predicted", charts.MEMFIT), Key("measured, by the clock", colours.INK, ring=True)
    strips, before = [], 0
    for row in sorted(steps, key=lambda row: row["ranks"]):
        pair = 1000 * row["predicted_seconds"], 1000 * row["clock_seconds"][1]
        marks = [(pair[0], predicted, f"predicted {pair[0]:.0f} ms"), (pair[1], measured, f"measured {pair[1]:.0f} ms")]
        name = {"one process": "one process", "1f1b": "1F1B"}.get(row["way"]) or words[row["way"]]
        group = "" if row["ranks"] == before else "one process" if row["ranks"] == 1 else f"{row['ranks']} ranks"
        before = row["ranks"]
        strips.append(Strip(name, marks, joined=(pair[0], pair[1]), end=f"{pair[0] / pair[1]:.2f}", group=group))
    shares = [row["predicted_seconds"] / row["clock_seconds"][1] for row in steps]
    high = rounded_up(max(value for strip in strips for value, _, _ in strip.marks), 20)
    every = ticks((20.0 * n for n in range(int(high // 20) + 1)), "{:.0f} ms")
    head = Head(
        "Seconds of plain steps on several ranks",
        "Until the last rank is through, on a computer with two cores. Behind each row: predicted over measured.",
        f"Seconds of {len(steps)} plain steps on one to four ranks: predicted ones are {min(shares):.2f} to {max(shares):.2f} of the measured ones.",
        [predicted, measured],
    )
    return partial(charts.rows_chart, head, strips, Axis(0, high, every, "by the clock", every[::2]))


def tune(rows: Rows, asked: Any) -> dict[str, Picture]:
    """Thirty runs over time, as each way starts them, below the budget or above it."""
    ways = asked.own_runs.in_order([row for row in rows if row["part"] == "own runs" and "ran" in row])
    if not ways:
        return {}
    budget = asked.own_runs.BUDGET / MIB
    parts = []
    for row in ways:
        told = f"{row['done']} done in {row['seconds'] / 60:.1f} min, at most {row['most_bytes'] / MIB:.0f} MiB"
        futile = row["launched"] - row["done"]
        if futile:
            told += f", {futile} launched that cannot fit"
        runs = [Run(begin / 60, end / 60, size / MIB) for begin, end, size in row["ran"]]
        parts.append((f"{row['way']}: {told}", runs))
    longest = max(run.end for _, runs in parts for run in runs)
    every = 2.0 if longest <= 10 else 5.0
    longest = rounded_up(longest, every)
    over = [row for row in ways if row["over_seconds"]]
    exceeded = "; ".join(f"{row['way']}: {row['over_seconds']:.0f} s above it" for row in over)
    head = Head(
        f"Thirty runs in {budget:.0f} MiB",
        "Measured peaks of the runs that go on at a time, on top of each other. What each way did is above its panel.",
        f"Thirty runs in {budget:.0f} MiB over time: packed by memfit in {ways[0]['seconds'] / 60:.1f} minutes and never above the budget"
        + (f"; {exceeded}." if over else "."),
        [
            Key("a run", charts.LAYERS[0], square=True),
            Key("above the budget", charts.RED, square=True),
            Key("launched, cannot fit", colours.INK, line=True),
            Key("budget", colours.BUDGET, line=True, dash=(7, 4)),
        ],
    )
    most = rounded_up(max(budget, *(row["most_bytes"] / MIB for row in ways)), 50)
    minutes = ticks((every * n for n in range(round(longest / every) + 1)), "{:.0f} min")
    y_axis = Axis(0, most, ticks((0, 50, 100, 150), "{:.0f} MiB"), "")
    x_axis = Axis(0, longest, minutes, "since the search began", minutes[::2])
    return {
        "tune-packing": lambda layout: charts.stacked_runs(head, parts, x_axis, y_axis, budget, layout),
    }


def service(rows: Rows, _: Any) -> dict[str, Picture]:
    """How long runs wait under each policy, where seconds are as predicted."""
    keys = {name: Key(name, colour) for name, colour in (("the service", charts.MEMFIT), ("others", charts.GREY))}
    names = {"drawn": "drawn runs", "planned": "planned runs"}
    asked = [row for row in rows if row.get("part") == "schedules" and row["case"] == "as predicted"]
    strips, before = [], ""
    for row in asked:
        key = keys.get(row["policy"], keys["others"])
        group = "" if row["runs"] == before else names.get(row["runs"], f"published trace {row['runs']}")
        before = row["runs"]
        hours = row["mean_wait"] / 3600
        strips.append(Strip(row["policy"], bar=(hours, key), end=f"{hours:.1f} h", group=group))
    mean = {(row["runs"], row["policy"]): row["mean_wait"] for row in asked}
    shares = [
        mean[kind, "the service"] / mean[kind, "first come, first served"] for kind in {row["runs"] for row in asked}
    ]
    head = Head(
        "How long runs wait, on the mean",
        "Simulated, with the seconds of runs as predicted.",
        f"On the mean, runs wait {100 * min(shares):.0f} to {100 * max(shares):.0f} % as long in the service as first come, first served (simulated).",
    )
    high = rounded_up(max(strip.bar[0] for strip in strips if strip.bar), 5)
    every = ticks((5.0 * n for n in range(int(high // 5) + 1)), "{:.0f} h")
    return {"service-waits": partial(charts.rows_chart, head, strips, Axis(0, high, every, "mean wait", every[::2]))}


OF: Final[Mapping[str, Callable[[Rows, Any], dict[str, Picture]]]] = {
    "exactness": exactness,
    "slowdowns": slowdowns,
    "frontier": frontier,
    "published": published,
    "published_seconds": published_seconds,
    "sharding": sharding,
    "tune": tune,
    "service": service,
}
"""Questions with charts."""
