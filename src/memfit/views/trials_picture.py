"""The trials of a search as points: bytes against the objective."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from memfit.units import format_bytes
from memfit.views.axes import Scale, byte_ticks, frame, number_ticks, widened
from memfit.views.colours import PREDICTED
from memfit.views.drawing import INK, QUIET, Dot, Drawing, Shape, Text, counted, wrapped
from memfit.views.layout import WIDE, Layout

_WIDTH: Final = 900.0
_HEIGHT: Final = 380.0


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """One trial.

    Attributes:
        number: of it.
        peak_bytes: predicted.
        value: of the objective.
        params: in words, for who points at it.
    """

    number: int
    peak_bytes: int
    value: float
    params: str


def trials_picture(
    points: Sequence[TrialPoint], objective: str, best: Collection[int], layout: Layout = WIDE
) -> Drawing | None:
    """Draw the trials; None with fewer than two."""
    if len(points) < 2:
        return None
    sizes, values = [point.peak_bytes for point in points], [point.value for point in points]
    width = min(layout.width, _WIDTH)
    left = 52 if layout.narrow else 90
    x = Scale(*widened(min(sizes), max(sizes)), left, width - (12 if layout.narrow else 30))
    y = Scale(*widened(min(values), max(values), least=1e-3), _HEIGHT - 60, 66)
    title = f"{objective} against predicted peak"
    first = 0 if layout.narrow else left
    # Bold letters are wider than `wrapped` takes them to be.
    heads = wrapped(title, (width - first) / 1.12, 16)
    shapes: list[Shape] = [Text(first, 20 + 19 * i, line, size=16, bold=True) for i, line in enumerate(heads)]
    shapes += frame(
        x, y, byte_ticks(x.low, x.high, most=3 if layout.narrow else 6), number_ticks(y.low, y.high), "predicted peak"
    )
    # The best last, so that nothing hides it.
    for point in sorted(points, key=lambda each: each.number in best):
        chosen = point.number in best
        title = f"trial {point.number}: {objective} {point.value:.6g}, {format_bytes(point.peak_bytes)}; {point.params}"
        shapes.append(
            Dot(x(point.peak_bytes), y(point.value), 6 if chosen else 4, PREDICTED if chosen else QUIET, title=title)
        )
        if chosen:
            end = x(point.peak_bytes) > width - 120
            shapes.append(
                Text(
                    x(point.peak_bytes) + (-10 if end else 10), y(point.value) + 4, f"trial {point.number}",
                    anchor="end" if end else "start", colour=INK, bold=True, halo=True,
                )
            )  # fmt: skip
    label = (
        f"{counted(len(points), 'trial')}: {objective} from {min(values):.4g} to {max(values):.4g}, "
        f"peaks from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}."
    )
    return Drawing(width, _HEIGHT, tuple(shapes), label)
