"""The parts of a page: one HTML file with its pictures, without scripts and without a single request to anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from memfit import __version__
from memfit.views import colours
from memfit.views.drawing import Drawing
from memfit.views.layout import NARROW, WIDE, Layout
from memfit.views.svg import FONTS, escaped, repainted, svg
from memfit.views.tables import Cells

# The policy makes the browser itself refuse what this page must never do.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

# "of the 20.7 GiB" must not end a line after 20.7.
_NUMBER_WITH_UNIT: Final = re.compile(r"(\d) (%|[KMGTPE]iB|B|bytes|ms|us|ns|s|min|h)(?![\w])")

MOST_OPEN_ROWS: Final = 15  # A longer table is folded.

# Grounds, letters and edges, for a light screen and for a dark one; paper is light.
_LIGHT: Final = {
    "page": "#f6f8fa", "surface": colours.SURFACE, "ink": colours.INK, "quiet": colours.QUIET, "edge": "#d8dee4", "rule": "#e8ecf0",
    "head": "#fafbfc", "link": "#0b5fa5", "marked": "#eaf3fb", "fits": "#1a7f37", "fits-ground": "#e9f7ed",
    "predicted": "#0b5fa5", "predicted-ground": "#eaf3fb", "over": "#b42318", "over-ground": "#fdecea",
}  # fmt: skip
_DARK: Final = {
    "page": "#0d1117", "surface": colours.DARK[colours.SURFACE], "ink": colours.DARK[colours.INK], "quiet": colours.DARK[colours.QUIET],
    "edge": "#30363d", "rule": "#262c34", "head": "#1b2129", "link": "#6cb2ff", "marked": "#152a40", "fits": "#3fb950",
    "fits-ground": "#12261a", "predicted": "#6cb2ff", "predicted-ground": "#12233a", "over": "#ff7b72", "over-ground": "#34181a",
}  # fmt: skip


def _variables(values: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in values.items())


_STYLE: Final = """
:root { color-scheme: light dark; LIGHT }
@media screen and (prefers-color-scheme: dark) { :root { DARK } REPAINTED }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 FONTS; }
main { max-width: 1060px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 14px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 10px; }
.verdict { margin: 0 0 20px; padding: 12px 16px; border-radius: 8px; border-left: 6px solid; font-size: 17px; }
.fits { border-color: var(--fits); background: var(--fits-ground); }
.predicted { border-color: var(--predicted); background: var(--predicted-ground); }
.over { border-color: var(--over); background: var(--over-ground); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; margin: 0; }
.cards > div { background: var(--surface); border: 1px solid var(--edge); border-radius: 8px; padding: 10px 14px; }
.cards dt { font-size: 14px; color: var(--quiet); }
.cards dd { margin: 0; }
.cards .number { font-size: 23px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.cards .remark { font-size: 14px; color: var(--quiet); }
figure, pre, .table { background: var(--surface); border: 1px solid var(--edge); border-radius: 8px; overflow-x: auto; }
figure { margin: 16px 0 0; padding: 16px; }
figure svg { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figure + .table, figure + details { margin-top: 12px; }
figure.small { width: fit-content; max-width: 100%; padding: 16px 8px; }
figure .narrow { display: none; }
table { border-collapse: collapse; width: 100%; font-size: 15px; }
th, td { padding: 6px 14px; text-align: right; border-bottom: 1px solid var(--rule); font-variant-numeric: tabular-nums; white-space: nowrap; }
th { font-weight: 600; }
thead th { color: var(--quiet); background: var(--head); vertical-align: bottom; white-space: normal; }
tbody th { font-weight: 400; }
.words { text-align: left; white-space: normal; }
tbody .words { overflow-wrap: anywhere; min-width: 9em; }
tbody tr:last-child > * { border-bottom: 0; }
tr.marked > * { font-weight: 600; background: var(--marked); }
caption, .remark-line { caption-side: bottom; text-align: left; padding: 8px 14px; color: var(--quiet); font-size: 14px; }
ul { margin: 0; padding-left: 22px; }
li { margin: 3px 0; overflow-wrap: break-word; }
dl.facts { display: grid; grid-template-columns: minmax(120px, max-content) 1fr; gap: 4px 20px; margin: 0; }
dl.facts dt { color: var(--quiet); }
dl.facts dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--link); padding: 4px 0; }
pre { padding: 12px 16px; font-size: 14px; }
footer { margin-top: 40px; color: var(--quiet); font-size: 14px; }
@media (max-width: 760px) {
  main { padding: 18px 12px 36px; }
  h1 { font-size: 22px; }
  .cards { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 8px; }
  .cards > div { padding: 8px 10px; }
  .cards .number { font-size: 20px; }
  figure { padding: 12px; }
  figure .wide { display: none; }
  figure .narrow { display: block; }
  th, td { padding: 5px 8px; }
  table { font-size: 14px; }
  ul ul { padding-left: 16px; }
}
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
            f"<style>{_style()}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{name}</h1>",
            f'<p class="verdict {outcome}">{prose(sentence)}</p>',
            *filter(None, parts),
            f"<footer>{prose(f'Written by memfit {__version__}. Sizes are binary: 1 GiB is 1024 MiB.')}</footer>",
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _style() -> str:
    style = _STYLE.replace("FONTS", FONTS).replace("REPAINTED", repainted("svg "))
    return style.replace("LIGHT", _variables(_LIGHT)).replace("DARK", _variables(_DARK))


def prose(text: str) -> str:
    """Words as they may stand in HTML, where a line never ends between a number and its unit."""
    return _NUMBER_WITH_UNIT.sub("\\1\N{NO-BREAK SPACE}\\2", escaped(text))


def cards(facts: Iterable[tuple[str, str, str]]) -> str:
    """Name, number and remark of each, side by side."""
    items = "".join(
        f'<div><dt>{escaped(name)}</dt><dd class="number">{escaped(number)}</dd>'
        f'<dd class="remark">{prose(remark)}</dd></div>\n'
        for name, number, remark in facts
    )
    return f'<dl class="cards">\n{items}</dl>'


def figure(drawn: Callable[[Layout], Drawing | None], css: str = "") -> str:
    """A picture, laid out for wide screens and for narrow ones, of which the page shows one; "" for none."""
    wide, narrow = drawn(WIDE), drawn(NARROW)
    if wide is None or narrow is None:
        return ""
    opening = f'<figure class="{css}">' if css else "<figure>"
    return f'{opening}\n<div class="wide">\n{svg(wide)}\n</div>\n<div class="narrow">\n{svg(narrow)}\n</div>\n</figure>'


def section(heading: str, inner: str) -> str:
    """A part with its heading; "" where there is nothing in it."""
    return f"<section>\n<h2>{escaped(heading)}</h2>\n{inner}\n</section>" if inner else ""


def listed(texts: Iterable[str]) -> str:
    """A list; "" where it is empty."""
    items = "\n".join(f"<li>{prose(text)}</li>" for text in texts)
    return f"<ul>\n{items}\n</ul>" if items else ""


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Names with what they stand for; "" where there are none."""
    items = "\n".join(f"<dt>{escaped(name)}</dt><dd>{prose(text)}</dd>" for name, text in pairs)
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
    remark = f"<caption>{prose(cells.remark)}</caption>\n" if cells.remark else ""
    body = "<tbody>\n" + "\n".join(rows) + "\n</tbody>"
    return f'<div class="table">\n<table>\n{remark}<thead><tr>{head}</tr></thead>\n{body}\n</table>\n</div>'
