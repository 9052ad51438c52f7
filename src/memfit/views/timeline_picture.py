"""Bytes over one step, stacked by what they are for, under the budget; the plain step and what was measured beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

from memfit.units import format_bytes
from memfit.values.plan import Plan
from memfit.values.prediction import Prediction
from memfit.values.report import Rehearsal
from memfit.views import colours
from memfit.views.axes import Scale, below, byte_ticks, frame, number_ticks, spread
from memfit.views.drawing import (
    GRID,
    INK,
    QUIET,
    Dot,
    Drawing,
    Hover,
    Line,
    Point,
    Polygon,
    Shape,
    Text,
    box,
    shortened,
    text_width,
    wrapped,
)
from memfit.views.labels import Area, place_label
from memfit.views.layout import WIDE, Layout
from memfit.views.verdict import error_text

_TOP: Final = 92.0
_PLOT_HEIGHT: Final = 300.0
_LINE_HEIGHT: Final = 17.0
_MEASURED_HEIGHT: Final = 84.0
_MOST_HOVERS: Final = 160
_NO_CURVE: Final = "this plan carries no curve: drawn are the bytes at its peak"
# A line farther up than this many times the plan's own bytes would flatten the plan; it is named, not drawn.
_FARTHEST_PLAIN: Final = 4.0
_FARTHEST_BUDGET: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Band:
    """Bytes of one category at every moment."""

    key: str
    name: str
    colour: str
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Level:
    """A number of bytes drawn as a line across the plot, its name beside it."""

    name: str
    bytes: int
    colour: str
    dash: tuple[float, ...]
    farthest: float = math.inf
    remark: str = ""


def timeline_picture(plan: Plan, rehearsal: Rehearsal | None = None, layout: Layout = WIDE) -> Drawing:
    """Draw what the plan predicts for a step, and what the rehearsal measured."""
    prediction = plan.prediction
    moments, bands = _bands(prediction)
    totals = [sum(column) for column in zip(*(band.bytes for band in bands), strict=True)] or [0]
    own = max(*totals, prediction.peak_bytes, 1)
    levels = _levels(plan, rehearsal)
    wanted = max(level.bytes for level in levels if level.bytes <= level.farthest * own)
    width = layout.width - layout.left if not layout.narrow else layout.width
    left = 0.0 if layout.narrow else layout.left
    about = wrapped(_subtitle(plan), width) if layout.narrow else [shortened(_subtitle(plan), width)]
    top = _TOP + _LINE_HEIGHT * (len(about) - 1)
    y = Scale(0, 1.06 * max(own, wanted), top + _PLOT_HEIGHT, top)
    shapes: list[Shape] = [
        Text(left, 18, "Bytes over the step", size=16, bold=True),
        *(Text(left, 38 + _LINE_HEIGHT * i, line, colour=QUIET) for i, line in enumerate(about)),
    ]
    if len(moments) > 1:
        x = Scale(min(0, moments[0]), moments[-1], layout.left, layout.right)
        shapes += _phases(prediction.phases[: len(moments)], moments, x, y)
        ticks = number_ticks(x.low, x.high, most=4 if layout.narrow else 7, least=1)
        shapes += frame(x, y, ticks, byte_ticks(0, y.high), _event_label(plan, layout))
        shapes += _stack(bands, moments, x, y)
        curve = [tuple((x(m), y(n)) for m, n in part) for part in _plain_parts(prediction, moments, totals, y.high)]
        for points in curve:
            shapes += [Line(points, "#ffffff", 3), Line(points, colours.PLAIN, 1.3)]
        peak = totals.index(max(totals))
        marker = Dot(
            x(moments[peak]), y(totals[peak]), 4.5, colours.PREDICTED, title=_moment(prediction, bands, moments, peak)
        )
    else:
        x = Scale(0, 1, layout.left, layout.right)
        curve = []
        reason = _NO_CURVE if bands else "this plan carries no curve"
        shapes += frame(x, y, [], byte_ticks(0, y.high), shortened(reason, layout.width - layout.left))
        shapes += _stack(bands, (0.4, 0.6), x, y)
        marker = None
    shapes += _level_lines(levels, x, y)
    bottom = y.start + 62
    if layout.narrow:
        key, bottom = _key_below(levels, layout, bottom, y.high)
        shapes += key
    else:
        shapes += _level_names(levels, layout, y)
    if curve:
        shapes += _curve_name(plan, curve, [(x(m), y(n)) for m, n in zip(moments, totals, strict=True)], shapes, x, y)
    if len(moments) > 1 and marker is not None:
        if not layout.narrow:  # nobody points at a phone without touching, and touching shows nothing
            shapes += _hovers(prediction, bands, moments, totals, x)
        shapes.append(marker)
    legend, bottom = _legend(prediction, bands, totals, layout, bottom)
    shapes += legend
    if rehearsal is not None and len(rehearsal.curve) > 1:
        strip, bottom = _measured(rehearsal, plan.budget_bytes, layout, bottom + 22)
        shapes += strip
    return Drawing(layout.width, bottom, tuple(shapes), _label(levels))


def _subtitle(plan: Plan) -> str:
    p = plan.prediction
    where = p.peak_module or "outside any module"
    text = f"Peak in {p.peak_phase}, {where}" if p.peak_phase else f"Peak {where}"
    text += f" ({p.peak_operation})." if p.peak_operation else "."
    return text


def _event_label(plan: Plan, layout: Layout) -> str:
    parts = plan.choices.micro_batches
    if layout.narrow:
        return "operations of one micro-batch, then the rest" if parts > 1 else "operations of the step, in order"
    if parts > 1:
        return f"operations and unpacks of one of {parts} micro-batches, then of the rest of the step"
    return "operations and unpacks of the step, in order"


def _label(levels: list[_Level]) -> str:
    lines = ", ".join(f"{level.name} {format_bytes(level.bytes)}" for level in levels)
    return f"Bytes held over one training step, stacked by category: {lines}."


def _bands(prediction: Prediction) -> tuple[tuple[float, ...], list[_Band]]:
    """Moments and the bands that are not empty; without a curve, one moment: the peak."""
    count = min([len(prediction.moments), *map(len, prediction.curve.values())]) if prediction.curve else 0
    moments: tuple[float, ...] = prediction.moments[:count]
    series = {str(key): tuple(values[:count]) for key, values in prediction.curve.items()}
    if count < 2 or moments[-1] <= moments[0] or not any(map(any, series.values())):
        moments, series = (0,), {str(k): (n,) for k, n in prediction.categories_at_peak.items()}
    order = [*colours.BANDS, *(key for key in series if key not in colours.BANDS)]
    bands = [
        _Band(
            key,
            *colours.BANDS.get(key, (key.replace("_", " "), colours.UNKNOWN_BAND)),
            tuple(max(0, n) for n in series[key]),
        )
        for key in map(str, order)
        if any(series.get(key, ()))
    ]
    return moments, bands


def _levels(plan: Plan, rehearsal: Rehearsal | None) -> list[_Level]:
    p = plan.prediction
    levels = [
        _Level("plain peak", p.plain_peak_bytes, colours.PLAIN, (1, 3), _FARTHEST_PLAIN),
        _Level("budget", plan.budget_bytes, colours.BUDGET, (7, 4), _FARTHEST_BUDGET),
        _Level("predicted peak", p.peak_bytes, colours.PREDICTED, (2, 3)),
    ]
    if rehearsal is not None:
        remark = f"prediction: {error_text(rehearsal.predicted_peak_bytes, rehearsal.measured_peak_bytes)}"
        levels.append(_Level("measured peak", rehearsal.measured_peak_bytes, colours.MEASURED, (), remark=remark))
    return levels


def _plain_parts(
    prediction: Prediction, moments: tuple[float, ...], totals: list[int], high: float
) -> list[tuple[Point, ...]]:
    """The plain curve, cut off where it leaves the picture; nothing when it is the plan's own."""
    other = prediction.plain_curve if list(prediction.plain_curve) != totals else ()
    return below(list(zip(moments, other, strict=False)), high)


