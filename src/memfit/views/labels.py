"""Where names go: beside what they name, never over each other, and over lines and dots only where nothing is free.

Text over text cannot be read, so it is ruled out; text over a line can, with its white edge, so it only costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from memfit.views.drawing import Anchor, Point, Text, text_width

_BOLD: Final = 1.12  # bold letters against plain ones, in DejaVu Sans
_ASCENT: Final = 0.78  # of the size, above the baseline and below it
_DESCENT: Final = 0.24
_APART: Final = 3.0
_RINGS: Final = (9.0, 15.0, 24.0, 38.0, 60.0)
# Above and to the right first: there a falling curve leaves room.
_SIDES: Final = ((1, -1), (1, 0), (1, 1), (-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1))
# What a place costs, in pixels that the name is nearer elsewhere.
_LINE_COST: Final = 40.0
_AREA_COST: Final = 90.0
_SIDE_COST: Final = 0.5


@dataclass(frozen=True, slots=True)
class Area:
    """An upright rectangle, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Area, apart: float = 0.0) -> bool:
        """Whether the two share a point, or come nearer than `apart`."""
        return (
            self.left < other.right + apart
            and other.left < self.right + apart
            and self.top < other.bottom + apart
            and other.top < self.bottom + apart
        )

    def holds(self, other: Area) -> bool:
        """Whether the other lies inside."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def grown(self, by: float) -> Area:
        """With so much more on every side."""
        return Area(self.left - by, self.top - by, self.right + by, self.bottom + by)

    def crossed(self, start: Point, end: Point) -> bool:
        """Whether the line from start to end goes through. Source: Liang and Barsky 1984, clipping."""
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
    """What a text covers, on the wide side."""
    width = text_width(text.text, text.size) * (_BOLD if text.bold else 1)
    left = text.x - {"start": 0.0, "middle": width / 2, "end": width}[text.anchor]
    return Area(left, text.y - _ASCENT * text.size, left + width, text.y + _DESCENT * text.size)


def around(x: float, y: float, radius: float) -> Area:
    """What a dot covers."""
    return Area(x - radius, y - radius, x + radius, y + radius)


def beside(
    name: Text,
    points: Iterable[Point],
    room: Area,
    taken: Sequence[Text],
    *,
    lines: Sequence[Sequence[Point]] = (),
    areas: Sequence[Area] = (),
) -> Text | None:
    """The name at the best free place near any of some points.

    Args:
        name: what to write and how; its own place does not count.
        points: where it may belong, any of them.
        room: what it must stay in.
        taken: texts that it must not touch.
        lines, areas: what it had better not cover.

    Returns:
        None when every place in the room touches a text.
    """
    kept_clear = [area_of(text) for text in taken]
    pieces = [(a, b) for line in lines for a, b in pairwise(line)]
    best: tuple[float, Text] | None = None
    for point in points:
        for ring in _RINGS:
            for order, side in enumerate(_SIDES):
                cost = ring + _SIDE_COST * order
                if best is not None and cost >= best[0]:
                    continue
                candidate = _moved(name, point, ring, side)
                covered = area_of(candidate)
                if not room.holds(covered) or any(covered.meets(text, _APART) for text in kept_clear):
                    continue
                near = covered.grown(_APART)
                cost += _LINE_COST * sum(near.crossed(a, b) for a, b in pieces)
                cost += _AREA_COST * sum(near.meets(area) for area in areas)
                if best is None or cost < best[0]:
                    best = (cost, candidate)
    return best[1] if best is not None else None


def _moved(name: Text, point: Point, ring: float, side: tuple[int, int]) -> Text:
    """The name at one side of a point; at a corner it is as far as on a side, not farther."""
    across, down = side
    share = 0.75 if across and down else 1.0
    anchor: Anchor = "start" if across > 0 else "end" if across < 0 else "middle"
    middle = point[1] + down * (share * ring + name.size / 3)
    return replace(
        name, x=point[0] + across * share * ring, y=middle + name.size * (_ASCENT - _DESCENT) / 2, anchor=anchor
    )
