"""A picture as a value: a few kinds of shapes, in pixels, y downwards.

Every picture is laid out once and printed twice (`svg`, `png`), so that the page and the files cannot disagree. A
plotting library would do for the files, but the page must need none, and two layouts of one picture would drift apart.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from memfit.views.colours import GRID, INK, QUIET

__all__ = ["GRID", "INK", "QUIET"]

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]

FONT_SIZE: Final = 12.0
TIMES: Final = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True)
class Polygon:
    """A filled area without an edge."""

    points: tuple[Point, ...]
    fill: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points; `dash` is lengths drawn and left out, in turn."""

    points: tuple[Point, ...]
    colour: str
    width: float = 1.5
    dash: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text.

    Attributes:
        x, y: of the anchor, on the baseline.
        halo: with a white edge, to be read across lines.
    """

    x: float
    y: float
    text: str
    size: float = FONT_SIZE
    anchor: Anchor = "start"
    colour: str = INK
    bold: bool = False
    halo: bool = False


@dataclass(frozen=True, slots=True)
class Dot:
    """A marker; `title` is shown to who points at it, where that is possible."""

    x: float
    y: float
    radius: float
    fill: str
    edge: str = "#ffffff"
    square: bool = False
    title: str = ""


@dataclass(frozen=True, slots=True)
class Hover:
    """An invisible rectangle that tells something to who points at it; left out where nobody can."""

    x: float
    y: float
    width: float
    height: float
    title: str


Shape = Polygon | Line | Text | Dot | Hover


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes from back to front, on white.

    Attributes:
        width, height: in pixels.
        label: the picture in words, for who cannot see it.
    """

    width: float
    height: float
    shapes: tuple[Shape, ...]
    label: str


def box(left: float, top: float, right: float, bottom: float, fill: str) -> Polygon:
    """A filled rectangle."""
    return Polygon(((left, top), (right, top), (right, bottom), (left, bottom)), fill)


def stacked(drawings: Iterable[Drawing], *, gap: float = 24.0) -> Drawing:
    """Drawings one below the other."""
    shapes: list[Shape] = []
    labels: list[str] = []
    width, height = 0.0, 0.0
    for drawing in drawings:
        top = height + gap if shapes else 0.0
        shapes += [_lowered(shape, top) for shape in drawing.shapes]
        labels.append(drawing.label)
        width, height = max(width, drawing.width), top + drawing.height
    return Drawing(width, height, tuple(shapes), " ".join(labels))


def _lowered(shape: Shape, by: float) -> Shape:
    match shape:
        case Polygon() | Line():
            return replace(shape, points=tuple((x, y + by) for x, y in shape.points))
        case Text() | Dot() | Hover():
            return replace(shape, y=shape.y + by)


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """About how wide a text is, in pixels; on the wide side, since the reader's font is not known."""
    return size * sum(map(_character_width, text))


def _character_width(character: str) -> float:
    # DejaVu Sans, the widest of the fonts asked for.
    if character in " .,:;'|!il()[]/":
        return 0.38
    if character in "mwMW%" or unicodedata.east_asian_width(character) in "WF":
        return 1.0
    return 0.72 if character.isupper() else 0.62


def wrapped(text: str, width: float, size: float = FONT_SIZE) -> list[str]:
    """The text on as many lines as it takes; a word wider than a line is shortened."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(shortened(word, width, size))
    return lines


def shortened(text: str, width: float, size: float = FONT_SIZE) -> str:
    """The text on one line, its end replaced by an ellipsis when it does not fit."""
    text = " ".join(text.split())
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def counted(number: int, name: str) -> str:
    """A number of things: "1 step", "2 steps", "1,200 batches"."""
    plural = "" if number == 1 else "es" if name.endswith(("ch", "s", "x")) else "s"
    return f"{number:,} {name}{plural}"
