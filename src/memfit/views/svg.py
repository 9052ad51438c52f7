"""Print a drawing as SVG: text, so that it goes into a page as it stands and reads sharply at any size."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final

from memfit.views.colours import DARK
from memfit.views.drawing import Dot, Drawing, Hover, Line, Point, Polygon, Shape, Text

FONTS: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
# Titles and module names are the user's; these characters no XML file may hold, however they are written.
_NOT_XML: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escaped(text: str) -> str:
    """Text as it may stand in XML and HTML, between tags and in quotes."""
    return html.escape(_NOT_XML.sub("\ufffd", text))


def svg(drawing: Drawing) -> str:
    """The drawing as an element for a page."""
    return _element(drawing, "")


def svg_file(drawing: Drawing, *, also_dark: bool = False) -> str:
    """The drawing as a file of its own; `also_dark`: in dark colours where the reader's screen is dark."""
    element = _element(drawing, ' xmlns="http://www.w3.org/2000/svg"', _STYLE if also_dark else "")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + element + "\n"


def repainted(within: str = "") -> str:
    """Rules that give a picture its dark colours: its marks carry the light ones as attributes, which rules outweigh."""
    return " ".join(
        f'{within}[{attribute}="{light}"] {{ {attribute}: {dark}; }}'
        for light, dark in DARK.items()
        for attribute in ("fill", "stroke")
    )


_STYLE: Final = f"<style>@media (prefers-color-scheme: dark) {{ {repainted()} }}</style>"


def _element(drawing: Drawing, namespace: str, style: str = "") -> str:
    width, height = _number(drawing.width), _number(drawing.height)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [
        f'<svg{namespace} role="img" aria-label="{escaped(drawing.label)}" {size} font-family="{FONTS}">',
        *([style] if style else []),
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *map(_shape, drawing.shapes),
        "</svg>",
    ]
    return "\n".join(lines)


def _shape(shape: Shape) -> str:
    match shape:
        case Polygon():
            return f'<polygon points="{_points(shape.points)}" fill="{shape.fill}"/>'
        case Line():
            dash = f' stroke-dasharray="{" ".join(map(_number, shape.dash))}"' if shape.dash else ""
            return (
                f'<polyline points="{_points(shape.points)}" fill="none" stroke="{shape.colour}" '
                f'stroke-width="{_number(shape.width)}" stroke-linejoin="round"{dash}/>'
            )
        case Text():
            weight = ' font-weight="600"' if shape.bold else ""
            halo = (
                ' stroke="#ffffff" stroke-width="4" stroke-linejoin="round" paint-order="stroke"' if shape.halo else ""
            )
            return (
                f'<text x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{_number(shape.size)}" '
                f'text-anchor="{shape.anchor}" fill="{shape.colour}"{weight}{halo}>{escaped(shape.text)}</text>'
            )
        case Dot():
            return _dot(shape)
        case Hover():
            return (
                f'<rect x="{_number(shape.x)}" y="{_number(shape.y)}" width="{_number(shape.width)}" '
                f'height="{_number(shape.height)}" fill="none" pointer-events="all">{_title(shape.title)}</rect>'
            )


def _dot(dot: Dot) -> str:
    paint = f'fill="{dot.fill}" stroke="{dot.edge}" stroke-width="1.5"'
    if dot.square:
        x, y, side = _number(dot.x - dot.radius), _number(dot.y - dot.radius), _number(2 * dot.radius)
        return f'<rect x="{x}" y="{y}" width="{side}" height="{side}" {paint}>{_title(dot.title)}</rect>'
    return (
        f'<circle cx="{_number(dot.x)}" cy="{_number(dot.y)}" r="{_number(dot.radius)}" {paint}>'
        f"{_title(dot.title)}</circle>"
    )


def _title(text: str) -> str:
    return f"<title>{escaped(text)}</title>" if text else ""


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    """Two decimals are finer than any screen."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
