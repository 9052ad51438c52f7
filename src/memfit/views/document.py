"""The parts of a page: one HTML file with its pictures, without scripts and without a single request to anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from memfit import __version__
from memfit.views.drawing import Drawing
from memfit.views.svg import FONTS, escaped, svg
from memfit.views.tables import Cells

# The policy makes the browser itself refuse what this page must never do.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

MOST_OPEN_ROWS: Final = 15  # A longer table is folded.

_STYLE: Final = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f8fa; color: #1f2328; font: 16px/1.5 FONTS; }
main { max-width: 1060px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 14px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 10px; }
.verdict { margin: 0 0 20px; padding: 12px 16px; border-radius: 8px; border-left: 6px solid; font-size: 17px; }
.fits { border-color: #1a7f37; background: #e9f7ed; }
.predicted { border-color: #0b5fa5; background: #eaf3fb; }
.over { border-color: #b42318; background: #fdecea; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 0; }
.cards > div { flex: 1 1 200px; }
.cards.thirds > div { flex-basis: 290px; }
.cards > div { background: #fff; border: 1px solid #d8dee4; border-radius: 8px; padding: 10px 14px; }
.cards dt { font-size: 14px; color: #57606a; }
.cards dd { margin: 0; }
.cards .number { font-size: 23px; font-weight: 600; font-variant-numeric: tabular-nums; }
.cards .remark { font-size: 14px; color: #57606a; }
figure, pre, .table { background: #fff; border: 1px solid #d8dee4; border-radius: 8px; overflow-x: auto; }
figure { margin: 16px 0 0; padding: 16px; }
figure svg { display: block; max-width: 100%; height: auto; min-width: 680px; margin: 0 auto; }
figure + .table, figure + details { margin-top: 12px; }
figure.small { width: fit-content; max-width: 100%; padding: 16px 8px; }
figure.small svg { min-width: 0; margin: 0; }
table { border-collapse: collapse; width: 100%; font-size: 15px; }
th, td { padding: 6px 14px; text-align: right; border-bottom: 1px solid #e8ecf0; font-variant-numeric: tabular-nums; }
th { font-weight: 600; }
thead th { color: #57606a; background: #fafbfc; vertical-align: bottom; }
tbody th { font-weight: 400; overflow-wrap: anywhere; }
tbody tr:last-child > * { border-bottom: 0; }
.words { text-align: left; }
tr.marked > * { font-weight: 600; background: #eaf3fb; }
caption, .remark-line { caption-side: bottom; text-align: left; padding: 8px 14px; color: #57606a; font-size: 14px; }
ul { margin: 0; padding-left: 22px; }
li { margin: 3px 0; overflow-wrap: anywhere; }
dl.facts { display: grid; grid-template-columns: minmax(120px, max-content) 1fr; gap: 4px 20px; margin: 0; }
dl.facts dt { color: #57606a; }
dl.facts dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: #0b5fa5; padding: 4px 0; }
pre { padding: 12px 16px; font-size: 14px; }
footer { margin-top: 40px; color: #57606a; font-size: 14px; }
@media print { body { background: #fff; } figure, .table, .cards > div { break-inside: avoid; } }
"""


def document(title: str, sentence: str, outcome: str, parts: Iterable[str]) -> str:
    """A whole page.

    Args:
        title: of it.
        sentence: the verdict below the title.
        outcome: "fits", "predicted" or "over", for its colour.
        parts: what follows; empty ones are left out.
    """
    name = escaped(title)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}</title>",
            f"<style>{_STYLE.replace('FONTS', FONTS)}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{name}</h1>",
            f'<p class="verdict {outcome}">{escaped(sentence)}</p>',
            *filter(None, parts),
            f"<footer>Written by memfit {escaped(__version__)}. Sizes are binary: 1 GiB is 1024 MiB.</footer>",
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def cards(facts: Iterable[tuple[str, str, str]]) -> str:
    """Name, number and remark of each, side by side."""
    items = [
        f'<div><dt>{escaped(name)}</dt><dd class="number">{escaped(number)}</dd>'
        f'<dd class="remark">{escaped(remark)}</dd></div>\n'
        for name, number, remark in facts
    ]
    return f'<dl class="cards{" thirds" if len(items) % 3 == 0 else ""}">\n{"".join(items)}</dl>'


def figure(drawing: Drawing | None, css: str = "") -> str:
    """A picture; "" for none."""
    if drawing is None:
        return ""
    opening = f'<figure class="{css}">' if css else "<figure>"
    return f"{opening}\n{svg(drawing)}\n</figure>"


def section(heading: str, inner: str) -> str:
    """A part with its heading; "" where there is nothing in it."""
    return f"<section>\n<h2>{escaped(heading)}</h2>\n{inner}\n</section>" if inner else ""


def listed(texts: Iterable[str]) -> str:
    """A list; "" where it is empty."""
    items = "\n".join(f"<li>{escaped(text)}</li>" for text in texts)
    return f"<ul>\n{items}\n</ul>" if items else ""


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Names with what they stand for; "" where there are none."""
    items = "\n".join(f"<dt>{escaped(name)}</dt><dd>{escaped(text)}</dd>" for name, text in pairs)
    return f'<dl class="facts">\n{items}\n</dl>' if items else ""


def folded(name: str, cells: Cells, *, most: int = MOST_OPEN_ROWS) -> str:
    """The table; a long one behind its name, to be opened."""
    if len(cells.rows) <= most:
        return table(cells)
    return f"<details>\n<summary>{escaped(name)}</summary>\n{table(cells)}\n</details>"


def table(cells: Cells) -> str:
    """Rows and columns."""

    def css(column: int) -> str:
        return ' class="words"' if column in cells.words else ""

    head = "".join(f'<th scope="col"{css(i)}>{escaped(text)}</th>' for i, text in enumerate(cells.columns))
    rows = []
    for number, row in enumerate(cells.rows):
        marked = ' class="marked"' if number == cells.marked else ""
        first = f'<th scope="row"{css(0)}>{escaped(row[0])}</th>'
        rest = "".join(f"<td{css(i)}>{escaped(text)}</td>" for i, text in enumerate(row) if i)
        rows.append(f"<tr{marked}>{first}{rest}</tr>")
    remark = f"<caption>{escaped(cells.remark)}</caption>\n" if cells.remark else ""
    body = "<tbody>\n" + "\n".join(rows) + "\n</tbody>"
    return f'<div class="table">\n<table>\n{remark}<thead><tr>{head}</tr></thead>\n{body}\n</table>\n</div>'
