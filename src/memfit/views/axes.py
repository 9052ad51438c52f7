"""Scales, ticks and the placing of labels: what all our pictures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memfit.views.drawing import GRID, INK, QUIET, Line, Point, Shape, Text

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
Tick = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to pixels: `low` lies at pixel `start`, `high` at pixel `end`. Values beyond are drawn at the edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def widened(low: float, high: float, *, least: float = 0.1) -> tuple[float, float]:
    """A range with some air at both ends, and never empty: at least the part `least` of its largest value."""
    size = max(high - low, least * max(abs(low), abs(high)), 1e-12)
    middle = (low + high) / 2
    return middle - 0.55 * size, middle + 0.55 * size


def byte_ticks(low: float, high: float, *, most: int = 6) -> list[Tick]:
    """Round binary numbers in a range, a power of two apart, all in one unit: 0, 2 GiB, 4 GiB."""
    step = 2.0 ** max(0, math.ceil(math.log2(max(high - low, 1) / most)))
    power = min(len(_UNITS) - 1, max(0, math.floor(math.log2(max(high, 1)) / 10)))
    return [
        (value, f"{value / 1024**power:.10g} {_UNITS[power]}" if value else "0")
        for value in _multiples(low, high, step)
    ]


def number_ticks(low: float, high: float, *, most: int = 6, least: float = 0.0, suffix: str = "") -> list[Tick]:
    """Round decimal numbers in a range, 1, 2 or 5 times a power of ten apart, and no closer than `least`."""
    rough = max((high - low) / most, least)
    power = math.floor(math.log10(rough))
    step = next(s for s in (1, 2, 5, 10) if s * 10.0**power >= rough * (1 - 1e-9)) * 10.0**power
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(value, f"{value:,.{decimals}f}{suffix}") for value in _multiples(low, high, step)]


def _multiples(low: float, high: float, step: float) -> list[float]:
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def frame(x: Scale, y: Scale, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick], x_label: str) -> list[Shape]:
    """Grid, ticks and axes of a plot with the y axis on the left; `x_label` stands below the ticks."""
    shapes: list[Shape] = []
    for value, text in y_ticks:
        shapes.append(Line(((x.start, y(value)), (x.end, y(value))), GRID, 1))
        shapes.append(Text(x.start - 8, y(value) + 4, text, anchor="end", colour=QUIET))
    for value, text in x_ticks:
        shapes.append(Line(((x(value), y.start), (x(value), y.start + 5)), QUIET, 1))
        shapes.append(Text(x(value), y.start + 18, text, anchor="middle", colour=QUIET))
    shapes.append(Line(((x.start, y.end), (x.start, y.start), (x.end, y.start)), INK, 1))
    below = y.start + (36 if x_ticks else 18)
    shapes.append(Text((x.start + x.end) / 2, below, x_label, anchor="middle", colour=QUIET))
    return shapes


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres of labels along a line, in the order given: as near as can be to where they are wanted, without overlap.

    Least squares: with the sizes before each label subtracted, "no overlap" reads "not falling", which is isotonic
    regression; neighbours that overlap are pooled and placed around their mean. Source: Ayer, Brunk, Ewing, Reid and
    Silverman 1955, "An empirical distribution function for sampling with incomplete information" (pool adjacent
    violators). Ours moves the outcome into [low, high] afterwards, which is no longer least squares there.
    """
    before = [sum(sizes[:i]) + size / 2 for i, size in enumerate(sizes)]
    pools: list[tuple[float, int]] = []  # (mean, labels in it)
    for target, offset in zip(wanted, before, strict=True):
        mean, count = target - offset, 1
        while pools and pools[-1][0] > mean:
            other, size = pools.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    last = max(low, high - sum(sizes))
    return [min(max(mean, low), last) + offset for mean, offset in zip(means, before, strict=True)]


def below(points: Sequence[Point], ceiling: float) -> list[tuple[Point, ...]]:
    """The parts of a line through points at or below a value; drawn at the edge, the rest would look like a plateau."""
    parts: list[list[Point]] = [[]]
    for i, (x, y) in enumerate(points):
        if i and (points[i - 1][1] > ceiling) != (y > ceiling):
            x0, y0 = points[i - 1]
            parts[-1].append((x0 + (x - x0) * (ceiling - y0) / (y - y0), ceiling))
            if y > ceiling:
                parts.append([])
        if y <= ceiling:
            parts[-1].append((x, y))
    return [tuple(part) for part in parts if len(part) > 1]
