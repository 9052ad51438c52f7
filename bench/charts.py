"""Charts of results, of the shapes that memfit's own pictures are made of: each laid out for a desk's screen and for a phone, light and dark.

A question with charts has `pictures(rows)`: names of files, and what draws each in a layout. `bench/run.py --pages` writes them beside the tables, and a test
compares them with the results as it compares the tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

from memfit.views import colours
from memfit.views.axes import Scale, Tick, frame
from memfit.views.drawing import GRID, INK, QUIET, Dot, Drawing, Line, Shape, Text, box, shortened, text_width, wrapped
from memfit.views.labels import area_of
from memfit.views.layout import Layout

Row = Mapping[str, Any]
Picture = Callable[[Layout], Drawing]

MEMFIT: Final = colours.PREDICTED
# Of others, from the palette of `memfit.views.colours`, which people with any of the common colour blindnesses tell apart.
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
PINK: Final = "#CC79A7"
SKY: Final = "#56B4E9"
RED: Final = "#D55E00"
GREY: Final = "#999999"
LAYERS: Final = (SKY, "#0072B2", GREY)  # of neighbours in a stack

_BOLD: Final = 1.12  # bold letters are wider than `wrapped` takes them to be
_MARGIN: Final = 12.0
_LINE: Final = 17.0


@dataclass(frozen=True, slots=True)
class Key:
    """What one mark means.

    Attributes:
        name: in words.
        colour: of the mark.
        square, ring: its shape; a ring is not filled.
        line: a line instead of a mark; `dash` as in `Line`.
    """

    name: str
    colour: str
    square: bool = False
    ring: bool = False
    line: bool = False
    dash: tuple[float, ...] = ()

    def at(self, x: float, y: float, title: str = "", radius: float | None = None) -> Dot:
        """The mark at a place; a ring is larger, so that it is seen around a mark on it."""
        radius = radius or (6.5 if self.ring else 4.0)
        fill, edge = (colours.SURFACE, self.colour) if self.ring else (self.colour, colours.SURFACE)
        return Dot(x, y, radius, fill, edge, square=self.square, title=title)


@dataclass(frozen=True, slots=True)
class Head:
    """What stands above a plot.

    Attributes:
        title, about: in words; the latter says what is on the axes.
        keys: what the marks mean.
        label: what the chart shows, in one sentence with its numbers, for who cannot see it, and for the list at the top of the page.
    """

    title: str
    about: str
    label: str
    keys: Sequence[Key] = ()

    def drawn(self, layout: Layout) -> tuple[list[Shape], float]:
        """The shapes, and where the plot may begin."""
        width = layout.width - 2 * _MARGIN
        shapes: list[Shape] = []
        y = 24.0
        for line in wrapped(self.title, width / _BOLD, 16):
            shapes.append(Text(_MARGIN, y, line, size=16, bold=True))
            y += 20
        for line in wrapped(self.about, width):
            shapes.append(Text(_MARGIN, y, line, colour=QUIET))
            y += _LINE
        x, y = _MARGIN, y + 6
        for key in self.keys:
            needed = 26 + text_width(key.name) + 14
            if x > _MARGIN and x + needed > layout.width:
                x, y = _MARGIN, y + 20
            if key.line:
                shapes.append(Line(((x, y - 4), (x + 20, y - 4)), key.colour, 1.6, key.dash))
            else:
                shapes.append(key.at(x + 10, y - 4, radius=5))
            shapes.append(Text(x + 26, y, key.name, colour=INK))
            x += needed
        return shapes, y + (16 if self.keys else 0)


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values and its ticks.

    Attributes:
        low, high: ends of the axis.
        ticks: values with their words; `few` are those of a narrow picture.
        words: what the values are.
    """

    low: float
    high: float
    ticks: Sequence[Tick]
    words: str
    few: Sequence[Tick] = field(default=())

    def for_layout(self, layout: Layout) -> Sequence[Tick]:
        """The ticks that there is room for."""
        return self.few if layout.narrow and self.few else self.ticks

    def scale(self, start: float, end: float) -> Scale:
        """Values to pixels."""
        return Scale(self.low, self.high, start, end)


