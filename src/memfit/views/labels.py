"""Placement of labels in pictures: next to what they name, never over other text, and over lines and dots only where no place is free.

Text over text cannot be read, so it is ruled out. Text over a line can, as it has a white outline, so that only costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from memfit.views.drawing import Anchor, Point, Text, text_width

_BOLD: Final = 1.12  # width of bold letters relative to regular ones, in DejaVu Sans
_ASCENT: Final = 0.78  # above the baseline, relative to the font size
_DESCENT: Final = 0.24  # below it
_GAP: Final = 3.0  # pixels between texts
_DISTANCES: Final = (9.0, 15.0, 24.0, 38.0, 60.0)  # pixels from the point
# Above and to the right first: that is free next to a falling curve.
_SIDES: Final = ((1, -1), (1, 0), (1, 1), (-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1))
# Costs, in pixels of distance from the point.
_LINE_COST: Final = 40.0
_AREA_COST: Final = 90.0
_SIDE_COST: Final = 0.5


@dataclass(frozen=True, slots=True)
class Area:
    """An axis-aligned rectangle, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Area, gap: float = 0.0) -> bool:
        """Whether the two share a point, or come nearer than `gap`."""
        return (
            self.left < other.right + gap
            and other.left < self.right + gap
            and self.top < other.bottom + gap
            and other.top < self.bottom + gap
        )

    def contains(self, other: Area) -> bool:
        """Whether the other lies inside."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def grown(self, by: float) -> Area:
        """Larger by so much on every side."""
        return Area(self.left - by, self.top - by, self.right + by, self.bottom + by)

    def intersects(self, start: Point, end: Point) -> bool:
        """Whether the line segment from start to end touches the area. Source: Liang and Barsky 1984, line clipping."""
        enters, leaves = 0.0, 1.0
        for at, by, low, high in (
            (start[0], end[0] - start[0], self.left, self.right),
            (start[1], end[1] - start[1], self.top, self.bottom),
        ):
            if by == 0:
                if not low <= at <= high:
                    return False
                continue
            first, second = sorted(((low - at) / by, (high - at) / by))
            enters, leaves = max(enters, first), min(leaves, second)
        return enters <= leaves


def area_of(text: Text) -> Area:
    """The area that a text covers, estimated generously."""
    width = text_width(text.text, text.size) * (_BOLD if text.bold else 1)
    left = text.x - {"start": 0.0, "middle": width / 2, "end": width}[text.anchor]
    return Area(left, text.y - _ASCENT * text.size, left + width, text.y + _DESCENT * text.size)


def area_of_dot(x: float, y: float, radius: float) -> Area:
    """The area that a dot covers."""
    return Area(x - radius, y - radius, x + radius, y + radius)


def place_label(
    label: Text,
    points: Iterable[Point],
    bounds: Area,
    texts: Sequence[Text],
    *,
    lines: Sequence[Sequence[Point]] = (),
    areas: Sequence[Area] = (),
) -> Text | None:
    """The label at the cheapest place near any of some points.

    Args:
        label: text and style; its position is ignored.
        points: what it names; next to any of them will do.
        bounds: it must stay inside.
        texts: it must not overlap these.
        lines, areas: what it should not cover.

    Returns:
        The label at its place; None where it would overlap a text at every place inside the bounds.
    """
    occupied = [area_of(text) for text in texts]
    segments = [(a, b) for line in lines for a, b in pairwise(line)]
    best: tuple[float, Text] | None = None
    for point in points:
        for distance in _DISTANCES:
            for order, side in enumerate(_SIDES):
                cost = distance + _SIDE_COST * order
                if best is not None and cost >= best[0]:
                    continue
                candidate = _moved(label, point, distance, side)
                area = area_of(candidate)
                if not bounds.contains(area) or any(area.overlaps(text, _GAP) for text in occupied):
                    continue
                with_gap = area.grown(_GAP)
                cost += _LINE_COST * sum(with_gap.intersects(a, b) for a, b in segments)
                cost += _AREA_COST * sum(with_gap.overlaps(other) for other in areas)
                if best is None or cost < best[0]:
                    best = (cost, candidate)
    return best[1] if best is not None else None


def _moved(label: Text, point: Point, distance: float, side: tuple[int, int]) -> Text:
    """The label at one side of a point. On a diagonal it is about as far away as on a side, not farther."""
    across, down = side
    share = 0.75 if across and down else 1.0
    anchor: Anchor = "start" if across > 0 else "end" if across < 0 else "middle"
    middle = point[1] + down * (share * distance + label.size / 3)
    return replace(
        label, x=point[0] + across * share * distance, y=middle + label.size * (_ASCENT - _DESCENT) / 2, anchor=anchor
    )
