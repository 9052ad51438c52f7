"""Print a drawing as PNG, through matplotlib as a mere rasteriser: no axes, no layout of its own, no global state."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Final

from memfit.errors import InputError
from memfit.views.drawing import Dot, Drawing, Hover, Line, Polygon, Shape, Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS: Final = 0.72  # printer's points in a pixel, at 100 pixels to the inch
_SHARPNESS: Final = 2.0  # real pixels to a pixel, for today's screens and for print


def png(drawing: Drawing) -> bytes:
    """The drawing as the content of a PNG file.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "a .png picture needs matplotlib, which is not installed: pip install 'memfit[pictures]', "
            "or ask for .svg or .html, which need nothing"
        ) from error
    figure = Figure(figsize=(drawing.width / 100, drawing.height / 100), dpi=100 * _SHARPNESS, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.set_axis_off()
    for order, shape in enumerate(drawing.shapes):
        _draw(axes, shape, order)
    out = io.BytesIO()
    with warnings.catch_warnings():
        # A title may be in letters that matplotlib's font lacks; boxes in their place are no reason for a warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # Not savefig: there the user's matplotlibrc could crop the picture.
        canvas.print_png(out, metadata={"Software": "memfit"})  # type: ignore[no-untyped-call]  # matplotlib has no type here
    return out.getvalue()


def _draw(axes: Axes, shape: Shape, order: int) -> None:
    from matplotlib import patches, patheffects

    match shape:
        case Polygon():
            axes.add_patch(patches.Polygon(shape.points, closed=True, facecolor=shape.fill, linewidth=0, zorder=order))
        case Line():
            style = (0, tuple(n / shape.width for n in shape.dash)) if shape.dash else "solid"
            axes.plot(
                [x for x, _ in shape.points],
                [y for _, y in shape.points],
                color=shape.colour,
                linewidth=shape.width * _POINTS,
                linestyle=style,
                solid_joinstyle="round",
                zorder=order,
            )
        case Text():
            text = axes.text(
                shape.x,
                shape.y,
                shape.text,
                fontsize=shape.size * _POINTS,
                fontfamily="DejaVu Sans",
                fontweight="bold" if shape.bold else "normal",
                horizontalalignment={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                verticalalignment="baseline",
                color=shape.colour,
                parse_math=False,
                zorder=order,
            )
            if shape.halo:
                text.set_path_effects([patheffects.withStroke(linewidth=4 * _POINTS, foreground="white")])
        case Dot():
            axes.plot(
                [shape.x],
                [shape.y],
                marker="s" if shape.square else "o",
                markersize=2 * shape.radius * _POINTS,
                markerfacecolor=shape.fill,
                markeredgecolor=shape.edge,
                markeredgewidth=1.5 * _POINTS,
                zorder=order,
            )
        case Hover():
            pass  # Nobody can point at a file.
