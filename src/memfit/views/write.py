"""Write a report to a file: a page, or a picture with both panels."""

from __future__ import annotations

from pathlib import Path

from memfit.errors import InputError
from memfit.units import one_unit
from memfit.values.report import Report
from memfit.views.drawing import Drawing, Text, shortened, stacked, wrapped
from memfit.views.frontier_picture import frontier_picture
from memfit.views.layout import WIDE
from memfit.views.page import page
from memfit.views.png import png
from memfit.views.svg import svg_file
from memfit.views.timeline_picture import timeline_picture
from memfit.views.verdict import verdict

_MARGIN = 16.0


def write_report(report: Report, path: str | Path) -> None:
    """Write the report in the form that the file's name asks for.

    Args:
        report: what to show.
        path: ".html" for the page, which needs nothing beside it and asks nothing of the network; ".svg" or ".png" for
            the picture. Missing folders are made, a file that is there is replaced.

    Raises:
        InputError: another ending, a place that cannot be written to, or a .png without matplotlib.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".html" | ".htm":
            content = page(report).encode()
        case ".svg":
            content = svg_file(picture(report)).encode()
        case ".png":
            content = png(picture(report))
        case other:
            ending = repr(other) if other else "nothing"
            raise InputError(
                f"{path} ends in {ending}: a report is written as .html (a page), .svg or .png (a picture)"
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write the report {path}: {error.strerror or error}") from error


def picture(report: Report) -> Drawing:
    """Title, verdict and both panels, with sizes in the unit of the budget."""
    with one_unit(report.plan.budget_bytes):
        return _picture(report)


def _picture(report: Report) -> Drawing:
    room = WIDE.width - WIDE.left
    sentence = verdict(report).sentence
    lines = wrapped(sentence, room, 13)
    shapes = [Text(WIDE.left, 34, shortened(report.title, room, 20), size=20, bold=True)]
    shapes += [Text(WIDE.left, 58 + 19 * i, line, 13) for i, line in enumerate(lines)]
    title = Drawing(WIDE.width, 46 + 19 * len(lines), tuple(shapes), f"{report.title}. {sentence}")
    panels = stacked(
        [title, timeline_picture(report.plan, report.rehearsal), frontier_picture(report.plan, report.frontier)], gap=20
    )
    return Drawing(panels.width + _MARGIN, panels.height + _MARGIN, panels.shapes, panels.label)
