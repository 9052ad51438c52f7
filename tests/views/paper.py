"""Whether a picture stays on its paper, and its texts apart."""

from __future__ import annotations

from functools import cache

from memfit.views.drawing import Dot, Drawing, Hover, Line, Polygon, Text, text_width


def inside(drawing: Drawing) -> bool:
    """Whether no shape leaves the paper; texts by their estimated width."""
    for shape in drawing.shapes:
        match shape:
            case Polygon() | Line():
                corners = list(shape.points)
            case Text():
                width = text_width(shape.text, shape.size) * 0.9  # the estimate is on the wide side
                left = shape.x - {"start": 0.0, "middle": width / 2, "end": width}[shape.anchor]
                corners = [(left, shape.y - shape.size), (left + width, shape.y)]
            case Dot():
                corners = [(shape.x - shape.radius, shape.y), (shape.x, shape.y + shape.radius)]
            case Hover():
                corners = [(shape.x, shape.y), (shape.x + shape.width, shape.y + shape.height)]
        if not all(-1 <= x <= drawing.width + 1 and -1 <= y <= drawing.height + 1 for x, y in corners):
            return False
    return True


def crossing(drawing: Drawing) -> list[tuple[str, str]]:
    """Pairs of texts that overlap, by the true widths of the letters in the pictures' font."""
    boxes = []
    for t in (s for s in drawing.shapes if isinstance(s, Text)):
        width, height, descent = letters(t.text, t.size, t.bold)
        left = t.x - {"start": 0.0, "middle": width / 2, "end": width}[t.anchor]
        boxes.append((left, left + width, t.y - (height - descent), t.y + descent, t.text))
    return [
        (a[4], b[4])
        for i, a in enumerate(boxes)
        for b in boxes[:i]
        if a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]
    ]


@cache
def letters(text: str, size: float, bold: bool) -> tuple[float, float, float]:  # noqa: FBT001 - a cache's key
    """Width, height and descent in pixels."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    width, height, descent = TextToPath().get_text_width_height_descent(text, font, ismath=False)
    return float(width), float(height), float(descent)