def _curve_name(
    plan: Plan, curve: Sequence[Sequence[Point]], top: Sequence[Point], shapes: Sequence[Shape], x: Scale, y: Scale
) -> list[Text]:
    """What the plain curve is, beside it and, where there is room, not on the stack of the plan."""
    # Under a plan that splits, the curve is of one part with nothing dropped; the plain peak is of the whole batch.
    text = "plain step" if plan.choices.micro_batches == 1 else "this part with nothing dropped"
    name = Text(0, 0, text, colour=colours.PLAIN, bold=True, halo=True)
    taken = [s for s in shapes if isinstance(s, Text)]
    lines = [*curve, *(s.points for s in shapes if isinstance(s, Line) and s.colour != GRID and len(s.points) == 2)]
    stack = [Area(a[0], min(a[1], b[1]), b[0], y.start) for a, b in pairwise(top[:: max(1, len(top) // 60)])]
    room = Area(x.start + 4, y.end + 2, x.end - 4, y.start - 4)
    points = [point for part in curve for point in part[:: max(1, len(part) // 20)]]
    placed = place_label(name, points, room, taken, lines=lines, areas=stack)
    return [placed] if placed is not None else []


def _level_lines(levels: list[_Level], x: Scale, y: Scale) -> list[Shape]:
    """Lines across the plot. Dashes over what is drawn through: where lines coincide, all can be seen."""
    return [
        Line(((x.start, y(level.bytes)), (x.end, y(level.bytes))), level.colour, 1.5, level.dash)
        for level in sorted(levels, key=lambda level: bool(level.dash))
        if level.bytes <= y.high
    ]


def _level_names(levels: list[_Level], layout: Layout, y: Scale) -> list[Shape]:
    """Names of the lines, kept apart, in the margin."""
    shapes: list[Shape] = []
    right = layout.right
    levels = sorted(levels, key=lambda level: -level.bytes)  # Downwards, so that the leader lines do not cross.
    room = layout.width - right - 24
    remarks = [wrapped(level.remark, room, 11) for level in levels]
    sizes = [19.0 + 15 * len(lines) for lines in remarks]
    centres = spread([y(level.bytes) for level in levels], sizes, y.end - 22, y.start + 10)
    for level, lines, size, centre in zip(levels, remarks, sizes, centres, strict=True):
        above = level.bytes > y.high
        baseline = centre - size / 2 + 13.5
        if not above:
            height = y(level.bytes)
            shapes.append(Line(((right, height), (right + 6, height), (right + 20, baseline - 4)), level.colour, 1))
        text = f"{level.name} {format_bytes(level.bytes)}" + (" ↑" if above else "")
        shapes.append(Text(right + 24, baseline, text, colour=level.colour, bold=True))
        shapes += [Text(right + 24, baseline + 15 * i, line, 11, colour=QUIET) for i, line in enumerate(lines, 1)]
    return shapes


def _key_below(levels: list[_Level], layout: Layout, top: float, high: float) -> tuple[list[Shape], float]:
    """Names of the lines below the plot, the highest first; returns the shapes and where they end."""
    shapes: list[Shape] = []
    for level in sorted(levels, key=lambda level: -level.bytes):
        shapes.append(Line(((0, top - 4), (24, top - 4)), level.colour, 1.5, level.dash))
        text = f"{level.name} {format_bytes(level.bytes)}" + (" ↑" if level.bytes > high else "")
        shapes.append(Text(32, top, text, colour=level.colour, bold=True))
        for line in wrapped(level.remark, layout.width - 32, 11):
            top += 15
            shapes.append(Text(32, top, line, 11, colour=QUIET))
        top += 20
    return shapes, top + 6


def _phases(phases: tuple[str, ...], moments: tuple[float, ...], x: Scale, y: Scale) -> list[Shape]:
    """Light bands behind the plot, and a strip with their names above it."""
    shapes: list[Shape] = []
    runs = [(name, moments[next(members)[0]]) for name, members in groupby(enumerate(phases), key=lambda m: m[1])]
    spans = [
        (name, x(start if i else x.low), x(runs[i + 1][1] if i + 1 < len(runs) else x.high))
        for i, (name, start) in enumerate(runs)
    ]
    for name, start, end in spans:
        back, strip = colours.PHASES.get(name, colours.UNKNOWN_PHASE)
        shapes.append(box(start, y.end, end, y.start, back))
        shapes.append(box(start, y.end - 9, end, y.end - 1, strip))
    named = [span for span in spans if span[0]]
    if sum(text_width(name) + 10 for name, _, _ in named) > x.end - x.start:
        named = [span for span in named if text_width(span[0]) < span[2] - span[1]]
    sizes = [text_width(name) + 10 for name, _, _ in named]
    centres = spread([(start + end) / 2 for _, start, end in named], sizes, x.start - 20, x.end + 8)
    for (name, start, end), centre in zip(named, centres, strict=True):
        middle = (start + end) / 2
        if abs(centre - middle) > 2:
            shapes.append(Line(((middle, y.end - 9), (centre, y.end - 15)), QUIET, 1))
        shapes.append(Text(centre, y.end - 18, name, anchor="middle", colour=QUIET))
    return shapes


def _stack(bands: list[_Band], moments: tuple[float, ...], x: Scale, y: Scale) -> list[Shape]:
    shapes: list[Shape] = []
    floor = [0] * len(moments)
    for band in bands:
        values = band.bytes if len(band.bytes) == len(moments) else band.bytes * len(moments)
        ceiling = [a + b for a, b in zip(floor, values, strict=True)]
        up = [(x(m), y(n)) for m, n in zip(moments, ceiling, strict=True)]
        down = [(x(m), y(n)) for m, n in zip(moments, floor, strict=True)]
        shapes.append(Polygon((*up, *reversed(down)), band.colour))
        floor = ceiling
    return shapes


def _moment(prediction: Prediction, bands: list[_Band], moments: tuple[float, ...], index: int) -> str:
    """The bytes of one moment, the top of the stack first."""
    total = sum(band.bytes[index] for band in bands)
    phase = f" ({prediction.phases[index]})" if index < len(prediction.phases) and prediction.phases[index] else ""
    lines = [f"at {moments[index]:,.0f}{phase}: {format_bytes(total)}"]
    lines += [f"{band.name} {format_bytes(band.bytes[index])}" for band in reversed(bands) if band.bytes[index]]
    if index < len(prediction.plain_curve):
        lines.append(f"plain: {format_bytes(prediction.plain_curve[index])}")
    return "\n".join(lines)


def _hovers(
    prediction: Prediction, bands: list[_Band], moments: tuple[float, ...], totals: list[int], x: Scale
) -> list[Shape]:
    """Columns that tell their highest moment."""
    stride = -(-len(moments) // _MOST_HOVERS)
    shapes: list[Shape] = []
    for first in range(0, len(moments), stride):
        last = min(first + stride, len(moments) - 1)
        highest = max(range(first, min(first + stride, len(moments))), key=lambda i: totals[i])
        left, right = x(moments[first]), x(moments[last])
        shapes.append(
            Hover(left, _TOP, max(right - left, 1), _PLOT_HEIGHT, _moment(prediction, bands, moments, highest))
        )
    return shapes


def _legend(
    prediction: Prediction, bands: list[_Band], totals: list[int], layout: Layout, top: float
) -> tuple[list[Shape], float]:
    """Names of the bands in stacking order, with their bytes at the peak; returns the shapes and where they end."""
    if not bands:
        return [], top
    peak = totals.index(max(totals))
    at_peak = {str(k): n for k, n in prediction.categories_at_peak.items()} or {b.key: b.bytes[peak] for b in bands}
    intro = "From the bottom, with bytes at the peak:"
    first = 0.0 if layout.narrow else layout.left
    shapes: list[Shape] = [Text(first, top, intro, colour=QUIET)]
    left = first + text_width(intro) * 0.9 + 8
    for band in bands:
        text = f"{band.name} {format_bytes(at_peak.get(band.key, 0))}"
        width = 18 + text_width(text)
        if left + width > layout.width and left > first:
            left, top = first, top + 20
        shapes.append(box(left, top - 10, left + 12, top + 2, band.colour))
        shapes.append(Text(left + 17, top, text))
        left += width + 8
    return shapes, top + 12


def _measured(rehearsal: Rehearsal, budget: int, layout: Layout, top: float) -> tuple[list[Shape], float]:
    """The measured bytes, on an axis of their own: they come by allocation, not by operation, and cannot be aligned."""
    curve = rehearsal.curve
    highest = max(*curve, 1)
    high = 1.1 * (max(highest, budget) if budget <= _FARTHEST_BUDGET * highest else highest)
    y = Scale(0, high, top + 14 + _MEASURED_HEIGHT, top + 14)
    x = Scale(0, len(curve) - 1, layout.left, layout.right)
    points = tuple((x(i), y(n)) for i, n in enumerate(curve))
    shapes: list[Shape] = [Text(0 if layout.narrow else layout.left, top, "Measured in the rehearsal", bold=True)]
    order = "allocations, in order (own axis)"
    if not layout.narrow:
        order = "allocations and releases, in order (another axis than above)"
    shapes += frame(x, y, [], byte_ticks(0, high, most=4), order)
    shapes.append(Polygon((*points, (x.end, y.start), (x.start, y.start)), colours.MEASURED_AREA))
    shapes.append(Line(points, INK, 1.2))
    if budget <= high:
        shapes.append(Line(((x.start, y(budget)), (x.end, y(budget))), colours.BUDGET, 1.5, (7, 4)))
        if not layout.narrow:  # there the dashes are explained between the two plots
            shapes.append(Text(x.end + 8, y(budget) + 4, "budget", colour=colours.BUDGET))
    return shapes, y.start + 26
