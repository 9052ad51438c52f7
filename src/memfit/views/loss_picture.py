"""The loss of each step, as a small picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from memfit.values.report import StepRecord
from memfit.views.axes import Scale, frame, number_ticks, widened
from memfit.views.colours import PREDICTED
from memfit.views.drawing import Dot, Drawing, Line, Shape, Text
from memfit.views.layout import WIDE, Layout

_WIDTH: Final = 560.0
_MOST_POINTS: Final = 600
_LEAST_RANGE: Final = 0.1  # of the axis, so that a loss that hardly falls looks so


def loss_picture(records: Sequence[StepRecord], layout: Layout = WIDE) -> Drawing | None:
    """Draw the losses; None with fewer than two, which make no curve."""
    points = [(r.step, r.loss) for r in records if math.isfinite(r.loss)]
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    losses = [loss for _, loss in points]
    width = min(layout.width, _WIDTH)
    x = Scale(points[0][0], points[-1][0], 44 if layout.narrow else 70, width - 70)
    y = Scale(*widened(min(losses), max(losses), least=_LEAST_RANGE), 210, 40)
    last_step, last = points[-1]
    shapes: list[Shape] = [Text(0 if layout.narrow else 70, 18, "Loss", size=16, bold=True)]
    shapes += frame(
        x,
        y,
        number_ticks(x.low, x.high, most=4 if layout.narrow else 6, least=1),
        number_ticks(y.low, y.high, most=5),
        "step",
    )
    shapes.append(Line(tuple((x(step), y(loss)) for step, loss in _thinned(points)), PREDICTED, 1.6))
    shapes.append(Dot(x(last_step), y(last), 4, PREDICTED, title=f"step {last_step}: {last:.6g}"))
    shapes.append(Text(x.end + 8, y(last) + 4, f"{last:.4g}", bold=True, colour=PREDICTED))
    label = f"Loss from step {points[0][0]} to step {last_step}: from {losses[0]:.4g} to {last:.4g}."
    return Drawing(width, 256, tuple(shapes), label)


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Few enough points to draw: of each stretch the lowest and the highest, so that no spike is lost."""
    stride = -(-2 * len(points) // _MOST_POINTS)
    if stride <= 2:
        return points
    kept = {points[0], points[-1]}
    for first in range(0, len(points), stride):
        stretch = points[first : first + stride]
        kept |= {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
    return sorted(kept)