def ticks(values: Iterable[float], form: str) -> list[Tick]:
    """Ticks at these values, each written by a format such as "{:.0f} %"."""
    return [(value, form.format(value)) for value in values]


def rounded_up(value: float, step: float) -> float:
    """To the next multiple of a step: where an axis may end."""
    return math.ceil(value / step - 1e-9) * step


# ------------------------------------------------------------------------------------------------- one value against another


@dataclass(frozen=True, slots=True)
class Point:
    """One mark of a scatter: `low` and `high` are the ends of an interval of y, where there is one."""

    x: float
    y: float
    key: Key
    title: str
    low: float | None = None
    high: float | None = None


def scatter(
    head: Head, points: Sequence[Point], axis: Axis, y_words: str, layout: Layout, *, beside: float = 0.0
) -> Drawing:
    """Points on two equal axes, with the line on which both values are the same, and lines `beside` it."""
    shapes, top = head.drawn(layout)
    left, right = (46.0, layout.width - 14) if layout.narrow else (84.0, 84.0 + 560)
    side = right - left
    top += 22
    x, y = axis.scale(left, right), axis.scale(top + side, top)
    shapes.append(Text(_MARGIN, top - 10, y_words, colour=QUIET))
    shapes += frame(x, y, axis.for_layout(layout), axis.for_layout(layout), axis.words)
    shapes.append(Line(((left, top + side), (right, top)), QUIET, 1.2))
    if beside:
        for off in (beside, -beside):
            low, high = axis.low + max(0.0, -off), axis.high - max(0.0, off)
            shapes.append(Line(((x(low), y(low + off)), (x(high), y(high + off))), QUIET, 1, (3, 4)))
    for point in points:
        if point.low is not None and point.high is not None:
            shapes.append(Line(((x(point.x), y(point.low)), (x(point.x), y(point.high))), point.key.colour, 1.2))
    shapes += [point.key.at(x(point.x), y(point.y), point.title) for point in points]
    return Drawing(min(layout.width, right + 40), top + side + 52, tuple(shapes), head.label)


# ------------------------------------------------------------------------------------------------- rows with marks or bars


@dataclass(frozen=True, slots=True)
class Strip:
    """One row of a chart in rows.

    Attributes:
        name: in front of it; on a phone above it.
        marks: values with their key and what is told to who points at them.
        bar: a bar from the lower end of the axis to this value, in the colour of its key.
        joined: a line between these two values, below the marks.
        end: words behind the row.
        group: a heading above it, where it is the first of several.
    """

    name: str
    marks: Sequence[tuple[float, Key, str]] = ()
    bar: tuple[float, Key] | None = None
    joined: tuple[float, float] | None = None
    end: str = ""
    group: str = ""


def rows_chart(
    head: Head, strips: Sequence[Strip], axis: Axis, layout: Layout, *, shaded: tuple[float, float] | None = None
) -> Drawing:
    """Rows one below the other on one axis. On a phone a row's name stands above it."""
    shapes, top = head.drawn(layout)
    names = max(text_width(strip.name) for strip in strips)
    # On a phone what stands behind a row stands behind its name.
    ends = 0.0 if layout.narrow else max(text_width(strip.end) for strip in strips)
    left = _MARGIN + 8 if layout.narrow else _MARGIN + names + 14
    shown = axis.for_layout(layout)
    outside = text_width(shown[-1][1]) / 2 if shown[-1][0] > axis.high - 0.05 * (axis.high - axis.low) else 0.0
    right = layout.width - max(_MARGIN + ends + (10 if ends else 4), outside + 4)
    height, pitch = (13.0, 37.0) if layout.narrow else (12.0, 22.0)
    x = axis.scale(left, right)
    y, places = top + 4, []
    for strip in strips:
        if strip.group:
            y += 12 if places else 0
            shapes.append(Text(_MARGIN, y + 14, strip.group, size=13, bold=True, halo=shaded is None))
            y += 24
        places.append(y + pitch - height - 2 if layout.narrow else y + 5)
        y += pitch
    bottom = y + 6
    if shaded is not None:
        shapes.insert(0, box(x(shaded[0]), top, x(shaded[1]), bottom, colours.MEASURED_AREA))
        shapes.insert(1, Line(((x(0), top), (x(0), bottom)), QUIET, 1))
    for value, words in shown:
        shapes.append(Line(((x(value), top), (x(value), bottom)), GRID, 1))
        shapes.append(Text(x(value), bottom + 18, words, anchor="middle", colour=QUIET))
    for strip, place in zip(strips, places, strict=True):
        middle = place + height / 2
        if strip.bar is not None:
            shapes.append(box(x(axis.low), place, x(strip.bar[0]), place + height, strip.bar[1].colour))
        if strip.joined is not None:
            shapes.append(Line(((x(strip.joined[0]), middle), (x(strip.joined[1]), middle)), QUIET, 1.4))
        shapes += [_mark(key, x(value), middle, title) for value, key, title in strip.marks]
        if layout.narrow:
            shapes.append(
                Text(_MARGIN, place - 5, shortened(strip.name, layout.width - 2 * _MARGIN), halo=shaded is None)
            )
        else:
            shapes.append(Text(left - 10, middle + 4, strip.name, anchor="end"))
        if strip.end:
            y = place - 5 if layout.narrow else middle + 4
            shapes.append(Text(layout.width - _MARGIN, y, strip.end, anchor="end", colour=QUIET))
    shapes.append(Line(((left, bottom), (right, bottom)), INK, 1))
    below = wrapped(axis.words, layout.width - 2 * _MARGIN)
    shapes += [Text(left, bottom + 36 + _LINE * i, line, colour=QUIET) for i, line in enumerate(below)]
    return Drawing(layout.width, bottom + 44 + _LINE * len(below), tuple(shapes), head.label)


def _mark(key: Key, x: float, y: float, title: str) -> Shape:
    """A key that is a line is a short upright one in a row."""
    return Line(((x, y - 9), (x, y + 9)), key.colour, 2.4) if key.line else key.at(x, y, title)


# ------------------------------------------------------------------------------------------------- panels


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points of one panel, drawn below its marks; without marks where `key` is a line."""

    points: Sequence[tuple[float, float, str]]
    key: Key
    joined: bool


def panels(
    head: Head, parts: Sequence[tuple[str, Sequence[Curve]]], x_axis: Axis, y_axis: Axis, layout: Layout
) -> Drawing:
    """Small plots with the same axes, two beside each other, on a phone one below the other. Points above the axis stand at its end, with their value."""
    shapes, top = head.drawn(layout)
    columns = 1 if layout.narrow else 2
    width, height, gap = layout.width / columns, 210.0, 74.0
    for number, (title, curves) in enumerate(parts):
        left = width * (number % columns) + 46
        right = width * (number % columns + 1) - 18
        above = top + 30 + (height + gap) * (number // columns)
        x, y = x_axis.scale(left, right), y_axis.scale(above + height, above)
        shapes.append(Text(left, above - 12, title, size=13, bold=True))
        shapes += frame(x, y, x_axis.for_layout(layout), y_axis.for_layout(layout), x_axis.words)
        for curve in curves:
            if curve.joined:
                shapes.append(Line(tuple((x(a), y(b)) for a, b, _ in sorted(curve.points)), curve.key.colour, 1.6))
        # What is compared with the lines lies on them where it is as good, so it comes last.
        for curve in sorted(curves, key=lambda each: not each.joined):
            shapes += [curve.key.at(x(a), y(b), words, 3.4 if curve.joined else 4.4) for a, b, words in curve.points]
        shapes += _beyond(curves, x, y)
    lines = -(-len(parts) // columns)
    return Drawing(layout.width, top + 30 + (height + gap) * lines - 20, tuple(shapes), head.label)


def _beyond(curves: Sequence[Curve], x: Scale, y: Scale) -> list[Shape]:
    """The values of points above the axis, one below the other where they would overlap."""
    texts: list[Text] = []
    for curve in curves:
        for a, b, _ in curve.points:
            if b > y.high:
                last = x(a) > x.end - 60
                text = Text(
                    x(a) + (-8 if last else 8), y.end + 4, f"↑ {b:.1f}", 11, "end" if last else "start", halo=True
                )
                while any(area_of(text).overlaps(area_of(other)) for other in texts):
                    text = replace(text, y=text.y + 14)
                texts.append(text)
    return list(texts)


# ------------------------------------------------------------------------------------------------- boxes over time


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a schedule: from `begin` to `end`, so many bytes high; none where it ended without taking any."""

    begin: float
    end: float
    size: float


def stacked_runs(
    head: Head, ways: Sequence[tuple[str, Sequence[Run]]], x_axis: Axis, y_axis: Axis, budget: float, layout: Layout
) -> Drawing:
    """A panel for each way: runs on top of each other over time, so that the upper edge is what all take together, and the budget as a line."""
    shapes, top = head.drawn(layout)
    left, right = (64.0, layout.width - 24) if layout.narrow else (84.0, layout.width - 30)
    height = 120.0
    for number, (name, runs) in enumerate(ways):
        above = top + 24
        for line in wrapped(name, (layout.width - 2 * _MARGIN) / _BOLD, 13):
            shapes.append(Text(_MARGIN, above, line, size=13, bold=True))
            above += _LINE
        x, y = x_axis.scale(left, right), y_axis.scale(above + height, above)
        last = number == len(ways) - 1
        shapes += frame(x, y, x_axis.for_layout(layout), y_axis.for_layout(layout), x_axis.words if last else "")
        shapes += _layers(runs, x, y, budget)
        shapes.append(Line(((left, y(budget)), (right, y(budget))), colours.BUDGET, 1.5, (7, 4)))
        top = above + height + (42 if last else 22)
    return Drawing(layout.width, top + 6, tuple(shapes), head.label)


def _layers(runs: Sequence[Run], x: Scale, y: Scale, budget: float) -> list[Shape]:
    """Between two moments at which a run begins or ends, those that run are stacked in the order in which they began."""
    shapes: list[Shape] = []
    moments = sorted({moment for run in runs for moment in (run.begin, run.end)})
    order = sorted((run for run in runs if run.size), key=lambda run: run.begin)
    boxes: dict[int, list[tuple[float, float, float]]] = {}
    for begin, end in pairwise(moments):
        base = 0.0
        for number, run in enumerate(order):
            if run.begin <= begin and end <= run.end:
                own = boxes.setdefault(number, [])
                if own and own[-1][1:] == (begin, base):
                    own[-1] = (own[-1][0], end, base)
                else:
                    own.append((begin, end, base))
                base += run.size
        if base > budget:
            shapes.append(box(x(begin), y(base), x(end), y(budget), RED))
    below: list[Shape] = []
    for number, own in boxes.items():
        for begin, end, base in own:
            left, top, right, bottom = x(begin), y(base + order[number].size), x(end), y(base)
            edge = ((left, bottom), (left, top), (right, top), (right, bottom))
            below.append(box(left, top, right, bottom, LAYERS[number % len(LAYERS)]))
            below.append(Line(edge, colours.SURFACE, 0.7))
    for run in runs:
        if not run.size:
            shapes.append(Line(((x(run.begin), y.start - 2), (x(run.end), y.start - 2)), INK, 3))
    return [*below, *shapes]
